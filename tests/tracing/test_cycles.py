"""Memory in reference cycles is said, and where it comes from."""

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import TraceError

WIDTH = 32


class _Keeps(torch.autograd.Function):
    """Keeps its result as an attribute, which holds the function in turn."""

    @staticmethod
    def forward(ctx, x):
        ctx.result = torch.sigmoid(x)
        return ctx.result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.result * (1 - ctx.result)


class _Saves(_Keeps):
    @staticmethod
    def forward(ctx, x):
        result = torch.sigmoid(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * result * (1 - result)


def _in_a_list(x):
    kept = [torch.sigmoid(x)]
    kept.append(kept)
    return kept[0]


class Block(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH), activation
        self.latest = None

    def forward(self, x):
        self.latest = self.linear(x).detach()  # no cycle
        return x + self.activation(self.linear(x))


def profiled(activation):
    model = nn.Sequential(*(Block(activation) for _ in range(3)))
    return autosac.profile(model, torch.randn(64, WIDTH), loss_fn=torch.sum)


@pytest.mark.parametrize("activation", [_Keeps.apply, _in_a_list])
def test_a_step_that_leaves_cycles_is_said_with_their_bytes(activation):
    assert 3 * 64 * WIDTH * 4 == 24 * 1024
    with pytest.warns(
        UserWarning, match=r"24.0 KiB in reference cycles, .* module `0`"
    ):
        profiled(activation)


def test_what_is_saved_as_it_should_be_is_no_cycle():
    profiled(_Saves.apply)  # warnings fail tests


def test_a_higher_order_op_is_refused_by_its_name():
    def choose(x):
        return torch.cond(x.sum() > 0, torch.relu, torch.sigmoid, (x,))

    with pytest.raises(TraceError, match="calls `cond`, which compiles"):
        profiled(choose)
