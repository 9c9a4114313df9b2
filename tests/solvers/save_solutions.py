"""Records of save-or-rerun choices, by which the tests compare and check them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from autosac.solvers.curves.knapsack import Front, front, recompute_ms
from autosac.solvers.curves.save_problem import SaveProblem
from autosac.solvers.milp.solution import Solution, Termination


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSolution(Solution):
    """What to save, and what is rerun as a consequence.

    Attributes:
        saved: Whether each group's results are saved; None without an incumbent.
        rerun: Whether each group is rerun: no more than `saved` makes necessary.
        recompute_ms: Time of the groups that are rerun.
        saved_bytes: Activation memory of the groups that are saved.
    """

    saved: tuple[bool, ...] | None = None
    rerun: tuple[bool, ...] | None = None
    recompute_ms: float | None = None
    saved_bytes: int | None = None


def saved_bytes(problem: SaveProblem, saved: Sequence[bool]) -> int:
    """Activation memory of the groups that are saved."""
    return sum(compress(problem.saved_bytes, saved))


def solutions(pareto: Front) -> tuple[SaveSolution, ...]:
    """Records of a front's points."""
    return tuple(_solution(pareto, i) for i in range(len(pareto)))


def trade_off(
    problem: SaveProblem, *, num_points: int = 16
) -> tuple[SaveSolution, ...]:
    """A selection of Pareto points: see `Front.select`."""
    pareto = front(problem)
    return tuple(_solution(pareto, i) for i in pareto.select(num_points))


def _solution(pareto: Front, i: int) -> SaveSolution:
    """Record of a point; no other one takes as few bytes in less time, if proven."""
    saved, rerun = tuple(pareto.saved[i].tolist()), tuple(pareto.rerun[i].tolist())
    cost_ms = recompute_ms(pareto.problem, rerun)
    is_proven = cost_ms < pareto.complete_below_ms
    return SaveSolution(
        termination=Termination.OPTIMAL if is_proven else Termination.FEASIBLE,
        objective_ms=cost_ms,
        bound_ms=cost_ms if is_proven else None,
        saved=saved,
        rerun=rerun,
        recompute_ms=cost_ms,
        saved_bytes=saved_bytes(pareto.problem, saved),
    )
