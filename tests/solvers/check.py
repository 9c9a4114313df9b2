"""Recheck solutions in integers: solvers keep rows only within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import overload

from autosac.solvers.curves import knapsack
from autosac.solvers.curves.save_problem import SaveProblem
from autosac.solvers.sac import SacProblem, SacSolution, Unit, live_bytes
from tests.solvers.save_solutions import SaveSolution, saved_bytes

# Continuous weights hold to 1e-6, and so do rows in MiB, some thousands of them
# chained; whole points are checked exactly.
_WEIGHT_TOLERANCE = 1e-6
_BYTES_TOLERANCE = 4096


@overload
def violations(problem: SaveProblem, solution: SaveSolution) -> tuple[str, ...]: ...
@overload
def violations(problem: SacProblem, solution: SacSolution) -> tuple[str, ...]: ...
def violations(
    problem: SaveProblem | SacProblem, solution: SaveSolution | SacSolution
) -> tuple[str, ...]:
    """Say which constraints a solution breaks, a sentence for each.

    Args:
        problem: What was solved.
        solution: Its solution. Without an incumbent there is nothing to break.

    Returns:
        Nothing if all is well. Whole points are checked in integers; continuous
        weights may exceed the budget by 4 KiB and a millionth of what can be freed.

    Raises:
        TypeError: The solution is not one of this kind of problem.
    """
    if isinstance(problem, SaveProblem) and isinstance(solution, SaveSolution):
        return tuple(_of_saving(problem, solution))
    if isinstance(problem, SacProblem) and isinstance(solution, SacSolution):
        return tuple(_of_units(problem, solution))
    raise TypeError(
        "`problem` and `solution` must be of one kind, got"
        f" {type(problem).__name__} and {type(solution).__name__}."
    )


def _of_saving(problem: SaveProblem, solution: SaveSolution) -> Iterator[str]:
    saved, rerun = solution.saved, solution.rerun
    if saved is None or rerun is None:
        return
    total = saved_bytes(problem, saved)
    for g in range(problem.num_groups):
        if g in problem.needed and not (saved[g] or rerun[g]):
            yield f"Backward needs group {g}, which is neither saved nor rerun."
        if rerun[g] and g in problem.pinned:
            yield f"Group {g} is rerun although it is pinned."
        if saved[g] and g in problem.unsavable:
            yield f"Group {g} is saved although it cannot be."
        for h in problem.inputs[g]:
            if rerun[g] and not (saved[h] or rerun[h]):
                yield f"Group {g} is rerun without its input, group {h}."
    if total != solution.saved_bytes:
        yield f"The saved groups take {total} bytes, not {solution.saved_bytes}."
    yield from _of_time(knapsack.recompute_ms(problem, rerun), solution.recompute_ms)


def _of_units(problem: SacProblem, solution: SacSolution) -> Iterator[str]:
    weights = solution.weights
    if weights is None:
        return
    for unit, shares in zip(problem.units, weights, strict=True):
        yield from _of_shares(unit, shares, is_whole=solution.chosen is not None)
    for path in problem.paths():
        inside = [problem.units[u].fqn for u in reversed(path) if any(weights[u])]
        if len(inside) > 1:
            yield f"AC units are nested: {', '.join(map(repr, inside))}."
    exact = weights
    most = sum(max(abs(p.freed_bytes) for p in unit.points) for unit in problem.units)
    slack = _BYTES_TOLERANCE + int(_WEIGHT_TOLERANCE * most)
    if solution.chosen is not None:
        exact = tuple(tuple(map(int, shares)) for shares in weights)
        slack = 0
        if solution.chosen != tuple(_point(shares) for shares in exact):
            yield "`chosen` does not name the points that have weight."
    live = live_bytes(problem, exact)
    for position, nbytes in enumerate(live):
        if nbytes > problem.budget_bytes + slack:
            yield (
                f"Position {position} has {math.ceil(nbytes)} bytes alive, more than"
                f" `budget_bytes`={problem.budget_bytes}."
            )
    if math.ceil(max(live)) != solution.predicted_peak_bytes:
        yield (
            f"The peak is {math.ceil(max(live))} bytes, not"
            f" {solution.predicted_peak_bytes}."
        )
    times = (
        share * point.recompute_ms
        for unit, shares in zip(problem.units, weights, strict=True)
        for point, share in zip(unit.points, shares, strict=True)
    )
    yield from _of_time(math.fsum(times), solution.recompute_ms)


def _of_shares(
    unit: Unit, shares: tuple[float, ...], *, is_whole: bool
) -> Iterator[str]:
    used = [k for k, share in enumerate(shares) if share != 0.0]
    if not used:
        return
    if is_whole and (len(used) > 1 or shares[used[0]] != 1.0):
        yield f"{unit.fqn!r} does not take one whole point: {shares}."
    if abs(sum(shares) - 1.0) > _WEIGHT_TOLERANCE or min(shares) < 0.0:
        yield f"The weights of {unit.fqn!r} are not shares of 1: {shares}."
    if used[-1] - used[0] > 1:
        yield f"{unit.fqn!r} mixes points that are not neighbours: {used}."


def _of_time(found_ms: float, said_ms: float | None) -> Iterator[str]:
    if said_ms is None or not math.isclose(found_ms, said_ms, rel_tol=1e-12):
        yield f"The recompute time is {found_ms} ms, not {said_ms} ms."


def _point(shares: tuple[float, ...]) -> int | None:
    return shares.index(1) if any(shares) else None
