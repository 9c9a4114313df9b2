"""Which modules to put under AC and how much each recomputes: the main MILP.

The numbers are in `problem.py`. Whole points are searched in `search.py`, for the least
peak in `least_peak.py`; points of fitted curves lie between breakpoints, and
`mixed_points.py` has their rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from ..milp import pulp_runner
from ..milp.solution import Backend, Solution, Termination
from .enumeration import Enumeration
from .greedy import trimmed
from .holds import Ints
from .least_peak import LeastPeak
from .mixed_points import (
    SacModel,
    convex_units,
    least_live_bytes,
)
from .problem import (
    SacProblem,
    Unit,
    live_bytes,
    total_ms,
)
from .rows import NOISE
from .search import Finer, Search
from .start import Start
from .table import Choice, Floats, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class SacSolution(Solution):
    """AC units and their ratios; all None without an incumbent.

    Attributes:
        weights: Of each point of each unit: 0 or 1 for whole points, else at most two
            neighbours that add up to 1; all 0 for a unit that is not under AC.
        ratios: Share of each unit's activation memory that is recomputed.
        chosen: Index of each unit's point, None for a unit that is not under AC.
            None altogether if weights are continuous.
        recompute_ms: Time of all reruns.
        predicted_peak_bytes: Most live memory at any position.
        work: Of the MILPs, see `pulp_runner.run`: the same in every run.
        rows: Positions that were rows in the end, for `Solver.solve`.
    """

    weights: tuple[tuple[float, ...], ...] | None = None
    ratios: tuple[float, ...] | None = None
    chosen: tuple[int | None, ...] | None = None
    recompute_ms: float | None = None
    predicted_peak_bytes: int | None = None
    work: int = 0
    rows: tuple[int, ...] = ()


class Solver:
    """Solves problems that differ in nothing but their budgets.

    What does not depend on the budget is worked out once. Nothing else is carried from
    one budget to the next, so that answers do not depend on what was asked before;
    within a sweep, a `Start` carries more.

    Args:
        problem: Units and memory; its budget is ignored.
    """

    def __init__(self, problem: SacProblem) -> None:
        self.problem = problem
        self._table = Table(problem)

    def solve(
        self,
        budget_bytes: int,
        *,
        backend: Backend = "highs",
        time_limit_s: float | None = None,
        most_work: int | None = None,
        relative_gap: float = 1e-3,
        mixed_units: Collection[int] = (),
        near: Choice | None = None,
        rows: Collection[int] = (),
        finer: Finer | None = None,
        polishes: bool = True,
        start: Start | None = None,
        raised_bytes: Ints | None = None,
        least_ms: float = 0.0,
        likely_ms: float = 0.0,
        most_ms: float = math.inf,
    ) -> SacSolution:
        """Choose whole points with the least recompute time: see `solve`.

        Budgets of a sweep, the smallest first, share a `start`: new for each sweep.
        `raised_bytes` are added to the live memory at each position; the peak of the
        solution is without them. `most_work` is for all MILPs, see `pulp_runner.run`.
        A choice `near` one that keeps the budget is repaired, as a first incumbent;
        `rows` are those of a solution with nearly the same budget. `finer` is told
        units and shares of their points near the bound; choices that it makes of them
        count as `most_ms` does. A search that `polishes` goes on for a little while
        when the gap is reached.
        No choice takes less than `least_ms`, as is known already, or hardly any than
        `likely_ms`, which is tried first; only one that takes less than `most_ms` is of
        interest, and without one there is no incumbent.
        """
        started = perf_counter()
        nothing: Choice = [None] * len(self.problem.units)
        table = self._table
        if raised_bytes is not None:
            table, start = table.raised(raised_bytes), None
        if table.base.max() <= budget_bytes:
            return _finished(self._record(nothing), 0.0, relative_gap, started)
        search = Search(
            table,
            units=range(len(self.problem.units)),
            backend=backend,
            time_limit_s=time_limit_s,
            most_work=most_work,
            relative_gap=relative_gap,
            least_ms=least_ms,
            likely_ms=likely_ms,
            most_ms=most_ms,
            mixed=mixed_units,
            near=None if near is None else list(near),
            rows=rows,
            finer=finer,
            polishes=polishes,
            start=start,
        )
        termination = search.run(budget_bytes)
        if search.choice is None:
            is_infeasible = termination is Termination.INFEASIBLE
            bound_ms = None if is_infeasible and most_ms == math.inf else search.bound
            solution = SacSolution(termination=termination, bound_ms=bound_ms)
            solution = replace(solution, solve_s=perf_counter() - started)
        else:
            solution = self._record(search.choice)
            solution = _finished(solution, search.bound, relative_gap, started)
        return replace(solution, work=search.work, rows=tuple(search.rows))

    def lowest_peak(
        self,
        *,
        backend: Backend = "highs",
        time_limit_s: float | None = None,
        relative_gap: float = 0.0,
        raised_bytes: Ints | None = None,
        known: Sequence[Choice] = (),
    ) -> tuple[int, SacSolution]:
        """Find the least budget that whole points can meet: see `lowest_peak`.

        `raised_bytes` are as in `solve`; `known` are choices that may be the lowest.
        """
        started = perf_counter()
        table = self._table
        search = LeastPeak(
            table if raised_bytes is None else table.raised(raised_bytes),
            units=range(len(self.problem.units)),
            backend=backend,
            time_limit_s=time_limit_s,
            relative_gap=relative_gap,
        )
        termination = search.run(known)
        assert search.choice is not None
        solution = replace(
            self._record(search.choice),
            termination=termination,
            solve_s=perf_counter() - started,
        )
        return _peak(solution), solution

    def trimmed(self, choice: Choice) -> tuple[int | None, ...]:
        """A choice made faster, unit by unit, where its peak allows it."""
        peak_bytes = int(self.live(choice).max())
        units = range(len(self.problem.units))
        return tuple(trimmed(self._table, peak_bytes, units, choice))

    def enumeration(
        self,
        budget_bytes: int,
        *,
        most_ms: float,
        mixed_units: Collection[int] = (),
        raised_bytes: Ints | None = None,
    ) -> Enumeration:
        """All choices that keep a budget, one by one; arguments are as in `solve`."""
        table = self._table
        if raised_bytes is not None:
            table = table.raised(raised_bytes)
        return Enumeration(table, budget_bytes, mixed=mixed_units, most_ms=most_ms)

    def price(
        self,
        budget_bytes: int,
        *,
        backend: Backend = "highs",
        raised_bytes: Ints | None = None,
        num_positions: float = math.inf,
    ) -> float | None:
        """What one more byte of budget saves at the margin.

        `raised_bytes` are as in `solve`; only the first positions count.

        The dual of the budget in the LP relaxation, in which points of a unit may be
        mixed and units chosen in part; whole plans save in steps around it.

        Returns:
            Milliseconds per byte; None if the relaxation has no solution.
        """
        table = self._table
        if raised_bytes is not None:
            table = table.raised(raised_bytes)
        if table.base.max() <= budget_bytes:
            return 0.0
        search = Search(
            table,
            units=range(len(self.problem.units)),
            backend=backend,
            time_limit_s=None,
            relative_gap=0.0,
        )
        ended = search.relax(budget_bytes)
        if ended is not Termination.OPTIMAL:
            return None
        return sum(ms for q, ms in search.prices.items() if q < num_positions)

    def live(self, choice: Choice) -> Ints:
        """Live memory at each position under a choice."""
        live: Ints = self._table.live(self._table.weights(choice))
        return live

    def live_mixed(self, shares: Mapping[int, Floats]) -> Floats:
        """Live memory at each position where units run mixtures of their points.

        Args:
            shares: Of each point, by unit.
        """
        weights = np.zeros(len(self._table.times))
        for u, mixture in shares.items():
            weights[self._table.first[u] : self._table.first[u + 1]] = mixture
        live: Floats = self._table.live(weights)
        return live

    def _record(self, choice: Choice) -> SacSolution:
        """Record of whole points; its termination is yet to be found out."""
        units = self.problem.units
        weights = tuple(
            tuple(float(k == point) for k in range(len(unit.points)))
            for unit, point in zip(units, choice, strict=True)
        )
        pairs = [
            None if point is None else unit.points[point]
            for unit, point in zip(units, choice, strict=True)
        ]
        cost_ms = math.fsum(pair.recompute_ms for pair in pairs if pair is not None)
        live = self.live(choice)
        return SacSolution(
            termination=Termination.FEASIBLE,
            objective_ms=cost_ms,
            weights=weights,
            ratios=tuple(0.0 if pair is None else pair.ratio for pair in pairs),
            chosen=tuple(choice),
            recompute_ms=cost_ms,
            predicted_peak_bytes=int(live.max()),
        )


def solve(
    problem: SacProblem,
    *,
    integral: bool,
    backend: Backend = "highs",
    time_limit_s: float | None = None,
    most_work: int | None = None,
    relative_gap: float = 1e-3,
    mixed_units: Collection[int] = (),
) -> SacSolution:
    """Choose AC units and ratios with the least recompute time under the budget.

    Args:
        problem: Units, memory and budget.
        integral: Whether a unit takes one of its points as it is; otherwise it may
            lie between two neighbours.
        backend: Which MILP solver to run.
        time_limit_s: Stop branching after this long with the best solution so far.
        most_work: Stop after so much work, see `pulp_runner.run`, at the same place in
            every run. None for no limit; for whole points, for one of their own.
        relative_gap: Stop when proven this close to the least time.
        mixed_units: With whole points: units whose points are a selection from a
            finer curve, the vertices of its lower convex hull among them. The bound
            then holds for all mixtures of their points, so for that curve.

    Returns:
        The outcome. A budget that nothing fits is an outcome, not an error. Whole
        points keep the budget exactly, continuous weights within a tolerance.
    """
    if integral:
        return Solver(problem).solve(
            problem.budget_bytes,
            backend=backend,
            time_limit_s=time_limit_s,
            most_work=most_work,
            relative_gap=relative_gap,
            mixed_units=mixed_units,
        )
    started = perf_counter()
    units = range(len(problem.units))
    if max(least_live_bytes(problem, units)) > problem.budget_bytes:
        return SacSolution(
            termination=Termination.INFEASIBLE, solve_s=perf_counter() - started
        )
    if max(problem.base_bytes) <= problem.budget_bytes:
        nothing = [[0.0] * len(unit.points) for unit in problem.units]
        return _finished(_between(problem, nothing), 0.0, relative_gap, started)
    model = SacModel(problem, units=units)
    outcome = pulp_runner.run(
        model.model,
        backend=backend,
        time_limit_s=time_limit_s,
        work_limit=most_work,
        relative_gap=relative_gap,
    )
    bound_ms = max(0.0, (outcome.bound or 0.0) / model.time_scale)
    solution = SacSolution(termination=outcome.termination)
    if outcome.termination.has_incumbent:
        solution = _between(problem, _cleaned(problem, model.weights()))
    return _finished(solution, bound_ms, relative_gap, started)


def lowest_peak(
    problem: SacProblem,
    *,
    backend: Backend = "highs",
    time_limit_s: float | None = None,
    relative_gap: float = 0.0,
) -> tuple[int, SacSolution]:
    """Find the least budget that whole points can meet.

    Args:
        problem: Units and memory; its budget is ignored.
        backend: Which MILP solver to run.
        time_limit_s: Stop branching after this long with the lowest peak so far; None
            as in `solve`.
        relative_gap: Stop when proven this close to the lowest peak.

    Returns:
        The peak and a solution that has it; it is optimal to 4 KiB, the tolerance of
        a solver's rows, unless its termination says otherwise. Its time is not
        minimised, and it has no bound on it. At a time limit the peak is the lowest
        one known: the relaxation's, rounded, or that of no AC where this gets stuck.
    """
    return Solver(problem).lowest_peak(
        backend=backend,
        time_limit_s=time_limit_s,
        relative_gap=relative_gap,
    )


def _peak(solution: SacSolution) -> int:
    assert solution.predicted_peak_bytes is not None
    return solution.predicted_peak_bytes


def _is_within(solution: SacSolution, bound_ms: float, relative_gap: float) -> bool:
    assert solution.recompute_ms is not None
    return (
        solution.recompute_ms - bound_ms
        <= (relative_gap + NOISE) * solution.recompute_ms
    )


def _finished(
    solution: SacSolution, bound_ms: float, relative_gap: float, started: float
) -> SacSolution:
    solve_s = perf_counter() - started
    if solution.recompute_ms is None:
        if solution.termination is Termination.INFEASIBLE:
            return replace(solution, solve_s=solve_s)
        return replace(solution, bound_ms=bound_ms, solve_s=solve_s)
    # The objective is summed anew: rounding may put it below the bound.
    solution = replace(
        solution, bound_ms=min(bound_ms, solution.recompute_ms), solve_s=solve_s
    )
    is_proven = _is_within(solution, bound_ms, relative_gap)
    termination = Termination.OPTIMAL if is_proven else Termination.FEASIBLE
    return replace(solution, termination=termination)


def _between(problem: SacProblem, weights: Sequence[Sequence[float]]) -> SacSolution:
    """Record of continuous weights; its termination is yet to be found out."""
    cost_ms = total_ms(problem, weights)
    ratios = tuple(
        math.fsum(w * point.ratio for w, point in zip(shares, unit.points, strict=True))
        for unit, shares in zip(problem.units, weights, strict=True)
    )
    return SacSolution(
        termination=Termination.FEASIBLE,
        objective_ms=cost_ms,
        weights=tuple(tuple(map(float, shares)) for shares in weights),
        ratios=ratios,
        recompute_ms=cost_ms,
        predicted_peak_bytes=math.ceil(max(live_bytes(problem, weights))),
    )


def _cleaned(
    problem: SacProblem, weights: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Make the weights of a unit add up to 1 on neighbours."""
    convex = convex_units(problem)
    return [
        _on_neighbours(problem.units[u], shares, is_convex=u in convex)
        if sum(shares) >= 0.5
        else [0.0] * len(shares)
        for u, shares in enumerate(weights)
    ]


def _on_neighbours(
    unit: Unit, shares: Sequence[float], *, is_convex: bool
) -> list[float]:
    """Same freed bytes from two neighbours; no worse where the curve is convex."""
    total = sum(shares)
    if not is_convex:  # what lies outside the best pair is rounding
        pairs = range(max(1, len(shares) - 1))
        best = max(pairs, key=lambda k: sum(shares[k : k + 2]))
        kept = sum(shares[best : best + 2])
        return [
            w / kept if best <= k <= best + 1 else 0.0 for k, w in enumerate(shares)
        ]
    used = [k for k, share in enumerate(shares) if share > 0.0]
    if used[-1] - used[0] <= 1:
        return [share / total for share in shares]
    freed = [point.freed_bytes for point in unit.points]
    wanted = sum(f * share for f, share in zip(freed, shares, strict=True)) / total
    wanted = min(max(wanted, freed[0]), freed[-1])
    left = min(bisect_right(freed, wanted) - 1, len(freed) - 2)
    share = (wanted - freed[left]) / (freed[left + 1] - freed[left])
    result = [0.0] * len(freed)
    result[left], result[left + 1] = 1.0 - share, share
    return result
