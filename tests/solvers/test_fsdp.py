from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers import fsdp
from autosac.solvers.fsdp import (
    FsdpChoice,
    FsdpModule,
    FsdpProblem,
    by_hand,
    estimate,
    lower_bound,
    lowest_peak,
    owner_of_shared,
)
from autosac.solvers.fsdp import schedule as schedule_of
from autosac.solvers.fsdp.collectives import AffineCost
from autosac.solvers.fsdp.greedy import simple_units
from autosac.solvers.fsdp.search import Search, candidates
from autosac.solvers.fsdp.step_time import linear
from autosac.solvers.milp import pulp_runner
from autosac.solvers.milp.solution import Termination
from autosac.solvers.sac import Breakpoint, SacProblem, Unit
from tests.examples import examples
from tests.solvers.fsdp_cases import MIB, every_choice, fsdp_problems, layers

few = examples(25)


def solve(problem, **options):
    return fsdp.solve(problem, relative_gap=0.0, **options)


def _best(problem, allowed=lambda choice: True):
    """Least time within the budget, and least peak, of all choices."""
    outcomes = [
        (
            linear(fsdp.schedule(problem, choice)).total_ms,
            fsdp.live(problem, choice).max(),
        )
        for choice in every_choice(problem)
        if allowed(choice)
    ]
    fitting = [time for time, peak in outcomes if peak <= problem.sac.budget_bytes]
    return min(fitting, default=None), min((peak for _, peak in outcomes), default=None)


def _check(problem, solution, allowed=lambda choice: True):
    least_ms, _ = _best(problem, allowed)
    if least_ms is None:
        assert solution.termination is Termination.INFEASIBLE
        return
    assert solution.termination is Termination.OPTIMAL
    assert solution.objective_ms == least_ms
    assert solution.bound_ms == pytest.approx(least_ms, abs=1e-6)
    assert solution.predicted_peak_bytes <= problem.sac.budget_bytes
    assert allowed(solution.choice)
    assert not fsdp.broken_rules(problem, solution.choice)


def _two_units(budget=100 * MIB):
    """A root of 1 MiB around two parts of 2 and 3 MiB; positions count by hand.

    0 root's instant, 1-3 and 4-6 its parts, 7 its end; 8 the loss; 9 the root again,
    10-12 the second part, 13-15 the first, 16 the root's end; 17 the optimizer.
    """
    modules = tuple(
        FsdpModule(
            fqn=fqn,
            parent=parent,
            forward=forward,
            backward=backward,
            gather_bytes=size * MIB,
            grad_bytes=size * MIB,
            reduce_bytes=size * MIB,
            dtype="bfloat16",
        )
        for fqn, parent, forward, backward, size in (
            ("", None, (0, 8), (9, 17), 1),
            ("a", 0, (1, 4), (13, 16), 2),
            ("b", 0, (4, 7), (10, 13), 3),
        )
    )
    saves = Unit(
        fqn="a",
        parent=None,
        points=(Breakpoint(ratio=1.0, freed_bytes=4 * MIB, recompute_ms=5.0),),
        freed_from=4,
        freed_until=13,
        working=(),
    )
    return FsdpProblem(
        modules=modules,
        sac=SacProblem(
            units=(saves,), base_bytes=(10 * MIB,) * 18, budget_bytes=budget
        ),
        inside=(frozenset(),),
        rerun_at=(13,),
        compute_ms=tuple(2.0 if q in (2, 5, 11, 14) else 0.0 for q in range(18)),
        gather=AffineCost(latency_ms=1.0, ms_per_byte=1.0 / MIB),
        reduce=AffineCost(latency_ms=0.0, ms_per_byte=1.0 / MIB),
    )


BOTH = FsdpChoice(units=(True, True, True), reshard=(False, True, True), points=(None,))


def test_memory_by_hand():
    live = fsdp.live(_two_units(), BOTH) / MIB - 10

    assert live.tolist() == [
        1 + 1,  # the root and its buffer
        *[1 + 2 + 2] * 3,  # the root, part a and its buffer
        *[1 + 3 + 3] * 3,
        1 + 3,  # the last buffer is there until the root ends
        1,  # the loss: the root stays
        1 + 1,  # the root's gradient counts from the beginning of its backward
        1 + 1 + 3 + 3 + 3,  # part b, its gradients, and its buffer at its instant
        1 + 1 + 3 + 3 + 2,  # and the buffer of part a
        1 + 1 + 3 + 2 + 3,  # what b reduces, its parameters gone
        1 + 1 + 2 + 2 + 2 + 3,
        1 + 1 + 2 + 2 + 3,
        1 + 1 + 2 + 2,  # what a reduces
        1 + 1,  # what the root reduces
        0,
    ]


def test_what_threads_may_hold_counts_everywhere():
    problem, late = _two_units(), replace(_two_units(), late_copies=2)
    alone = replace(BOTH, units=(True, True, False), reshard=(False, True, False))

    for choice, largest in ((BOTH, 3), (alone, 1 + 3)):  # the root owns what b has
        more = fsdp.live(late, choice) - fsdp.live(problem, choice)
        assert set(more.tolist()) == {2 * largest * MIB}


def test_of_frozen_units_threads_may_hold_what_is_gathered():
    problem = replace(_two_units(), late_copies=2)
    root, a, b = problem.modules
    frozen = replace(b, grad_bytes=0, reduce_bytes=0)
    in_time = replace(problem, modules=(root, a, frozen), late_copies=0)
    # The frozen part gathers 3 MiB, and the most that is reduced are 2.
    late = replace(in_time, late_copies=2)

    more = fsdp.live(late, BOTH) - fsdp.live(in_time, BOTH)
    assert set(more.tolist()) == {2 * 3 * MIB}
    _check(late, solve(late))


def test_a_smaller_largest_unit_is_worth_its_latency_if_threads_are_slow():
    # All in one unit peaks at 22 MiB without and at 34 with twice what it reduces; with
    # part b, half of all, in one of its own, these are 20 and 26.
    slow_start = AffineCost(latency_ms=9.0, ms_per_byte=0.0)
    problem = replace(_two_units(budget=30 * MIB), gather=slow_start)
    late = replace(problem, late_copies=2)

    assert solve(problem).choice.units == (True, False, False)
    solution = solve(late)
    assert solution.choice.units == (True, False, True)
    assert solution.predicted_peak_bytes == 26 * MIB
    _check(late, solution)


def test_time_by_hand():
    plain_estimate = estimate(_two_units(), BOTH)

    # Forward: gathers of 2, 3 and 4 ms beside 0, 2 and 2 ms of compute: 2 + 3 + 4 + 2.
    # Backward: 4 + max(2, 3) + max(2, 3) + 2 + 1, all of it collectives.
    assert plain_estimate.step.compute_ms == 8.0
    assert plain_estimate.step.exposed_forward_ms == 2 + 3 + 2
    assert plain_estimate.step.exposed_backward_ms == 4 + 1 + 1 + 2 + 1
    assert plain_estimate.objective_ms == 8.0 + 7.0 + 9.0
    assert plain_estimate.simulated.total_ms <= plain_estimate.objective_ms


def test_recomputation_hides_the_next_gather():
    problem = _two_units()
    alone = replace(BOTH, points=(0,))
    plain = estimate(problem, BOTH).objective_ms

    # 5 ms of recomputation in part a, whose backward waits 1 ms for what b reduces.
    assert estimate(problem, alone).objective_ms == plain + 5.0 - 1.0


def test_waiting_for_copies_hides_no_collective():
    problem = _two_units()
    (unit,), alone = problem.sac.units, replace(BOTH, points=(0,))
    waits = replace(unit, points=(replace(unit.points[0], waits_ms=5.0),))
    problem = replace(problem, sac=replace(problem.sac, units=(waits,)))

    plain = estimate(problem, BOTH).objective_ms
    assert estimate(problem, alone).objective_ms == plain + 5.0


def test_ample_memory_leaves_nothing_to_reshard_or_to_recompute():
    solution = solve(_two_units())

    assert not any(solution.choice.reshard)
    assert solution.choice.points == (None,)


def test_a_budget_that_nothing_fits_is_an_outcome():
    problem = _two_units(budget=5 * MIB)
    solution, floor = solve(problem), lowest_peak(problem)

    assert solution.termination is Termination.INFEASIBLE
    assert solution.choice is None and solution.bound_ms is None
    assert floor.termination is Termination.OPTIMAL
    assert floor.predicted_peak_bytes == _best(problem)[1]


@few
@given(problem=fsdp_problems())
def test_matches_trying_every_choice(problem):
    _check(problem, solve(problem))


@few
@given(problem=fsdp_problems(most=4, replicas=True))
def test_matches_trying_every_choice_with_replicas(problem):
    _check(problem, solve(problem))


@examples(8)
@given(problem=fsdp_problems(most=4))
def test_cbc_agrees(problem):
    _check(problem, solve(problem, backend="cbc"))


@pytest.mark.slow
@examples(30)
@given(problem=fsdp_problems(most=8))
def test_matches_trying_every_choice_of_eight_modules(problem):
    _check(problem, solve(problem))


@few
@given(problem=fsdp_problems(most=4))
def test_the_least_peak_is_that_of_every_choice(problem):
    least = _best(problem)[1]
    if least is not None:
        lowest = lowest_peak(problem)

        assert lowest.predicted_peak_bytes == least
        assert lowest.termination is Termination.OPTIMAL


@few
@given(problem=fsdp_problems(kinds=True))
def test_equal_modules_are_alike_and_the_bound_holds_for_that(problem):
    observed, least_ms = solve(problem), _best(problem)[0]

    if least_ms is None:
        assert observed.termination is Termination.INFEASIBLE
        return
    assert observed.bound_ms <= least_ms + 1e-6
    assert observed.objective_ms >= least_ms
    assert not fsdp.broken_rules(problem, observed.choice)
    assert observed.predicted_peak_bytes <= problem.sac.budget_bytes


@few
@given(problem=fsdp_problems(), data=st.data())
def test_units_that_the_user_fixes_stay(problem, data):
    choices = list(every_choice(problem))
    if not choices:
        return
    fixed = data.draw(st.sampled_from(choices))
    units = [m for m, unit in enumerate(fixed.units) if unit and m]

    def same_units(choice):
        return choice.units == fixed.units

    _check(problem, solve(problem, fixed_units=units), same_units)


@few
@given(problem=fsdp_problems(most=4), data=st.data())
def test_the_least_budget_that_fits_given_units_is_their_least_peak(problem, data):
    choices = list(every_choice(problem))
    if not choices:
        return
    units = data.draw(st.sampled_from(choices)).units
    peaks = [int(fsdp.live(problem, c).max()) for c in choices if c.units == units]
    fixed = [m for m, unit in enumerate(units) if unit and m]
    for budget, fits in ((min(peaks), True), (min(peaks) - MIB, False)):
        solution = solve(problem.with_budget(budget), fixed_units=fixed)
        assert (solution.choice is not None) is fits


@few
@given(problem=fsdp_problems(most=4), more=st.integers(0, 10))
def test_more_memory_never_takes_longer(problem, more):
    tight = solve(problem)
    larger = problem.with_budget(problem.sac.budget_bytes + more * MIB)

    if tight.objective_ms is not None:
        assert solve(larger).objective_ms <= tight.objective_ms


@few
@given(
    problem=fsdp_problems(most=4, replicas=True),
    contention=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_faster_links_or_less_contention_never_take_longer(problem, contention):
    def faster(cost):
        return replace(cost, ms_per_byte=cost.ms_per_byte / 2)

    names = ("gather", "reduce", "all_reduce")
    slow = solve(replace(problem, contention=contention))
    links = {name: faster(getattr(problem, name)) for name in names}
    for others in (links, {"contention": 0.0}):
        fast = solve(replace(problem, **{"contention": contention, **others}))
        if slow.objective_ms is not None:
            assert fast.objective_ms <= slow.objective_ms


@few
@given(problem=fsdp_problems(), data=st.data())
def test_no_choice_is_below_the_lower_bound(problem, data):
    least_ms, _ = _best(problem)
    positions = st.integers(0, len(problem.compute_ms) - 1)

    bound_ms = lower_bound(problem, rows=data.draw(st.sets(positions, max_size=4)))

    if bound_ms is None:
        assert least_ms is None
    elif least_ms is not None:
        assert bound_ms <= least_ms + 1e-6


@few
@given(problem=fsdp_problems(replicas=True))
def test_no_shares_take_less_than_their_units_do_in_ample_memory(problem):
    search = Search(
        problem, peak=False, backend="highs", time_limit_s=None, relative_gap=0.0
    )
    for units in simple_units(problem, candidates(problem)):
        model = search._model(units, forced=True, integral=False)
        shares = pulp_runner.run(model.model, relaxed=True)
        if shares.bound is not None:
            least_ms = search._least_value(units)
            assert least_ms <= shares.bound + model.constant_ms + 1e-6


def test_units_by_hand_are_tried_by_linear_programs_and_only_if_they_may_win(
    monkeypatch,
):
    runs = []

    def counted(model, **options):
        runs.append(options["relaxed"])
        return run(model, **options)

    run = pulp_runner.run
    monkeypatch.setattr(pulp_runner, "run", counted)
    problem = layers(12, budget_bytes=20 * 2**30)
    tried = len(simple_units(problem, candidates(problem)))
    solution = fsdp.solve(problem, relative_gap=0.005)
    assert solution.termination is Termination.OPTIMAL
    assert not runs.count(False)
    assert 2 <= runs.count(True) < tried  # the bound on all units is one of them


@few
@given(problem=fsdp_problems(most=4), data=st.data())
def test_choices_take_no_less_memory_in_a_problem_that_is_above(problem, data):
    size = len(problem.compute_ms)
    added = data.draw(st.lists(st.integers(-1, 3), min_size=size, max_size=size))
    above = problem.raised([nbytes * MIB for nbytes in added])
    first = above.modules[0]
    more = data.draw(st.integers(0, 2)) * MIB if first.gather_bytes else 0
    first = replace(first, gather_bytes=first.gather_bytes + more)
    above = replace(above, modules=(first, *above.modules[1:]))

    assert problem.is_below(above) is (min(added) >= 0)
    if problem.is_below(above):
        for choice in every_choice(problem):
            assert (fsdp.live(problem, choice) <= fsdp.live(above, choice)).all()


def test_a_root_without_parameters_gathers_nothing_ahead():
    # Unit b is gathered again at 10, ahead of that by a root of 1 MiB.
    problem = _two_units()
    root = replace(problem.modules[0], gather_bytes=0, grad_bytes=0, reduce_bytes=0)
    bare = replace(problem, modules=(replace(root, dtype=None), *problem.modules[1:]))
    choice = FsdpChoice(
        units=(True, True, True), reshard=(False, True, True), points=(None,)
    )

    ahead = fsdp.live(problem, choice) - fsdp.live(bare, choice)

    # The root's parameters, from 9 on its gradients, and at 10 the buffer of b.
    assert ahead[8:12].tolist() == [MIB, 2 * MIB, (2 + 3) * MIB, 2 * MIB]


def test_parameters_of_several_types_have_a_plan_by_hand():
    problem = _two_units()
    modules = (
        problem.modules[0],
        replace(problem.modules[1], dtype="float32", kind=1),
        replace(problem.modules[2], dtype="float64", kind=2),
    )
    problem = replace(problem, modules=modules)

    assert all(choice.units == (True,) * 3 for choice in by_hand(problem))
    assert lowest_peak(problem, time_limit_s=0.0).choice is not None


def test_the_least_peak_is_found_where_no_plan_by_hand_is_legal(monkeypatch):
    monkeypatch.setattr("autosac.solvers.fsdp.search.simple_units", lambda *_: [])
    root, *layers = _two_units().modules
    alike = tuple(replace(layer, kind=1) for layer in layers)
    problem = replace(_two_units(), modules=(root, *alike))

    assert lowest_peak(problem).predicted_peak_bytes == _best(problem)[1]


def test_choices_that_break_rules_are_errors():
    problem = replace(_two_units(), inside=(frozenset({1}),))
    around = replace(BOTH, points=(0,))
    mixed = replace(
        problem,
        modules=(*problem.modules[:2], replace(problem.modules[2], dtype="float32")),
    )
    whole = FsdpChoice(units=(True, False, False), reshard=(False,) * 3, points=(None,))

    with pytest.raises(ValueError, match="AC unit 'a' lies around the FSDP unit 'a'"):
        estimate(problem, around)
    with pytest.raises(ValueError, match=r"gather parameters of \['bfloat16', 'flo"):
        estimate(mixed, whole)
    with pytest.raises(ValueError, match="`fixed_units` breaks rules"):
        solve(mixed, fixed_units=())
    with pytest.raises(ValueError, match="`fixed_units` must name modules below 3"):
        solve(problem, fixed_units=[7])


def test_a_shared_parameter_belongs_to_the_innermost_module_around_its_holders():
    # 0 around 1 (around 2 and 3) and 4.
    parents = (None, 0, 1, 1, 0)

    assert owner_of_shared(parents, [2, 3]) == (1, {2, 3})
    assert owner_of_shared(parents, [2, 4]) == (0, {1, 2, 4})
    assert owner_of_shared(parents, [1, 3]) == (1, {3})
    assert owner_of_shared(parents, [3]) == (3, frozenset())
    with pytest.raises(ValueError, match="`holders` must name at least one"):
        owner_of_shared(parents, [])


def test_problems_that_are_out_of_order_are_errors():
    problem = _two_units()
    root, a, b = problem.modules

    with pytest.raises(ValueError, match="must begin with the root"):
        replace(problem, modules=(a, b))
    with pytest.raises(ValueError, match="`forward` of 'a' must lie within"):
        replace(problem, modules=(root, replace(a, forward=(0, 3)), b))
    with pytest.raises(ValueError, match=r"`backward` of 'b' and 'a' overlap"):
        replace(problem, modules=(root, replace(a, backward=(12, 15)), b))
    with pytest.raises(ValueError, match="`rerun_at` must lie in backward, got 2"):
        replace(problem, rerun_at=(2,))
    with pytest.raises(ValueError, match="`late_copies` must not be negative, got -1"):
        replace(problem, late_copies=-1)
    with pytest.raises(ValueError, match="time for each of the 18 positions, got 1"):
        replace(problem, compute_ms=(1.0,))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("budget_gib", [40, 60, 90])
def test_many_equal_layers_are_solved_with_few_rows(budget_gib):
    problem = layers(48, budget_bytes=budget_gib * 2**30)

    solution = fsdp.solve(problem, relative_gap=5e-3)

    assert solution.termination is Termination.OPTIMAL
    assert solution.gap <= 5e-3
    assert solution.predicted_peak_bytes <= problem.sac.budget_bytes
    assert solution.simulated.total_ms <= solution.objective_ms * (1 + 1e-9)
    by_hand = [m for m, module in enumerate(problem.modules) if module.parent == 0]
    fixed = fsdp.solve(problem, fixed_units=by_hand, relative_gap=5e-3)
    if fixed.objective_ms is not None:
        assert solution.objective_ms <= fixed.objective_ms * (1 + 5e-3)


def test_a_schedule_has_the_compute_of_the_step():
    problem = _two_units()
    schedule = schedule_of(problem, replace(BOTH, points=(0,)))

    forward = sum(ms for _, ms in schedule.forward)
    backward = sum(event.compute_ms for event in schedule.backward)
    assert (forward, backward, schedule.rest_ms) == (4.0, 9.0, 0.0)
