"""Memory in reference cycles is said, and where it comes from."""

import gc

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import TraceError
from autosac.step.training_step import training_step
from autosac.verification.measuring import measure_peak

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


class _Deletes(_Keeps):
    @staticmethod
    def backward(ctx, gradient):
        result = ctx.result
        del ctx.result
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


@pytest.mark.parametrize("function", [_Saves, _Deletes])
def test_what_is_saved_or_deleted_as_it_should_be_is_no_cycle(function):
    profiled(function.apply)  # warnings fail tests


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_as_many_collections_as_are_advised_keep_the_peak_as_predicted():
    with pytest.warns(UserWarning, match=r"call `gc.collect\(\)` 3 times"):
        profile = profiled(_Keeps.apply)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    model = nn.Sequential(*(Block(_Keeps.apply) for _ in range(3)))
    plan.apply(model)
    batch = torch.randn(64, WIDTH)

    def step():
        return training_step(model, (batch,), {}, loss_fn=torch.sum, optimizer=None)

    def earlier_steps():
        for _ in range(3):
            step()
            model.zero_grad()
            for _ in range(3):
                gc.collect()

    _, peak_bytes = measure_peak(
        step,
        device=batch.device,
        held=lambda: [*model.parameters(), batch, *(b.latest for b in model)],
        warm_up=earlier_steps,
    )

    assert peak_bytes == pytest.approx(plan.peak_bytes, abs=64)


def test_a_higher_order_op_is_refused_by_its_name():
    def choose(x):
        return torch.cond(x.sum() > 0, torch.relu, torch.sigmoid, (x,))

    with pytest.raises(TraceError, match="calls `cond`, which compiles"):
        profiled(choose)
