import bisect
import math
import random
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers.curves import knapsack
from autosac.solvers.milp import pulp_runner
from autosac.solvers.milp.solution import Termination
from autosac.solvers.sac import (
    Between,
    Breakpoint,
    Hold,
    SacProblem,
    Solver,
    Start,
    Unit,
    live_bytes,
    lowest_peak,
    solve,
)
from autosac.solvers.sac.greedy import round_and_repair
from autosac.solvers.sac.least_peak import LeastPeak
from autosac.solvers.sac.rows import SMALL_GAP
from autosac.solvers.sac.table import Table
from tests.examples import examples
from tests.solvers.check import violations
from tests.solvers.oracles import least_peak, least_time, peak_of, sac_choices
from tests.solvers.save_solutions import solutions
from tests.solvers.strategies import (
    MIB,
    deep_trees,
    layered_problems,
    sac_problems,
    save_problems,
)

both = pytest.mark.parametrize("backend", ["highs", "cbc"])
either = pytest.mark.parametrize("integral", [True, False])


def unit(fqn, points, *, parent=None, freed=(1, 2), working=()):
    return Unit(
        fqn=fqn,
        parent=parent,
        points=tuple(
            Breakpoint(ratio=ratio, freed_bytes=mib * MIB, recompute_ms=ms)
            for ratio, mib, ms in points
        ),
        freed_from=freed[0],
        freed_until=freed[1],
        working=tuple((q, tuple(x * MIB for x in row)) for q, row in working),
    )


def problem(*units, base=(10, 20, 10), budget):
    return SacProblem(
        units=units,
        base_bytes=tuple(mib * MIB for mib in base),
        budget_bytes=budget * MIB,
    )


HALF_OR_ALL = [(0.5, 4, 1.0), (1.0, 8, 4.0)]


@both
def test_takes_the_cheapest_points_that_fit(backend):
    # 8 MiB too many: both units at half (1 + 1 ms) rather than one in full (4 ms).
    two = problem(unit("a", HALF_OR_ALL), unit("b", HALF_OR_ALL), budget=12)

    solution = solve(two, integral=True, backend=backend, relative_gap=0.0)

    assert solution.termination is Termination.OPTIMAL
    assert solution.chosen == (0, 0)
    assert solution.ratios == (0.5, 0.5)
    assert solution.recompute_ms == solution.objective_ms == 2.0
    assert solution.predicted_peak_bytes == 12 * MIB
    assert solution.gap == pytest.approx(0.0, abs=1e-9)


@both
def test_continuous_weights_lie_between_neighbours(backend):
    # 6 MiB: half way between 4 and 8 MiB, half way between 1 and 4 ms.
    one = problem(unit("a", HALF_OR_ALL), budget=14)

    solution = solve(one, integral=False, backend=backend, relative_gap=0.0)

    assert solution.weights == (pytest.approx((0.5, 0.5)),)
    assert solution.chosen is None
    assert solution.recompute_ms == pytest.approx(2.5)
    assert violations(one, solution) == ()


@both
def test_a_curve_that_is_not_convex_mixes_neighbours_only(backend):
    # 2, 4, 8 MiB in 1, 5, 6 ms. 6 MiB: from 4 and 8 MiB in 5.5 ms; the forbidden mix
    # of 2 and 8 MiB would claim 1/3 + 2/3 * 6 = 4.3 ms.
    one = problem(unit("a", [(0.25, 2, 1.0), (0.5, 4, 5.0), (1.0, 8, 6.0)]), budget=14)

    solution = solve(one, integral=False, backend=backend, relative_gap=0.0)

    assert solution.recompute_ms == pytest.approx(5.5)
    assert violations(one, solution) == ()


@both
@either
def test_units_are_not_nested(backend, integral):
    # Child and parent together would free 12 MiB in 3 ms, which is not allowed.
    outer = unit("a", [(1.0, 10, 9.0)])
    inner = unit("a.b", [(1.0, 6, 1.0)], parent=0)

    solution = solve(
        problem(outer, inner, budget=10), integral=integral, backend=backend
    )

    assert solution.ratios == (1.0, 0.0)
    assert solution.recompute_ms == 9.0


def test_a_unit_in_the_middle_keeps_its_parent_and_child_apart():
    # The parent may come after its children. 12 MiB take the two leaves at 2 ms.
    leaf_a = unit("m.a", [(1.0, 6, 1.0)], parent=2)
    leaf_b = unit("m.b", [(1.0, 6, 1.0)], parent=2)
    middle = unit("m", [(1.0, 12, 5.0)])

    three = problem(leaf_a, leaf_b, middle, base=(5, 20, 5), budget=8)

    solution = solve(three, integral=True)

    assert solution.chosen == (0, 0, None)


def test_the_working_set_counts_where_it_lives():
    # Freeing 8 MiB in full puts 11 MiB on top of position 2: 10 + 11 > 16. Half fits.
    one = unit("a", HALF_OR_ALL, working=[(2, (5, 11))])

    assert solve(problem(one, budget=16), integral=True).chosen == (0,)
    assert (
        solve(problem(one, budget=12), integral=True).termination
        is Termination.INFEASIBLE
    )


def test_memory_is_free_only_from_the_first_to_before_the_last_position():
    one = unit("a", [(1.0, 3, 1.0)], freed=(1, 3), working=[(3, (2,)), (0, (-1,))])
    four = problem(one, base=(9, 9, 9, 9), budget=9)

    assert live_bytes(four, [[1]]) == (8 * MIB, 6 * MIB, 6 * MIB, 11 * MIB)
    assert live_bytes(four, [[0]]) == four.base_bytes


def test_what_one_unit_frees_stays_alive_where_another_one_holds_it():
    # "a" in full frees 4 MiB that "b" holds up to position 2; at half it keeps them.
    hold = Hold(nbytes=4 * MIB, held_from=1, holders=((1, 2),), freed_by=((0, (3, 1)),))
    two = replace(
        problem(unit("a", HALF_OR_ALL, freed=(1, 3)), unit("b", HALF_OR_ALL), budget=8),
        holds=(hold,),
    )

    for weights, live in [
        ([[0, 1], [0, 0]], (10, 12, 2)),
        ([[0, 0], [0, 1]], (10, 12, 10)),
        ([[0, 1], [0, 1]], (10, 8, 2)),
        ([[1, 0], [0, 1]], (10, 8, 6)),
    ]:
        assert live_bytes(two, weights) == tuple(mib * MIB for mib in live)


def test_equal_holds_of_what_a_unit_frees_all_count():
    # "b" holds twice 2 MiB that "a" frees: 16 MiB without "b", 17 MiB with both.
    hold = Hold(nbytes=2 * MIB, held_from=1, holders=((1, 2),), freed_by=((0, (1,)),))
    a, b = unit("a", [(1.0, 4, 0.0)]), unit("b", [(1.0, 3, 0.0)])
    two = replace(problem(a, b, budget=16), holds=(hold, hold))

    assert lowest_peak(two)[0] == 16 * MIB
    assert solve(two, integral=True).chosen == (0, None)

    # 8 MiB now: "a" and "b" leave 17 MiB, "b" and "c" 9 MiB.
    hold = replace(hold, nbytes=4 * MIB)
    a, b, c = (
        unit(fqn, [(1.0, mib, ms)])
        for fqn, mib, ms in [("a", 6, 1.0), ("b", 5, 0.0), ("c", 6, 4.0)]
    )
    three = replace(problem(a, b, c, budget=10), holds=(hold, hold))

    assert solve(three, integral=True).chosen == (None, 0, 0)


def test_what_one_unit_keeps_and_another_one_holds_is_there_once():
    # "a" at half keeps 2 MiB until the end that "b" holds up to position 2.
    hold = Hold(nbytes=2 * MIB, held_from=1, holders=((1, 2),), kept_by=((0, (3, 1)),))
    two = replace(
        problem(unit("a", HALF_OR_ALL, freed=(1, 3)), unit("b", HALF_OR_ALL), budget=8),
        holds=(hold,),
    )

    for weights, live in [
        ([[1, 0], [0, 0]], (10, 16, 6)),
        ([[0, 0], [0, 1]], (10, 12, 10)),
        ([[1, 0], [0, 1]], (10, 6, 6)),
        ([[0, 1], [0, 1]], (10, 4, 2)),
    ]:
        assert live_bytes(two, weights) == tuple(mib * MIB for mib in live)


@either
def test_an_ample_budget_recomputes_nothing(integral):
    two = problem(unit("a", HALF_OR_ALL), unit("b", HALF_OR_ALL), budget=20)

    solution = solve(two, integral=integral)

    assert solution.recompute_ms == 0.0
    assert solution.bound_ms == 0.0
    assert solution.ratios == (0.0, 0.0)
    assert solution.predicted_peak_bytes == 20 * MIB


@both
@either
def test_an_infeasible_budget_is_an_outcome(backend, integral):
    # 3 MiB is below what both units in full leave. 11 and 10 MiB cannot both hold:
    # the first position frees nothing, the second only one of two nested units.
    inner = unit("a.b", [(1.0, 6, 1.0)], parent=0)
    nested = problem(unit("a", [(1.0, 4, 1.0)]), inner, base=(9, 20, 9), budget=11)

    solution = solve(nested, integral=integral, backend=backend)

    assert solution.termination is Termination.INFEASIBLE
    assert solution.weights is solution.ratios is solution.chosen is None
    assert (
        solve(replace(nested, budget_bytes=3 * MIB), integral=integral).termination
        is Termination.INFEASIBLE
    )


def test_without_time_the_relaxation_and_what_rounding_makes_of_it_are_left():
    two = problem(unit("a", HALF_OR_ALL), unit("b", HALF_OR_ALL), budget=12)
    best = solve(two, integral=True, relative_gap=0.0)

    solution = solve(two, integral=True, time_limit_s=0.0, relative_gap=0.0)

    assert solution.termination is not Termination.INFEASIBLE
    assert solution.bound_ms is not None and best.objective_ms is not None
    assert 0.0 < solution.bound_ms <= best.objective_ms
    if solution.termination.has_incumbent:
        assert solution.objective_ms >= best.objective_ms
        assert solution.predicted_peak_bytes <= two.budget_bytes


def test_that_nothing_can_be_rounded_is_no_proof_that_nothing_fits():
    two = problem(unit("a", HALF_OR_ALL), unit("b", HALF_OR_ALL), budget=10)
    with patch("autosac.solvers.sac.search.round_and_repair", return_value=None):
        found = Solver(two).solve(two.budget_bytes, relative_gap=math.inf)
    assert found.termination.has_incumbent
    assert 0.0 < found.bound_ms <= least_time(two)


@both
def test_the_lowest_peak_weighs_what_is_freed_against_the_working_set(backend):
    # In full: 12 MiB at position 1, 10 + 7 at position 2. Half: 16 and 10 + 2.
    one = unit("a", HALF_OR_ALL, working=[(2, (2, 7))])

    peak_bytes, solution = lowest_peak(problem(one, budget=0), backend=backend)

    assert peak_bytes == solution.predicted_peak_bytes == 16 * MIB
    assert solution.chosen == (0,)
    assert solution.termination is Termination.OPTIMAL
    assert solution.bound_ms is None


def test_the_lowest_peak_without_time_to_branch_is_the_relaxation_rounded():
    # Without a working set the relaxation frees all 8 MiB: it is whole.
    one = problem(unit("a", HALF_OR_ALL), budget=0)

    peak_bytes, solution = lowest_peak(one, time_limit_s=0.0)

    assert peak_bytes == 12 * MIB
    assert solution.chosen == (1,)


def test_trimming_drops_what_the_peak_does_not_need():
    # "a" frees at the peak, position 1; what "b" frees is elsewhere, and lower.
    needed = unit("a", HALF_OR_ALL)
    idle = replace(unit("b", [(1.0, 2, 3.0)]), freed_from=2, freed_until=3)
    solver = Solver(problem(needed, idle, budget=0))

    assert solver.trimmed((1, 0)) == (1, None)


@examples(60)
@given(problem=sac_problems())
def test_trimming_makes_a_choice_no_slower_and_its_peak_no_higher(problem):
    solver = Solver(problem)
    peak_bytes, solution = solver.lowest_peak()

    chosen = solver.trimmed(solution.chosen)

    def time_ms(choice):
        pairs = zip(problem.units, choice, strict=True)
        return sum(u.points[k].recompute_ms for u, k in pairs if k is not None)

    assert int(solver.live(chosen).max()) <= peak_bytes
    assert time_ms(chosen) <= time_ms(solution.chosen)


@examples(60)
@given(problem=sac_problems())
def test_whole_points_match_trying_every_choice(problem):
    solution = solve(problem, integral=True, relative_gap=0.0)

    best = least_time(problem)
    assert violations(problem, solution) == ()
    assert solution.recompute_ms == best
    if best is None:
        assert solution.termination is Termination.INFEASIBLE
    else:
        assert solution.termination is Termination.OPTIMAL
        assert solution.bound_ms <= best
        assert solution.bound_ms == pytest.approx(best, abs=1e-6)
        assert solution.predicted_peak_bytes == peak_of(problem, solution.chosen)


@examples(40)
@given(problem=layered_problems() | deep_trees())
def test_layers_and_trees_of_modules_match_trying_every_choice(problem):
    solution = solve(problem, integral=True, relative_gap=0.0)
    lowest, _ = lowest_peak(problem)

    choices = [(time, peak) for time, peak, _ in sac_choices(problem)]
    fitting = [time for time, peak in choices if peak <= problem.budget_bytes]
    assert violations(problem, solution) == ()
    assert solution.recompute_ms == min(fitting, default=None)
    assert lowest == min(peak for _, peak in choices)
    if fitting:
        assert solution.termination is Termination.OPTIMAL
        assert solution.bound_ms <= min(fitting)


@given(
    problem=st.one_of(sac_problems(), layered_problems(), deep_trees()),
    told=st.sampled_from([0.0, 0.9, 1.0]),
    likely=st.sampled_from([0.0, 0.5, 1.0, 1.2]),
    known=st.sampled_from([1.0, 1.3, math.inf]),
    gap=st.sampled_from([1e-3, 0.2]),
)
def test_no_bound_exceeds_the_optimum_whatever_is_known_before(
    problem, told, likely, known, gap
):
    best = least_time(problem)
    if best is None:
        return

    found = Solver(problem).solve(
        problem.budget_bytes,
        least_ms=told * best,
        likely_ms=likely * best,
        most_ms=known * best if known < math.inf else math.inf,
        relative_gap=gap,
    )

    assert found.bound_ms <= best * (1 + 1e-9)
    if known == math.inf:
        assert found.recompute_ms <= best / (1.0 - gap) * (1 + 1e-9)


@given(problem=st.one_of(sac_problems(), layered_problems(), deep_trees()))
def test_memory_of_many_choices_is_that_of_each(problem):
    table = Table(problem)
    choices = [chosen for *_, chosen in sac_choices(problem)]
    weights = np.array([table.weights(chosen) for chosen in choices])

    for chosen, live in zip(choices, table.live(weights), strict=True):
        assert live.max() == peak_of(problem, chosen)
        assert (live == table.live(table.weights(chosen))).all()


@examples(30)
@given(problem=st.one_of(sac_problems(), layered_problems(), deep_trees()))
def test_milps_that_are_too_large_are_left_out_only_at_small_gaps(problem):
    best = least_time(problem)
    with patch("autosac.solvers.sac.rows._MOST_INTEGERS", 0):
        found = solve(problem, integral=True)

    assert violations(problem, found) == ()
    assert (found.recompute_ms is None) == (best is None)
    if best is not None:
        assert found.bound_ms <= best * (1 + 1e-9)
        assert best <= found.recompute_ms * (1 + 1e-9)
        assert found.recompute_ms * (1 - SMALL_GAP) <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", [173, 175, 188, 197, 198])
def test_what_is_easy_is_solved_beyond_the_gap_that_was_asked_for(seed):
    draw = random.Random(seed)
    units = []
    for name in "abcdefg":
        some, more = draw.randint(2, 9), draw.randint(0, 3)
        half = (0.5, some, float(some + more))
        all_ms = 2.0 * some
        full = (1.0, some + draw.randint(1, 6), all_ms + draw.randint(2, 9))
        units.append(unit(name, [half, full]))
    seven = problem(*units, base=(10, 60, 10), budget=60 - draw.randint(10, 30))

    found = solve(seven, integral=True, relative_gap=0.3)
    rough = Solver(seven).solve(seven.budget_bytes, relative_gap=0.3, polishes=False)

    assert found.recompute_ms == least_time(seven)
    assert found.recompute_ms < rough.recompute_ms <= found.recompute_ms / 0.7
    assert rough.work < found.work


@examples(30)
@given(
    saving=save_problems(most=12),
    budget=st.integers(0, 100),
    known=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_bound_over_mixed_points_holds_for_every_save_set(saving, budget, known):
    # Two equal units with all their Pareto points, and with a selection of these; of
    # the others, those that take less than a share of the longest time are known.
    front = knapsack.front(saving)
    known_points = solutions(front)
    most = sum(saving.saved_bytes)

    def two(indices, **more):
        points = tuple(
            Breakpoint(
                ratio=1.0 - known_points[i].saved_bytes / (most + 1),
                freed_bytes=most - known_points[i].saved_bytes,
                recompute_ms=known_points[i].recompute_ms,
            )
            for i in indices
        )
        alike = [
            Unit(
                fqn=name,
                parent=None,
                points=points,
                freed_from=1,
                freed_until=2,
                working=(),
                **more,
            )
            for name in "ab"
        ]
        return SacProblem(
            units=tuple(alike),
            base_bytes=(0, 2 * most, 0),
            budget_bytes=2 * most * budget // 100,
        )

    if not known_points:
        return
    everything = two(range(len(known_points)))
    selected = front.select(2)
    times = [solution.recompute_ms for solution in known_points]
    known_ms = times[-1] * known if known < 1.0 else math.inf
    selection = two(
        selected,
        between=tuple(_between(front, selected, known_ms)),
        mixed_from_ms=known_ms,
    )

    best = least_time(everything)
    found = solve(selection, integral=True, mixed_units=[0, 1])

    if best is None:
        assert found.termination is Termination.INFEASIBLE
    elif found.bound_ms is not None:
        assert found.bound_ms <= best * (1 + 1e-9)
        assert found.recompute_ms is None or found.recompute_ms >= best
        if known == 1.0 and found.recompute_ms is not None:  # nothing is missing
            assert found.bound_ms >= best * (1 - 2e-3) - 1e-9


def test_a_point_between_two_others_is_dealt_out_to_one_unit():
    # Two units must free 6 MiB: each half is best, by a point between its first two.
    points, middle_ms = [(0.25, 2, 1.0), (0.5, 4, 3.0), (1.0, 8, 3.5)], 1.5
    between = (Between(point=0, share=0.5, recompute_ms=middle_ms),)
    like = [
        replace(unit(name, points), between=between, mixed_from_ms=math.inf)
        for name in "ab"
    ]
    told = []

    def finer(shares):
        told.append({u: mixture.tolist() for u, mixture in shares.items()})
        return math.inf

    solver = Solver(problem(*like, base=(0, 20, 0), budget=14))
    found = solver.solve(14 * MIB, mixed_units=[0, 1], finer=finer)

    assert found.bound_ms == pytest.approx(2 * middle_ms, rel=2e-3)
    assert {0: [0.5, 0.5, 0.0], 1: [0.5, 0.5, 0.0]} in told


def test_bounds_of_mixtures_are_of_such_as_break_no_position_even_by_bytes():
    # The first point breaks the third position by 512 bytes.
    one = replace(
        unit("a", [(0.5, 4, 1.0), (1.0, 8, 4.0)], freed=(1, 3)),
        working=((2, (512, 0)),),
        mixed_from_ms=math.inf,
    )

    found = Solver(problem(one, base=(0, 12, 12), budget=8)).solve(
        8 * MIB, mixed_units=[0], relative_gap=5e-3
    )

    assert found.recompute_ms == 4.0
    assert found.bound_ms >= 4.0 * (1 - 5e-3)


def test_a_mixture_of_points_between_which_a_rerun_takes_more_is_no_bound():
    # Each of two units must free 5 MiB by one of 320 points on a line. From 5 MiB on
    # all but the last take 8 MiB in the rerun, where 4 are left. That one takes 80 ms,
    # and a mixture of it and one below 5 MiB would take 40.
    points = [(k / 320, k / 32, k / 4) for k in range(1, 321)]
    rerun = tuple(8 * MIB if 160 <= k < 320 else 0 for k in range(1, 321))
    both = [
        replace(
            unit(name, points, freed=(first, first + 1)),
            working=((first + 1, rerun),),
            mixed_from_ms=math.inf,
        )
        for first, name in ((1, "a"), (3, "b"))
    ]
    two = problem(*both, base=(0, 13, 4, 13, 4), budget=8)

    found = Solver(two).solve(8 * MIB, mixed_units=[0, 1], relative_gap=5e-3)

    assert found.recompute_ms == 160.0
    assert found.bound_ms >= 160.0 * (1 - SMALL_GAP)


def test_what_like_units_keep_counts_for_one_holder_only():
    # Norms are alike, and what each keeps is held by the unit after it, which frees
    # little without it: 24 layers are more units than can be told apart one by one.
    units, holds = [], []
    for layer in range(24):
        for name, mib in (("attn", 4), ("mlp", 3)):
            norm = len(units)
            units.append(unit(f"{layer}.norm_of_{name}", [(1.0, 1, 5.0)]))
            units.append(unit(f"{layer}.{name}", [(1.0, mib, 1.0)]))
            held_bytes = 6 * MIB
            holders, kept = ((norm + 1, 2),), ((norm, (2,)),)
            holds.append(
                Hold(nbytes=held_bytes, held_from=1, holders=holders, kept_by=kept)
            )
    layers = replace(problem(*units, base=(0, 600, 0), budget=300), holds=tuple(holds))

    found = solve(layers, integral=True, relative_gap=5e-3)

    # All but the norms free 168 MiB, and each norm 7 MiB more.
    assert found.recompute_ms == 48 * 1.0 + 19 * 5.0
    assert found.termination is Termination.OPTIMAL


def _between(front, selected, known_ms):
    """Known points that are not selected, placed between those that are."""
    sizes = [solution.saved_bytes for solution in solutions(front)]
    for i, solution in enumerate(solutions(front)):
        if i not in selected and solution.recompute_ms < known_ms:
            at = bisect.bisect_left(selected, i) - 1
            low, high = selected[at], selected[at + 1]
            share = (sizes[low] - sizes[i]) / (sizes[low] - sizes[high])
            yield Between(point=at, share=share, recompute_ms=solution.recompute_ms)


@pytest.mark.parametrize(
    ("backend", "most", "number"), [("highs", 4, 40), ("cbc", 3, 4)]
)
def test_budgets_that_share_a_start_match_trying_every_choice(backend, most, number):
    @examples(number)
    @given(problem=sac_problems(most=most))
    def check(problem):
        solver, start = Solver(problem), Start()
        highest = max(problem.base_bytes)
        # A budget may also be smaller than the one before: a plan that did not fit.
        for share in (0.2, 0.4, 0.5, 0.45, 0.6, 0.8, 0.9):
            budget = replace(problem, budget_bytes=int(share * highest))
            found = solver.solve(
                budget.budget_bytes, backend=backend, relative_gap=0.0, start=start
            )
            assert violations(budget, found) == ()
            assert found.recompute_ms == least_time(budget)

    check()


@examples(8)
@given(problem=sac_problems(most=3))
def test_cbc_matches_trying_every_choice(problem):
    solution = solve(problem, integral=True, relative_gap=0.0, backend="cbc")

    assert violations(problem, solution) == ()
    assert solution.recompute_ms == least_time(problem)


@examples(8)
@given(problem=sac_problems(most=3) | layered_problems())
def test_milps_without_cuts_match_trying_every_choice(problem):
    with patch.object(pulp_runner, "_QUICK_ROOT", 0):
        solution = solve(problem, integral=True, relative_gap=0.0)

    assert violations(problem, solution) == ()
    assert solution.recompute_ms == least_time(problem)


def test_mixtures_of_points_that_free_what_their_unit_holds_keep_the_budget():
    # Points 1 and 2 free 1 MiB that the unit holds. Half of points 0 and 2 frees as
    # much as three quarters of 1 and a quarter of 2, but holds half a MiB less.
    points = [(0, 0.0), (MIB, 0.0), (3 * MIB, 0.0)]
    unit = Unit(
        fqn="u",
        parent=None,
        points=tuple(
            Breakpoint(ratio=(k + 1) / 3, freed_bytes=nbytes, recompute_ms=ms)
            for k, (nbytes, ms) in enumerate(points)
        ),
        freed_from=0,
        freed_until=2,
        working=(),
    )
    problem = SacProblem(
        units=(unit,),
        base_bytes=(5 * MIB, 5 * MIB),
        budget_bytes=4 * MIB,
        holds=(
            Hold(
                nbytes=MIB, held_from=0, holders=((0, 1),), freed_by=((0, (1, 0, 0)),)
            ),
        ),
    )

    solution = solve(problem, integral=False, relative_gap=0.0)

    assert solution.weights is not None
    assert violations(problem, solution) == ()


def test_a_unit_of_one_point_can_be_chosen_although_a_hold_depends_on_it():
    problem = SacProblem(
        units=(
            Unit(
                fqn="unit",
                parent=None,
                points=(Breakpoint(ratio=1.0, freed_bytes=MIB, recompute_ms=1.0),),
                freed_from=0,
                freed_until=4,
                working=(),
            ),
        ),
        base_bytes=(5 * MIB,) * 4,
        budget_bytes=4 * MIB,
        holds=(Hold(nbytes=0, held_from=0, holders=(), freed_by=((0, (0,)),)),),
    )

    solution = solve(problem, integral=False, relative_gap=0.0)

    assert solution.recompute_ms == 1.0


@examples(40)
@given(problem=sac_problems())
def test_continuous_weights_never_cost_more_than_whole_points(problem):
    solution = solve(problem, integral=False, relative_gap=0.0)

    best = least_time(problem)
    assert violations(problem, solution) == ()
    if best is not None:
        # Rows hold to 1e-6 MiB, weights to 1e-6.
        assert solution.recompute_ms <= best + 1e-4
        assert solution.bound_ms <= solution.recompute_ms


@examples(40)
@given(problem=sac_problems())
def test_the_lowest_peak_matches_trying_every_choice(problem):
    peak_bytes, solution = lowest_peak(problem)

    assert peak_bytes == least_peak(problem)
    met = replace(problem, budget_bytes=peak_bytes)
    assert violations(met, solution) == ()
    assert solve(met, integral=True).termination.has_incumbent
    below = replace(problem, budget_bytes=peak_bytes - 1)
    assert solve(below, integral=True).termination is Termination.INFEASIBLE


@examples(15)
@given(problem=sac_problems())
def test_more_budget_never_costs_more(problem):
    times = []
    for mib in range(0, 24, 3):
        budget = replace(problem, budget_bytes=mib * MIB)
        times.append(solve(budget, integral=True, relative_gap=0.0).recompute_ms)
    known = [time_ms for time_ms in times if time_ms is not None]

    assert known == sorted(known, reverse=True)
    assert times[len(times) - len(known) :] == known


def test_many_equal_layers_are_solved_within_the_gap():
    # 60 layers that free 3 or 9 MiB in 1 or 4 ms, one after the other; 100 MiB too
    # many at the peak in the middle: at least 100 / 3 ms.
    size = 60
    layers = [
        unit(
            f"layers.{i}",
            [(0.3, 3, 1.0), (1.0, 9, 4.0)],
            freed=(i + 1, 2 * size - i),
            working=[(2 * size - i, (2, 6))],
        )
        for i in range(size)
    ]
    base = [10 * min(q, 2 * size - q) for q in range(2 * size + 1)]
    stack = problem(*layers, base=base, budget=500)

    solution = solve(stack, integral=True, time_limit_s=20.0)

    assert solution.termination is Termination.OPTIMAL
    assert 100 / 3 <= solution.recompute_ms <= 100 / 3 * 1.05
    assert violations(stack, solution) == ()


def test_wrong_problems_are_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        unit("a", [])
    with pytest.raises(ValueError, match="one number for each of 2 points, got 1"):
        unit("a", HALF_OR_ALL, working=[(0, (1,))])
    with pytest.raises(ValueError, match="finite and not negative"):
        unit("a", [(1.0, 1, -1.0)])
    with pytest.raises(ValueError, match="at most 3, got 1 and 4"):
        problem(unit("a", HALF_OR_ALL, freed=(1, 4)), budget=1)
    with pytest.raises(ValueError, match="positions below 3"):
        problem(unit("a", HALF_OR_ALL, working=[(3, (1, 1))]), budget=1)
    with pytest.raises(ValueError, match="lies inside itself"):
        problem(
            unit("a", HALF_OR_ALL, parent=1),
            unit("b", HALF_OR_ALL, parent=0),
            budget=1,
        )
    with pytest.raises(ValueError, match="index below 1, got 5"):
        problem(unit("a", HALF_OR_ALL, parent=5), budget=1)
    one = problem(unit("a", HALF_OR_ALL), unit("b", HALF_OR_ALL), budget=1)
    for by_point, words in [
        (((2, (1, 1)),), "below 2, got 2"),
        (((0, (1,)),), "one position for each of 2 points of 'a', got 1"),
        (((0, (0, 1)),), "must lie in 1 to 3"),
        (((0, (1, 1)), (1, (1, 1))), "must lie in one another"),
    ]:
        hold = Hold(nbytes=1, held_from=1, holders=((1, 2),))
        for name in ("freed_by", "kept_by"):
            with pytest.raises(ValueError, match=words):
                replace(one, holds=(replace(hold, **{name: by_point}),))
    both = ((0, (1, 1)),)
    hold = Hold(nbytes=1, held_from=1, holders=(), freed_by=both, kept_by=both)
    with pytest.raises(ValueError, match="not both"):
        replace(one, holds=(hold,))
    with pytest.raises(ValueError, match="at least one position"):
        problem(base=(), budget=1)


@both
def test_the_price_of_memory_is_the_slope_of_the_relaxation(backend):
    # One unit of 4 MiB for 1 ms and 4 more for 3 ms: 1/4 ms a MiB, then 3/4 ms.
    solver = Solver(problem(unit("a", HALF_OR_ALL), budget=0))

    prices = {
        budget: solver.price(budget * MIB, backend=backend)
        for budget in (11, 13, 15, 17, 19, 20)
    }

    assert prices.pop(11) is None  # nothing fits
    assert [ms * MIB for ms in prices.values()] == pytest.approx(
        [0.75, 0.75, 0.25, 0.25, 0.0]
    )


def test_a_repair_takes_a_move_that_did_not_help_before_another_one():
    first = unit("first", [(1.0, 60, 1.0)], freed=(0, 1), working=[(1, (120,))])
    second = unit("second", [(1.0, 10, 10.0)], freed=(0, 2), working=[(1, (-35,))])
    third = unit("third", [(1.0, 40, 20.0)], freed=(1, 2))
    table = Table(problem(first, second, third, base=(150, 60), budget=100))
    nothing = np.zeros(3)  # of which the first one alone makes it worse
    assert round_and_repair(table, 100 * MIB, range(3), nothing) == [0, 0, 0]


@given(sac_problems())
def test_what_one_unit_adds_is_its_part_of_a_row(problem):
    table = Table(problem)
    for position in range(len(problem.base_bytes)):
        row = table.row(position)
        parts = [table.own_row(u, position) for u in range(len(problem.units))]
        assert np.concatenate([*parts, row[:0]]).tolist() == row.tolist()


def _random_layers(seed, num_units=30):
    """Units of a step, whose reruns meet each other's memory in ways of their own."""
    draw = random.Random(seed)
    units = []
    for number in range(num_units):
        ends = 2 * num_units - number
        freed = draw.randint(1, 40) * MIB
        points = tuple(
            Breakpoint(
                ratio=share / 3,
                freed_bytes=freed * share // 3,
                recompute_ms=draw.random() * share,
            )
            for share in (1, 2, 3)
        )
        working = tuple(
            (position, tuple(draw.randint(0, 60) * MIB for _ in points))
            for position in (ends, ends + 1)
        )
        units.append(
            Unit(
                fqn=f"unit{number}",
                parent=None,
                points=points,
                freed_from=number + 1,
                freed_until=ends,
                working=working,
            )
        )
    base = [200 * MIB] * (2 * num_units + 3)
    for unit in units:
        for position in range(unit.freed_from - 1, unit.freed_until + 1):
            base[position] += unit.points[-1].freed_bytes
    return SacProblem(units=tuple(units), base_bytes=tuple(base), budget_bytes=0)


def _without_milps(problem, mixes):
    """The least peak that is found without any MILP, and its choice."""
    limits = {"backend": "highs", "time_limit_s": None, "relative_gap": 0.0}
    units = range(len(problem.units))
    search = LeastPeak(Table(problem), units=units, **limits, most_work=0)
    crossover = LeastPeak._crossover if mixes else lambda *_: None
    with patch.object(LeastPeak, "_crossover", crossover):
        search.run()
    return int(search._best), search.choice


@pytest.mark.slow
def test_mixtures_of_the_best_choice_and_relaxations_lower_peaks_that_are_real():
    peaks = []
    for seed in range(6):
        problem = _random_layers(seed)
        peak_bytes, choice = _without_milps(problem, mixes=True)

        assert peak_bytes == peak_of(problem, tuple(choice))
        assert peak_bytes >= lowest_peak(problem)[0]
        peaks.append((peak_bytes, _without_milps(problem, mixes=False)[0]))

    assert all(mixed <= repaired for mixed, repaired in peaks)
    assert sum(mixed < repaired for mixed, repaired in peaks) >= 4
