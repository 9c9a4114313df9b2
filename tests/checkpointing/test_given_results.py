"""Ops of a unit that write into memory which is there, given as ``out``."""

import pytest
import torch
from torch import nn

import autosac

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 64, 32


class Block(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write = write
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        noise = torch.empty(ROWS, 4 * WIDTH)
        self.write(noise)
        return x + self.down(torch.tanh(self.up(x) * noise))


def drawn_as_normal(noise):
    torch.randn(noise.shape, out=noise)


def drawn_as_uniform(noise):
    torch.rand(noise.shape, out=noise)


def resized_to_its_size(noise):
    noise.resize_(noise.shape).fill_(0.5)


@pytest.mark.parametrize(
    "write", [drawn_as_normal, drawn_as_uniform, resized_to_its_size]
)
def test_a_unit_may_write_into_memory_that_it_has_made(write):
    def make_model():
        return nn.Sequential(*[Block(write) for _ in range(3)])

    def loss_fn(output):
        return output.square().mean()

    x = torch.randn(ROWS, WIDTH)
    profile = autosac.profile(make_model(), x, loss_fn=loss_fn)
    profile = autosac.calibrate(profile, progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    done = autosac.verify(
        *(plan, make_model, lambda: x), loss_fn=loss_fn, timing_rounds=0
    )

    assert plan.policy
    assert not done.differences
    assert done.measured_peak_bytes <= plan.budget_bytes
