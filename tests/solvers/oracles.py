"""Answers by trying everything: slow, short and independent of the solvers."""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import product

from autosac.solvers.curves.save_problem import SaveProblem
from autosac.solvers.graph.recomputation import (
    GraphProblem,
    Position,
    peak_bytes,
    recompute_ms,
)
from autosac.solvers.sac import SacProblem

Flags = tuple[bool, ...]


def save_outcomes(problem: SaveProblem) -> list[tuple[float, int]]:
    """Time and bytes of every admissible pair of saved and rerun groups."""
    groups = range(len(problem.saved_bytes))
    outcomes = []
    for saved in product((False, True), repeat=len(groups)):
        if any(saved[g] for g in problem.unsavable):
            continue
        nbytes = sum(problem.saved_bytes[g] for g in groups if saved[g])
        for rerun in product((False, True), repeat=len(groups)):
            if _is_admissible(problem, saved, rerun):
                time = sum(problem.runtime_ms[g] for g in groups if rerun[g])
                outcomes.append((time, nbytes))
    return outcomes


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
            is_kept = any(
                k == chosen[u] and q < end
                for u, ends in hold.kept_by
                for k, end in enumerate(ends)
            )
            if q < hold.held_from or not is_held:
                continue
            if hold.kept_by:
                nbytes -= hold.nbytes * is_kept
            else:
                nbytes += hold.nbytes * is_freed
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


def replayed_timeline(
    problem: GraphProblem, kept: Set[int]
) -> list[tuple[Position, int]]:
    """Run the step with a pool of live copies, freed when nothing reads them later."""
    events = [(Position(-1, op), op) for op in range(len(problem.reads))]
    there = set(kept) | problem.returned
    for step, values in enumerate(problem.step_reads):
        todo, pending = set(), [v for v in values if v not in there]
        while pending:
            op = problem.maker[pending.pop()]
            if op not in todo:
                todo.add(op)
                pending += [v for v in problem.reads[op] if v not in there]
        events += [(Position(step, op), op) for op in sorted(todo)]
        events.append((Position(step, None), None))
        there |= {v for op in todo for v in problem.makes[op]}

    def reads(event):
        position, op = event
        return problem.step_reads[position.step] if op is None else problem.reads[op]

    def copy_read(value, event):
        stays = value in kept or value in problem.returned
        return (value, event[0].step >= 0 and not stays)

    live, observed = set(), []
    for index, event in enumerate(events):
        position, op = event
        if op is not None:
            live |= {(v, position.step >= 0) for v in problem.makes[op]}
        beside = (
            problem.step_bytes[position.step]
            if op is None
            else problem.workspace_bytes[op]
            + (
                problem.other_bytes
                if position.step < 0
                else problem.carried_bytes[position.step]
            )
        )
        total = beside + sum(problem.value_bytes[v] for v, _ in live)
        observed.append((position, total))
        later = {copy_read(v, e) for e in events[index + 1 :] for v in reads(e)}
        later |= {(v, False) for v in problem.returned}
        live &= later
    return observed


def separate_recompute_ms(
    problem: GraphProblem, kept: Set[int], chosen: Set[int]
) -> float:
    """Time to make each chosen value by itself from what is kept."""
    total = 0.0
    for value in chosen:
        ops, pending = set(), [value]
        while pending:
            v = pending.pop()
            if v in kept or v in problem.returned or problem.maker[v] in ops:
                continue
            ops.add(problem.maker[v])
            pending += problem.reads[problem.maker[v]]
        total += sum(problem.runtime_ms[op] for op in ops)
    return total


def every_kept_set(problem: GraphProblem) -> list[tuple[int, float]]:
    """Peak and recompute time of every set of kept values that can run."""
    values = [v for v in range(len(problem.value_bytes)) if v not in problem.returned]
    kept_sets = []
    for flags in product((False, True), repeat=len(values)):
        kept = {v for v, flag in zip(values, flags, strict=True) if flag}
        try:
            kept_sets.append((peak_bytes(problem, kept), recompute_ms(problem, kept)))
        except ValueError:  # it needs a pinned op again
            continue
    return kept_sets
