"""Models of habits that no op tells of: planned near the floor, trained bit by bit."""

import collections
import copy
import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import autosac
from autosac.checkpointing import installing
from autosac.errors import InfeasibleBudgetError
from autosac.planning import dry_running
from tests.models import Case
from tests.training import assert_equal, train

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS = 32, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class MakesAttribute(Block):
    """Makes an attribute and a buffer when it is called first."""

    @functools.cached_property
    def table(self):
        return torch.linspace(-1, 1, WIDTH)

    def forward(self, x):
        if not hasattr(self, "weights"):
            self.register_buffer("weights", torch.linspace(0, 1, WIDTH))
        return super().forward(x * self.table + self.weights)


@functools.lru_cache
def positions(length):
    table = torch.empty(length, 1)
    table[:, 0] = torch.arange(length) / length
    return table.expand(length, WIDTH)


class SharesTable(Block):
    """Reads a table that the first call in the process makes."""

    def __init__(self):
        super().__init__()
        positions.cache_clear()

    def forward(self, x):
        return super().forward(x + positions(len(x)))


class KeepsTable(Block):
    """Makes a table of positions in its first step, and keeps it in a dict."""

    def __init__(self):
        super().__init__()
        self.tables = {}

    def forward(self, x):
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None] / len(x)
        return super().forward(x + self.tables[len(x)])


class KeepsBuffers(Block):
    """Makes its buffers in its first step, in place of a small one and of none."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 1), persistent=False)
        self.register_buffer("scale", None, persistent=False)

    def forward(self, x):
        if self.table.shape != x.shape:
            self.table = torch.arange(len(x), dtype=x.dtype)[:, None].repeat(1, WIDTH)
            self.scale = self.table.max(1, keepdim=True).values.repeat(1, WIDTH) + 1
        return super().forward(x + self.table / self.scale)


class KeepsLatest(Block):
    """Adds up what it saw in the last two steps."""

    def __init__(self):
        super().__init__()
        self.latest = collections.deque(maxlen=2)

    def forward(self, x):
        self.latest.append(x.detach().mean(0))
        return super().forward(x + sum(self.latest))


class KeepsGradient(Block):
    """Keeps the latest gradient of its result, as tools that look at gradients do."""

    def forward(self, x):
        x = super().forward(x)
        x.register_hook(functools.partial(setattr, self, "latest"))
        return x


class FillsQueue(Block):
    """Keeps what it saw in the last steps, as memory banks do."""

    def __init__(self):
        super().__init__()
        self.bank = collections.deque(maxlen=6)

    def forward(self, x):
        y = super().forward(x)
        self.bank.append(y.detach().clone())
        return y + sum(self.bank)


class Collects(Block):
    """Collects what nobody empties."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach().clone())
        return super().forward(x)


class ReplacesCache(Block):
    """Keeps what it saw in a dict, and a new dict in every step; peaks in forward."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def forward(self, x):
        self.seen = {**self.seen, "latest": x.detach().repeat(4, 1)}
        with torch.no_grad():
            shift = x.repeat(64, 1).exp().mean(0)
        return super().forward(x + shift)


class IndexesByArray(Block):
    """Reads elements by arrays of NumPy, whose memory is not PyTorch's."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns = np.triu_indices(ROWS, k=1)

    def forward(self, x):
        products = x @ x.T
        upper = products[self.rows, self.columns]
        copied = products[torch.tensor(self.columns), torch.from_numpy(self.rows)]
        return super().forward(x + (upper * copied).mean())


class KeepsPlainTensors(Block):
    """Has tensors that are no buffers, which no step meets."""

    def __init__(self):
        super().__init__()
        self.default, self.sums = torch.zeros(ROWS, WIDTH), [torch.zeros(ROWS, WIDTH)]


class GrowsBuffer(Block):
    """Makes an empty buffer as large as what it keeps there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("latest", torch.tensor([]))

    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            self.latest.resize_(x.shape[0], 4 * x.shape[1])
            self.latest.copy_(y.repeat(1, 4))
        return y


class FakesQuantization(Block):
    """Its statistics are as many as there are channels, from its first step on."""

    def __init__(self):
        super().__init__()
        statistics = (torch.tensor([]), torch.tensor([]), torch.ones(1))
        self.statistics = [*statistics, torch.zeros(1, dtype=torch.int32)]
        self.is_on = torch.ones(1, dtype=torch.long)

    def forward(self, x):
        weight = torch.fused_moving_avg_obs_fake_quant(
            *(self.up.weight, self.is_on, self.is_on, *self.statistics),
            *(0.01, -128, 127, 0, True, True),
        )
        return x + self.down(functional.gelu(functional.linear(x, weight)))


class Checkpointed(Block):
    """Checkpoints by itself, which keeps states of the random generator."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class _Double(torch.autograd.Function):
    """Changes its argument in place."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class MarksDirty(Block):
    def forward(self, x):
        return x + self.down(_Double.apply(functional.gelu(self.up(x))))


class CopiesPart(Block):
    """Copies a part of itself, frozen, in every step."""

    def forward(self, x):
        frozen = copy.deepcopy(self.up).requires_grad_(False)
        return super().forward(x) + frozen(x).mean(1, keepdim=True)


class Vectorized(Block):
    """Calls modules under `torch.vmap`."""

    def forward(self, x):
        return x + torch.vmap(super().forward)(x)


class Infers(Block):
    """Runs its modules in inference mode as well."""

    def forward(self, x):
        with torch.inference_mode():
            scale = super().forward(x).mean()
        return super().forward(x) * scale.clone()


class Conjugates(nn.Module):
    """Products with conjugate and negative views, which some kernels copy first."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / 8)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        z = torch.complex(x, x.flip(-1)) @ self.mix
        square = (z * z.conj()).real.sqrt()
        return self.down(square + z.imag + torch.view_as_real(z)[..., 0])


class Counts(Block):
    """Takes more in an op the fewer distinct values there are."""

    def forward(self, x):
        hidden = self.up(x)
        kinds = torch.unique(hidden.detach().round())
        return x + self.down(functional.gelu(hidden) + kinds.sum())


class CallsSkeleton(nn.Module):
    """Gives weights to a module without memory, as ensembles by `torch.func` do."""

    def __init__(self):
        super().__init__()
        blocks = [Block() for _ in range(2)]
        stacked, _ = torch.func.stack_module_state(blocks)
        self.weights = nn.ParameterList(stacked.values())
        self.names, self.skeleton = list(stacked), [copy.deepcopy(blocks[0]).to("meta")]

    def forward(self, x):
        weights = dict(zip(self.names, self.weights, strict=True))

        def call(weights):
            return torch.func.functional_call(self.skeleton[0], weights, (x,))

        return torch.vmap(call)(weights).mean(0)


class Folds(Block):
    """`fold` keeps the memory of its input."""

    def forward(self, x):
        images = super().forward(x).view(-1, 1, 16, 16)
        return functional.fold(functional.unfold(images, 3), 16, 3).reshape(x.shape)


class Picks(Block):
    """Backward of indexing writes into zeros in place."""

    def forward(self, x):
        x = super().forward(x)
        order = x.sum(1).argsort()
        rows = x[order]
        return rows.sort(1).values + x.gather(1, (x > 0).long())


class Shares(Block):
    """Is handed an object that the last block fills, as layers share their keys."""

    def forward(self, x, states, fills):
        x = super().forward(x)
        if fills:
            states["latest"] = torch.cat([x, x.sin()], 1)
        return x


class SharesStates(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Shares() for _ in range(4))

    def forward(self, x):
        states = collections.UserDict()
        for block in self.blocks:
            x = block(x, states, fills=block is self.blocks[-1])
        return x * states["latest"].mean()


class Ignores(Block):
    """Is handed a tensor that nothing in it reads."""

    def forward(self, x, context):
        return super().forward(x)


class IgnoresContext(nn.Module):
    """Blocks get what another one made, and no gradient comes back to that."""

    def __init__(self):
        super().__init__()
        self.first = Block()
        self.blocks = nn.ModuleList(Ignores() for _ in range(4))

    def forward(self, x):
        context = self.first(x)
        for block in self.blocks:
            x = block(x, context)
        return x


class Doubled(nn.Module):
    def forward(self, weight):
        return torch.tanh(weight) * 2


class Parametrized(Block):
    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.up, "weight", Doubled())


class CastsWeights(Block):
    """Casts a layer to another type for good when it is called first."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()

    def forward(self, x):
        hidden = x * torch.empty_like(x).uniform_(0.9, 1.1)
        self.router = self.router.float()
        weights = functional.softmax(self.router(hidden), dim=-1, dtype=torch.float32)
        return super().forward(x * weights)


class CastsWeightsUnderAutocast(CastsWeights):
    """Likewise, and autocast casts what was cast."""

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            return super().forward(x)


class Aligns(nn.Module):
    """A loss whose kernel writes lengths into new memory past all ops."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, scores):
        length, rows, _ = scores.shape
        targets = torch.arange(rows).view(rows, 1) % 3 + 1
        return functional.ctc_loss(
            scores * self.factor, targets, (length,) * rows, (1,) * rows
        )


class AlignsThrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.losses = nn.ModuleList(Aligns() for _ in range(3))

    def forward(self, scores):
        return torch.stack([loss(scores) for loss in self.losses])


class Blocks(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def rows():
    return torch.randn(ROWS, WIDTH)


def mean_square(output):
    return output.square().mean()


def of(block):
    return Case(lambda: Blocks(block), rows, mean_square)


HABITS = (
    *(MakesAttribute, SharesTable, KeepsTable, KeepsBuffers, KeepsLatest),
    *(KeepsPlainTensors, ReplacesCache, GrowsBuffer, FakesQuantization, FillsQueue),
    *(Checkpointed, MarksDirty, KeepsGradient, IndexesByArray),
    *(Vectorized, Infers, Folds, Picks, Parametrized, CopiesPart),
    *(Conjugates, Counts, CallsSkeleton, CastsWeights, CastsWeightsUnderAutocast),
)


@pytest.mark.filterwarnings("ignore:The floor is the peak without a plan")
@pytest.mark.slow_but_first
@pytest.mark.parametrize("block", HABITS)
def test_a_plan_keeps_its_budget_and_every_bit(block):
    case = of(block)
    profile = autosac.calibrate(case.profile(), progress=False)
    floor, peak = autosac.floor(profile), profile.baseline_peak_bytes
    plan = autosac.plan(profile, memory_budget=floor + (peak - floor) // 20)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # first steps that make tables depart
        steps = 8 if block is FillsQueue else 2
        done = autosac.verify(
            *(plan, case.model, case.inputs),
            loss_fn=mean_square,
            steps=steps,
            timing_rounds=0,
        )

    assert not done.differences
    assert done.measured_peak_bytes <= plan.budget_bytes
    assert done.predicted_peak_bytes == pytest.approx(
        done.measured_peak_bytes, rel=0.002, abs=64
    )


def test_a_table_that_changes_before_backward_is_an_error():
    case = of(SharesTable)
    profile = case.profile()
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))
    model = case.model()
    plan.apply(model)

    with pytest.warns(UserWarning, match="where its plan expects"):
        loss = mean_square(model(rows()))
    positions(ROWS)._base.mul_(2)

    with pytest.raises(RuntimeError, match="changed in between"):
        loss.backward()


@pytest.fixture
def filled_memory():
    """PyTorch fills what `torch.empty` and its like return, with what is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_memory")
def test_memory_that_a_kernel_fills_past_all_ops_is_not_made_again():
    case = Case(AlignsThrice, lambda: torch.randn(2, 64, 4), torch.Tensor.sum)
    profile = case.profile(torch.optim.AdamW)
    floor, peak = autosac.floor(profile), profile.baseline_peak_bytes
    expected = train(case, case.model())

    for share in range(8):
        model = case.model()
        budget = floor + (peak - floor) * share // 8
        plan = autosac.plan(profile, memory_budget=budget)
        assert plan.policy
        plan.apply(model)
        assert_equal(expected, train(case, model))


def test_modules_in_lists_count_once():
    plain, hiding = Blocks(Block), Blocks(Block)
    hiding.teacher = [nn.Linear(WIDTH, WIDTH, bias=False)]
    hiding.layers = {"first": next(hiding.children())}  # registered: counted anyway
    peaks = [
        autosac.profile(model, rows(), loss_fn=mean_square).baseline_peak_bytes
        for model in (plain, hiding)
    ]
    assert peaks[1] - peaks[0] == hiding.teacher[0].weight.nbytes


class TrainsList(Block):
    """Trains a module that it keeps in a list, and a tensor that is no parameter."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(WIDTH, requires_grad=True)
        self.more = [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x):
        return self.more[0](super().forward(x) * self.scale)


def test_gradients_of_modules_in_lists_stay_for_good_and_are_said():
    case = of(TrainsList)
    with pytest.warns(UserWarning, match="12 tensors of the model get gradients, 17"):
        profile = autosac.calibrate(case.profile(), progress=False)
    floor, peak = autosac.floor(profile), profile.baseline_peak_bytes
    plan = autosac.plan(profile, memory_budget=(floor + peak) // 2)

    done = autosac.verify(
        plan, case.model, case.inputs, loss_fn=mean_square, timing_rounds=0
    )

    assert plan.policy and not done.differences
    assert done.measured_peak_bytes <= plan.budget_bytes
    assert done.predicted_peak_bytes == pytest.approx(
        done.measured_peak_bytes, rel=0.002, abs=64
    )


@pytest.mark.slow
def test_modules_that_keep_more_with_every_step_are_said():
    with pytest.warns(UserWarning, match="keep 32.0 KiB more with every step"):
        of(Collects).profile()


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("model", [SharesStates, IgnoresContext])
def test_units_keep_neither_what_an_argument_holds_later_nor_what_made_it(model):
    case = Case(model, rows, mean_square)
    profile = autosac.calibrate(case.profile(), progress=False)

    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))  # no warning
    done = autosac.verify(
        plan, case.model, case.inputs, loss_fn=mean_square, timing_rounds=0
    )

    assert plan.dry_run and len(plan.policy) >= 2
    assert not done.differences
    assert done.predicted_peak_bytes == pytest.approx(
        done.measured_peak_bytes, rel=0.002, abs=64
    )


def test_a_function_that_marks_tensors_as_dirty_makes_no_unit():
    refused = of(MarksDirty).profile().units.refused

    assert set(refused) == {f"blocks.{i}" for i in range(4)}
    assert "dirty" in refused["blocks.0"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "block", [KeepsTable, KeepsLatest, CastsWeights, CastsWeightsUnderAutocast]
)
def test_units_that_depart_find_containers_as_forward_did(block):
    case = of(block)
    model, plain = case.model(), case.model()
    profile = case.profile(torch.optim.AdamW)
    autosac.plan(profile, memory_budget=autosac.floor(profile)).apply(model)
    expected = train(case, plain, steps=3)

    with pytest.warns(UserWarning, match="where its plan expects"):
        states = train(case, model, steps=3)

    assert_equal(expected, states)


def test_units_that_depart_find_parametrized_weights_as_forward_did():
    case = of(Parametrized)
    model, plain = case.model(), case.model()
    profile = case.profile()
    autosac.plan(profile, memory_budget=autosac.floor(profile)).apply(model)
    gradients = []
    for twin in (plain, model):
        with warnings.catch_warnings(), parametrize.cached():
            warnings.simplefilter("ignore")  # weights of the second pass are cached
            loss = mean_square(twin(case.inputs())) + mean_square(twin(case.inputs()))
        loss.backward()
        gradients.append([parameter.grad for parameter in twin.parameters()])

    assert all(map(torch.equal, *gradients))


def test_weights_that_the_loop_keeps_are_said():
    case = of(Parametrized)
    model = case.model()
    profile = case.profile()
    autosac.plan(profile, memory_budget=autosac.floor(profile)).apply(model)

    mean_square(model(case.inputs())).backward()  # says nothing
    with parametrize.cached(), pytest.warns(UserWarning) as caught:
        mean_square(model(case.inputs())).backward()

    told = [str(one.message) for one in caught]
    assert (
        sum("inside of `torch.nn.utils.parametrize.cached()`" in t for t in told) == 1
    )


def test_hooks_around_the_step_are_said_once():
    case = of(Block)
    model = case.model()
    profile = case.profile()
    autosac.plan(profile, memory_budget=autosac.floor(profile)).apply(model)

    mean_square(model(case.inputs())).backward()  # says nothing
    model.zero_grad()
    with pytest.warns(UserWarning, match="inside of `saved_tensors_hooks`") as caught:
        for _ in range(2):
            with torch.autograd.graph.save_on_cpu():
                loss = mean_square(model(case.inputs()))
            loss.backward()
            model.zero_grad()

    assert len(caught) == 1


class Switches(nn.Module):
    """Blocks that it checkpoints, all together, if that is switched on."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.checkpoints = False

    def forward(self, x):
        if self.checkpoints:
            return checkpoint(self.blocks, x, use_reentrant=False)
        return self.blocks(x)


def test_checkpointing_that_is_switched_on_after_planning_is_called_that():
    case = Case(Switches, rows, mean_square)
    model, plain = case.model(), case.model()
    profile = case.profile(torch.optim.AdamW)
    autosac.plan(profile, memory_budget=autosac.floor(profile)).apply(model)
    model.checkpoints = True
    expected = train(case, plain, steps=2)

    with pytest.warns(UserWarning) as caught:
        states = train(case, model, steps=2)

    assert_equal(expected, states)
    assert any("was switched on after planning" in str(w.message) for w in caught)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_alone", "left_out"),
    [
        (True, "0.blocks.0"),
        pytest.param(False, "1.blocks.0", marks=pytest.mark.slow),
    ],
)
def test_units_whose_dry_run_is_not_as_simulated_are_left_out_and_said(
    monkeypatch, is_alone, left_out
):
    # alone: those of 0 are not as simulated; else they are but beside those of 1
    case = Case(lambda: nn.Sequential(Blocks(Block), Blocks(Folds)), rows, mean_square)
    profile, twin = (
        autosac.calibrate(case.profile(), progress=False) for _ in range(2)
    )
    simulated, peak = autosac.floor(twin), profile.baseline_peak_bytes
    install = installing.install

    def some(model, policies):
        if is_alone or any(p.fqn.startswith("1.") for p in policies):
            policies = tuple(p for p in policies if not p.fqn.startswith("0."))
        install(model, policies)

    monkeypatch.setattr(dry_running.installing, "install", some)  # of dry runs

    with pytest.warns(UserWarning, match="It is left out, and the rest is planned"):
        floor = autosac.floor(profile)
    plan = autosac.plan(profile, memory_budget=floor)
    with pytest.raises(InfeasibleBudgetError) as caught:
        autosac.plan(profile, memory_budget=floor - 1)

    assert simulated < floor == caught.value.lowest_peak_bytes < peak
    assert "other memory than its trace shows" in profile.units.refused[left_out]
    assert plan.dry_run
    assert not plan.policy.keys() & profile.units.refused.keys()
