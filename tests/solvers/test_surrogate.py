"""The bound by dynamic programming against trying every choice, and the relaxation."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers import sac
from autosac.solvers.milp import pulp_runner
from autosac.solvers.milp.solution import Termination
from autosac.solvers.sac.classes import classify
from autosac.solvers.sac.counts import CountModel
from autosac.solvers.sac.surrogate import least_times, surrogate
from autosac.solvers.sac.table import Table
from tests.solvers import oracles
from tests.solvers.strategies import MIB, deep_trees, layered_problems, sac_problems

CELLS = 2**15  # of the grid, where there are few points


def relaxed(problem, rows=None):
    """The relaxation of a problem, solved, and its optimum."""
    table = Table(problem)
    units = range(len(problem.units))
    rows = list(range(len(problem.base_bytes))) if rows is None else rows
    model = CountModel(
        table,
        classify(table, rows, [0 for _ in units]),
        rows,
        units=units,
        budget_bytes=problem.budget_bytes,
    )
    outcome = pulp_runner.run(model.model, relaxed=True)
    if outcome.termination is not Termination.OPTIMAL:
        return table, None, math.inf
    return table, model, outcome.bound / model.scale


def test_no_part_of_a_unit_is_chosen_that_breaks_the_budget_alone():
    # The container frees 10 MiB at position 1, for which its rerun puts 10 MiB on
    # position 2. A relaxation that took 0.4 of it would need 0.25 of the units inside.
    def unit(fqn, freed_mib, ms, parent=None, rerun_mib=0):
        point = sac.Breakpoint(ratio=1.0, freed_bytes=freed_mib * MIB, recompute_ms=ms)
        working = ((2, (rerun_mib * MIB,)),) if rerun_mib else ()
        return sac.Unit(
            fqn=fqn,
            parent=parent,
            points=(point,),
            freed_from=1,
            freed_until=2,
            working=working,
        )

    problem = sac.SacProblem(
        units=(
            unit("a", 10, 1.0, rerun_mib=10),
            *(unit(f"a.{name}", 4, 8.0, parent=0) for name in "bc"),
        ),
        base_bytes=(10 * MIB, 20 * MIB, 10 * MIB),
        budget_bytes=14 * MIB,
    )

    _, model, relaxed_ms = relaxed(problem)

    assert model is not None
    assert relaxed_ms == pytest.approx(12.0)  # 1.5 units inside, of which it takes 2
    assert oracles.least_time(problem) == 16.0


@given(
    problem=st.one_of(sac_problems(), layered_problems(), deep_trees()),
    knows_best=st.booleans(),
)
def test_no_choice_is_faster_and_the_relaxation_not_slower(problem, knows_best):
    table, model, relaxed_ms = relaxed(problem)
    best = oracles.least_time(problem)
    if model is None:
        assert best is None
        return

    most_ms = best if knows_best and best is not None else math.inf
    bound = least_times(table, model, mixed=frozenset(), most_ms=most_ms).all_ms

    assert best is None or bound <= best * (1 + 1e-9)
    required = surrogate(table, model).required
    lost_ms = len(problem.units) / CELLS * max(0.0, required)
    assert bound >= min(relaxed_ms, most_ms) - lost_ms - 1e-9


@given(
    problem=st.one_of(sac_problems(), layered_problems(), deep_trees()),
    room=st.sampled_from([0.0, 0.3, math.inf]),
)
def test_no_choice_with_a_point_is_faster_than_is_said_of_the_point(problem, room):
    table, model, relaxed_ms = relaxed(problem)
    if model is None:
        return
    most_ms = relaxed_ms * (1.0 + room)
    using_ms = least_times(table, model, mixed=frozenset(), most_ms=most_ms).using_ms

    for time_ms, peak_bytes, choice in oracles.sac_choices(problem):
        if peak_bytes <= problem.budget_bytes and time_ms <= most_ms:
            for u, k in enumerate(choice):
                if k is not None and u in using_ms:
                    assert using_ms[u][k] <= time_ms * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(("needed", "least"), [(3, 3.0), (4, 6.0), (5, 6.0), (7, 9.0)])
def test_whole_units_are_counted_where_the_relaxation_takes_parts(needed, least):
    units = tuple(
        sac.Unit(
            fqn=name,
            parent=None,
            points=(sac.Breakpoint(ratio=1.0, freed_bytes=3 * MIB, recompute_ms=3.0),),
            freed_from=0,
            freed_until=1,
            working=(),
        )
        for name in "abc"
    )
    problem = sac.SacProblem(
        units=units, base_bytes=(10 * MIB, 0), budget_bytes=(10 - needed) * MIB
    )
    table, model, relaxed_ms = relaxed(problem)

    assert relaxed_ms == pytest.approx(needed)
    bound = least_times(table, model, mixed=frozenset(), most_ms=math.inf).all_ms
    assert bound == pytest.approx(least)


def test_too_little_memory_for_whole_units_is_infeasible():
    # Half of each of two units would do, but one of them is inside the other.
    def unit(name, parent):
        points = (sac.Breakpoint(ratio=1.0, freed_bytes=4 * MIB, recompute_ms=1.0),)
        return sac.Unit(
            fqn=name,
            parent=parent,
            points=points,
            freed_from=0,
            freed_until=1,
            working=(),
        )

    problem = sac.SacProblem(
        units=(unit("a", None), unit("a.b", 0), unit("a.b.c", 1)),
        base_bytes=(10 * MIB, 0),
        budget_bytes=5 * MIB,
    )

    assert sac.solve(problem, integral=True).termination is Termination.INFEASIBLE
