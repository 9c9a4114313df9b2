"""Products of a batch and one matrix, which PyTorch takes otherwise under modes."""

import pytest
import torch

import autosac
from autosac import _compat, _compat_products
from autosac.verification.measuring import differences

ROWS, INNER, COLUMNS = 3, 7, 5  # small products round as they are cut


class Ops(_compat.PlainDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Others(_compat.DispatchMode):
    __torch_dispatch__ = Ops.__torch_dispatch__


def batch(size, *shape, trained=False):
    return torch.rand(size, *shape, requires_grad=trained)


def graph(tensor):
    """Names of the autograd functions behind a tensor, but for those of views."""
    names, left = [], [tensor.grad_fn]
    while left:
        function = left.pop()
        if function is not None:
            names.append(function.name())
            left += [one for one, _ in function.next_functions]
    views = ("View", "Reshape", "Unsafe")
    return sorted(name for name in names if not name.startswith(views))


PAIRS = {
    "batch and one": lambda: (batch(4, ROWS, INNER, trained=True), batch(1, INNER, 7)),
    "one and batch": lambda: (batch(1, ROWS, INNER), batch(4, INNER, 7, trained=True)),
    "trained one": lambda: (
        batch(4, ROWS, INNER),
        batch(1, INNER, COLUMNS, trained=True),
    ),
    "two batches": lambda: (batch(4, ROWS, INNER, trained=True), batch(4, INNER, 7)),
    "matrix": lambda: (batch(4, ROWS, INNER, trained=True), torch.rand(INNER, 7)),
    "no batch": lambda: (batch(0, ROWS, INNER, trained=True), batch(1, INNER, 7)),
    "many": lambda: (batch(4, 2, ROWS, INNER, trained=True), batch(1, INNER, 7)),
}


@pytest.mark.parametrize("mode", [Ops, Others])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_products_under_a_mode_are_those_without(pair, autocast, mode):
    left, right = PAIRS[pair]()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = left @ right
        with mode():
            watched = left @ right

    assert torch.equal(plain, watched)
    assert graph(plain) == graph(watched)
    assert not _compat_products.are_plain()  # outside


class Warp(torch.nn.Module):
    """Multiplies a batch by constant matrices, as geometric transformations do."""

    def __init__(self):
        super().__init__()
        self.before = torch.nn.Linear(INNER, INNER)
        self.after = torch.nn.Linear(COLUMNS, COLUMNS)
        generator = torch.Generator().manual_seed(1)
        self.register_buffer(
            "basis", torch.rand(1, INNER, COLUMNS, generator=generator)
        )

    def forward(self, x):
        x = torch.nn.functional.gelu(self.before(x)).exp()
        return torch.nn.functional.gelu(self.after((x @ self.basis).sin()))


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(Warp(), torch.nn.Linear(COLUMNS, INNER), Warp())


def trained(plan):
    """Gradients of three steps."""
    planned = model()
    if plan is not None:
        plan.apply(planned)
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        planned(torch.ones(8, ROWS, INNER).cumsum(0) / 8).square().sum().backward()
        optimizer.step()
    return {name: one.grad for name, one in planned.named_parameters()}


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_gradients_behind_products_of_a_batch_are_those_without_a_plan(share):
    inputs = torch.ones(8, ROWS, INNER).cumsum(0) / 8
    profile = autosac.profile(model(), inputs, loss_fn=lambda out: out.square().sum())
    floor, plain = autosac.floor(profile), profile.baseline_peak_bytes
    plan = autosac.plan(profile, memory_budget=int(floor + share * (plain - floor)))

    assert not differences(trained(None), trained(plan))
    assert bool(plan.policy) == (share < 1)


def test_memory_of_products_of_a_batch_is_predicted():
    inputs = torch.ones(8, ROWS, INNER)

    def loss_fn(output):
        return output.square().sum()

    profile = autosac.profile(model(), inputs, loss_fn=loss_fn)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    found = autosac.verify(
        plan, model, lambda: inputs, loss_fn=loss_fn, timing_rounds=1
    )

    assert found.identical
    assert found.measured_peak_bytes == plan.peak_bytes
    assert found.baseline_peak_bytes == profile.baseline_peak_bytes
