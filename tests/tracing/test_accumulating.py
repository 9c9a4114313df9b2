"""Gradients are summed in place in the trace where autograd does in a real step."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autosac

SIZE = 6
KINDS = {"aten::add": False, "aten::add_": True}


def three_uses(x):
    return x.sin().mul(2).sum() + x.cos().mul(3).sum() + x.exp().mul(4).sum()


def residual(x):
    return ((x + x.sin()) * 2).sin().sum()


def same_gradient_twice(x):
    return ((x + x) * 2).sin().sum()


def transposed(x):
    return ((x + x.t().sin().t()) * 2).sin().sum()


def rows(x):
    return sum((x[i] * 2).sin().sum() for i in range(3))


def halves(x):
    first, second = x.chunk(2)
    return (first.sin() * second).sum() + x.exp().sum()


def expanded_last(x):
    return x.sum() + (x * 2).sin().sum()


def expanded_first(x):
    return (x * 2).sin().sum() + x.sum()


def residual_chain(x):
    for _ in range(3):
        x = x + (x.sin() @ x.cos())
    return (x * 2).sin().sum()


FUNCTIONS = (
    three_uses,
    residual,
    same_gradient_twice,
    transposed,
    rows,
    halves,
    expanded_last,
    expanded_first,
    residual_chain,
)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE, SIZE))
        self.function = function

    def forward(self, x):
        return self.function(self.weight * x)


def really_in_place(function):
    """For every sum that backward makes: is it in place?"""
    loss = Model(function)(torch.ones(SIZE, SIZE))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recording:
        loss.backward()
    return [KINDS[event.name] for event in recording.events() if event.name in KINDS]


def traced_in_place(function, **options):
    traced = autosac.profile(Model(function), torch.ones(SIZE, SIZE), **options)
    kinds = {"aten.add.Tensor": False, "aten.add_.Tensor": True}
    backward = [op.name for op in traced.tape.ops if op.phase == "backward"]
    return [kinds[name] for name in backward if name in kinds]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sums_are_made_in_place_where_autograd_does(function):
    expected = really_in_place(function)

    assert expected
    assert traced_in_place(function) == expected


@pytest.mark.parametrize("function", FUNCTIONS)
def test_so_they_are_for_a_gpu_that_is_not_present(function):
    assert traced_in_place(function, device="h100") == really_in_place(function)


class Doubling(torch.autograd.Function):
    """Its backward makes a sum of its own, of tensors that nobody else holds."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sin() + gradient.cos()


def test_a_sum_within_a_backward_function_makes_a_new_tensor():
    assert traced_in_place(lambda x: Doubling.apply(x).sin().sum()) == [False]


class Towers(nn.Module):
    """Residual blocks that two inputs go through, one after the other."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 64, dropout=0.1, batch_first=True)
            for _ in range(3)
        )

    def forward(self, one, other):
        for block in self.blocks:
            one = block(one)
        for block in self.blocks:
            other = block(other)
        return one.mean(1) @ other.mean(1).T


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_rerun_in_backward_makes_sums_of_its_own(share, one_thread):
    # A residual is added in it, to what only the rerun holds: the dry run confirms it.
    inputs = torch.randn(4, 12, 16), torch.randn(4, 24, 16)
    step = autosac.profile(Towers(), inputs, loss_fn=torch.sum)
    floor, highest = autosac.floor(step), step.baseline_peak_bytes

    plan = autosac.plan(step, memory_budget=int(floor + share * (highest - floor)))

    assert plan.dry_run and plan.policy
