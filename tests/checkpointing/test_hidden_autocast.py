"""Ops whose kernels run others do under a plan what they do without, in autocast."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH, SIDE = 256, 16, 4


@torch.library.custom_op("autosac_tests::twice", mutates_args=())
def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Two products, which autocast rounds."""
    return (x @ weight @ weight).to(x.dtype)


@twice.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    return gradient @ weight.t() @ weight.t(), (x.t() @ gradient) @ weight.t()


twice.register_autograd(_backward, setup_context=_keep)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(twice(self.linear(x).float().exp(), self.weight)) + x


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.bilinear(x, x.sin())) + x


class Transforms(nn.Module):
    """A spatial transformer."""

    def __init__(self):
        super().__init__()
        self.angles = nn.Linear(WIDTH, 6)
        self.out = nn.Linear(SIDE * SIDE, WIDTH)

    def forward(self, x):
        angles = self.angles(x).float().view(-1, 2, 3)
        image = x[:, :1, None, None].sin().expand(-1, 1, SIDE, SIDE)
        grid = functional.affine_grid(angles, list(image.shape), align_corners=False)
        moved = functional.grid_sample(image.exp(), grid, align_corners=False)
        return torch.tanh(self.out(moved.flatten(1))).float() + x


def inputs():
    return torch.randn(ROWS, WIDTH)


def loss(output):
    return output.float().square().mean()


# What a kernel takes inside is measured without autocast, and what differs is said.
@pytest.mark.slow_but_first
@pytest.mark.filterwarnings("ignore:A real step takes")
@pytest.mark.parametrize("kind", [Custom, Bilinear, Transforms])
def test_a_plan_keeps_every_bit_of_an_op_that_autocast_changes_inside(kind):
    def make_model():
        return nn.Sequential(*(kind() for _ in range(3)))

    profile = autosac.profile(
        make_model(), inputs(), loss_fn=loss, autocast=torch.bfloat16
    )
    profile = autosac.calibrate(profile, progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    assert plan.recompute_ms > 0

    done = autosac.verify(
        plan, make_model, inputs, loss_fn=loss, autocast="bf16", timing_rounds=0
    )

    assert done.identical, done.differences
