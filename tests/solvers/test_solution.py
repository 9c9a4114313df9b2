import pytest

from autosac.solvers.milp.solution import Solution, Termination


def test_only_optimal_and_feasible_have_an_incumbent():
    with_incumbent = {t for t in Termination if t.has_incumbent}

    assert with_incumbent == {Termination.OPTIMAL, Termination.FEASIBLE}


@pytest.mark.parametrize(
    ("objective_ms", "bound_ms", "gap"),
    [
        (8.0, 6.0, 0.25),
        (8.0, 8.0, 0.0),
        (0.0, 0.0, 0.0),  # nothing is recomputed: no gap, not 0 / 0
        (None, 3.0, None),
        (8.0, None, None),
    ],
)
def test_gap_is_the_share_of_the_objective_above_the_bound(objective_ms, bound_ms, gap):
    solution = Solution(
        termination=Termination.FEASIBLE, objective_ms=objective_ms, bound_ms=bound_ms
    )

    assert solution.gap == gap
