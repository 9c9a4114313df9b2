"""Steps whose units have arguments in far memory: bits, peaks, and what is left."""

import gc
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

import autosac
from autosac import far_memory
from autosac.checkpointing import installing
from autosac.checkpointing.running_step import Step
from autosac.errors import ArgumentError, InfeasibleBudgetError, PlanMismatchError
from autosac.far_memory import FarMemory
from autosac.planning.dry_running import difference_in_dry_run
from autosac.planning.spelling import spell_out
from autosac.profiles.restricting import restricted
from autosac.quantities import format_ms
from autosac.solving.correcting import Search
from autosac.solving.incumbents import far_bytes, recompute_ms
from autosac.solving.rules_of_thumb import policy_saving
from autosac.solving.step_model import Floor
from autosac.units.far_units import FarUnit
from autosac.units.policies import SAVE
from autosac.verification.recipes import Recipe
from autosac.verification.verifying import verify_each
from tests.far_choices import KINDS, far_choice, with_twins
from tests.models import CASES, Case
from tests.test_chains import Block, Noisy
from tests.training import assert_equal, train

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, DEPTH = 16, 600, 6
SLOW_BYTES_PER_S = 1e8


class Stack(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Shared(Stack):
    """Every block gets the same second argument, and views of it and of its own."""

    def __init__(self):
        super().__init__(Sharing)

    def forward(self, x):
        table = torch.tanh(x)
        for block in self.blocks:
            x = block(x, table, (x[: ROWS // 2], {"last": x.t()}))
        return x.square().mean()


class Sharing(Block):
    def forward(self, x, table, more):
        first, others = more
        x = super().forward(x * table)
        return x + first.mean() * others["last"].t()


def rows():
    return torch.randn(ROWS, WIDTH)


STEPS = {
    "blocks": Case(Stack, rows),
    "noisy blocks": Case(lambda: Stack(Noisy), rows),
    "shared tensors": Case(Shared, rows),
    **{name: CASES[name] for name in ("gpt", "convolutions", "tied weights", "bert")},
}


@dataclass(frozen=True)
class Applied:
    """Units that run under policies, with far memory as fast as one likes."""

    policies: tuple
    peak_bytes: int
    budget_bytes: int
    bytes_per_s: float | None = None

    def apply(self, model):
        step = Step()
        threads = {} if self.bytes_per_s is None else {"at_once_bytes": 0}
        step.memory = FarMemory(bytes_per_s=self.bytes_per_s, **threads)
        installing.install(model, self.policies, step)
        return step


def applied(step, chosen, **options):
    peak_bytes = step.peak_bytes(chosen)
    policies = spell_out(step, chosen)
    return Applied(policies, peak_bytes, peak_bytes, **options)


def far_step(case, *, is_measured=True):
    step = case.profile()
    # so that it pays for tensors this small
    link = step.device.link.without_issue
    step = replace(step, device=replace(step.device, link=link))
    if is_measured:
        step = autosac.calibrate(step, progress=False)
    return restricted(step, offload=True)


def overstated(done):
    """Bytes, of numbers that autograd may keep or not: no fake tensor shows them."""
    return done.predicted_peak_bytes - done.measured_peak_bytes


@pytest.fixture(scope="module")
def step():
    return far_step(STEPS["blocks"])


@pytest.fixture(scope="module", params=[*KINDS, "mixed"])
def lowest(step, request):
    """The choice of least peak; and the same with units of other kinds."""
    chosen = step.chooser.lowest()
    assert any(isinstance(unit, FarUnit) for unit in chosen)
    kinds = tuple(KINDS) if request.param == "mixed" else (request.param,)
    chosen = with_twins(step, chosen, kinds)
    if "results" not in kinds:
        return chosen
    saved = {unit: policy_saving(unit, unit.results) for unit in chosen
             if isinstance(unit, FarUnit) and unit.results}  # fmt: skip
    assert all(unit.results_bytes(policy) for unit, policy in saved.items())
    assert saved
    return {**chosen, **saved}


@pytest.fixture(params=[0, 2**19])
def planned(step, lowest, request):
    """A model under the plan of least peak, and its far memory; threads copy or not."""
    model = STEPS["blocks"].model()
    memory = applied(step, lowest).apply(model).memory
    memory.at_once_bytes = request.param
    return model, memory


@pytest.mark.slow
@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *(("blocks", (kind,)) for kind in ("late", "early", "results")),
        *((name, tuple(KINDS)) for name in STEPS),
    ],
)
def test_real_steps_have_the_same_bits_and_the_predicted_peak_at_any_rate(name, kinds):
    case = STEPS[name]
    step = far_step(case)
    choices = [far_choice(step, seed, kinds) for seed in range(6)]
    moved = [c for c in choices if any(isinstance(u, FarUnit) for u in c)][:2]
    assert moved
    plans = [
        applied(step, chosen, bytes_per_s=rate)
        for chosen in moved
        for rate in (None, SLOW_BYTES_PER_S)
    ]
    recipe = Recipe(
        make_model=case.model,
        make_inputs=case.inputs,
        loss_fn=case.loss_fn,
        timing_rounds=0,
    )

    done = verify_each(plans, recipe)
    assert not any(one.differences for one in done)
    for fast, slow in zip(done[::2], done[1::2], strict=True):
        assert fast.measured_peak_bytes == slow.measured_peak_bytes
        assert 0 <= overstated(fast) <= step.simulator.number_bytes


@pytest.mark.slow_but_fifth
def test_a_step_moves_every_storage_once(planned, lowest):
    model, memory = planned
    train(STEPS["blocks"], model, steps=3)

    assert memory.peak_bytes == memory.pooled_bytes == far_bytes(lowest)


def num_copies(unit, policy):
    """How many storages a unit has prefetched."""
    if not isinstance(unit, FarUnit) or unit.fetched is None:
        return 0
    saved = [g for g in unit.results if policy.choices[g] == SAVE]
    return len(unit.far) + sum(len(unit.groups[g].storages) for g in saved)


def test_copies_back_begin_before_reruns_where_they_are_prefetched(
    planned, lowest, monkeypatch
):
    monkeypatch.setattr(planned[1], "at_once_bytes", 0)
    begun = []
    begin = far_memory.Sent.begin

    def noted(sent, target):
        begun.append(sent._back is None)
        begin(sent, target)

    monkeypatch.setattr(far_memory.Sent, "begin", noted)
    train(STEPS["blocks"], planned[0], steps=1)
    assert sum(begun) == sum(num_copies(*item) for item in lowest.items())


def test_views_of_a_storage_move_with_it():
    step = far_step(STEPS["shared tensors"])
    nbytes = 4 * ROWS * WIDTH
    # What all blocks share none of them moves: it would free nothing.
    assert {unit.arguments_bytes for unit in step.far_units} == {nbytes}


def no_backward(model, inputs):
    model(inputs)


def evaluates(model, inputs):
    with torch.no_grad():
        model(inputs)


def fails_in_forward(model, inputs):
    hook = model.blocks[4].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(inputs)
    hook.remove()


def fails_in_backward(model, inputs):
    hook = model.blocks[2].up.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(inputs).backward()
    hook.remove()
    # PyTorch itself holds a part of the graph that failed until the next backward pass.
    torch.ones(1, requires_grad=True).sum().backward()


def stops_early(model, inputs):
    loss = model(inputs)
    torch.autograd.grad(loss, [model.blocks[3].up.weight])


def keeps_graph(model, inputs):
    loss = model(inputs)
    loss.backward(retain_graph=True)
    loss.backward()


def fail(*_):
    raise ZeroDivisionError


def assert_empties(memory):
    """Nothing is in use once the copies that still run have ended."""
    deadline = time.monotonic() + 60
    while memory.in_use_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert memory.in_use_bytes == 0


each_run = pytest.mark.parametrize(
    "run",
    [no_backward, evaluates, fails_in_forward, fails_in_backward, stops_early,
     keeps_graph],
)  # fmt: skip


def assert_as_ever(model, memory, run):
    """A run leaves nothing in far memory, and the next step is the plain one."""
    run(model, STEPS["blocks"].inputs())
    gc.collect()
    assert_empties(memory)

    model.zero_grad()
    assert_equal(
        train(STEPS["blocks"], STEPS["blocks"].model()), train(STEPS["blocks"], model)
    )
    assert_empties(memory)


@pytest.mark.slow_but_fifth
@each_run
def test_nothing_stays_in_far_memory_and_the_next_step_is_as_ever(planned, run):
    assert_as_ever(*planned, run)


@pytest.mark.slow_but_fifth
def test_two_backward_passes_get_the_arguments_twice(planned):
    model, _ = planned
    plain, inputs = STEPS["blocks"].model(), STEPS["blocks"].inputs()
    for one in (plain, model):
        keeps_graph(one, inputs)

    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_a_second_backward_without_the_graph_is_an_error(planned):
    loss = planned[0](STEPS["blocks"].inputs())
    loss.backward()

    with pytest.raises(RuntimeError):
        loss.backward()


@pytest.mark.slow_but_fifth
def test_second_derivatives_are_those_of_the_plain_model(planned):
    inputs = STEPS["blocks"].inputs()
    penalties = []
    for model in (STEPS["blocks"].model(), planned[0]):
        weights = list(model.parameters())
        first = torch.autograd.grad(model(inputs), weights, create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        penalties.append(torch.autograd.grad(penalty, weights, allow_unused=True))

    pairs = zip(*penalties, strict=True)
    assert all(one is other or torch.equal(one, other) for one, other in pairs)


def test_arguments_of_few_numbers_are_moved_in_a_dry_run_as_well():
    case = Case(Stack, lambda: torch.randn(6, WIDTH))
    step = restricted(case.profile(), offload=True)
    chosen = {unit: policy_saving(unit, ()) for unit in step.far_units}

    assert chosen and not difference_in_dry_run(step, chosen)


class Changing(Stack):
    """Changes an argument of a block in place, before or after that lets go of it."""

    when = ""

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            given = x
            x = block(x)
            if number == 2 and self.when == "before":
                given.data.zero_()
                given.detach().zero_()
            if number == 2:
                kept = given
            if number == 4 and self.when == "after":
                kept.detach().zero_()
        return x.square().mean()


def changing(step, lowest, when):
    model = Case(Changing, rows).model()
    model.when = when
    applied(step, lowest).apply(model)
    return model


def test_a_change_in_place_while_arguments_are_copied_is_an_error(step, lowest):
    model = changing(step, lowest, "before")

    with pytest.raises(RuntimeError, match="changed in place"):
        model(STEPS["blocks"].inputs()).backward()


def test_a_change_in_place_after_that_changes_no_gradient(step, lowest):
    model, plain = changing(step, lowest, "after"), STEPS["blocks"].model()
    for one in (model, plain):
        one(STEPS["blocks"].inputs()).backward()

    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


@pytest.mark.slow_but_fifth
def test_a_unit_that_departs_keeps_its_arguments(planned):
    model, memory = planned
    plain = STEPS["blocks"].model()
    with (
        pytest.warns(UserWarning, match="was replaced after a plan"),
        pytest.warns(UserWarning, match="where its plan expects"),
    ):
        for one in (plain, model):
            for block in one.blocks:
                block.norm = nn.Sequential(nn.Tanh(), nn.LayerNorm(WIDTH))
            torch.manual_seed(0)
            one(STEPS["blocks"].inputs()).backward()

    assert memory.peak_bytes == 0
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


# --- plans ------------------------------------------------------------------------


def budgets(step):
    low, floor = autosac.floor(step), autosac.floor(step.plain)
    peak = step.baseline_peak_bytes
    return [low, (low + floor) // 2, floor, (floor + peak) // 2, peak]


@pytest.mark.slow
def test_offload_lowers_the_floor_and_costs_no_more_above_it(step):
    low, _, floor, *_ = budgets(step)
    assert low < floor
    before_ms = float("inf")
    for budget in budgets(step):
        far = autosac.plan(step.plain, memory_budget=budget, offload=True)
        assert far.dry_run and far.peak_bytes <= budget
        assert far.bound_ms <= far.recompute_ms <= before_ms
        before_ms = far.recompute_ms
        if budget >= floor:
            plain = autosac.plan(step.plain, memory_budget=budget)
            assert far.recompute_ms <= plain.recompute_ms
            assert not plain.offloaded_bytes and not plain.exposed_ms
        else:
            assert 0 < far.exposed_ms <= far.recompute_ms
            assert far.offloaded_bytes > 0


@pytest.mark.slow
def test_a_slower_link_never_makes_a_plan_cheaper(step):
    budget = budgets(step)[2]
    times = []
    for gb_per_s in (0.01, 0.1, 1, 10, 100):
        link = replace(
            step.device.link,
            out_bytes_per_s=1e9 * gb_per_s,
            back_bytes_per_s=1e9 * gb_per_s,
        )
        faster = replace(step.plain, device=replace(step.device, link=link))
        times.append(
            autosac.plan(faster, memory_budget=budget, offload=True).recompute_ms
        )
    assert times == sorted(times, reverse=True)


def test_a_real_step_keeps_a_budget_below_the_floor_without(step):
    case = STEPS["blocks"]
    plan = autosac.plan(step.plain, memory_budget=budgets(step)[0], offload=True)
    done = autosac.verify(plan, case.model, case.inputs, timing_rounds=0)

    assert not done.differences
    assert 0 <= overstated(done) <= step.simulator.number_bytes
    assert plan.peak_bytes == plan.budget_bytes


@pytest.mark.slow
def test_far_memory_keeps_its_cap_and_more_of_it_never_costs_more(step):
    floor = budgets(step)[2]
    most_bytes = autosac.plan(
        step.plain, memory_budget=floor, offload=True
    ).offloaded_bytes
    times = []
    for share in (0, 1, 2, 3, 4):
        host_bytes = max(1, most_bytes * share // 4)
        plan = autosac.plan(
            step.plain, memory_budget=floor, offload=True, host_budget=host_bytes
        )
        assert plan.offloaded_bytes <= host_bytes
        assert plan.dry_run and plan.peak_bytes <= floor
        times.append(plan.recompute_ms)
    assert times == sorted(times, reverse=True)
    assert times[0] == autosac.plan(step.plain, memory_budget=floor).recompute_ms


def test_a_plan_for_more_far_memory_is_no_dearer_than_one_known_for_less(
    step, monkeypatch
):
    floor = budgets(step)[2]
    asked = partial(autosac.plan, step.plain, memory_budget=floor, offload=True)
    less_bytes = asked().offloaded_bytes // 3
    known = asked(host_budget=less_bytes)
    monkeypatch.setattr(Search, "run", lambda search: None)  # which finds nothing

    other = asked(host_budget=less_bytes + 1)

    assert other.recompute_ms <= known.recompute_ms


def test_the_floor_with_more_far_memory_is_no_higher_than_one_known_for_less(
    step, monkeypatch
):
    chooser = restricted(step.plain, offload=True, host_bytes=2**40).chooser
    less_bytes = far_bytes(chooser.lowest()) - 1
    known = restricted(step.plain, offload=True, host_bytes=less_bytes).chooser
    known_bytes = known.true_peak_bytes(known.lowest())
    more = restricted(step.plain, offload=True, host_bytes=less_bytes + 1).chooser
    everything = Floor(2**60, {}, more.no_bytes())
    monkeypatch.setattr(more, "_find_floor", lambda backend: everything)
    monkeypatch.setattr(more, "_mended", lambda choice: choice)

    assert known_bytes < step.plain.chooser.true_peak_bytes(step.plain.chooser.lowest())
    assert more.true_peak_bytes(more.lowest()) <= known_bytes


def test_reports_and_errors_say_what_offload_would_do(step):
    low, _, floor, *_ = budgets(step)
    plan = autosac.plan(step.plain, memory_budget=floor)
    far = autosac.plan(step.plain, memory_budget=floor, offload=True)

    assert far.recompute_ms < plan.recompute_ms
    told = f"would take {format_ms(far.recompute_ms)} of recomputation and waiting"
    assert told in " ".join(str(plan.report()).split())
    assert told not in " ".join(str(far.report()).split())
    with pytest.raises(InfeasibleBudgetError, match="`offload`=True fits"):
        autosac.plan(step.plain, memory_budget=low)


def test_auto_offloads_only_where_nothing_fits_without(step):
    low, _, floor, *_ = budgets(step)

    below = autosac.plan(step.plain, memory_budget=low, offload="auto")
    above = autosac.plan(step.plain, memory_budget=floor, offload="auto")
    assert below.offloaded_bytes and not above.offloaded_bytes
    with pytest.raises(InfeasibleBudgetError) as error:
        autosac.plan(step.plain, memory_budget=low - 1, offload="auto")
    assert error.value.lowest_peak_bytes == low


@pytest.mark.slow
def test_plan_files_hold_what_is_offloaded(tmp_path):
    # Not measured: what is offloaded is then the same on every machine.
    step = far_step(STEPS["blocks"], is_measured=False)
    plan = autosac.plan(
        step.plain, memory_budget=budgets(step)[2], offload=True, offload_dir=tmp_path
    )
    plan.save(tmp_path / "plan.json")
    loaded = autosac.Plan.load(tmp_path / "plan.json")

    assert loaded == plan
    assert loaded.offload_dir == str(tmp_path)
    assert autosac.check(loaded, step.plain) == plan.peak_bytes
    assert "arguments offloaded" in str(loaded) and "to a file" in str(loaded)
    assert "offload" in str(loaded.report(step.plain))


@pytest.mark.slow
def test_every_kind_of_batch_offloads_to_the_same_place(tmp_path):
    batches = [torch.randn(number, WIDTH) for number in (ROWS, ROWS // 2)]
    step = far_step(STEPS["blocks"])
    plan = autosac.plan(
        STEPS["blocks"].model(),
        batches,
        memory_budget=autosac.floor(step) + 1000,
        offload=True,
        offload_dir=tmp_path,
    )

    assert len(plan.variants) == 2
    assert {one.offload_dir for one in plan.each} == {str(tmp_path)}
    assert plan.each[0].offloaded_bytes


def test_a_step_of_a_plan_that_offloads_can_be_planned_without(step):
    low, _, floor, *_ = budgets(step)
    far = autosac.plan(step.plain, memory_budget=low, offload=True)

    assert autosac.floor(far.traced) == low
    assert autosac.floor(far.traced, offload=False) == floor
    assert not autosac.plan(far.traced, memory_budget=floor).offloaded_bytes


def test_a_plan_that_offloads_is_for_no_step_with_other_arguments(step, tmp_path):
    plan = autosac.plan(step.plain, memory_budget=budgets(step)[0], offload=True)
    other = Case(lambda: Stack(Noisy), rows).profile()

    with pytest.raises(PlanMismatchError):
        autosac.check(plan, other)


def test_far_memory_lies_where_it_is_asked_to(step, tmp_path, monkeypatch):
    plan = autosac.plan(
        step.plain, memory_budget=budgets(step)[0], offload=True, offload_dir=tmp_path
    )
    places = []
    make = far_memory.tempfile.TemporaryFile
    monkeypatch.setattr(
        far_memory.tempfile,
        "TemporaryFile",
        lambda dir: places.append(dir) or make(dir=dir),
    )
    model = plan.apply(STEPS["blocks"].model())
    model(STEPS["blocks"].inputs()).backward()
    assert set(places) == {str(tmp_path)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "sometimes"}, "`offload` must be True, False or 'auto'"),
        ({"offload": True, "offload_dir": "/no/such"}, "is no directory"),
    ],
)
def test_what_means_nothing_is_refused(step, options, message):
    with pytest.raises(ArgumentError, match=message):
        autosac.plan(step.plain, memory_budget="1GiB", **options)


def test_unapplied_models_run_as_ever(step):
    plan = autosac.plan(step.plain, memory_budget=budgets(step)[0], offload=True)
    model = STEPS["blocks"].model()
    forwards = [dict(module.__dict__) for module in model.modules()]
    plan.unapply(plan.apply(model))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [dict(module.__dict__) for module in model.modules()] == forwards


# --- capped far memory --------------------------------------------------------------


@pytest.fixture(scope="module")
def three():
    """A step of few candidates: three blocks, of which two can be moved."""

    class Three(Stack):
        def __init__(self):
            super().__init__()
            del self.blocks[3:]

    profile = autosac.calibrate(Case(Three, rows).profile(), progress=False)
    return restricted(profile, ac_units=["blocks.*"])


def every_choice(step):
    """All choices of points of units of which none lies in another one."""
    choices = [{}]
    of_unit = dict(zip(step.formulation.units, step.formulation.curves, strict=True))
    for unit, curve in of_unit.items():
        choices += [
            {**chosen, unit: policy}
            for chosen in choices
            if not any(
                one.call.enter <= unit.call.exit and unit.call.enter <= one.call.exit
                for one in chosen
            )
            for policy in curve.policies
        ]
    return choices


@pytest.mark.slow
def test_no_choice_within_the_cap_on_far_memory_takes_less(three):
    nbytes = 4 * ROWS * WIDTH
    choices = every_choice(restricted(three, offload=True))
    figures = [(three.peak_bytes(c), far_bytes(c), recompute_ms(c)) for c in choices]
    for host_bytes in (1, nbytes, 2 * nbytes - 1, 2 * nbytes):
        fitting = [(peak, ms) for peak, far, ms in figures if far <= host_bytes]
        capped = restricted(three, offload=True, host_bytes=host_bytes)
        assert autosac.floor(capped) <= min(peak for peak, _ in fitting)
        assert far_bytes(capped.chooser.lowest()) <= host_bytes
        for budget in sorted({peak for peak, _ in fitting})[::7]:
            plan = autosac.plan(
                three, memory_budget=budget, offload=True, host_budget=host_bytes,
                relative_gap=0.0,
            )  # fmt: skip
            least_ms = min(ms for peak, ms in fitting if peak <= budget)
            assert plan.offloaded_bytes <= host_bytes
            assert plan.bound_ms <= plan.recompute_ms <= least_ms * (1 + 1e-9)
