"""Loops that scale their losses take what was planned, and a few numbers."""

from types import SimpleNamespace

import pytest
import torch

import autosac
from autosac.integrations import budgets
from autosac.integrations.budgets import SCALER_BYTES
from autosac.verification.measuring import measure_peak

pytestmark = pytest.mark.usefixtures("one_thread")
LARGEST_NORM = 1.0


def make_model(num_layers, width):
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())
        for _ in range(num_layers)
    ]
    return torch.nn.Sequential(*layers)


def loss_of(output):
    return output.float().square().mean()


class Loop:
    """Steps with a `GradScaler`, as the documentation of PyTorch writes them."""

    def __init__(self, model, x, init_scale, *, fused=False):
        self.model, self.x = model, x
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        self.norms = []

    def step(self):
        with torch.autocast("cpu", dtype=torch.float16):
            output = self.model(self.x)
        loss = loss_of(output)
        self.scaler.scale(loss).backward()
        del output
        self.scaler.unscale_(self.optimizer)
        parameters = self.model.parameters()
        self.norms.append(torch.nn.utils.clip_grad_norm_(parameters, LARGEST_NORM))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def held(self):
        yield from self.model.parameters()
        yield self.x
        for state in self.optimizer.state.values():
            yield from state.values()

    def peak(self):
        return measure_peak(self.step, device="cpu", held=self.held, warm_up=self.step)[
            1
        ]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("num_layers", "width", "batch"),
    [(6, 64, 512), (2, 256, 4)],
    ids=["activations", "optimizer"],
)
def test_scaling_adds_a_few_numbers_to_a_planned_step(num_layers, width, batch, fused):
    x = torch.randn(batch, width)
    model = make_model(num_layers, width)
    profile = autosac.profile(
        model,
        x,
        loss_fn=loss_of,
        optimizer=torch.optim.AdamW(model.parameters(), fused=fused),
        autocast="fp16",
        clip_grad_norm=LARGEST_NORM,
    )
    # Some CPUs' products in half precision take workspaces.
    profile = autosac.calibrate(profile, progress=False)
    lowest, highest = autosac.floor(profile), profile.baseline_peak_bytes
    plan = autosac.plan(profile, memory_budget=(lowest + highest) // 2)
    plain = Loop(make_model(num_layers, width), x, 256.0, fused=fused)
    loop = Loop(plan.apply(model), x, 256.0, fused=fused)

    assert 0 <= plain.peak() - highest <= SCALER_BYTES
    assert 0 <= loop.peak() - plan.peak_bytes <= SCALER_BYTES
    assert loop.norms == plain.norms
    assert all(map(torch.equal, model.parameters(), plain.model.parameters()))


def test_a_skipped_step_takes_no_more():
    x = torch.randn(512, 64)
    loop = Loop(make_model(6, 64), x, 256.0)
    whole = loop.peak()
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    before = [parameter.clone() for parameter in loop.model.parameters()]
    skipped = loop.peak()

    assert all(map(torch.equal, before, loop.model.parameters()))
    assert skipped <= whole


def test_a_prepared_optimizer_with_a_scaler_leaves_room_for_it():
    model = make_model(2, 16)
    own = torch.optim.AdamW(model.parameters())
    optimizer = SimpleNamespace(optimizer=own, scaler=torch.amp.GradScaler("cpu"))

    plan = autosac.plan_replicas(
        model, torch.ones(4, 16), memory_budget=2**30, optimizer=optimizer
    )

    assert (
        plan.budget_bytes == 2**30 - budgets.Loop.scalars_bytes - budgets.SCALER_BYTES
    )
