"""How a solve ended: the record that every solver's solution extends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Backend = Literal["highs", "cbc"]


class Termination(Enum):
    """Why a solve stopped. The values are sentences for the user."""

    OPTIMAL = "The solution is optimal within the gap that was asked for."
    FEASIBLE = "A limit was reached: the solution is feasible, but may not be the best."
    INFEASIBLE = "No solution exists."
    NO_INCUMBENT = "A limit was reached before any solution was found."
    UNBOUNDED = "The objective can fall without end: the problem is ill-posed."

    @property
    def has_incumbent(self) -> bool:
        """Whether a solution was found."""
        return self in (Termination.OPTIMAL, Termination.FEASIBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The part of a result that all solvers share.

    Attributes:
        termination: Why the solve stopped.
        objective_ms: Time of the incumbent, recomputed from the record.
        bound_ms: No solution takes less than this, if the solver proved anything.
        solve_s: Wall-clock time of the solve.
    """

    termination: Termination
    objective_ms: float | None = None
    bound_ms: float | None = None
    solve_s: float = 0.0

    @property
    def gap(self) -> float | None:
        """Share of the objective that the bound leaves open.

        0.0 for an objective of 0; None without an incumbent or without a bound.
        """
        if self.objective_ms is None or self.bound_ms is None:
            return None
        if self.objective_ms == 0.0:
            return 0.0
        return (self.objective_ms - self.bound_ms) / self.objective_ms
