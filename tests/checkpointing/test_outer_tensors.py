"""Ops that change a tensor from outside their unit, or read one that it has changed."""

import warnings

import pytest
import torch
from torch import nn

import autosac
from autosac.pipelines.stage_steps import stage_step

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH = 64, 32


@torch.library.custom_op("autosac_tests::scaled_by_sum", mutates_args=("total",))
def scaled_by_sum(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_(x.abs().mean())
    return x * total


@scaled_by_sum.register_fake
def _(x, total):
    return torch.empty_like(x)


class Block(nn.Module):
    does_more = False

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("level", torch.ones(()))

    def forward(self, x):
        hidden = torch.sin(self.mixed(torch.tanh(self.up(x))))
        if self.does_more:
            hidden = torch.cos(hidden) * 2
        return x + self.down(torch.cos(hidden))


class Needed(Block):
    def mixed(self, hidden):
        return torch.sin(hidden) * scaled_by_sum(hidden.detach(), self.level)


class Unneeded(Block):
    def mixed(self, hidden):
        scaled = scaled_by_sum(hidden.detach(), self.level)
        return torch.sin(hidden) + scaled.sign()


class ReadsIt(Block):
    def mixed(self, hidden):
        self.level.mul_(0.9).add_(0.1 * hidden.detach().abs().mean())
        return torch.sin(hidden / self.level)


def loss_fn(output):
    return output.square().mean()


@pytest.mark.parametrize("block", [Needed, Unneeded, ReadsIt])
def test_it_changes_once_and_the_rest_is_rerun_also_where_a_unit_departs(block):
    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(block(), block())

    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    profile = autosac.profile(make_model(), x, loss_fn=loss_fn)
    profile = autosac.calibrate(profile, progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    done = autosac.verify(
        *(plan, make_model, lambda: x), loss_fn=loss_fn, timing_rounds=0
    )

    def departed(plans):
        model = make_model()
        for one in plans:
            one.apply(model)
        for part in model:
            part.does_more = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each unit says that it departs
            loss_fn(model(x)).backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    assert plan.policy
    assert not done.differences
    assert done.measured_peak_bytes <= plan.budget_bytes
    assert all(map(torch.equal, departed([plan]), departed([])))


class Reader(nn.Module):
    def __init__(self, level):
        super().__init__()
        self.linear, self.level = nn.Linear(WIDTH, WIDTH), level

    def forward(self, x):
        return torch.cos(torch.tanh(self.linear(x)) / self.level)


class ChangesBefore(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.ones(()))
        self.inner = Reader(self.level)

    def forward(self, x):
        self.level.mul_(0.9)
        return self.inner(x)


def test_a_stage_saves_what_reads_a_tensor_that_other_micro_batches_change():
    x = torch.ones(ROWS, WIDTH)
    unit = {
        u.fqn: u
        for u in stage_step(ChangesBefore(), x, loss_fn=None).first.units.candidates
    }["inner"]

    pinned = [bool(group.pinned) for group in unit.groups]
    assert sum(pinned) == 1  # the division
