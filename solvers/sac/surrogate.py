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

from .counts import CountModel
from .holds import Ints
from .table import Floats, Table

_MOST_CELLS = 2**15  # of the grid,
_FEWEST_CELLS = 2**10
_MOST_STEPS = 2**25  # of all points together: some 0.1 s
_MOST_STORED = 2**22  # cells of all units together: 32 MiB
_TAIL = 128  # points that stand for mixtures
_NOISE = 1e-9  # of a time: rounding


@dataclass(frozen=True, slots=True)
class Least:
    """What choices of whole points take at least.

    Attributes:
        all_ms: All of them; infinite if there is none.
        using_ms: Those that use a point of a unit, in the order of `Segments`, with
            all mixtures of missing points behind them; infinite if it is too long to
            be of interest. Nothing of a unit about which nothing is known.
    """

    all_ms: float
    using_ms: dict[int, Floats]


def least_times(
    table: Table, model: CountModel, *, mixed: frozenset[int], most_ms: float
) -> Least:
    """Bounds on the time of all choices that take at most a time.

    Args:
        table: The units.
        model: A relaxation that was solved just now, of points mixed at will.
        mixed: Units that stand for finer curves, see `CountModel`.
        most_ms: Choices that take longer are of no interest.

    Returns:
        No bounds but 0 if finding them would take long.
    """
    row = surrogate(table, model)
    if row.required <= 0.0:
        return Least(0.0, {})
    by_class = [
        (members, points)
        for members in model.classes.members
        if (points := _points(table, members[0], row, members[0] in mixed)) is not None
    ]
    # What a choice takes at least that uses a point: the reduced cost beyond the rest.
    least_ms = row.required - row.nesting_total
    least_ms += sum(
        len(m) * min(0.0, p.surcharges.min(initial=0.0)) for m, p in by_class
    )
    items = {
        u: points.up_to(most_ms * (1.0 + _NOISE) - least_ms)
        for members, points in by_class
        for u in members
    }
    num_points = sum(len(own.at) for own in items.values())
    num_units = sum(len(own.at) > 0 for own in items.values())
    cells = _MOST_CELLS
    while cells * num_points > _MOST_STEPS or cells * num_units > _MOST_STORED:
        cells //= 2
    if cells < _FEWEST_CELLS:
        return Least(0.0, {})
    return _knapsack(table, items, cells / row.required, cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Rows added up to one that every choice keeps, whatever their weights are.

    In ms: at the optimum of the relaxation what is used adds as much as it takes.

    Attributes:
        amounts: What each column adds, with that its unit is chosen; -inf where it may
            not be.
        required: How much has to be added at least.
        nesting: What rows (2) ask for each column beyond that,
        nesting_total: and what they allow at most.
    """

    amounts: Floats
    required: float
    nesting: Floats
    nesting_total: float


def surrogate(table: Table, model: CountModel) -> Surrogate:
    """All rows but (2), weighted by the duals of the relaxation solved last."""
    matrix, variables = model.model.matrix(), model.model.variables()
    duals = np.array([row.pi or 0.0 for row in matrix.rows])
    lowest, highest = matrix.bounds()
    limits = np.where(duals > 0.0, lowest, highest)
    duals[~np.isfinite(limits)] = 0.0
    row_of = np.repeat(np.arange(len(matrix.rows)), np.diff(matrix.starts))
    added = matrix.coefficients * duals[row_of]
    is_nesting = np.zeros(len(matrix.rows), dtype=bool)
    is_nesting[model.nesting_rows] = True
    of_rows, of_nesting = (
        np.bincount(matrix.columns[own], added[own], len(variables))
        for own in (~is_nesting[row_of], is_nesting[row_of])
    )
    total = duals * np.where(duals != 0.0, limits, 0.0)
    required = float(total[~is_nesting].sum())
    number = {id(v): i for i, v in enumerate(variables)}
    amounts = np.full(len(table.times), -math.inf)
    nesting = np.zeros(len(table.times))
    others = np.ones(len(variables), dtype=bool)
    for c, y in model.unit_counts.items():
        unit = number[id(y)]
        others[unit] = False
        first = table.first[model.classes.members[c][0]]
        size = table.first[model.classes.members[c][0] + 1] - first
        for k in range(size):
            z = number[id(model.point_counts[first + k])]
            others[z] = False
            amounts[first + k] = of_rows[z] + of_rows[unit]
        for u in model.classes.members[c][1:]:
            start = table.first[u]
            amounts[start : start + size] = amounts[first : first + size]
        for u in model.classes.members[c]:
            start = table.first[u]
            nesting[start : start + size] = -of_nesting[unit]
    # The others, such as holds, are as helpful as they can be.
    for i in np.flatnonzero(others & (of_rows != 0.0)).tolist():
        most = variables[i].upBound if of_rows[i] > 0.0 else variables[i].lowBound
        required -= math.inf if most is None else float(of_rows[i]) * most
    return Surrogate(
        amounts=amounts / model.scale,
        nesting=nesting / model.scale,
        required=required / model.scale,
        nesting_total=-float(total[is_nesting].sum()) / model.scale,
    )


@dataclass(frozen=True, slots=True)
class _Items:
    """Points of a unit that are of interest.

    Attributes:
        at: Which they are,
        amounts: what each adds, and
        times: takes.
        size: How many points there are.
    """

    at: Ints
    amounts: Floats
    times: Floats
    size: int


@dataclass(frozen=True, slots=True)
class _Points:
    """Points of a unit: what each adds, takes, and takes more than the relaxation."""

    amounts: Floats
    times: Floats
    surcharges: Floats

    def up_to(self, room_ms: float) -> _Items:
        """Points that take at most some time more than the relaxation."""
        kept = np.flatnonzero(self.surcharges <= room_ms)
        return _Items(kept, self.amounts[kept], self.times[kept], len(self.times))


def _points(table: Table, u: int, row: Surrogate, is_mixed: bool) -> _Points | None:
    """Points of a unit; None if it may not be chosen."""
    columns = slice(*table.first[u : u + 2])
    amounts, times = row.amounts[columns], table.times[columns]
    if not np.isfinite(amounts).all():
        return None
    nesting = row.nesting[columns][:1]  # the same for all
    if is_mixed:
        complete_ms = table.problem.units[u].mixed_from_ms
        segments = table.segments(u, complete_ms)
        parts = (
            [] if segments is None else [(segments.between(amounts), segments.times)]
        )
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


def _knapsack(
    table: Table, items: dict[int, _Items], per_amount: float, cells: int
) -> Least:
    """Least times of points that fill a grid."""
    order = [u for u in table.depth_first if u in items and len(items[u].at)]
    behind = behind_of(table, order)
    in_cells = [_in_cells(items[u].amounts * per_amount, cells) for u in order]
    fronts = [
        _front(own, items[u].times) for u, own in zip(order, in_cells, strict=True)
    ]
    # Least time to fill at least so much with units from each place on, and up to it.
    after = np.full((len(order) + 1, cells + 1), math.inf)
    after[:, 0] = 0.0
    for place in reversed(range(len(order))):
        own, others = after[place], after[behind[place]]
        own[:] = after[place + 1]
        for cell, time_ms in fronts[place]:
            np.minimum(own[:cell], time_ms, out=own[:cell])
            rest = others[: cells + 1 - cell] + time_ms
            np.minimum(own[cell:], rest, out=own[cell:])
    before = np.full((len(order) + 1, cells + 1), math.inf)
    before[0, 0] = 0.0
    using_ms = {}
    for place, u in enumerate(order):
        own = before[place]
        np.minimum(before[place + 1], own, out=before[place + 1])
        others = before[behind[place]]
        for cell, time_ms in fronts[place]:
            np.minimum(others[:cell], own[0] + time_ms, out=others[:cell])
            np.minimum(
                others[cell:], own[: cells + 1 - cell] + time_ms, out=others[cell:]
            )
        left = after[behind[place]][::-1]
        least = {
            cell: float((own[: cells + 1 - cell] + left[cell:]).min())
            for cell in set(in_cells[place])
        }
        using_ms[u] = np.full(items[u].size, math.inf)
        using_ms[u][items[u].at] = items[u].times + [least[c] for c in in_cells[place]]
    for u, own_items in items.items():
        if not len(own_items.at):
            using_ms[u] = np.full(own_items.size, math.inf)
    return Least(float(after[0, cells]), using_ms)


def _in_cells(amounts: Floats, cells: int) -> list[int]:
    """Cells that points fill, rounded up."""
    filled: list[int] = np.clip(np.ceil(amounts), 0, cells).astype(np.int64).tolist()
    return filled


def _front(in_cells: list[int], times: Floats) -> list[tuple[int, float]]:
    """Cells and times of points, without those that another one is as good as."""
    front: list[tuple[int, float]] = []
    for cell, time_ms in sorted(zip(in_cells, times.tolist(), strict=True)):
        while front and front[-1][1] >= time_ms:
            front.pop()
        if cell and not (front and front[-1][0] == cell):
            front.append((cell, time_ms))
    return front


def behind_of(table: Table, order: list[int]) -> list[int]:
    """For each unit in an order, the place behind all that is inside it."""
    place = {u: i for i, u in enumerate(order)}
    behind = [i + 1 for i in range(len(order))]
    for u in reversed(order):
        outer = table.parents[u]
        while outer >= 0 and outer not in place:
            outer = table.parents[outer]
        if outer >= 0:
            behind[place[outer]] = max(behind[place[outer]], behind[place[u]])
    return behind
