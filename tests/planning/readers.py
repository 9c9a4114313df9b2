"""Readers of texts with and without padding, and trainings of them."""

import functools

import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac.step.batch_signatures import signature_of
from autosac.step.optimizer_state import optimizer_tensors
from autosac.step.training_step import training_step
from autosac.storages import storage_bytes
from autosac.verification.measuring import capture_state, measure_peak

WIDTH, ROWS, NUM_TOKENS = 16, 4, 30
PLANNED = ((24, True), (24, False), (12, True), (6, True))  # length, padded


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, bias):
        y = self.norm(x)
        scores = y @ y.transpose(1, 2)
        if bias is not None:
            scores = scores + bias
        y = torch.softmax(scores, -1) @ y
        return x + self.drop(self.down(functional.gelu(self.up(y))))


class Reader(nn.Module):
    """Branches on whether there is padding, as Transformers' masks do."""

    def __init__(self, num_blocks=3):
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        bias = None
        if not bool(mask.all()):
            bias = torch.zeros(mask.shape).masked_fill(~mask, -1e4)[:, None]
        for block in self.blocks:
            x = block(x, bias)
        return {"loss": functional.cross_entropy(self.head(x).mT, tokens)}


def make_model():
    torch.manual_seed(0)
    return Reader()


def batch_of(length, padded=True, rows=ROWS):
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(NUM_TOKENS, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.bool)
    if padded:
        mask[0, length // 2 :] = False
    return {"tokens": tokens, "mask": mask}


BATCHES = [batch_of(*kind) for kind in PLANNED]


def budget_of(share, batch=BATCHES[0], **options):
    traced = autosac.profile(make_model(), batch, optimizer="adamw", **options)
    lowest = autosac.floor(traced)
    return int(lowest + share * (traced.baseline_peak_bytes - lowest))


@functools.cache
def plan_of_readers():
    """The plan for all kinds of batches, made once for all modules of tests."""
    return autosac.plan(
        make_model(), BATCHES, memory_budget=budget_of(0.2), optimizer="adamw"
    )


def is_for(plan, batch):
    return signature_of((), batch) in plan.signatures


class Training:
    def __init__(self, plan=None, model=None):
        self.model = make_model() if model is None else model
        if plan is not None:
            plan.apply(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        torch.manual_seed(3)
        self.random_state = torch.get_rng_state()

    def run(self, act):
        """Do something in this training's own stream of random numbers."""
        torch.set_rng_state(self.random_state)
        self.model.zero_grad()
        loss = act(self.model, self.optimizer)
        self.random_state = torch.get_rng_state()
        return capture_state(self.model, self.optimizer, loss)

    def peak_bytes(self, batch):
        lasting = [*self.model.parameters(), *self.model.buffers(), *batch.values()]
        self.model.zero_grad()
        return measure_peak(
            lambda: step(batch)(self.model, self.optimizer),
            device="cpu",
            persistent_bytes=storage_bytes(
                [*lasting, *optimizer_tensors(self.optimizer)]
            ),
        )[1]


def step(batch):
    return lambda model, optimizer: training_step(
        model, (), batch, loss_fn=None, optimizer=optimizer
    )


def accumulated(batches):
    def act(model, optimizer):
        model.zero_grad()
        losses = []
        for batch in batches:
            losses.append(model(**batch)["loss"])
            losses[-1].backward()
        optimizer.step()
        return sum(losses).detach()

    return act
