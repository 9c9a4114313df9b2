"""The trace is the real step, op by op, on what models do besides layers."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from autosac import _compat, _compat_fakes, calibrate, floor, plan
from autosac.errors import TraceError
from autosac.fake_tensors.values import run_op
from autosac.profiles.compute_dtype import in_compute_dtype
from autosac.profiles.profile import profile
from autosac.tracing.real_steps import first_departure
from autosac.tracing.trace import trace
from autosac.verification.measuring import capture_state, differences
from tests.models import each_case, shared_profile
from tests.real_ops import real_ops, traced_ops

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, STEPS, WIDTH = 4, 6, 8


class Around(nn.Module):
    """Calls a function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


# --- writes to memory that views look at ------------------------------------------


def scan(y):
    out, state = torch.zeros_like(y), torch.zeros_like(y[:, 0])
    for step in range(STEPS):
        state = y[:, step] * state + y[:, step]
        out[:, step] = state
    return out * functional.gelu(y)


def reads_another_view(y):
    base = y.clone()
    first, second = base[:, 0], base[:, 1]
    first.add_(second)
    doubled = second * 2
    base.mul_(y)
    return base * first[:, None] + doubled[:, None] + second[:, None]


def changes_a_half(y):
    both = torch.cat([y, y], -1)
    half, other = both[..., :WIDTH], both[..., WIDTH:]
    half.tanh_()
    return half * other


def changes_a_layout(y):
    base = y.clone()
    base.transpose_(1, 2)
    base[:, 0].sigmoid_()
    return base.transpose(1, 2) * y


def changes_a_reshaped(y):
    return functional.relu_(y.view(ROWS * STEPS, WIDTH)).view(ROWS, STEPS, WIDTH)


def catches_everything(y):
    out = torch.zeros_like(y)
    try:
        out[:, 0] = y[:, 0]
    except BaseException:  # as bad models do
        return y
    return out.sin() * y


# --- tensors that are made of nothing -----------------------------------------------


def branches_on_ones(y):
    mask = torch.ones(ROWS, STEPS)
    return y if mask.all() else y * mask[..., None].exp()


def asks_for_fakes(y):
    plain = type(torch.ones(ROWS, STEPS)) is torch.Tensor
    return y if plain else y.exp()


def fills_zeros(y):
    out = torch.zeros(ROWS, STEPS, WIDTH)
    for step in range(STEPS):
        out[:, step] = y[:, step].sin()
    return out * y.cos()


def adds_to_lists_of_zeros(y):
    sums = [torch.zeros(ROWS, WIDTH) for _ in range(STEPS)]
    for step in range(STEPS):
        sums[step].add_(y[:, step])
    return torch.stack(sums, 1)


def scatters(y):
    out = torch.zeros(STEPS, WIDTH)
    out.index_add_(0, torch.arange(ROWS) % STEPS, y[:, 0])
    return out * y


def writes_to_a_literal(y):
    pair = torch.tensor([1.0, 2.0])
    pair[0] = y.mean()
    return y * pair.sum()


def adds_a_causal_mask(y):
    mask = torch.full((STEPS, STEPS), float("-inf")).triu(1)
    return (y @ y.transpose(1, 2) + mask).softmax(-1) @ y


def multiplies_by_ones(y):
    return torch.ones(STEPS, STEPS).tril() @ y


def draws_a_size(y):
    return y.pow([1, 2, 3][int(torch.empty(1).uniform_(0.0, 3.0).item())])


def draws_layers(y):
    for kept in (torch.zeros(4).uniform_() < 0.5).tolist():
        y = y.sin() if kept else y
    return y


def draws_a_mask(y):
    return y * functional.dropout(torch.ones(ROWS, STEPS, 1), 0.5)


def penalizes(y):
    mixed = torch.rand(ROWS, STEPS, WIDTH).requires_grad_()
    energy = (mixed * y).sin().sum()
    (gradient,) = torch.autograd.grad(energy, mixed, create_graph=True)
    return y + gradient


def encodes_positions(y):
    table, places = torch.zeros(STEPS, WIDTH), torch.arange(STEPS).float()[:, None]
    scale = torch.exp(torch.arange(0, WIDTH, 2).float() * -0.1)
    table[:, 0::2], table[:, 1::2] = (
        torch.sin(places * scale),
        torch.cos(places * scale),
    )
    return y + table


def looks_up_codes(y):
    return y * functional.one_hot(y.argmax(-1), WIDTH)


def looks_up_known_codes(y):
    return y * functional.one_hot(torch.arange(STEPS), WIDTH)


def changes_the_layout_of_ones(y):
    mask = torch.ones(ROWS, STEPS)
    mask.unsqueeze_(-1)
    return y * mask


FUNCTIONS = [
    *(scan, reads_another_view, changes_a_half, changes_a_layout, changes_a_reshaped),
    *(catches_everything, branches_on_ones, asks_for_fakes, fills_zeros),
    *(adds_to_lists_of_zeros, scatters, writes_to_a_literal, adds_a_causal_mask),
    *(multiplies_by_ones, draws_a_size, draws_layers, draws_a_mask, penalizes),
    *(encodes_positions, changes_the_layout_of_ones, looks_up_codes),
    looks_up_known_codes,
]
each_function = pytest.mark.parametrize("function", FUNCTIONS)


def profile_of_step(function, **options):
    torch.manual_seed(0)
    x = torch.randn(ROWS, STEPS, WIDTH)
    return profile(Around(function), x, loss_fn=mean_square, **options)


def mean_square(output):
    return output.square().mean()


@pytest.mark.slow_but_fifth
@each_function
def test_the_trace_runs_the_ops_of_a_real_step(function):
    result = profile_of_step(function)

    assert traced_ops(result.tape) == real_ops(result.step)
    assert first_departure(result.step, result.tape) is None


@pytest.mark.slow_but_fifth
@each_case
def test_the_traces_of_the_test_models_run_the_ops_of_real_steps(case):
    traced = shared_profile(case)

    assert traced_ops(traced.tape) == real_ops(traced.step)
    assert first_departure(traced.step, traced.tape) is None


@pytest.mark.slow
@each_function
def test_these_steps_can_be_planned_for_a_gpu_that_is_not_present(function):
    result = profile_of_step(function, device="h100", autocast=torch.bfloat16)

    # All floats that layers read are cast, those whose values are known among them.
    products = {op.dtype for op in result.tape.ops if op.name in PRODUCTS}
    assert products == {"bfloat16"}


PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")


@pytest.mark.parametrize("function", [looks_up_codes, looks_up_known_codes])
def test_a_gpu_does_not_look_whether_codes_are_in_range(function):
    names = [op.name for op in profile_of_step(function, device="h100").tape.ops]

    assert "aten.scatter_.value" in names
    assert "aten._local_scalar_dense.default" not in names


def test_what_was_learned_in_one_trace_is_known_in_the_next():
    result = profile_of_step(fills_zeros)
    assert result.step.learned.plain
    assert len(result.step.learned.overwritten) == 1

    again = trace(result.step)

    assert again.ops == result.tape.ops


@pytest.mark.slow
def test_fakes_that_outlive_their_trace_can_be_used_as_any():
    kept = []
    keep = kept.append  # a list that the function held would be put back as it was

    def keeps(y):
        keep(y)
        return scan(y)

    with pytest.warns(UserWarning, match="keep 768 B more with every step"):
        profile_of_step(keeps)
    gc.collect()

    for fake in kept:  # without memory, so that a kernel that reads it would crash
        assert (fake + 1).sum().shape == ()
    with pytest.raises(RuntimeError, match="does not require grad"):
        kept[-1].sum().backward()


# --- kernels that a trace must know of ------------------------------------------


class Experts(nn.Module):
    """A layer of experts, each with its rows."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x):
        weights = self.experts.transpose(1, 2)
        return torch._grouped_mm(self.first(x), weights, offs=ENDS).sin()


GROUPED = [  # factors of both dimensions, with 15 columns where rows need not be whole
    lambda x, w: (x, w.transpose(1, 2), ENDS),
    lambda x, w: (x.t(), x, ENDS),
    lambda x, w: (w.new_zeros(2, 16, 16), x, ENDS),
    lambda x, w: (w.new_zeros(2, 16, 16), w.transpose(1, 2), None),
]
ENDS = torch.tensor([8, 16], dtype=torch.int32)


@pytest.mark.skipif(_compat.TORCH_VERSION < (2, 14), reason="the op takes bfloat16")
@pytest.mark.parametrize("factors", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_products_have_the_layout_of_the_real_kernel(factors, dtype):
    x, weights = torch.randn(16, 16, dtype=dtype), torch.randn(2, 15, 16, dtype=dtype)
    left, right, ends = factors(x, weights)
    real = torch._grouped_mm(left, right, offs=ends)
    mode = _compat_fakes.fake_mode()
    fakes = [mode.from_tensor(tensor) for tensor in (left, right)]

    with mode:
        fake = run_op(torch.ops.aten._grouped_mm.default, (*fakes, ends), {}, fakes)

    assert (fake.shape, fake.stride()) == (real.shape, real.stride())
    assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


@pytest.mark.skipif(_compat.TORCH_VERSION < (2, 14), reason="the op takes bfloat16")
def test_a_layer_of_experts_in_float32_is_planned():
    torch.manual_seed(0)
    traced = profile(Experts(), torch.randn(16, 16), loss_fn=mean_square)

    assert traced_ops(traced.tape) == real_ops(traced.step)
    (forward,) = (
        op
        for op in traced.tape.ops
        if op.phase == "forward" and op.name == "aten._grouped_mm.default"
    )
    assert forward.flops == 2 * 16 * 16 * 16
    assert not calibrate(traced, cache=False).failures


@pytest.mark.parametrize("as_tuples", [False, True])
def test_a_mean_reduced_ctc_loss_is_planned(as_tuples):
    targets = torch.randint(1, 8, (ROWS, 5))
    lengths = (STEPS,) * ROWS, (5, 4, 3, 2)
    if not as_tuples:
        lengths = tuple(map(torch.tensor, lengths))

    def loss(output):
        logits = output.transpose(0, 1).log_softmax(2)
        return functional.ctc_loss(logits, targets, *lengths)

    traced = profile(nn.Linear(WIDTH, 8), torch.randn(ROWS, STEPS, WIDTH), loss_fn=loss)

    assert traced_ops(traced.tape) == real_ops(traced.step)


# --- the check of a trace ---------------------------------------------------------


class Sighted(nn.Module):
    """Does on real tensors what it does not do in a trace."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        out = self.linear(x)
        return out.tanh() if type(out) is torch.Tensor else out.sin()


def test_the_first_op_that_differs_is_named_with_its_module():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Sighted()))
    traced = profile(model, torch.randn(2, WIDTH))

    departure = first_departure(traced.step, traced.tape)

    assert departure.module == "1.0"
    assert departure.ran == "aten.tanh.default"
    assert departure.expected == "aten.sin.default"
    assert departure.source.startswith(f"{__file__}:")


def test_a_step_that_does_something_else_is_traced_for_real():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Sighted()))
    traced = profile(model, torch.randn(2, WIDTH), loss_fn=mean_square)
    assert not traced.step.learned.real

    corrected = calibrate(traced, cache=False)

    assert corrected.step.learned.real
    assert traced_ops(corrected.tape) == real_ops(corrected.step)
    assert plan(corrected, memory_budget=floor(corrected)).dry_run


def turned(y: torch.Tensor) -> torch.Tensor:
    rotated = torch.cat((-y[..., 1::2], y[..., ::2]), -1)
    return y + rotated * y


def turned_twice(y: torch.Tensor) -> torch.Tensor:
    return turned(y).tanh()


def test_a_scripted_function_whose_ops_depart_does_not_look_like_a_failure():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        function, another = torch.jit.script(turned), torch.jit.script(turned_twice)
    x = torch.randn(ROWS, STEPS, WIDTH)
    assert profile(Around(function), x, loss_fn=mean_square).tape.ops
    # TorchScript optimizes a function behind its first call, so that the second runs
    # other ops; but beside Dask's threads a trace has made two calls (`is_watched`).
    model = Around(lambda y: (another if type(y) is torch.Tensor else function)(y))
    traced = profile(model, x, loss_fn=mean_square)

    assert first_departure(traced.step, traced.tape) is not None


def test_a_step_that_ends_early_or_late_departs():
    class Longer(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out.tanh() if type(out) is torch.Tensor else out

    class Shorter(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out if type(out) is torch.Tensor else out.tanh()

    x = torch.randn(2, WIDTH)
    for kind in (Longer, Shorter):
        traced = profile(kind(WIDTH, WIDTH), x, loss_fn=lambda output: output[0, 0])
        assert first_departure(traced.step, traced.tape) is not None


class Counting(nn.Module):
    """Writes to a parameter, and to itself, in forward."""

    def __init__(self, writes):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.calls, self.writes = 0, writes

    def forward(self, x):
        self.calls += 1
        if self.writes:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        return functional.dropout(self.norm(self.linear(x)))


@pytest.mark.parametrize("writes", [False, True])
def test_the_check_changes_nothing(writes):
    model, x = Counting(writes), torch.randn(ROWS, WIDTH)
    traced = profile(model, x)
    before = capture_state(model, None, torch.zeros(()))
    versions = [p._version for p in model.parameters()]

    assert first_departure(traced.step, traced.tape) is None

    assert differences(before, capture_state(model, None, torch.zeros(()))) == ()
    assert [p._version for p in model.parameters()] == versions
    assert model.calls == 0


SCALE = nn.Parameter(torch.ones(WIDTH))


class Initialised(nn.Linear):
    """Writes in its first forward to parameters, of which no later one knows."""

    def __init__(self, write):
        super().__init__(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.write, self.first = write, True

    def forward(self, x):
        if self.first:
            with torch.no_grad():
                self.write(self, super().forward(x).std(0))
            self.first = False
        return super().forward(x) * SCALE + self.frozen


FIRST_WRITES = {
    "in place": lambda layer, std: layer.weight.div_(std[:, None]),
    "data": lambda layer, std: layer.weight.data.copy_(std[:, None]),
    "view": lambda layer, std: layer.weight[0].fill_(3.0),
    "out": lambda layer, std: torch.add(layer.weight, 1.0, out=layer.weight),
    "foreach": lambda layer, std: torch._foreach_mul_([layer.bias, layer.weight], 2.0),
    "frozen": lambda layer, std: layer.frozen.add_(std),
    "global": lambda layer, std: SCALE.mul_(std),
}


@pytest.mark.parametrize("write", FIRST_WRITES.values(), ids=FIRST_WRITES)
def test_planning_leaves_parameters_alone_that_only_the_first_step_writes_to(write):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Initialised(write))
    parameters = [*model.parameters(), SCALE]
    before = [(p.detach().clone(), p.data_ptr(), p._version) for p in parameters]

    traced = calibrate(profile(model, torch.randn(ROWS, WIDTH)), cache=False)

    assert traced.step.learned.earlier == 1
    for parameter, (data, address, version) in zip(parameters, before, strict=True):
        assert torch.equal(parameter, data)
        assert (parameter.data_ptr(), parameter._version) == (address, version)


def test_a_first_step_that_fails_where_its_trace_does_not_is_said():
    def refuse(layer, std):
        if type(std) is torch.Tensor:
            raise ValueError("no such table.")

    traced = profile(Initialised(refuse), torch.randn(ROWS, WIDTH))

    assert traced.step.learned.earlier == 1
    with pytest.raises(TraceError, match="ValueError says no such table"):
        first_departure(traced.step, traced.tape)


def test_the_check_keeps_nothing_for_backward():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    traced = profile(model, torch.randn(2, WIDTH))
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None)

    with hooks:
        assert first_departure(traced.step, traced.tape) is None

    assert saved == []


def test_a_real_step_that_fails_where_its_trace_does_not_says_where():
    class Reading(nn.Linear):
        def forward(self, x):
            if type(x) is torch.Tensor:
                raise ValueError("no such table.")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reading(WIDTH, WIDTH))
    traced = profile(model, torch.randn(2, WIDTH))

    with pytest.raises(TraceError, match=r"module `1` at .*ValueError says no such"):
        first_departure(traced.step, traced.tape)


@pytest.mark.slow
def test_plans_of_such_steps_hold():
    torch.manual_seed(0)
    model = nn.Sequential(*(Around(scan) for _ in range(4)))
    x = torch.randn(ROWS, STEPS, WIDTH)
    twin = copy.deepcopy(model)
    traced = calibrate(profile(model, x, loss_fn=mean_square), cache=False)
    least = floor(traced)
    budget = least + (traced.baseline_peak_bytes - least) // 20
    plan(traced, memory_budget=budget).apply(model)

    for one in (model, twin):
        mean_square(one(x)).backward()

    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


class Routes(nn.Module):
    """Hands some rows to its second layer, by their values."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x)
        return self.last(y[y.mean(-1) > 0])


def test_a_step_whose_values_decide_runs_in_the_type_that_is_gathered():
    step = profile(Routes(), torch.randn(16, WIDTH), loss_fn=lambda y: y.float().sum())

    tape = in_compute_dtype(step, torch.bfloat16).tape

    layers = [i for i, m in enumerate(tape.modules) if m.fqn in ("first", "last")]
    types = {op.dtype for op in tape.ops if op.module in layers and op.creates}
    assert types == {"bfloat16"}
