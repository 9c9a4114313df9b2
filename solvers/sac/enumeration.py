"""All choices that may keep a budget and take less than a time, depth first.

Where there are few, they can be looked at one by one, with more than the MILP knows.
Units are asked one after the other, those around others first, each for no point or
for one of its points. A branch ends where a row cannot be kept any more: knapsacks over
a grid of times, one for each of some rows above the budget, say what the units to come
take away at most in the time that is left.

A point that takes nothing away is of no use, and left out. So is one that takes no time
and nothing away from where there is too much.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .rows import TOLERANCE_BYTES
from .surrogate import behind_of
from .table import Floats, Table

MOST_NODES = 70_000  # of all enumerations of a kind, some 10 us each
_MOST_ROWS = 256  # of those above the budget
_MOST_ENDING = 16  # of these, by which branches end
_CELLS = 128  # of the grid of times
_LEAST_MS = 1e-9
_NOISE = 1e-9  # of a grid cell: rounding


@dataclass(frozen=True, slots=True)
class Part:
    """A point that is chosen.

    Attributes:
        unit: Of which unit.
        point: Which of its points, or the one before it,
        share: and how far it is on the way to the next one.
        recompute_ms: What it takes.
    """

    unit: int
    point: int
    share: float
    recompute_ms: float


_Chosen = tuple[tuple[Part, Floats], ...]  # parts, and what each adds at the rows


class _TooMany(Exception):
    """More partial choices than may be looked at."""


class Enumeration:
    """Enumerates the choices for one budget.

    Args:
        table: The units.
        budget_bytes: Cap on the live memory at every position.
        mixed: Units whose points are a selection from a finer curve. Its other known
            points count, and take the memory that mixtures of two points do.

    Attributes:
        complete_below_ms: No faster point is unknown.
        nodes_left: How many more partial choices are looked at.
    """

    def __init__(
        self, table: Table, budget_bytes: int, *, mixed: Collection[int]
    ) -> None:
        self.table = table
        self.budget_bytes = budget_bytes
        self.mixed = frozenset(mixed)
        self.nodes_left = MOST_NODES
        complete = (table.problem.units[u].mixed_from_ms for u in self.mixed)
        self.complete_below_ms = min(complete, default=math.inf)
        self._is_over = table.base > budget_bytes
        over = np.flatnonzero(self._is_over)
        stride = -(-len(over) // _MOST_ROWS) or 1
        rows = [int(table.base.argmax()), *over[::stride].tolist()]
        self.changes = np.stack([table.row(q) for q in rows], axis=1)
        excess = table.base[rows] - budget_bytes
        for place, q in enumerate(rows):  # holds that take away: all of them may
            held = table.holds.at(q)
            excess[place] += sum(min(hold.added_bytes, 0) for hold in held)
        tolerance_bytes = TOLERANCE_BYTES if self.mixed else 0
        self.excess: Floats = (excess - tolerance_bytes).astype(np.float64)
        self.ending = slice(None, None, -(-len(rows) // _MOST_ENDING))

    def below(
        self, limit_ms: float, *, is_minimal: bool = False
    ) -> list[tuple[float, tuple[Part, ...]]] | None:
        """All choices that take less than a time, the fastest first, with their times.

        Some may break the budget by what units hold together, or at positions at which
        it is kept without AC: see `keeps_budget`.

        Args:
            limit_ms: That time, at most `complete_below_ms`.
            is_minimal: Only those that no unit can be left out of.

        Returns:
            None if there are too many.
        """
        search = _Search(self, limit_ms, is_minimal=is_minimal)
        try:
            search.go(0, self.excess, 0.0, ())
        except _TooMany:
            return None
        return sorted(search.found, key=lambda choice: choice[0])

    def is_useful(self, column: int) -> bool:
        """Whether a column takes memory away, with no time where there is too much."""
        table = self.table
        places, work = table.working(column)
        u = table.owner[column]
        start, stop = int(table.froms[u]), int(table.untils[u])
        if table.times[column] >= _LEAST_MS:
            return bool((work < 0).any() or (table.freed[column] > 0 and start < stop))
        frees_over = table.freed[column] > 0 and self._is_over[start:stop].any()
        return bool(frees_over or self._is_over[places[work < 0]].any())

    def keeps_budget(self, parts: Collection[Part]) -> bool:
        """Whether a choice does at all positions; with mixtures, within a tolerance."""
        is_whole = not any(part.share for part in parts)
        dtype = np.int64 if is_whole else np.float64
        weights = np.zeros(len(self.table.times), dtype=dtype)
        for part in parts:
            column = self.table.first[part.unit] + part.point
            weights[column] = 1 - part.share
            if part.share:
                weights[column + 1] = part.share
        cap = self.budget_bytes + (0 if is_whole else TOLERANCE_BYTES)
        return bool(self.table.live(weights).max() <= cap)


@dataclass(frozen=True, slots=True)
class _Items:
    """Points of a unit, the fastest first.

    Attributes:
        parts: The points.
        changes: What each adds at the rows.
    """

    parts: list[Part]
    changes: Floats


class _Search:
    """Choices that take less than one time."""

    def __init__(
        self,
        enumeration: Enumeration,
        limit_ms: float,
        *,
        is_minimal: bool,
    ) -> None:
        self.found: list[tuple[float, tuple[Part, ...]]] = []
        self._of = enumeration
        self._limit_ms = limit_ms
        self._is_minimal = is_minimal
        table = enumeration.table
        items = {u: _items(enumeration, u, limit_ms) for u in table.depth_first}
        order = [u for u in table.depth_first if items[u].parts]
        self._items = [items[u] for u in order]
        self._behind = behind_of(table, order)
        self._most = self._knapsacks()

    def _knapsacks(self) -> npt.NDArray[np.float64]:
        """What units from each place on take away at most from each row, by time."""
        num_rows = len(self._of.excess[self._of.ending])
        most = np.zeros((len(self._items) + 1, num_rows, _CELLS + 1))
        for place in reversed(range(len(self._items))):
            own, others = most[place], most[self._behind[place]]
            own[:] = most[place + 1]
            items = self._items[place]
            changes = items.changes[:, self._of.ending]
            for part, change in zip(items.parts, changes, strict=True):
                cell = int(part.recompute_ms / self._limit_ms * _CELLS)
                taken = others[:, : _CELLS + 1 - cell] - change[:, None]
                np.maximum(own[:, cell:], taken, out=own[:, cell:])
        return most

    def go(self, place: int, excess: Floats, used_ms: float, chosen: _Chosen) -> None:
        """All choices that begin with some parts, and go on with units from a place."""
        if excess.max() <= 0.0:
            if not self._is_minimal:
                self.found.append((used_ms, tuple(part for part, _ in chosen)))
            else:
                if not any((excess <= change).all() for _, change in chosen):
                    self.found.append((used_ms, tuple(part for part, _ in chosen)))
                return
        cell = min(_CELLS, int((1.0 - used_ms / self._limit_ms) * _CELLS + _NOISE))
        ending = excess[self._of.ending]
        for here in range(place, len(self._items)):
            if (self._most[here, :, cell] < ending).any():
                return
            items = self._items[here]
            for part, change in zip(items.parts, items.changes, strict=True):
                now_ms = used_ms + part.recompute_ms
                if now_ms >= self._limit_ms:
                    break
                if self._of.nodes_left <= 0:
                    raise _TooMany
                self._of.nodes_left -= 1
                more = (*chosen, (part, change))
                self.go(self._behind[here], excess + change, now_ms, more)


def _items(enumeration: Enumeration, u: int, limit_ms: float) -> _Items:
    """Points of a unit that take less than a time and are of use."""
    table = enumeration.table
    first, stop = table.first[u : u + 2]
    changes = enumeration.changes[first:stop].astype(np.float64)
    if u in enumeration.mixed:
        segments = table.segments(u, limit_ms)
        if segments is None:
            return _Items([], changes[:0])
        index, share, times = segments.index, segments.share, segments.times
    else:
        times = table.times[first:stop]
        index, share = np.arange(stop - first), np.zeros(stop - first)
    after, part = np.where(share > 0.0, index + 1, index), share[:, None]
    changes = changes[index] * (1.0 - part) + changes[after] * part
    is_useful = np.array(
        [enumeration.is_useful(first + k) for k in range(stop - first)]
    )
    kept = np.flatnonzero((is_useful[index] | is_useful[after]) & (times < limit_ms))
    kept = kept[np.argsort(times[kept], kind="stable")]
    parts = zip(index[kept], share[kept], times[kept], strict=True)
    return _Items(
        [Part(u, int(k), float(own), float(ms)) for k, own, ms in parts], changes[kept]
    )
