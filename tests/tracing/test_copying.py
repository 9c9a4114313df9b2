"""Copies for tracing have all that the user's model has, or one sentence says why."""

import copy
import copyreg
import pickle
import queue
import threading
import types
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import autosac
from autosac.advice.bf16_models import in_bf16
from autosac.errors import ArgumentError, TraceError

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 32


class Scaled(nn.Module):
    """Reads what a trainer keeps in an attribute of its parameter."""

    def __init__(self, reads):
        super().__init__()
        self.linear, self.reads = nn.Linear(WIDTH, WIDTH), reads
        weight = self.linear.weight
        weight.main_grad, weight.marks = torch.zeros_like(weight), {"calls": 0}

    def forward(self, x):
        if self.reads:
            self.linear.weight.marks["calls"] += 1
            self.linear.weight.main_grad.copy_(self.linear.weight.detach())
        return self.linear(x)


class InSlots(nn.Module):
    __slots__ = ("factor",)

    def __init__(self):
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), 2.0

    def forward(self, x):
        return self.linear(x) * self.factor


class Unpicklable(torch.optim.SGD):
    def __getstate__(self):
        raise TypeError("it has no state")


def profiled(model, num_rows=8, **options):
    rows = torch.randn(num_rows, WIDTH)
    return autosac.profile(model, rows, loss_fn=lambda y: y.square().sum(), **options)


@pytest.mark.parametrize("reads", [False, True])
def test_what_parameters_keep_in_attributes_counts_and_is_not_changed(reads):
    model = nn.Sequential(*[Scaled(reads) for _ in range(3)])
    plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    more = 3 * model[0].linear.weight.nbytes

    profile = profiled(model)

    autosac.calibrate(profile, progress=False)  # steps run for real
    assert profile.baseline_peak_bytes == profiled(plain).baseline_peak_bytes + more
    assert model[0].linear.weight.marks == {"calls": 0}
    assert not model[0].linear.weight.main_grad.any()


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("holder", ["model", "optimizer", "nobody"])
def test_gradients_that_are_parts_of_a_buffer_are_counted_once(holder):
    def make_model():
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        model = nn.Sequential(*layers)
        model.unused = nn.Linear(WIDTH, WIDTH)  # its gradient is there, too
        model.forward = lambda x: layers[2](layers[1](layers[0](x)))
        return _flat(model, model) if holder != "optimizer" else model

    def make_optimizer(model):
        optimizer = torch.optim.AdamW(model.parameters())
        if holder == "optimizer":
            _flat(model, optimizer)
        elif holder == "nobody":
            del model.flat
        return optimizer

    torch.manual_seed(0)
    model = make_model()
    options = {"keeps_gradients": True}
    profile = profiled(model, optimizer=make_optimizer(model), **options)
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)

    done = autosac.verify(
        plan, make_model, lambda: torch.randn(8, WIDTH), make_optimizer=make_optimizer,
        loss_fn=lambda y: y.square().sum(), timing_rounds=0, **options,
    )  # fmt: skip

    assert plan.peak_bytes == pytest.approx(done.measured_peak_bytes, rel=1e-3)


def _flat(model, holder):
    parameters = list(model.parameters())
    holder.flat = torch.zeros(sum(p.numel() for p in parameters))
    parts = holder.flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return model


def test_a_module_with_slots_is_named():
    with pytest.raises(TraceError, match=r"`1` \(InSlots\) keeps `factor` in"):
        profiled(nn.Sequential(nn.Linear(WIDTH, WIDTH), InSlots()))


def test_an_optimizer_that_cannot_be_copied_may_be_a_function():
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(TraceError, match=r"optimizer cannot .* pass a function"):
        profiled(model, optimizer=Unpicklable(model.parameters()))

    assert profiled(model, optimizer=Unpicklable).baseline_peak_bytes > 0


class Wraps(torch.optim.Optimizer):
    """Keeps all in another optimizer, as Opacus' does."""

    def __init__(self, parameters):
        self.inner = torch.optim.AdamW(parameters)

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self):
        self.inner.step()


@pytest.mark.parametrize("is_built", [False, True])
def test_of_an_optimizer_around_another_one_the_inner_one_is_asked_for(is_built):
    model = nn.Linear(WIDTH, WIDTH)
    wrapper = Wraps(model.parameters())
    with pytest.raises((TraceError, ArgumentError), match=r"pass that .* `inner`"):
        profiled(model, optimizer=Wraps if is_built else wrapper)

    assert profiled(model, optimizer=wrapper.inner).baseline_peak_bytes > 0


class LooksAhead(torch.optim.Optimizer):
    """Shares all with another optimizer, and never calls `Optimizer.__init__`."""

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self):
        self.inner.step()


def test_planning_leaves_the_step_of_an_optimizers_class_as_it_was():
    # A copy gives the class a `step` that wants hooks, which only copies have.
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = LooksAhead(torch.optim.SGD(model.parameters(), lr=0.1))
    own = vars(LooksAhead)["step"]

    profiled(model, optimizer=optimizer)

    assert vars(LooksAhead)["step"] is own
    model(torch.randn(8, WIDTH)).sum().backward()
    optimizer.step()


class Retains(nn.Module):
    """Writes to memory that a view looks at; keeps what it retains a gradient of."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.kept = self.linear(x)
        if self.kept.requires_grad:
            self.kept.retain_grad()
        result = 2 * self.kept
        half = result[:, : WIDTH // 2]
        result.neg_()
        return torch.cat([half.exp(), result], 1)[:, :WIDTH]


def test_gradients_that_are_retained_end_no_trace():
    # They are referred to weakly, so that no other tensor may take their place.
    def make_model():
        return nn.Sequential(Retains(), Retains())

    profile = profiled(make_model())
    plan = autosac.plan(profile, memory_budget=profile.baseline_peak_bytes)

    done = autosac.verify(
        plan, make_model, lambda: torch.randn(8, WIDTH),
        loss_fn=lambda y: y.square().sum(), timing_rounds=0,
    )  # fmt: skip

    assert done.identical
    assert plan.peak_bytes == pytest.approx(done.measured_peak_bytes, rel=1e-2)


class Unpickled:
    def __reduce__(self):
        raise pickle.PicklingError("it has no state")


class Holds(nn.Module):
    """Has something of another kind beside its layers."""

    def __init__(self, held):
        super().__init__()
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.layers, self.held = nn.Sequential(*layers), held

    def forward(self, x):
        return self.layers(x)


def test_what_of_a_model_cannot_be_copied_is_named():
    gone = weakref.proxy(Unpickled())
    for value in ((n for n in ()), [gone], Unpickled()):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Holds(value))
        with pytest.raises(TraceError, match=r"for its `1\.held` .* keep it outside"):
            profiled(model)


class MadeAnew(nn.Linear):
    def __deepcopy__(self, memo):
        return MadeAnew(WIDTH, WIDTH)


def test_a_copy_with_parameters_that_no_optimizer_knows_is_refused():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MadeAnew(WIDTH, WIDTH))
    with pytest.raises(TraceError, match=r"does not copy its parameter `1\.weight` as"):
        profiled(model, optimizer=torch.optim.AdamW)


class Locked(Holds):
    def forward(self, x):
        with self.held:
            return super().forward(x)


class Logged(Holds):
    def forward(self, x):
        self.held.put("forward")
        return super().forward(x)


class OfAModule(Holds):
    def forward(self, x):
        return self.held.gelu(super().forward(x))


class OfATable(Holds):
    def forward(self, x):
        return super().forward(x) * self.held["factor"]


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    "make",
    [
        lambda log: Locked(threading.Lock()),
        lambda log: Locked(threading.RLock()),
        lambda log: Logged(queue.Queue()),
        lambda log: OfAModule(nn.functional),
        lambda log: OfATable(types.MappingProxyType({"factor": torch.tensor(2.0)})),
        lambda log: Holds(threading.local()),
        lambda log: Holds(log),
    ],
    ids=["lock", "reentrant lock", "queue", "module", "table", "local", "log"],
)
def test_what_a_process_has_but_once_is_shared_with_copies(make, tmp_path):
    known = dict(copyreg.dispatch_table)

    with (tmp_path / "log").open("w") as log:
        model = nn.Sequential(make(log), make(log))
        _train_at_the_floor(model)

    assert copyreg.dispatch_table == known
    if isinstance(model[0], Logged):
        assert model[0].held.qsize() == 2  # of real steps alone


def test_a_copy_in_another_type_shares_what_a_process_has_but_once():
    model = Locked(threading.Lock())

    copied = in_bf16(model)

    assert copied.held is model.held
    assert copied.layers[0].weight.dtype == torch.bfloat16
    assert model.layers[0].weight.dtype == torch.float32


def _train_at_the_floor(model):
    rows = torch.randn(512, WIDTH)

    def gradients():
        model.zero_grad()
        model(rows).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients()
    profile = autosac.calibrate(profiled(model, len(rows)), progress=False)
    autosac.plan(profile, memory_budget=autosac.floor(profile)).apply(model)

    assert all(map(torch.equal, gradients(), plain))
    assert autosac.floor(profile) < profile.baseline_peak_bytes


class Marked(torch.Tensor):
    """Says nothing of copies, which PyTorch then refuses."""


def test_inputs_of_a_subclass_that_says_nothing_of_copies_are_copied():
    rows = torch.randn(8, WIDTH)
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(RuntimeError, match="__deepcopy__"):
        copy.deepcopy(rows.as_subclass(Marked))

    plain, marked = (
        autosac.calibrate(autosac.profile(model, given), progress=False)
        for given in (rows, rows.as_subclass(Marked))
    )

    assert marked.baseline_peak_bytes == plain.baseline_peak_bytes


def _refuses(*_):
    raise NotImplementedError


class Unsized(tuple):
    """As e3nn's `Irreps`, which have no length of their own."""

    __slots__ = ()
    __len__ = _refuses


class Unset(Mapping):
    """As settings of OmegaConf that wait for a value."""

    __getitem__ = __iter__ = __len__ = _refuses


@pytest.mark.parametrize("make", [lambda: Unsized((1, 2)), Unset])
@pytest.mark.parametrize("is_argument", [False, True])
def test_containers_that_will_not_say_what_they_hold_are_left_alone(make, is_argument):
    model = nn.Sequential(*[HoldsOrPasses(make(), is_argument) for _ in range(2)])

    _train_at_the_floor(model)


class HoldsOrPasses(nn.Module):
    def __init__(self, held, is_argument):
        super().__init__()
        self.inner, self.held, self.is_argument = Takes(), held, is_argument

    def forward(self, x):
        return self.inner(x, self.held if self.is_argument else None)


class Takes(Holds):
    def __init__(self):
        super().__init__(None)

    def forward(self, x, other):
        return super().forward(x)
