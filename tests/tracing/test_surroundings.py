"""Planning under `torch.no_grad` or autocast: the step is that of a training."""

import pytest
import torch
from torch import nn

import autosac
from tests.test_habits import ROWS, WIDTH, Block

pytestmark = pytest.mark.usefixtures("one_thread")


class Routes(Block):
    """Training decides how many rows it works on."""

    def forward(self, x):
        chosen = (self.up(x)[:, 0] > 0).nonzero().squeeze(1)
        return x.index_add(0, chosen, super().forward(x[chosen]))


def blocks(block):
    return nn.Sequential(block(), block(), block())


def rows():
    return torch.randn(ROWS, WIDTH)


def mean_square(output):
    return output.square().mean()


def planned(block):
    torch.manual_seed(0)
    profile = autosac.profile(
        blocks(block),
        rows(),
        loss_fn=mean_square,
        optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    )
    profile = autosac.calibrate(profile, progress=False)
    floor, highest = autosac.floor(profile), profile.baseline_peak_bytes
    return floor, highest, autosac.plan(profile, memory_budget=(floor + highest) // 2)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("block", [Block, Routes])
@pytest.mark.parametrize(
    "around", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_what_is_on_around_planning_is_not_of_the_step(around, block):
    expected = planned(block)
    with around():
        enabled = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        floor, highest, plan = planned(block)
        now = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    assert now == enabled
    assert (floor, highest) == expected[:2]
    assert plan.policy == expected[2].policy


def test_what_is_on_around_verifying_is_not_of_the_step():
    *_, plan = planned(Block)
    options = {"make_optimizer": "adafactor", "loss_fn": mean_square}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        done = autosac.verify(
            plan, lambda: blocks(Block), rows, timing_rounds=0, **options
        )

    assert not done.differences
    assert done.measured_peak_bytes <= plan.budget_bytes
