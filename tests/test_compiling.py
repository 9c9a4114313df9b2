import copy
import functools
import logging
import warnings

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import ArgumentError
from autosac.pytrees import module_tensors
from autosac.step.random_streams import seed_streams
from autosac.storages import storage_bytes
from autosac.verification.measuring import capture_state, differences, measure_peak
from tests.models import ConvNet, Mlp

pytestmark = pytest.mark.usefixtures("one_thread_throughout", "fresh_compiler")


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


CASES = {
    "dropout": (Mlp, (64, 8)),
    "convolutions": (functools.partial(ConvNet, 1), (4, 3, 16, 16)),
    # With few kernels, each of which takes a C++ compiler seconds.
    "two layers": (lambda: nn.Sequential(*list(Mlp())[:2]), (64, 8)),
}


def made(kind):
    torch.manual_seed(0)
    make_model, size = CASES[kind]
    return WithLoss(make_model()), torch.randn(size)


def step(compiled, model, inputs):
    model.zero_grad()
    seed_streams(1)
    loss = compiled(inputs)
    loss.backward()
    return loss.detach()


def trained(compiled, model, inputs):
    """State after three steps and the real peak of the last one."""
    step(compiled, model, inputs)

    def warm_up():
        step(compiled, model, inputs)
        model.zero_grad()

    loss, peak = measure_peak(
        lambda: step(compiled, model, inputs),
        device="cpu",
        persistent_bytes=storage_bytes([*model.parameters(), *model.buffers(), inputs]),
        warm_up=warm_up,
    )
    return capture_state(model, None, loss), peak


class _Masks(torch.autograd.Function):
    """Its mask is an attribute of ``ctx``; its backward adds up what it makes."""

    @staticmethod
    def forward(ctx, x):
        ctx.mask = x > 0
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sin() * ctx.mask + gradient.cos() * ctx.mask


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + _Masks.apply(layer(x))
        return x.square().mean()


class HoldsMore(nn.Module):
    """Does not read all that it holds."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("table", torch.ones(500))
        self.queue = [torch.ones(100)]

    def forward(self, x):
        return self.used(x).square().mean()


@pytest.mark.slow_but_fifth
@pytest.mark.filterwarnings("ignore:.*should not be inst")  # Dynamo of torch 2.10
@pytest.mark.parametrize("kind", [Masked, HoldsMore])
def test_all_that_is_alive_while_a_model_runs_is_predicted(kind):
    torch.manual_seed(0)
    model, inputs = kind(), torch.randn(8, 16)
    compiled = autosac.compile(model, memory_budget="1GiB")
    step(compiled, model, inputs)
    model.zero_grad()
    held = [*module_tensors(model), inputs]
    _, peak = measure_peak(
        lambda: step(compiled, model, inputs),
        device="cpu",
        persistent_bytes=storage_bytes(held),
    )
    (plan,) = autosac.compiled_plans(compiled)
    assert peak == plan.peak_bytes
    gradients = [parameter.grad for parameter in model.parameters()]
    step(model, model, inputs)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is parameter.grad is None or gradient.equal(parameter.grad)


def second_step(model, inputs, *, are_dropped):
    """The plan after a first step, which a second one leaves, and the peak of that."""
    compiled = autosac.compile(model, memory_budget="1GiB")

    def run():
        outputs = compiled(inputs)
        loss = outputs[0]
        if are_dropped:
            del outputs
        loss.backward()

    run()
    (plan,) = autosac.compiled_plans(compiled)
    model.zero_grad()
    _, peak = measure_peak(
        run,
        device="cpu",
        persistent_bytes=storage_bytes([*module_tensors(model), inputs]),
    )
    assert autosac.compiled_plans(compiled) == (plan,)
    return plan, peak


class ReturnsMore(nn.Module):
    """Returns its loss, with what it is made of, and something else."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(16, 32), nn.Linear(32, 64)

    def forward(self, x):
        hidden = self.hidden(x).tanh()
        logits = self.out(hidden)
        return logits.square().mean(), logits, hidden.sin()


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("are_dropped", [False, True])
def test_outputs_and_their_gradients_count_as_long_as_a_step_holds_them(are_dropped):
    torch.manual_seed(0)
    model, inputs = ReturnsMore(), torch.randn(64, 16)
    plan, peak = second_step(model, inputs, are_dropped=are_dropped)
    assert peak == plan.peak_bytes == plan.graph.peak_bytes


class ReturnsView(nn.Module):
    """Returns its loss, and what backward reads, by another tensor."""

    def __init__(self, view):
        super().__init__()
        self.hidden, self.out = nn.Linear(16, 64), nn.Linear(64, 8)
        self.view = view

    def forward(self, x):
        hidden = nn.functional.gelu(self.hidden(x))
        return self.out(hidden).square().mean(), getattr(hidden, self.view)()


@pytest.mark.parametrize("are_dropped", [False, True])
@pytest.mark.parametrize("view", ["detach", "flatten"])
def test_a_view_of_what_backward_reads_counts_as_long_as_a_step_holds_it(
    view, are_dropped
):
    torch.manual_seed(0)
    model, inputs = ReturnsView(view), torch.randn(256, 16)
    plan, peak = second_step(model, inputs, are_dropped=are_dropped)
    assert peak == plan.peak_bytes


@pytest.mark.slow
def test_batch_norm_under_autocast_keeps_a_budget_to_the_byte():
    torch.manual_seed(0)
    layers = [(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()) for _ in range(4)]
    model = WithLoss(nn.Sequential(*sum(layers, ())))
    inputs = torch.randn(128, 64)

    def real_and_planned(budget_bytes):
        torch.compiler.reset()
        compiled = autosac.compile(model, memory_budget=budget_bytes)

        def run():
            with torch.autocast("cpu", torch.bfloat16):
                loss = compiled(inputs)
            loss.backward()

        def warm_up():
            run()
            model.zero_grad()

        warm_up()
        held = storage_bytes([*module_tensors(model), inputs])
        _, peak = measure_peak(
            run, device="cpu", persistent_bytes=held, warm_up=warm_up
        )
        model.zero_grad()
        (plan,) = autosac.compiled_plans(compiled)
        return peak, plan.peak_bytes

    peak, planned = real_and_planned(2**30)
    assert peak == planned
    for share in (1.0, 0.85):
        budget_bytes = int(planned * share)
        peak, again = real_and_planned(budget_bytes)
        assert peak == again <= budget_bytes


@pytest.mark.parametrize("calls_first", [False, True])
def test_a_model_that_gets_a_plan_later_is_refused_when_it_is_called(calls_first):
    model, inputs = WithLoss(Mlp()), torch.randn(64, 8)
    compiled = autosac.compile(model, memory_budget="1GiB")
    if calls_first:
        step(compiled, model, inputs)
        model.zero_grad()
    plan = autosac.plan(model, inputs, memory_budget="1GiB", loss_fn=lambda loss: loss)
    plan.apply(model)
    with pytest.raises(autosac.UnsupportedError, match=r"plan\.unapply\(model"):
        compiled(inputs)
    plan.unapply(model)
    step(compiled, model, inputs)


@pytest.mark.parametrize("made", [lambda compiled: compiled, copy.deepcopy])
@torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=2)
def test_shapes_have_plans_beyond_the_limit_of_dynamo_and_too_many_are_said(made):
    compiled = made(autosac.compile(HoldsMore(), memory_budget="1GiB"))
    for num_rows in (2, 3):
        step(compiled, compiled, torch.randn(num_rows, 16))
    assert len(autosac.compiled_plans(compiled)) == 2
    with pytest.raises(autosac.UnsupportedError, match="pad batches to a few shapes"):
        step(compiled, compiled, torch.randn(4, 16))


@pytest.mark.slow
def test_a_copy_of_a_compiled_model_counts_what_the_copy_holds():
    model, inputs = HoldsMore(), torch.randn(8, 16)
    autosac.compile(HoldsMore(), memory_budget="8KiB")(inputs)  # Dynamo remembers it
    compiled = autosac.compile(model, memory_budget="8KiB")
    (copied,) = copy.deepcopy(nn.ModuleList([compiled]))
    compiled(inputs).backward()  # gradients of one are nothing to the other
    copied(inputs).backward()
    with pytest.raises(RuntimeError, match="which the budget does not count"):
        copied(inputs)


@functools.cache
def limits(kind, backend, **options):
    """Least feasible budget, and the peak without one."""
    options["backend"] = backend
    torch.compiler.reset()
    model, inputs = made(kind)
    with pytest.raises(autosac.InfeasibleBudgetError) as raised:
        autosac.compile(model, memory_budget=1000, **options)(inputs)
    torch.compiler.reset()
    compiled = autosac.compile(model, memory_budget="1TiB", **options)
    step(compiled, model, inputs)
    torch.compiler.reset()
    (plan,) = autosac.compiled_plans(compiled)
    return raised.value.lowest_peak_bytes, plan.peak_bytes


@functools.cache
def unplanned(kind):
    """State after the steps of a model that PyTorch compiles."""
    torch.compiler.reset()
    model, inputs = made(kind)
    return trained(torch.compile(model, backend="aot_eager"), model, inputs)[0]


@pytest.fixture(scope="module")
def dropout_limits(one_thread_throughout):
    return limits("dropout", "aot_eager")


@pytest.mark.slowest_but_first
@pytest.mark.parametrize(
    ("kind", "strategy"), [("dropout", "milp"), ("convolutions", "capuchin")]
)
def test_real_peak_keeps_falling_budgets_and_every_bit_is_that_of_aot_eager(
    kind, strategy
):
    expected = unplanned(kind)
    low, high = limits(kind, "aot_eager")
    peaks = []
    for budget in (high - 1, (low + high) // 2):
        torch.compiler.reset()
        model, inputs = made(kind)
        compiled = autosac.compile(model, memory_budget=budget, strategy=strategy)
        state, peak = trained(compiled, model, inputs)
        (plan,) = autosac.compiled_plans(compiled)
        assert peak == plan.peak_bytes <= budget
        assert differences(expected, state) == ()
        peaks.append(peak)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


@pytest.mark.slowest
@torch._inductor.config.patch({"cpp.simdlen": 1, "cpp.vec_isa_ok": False})  # in a third
def test_fused_graphs_keep_a_budget_with_the_same_gradients():
    kind = "two layers"
    model, inputs = made(kind)
    compiled = torch.compile(model, backend="inductor")
    expected, plain_peak = trained(compiled, model, inputs)
    budget = plain_peak * 97 // 100  # the least is 94 %
    torch.compiler.reset()
    model, inputs = made(kind)
    options = {"strategy": "milp", "time_limit_s": 2.0}
    compiled = autosac.compile(
        model, memory_budget=budget, backend="inductor", **options
    )
    state, peak = trained(compiled, model, inputs)
    assert peak <= budget < plain_peak
    assert state.keys() == expected.keys()
    for name, value in state.items():  # fusion decides how sums are rounded
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.slow
def test_a_budget_that_no_plan_fits_names_one_that_does(dropout_limits):
    low, high = dropout_limits
    model, inputs = made("dropout")

    compiled = autosac.compile(model, memory_budget=low)
    step(compiled, model, inputs)

    assert autosac.compiled_plans(compiled)[0].peak_bytes == low < high


@pytest.mark.slow
def test_what_is_alive_beside_the_model_counts(dropout_limits):
    low, _ = dropout_limits
    model, inputs = made("dropout")
    gradients = storage_bytes(model.parameters())

    compiled = autosac.compile(
        model, memory_budget=low, extra_bytes=100, accumulate=True
    )
    with pytest.raises(autosac.InfeasibleBudgetError) as raised:
        compiled(inputs)

    assert raised.value.lowest_peak_bytes == low + 100 + gradients


@pytest.mark.slow
def test_accumulated_gradients_are_within_the_budget(dropout_limits):
    _, high = dropout_limits
    model, inputs = made("dropout")
    gradients = storage_bytes(model.parameters())
    compiled = autosac.compile(model, memory_budget=high + gradients, accumulate=True)
    compiled(inputs).backward()

    _, peak = measure_peak(
        lambda: compiled(inputs).backward(),
        device="cpu",
        held=lambda: [
            *model.parameters(),
            *(p.grad for p in model.parameters()),
            inputs,
        ],
        warm_up=lambda: compiled(inputs).backward(),
    )

    assert peak <= high + gradients


@pytest.mark.slow
def test_gradients_that_are_not_counted_are_refused():
    model, inputs = made("dropout")
    compiled = autosac.compile(model, memory_budget="1GiB")
    compiled(inputs).backward()

    with pytest.raises(RuntimeError, match="which the budget does not count"):
        compiled(inputs)


@pytest.mark.slow
def test_a_second_forward_before_backward_is_refused():
    model, inputs = made("dropout")
    compiled = autosac.compile(model, memory_budget="1GiB")

    loss = compiled(inputs)
    with pytest.raises(RuntimeError, match="another one waits for its backward pass"):
        compiled(inputs)
    loss.backward()
    model.zero_grad()
    dropped = compiled(inputs)
    del dropped  # without a backward pass: nothing waits
    compiled(inputs).backward()


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
def test_a_forward_whose_backward_was_refused_waits_no_longer_once_it_is_dropped():
    model, inputs = WithLoss(Mlp()), torch.randn(64, 8)
    compiled = autosac.compile(model, memory_budget="1GiB")
    loss = compiled(inputs)
    with pytest.raises(RuntimeError, match="create_graph"):
        loss.backward(create_graph=True)
    with pytest.raises(RuntimeError, match="another one waits"):
        compiled(inputs)
    del loss

    step(compiled, model, inputs)


@pytest.mark.slow
def test_calls_without_gradients_run_at_any_time():
    model, inputs = made("dropout")
    compiled = autosac.compile(model, memory_budget="1GiB")
    loss = compiled(inputs)

    with torch.no_grad():
        torch.manual_seed(1)
        found = compiled(inputs)
        torch.manual_seed(1)
        assert torch.equal(found, compiled(inputs))
    loss.backward()


@pytest.mark.slow
def test_every_shape_has_a_plan_of_its_own():
    model, inputs = made("dropout")
    compiled = autosac.compile(model, memory_budget="1GiB")

    step(compiled, model, inputs)
    step(compiled, model, inputs[:32])

    large, small = autosac.compiled_plans(compiled)
    assert small.peak_bytes < large.peak_bytes


_LOGGER = logging.getLogger("a model")


def test_what_a_model_logs_breaks_no_graph():
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            _LOGGER.warning("its loss is a sum")
            return self.linear(x).square().sum()

    torch.manual_seed(0)
    model, x = Logs(), torch.randn(2, 8)
    model(x).backward()
    expected = model.linear.weight.grad.clone()
    model.zero_grad()

    autosac.compile(model, memory_budget="1GiB")(x).backward()

    assert torch.equal(model.linear.weight.grad, expected)
    autosac.joint_graph(model, x)  # which has no such break either


def test_a_graph_break_is_an_error():
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            out = self.linear(x)
            torch._dynamo.graph_break()
            return out.sum()

    with pytest.raises(torch._dynamo.exc.Unsupported):
        autosac.compile(Breaks(), memory_budget="1GiB")(torch.randn(2, 8))


@pytest.mark.slow
def test_what_a_model_holds_more_later_is_in_its_peak_and_said_once_above_a_budget():
    torch.manual_seed(0)
    model, inputs = WithLoss(Mlp()), torch.randn(64, 8)
    compiled = autosac.compile(model, memory_budget="100KiB")
    trained(compiled, model, inputs)
    model.zero_grad()
    with warnings.catch_warnings(action="error"):
        model.register_buffer("small", torch.ones(100))
        trained(compiled, model, inputs)
    (plan,) = autosac.compiled_plans(compiled)
    model.zero_grad()
    model.register_buffer("average", torch.ones(100_000))
    with pytest.warns(UserWarning, match=r"391\.0 KiB more.*reset") as caught:
        _, peak = trained(compiled, model, inputs)

    assert len(caught) == 1
    (later,) = autosac.compiled_plans(compiled)
    assert later.peak_bytes == peak == plan.peak_bytes + 400_000


def test_sparse_tensors_in_a_graph_are_refused_with_the_fix():
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8))
    tokens = torch.arange(4)
    message = "layout torch.sparse_coo.*`sparse=False`"

    with pytest.raises(autosac.UnsupportedError, match=message):
        autosac.compile(model, memory_budget="1GiB")(tokens)
    with pytest.raises(autosac.UnsupportedError, match=message):
        autosac.joint_graph(model, tokens)


def test_a_compiled_module_inside_is_refused():
    model, _ = made("dropout")
    model.model[0] = torch.compile(model.model[0])

    with pytest.raises(ValueError, match=r"`model\.0` is compiled already"):
        autosac.compile(model, memory_budget="1GiB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": "much"}, "must be a positive int of bytes"),
        ({"strategy": "best"}, "must be 'milp' or 'capuchin', got 'best'"),
        ({"backend": "eager"}, "must be 'aot_eager' or 'inductor', got 'eager'"),
        ({"extra_bytes": -1}, "`extra_bytes` must be .* at least 0, got -1"),
        ({"extra_bytes": "1MiB"}, "`extra_bytes` must be .*, got '1MiB'"),
        ({"relative_gap": -1}, "`relative_gap` must be .*, got -1"),
        ({"time_limit_s": "x"}, "`time_limit_s` must be .*, got 'x'"),
    ],
)
def test_wrong_arguments_are_errors(options, message):
    with pytest.raises(ArgumentError, match=message):
        autosac.compile(Mlp(), **{"memory_budget": "1GiB", **options})


def test_only_modules_are_compiled():
    with pytest.raises(TypeError, match="must be a module, got function"):
        autosac.compile(lambda x: x, memory_budget="1GiB")
