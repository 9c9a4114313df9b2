import math
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers.curves import knapsack
from autosac.solvers.curves.front import save_front
from autosac.solvers.curves.knapsack import front, recompute_ms, rerun_closure
from autosac.solvers.curves.save_problem import SaveProblem
from tests.examples import examples
from tests.solvers.check import violations
from tests.solvers.oracles import pareto_saves
from tests.solvers.save_solutions import saved_bytes, solutions, trade_off
from tests.solvers.strategies import MIB, save_problems


def chain(**changes):
    """Four groups in a row, each reading the one before; backward reads 1 and 3."""
    problem = SaveProblem(
        saved_bytes=(1 * MIB, 2 * MIB, 3 * MIB, 4 * MIB),
        runtime_ms=(1.0, 2.0, 4.0, 8.0),
        inputs=((), (0,), (1,), (2,)),
        needed=frozenset({1, 3}),
    )
    return replace(problem, **changes)


def points_of(problem):
    """MiB and milliseconds of all Pareto points, and which groups are saved."""
    return [
        (
            s.saved_bytes // MIB,
            s.recompute_ms,
            {g for g, flag in enumerate(s.saved) if flag},
        )
        for s in solutions(front(problem))
    ]


def test_the_front_of_four_groups_is_the_one_that_counts_by_hand():
    # Of 3 MiB group 2 alone makes better use than what is needed: 3 is rerun from it,
    # 0 and 1 for backward, 1 + 2 + 8 = 11 ms; with 1 saved 2 and 3 take 12 ms.
    assert points_of(chain()) == [
        (6, 0.0, {1, 3}),
        (5, 2.0, {0, 3}),
        (4, 3.0, {3}),
        (3, 11.0, {2}),
        (2, 12.0, {1}),
        (1, 14.0, {0}),
        (0, 15.0, set()),
    ]


def test_pinned_and_unsavable_groups_are_left_alone():
    # 3 is unsavable: rerun from 2. 0 is pinned: what is rerun from it needs it saved.
    problem = chain(pinned=frozenset({0}), unsavable=frozenset({3}))

    assert points_of(problem) == [
        (5, 8.0, {1, 2}),
        (4, 10.0, {0, 2}),
        (2, 12.0, {1}),
        (1, 14.0, {0}),
    ]


def test_what_can_be_neither_saved_nor_rerun_leaves_no_point():
    assert points_of(chain(pinned=frozenset({3}), unsavable=frozenset({3}))) == []


def test_without_anything_to_rerun_what_is_needed_is_saved():
    problem = chain(needed=frozenset({0}), pinned=frozenset({0}))

    assert points_of(problem) == [(1, 0.0, {0})]


def test_the_rerun_closure_stops_at_saved_results():
    problem = chain()

    assert rerun_closure(problem, (False,) * 4) == (True,) * 4
    assert rerun_closure(problem, (False, True, False, False)) == (
        False,
        False,
        True,
        True,
    )


@examples(60)
@given(problem=save_problems())
def test_the_trade_off_is_the_whole_pareto_front_when_every_capacity_is_tried(problem):
    total = sum(problem.saved_bytes) // MIB
    points = trade_off(problem, num_points=2 * total + 2)

    observed = [(s.recompute_ms, s.saved_bytes) for s in points]
    assert set(observed) == pareto_saves(problem)
    assert observed == sorted(observed)
    for solution in points:
        assert violations(problem, solution) == ()


def test_the_least_selection_has_both_ends_and_the_vertices_of_the_hull():
    # Everything rerun: 15 ms. Nothing rerun: 1 and 3 saved, 6 MiB. Saving 3 alone:
    # 1.5 ms per MiB, then 3 ms. 2 alone (11 ms) lies above the line.
    selected = trade_off(chain(), num_points=1)

    assert [(s.recompute_ms, s.saved_bytes) for s in selected] == [
        (0.0, 6 * MIB),
        (3.0, 4 * MIB),
        (15.0, 0),
    ]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"runtime_ms": (1.0,)}, "same length"),
        ({"saved_bytes": (-1, 0, 0, 0)}, "must not be negative"),
        ({"runtime_ms": (float("inf"), 0.0, 0.0, 0.0)}, "finite"),
        ({"inputs": ((0,), (), (), ())}, r"`inputs\[0\]` must name groups before 0"),
        ({"needed": frozenset({4})}, "below 4, got 4"),
    ],
)
def test_wrong_problems_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        chain(**changes)


def front_of_few_frontiers(problem):
    """The front of a problem whose dynamic program follows a single frontier."""
    one = partial(save_front, most_frontiers=0)
    with (
        patch.object(knapsack, "save_front", one),
        patch("autosac.solvers.curves.front._FEWEST_AT_ONCE", 1),
    ):
        return front(problem)


def test_what_backward_reads_anyway_tells_no_frontiers_apart():
    # Groups read the second, third and seventh before them: what reruns read are
    # hundreds of sets of groups, all of which are decided in any case.
    problem = SaveProblem(
        saved_bytes=(1,) * 24,
        runtime_ms=(1.0,) * 24,
        inputs=tuple(tuple(g - d for d in (2, 3, 7) if d <= g) for g in range(24)),
        needed=frozenset(range(24)),
    )

    followed = save_front(problem, most_labels=10**6, most_frontiers=24)

    assert math.isinf(followed.complete_below_ms) and len(followed.saved) == 25


def front_after_little_work(problem):
    """The front of a problem whose dynamic program may do next to nothing."""
    little = partial(save_front, most_work=0)
    with (
        patch.object(knapsack, "save_front", little),
        patch("autosac.solvers.curves.front._FEWEST_LABELS", 3),
    ):
        return front(problem, most_labels=10**6)


@pytest.mark.parametrize(
    "thin", [lambda problem: front(problem, most_labels=2), front_of_few_frontiers]
)
@examples(60)
@given(
    problem=save_problems(most=8), prices=st.lists(st.floats(1e-9, 1e-4), max_size=5)
)
def test_a_partial_front_has_the_vertices_of_the_hull(thin, problem, prices):
    fronts = front(problem), thin(problem)
    complete, thinned = map(solutions, fronts)

    ends = [complete[i] for i in (0, -1)] if complete else []
    steepness = [
        (b.recompute_ms - a.recompute_ms) / (a.saved_bytes - b.saved_bytes)
        for a in complete
        for b in complete
        if a.saved_bytes > b.saved_bytes
    ]
    assert fronts[0].is_complete
    assert [thinned[i].saved_bytes for i in (0, -1) if ends] == [
        end.saved_bytes for end in ends
    ]
    for price in steepness + prices:  # the least of time + price * bytes is the same
        least = [
            min(
                (s.recompute_ms + price * s.saved_bytes for s in observed),
                default=0.0,
            )
            for observed in (complete, thinned)
        ]
        assert least[0] == pytest.approx(least[1], rel=1e-6)


@pytest.mark.parametrize(
    "thin",
    [
        lambda problem: front(problem, most_labels=2),
        lambda problem: front(problem, most_labels=7),
        front_after_little_work,
        front_of_few_frontiers,
    ],
)
@given(problem=save_problems(most=10))
def test_a_thinned_front_misses_no_point_that_is_faster_than_it_says(thin, problem):
    complete, thinned = front(problem), thin(problem)

    limit_ms = thinned.complete_below_ms * (1 - 1e-9)  # sums in another order
    fast = {s.saved_bytes for s in solutions(complete) if s.recompute_ms < limit_ms}
    assert fast <= {s.saved_bytes for s in solutions(thinned)}
    assert thinned.is_complete <= (solutions(complete) == solutions(thinned))


@given(problem=save_problems())
def test_a_thinned_front_is_feasible_and_ordered(problem):
    exact = save_front(problem, most_labels=10**6)
    thinned = save_front(problem, most_labels=4)

    outcomes = []
    for saved in thinned.saved:
        rerun = rerun_closure(problem, saved)
        assert not any(rerun[g] for g in problem.pinned)
        assert not any(saved[g] for g in problem.unsavable)
        outcomes.append((recompute_ms(problem, rerun), saved_bytes(problem, saved)))
    assert outcomes == sorted(set(outcomes), key=lambda o: (o[0], -o[1]))
    assert bool(len(thinned.saved)) <= bool(len(exact.saved))
    assert exact.complete_below_ms == math.inf


def test_a_thinned_front_of_equal_layers_has_points_at_which_only_some_have_changed():
    # Twelve layers of three results: 1, 2 and 3 MiB for 1, 3 and 7 ms.
    layers = 12
    problem = SaveProblem(
        saved_bytes=(1 * MIB, 2 * MIB, 3 * MIB) * layers,
        runtime_ms=(1.0, 3.0, 7.0) * layers,
        inputs=((),) * (3 * layers),
        needed=frozenset(range(3 * layers)),
    )

    thinned = front(problem, most_labels=4)

    # On the hull one layer after the other gives up the same result.
    wanted = {MIB * (6 * layers - k) for k in range(layers + 1)}
    wanted |= {MIB * (5 * layers - 2 * k) for k in range(layers + 1)}
    assert not thinned.is_complete
    assert wanted <= {solution.saved_bytes for solution in solutions(thinned)}
