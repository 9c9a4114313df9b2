from dataclasses import replace

import pytest

from autosac.solvers import sac
from autosac.solvers.curves import knapsack
from autosac.solvers.curves.save_problem import SaveProblem
from tests.solvers.check import violations
from tests.solvers.save_solutions import solutions
from tests.solvers.strategies import MIB

SAVING = SaveProblem(
    saved_bytes=(1 * MIB, 2 * MIB),
    runtime_ms=(1.0, 2.0),
    inputs=((), (0,)),
    needed=frozenset({1}),
)
SAVED = solutions(knapsack.front(SAVING))[0]
POINTS = tuple(
    sac.Breakpoint(ratio=k / 2, freed_bytes=k * MIB, recompute_ms=float(k))
    for k in range(3)
)
UNITS = sac.SacProblem(
    units=tuple(
        sac.Unit(
            fqn=fqn,
            parent=parent,
            points=POINTS,
            freed_from=0,
            freed_until=1,
            working=(),
        )
        for fqn, parent in (("a", None), ("a.b", 0))
    ),
    base_bytes=(4 * MIB,),
    budget_bytes=2 * MIB,
)


def test_solutions_of_the_solvers_break_nothing():
    assert violations(SAVING, SAVED) == ()
    assert violations(UNITS, sac.solve(UNITS, integral=True)) == ()
    assert violations(UNITS, sac.solve(UNITS, integral=False)) == ()


@pytest.mark.parametrize(
    ("changes", "flaws", "sentence"),
    [
        ({"unsavable": frozenset({1})}, {}, "Group 1 is saved although it cannot be"),
        ({}, {"saved": (True, False)}, "Backward needs group 1"),
        ({}, {"rerun": (False, True)}, "without its input, group 0"),
        ({"pinned": frozenset({0})}, {"rerun": (True, False)}, "Group 0 is rerun"),
        ({}, {"recompute_ms": 1.0}, "is 0.0 ms, not 1.0 ms"),
        ({}, {"saved_bytes": 5}, "2097152 bytes, not 5"),
    ],
)
def test_each_flaw_of_a_saving_is_named(changes, flaws, sentence):
    broken = violations(replace(SAVING, **changes), replace(SAVED, **flaws))

    assert any(sentence in text for text in broken), broken


@pytest.mark.parametrize(
    ("flaws", "sentence"),
    [
        ({"weights": ((0.0, 1.0, 0.0), (0.0,) * 3)}, "more than `budget_bytes`"),
        ({"weights": ((0.0, 0.0, 1.0),) * 2}, "nested: 'a', 'a.b'"),
        ({"weights": ((0.0, 0.5, 0.5), (0.0,) * 3)}, "one whole point"),
        (
            {"weights": ((0.5, 0.0, 0.5), (0.0,) * 3), "chosen": None},
            "not neighbours: [0, 2]",
        ),
        (
            {"weights": ((0.0, 0.5, 0.4), (0.0,) * 3), "chosen": None},
            "not shares of 1",
        ),
        ({"chosen": (None, None)}, "`chosen` does not name"),
        ({"predicted_peak_bytes": 0}, "bytes, not 0"),
        ({"recompute_ms": 9.0}, "not 9.0 ms"),
    ],
)
def test_each_flaw_of_a_choice_of_units_is_named(flaws, sentence):
    solution = sac.solve(UNITS, integral=True)

    broken = violations(UNITS, replace(solution, **flaws))

    assert any(sentence in text for text in broken), broken


def test_one_byte_over_the_budget_is_a_violation_of_whole_points():
    solution = sac.solve(UNITS, integral=True)

    assert violations(replace(UNITS, budget_bytes=2 * MIB - 1), solution)


def test_problem_and_solution_must_be_of_one_kind():
    with pytest.raises(TypeError, match="SaveProblem and SacSolution"):
        violations(SAVING, sac.solve(UNITS, integral=True))
