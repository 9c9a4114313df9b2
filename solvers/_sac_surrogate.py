"""A bound by dynamic programming: all rows of a relaxation added up to a single one.

Weighted by the duals of the relaxation, its rows add up to one that every choice keeps,
the *surrogate* (Glover 1968, Operations Research 16(4)). The cheapest choice of whole
points that keeps it and nests no units costs no less than the optimum of the
relaxation; more where few units are chosen, each of which adds a lot: there branching
takes long to prove what a knapsack knows at once. Amounts are rounded up to a grid, so
that what is found stays a bound.

The knapsack over trees is solved in depth-first order: a unit is left out, and the next
one is asked, or it takes a point, and the first one behind all that is inside it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from solvers._sac_counts import CountModel, Surrogate
from solvers._sac_holds import Ints
from solvers._sac_table import Floats, Table

_MOST_CELLS = 2**15  # of the grid,
_FEWEST_CELLS = 2**10
_MOST_STEPS = 2**26  # and of all points together: some 0.1 s
_TAIL = 128  # points that stand for mixtures


def least_time(
    table: Table, model: CountModel, *, mixed: frozenset[int], most_ms: float
) -> float:
    """A bound on the time of all choices that take less than a time.

    Args:
        table: The units.
        model: A relaxation that was solved just now, of points mixed at will.
        mixed: Units that stand for finer curves, see `CountModel`.
        most_ms: Choices that take longer may be left out.

    Returns:
        In ms, 0 if it would take long; infinite if there is no such choice.
    """
    row = model.surrogate()
    if row.required <= 0.0:
        return 0.0
    found = [
        (members, points)
        for members in model.classes.members
        if (points := _points(table, members[0], row, members[0] in mixed)) is not None
    ]
    # What a choice takes at least that uses a point: the reduced cost beyond the rest.
    least_ms = row.required - row.nesting_total
    least_ms += sum(len(m) * min(0.0, p.surcharges.min(initial=0.0)) for m, p in found)
    steps = {}
    for members, points in found:
        is_good = points.surcharges <= most_ms - least_ms
        is_good &= points.amounts > 0.0
        for u in members:
            steps[u] = points.amounts[is_good], points.times[is_good]
    num_points = sum(len(times) for _, times in steps.values())
    cells = _MOST_CELLS
    while cells * num_points > _MOST_STEPS:
        cells //= 2
    if cells < _FEWEST_CELLS:
        return 0.0
    steps = {
        u: _on_grid(amounts * (cells / row.required), times, cells)
        for u, (amounts, times) in steps.items()
    }
    return _knapsack(table, steps, cells)


@dataclass(frozen=True, slots=True)
class _Points:
    """Points of a unit: what each adds, takes, and takes more than the relaxation."""

    amounts: Floats
    times: Floats
    surcharges: Floats


def _points(table: Table, u: int, row: Surrogate, is_mixed: bool) -> _Points | None:
    """Points of a unit; None if it may not be chosen."""
    columns = slice(*table.first[u : u + 2])
    amounts, times = row.amounts[columns], table.times[columns]
    if not np.isfinite(amounts).all():
        return None
    nesting = row.nesting[columns][:1]  # the same for all
    if is_mixed:
        complete_ms = table.problem.units[u].mixed_from_ms
        known = table.segments(u, complete_ms, 0.0)
        parts = [] if known is None else [(known.between(amounts), known.times)]
        if times.max() >= complete_ms:
            parts.append(_mixtures(amounts, times, complete_ms))
        amounts, times = (np.concatenate(part) for part in zip(*parts, strict=True))
    return _Points(amounts, times, times - amounts + nesting)


def _mixtures(amounts: Floats, times: Floats, least_ms: float) -> tuple[Floats, Floats]:
    """Points below all mixtures that take a time at least."""
    order = np.lexsort((-amounts, times))
    most = np.maximum.accumulate(amounts[order])
    is_first = np.diff(most, prepend=-math.inf) > 0.0
    x, y = most[is_first], times[order][is_first]
    # The lower hull of times over amounts: each vertex is where the slope grows.
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1 and _is_above(x, y, hull[-2], hull[-1], i):
            hull.pop()
        hull.append(i)
    x, y = x[hull], y[hull]
    start = float(np.interp(least_ms, y, x)) if len(x) > 1 else float(x[0])
    edges = np.linspace(start, float(x[-1]), _TAIL + 1)
    fastest = np.maximum(np.interp(edges[:-1], x, y), least_ms)
    return edges[1:], fastest


def _is_above(x: Floats, y: Floats, i: int, j: int, k: int) -> bool:
    """Whether point j lies on or above the line from i to k."""
    return bool((y[j] - y[i]) * (x[k] - x[i]) >= (y[k] - y[i]) * (x[j] - x[i]))


def _on_grid(amounts: Floats, times: Floats, cells: int) -> tuple[Ints, Floats]:
    """Points in cells of a grid, without those that another one is as good as."""
    at = np.minimum(np.ceil(amounts), cells).astype(np.int64)
    order = np.lexsort((times, -at))
    at, times = at[order], times[order]
    before = np.minimum.accumulate(times)
    is_better = np.diff(before, prepend=math.inf) < 0.0
    return at[is_better], times[is_better]


def _knapsack(table: Table, steps: dict[int, tuple[Ints, Floats]], cells: int) -> float:
    """Least time of points that fill a grid."""
    order = table.depth_first
    behind = _behind(table)
    nothing = np.full(cells + 1, math.inf)
    nothing[0] = 0.0
    # Least time to fill what is left of the grid with units from each place on.
    least = {len(order): nothing}
    for place in range(len(order) - 1, -1, -1):
        own = least[place + 1]
        at, times = steps.get(order[place], ((), ()))
        if len(at):
            own = own.copy()
            others = least[behind[order[place]]]
            for cell, time_ms in zip(at, times, strict=True):
                np.minimum(own[:cell], time_ms, out=own[:cell])
                rest = others[: cells + 1 - cell] + time_ms
                np.minimum(own[cell:], rest, out=own[cell:])
        least[place] = own
    return float(least[0][cells])


def _behind(table: Table) -> list[int]:
    """For each unit, the place in depth-first order behind all that is inside it."""
    place = {u: i for i, u in enumerate(table.depth_first)}
    found = [place[u] + 1 for u in range(len(table.parents))]
    for u in reversed(table.depth_first):
        parent = table.parents[u]
        if parent >= 0:
            found[parent] = max(found[parent], found[u])
    return found
