"""Which modules to put under AC and how much each recomputes: the main MILP.

The numbers are in `sac_problem.py`, the rows in `_sac_model.py`; here it is solved.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from solvers import _pulp
from solvers._pulp import Backend
from solvers._sac_greedy import round_and_repair
from solvers._sac_model import SacModel, bends_upwards, least_live_bytes
from solvers.sac_problem import (
    Breakpoint,
    Hold,
    SacProblem,
    Unit,
    live_bytes,
    total_ms,
)
from solvers.solution import Solution, Termination

__all__ = [
    "Breakpoint",
    "Hold",
    "SacProblem",
    "SacSolution",
    "Unit",
    "live_bytes",
    "lowest_peak",
    "solve",
]

_ATTEMPTS = 6  # at a solution that also keeps the budget in integers
_MARGIN_BYTES = 4096  # of a lowered budget: weights off by 1e-6 move kilobytes
_NOISE = 1e-9  # of an objective: rounding, far below any gap that is asked for


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
    """

    weights: tuple[tuple[float, ...], ...] | None = None
    ratios: tuple[float, ...] | None = None
    chosen: tuple[int | None, ...] | None = None
    recompute_ms: float | None = None
    predicted_peak_bytes: int | None = None


def solve(
    problem: SacProblem,
    *,
    integral: bool,
    backend: Backend = "highs",
    time_limit_s: float | None = None,
    relative_gap: float = 1e-3,
    fixed_units: Collection[int] | None = None,
) -> SacSolution:
    """Choose AC units and ratios with the least recompute time under the budget.

    Args:
        problem: Units, memory and budget.
        integral: Whether a unit takes one of its points as it is; otherwise it may
            lie between two neighbours.
        backend: Which MILP solver to run.
        time_limit_s: Stop after this long with the best solution so far.
        relative_gap: Stop when proven this close to the least time.
        fixed_units: The only units that may be chosen; None for all.

    Returns:
        The outcome. A budget that nothing fits is an outcome, not an error. Whole
        points keep the budget exactly, continuous weights within the tolerance of
        `solvers.check`.
    """
    started = perf_counter()
    units = _candidates(problem, fixed_units)
    if max(least_live_bytes(problem, units)) > problem.budget_bytes:
        return SacSolution(
            termination=Termination.INFEASIBLE, solve_s=perf_counter() - started
        )
    if max(problem.base_bytes) <= problem.budget_bytes:
        nothing = [[0] * len(unit.points) for unit in problem.units]
        found = _whole(problem, nothing) if integral else _between(problem, nothing)
        return _finished(found, 0.0, relative_gap, started)
    model = SacModel(problem, integral=integral, units=units)
    search = _Search(model, backend, time_limit_s, relative_gap)
    relaxed = search.relax()
    if relaxed.termination is not Termination.OPTIMAL:
        return SacSolution(
            termination=relaxed.termination, solve_s=perf_counter() - started
        )
    assert relaxed.bound is not None
    bound_ms = max(0.0, relaxed.bound / model.time_scale)
    first = _from_relaxation(problem, model)
    if first is not None and _is_within(first, bound_ms, relative_gap):
        return _finished(first, bound_ms, relative_gap, started)
    found, bound_ms = _branch(problem, model, search, first, bound_ms, relative_gap)
    return _finished(found, bound_ms, relative_gap, started)


def lowest_peak(
    problem: SacProblem,
    *,
    backend: Backend = "highs",
    time_limit_s: float | None = None,
    relative_gap: float = 0.0,
    fixed_units: Collection[int] | None = None,
) -> tuple[int, SacSolution]:
    """Find the least budget that whole points can meet.

    Args:
        problem: Units and memory; its budget is ignored.
        backend: Which MILP solver to run.
        time_limit_s: Stop after this long with the lowest peak so far.
        relative_gap: Stop when proven this close to the lowest peak.
        fixed_units: The only units that may be chosen; None for all.

    Returns:
        The peak and a solution that has it. Its time is not minimised, and it has no
        bound on it. At a time limit the peak is the lowest one known, at worst that
        of no AC at all.
    """
    started = perf_counter()
    units = _candidates(problem, fixed_units)
    model = SacModel(problem, integral=True, units=units, least_peak=True)
    outcome = _Search(model, backend, time_limit_s, relative_gap).branch()
    found = _whole(problem, [[0] * len(unit.points) for unit in problem.units])
    if outcome.termination.has_incumbent:
        weights = _cleaned(problem, model.weights(), integral=True)
        found = min(_whole(problem, weights), found, key=_peak)
        found = replace(found, termination=outcome.termination)
    found = replace(found, solve_s=perf_counter() - started)
    return _peak(found), found


class _Search:
    """Runs of one model that share a time limit."""

    def __init__(
        self,
        model: SacModel,
        backend: Backend,
        time_limit_s: float | None,
        relative_gap: float,
    ) -> None:
        self._model = model
        self._backend = backend
        self._relative_gap = relative_gap
        self._ends = None if time_limit_s is None else perf_counter() + time_limit_s

    def relax(self) -> _pulp.Outcome:
        """Solve the LP relaxation."""
        return self._run(relaxed=True, warm_start=False)

    def branch(self, *, warm_start: bool = False) -> _pulp.Outcome:
        """Solve the MILP."""
        return self._run(relaxed=False, warm_start=warm_start)

    def _run(self, *, relaxed: bool, warm_start: bool) -> _pulp.Outcome:
        left = None if self._ends is None else max(0.0, self._ends - perf_counter())
        return _pulp.run(
            self._model.model,
            backend=self._backend,
            time_limit_s=left,
            relative_gap=self._relative_gap,
            relaxed=relaxed,
            warm_start=warm_start,
        )


def _from_relaxation(problem: SacProblem, model: SacModel) -> SacSolution | None:
    """The relaxation itself if it is integral, else what rounding makes of it."""
    weights = model.weights()
    if model.is_integral():
        cleaned = _cleaned(problem, weights, integral=model.integral)
        if not model.integral:
            return _between(problem, cleaned)
        found = _whole(problem, cleaned)
        if _peak(found) <= problem.budget_bytes:
            return found
    rounded = round_and_repair(problem, model.units, weights)
    if rounded is None:
        return None
    return (_whole if model.integral else _between)(problem, rounded)


def _branch(
    problem: SacProblem,
    model: SacModel,
    search: _Search,
    incumbent: SacSolution | None,
    bound_ms: float,
    relative_gap: float,
) -> tuple[SacSolution, float]:
    """Solve the MILP; again with a lower budget while the budget is not kept."""
    target = problem.budget_bytes
    for attempt in range(_ATTEMPTS):
        if incumbent is not None and incumbent.weights is not None:
            model.hint(incumbent.weights)
        outcome = search.branch(warm_start=incumbent is not None)
        if attempt == 0 and outcome.bound is not None:
            bound_ms = max(bound_ms, outcome.bound / model.time_scale)
        if not outcome.termination.has_incumbent:
            ended = SacSolution(termination=outcome.termination)
            return incumbent or ended, bound_ms
        weights = _cleaned(problem, model.weights(), integral=model.integral)
        if not model.integral:
            return _faster(_between(problem, weights), incumbent), bound_ms
        found = _whole(problem, weights)
        excess = _peak(found) - problem.budget_bytes
        if excess <= 0:
            return _faster(found, incumbent), bound_ms
        # The rows were kept within their tolerance, not exactly.
        repaired = round_and_repair(problem, model.units, weights)
        if repaired is not None:
            incumbent = _faster(_whole(problem, repaired), incumbent)
            if _is_within(incumbent, bound_ms, relative_gap):
                break
        target -= max(excess, _MARGIN_BYTES) * 4**attempt
        model.set_budget(target)
    return incumbent or SacSolution(termination=Termination.NO_INCUMBENT), bound_ms


def _candidates(problem: SacProblem, fixed_units: Collection[int] | None) -> list[int]:
    if fixed_units is None:
        return list(range(len(problem.units)))
    for u in fixed_units:
        if not 0 <= u < len(problem.units):
            raise ValueError(
                f"`fixed_units` must be indices below {len(problem.units)}, got {u}."
            )
    return sorted(set(fixed_units))


def _peak(solution: SacSolution) -> int:
    assert solution.predicted_peak_bytes is not None
    return solution.predicted_peak_bytes


def _faster(found: SacSolution, incumbent: SacSolution | None) -> SacSolution:
    if incumbent is None:
        return found
    assert found.recompute_ms is not None and incumbent.recompute_ms is not None
    return incumbent if incumbent.recompute_ms < found.recompute_ms else found


def _is_within(found: SacSolution, bound_ms: float, relative_gap: float) -> bool:
    assert found.recompute_ms is not None
    return found.recompute_ms - bound_ms <= (relative_gap + _NOISE) * found.recompute_ms


def _finished(
    found: SacSolution, bound_ms: float, relative_gap: float, started: float
) -> SacSolution:
    solve_s = perf_counter() - started
    if found.recompute_ms is None:
        if found.termination is Termination.INFEASIBLE:
            return replace(found, solve_s=solve_s)
        return replace(found, bound_ms=bound_ms, solve_s=solve_s)
    # The objective is summed anew: rounding may put it below the bound.
    found = replace(found, bound_ms=min(bound_ms, found.recompute_ms), solve_s=solve_s)
    is_proven = _is_within(found, bound_ms, relative_gap)
    termination = Termination.OPTIMAL if is_proven else Termination.FEASIBLE
    return replace(found, termination=termination)


def _whole(problem: SacProblem, weights: Sequence[Sequence[float]]) -> SacSolution:
    """Record of whole points; its termination is yet to be found out."""
    chosen = tuple(shares.index(1) if any(shares) else None for shares in weights)
    return replace(_between(problem, weights), chosen=chosen)


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
    problem: SacProblem, weights: Sequence[Sequence[float]], *, integral: bool
) -> list[list[float]]:
    """Round whole points; make the weights of a unit add up to 1 on neighbours."""
    cleaned: list[list[float]] = []
    for unit, shares in zip(problem.units, weights, strict=True):
        if sum(shares) < 0.5:
            cleaned.append([0] * len(shares))
        elif integral:
            best = max(range(len(shares)), key=shares.__getitem__)
            cleaned.append([int(k == best) for k in range(len(shares))])
        else:
            cleaned.append(_on_neighbours(unit, shares))
    return cleaned


def _on_neighbours(unit: Unit, shares: Sequence[float]) -> list[float]:
    """Same freed bytes from two neighbours; no worse where the curve is convex."""
    total = sum(shares)
    if not bends_upwards(unit):  # what lies outside the best pair is rounding
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
