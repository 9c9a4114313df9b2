"""Answers by trying everything: slow, short and independent of the solvers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from solvers.knapsack import SaveProblem
from solvers.sac import SacProblem

Flags = tuple[bool, ...]


def save_outcomes(problem: SaveProblem) -> list[tuple[float, int]]:
    """Time and bytes of every admissible pair of saved and rerun groups."""
    groups = range(len(problem.saved_bytes))
    found = []
    for saved in product((False, True), repeat=len(groups)):
        if any(saved[g] for g in problem.unsavable):
            continue
        nbytes = sum(problem.saved_bytes[g] for g in groups if saved[g])
        for rerun in product((False, True), repeat=len(groups)):
            if _is_admissible(problem, saved, rerun):
                time = sum(problem.runtime_ms[g] for g in groups if rerun[g])
                found.append((time, nbytes))
    return found


def best_save(problem: SaveProblem) -> tuple[float, int] | None:
    """Least time within the capacity and the fewest bytes that take it."""
    fitting = (o for o in save_outcomes(problem) if o[1] <= problem.capacity_bytes)
    return min(fitting, default=None)


def pareto_saves(problem: SaveProblem) -> set[tuple[float, int]]:
    """Outcomes that no other one beats in time and bytes."""
    outcomes = set(save_outcomes(problem))
    return {
        o
        for o in outcomes
        if not any(p != o and p[0] <= o[0] and p[1] <= o[1] for p in outcomes)
    }


def peak_of(problem: SacProblem, chosen: tuple[int | None, ...]) -> int:
    """Most live memory of a choice of points, position by position."""
    live = []
    for q, nbytes in enumerate(problem.base_bytes):
        for unit, k in zip(problem.units, chosen, strict=True):
            if k is None:
                continue
            if unit.freed_from <= q < unit.freed_until:
                nbytes -= unit.points[k].freed_bytes
            nbytes += sum(
                extras[k] for position, extras in unit.working if position == q
            )
        for hold in problem.holds:
            is_freed = not hold.freed_by or any(
                k == chosen[u] and q >= start
                for u, froms in hold.freed_by
                for k, start in enumerate(froms)
            )
            is_held = any(chosen[u] is not None and q < end for u, end in hold.holders)
            if is_held and is_freed and q >= hold.held_from:
                nbytes += hold.nbytes
        live.append(nbytes)
    return max(live)


def sac_choices(
    problem: SacProblem,
) -> Iterator[tuple[float, int, tuple[int | None, ...]]]:
    """Time, peak and points of every choice without nesting."""
    options = [(None, *range(len(unit.points))) for unit in problem.units]
    for chosen in product(*options):
        if not _is_nested(problem, chosen):
            time = sum(
                unit.points[k].recompute_ms
                for unit, k in zip(problem.units, chosen, strict=True)
                if k is not None
            )
            yield time, peak_of(problem, chosen), chosen


def least_time(problem: SacProblem) -> float | None:
    """Least time within the budget, whole points only."""
    fitting = (t for t, peak, _ in sac_choices(problem) if peak <= problem.budget_bytes)
    return min(fitting, default=None)


def least_peak(problem: SacProblem) -> int:
    """Least budget that whole points can meet."""
    return min(peak for _, peak, _ in sac_choices(problem))


def _is_admissible(problem: SaveProblem, saved: Flags, rerun: Flags) -> bool:
    here = [s or e for s, e in zip(saved, rerun, strict=True)]
    return (
        all(here[g] for g in problem.needed)
        and not any(rerun[g] for g in problem.pinned)
        and all(here[h] for g, e in enumerate(rerun) if e for h in problem.inputs[g])
    )


def _is_nested(problem: SacProblem, chosen: tuple[int | None, ...]) -> bool:
    for u, k in enumerate(chosen):
        around = problem.units[u].parent
        while k is not None and around is not None:
            if chosen[around] is not None:
                return True
            around = problem.units[around].parent
    return False
