"""The choice of least peak: a MILP with rows for the highest positions of choices."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from ..milp import pulp_runner
from ..milp.solution import Backend, Termination
from . import fractional, local_search
from .model import GraphModel
from .recomputation import GraphProblem, Replay, peak_bytes, recompute_ms
from .solver import (
    ANY_WORK,
    LP_ROUNDS,
    ROWS_A_ROUND,
    SHARES,
    GraphSolution,
    charge_of,
    hardly_rises,
)

_WORK_ON_FLOOR = 4_000_000
_THOROUGH = 10  # times that, before a budget is refused
_MIB = 2**20
_TOLERANCE = 1e-5  # of solvers, relative to a peak: rows keep theirs in MiB


def lowest(
    problem: GraphProblem,
    *,
    start: Iterable[frozenset[int]] = (),
    time_limit_s: float | None = None,
    backend: Backend = "highs",
    thorough: bool = False,
) -> GraphSolution:
    """The choice of least peak.

    Args:
        problem: The step.
        start: Choices that are known.
        time_limit_s: As `solve`.
        backend: Which MILP solver to run.
        thorough: Do ten times the work, if there is no time limit.

    Returns:
        As `solve`; ``peak_bytes`` is the least that was found, ``termination`` says
        whether it is proven (to the solver's tolerance).
    """
    started = time.perf_counter()
    ends = math.inf if time_limit_s is None else started + time_limit_s
    work = ANY_WORK
    if time_limit_s is None:
        work = _WORK_ON_FLOOR * (_THOROUGH if thorough else 1)
    model = GraphModel(problem, budget_bytes=None)
    best = _least(problem, (problem.kept_plainly, *start))
    _add_highest(model, Replay(problem, best))
    best = _relaxed_lowest(model, best, backend=backend, ends=ends)
    termination = Termination.FEASIBLE
    while work > 0 and (left_s := ends - time.perf_counter()) > 0:
        outcome = pulp_runner.run(
            model.model,
            backend=backend,
            time_limit_s=left_s if math.isfinite(left_s) else None,
            work_limit=int(work / charge_of(model)),
        )
        work -= max(1, int(outcome.work * charge_of(model)))
        if not outcome.termination.has_incumbent:
            break
        kept = model.kept()
        cap_bytes = round((outcome.bound or 0.0) * _MIB)
        best = _least(problem, (best, kept, *_lowered(problem, kept, cap_bytes)))
        if peak_bytes(problem, best) <= cap_bytes * (1 + _TOLERANCE):
            termination = Termination.OPTIMAL
            break
        if _add_highest(model, Replay(problem, kept), above_bytes=cap_bytes):
            continue
        if outcome.termination is not Termination.OPTIMAL:
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


def _relaxed_lowest(
    model: GraphModel, best: frozenset[int], *, backend: Backend, ends: float
) -> frozenset[int]:
    """Add the rows that relaxations of the least peak break, and round the last one."""
    bounds: list[float] = []
    for _ in range(LP_ROUNDS):
        outcome = pulp_runner.run(model.model, backend=backend, relaxed=True)
        if outcome.bound is None or time.perf_counter() > ends:
            return best
        bounds.append(outcome.bound)
        broken = fractional.broken(model, outcome.bound * _MIB)
        new = [p for p in broken if p not in model.rows]
        if not new or hardly_rises(bounds):
            break
        for position in new[:ROWS_A_ROUND]:
            model.add_row(position)
    cap_bytes = round(bounds[-1] * _MIB)
    rounded = [model.kept(share) for share in SHARES]
    lowered = [
        kept
        for one in (best, *rounded)
        for kept in _lowered(model.problem, one, cap_bytes)
    ]
    return _least(model.problem, (best, *lowered))


def _lowered(
    problem: GraphProblem, kept: frozenset[int], cap_bytes: int
) -> list[frozenset[int]]:
    """A choice with its peak lowered; none if it cannot run."""
    lowered = local_search.repair(problem, kept, cap_bytes)
    return [] if lowered is None else [lowered]


def _least(problem: GraphProblem, choices: Iterable[frozenset[int]]) -> frozenset[int]:
    """The choice of least peak among those that can run."""
    peaks: list[tuple[int, frozenset[int]]] = []
    for kept in choices:
        try:
            peaks.append((peak_bytes(problem, kept), kept))
        except ValueError:  # it needs a pinned op again
            continue
    return min(peaks, key=lambda item: item[0])[1]


def _add_highest(model: GraphModel, replay: Replay, above_bytes: int = 0) -> bool:
    """Make the highest positions rows; whether any is new."""
    highest = replay.peak.live_bytes
    limit = max(above_bytes, highest - (highest - above_bytes) // 2)
    positions = (moment.position for moment in replay.above(limit))
    new = [p for p in positions if p not in model.rows]
    for position in new[:ROWS_A_ROUND]:
        model.add_row(position)
    return bool(new)
