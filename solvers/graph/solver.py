"""Which forward values of a graph to keep under a cap on its true peak: a MILP.

The model (`graph/model.py`) starts without memory rows. What it keeps is replayed
(`recomputation.timeline`); positions above the budget become rows, until none is left.
Every model on the way is a relaxation, so that its bound is a bound for all choices
that recompute a value at most once, just before its first use.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..milp import pulp_runner
from ..milp.solution import Backend, Solution, Termination
from .model import GraphModel
from .recomputation import (
    GraphProblem,
    Moment,
    Position,
    peak_bytes,
    recompute_ms,
    timeline,
)

_ROUGH_GAP = 0.1  # while rows are looked for: a heuristic
_ROWS_A_ROUND = 4  # positions that become rows at once: a heuristic
_MIB = 2**20
_TOLERANCE = 1e-5  # of solvers, relative to a peak: rows keep theirs in MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSolution(Solution):
    """Which values are kept, and the peak of that.

    Attributes:
        kept: Values that are kept, None without an incumbent.
        peak_bytes: True peak of that.
        num_rows: Positions of the step that became rows.
    """

    kept: frozenset[int] | None = None
    peak_bytes: int | None = None
    num_rows: int = 0


def solve(
    problem: GraphProblem,
    *,
    budget_bytes: int,
    start: Iterable[frozenset[int]] = (),
    time_limit_s: float = 60.0,
    relative_gap: float = 0.0,
    backend: Backend = "highs",
) -> GraphSolution:
    """Keep values so that the peak is within the budget, in the least time.

    Args:
        problem: The step.
        budget_bytes: Cap on its peak.
        start: Choices that may fit, for when time runs out.
        time_limit_s: Stop after about so long with the best choice of the moment.
        relative_gap: Stop as soon as a choice is proven this close to the best.
        backend: Which MILP solver to run.

    Returns:
        The outcome. A budget that no choice meets is an outcome, not an error.
    """
    search = _Search(problem, budget_bytes, time_limit_s, backend)
    for kept in (problem.kept_plainly, *start):
        search.try_out(kept)
    if search.best is not None and search.best[0] == 0.0:
        return search.solution(Termination.OPTIMAL)
    search.find_rows()
    return search.solution(search.run(relative_gap))


class _Search:
    """Search with rows on demand: positions where a choice breaks the budget.

    Attributes:
        best: Time and kept values of the best choice that fits.
        bound_ms: Proven so far.
    """

    def __init__(
        self,
        problem: GraphProblem,
        budget_bytes: int,
        time_limit_s: float,
        backend: Backend,
    ) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.started = time.perf_counter()
        self.time_limit_s = time_limit_s
        self.backend: Backend = backend
        self.model = GraphModel(problem, budget_bytes=budget_bytes)
        self.best: tuple[float, frozenset[int]] | None = None
        self.bound_ms = 0.0

    @property
    def _left_s(self) -> float:
        return self.time_limit_s - (time.perf_counter() - self.started)

    def try_out(self, kept: frozenset[int]) -> list[Position]:
        """Replay a choice: remember it if it fits, else list positions over the cap."""
        try:
            moments = timeline(self.problem, kept)
        except ValueError:  # it needs a pinned op again
            return []
        broken = worst(moments, self.budget_bytes)
        if not broken:
            cost_ms = recompute_ms(self.problem, kept)
            if self.best is None or cost_ms < self.best[0]:
                self.best = cost_ms, kept
        return broken

    def _add_rows(self, positions: Iterable[Position]) -> bool:
        new = [p for p in positions if p not in self.model.rows]
        for position in new[:_ROWS_A_ROUND]:
            self.model.add_row(position)
        return bool(new)

    def find_rows(self) -> None:
        """Solve relaxations, which is cheap, and replay them rounded."""
        self._add_rows(self.try_out(self.problem.kept_plainly))
        for _ in range(50):
            outcome = pulp_runner.run(
                self.model.model, backend=self.backend, relaxed=True
            )
            if not outcome.termination.has_incumbent or self._left_s < 0:
                return
            self._note_bound(outcome)
            if not self._add_rows(self.try_out(self.model.kept())):
                return

    def _note_bound(self, outcome: pulp_runner.Outcome) -> None:
        if outcome.bound is not None:
            bound_ms = outcome.bound / self.model.time_scale - self.model.tie_break_ms
            self.bound_ms = max(self.bound_ms, bound_ms)

    def run(self, relative_gap: float) -> Termination:
        """Solve the model until its choice fits.

        Roughly at first: most rows are found by choices that are far from the best.
        """
        gap = max(relative_gap, _ROUGH_GAP)
        while True:
            outcome = pulp_runner.run(
                self.model.model,
                backend=self.backend,
                time_limit_s=max(self._left_s, 1.0),
                relative_gap=gap,
            )
            if outcome.termination is Termination.INFEASIBLE:
                return Termination.INFEASIBLE
            self._note_bound(outcome)
            if not outcome.termination.has_incumbent:
                break
            kept = self.model.kept()
            broken = self.try_out(kept)
            if not broken:
                if gap == relative_gap or self._left_s < 0:
                    return outcome.termination
                gap = relative_gap
                continue
            if self._left_s < 0:
                break
            if not self._add_rows(broken):
                self.model.forbid(kept)  # broken by less than solvers can tell
        fits = self.best is not None
        return Termination.FEASIBLE if fits else Termination.NO_INCUMBENT

    def solution(self, termination: Termination) -> GraphSolution:
        solve_s = time.perf_counter() - self.started
        rows = len(self.model.rows)
        if self.best is None or not termination.has_incumbent:
            return GraphSolution(
                termination=termination, solve_s=solve_s, num_rows=rows
            )
        cost_ms, kept = self.best
        return GraphSolution(
            termination=termination,
            objective_ms=cost_ms,
            bound_ms=min(self.bound_ms, cost_ms),
            solve_s=solve_s,
            kept=kept,
            peak_bytes=peak_bytes(self.problem, kept),
            num_rows=rows,
        )


def worst(moments: list[Moment], budget_bytes: int) -> list[Position]:
    """The highest position of every stretch above a budget, highest first."""
    highest: list[Moment] = []
    is_above = False
    for moment in moments:
        if moment.live_bytes <= budget_bytes:
            is_above = False
        elif not is_above:
            highest.append(moment)
            is_above = True
        elif moment.live_bytes > highest[-1].live_bytes:
            highest[-1] = moment
    highest.sort(key=lambda moment: -moment.live_bytes)
    return [moment.position for moment in highest]


def lowest(
    problem: GraphProblem,
    *,
    start: Iterable[frozenset[int]] = (),
    time_limit_s: float = 60.0,
    backend: Backend = "highs",
) -> GraphSolution:
    """The choice of least peak.

    Returns:
        As `solve`; ``peak_bytes`` is the least that was found, ``termination`` says
        whether it is proven (to the solver's tolerance).
    """
    started = time.perf_counter()
    model = GraphModel(problem, budget_bytes=None)
    best = _least(problem, (problem.kept_plainly, *start))
    termination = Termination.FEASIBLE
    for relaxed in (True, False):
        while (left_s := time_limit_s - (time.perf_counter() - started)) > 0:
            moments = timeline(problem, best) if not model.rows else []
            if moments:
                _add_highest(model, moments)
            outcome = pulp_runner.run(
                model.model,
                backend=backend,
                relaxed=relaxed,
                time_limit_s=max(left_s, 1.0),
            )
            if not outcome.termination.has_incumbent:
                break
            kept = model.kept()
            best = _least(problem, (best, kept))
            try:
                moments = timeline(problem, kept)
            except ValueError:
                break
            cap_bytes = round((outcome.bound or 0.0) * _MIB)
            is_new = _add_highest(model, moments, above_bytes=cap_bytes)
            if is_new:
                continue
            if relaxed:
                break
            is_proven = peak_bytes(problem, best) <= cap_bytes * (1 + _TOLERANCE)
            if is_proven or outcome.termination is not Termination.OPTIMAL:
                termination = outcome.termination
                break
            # An op that runs again makes once more what is kept of it: no row has that.
            model.forbid(kept)
    return GraphSolution(
        termination=termination,
        objective_ms=recompute_ms(problem, best),
        solve_s=time.perf_counter() - started,
        kept=best,
        peak_bytes=peak_bytes(problem, best),
        num_rows=len(model.rows),
    )


def _least(problem: GraphProblem, choices: Iterable[frozenset[int]]) -> frozenset[int]:
    """The choice of least peak among those that can run."""
    peaks: list[tuple[int, frozenset[int]]] = []
    for kept in choices:
        try:
            peaks.append((peak_bytes(problem, kept), kept))
        except ValueError:  # it needs a pinned op again
            continue
    return min(peaks, key=lambda item: item[0])[1]


def _add_highest(
    model: GraphModel, moments: list[Moment], above_bytes: int = 0
) -> bool:
    """Make the highest positions rows; whether any is new."""
    highest = max(moment.live_bytes for moment in moments)
    limit = max(above_bytes, highest - (highest - above_bytes) // 2)
    new = [p for p in worst(moments, limit) if p not in model.rows]
    for position in new[:_ROWS_A_ROUND]:
        model.add_row(position)
    return bool(new)
