"""Plans of graphs that may offload: what is known of them, and the search for more."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from autosac.solvers.graph import move_solver
from autosac.solvers.graph.moving import (
    Choice,
    MovePlan,
    MoveProblem,
)
from autosac.solvers.milp.solution import Backend


class _Bound(NamedTuple):
    """A bound, which holds for less memory as well."""

    budget_bytes: int
    host_bytes: float
    bound_ms: float


class _Known:
    """Plans and bounds that were found for a step so far, whatever the host's bytes."""

    def __init__(self) -> None:
        self._plans: list[MovePlan] = []
        self._bounds: list[_Bound] = []

    def add(self, plan: MovePlan) -> None:
        """Remember a plan."""
        if plan not in self._plans:
            self._plans.append(plan)

    def cheapest(self, problem: MoveProblem, budget_bytes: int) -> list[MovePlan]:
        """The plan of least time that fits, if there is one."""
        fitting = [
            plan
            for plan in self._plans
            if plan.peak_bytes <= budget_bytes and problem.holds(plan.choice.moved)
        ]
        best = min(fitting, key=lambda p: (p.cost_ms, p.peak_bytes), default=None)
        return [] if best is None else [best]

    def bound(self, budget_bytes: int, host_bytes: float, bound_ms: float) -> float:
        """A bound, or a better one of more memory; and remember it."""
        self._bounds.append(_Bound(budget_bytes, host_bytes, bound_ms))
        return max(
            one.bound_ms
            for one in self._bounds
            if one.budget_bytes >= budget_bytes and one.host_bytes >= host_bytes
        )


@lru_cache(maxsize=64)
def _known(problem: MoveProblem) -> _Known:
    return _Known()


@lru_cache(maxsize=16)
def lowest(
    problem: MoveProblem,
    start: frozenset[int],
    time_limit_s: float | None,
    backend: Backend,
) -> tuple[int, Choice]:
    """Least peak with moves that the MILP finds, and its choice.

    Args:
        problem: The step.
        start: Values that are kept at the least peak without moves.
        time_limit_s: Of the search; None for an amount of work.
        backend: Which MILP solver runs.
    """
    return move_solver.lowest(
        problem, start=(Choice(start),), time_limit_s=time_limit_s, backend=backend
    )


def with_moves(
    problem: MoveProblem,
    budget_bytes: int,
    start: MovePlan | None,
    *,
    time_limit_s: float | None,
    relative_gap: float,
    backend: Backend,
) -> tuple[MovePlan, float] | None:
    """A plan that takes no more time than any known one that fits, and its bound.

    Args:
        problem: The step.
        budget_bytes: Cap on its peak.
        start: A plan that fits, as the one without moves.
        time_limit_s, relative_gap, backend: As in `GraphPlanner.plan`.

    Returns:
        None if no plan was found.
    """
    known = _known(replace(problem, host_bytes=None))
    starts = known.cheapest(problem, budget_bytes)
    solution = move_solver.solve(
        problem,
        budget_bytes=budget_bytes,
        start=starts if start is None else [start, *starts],
        time_limit_s=time_limit_s,
        relative_gap=relative_gap,
        backend=backend,
    )
    if solution.plan is None:
        return None
    assert solution.bound_ms is not None
    known.add(solution.plan)
    host_bytes = float("inf") if problem.host_bytes is None else problem.host_bytes
    return solution.plan, known.bound(budget_bytes, host_bytes, solution.bound_ms)
