import warnings

import pytest
import torch
from torch import nn

import autosac
from autosac.checkpointing import installing
from autosac.planning import choices, dry_running
from autosac.tracing.trace import dry_run
from autosac.units.curves import trade_off
from tests.models import (
    BATCH,
    CASES,
    WIDTH,
    Case,
    Mlp,
    each_case,
    gpt,
    random_choice,
    shared_profile,
)

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ["mlp", "gpt", "convolutions", "list inputs", "noise", "dict outputs"]
SHARES = (0.0, 0.1, 0.3, 0.6, 0.9, 1.0)  # of the way from the floor to the baseline


def _batch():
    return torch.randn(64 * BATCH, WIDTH)


BIG_MLP = Case(lambda: nn.Sequential(*Mlp(), *Mlp()), _batch)  # activations dominate


def profile_of(name):
    case = BIG_MLP if name == "mlp" else CASES[name]
    return case.profile(torch.optim.AdamW)


def budgets(traced):
    lowest, baseline = autosac.floor(traced), traced.baseline_peak_bytes
    return [round(lowest + share * (baseline - lowest)) for share in SHARES]


@pytest.fixture(scope="module")
def mlp():
    return profile_of("mlp")


@pytest.fixture(scope="module")
def tight(mlp):
    """A plan that has to recompute."""
    return autosac.plan(mlp, memory_budget=autosac.floor(mlp))


# --- budgets ----------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", NAMES)
def test_peaks_keep_budgets_and_more_budget_never_costs_more(name):
    traced = profile_of(name)
    last_ms = float("inf")
    for budget in budgets(traced):
        plan = autosac.plan(traced, memory_budget=budget)

        assert plan.peak_bytes <= budget == plan.budget_bytes
        assert plan.baseline_peak_bytes == traced.baseline_peak_bytes
        assert sum(plan.composition.values()) == plan.peak_bytes
        assert 0.0 <= plan.bound_ms <= plan.recompute_ms
        assert 0.0 <= plan.optimality_gap <= 1.0
        assert plan.recompute_ms <= last_ms
        assert plan.step_ms == pytest.approx(traced.baseline_ms + plan.recompute_ms)
        assert all(0.0 <= ratio <= 1.0 for ratio in plan.policy.values())
        last_ms = plan.recompute_ms


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", NAMES)
def test_the_baselines_budget_recomputes_nothing(name):
    traced = profile_of(name)
    baseline = traced.baseline_peak_bytes
    for budget in (baseline, baseline + 1, 2 * baseline):
        plan = autosac.plan(traced, memory_budget=budget)

        assert plan.policy == {}
        assert plan.recompute_ms == plan.bound_ms == plan.optimality_gap == 0.0
        assert plan.peak_bytes == baseline


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", NAMES)
def test_the_floor_is_the_least_feasible_budget(name):
    traced = profile_of(name)
    lowest = autosac.floor(traced)
    assert lowest <= traced.baseline_peak_bytes

    assert autosac.plan(traced, memory_budget=lowest).peak_bytes <= lowest
    with pytest.raises(autosac.InfeasibleBudgetError) as caught:
        autosac.plan(traced, memory_budget=lowest - 1)

    error = caught.value
    assert error.budget_bytes == lowest - 1
    assert error.lowest_peak_bytes == lowest
    assert sum(error.composition.values()) == lowest
    assert f"{lowest} bytes" in str(error)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_trains_bit_identically_within_its_budget(name):
    case = BIG_MLP if name == "mlp" else CASES[name]
    traced = autosac.calibrate(profile_of(name))
    plan = autosac.plan(traced, memory_budget=budgets(traced)[2])

    verification = autosac.verify(
        plan,
        case.model,
        case.inputs,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        loss_fn=case.loss_fn,
        timing_rounds=0,
    )

    assert verification.differences == ()
    assert verification.within_budget


_BOTH = {"autocast": torch.bfloat16, "accumulate": 2}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("gpt", {"autocast": torch.bfloat16}, id="gpt-autocast"),
        pytest.param(
            "gpt", {"accumulate": 3}, id="gpt-accumulate", marks=pytest.mark.slow
        ),
        pytest.param(
            "convolutions", _BOTH, id="convolutions-both", marks=pytest.mark.slow
        ),
        pytest.param("llama", _BOTH, id="llama-both", marks=pytest.mark.slow),
    ],
)
def test_plans_hold_under_autocast_and_accumulation(name, settings):
    case = CASES[name]
    traced = autosac.calibrate(
        autosac.profile(
            case.model(),
            case.inputs(),
            optimizer=torch.optim.SGD,
            loss_fn=case.loss_fn,
            **settings,
        )
    )
    for budget in budgets(traced)[1:2]:
        plan = autosac.plan(traced, memory_budget=budget)

        verification = autosac.verify(
            plan,
            case.model,
            case.inputs,
            make_optimizer=lambda model: torch.optim.SGD(model.parameters()),
            loss_fn=case.loss_fn,
            timing_rounds=0,
            **settings,
        )

        assert verification.differences == ()
        assert verification.within_budget


def test_gradients_of_earlier_micro_steps_count():
    case = CASES["gpt"]
    once = shared_profile(case)

    thrice = autosac.profile(
        case.model(), case.inputs(), loss_fn=case.loss_fn, accumulate=3
    )

    gradients = sum(p.nbytes for p in case.model().parameters())
    assert thrice.baseline_peak_bytes > once.baseline_peak_bytes
    assert thrice.simulator.composition({})["gradient"] == gradients


@pytest.mark.slow_but_first
@each_case
def test_no_random_plan_peaks_below_the_floor(case):
    traced = shared_profile(case)
    lowest = autosac.floor(traced)
    for seed in range(10):
        chosen = random_choice(traced, seed, save_share=0.0 if seed < 15 else None)
        assert traced.simulator.peak_bytes(chosen) >= lowest


class Shifted(nn.Module):
    """Reads an argument that backward does not need."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, shift):
        return x + torch.tanh(torch.sin(torch.sigmoid(self.linear(x))) + shift)


class Shifting(nn.Module):
    """All parts share an argument, which the caller may change in between."""

    def __init__(self, step):
        super().__init__()
        self.parts = nn.ModuleList(Shifted() for _ in range(8))
        self.step = step

    def forward(self, x):
        shift = torch.zeros_like(x)
        for part in self.parts:
            x = part(x, shift)
            if self.step:
                shift.add_(self.step)
        return x


def test_the_floor_counts_an_argument_that_units_share_once():
    traced = Case(lambda: Shifting(0), _batch).profile()
    units = [u for u in traced.units.candidates if u.fqn.count(".") == 1]
    policies = trade_off(units[0]).policies  # the units are alike

    alike = [dict.fromkeys(units, policy) for policy in policies]

    lowest = min(traced.simulator.peak_bytes(chosen) for chosen in alike)
    assert lowest < traced.baseline_peak_bytes
    assert autosac.floor(traced) <= lowest


def test_a_plan_for_a_shared_argument_trains():
    case = Case(lambda: Shifting(0), _batch)
    traced = autosac.calibrate(shared_profile(case))

    plan = autosac.plan(traced, memory_budget=autosac.floor(traced))
    verification = autosac.verify(plan, case.model, case.inputs, timing_rounds=0)

    assert plan.policy
    assert verification.differences == ()
    assert verification.within_budget


def test_a_unit_whose_argument_changes_before_backward_is_refused():
    traced = Case(lambda: Shifting(1), _batch).profile()

    assert traced.units.refused["parts.0"] == (
        "one of its arguments is changed in place before backward"
    )


def test_budgets_are_read_as_text_too(mlp):
    baseline = mlp.baseline_peak_bytes

    assert autosac.plan(mlp, memory_budget="1GiB").budget_bytes == 2**30
    assert autosac.plan(mlp, memory_budget=str(baseline) + "B").policy == {}
    for text in ("lots", "-1GiB", "0GB", "101%"):
        with pytest.raises(ValueError, match="memory_budget"):
            autosac.plan(mlp, memory_budget=text)


# --- dry runs ---------------------------------------------------------------------


@pytest.fixture
def dry_runs(monkeypatch):
    """Counts the dry runs that planning makes."""
    observed = []

    def counted(*args, **options):
        observed.append(args)
        return dry_run(*args, **options)

    monkeypatch.setattr(dry_running, "dry_run", counted)
    return observed


def _plans(traced, num_plans, **options):
    lowest = traced.peak_bytes(choices.lowest(traced))
    highest = traced.baseline_peak_bytes
    steps = range(num_plans)
    sizes = [lowest + step * (highest - lowest) // num_plans for step in steps]
    return [autosac.plan(traced, memory_budget=size, **options) for size in sizes]


@pytest.mark.slow
def test_every_plan_of_a_small_step_is_dry_run_once(dry_runs):
    traced = profile_of("mlp")

    plans = _plans(traced, 3) + _plans(traced, 3)

    assert all(plan.dry_run for plan in plans)
    assert len(dry_runs) == len({plan.op_policies for plan in plans}) > 1
    assert "dry run" not in str(plans[0])


def test_one_plan_of_a_large_step_is_dry_run(dry_runs, monkeypatch):
    traced = profile_of("mlp")
    monkeypatch.setattr(dry_running, "_MANY_OPS", len(traced.tape.ops) - 1)

    plans = _plans(traced, 3)

    assert [plan.dry_run for plan in plans] == [True, False, False]
    assert len(dry_runs) == 1
    assert "without a dry run" in str(plans[1])


def test_the_plan_that_recomputes_nothing_confirms_no_other_one(dry_runs, monkeypatch):
    traced = profile_of("mlp")
    monkeypatch.setattr(dry_running, "_MANY_OPS", len(traced.tape.ops) - 1)

    autosac.plan(traced, memory_budget=traced.baseline_peak_bytes)
    plan = autosac.plan(traced, memory_budget=autosac.floor(traced))

    assert plan.dry_run
    assert len(dry_runs) == 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("wanted", "num_runs"), [(True, 6), (False, 0)])
def test_dry_runs_are_made_as_asked_for(wanted, num_runs, dry_runs, monkeypatch):
    traced = profile_of("mlp")
    monkeypatch.setattr(dry_running, "_MANY_OPS", len(traced.tape.ops) - 1)

    plans = _plans(traced, 3, dry_run=wanted) + _plans(traced, 3, dry_run=wanted)

    assert [plan.dry_run for plan in plans] == [wanted] * 6
    assert len(dry_runs) == num_runs


@pytest.mark.filterwarnings("ignore:.* got a forward hook")
def test_a_dry_run_of_memory_that_stays_for_the_optimizer_disagrees(monkeypatch):
    built, kept, install = profile_of("mlp"), [], installing.install

    def leaking(model, policies):
        handle = install(model, policies)
        model.register_forward_hook(lambda *_: kept.append(torch.ones(64)))
        return handle

    monkeypatch.setattr(installing, "install", leaking)

    with pytest.raises(autosac.SolverError, match="to the optimizer, its simulation"):
        autosac.plan(built, memory_budget=built.baseline_peak_bytes - 1)


def test_units_whose_dry_run_disagrees_are_left_out_and_nothing_is_confirmed(
    monkeypatch,
):
    traced = profile_of("mlp")
    lowest = choices.lowest(traced)
    unplanned = dry_run(traced.step, lambda model: None)
    monkeypatch.setattr(dry_running, "dry_run", lambda *_, **__: unplanned)

    with (
        pytest.warns(UserWarning, match="It is left out"),
        pytest.raises(autosac.InfeasibleBudgetError),
    ):
        autosac.plan(traced, memory_budget=traced.peak_bytes(lowest))

    assert not any(traced.dry_runs)  # of the plain step at most


@pytest.mark.slow
def test_what_the_floor_takes_is_planned_though_other_policies_are_left_out(
    monkeypatch,
):
    traced, difference = profile_of("mlp"), dry_running.difference_in_dry_run
    lowest = choices.lowest(traced)
    floor = autosac.floor(traced)

    def of_others(profile, chosen):
        return difference(profile, chosen) if chosen in ({}, lowest) else "It differs."

    monkeypatch.setattr(dry_running, "difference_in_dry_run", of_others)
    other = dict([*lowest.items()][:1])
    monkeypatch.setattr(choices, "choose", _first_this(other, choices.choose))
    with pytest.warns(UserWarning, match="It is left out"):
        own = autosac.plan(traced, memory_budget=floor)

    assert own.peak_bytes == floor
    assert own.dry_run


def _first_this(choice, choose):
    """Finds a choice once that is not as simulated, and then what there is."""
    choices = iter([(choice, 0.0)])

    def chosen(*args, **options):
        return next(choices, None) or choose(*args, **options)

    return chosen


# --- the answer -------------------------------------------------------------------


def test_the_policy_is_the_plans(mlp, tight):
    assert tight.policy
    assert autosac.policy(mlp, memory_budget=tight.budget_bytes) == tight.policy


def test_op_policies_name_an_action_for_every_op(tight):
    assert [entry.fqn for entry in tight.op_policies] == list(tight.policy)
    for entry in tight.op_policies:
        assert len(entry.actions) == len(entry.names) > 0
        assert set(entry.actions) <= set("SR-VX")


def test_units_do_not_nest():
    traced = profile_of("gpt")
    for budget in budgets(traced):
        names = list(autosac.policy(traced, memory_budget=budget))
        assert not any(
            a != b and f"{b}.".startswith(f"{a}.") for a in names for b in names
        )


@pytest.mark.parametrize("backend", ["highs", "cbc"])
def test_every_backend_keeps_the_budget(mlp, backend):
    for budget in budgets(mlp):
        plan = autosac.plan(mlp, memory_budget=budget, backend=backend)
        assert plan.peak_bytes <= budget


def test_fitted_curves_keep_the_budget_and_the_bound(mlp):
    for budget in budgets(mlp)[1:4:2]:
        fitted = autosac.plan(mlp, memory_budget=budget, segments=3)
        exact = autosac.plan(mlp, memory_budget=budget)

        assert fitted.peak_bytes <= budget
        assert exact.bound_ms <= fitted.recompute_ms
        assert fitted.bound_ms <= exact.recompute_ms
        assert fitted.optimality_gap < 0.2


def test_the_report_shows_budget_and_units(tight):
    report = str(tight)

    assert "budget" in report
    assert all(fqn in report for fqn in tight.policy)


# --- applying ---------------------------------------------------------------------


def test_another_model_is_refused_with_the_first_difference(tight):
    model = BIG_MLP.model()
    model[4][0] = nn.Linear(WIDTH, 3 * WIDTH)

    with pytest.raises(autosac.PlanMismatchError, match=r"`4\.0` to be a Linear") as e:
        tight.apply(model)

    assert f"({3 * WIDTH}, {WIDTH})" in str(e.value)
    assert installing.installed(model) == ()


@pytest.mark.parametrize("change", ["class", "fewer", "more"])
def test_another_structure_is_refused(tight, change):
    model = BIG_MLP.model()
    if change == "class":
        model[5][4] = nn.ReLU()
    elif change == "fewer":
        del model[5]
    else:
        model.append(nn.Tanh())

    with pytest.raises(autosac.PlanMismatchError, match=r"another model|modules"):
        tight.apply(model)


def test_a_second_plan_is_refused_until_the_first_is_undone(tight):
    model = BIG_MLP.model()
    assert tight.apply(model) is model

    with pytest.raises(ValueError, match="unapply"):
        tight.apply(model)

    assert tight.unapply(model) is model
    tight.apply(model)


# --- wrong arguments ----------------------------------------------------------------


def test_a_profile_takes_no_inputs_and_options(mlp):
    for options in ({"inputs": _batch()}, {"optimizer": torch.optim.SGD}):
        with pytest.raises(TypeError, match="profile"):
            autosac.plan(mlp, memory_budget=2**30, **options)


def test_a_model_needs_inputs():
    with pytest.raises(TypeError, match="inputs"):
        autosac.plan(Mlp(), memory_budget=2**30)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"accumulate": 0}, ValueError, "accumulate"),
        ({"exclude": ("nothing",)}, ValueError, "nothing"),
        ({"device": "abacus"}, ValueError, "abacus"),
        ({"surplus": 1}, TypeError, "surplus"),
    ],
)
def test_wrong_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        autosac.plan(Mlp(), _batch(), memory_budget=2**30, **options)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"nn\.Module"):
        autosac.plan(torch.tanh, _batch(), memory_budget=2**30)


@pytest.mark.parametrize("inputs", ["text", 3])
def test_wrong_inputs_are_refused(inputs):
    with pytest.raises(TypeError, match="inputs"):
        autosac.plan(Mlp(), inputs, memory_budget=2**30)


def test_a_plan_for_a_model_is_calibrated_where_it_lies():
    plan = autosac.plan(Mlp(), _batch(), memory_budget=2**30)
    assert plan.calibrated

    with torch.device("meta"):
        plan = autosac.plan(gpt(), CASES["gpt"].inputs(), memory_budget=2**30)
    assert not plan.calibrated


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.tanh(torch.sigmoid(x + self.weight))


class ChangesArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        given = x.clone()
        result = self.inner(given.detach())
        given.add_(1.0)
        return result


@pytest.mark.parametrize("exclude", [(), ("inner",)])
def test_the_floor_says_why_nothing_can_be_rerun_unless_that_was_asked(exclude):
    x = torch.ones(BATCH, WIDTH)
    profile = autosac.profile(ChangesArgument(), x, loss_fn=torch.sum, exclude=exclude)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        floor = autosac.floor(profile)

    told = [str(one.message) for one in caught]
    assert floor == profile.baseline_peak_bytes
    assert len(told) == (not exclude)
    assert all("`inner`" in one and "changed in place" in one for one in told)
