"""What was found for a graph before: choices, bounds, and solutions.

What is compiled again, as for the next budget, is the same problem again.
"""

from __future__ import annotations

from functools import lru_cache

from autosac.solvers import graph
from autosac.solvers.graph import recomputation
from autosac.solvers.graph.recomputation import GraphProblem
from autosac.solvers.milp.solution import Backend


class Known:
    """Choices and bounds that were found for a problem so far."""

    def __init__(self) -> None:
        self._choices: dict[frozenset[int], tuple[float, int]] = {}  # time, peak
        self._bounds: dict[int, float] = {}  # of budgets

    def add(self, problem: GraphProblem, kept: frozenset[int]) -> None:
        """Remember a choice."""
        if kept not in self._choices:
            cost_ms = recomputation.recompute_ms(problem, kept)
            peak_bytes = recomputation.peak_bytes(problem, kept)
            self._choices[kept] = cost_ms, peak_bytes

    def cheapest(self, budget_bytes: int) -> frozenset[int] | None:
        """The choice of least time that fits a budget, None if there is none."""
        fitting = [
            (cost_ms, peak_bytes, kept)
            for kept, (cost_ms, peak_bytes) in self._choices.items()
            if peak_bytes <= budget_bytes
        ]
        return min(fitting, key=lambda one: one[:2])[2] if fitting else None

    def least_peak_bytes(self) -> int:
        """The least peak of a choice that was found."""
        return min(peak_bytes for _, peak_bytes in self._choices.values())

    def bound(self, budget_bytes: int, bound_ms: float) -> float:
        """A bound, or a better one of a larger budget; and remember it."""
        before_ms = self._bounds.get(budget_bytes, 0.0)
        self._bounds[budget_bytes] = max(before_ms, bound_ms)
        return max(ms for size, ms in self._bounds.items() if size >= budget_bytes)


@lru_cache(maxsize=64)
def known(problem: GraphProblem) -> Known:
    """What is known of a problem, and of equal ones."""
    return Known()


@lru_cache(maxsize=64)
def solved(
    problem: GraphProblem,
    budget_bytes: int,
    starts: tuple[frozenset[int], ...],
    time_limit_s: float | None,
    relative_gap: float,
    backend: Backend,
) -> graph.GraphSolution:
    return graph.solve(
        problem,
        budget_bytes=budget_bytes,
        start=starts,
        time_limit_s=time_limit_s,
        relative_gap=relative_gap,
        backend=backend,
    )


@lru_cache(maxsize=16)
def lowest(
    problem: GraphProblem,
    start: frozenset[int],
    time_limit_s: float | None,
    backend: Backend,
) -> graph.GraphSolution:
    return graph.lowest(
        problem, start=(start,), time_limit_s=time_limit_s, backend=backend
    )
