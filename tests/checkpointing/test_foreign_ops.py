"""Ops that are not PyTorch's own: what they draw without saying so is drawn again."""

import random
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import autosac
from autosac._compat_dispatch import traits
from autosac.step.equal_results import differ, numbers_in
from autosac.step.random_streams import stream_states

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 64, 16
OWN = torch.Generator()
DRAWS = {
    "torch": torch.rand_like,
    "dropout": lambda x: nn.functional.dropout(torch.ones_like(x), 0.3),
    "Python": lambda x: random.random(),
    "NumPy": lambda x: float(np.random.rand()),
    "a generator of its own": lambda x: torch.rand(x.shape, generator=OWN),
}


def _backward(ctx, grad):
    (output,) = ctx.saved_tensors
    return grad * output.cos(), None


@torch.library.custom_op("autosac_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Noise without a tag that says so."""
    if kind == "a generator of its own":
        return x * torch.rand(x.shape, generator=OWN)
    return x * DRAWS[kind](x)


noisy.register_fake(lambda x, kind: torch.empty_like(x))
noisy.register_autograd(
    _backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Noisy(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.more = False

    def forward(self, x):
        y = noisy(self.wide(x), self.kind).tanh()
        if self.more:
            y = y.sin()
        return x + self.narrow(y)


def make_model(kind):
    torch.manual_seed(0)
    return nn.Sequential(*(Noisy(kind) for _ in range(3)))


def loss(output):
    return output.square().mean()


def states():
    return {**stream_states(), "own": OWN.get_state()}


def step(model, x):
    """Gradients of a step, and where it left the streams."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    OWN.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = None
    loss(model(x)).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {**grads, **states()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert [n for n in left if not torch.equal(left[n], right[n])] == []


def floor_plan(kind, x):
    profile = autosac.profile(make_model(kind), x, loss_fn=loss)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    assert plan.recompute_ms > 0
    return plan


@pytest.mark.parametrize("kind", DRAWS)
def test_what_an_op_draws_without_saying_so_is_drawn_again(kind):
    x = torch.randn(ROWS, WIDTH)
    planned = make_model(kind)
    floor_plan(kind, x).apply(planned)

    for _ in range(3):
        assert_equal(step(planned, x), step(make_model(kind), x))


@pytest.mark.filterwarnings("ignore:AC unit")
@pytest.mark.parametrize("kind", DRAWS)
def test_a_unit_that_departs_draws_again_what_its_ops_did_not_say(kind):
    x = torch.randn(ROWS, WIDTH)
    plain, planned = make_model(kind), make_model(kind)
    floor_plan(kind, x).apply(planned)
    for model in (plain, planned):
        for part in model.modules():
            part.more = True

    assert_equal(step(planned, x), step(plain, x))


@pytest.mark.parametrize("kind", DRAWS)
def test_measuring_ops_leaves_the_streams_that_they_draw_from(kind):
    profile = autosac.profile(make_model(kind), torch.randn(ROWS, WIDTH), loss_fn=loss)
    before = states()

    autosac.calibrate(profile, refresh=True, progress=False)

    assert_equal(states(), before)


@pytest.mark.parametrize("kind", ["torch", "Python"])
def test_the_peak_of_ops_that_may_draw_is_exact(kind):
    x = torch.randn(ROWS, WIDTH)
    profile = autosac.profile(make_model(kind), x, loss_fn=loss)
    profile = autosac.calibrate(profile, refresh=True, progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))

    done = autosac.verify(
        plan, lambda: make_model(kind), lambda: x, loss_fn=loss, timing_rounds=0
    )

    assert done.identical, done.differences
    assert done.measured_peak_bytes == plan.peak_bytes


CALLS = [0]


@torch.library.custom_op("autosac_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """Something else each time."""
    CALLS[0] += 1
    return x * CALLS[0]


counted.register_fake(torch.empty_like)
counted.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Counted(Noisy):
    def forward(self, x):
        return x + self.narrow(counted(self.wide(x)).tanh())


def make_counted():
    torch.manual_seed(0)
    return nn.Sequential(*(Counted("") for _ in range(3)))


def test_an_op_that_varies_is_never_run_again_once_calibrating_has_seen_it():
    x = torch.randn(ROWS, WIDTH)
    profile = autosac.profile(make_counted(), x, loss_fn=loss)
    with pytest.warns(UserWarning, match="autosac_tests.counted.default"):
        profile = autosac.calibrate(profile, progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    assert plan.recompute_ms > 0
    plain, planned = make_counted(), make_counted()
    plan.apply(planned)

    CALLS[0] = 0
    expected = step(plain, x)
    CALLS[0] = 0
    assert_equal(step(planned, x), expected)
    assert CALLS == [3]


def test_an_op_that_varies_is_refused_where_it_runs_again():
    x = torch.randn(ROWS, WIDTH)
    profile = autosac.profile(make_counted(), x, loss_fn=loss)
    planned = make_counted()
    autosac.plan(profile, memory_budget=autosac.floor(profile)).apply(planned)

    with pytest.raises(autosac.UnsupportedError, match=r"counted\.default` made"):
        step(planned, x)


@torch.library.custom_op("autosac_tests::half_written", mutates_args=())
def half_written(x: torch.Tensor) -> torch.Tensor:
    """Leaves half of its result as it finds it, as kernels leave padding."""
    CALLS[0] += 1
    found = 0.0 if torch.are_deterministic_algorithms_enabled() else float(CALLS[0])
    out = torch.full_like(x, found)  # stands for `empty_like`
    out[: len(x) // 2] = x[: len(x) // 2].sin()
    return out


half_written.register_fake(torch.empty_like)


def _backward_of_half(ctx, grad):
    (x,) = ctx.saved_tensors
    own = torch.zeros_like(x)
    own[: len(x) // 2] = grad[: len(x) // 2] * x[: len(x) // 2].cos()
    return own


half_written.register_autograd(
    _backward_of_half,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class HalfWritten(Noisy):
    def forward(self, x):
        made = half_written(self.wide(x))[: len(x) // 2]
        return x + self.narrow(torch.cat([made, made]).tanh())


@pytest.mark.parametrize("calibrates", [True, False])
def test_memory_that_an_op_leaves_as_it_finds_it_is_no_other_result(calibrates):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*(HalfWritten("") for _ in range(3)))

    x = torch.randn(ROWS, WIDTH)
    profile = autosac.profile(make(), x, loss_fn=loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if calibrates:
            profile = autosac.calibrate(profile, progress=False)
        plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
        planned = plan.apply(make())
        plain = make()
        CALLS[0] = 0
        expected = step(plain, x)
        assert_equal(step(planned, x), expected)
    assert CALLS[0] > 6  # some ran again


def test_an_op_draws_from_the_generator_that_its_code_names_now(monkeypatch):
    kind, x = "a generator of its own", torch.randn(ROWS, WIDTH)
    planned = make_model(kind)
    floor_plan(kind, x).apply(planned)
    step(planned, x)  # another one: compared from here on with none
    monkeypatch.setattr(sys.modules[__name__], "OWN", torch.Generator())

    assert_equal(step(planned, x), step(make_model(kind), x))


def test_sums_in_any_order_and_scratch_are_no_other_results():
    made = torch.tensor([1.0, -3.0, torch.nan, torch.inf])
    rounded = made * (1 + 1e-6)

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        first = numbers_in([made.to(dtype), torch.tensor([1])])
        second = numbers_in([rounded.to(dtype), torch.tensor([2])])
        other = numbers_in([made.flip(0).to(dtype), torch.tensor([1])])
        assert not differ(first, second)
        assert differ(first, other)


def test_kernels_in_python_are_known_however_they_are_registered():
    with torch.library._scoped_library("autosac_foreign_tests", "DEF") as library:
        library.define("maker(Tensor x) -> Tensor")
        library.impl("maker", lambda x: x * random.random(), "CPU")
        assert traits(torch.ops.autosac_foreign_tests.maker.default).runs_python
    assert traits(torch.ops.autosac_tests.noisy.default).runs_python
    assert not traits(torch.ops.aten.rand.default).runs_python
