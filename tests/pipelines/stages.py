"""Small models that are cut into stages."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from autosac.pipelines.stage_steps import stage_step
from benchmarks.stage_ranks import Recipe

ROWS, LENGTH, WIDTH, NUM_TOKENS = 4, 16, 32, 101


class Mlp(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, factor * WIDTH)
        self.down = nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def language_model(num_blocks=8):
    blocks = [Attention() if i % 2 else Mlp(2 + i % 3) for i in range(num_blocks)]
    head = nn.Linear(WIDTH, NUM_TOKENS)
    embedding = nn.Embedding(NUM_TOKENS, WIDTH)
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(WIDTH), head)


def short_language_model():
    return language_model(3)


def tokens(num_micro_batches):
    generator = torch.Generator().manual_seed(3)
    size = (num_micro_batches * ROWS, LENGTH)
    return tuple(torch.randint(NUM_TOKENS, size, generator=generator) for _ in "xy")


def language_loss(output, targets):
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    def __init__(self, narrow, wide):
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1)
        self.beside = nn.Conv2d(narrow, wide, 1, stride=2)

    def forward(self, x):
        y = self.second(functional.silu(self.norm(self.first(x))))
        return functional.silu(y + self.beside(x))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def convolutions():
    blocks = [Residual(3, 8), Residual(8, 16), Residual(16, 32), Residual(32, 32)]
    return nn.Sequential(*blocks, Mean(), nn.Linear(32, 10))


def images(num_micro_batches):
    generator = torch.Generator().manual_seed(4)
    pictures = torch.randn(3 * num_micro_batches, 3, 32, 32, generator=generator)
    return pictures, torch.randint(10, (3 * num_micro_batches,), generator=generator)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


LANGUAGE = Recipe(make_model=language_model, make_batch=tokens, loss_fn=language_loss)
SHORT = replace(LANGUAGE, make_model=short_language_model)
CONVOLUTIONS = Recipe(
    make_model=convolutions,
    make_batch=images,
    loss_fn=functional.cross_entropy,
    make_optimizer=momentum,
)


def _on_free_link(profile):
    """The step where it pays to move tensors as small as these."""
    link = profile.device.link.without_issue
    return replace(profile, device=replace(profile.device, link=link))


def traced(recipe, starts, *, measured=True, calls=None):
    """The steps of a recipe's stages; if measured, with workspaces as ranks have them.

    Measured times differ from run to run. ``calls`` are shared by the traces.
    """
    passed, target = recipe.make_batch(1)
    steps, modules = [], recipe.stages(starts)
    for i, module in enumerate(modules):
        is_last = i == len(modules) - 1
        step = stage_step(
            module,
            passed,
            loss_fn=recipe.loss_fn if is_last else None,
            target=target,
            optimizer=recipe.make_optimizer,
            calls=calls,
        )
        if measured:
            with torch.backends.mkldnn.flags(enabled=False):
                step = step.calibrated(cache=False)
        steps.append(step.each(_on_free_link))
        passed = module(passed).detach().requires_grad_()
    return steps
