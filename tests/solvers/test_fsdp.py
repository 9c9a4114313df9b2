import pytest
from hypothesis import given, settings

from solvers import fsdp
from solvers.fsdp import estimate, lowest_peak, solve
from solvers.solution import Termination
from tests.solvers.fsdp_cases import MIB, every_choice, fsdp_problems


def _best(problem):
    """Least time within the budget, and least peak, of all choices."""
    found = [
        (fsdp.predicted(problem, choice).total_ms, fsdp.live(problem, choice).max())
        for choice in every_choice(problem)
    ]
    fitting = [time for time, peak in found if peak <= problem.sac.budget_bytes]
    return min(fitting, default=None), min((peak for _, peak in found), default=None)


def _check(problem, found):
    least_ms, least_peak = _best(problem)
    if least_ms is None:
        assert found.termination is Termination.INFEASIBLE
        if least_peak is not None:
            assert lowest_peak(problem).predicted_peak_bytes == least_peak
        return
    assert found.termination is Termination.OPTIMAL
    assert found.objective_ms == least_ms
    assert found.bound_ms == pytest.approx(least_ms, abs=1e-6)
    assert found.predicted_peak_bytes <= problem.sac.budget_bytes
    assert not fsdp.broken_rules(problem, found.choice)


@settings(max_examples=60, deadline=None)
@given(problem=fsdp_problems())
def test_matches_trying_every_choice(problem):
    _check(problem, solve(problem, relative_gap=0.0))
