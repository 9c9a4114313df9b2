"""Plans of one step: never dearer than a rule of thumb or a smaller budget's plan."""

import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import autosac
from autosac.cli.demo import GPT
from autosac.simulation.simulator import Simulator
from autosac.solving import repair, slack
from autosac.solving.choosing import Chooser
from autosac.solving.correcting import Search
from autosac.solving.incumbents import Incumbents, most_rules, recompute_ms
from autosac.solving.solve_options import SolveOptions
from autosac.units.curves import kept, policy_of, trade_off
from tests.busy import alone_and_in_turns
from tests.models import CASES, SMALL_GPT, Case

pytestmark = pytest.mark.usefixtures("kept_workspaces")
_FRACTIONS = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
_SETTINGS = {
    "cpu": {},
    "cpu bf16": {"autocast": torch.bfloat16},
    "h100": {"device": "h100"},
    "h100 bf16": {"device": "h100", "autocast": torch.bfloat16},
}


def _wide_gpt():
    """Tensors of many MiB, to which a GPU's allocator adds."""
    with torch.device("meta"):
        return GPT(num_layers=3, width=320, num_heads=5, vocabulary=1000, length=300)


_STEPS = {
    "small gpt": SMALL_GPT,
    "wide gpt": Case(
        _wide_gpt,
        lambda: torch.zeros(7, 300, dtype=torch.long),
        lambda logits: logits.square().mean(),
    ),
    "resnet": CASES["resnet"],
}


def _profile(name, setting):
    case = _STEPS[name]
    return autosac.profile(
        case.model(), case.inputs(), loss_fn=case.loss_fn, **_SETTINGS[setting]
    )


def _budgets(profile):
    low, high = autosac.floor(profile), profile.baseline_peak_bytes
    return [low, *(low + int(f * (high - low)) for f in _FRACTIONS), high]


def _each(names, fast):
    slow = pytest.mark.slow
    return [
        pytest.param(name, id=name, marks=() if name in fast else slow)
        for name in names
    ]


_FAST = ("small gpt-cpu", "wide gpt-h100")
_SWEPT = (*_FAST, "small gpt-h100 bf16", "wide gpt-cpu bf16", "wide gpt-h100 bf16")
_SWEPT += ("resnet-cpu", "resnet-h100")


@pytest.fixture(scope="module", params=_each(_SWEPT, _FAST))
def swept(request):
    """A profile, its budgets and the plan of each, the largest budget first."""
    profile = _profile(*request.param.split("-"))
    budgets = _budgets(profile)
    plans = {
        budget: autosac.plan(profile, memory_budget=budget, dry_run=False)
        for budget in reversed(budgets)
    }
    return profile, budgets, plans


@pytest.mark.slow
def test_every_plan_keeps_its_budget_by_the_replayed_allocator(swept):
    _, budgets, plans = swept
    assert all(plans[budget].peak_bytes <= budget for budget in budgets)


@pytest.mark.slow
def test_no_rule_of_thumb_that_fits_is_cheaper(swept):
    profile, budgets, plans = swept
    rules = [
        (recompute_ms(choice), profile.peak_bytes(choice))
        for choice in profile.rules.some(10**6)
    ]
    assert len(rules) > 3
    for budget in budgets:
        fitting = [ms for ms, peak_bytes in rules if peak_bytes <= budget]
        assert plans[budget].recompute_ms <= min(fitting, default=1e99) * (1 + 1e-9)


@pytest.mark.slow_but_first
def test_asked_again_no_plan_is_dearer_than_that_of_a_smaller_budget(swept):
    profile, budgets, _ = swept
    times = [
        autosac.plan(profile, memory_budget=budget, dry_run=False).recompute_ms
        for budget in budgets
    ]
    assert times == sorted(times, reverse=True)


@pytest.mark.slow_but_fifth
def test_no_choice_fits_below_the_floor(swept):
    profile, budgets, _ = swept
    with pytest.raises(autosac.InfeasibleBudgetError) as caught:
        autosac.plan(profile, memory_budget=budgets[0] - 1)
    assert caught.value.lowest_peak_bytes == budgets[0]


@pytest.mark.slow
@pytest.mark.slow_but_first
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_choice_that_saves_a_little_less_or_more_is_below_the_floor(autocast):
    """An allocator may like another choice better than that of least predicted peak."""
    with torch.device("meta"):
        model = GPT(num_layers=2, width=576, num_heads=9, vocabulary=500, length=300)
    profile = autosac.profile(
        model,
        torch.zeros(7, 300, dtype=torch.long),
        loss_fn=lambda logits: logits.square().mean(),
        device="h100",
        autocast=autocast,
    )
    floor_bytes, lowest = autosac.floor(profile), profile.chooser.lowest()
    formulation = profile.chooser._formulation
    curve_of = dict(zip(formulation.units, formulation.curves, strict=True))
    others = [
        {**lowest, unit: policy}
        for unit in lowest
        for policy in curve_of[unit].policies
    ]

    assert len(others) > len(lowest)
    assert min(map(profile.peak_bytes, others)) >= floor_bytes


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    "how",
    [
        *({}, {"offload": True}, {"offload": "auto"}, {"cap": "reserved"}),
        *({"ac_units": ["blocks.*"]}, {"ac_units": ["blocks.*"], "offload": True}),
    ],
    ids=str,
)
def test_floor_and_plans_do_not_keep_the_model_alive(how):
    profile = _profile("small gpt", "h100")
    model = weakref.ref(profile.step.model)
    budget = profile.simulator.allocator_peak_bytes({}, "reserved")
    plan = autosac.plan(profile, memory_budget=budget, **how)

    del profile
    gc.collect()

    assert plan.traced is not None and model() is None


@pytest.mark.slow
def test_budgets_for_a_gpu_that_is_here_leave_some_to_its_allocator():
    traced = _profile("small gpt", "h100")
    here = replace(traced, costs=replace(traced.costs, calibrated=True))
    least = autosac.floor(here)
    budgets = [int(least + share * traced.baseline_peak_bytes) for share in (0, 0.1, 1)]

    plans = [autosac.plan(here, memory_budget=b, dry_run=False) for b in budgets]

    for budget, plan in zip(budgets, plans, strict=True):
        assert plan.budget_bytes == budget
        assert plan.peak_bytes <= budget - 2 * 2**20 - budget // 500
    assert autosac.floor(traced) == plans[0].peak_bytes
    with pytest.raises(autosac.InfeasibleBudgetError, match="leaves some") as caught:
        autosac.plan(here, memory_budget=least - 1, dry_run=False)
    assert caught.value.lowest_peak_bytes == least


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("peak_bytes", [0, 1, 499, 10**9 + 7, 2**40 - 1, 2**40])
def test_no_smaller_budget_leaves_as_much(peak_bytes):
    traced = _profile("small gpt", "h100")
    here = replace(traced, costs=replace(traced.costs, calibrated=True))

    least = here.budget_for(peak_bytes)

    assert here.within(least) >= peak_bytes > here.within(least - 1)
    assert traced.within(peak_bytes) == peak_bytes == traced.budget_for(peak_bytes)


_PLAN = """
import autosac
from tests.test_choosing import _budgets, _profile
profile = _profile("wide gpt", "h100 bf16")
for budget in _budgets(profile)[1::5]:
    plan = autosac.plan(profile, memory_budget=budget, dry_run=False)
    print(budget, plan.recompute_ms, plan.bound_ms, plan.op_policies)
"""


@pytest.mark.slow
def test_a_busy_machine_gets_the_plans_of_an_idle_one():
    alone, in_turns = alone_and_in_turns(_PLAN)

    assert alone.count("\n") == len(range(1, len(_FRACTIONS) + 2, 5))
    assert in_turns == alone


@pytest.mark.slow
def test_a_large_gap_is_a_warning_that_says_what_to_do():
    profile = _profile("small gpt", "cpu")
    budget = _budgets(profile)[3]
    plan = autosac.plan(profile, memory_budget=budget)

    assert "warning" not in str(replace(plan, bound_ms=plan.recompute_ms))
    assert "time_limit_s" in str(replace(plan, bound_ms=plan.recompute_ms * 0.94))


@pytest.mark.slow
def test_rules_that_all_peak_in_the_optimizer_are_not_all_replayed(monkeypatch):
    replays = []
    replay = Simulator.handed_out
    monkeypatch.setattr(
        Simulator, "handed_out", lambda *a, **k: replays.append(a) or replay(*a, **k)
    )
    with torch.device("meta"):
        model = GPT(num_layers=24, width=320, num_heads=5, vocabulary=1000, length=3)
    step = autosac.profile(
        model, torch.zeros(1, 3, dtype=torch.long), optimizer="adam", device="h100",
        loss_fn=lambda logits: logits.square().mean(),
    )  # fmt: skip
    rules = list(step.rules.some(most_rules(step.simulator)))

    floor = autosac.floor(step)
    with pytest.raises(autosac.InfeasibleBudgetError):
        autosac.plan(step, memory_budget=floor - 1)

    peaks = {step.simulator.peak_bytes(rule) for rule in rules}
    assert len(rules) > 100 and len(peaks) == 1
    assert 0 < len(replays) < len(rules) / 2


def test_slack_is_spent_although_most_points_of_a_unit_break_the_budget(monkeypatch):
    monkeypatch.setattr(slack, "_MOST_SIMULATIONS", 8)
    formulation = _profile("wide gpt", "cpu").traced().formulation
    curve_of = dict(zip(formulation.units, formulation.curves, strict=True))
    unit = max(curve_of, key=lambda u: len(curve_of[u].front or ()))
    points = [
        policy_of(curve_of[unit].front, i) for i in range(len(curve_of[unit].front))
    ]
    fastest_that_fits = len(points) - 3

    def peak_bytes(choice):  # a rerun's, of which bytes that are kept say nothing
        fits = points.index(choice[unit]) >= fastest_that_fits
        return 0 if fits else 2**50

    simulator = SimpleNamespace(
        peak_bytes=peak_bytes,
        true_peak_bytes=peak_bytes,
        fits=lambda choice, budget_bytes: peak_bytes(choice) <= budget_bytes,
    )
    assert len(points) > 16

    spent = slack.spend_slack(simulator, formulation, {unit: points[-1]}, 2**49)

    assert points.index(spent[unit]) == fastest_that_fits


@pytest.mark.slow
@pytest.mark.slow_but_first
@pytest.mark.parametrize("setting", ["h100", "cpu"])
def test_a_choice_that_breaks_the_budget_by_little_is_mended_at_little_cost(setting):
    profile = _profile("wide gpt", setting)
    chooser = profile.traced().chooser
    budget = _budgets(profile)[3]
    choice, _ = chooser.choose(budget, SolveOptions())
    peak_bytes = chooser.true_peak_bytes(choice)

    mended = chooser.mend(choice, peak_bytes - 1, math.inf)

    assert chooser.true_peak_bytes(mended) < peak_bytes
    assert recompute_ms(choice) < recompute_ms(mended) < 1.1 * recompute_ms(choice)
    assert chooser.mend(choice, peak_bytes - 1, recompute_ms(choice)) is None


def test_a_choice_that_breaks_the_budget_by_a_block_moves_to_a_unit_that_is_alike():
    # The allocator adds 0.8 MB to the last of three equal blocks.
    chooser = (step := _profile("wide gpt", "h100 bf16").traced()).chooser
    blocks = [u for u in step.units.candidates if u.fqn in ("blocks.0", "blocks.2")]
    first, last = blocks
    policy = trade_off(first, step.fronts[first.key]).policies[1]
    choice, budget = {last: policy}, chooser.true_peak_bytes({first: policy})
    assert chooser.simulated_peak_bytes(choice) < budget
    assert budget < chooser.true_peak_bytes(choice)

    mended = chooser.mend(choice, budget, recompute_ms(choice))

    assert chooser.true_peak_bytes(mended) <= budget
    assert recompute_ms(mended) == recompute_ms(choice) > 0


def test_a_move_that_another_one_of_its_unit_uses_up_is_not_taken_for_free():
    places = ("first", 0.0), ("first", 0.0), ("second", 3.0)
    moves = [repair._Move(cost_ms, 1, unit, "less") for unit, cost_ms in places]
    added = np.array([[-1], [-5], [-2]])

    def several(over_bytes):
        over = np.array([over_bytes])
        return repair._Forecast({}, over, moves, added).several(math.inf)

    with np.errstate(all="raise"):
        assert several(3) == {"first": "less", "second": "less"}
        assert several(9) is None


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("less", [2**12, 2**16, 2**20, 2**22, 2**24])
@pytest.mark.parametrize("setting", ["h100", "cpu bf16", "h100 bf16"])
def test_a_mended_choice_costs_no_more_than_the_cheapest_of_the_moves_that_are_tried(
    setting, less
):
    step = _profile("wide gpt", setting).traced()
    chooser, curves = step.chooser, step.formulation.curves
    choice, _ = chooser.choose(_budgets(step)[4], SolveOptions())
    budget = chooser.true_peak_bytes(choice) - less
    before = step.simulator.num_replayed

    mended = chooser.mend(choice, budget, math.inf)

    assert step.simulator.num_replayed - before <= 26
    mended_ms = math.inf
    if mended is not None:
        mended = chooser.spend(mended, budget)
        assert chooser.true_peak_bytes(mended) <= budget
        mended_ms = recompute_ms(mended)
    front_of = {u: c.front for u, c in zip(step.formulation.units, curves, strict=True)}
    # They are 1, 2, 4... points farther on the curve of a unit.
    own = {
        unit: front_of[unit].recompute_ms.searchsorted(
            recompute_ms({unit: policy}) * (1 - 1e-9)
        )
        for unit, policy in choice.items()
    }
    singles = [
        {**choice, unit: policy_of(front_of[unit], own[unit] + 2**k)}
        for unit in choice
        for k in range(8)
        if own[unit] + 2**k < len(front_of[unit])
    ]
    fitting = [recompute_ms(c) for c in singles if chooser.fits(c, budget)]
    assert mended_ms <= min(fitting, default=math.inf) * (1.0 + 1e-9)


@pytest.mark.slow
def test_a_search_in_the_blocks_of_a_plan_finds_a_cheaper_one_that_fits():
    chooser = _profile("wide gpt", "h100 bf16").traced().chooser
    floor_bytes, most_bytes = map(chooser.true_peak_bytes, (chooser.lowest(), {}))
    for share in (0.02, 0.5):
        budget_bytes = floor_bytes + int(share * (most_bytes - floor_bytes))
        search = Search(chooser, budget_bytes, SolveOptions(), None)
        search.offer(chooser.lowest())
        floor_ms = search.time_ms

        chooser._is_best_in_own_blocks(search)

        assert chooser.true_peak_bytes(search.choice) <= budget_bytes
        assert recompute_ms(search.choice) == search.time_ms < floor_ms
        assert search.bound_ms == 0.0  # other blocks prove nothing


def test_a_rule_of_thumb_that_no_solve_beats_uses_what_it_leaves(monkeypatch):
    monkeypatch.setattr(Search, "run", lambda _: None)  # a solve that finds nothing
    profile = _profile("small gpt", "cpu")
    budget = _budgets(profile)[4]
    able = [
        recompute_ms(rule)
        for rule in profile.rules.some(10**6)
        if profile.peak_bytes(rule) <= budget
    ]

    choice, _ = profile.chooser.choose(budget, SolveOptions())

    assert profile.peak_bytes(choice) <= budget
    assert 0.0 < recompute_ms(choice) < 0.95 * min(able)


def test_a_mixture_becomes_the_fastest_known_point_that_frees_as_much():
    step = _profile("wide gpt", "h100 bf16").traced()
    finer_than_the_milp = 0
    for unit in step.units.candidates:
        curve = trade_off(unit, step.fronts[unit.key], num_points=3)
        freed = () if curve is None else curve.points.freed_bytes
        for first in range(len(freed) - 1):
            shares = [0.0] * len(freed)
            shares[first : first + 2] = [0.75, 0.25]
            wanted = 0.75 * freed[first] + 0.25 * freed[first + 1]

            policy = curve.between(shares)

            # What a point frees is what it keeps less than the last one.
            most = freed[-1] + kept(unit, curve.policies[-1])
            front = curve.front
            enough = front.recompute_ms[most - front.saved_bytes >= wanted - 1.0]
            assert recompute_ms({unit: policy}) == pytest.approx(min(enough))
            finer_than_the_milp += policy not in curve.policies
    assert finer_than_the_milp > 3


@pytest.mark.slow_but_first
@pytest.mark.parametrize("setting", _each(_SETTINGS, ("cpu", "h100 bf16")))
def test_the_floor_is_the_lowest_of_what_was_found_before_and_after_trimming(setting):
    profile = _profile("wide gpt", setting)
    chooser = profile.chooser
    _, solution = chooser._solver.lowest_peak()
    untrimmed = chooser.decode(solution)

    lowest = chooser.lowest()

    assert chooser.true_peak_bytes(lowest) <= chooser.true_peak_bytes(untrimmed)


class AddsToOne(Simulator):
    """A simulator by which any choice with some unit takes more than it does."""

    def __init__(self, own, unit):
        vars(self).update(vars(own))
        self.unit = unit

    def true_peak_bytes(self, chosen):
        return super().true_peak_bytes(chosen) + self._added_bytes(chosen)

    def fits(self, chosen, budget_bytes):
        return self.true_peak_bytes(chosen) <= budget_bytes

    def true_timeline(self, chosen):
        timeline = super().true_timeline(chosen)
        live_bytes = timeline.live_bytes + self._added_bytes(chosen)
        return replace(timeline, live_bytes=live_bytes)

    def _added_bytes(self, chosen):
        return 300_000 * (self.unit in chosen)


def test_a_search_whose_first_choice_breaks_the_budget_goes_on():
    profile = _profile("small gpt", "cpu")
    budget = _budgets(profile)[3]
    best = _chosen(profile, profile.simulator, budget)
    unit = max(best, key=lambda unit: best[unit].choices.count("R"))

    choice = _chosen(profile, AddsToOne(profile.simulator, unit), budget)

    profile.leave_out([unit.fqn], "it takes more")
    expected = _chosen(profile, profile.simulator, budget)
    assert recompute_ms(best) <= recompute_ms(choice) <= 1.1 * recompute_ms(expected)


def _chosen(profile, simulator, budget):
    """The choice of a search that knows of no other."""
    chooser = Chooser(simulator, profile.formulation, Incumbents(simulator, ()))
    return chooser.choose(budget, SolveOptions())[0]
