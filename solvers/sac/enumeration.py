"""All choices that keep a budget and take less than a time.

Where there are few, they can be looked at one by one, with more than the MILP knows.
Units are asked one after the other, those around others first, each for no point or
for one of its points, and all partial choices at once: what is left of them after a
unit goes on to the next. One ends where a row cannot be kept any more: knapsacks over
a grid of times, one for each of some rows above the budget, say what the units to come
take away at most in the time that is left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .holds import Ints
from .items import CELLS, Items, Part, row_with_holds, useful_items
from .rows import TOLERANCE_BYTES
from .table import Floats, Table

MOST_NODES = 3_000_000  # of all enumerations of a kind, a tenth of a us each
_MOST_FOUND = 25_000  # by one of them, some 20 us each
_MOST_ROWS = 256  # of those above the budget
_MOST_ENDING = 16  # of these, by which partial choices end
_MOST_ALIVE = 100_000  # partial choices at one unit: of more hardly any comes to an end
_AT_ONCE = 2**16  # partial choices with one item more
_CHECKED_AT_ONCE = 2**20  # rows, positions or columns of choices
_NOISE = 1e-9  # of a grid cell: rounding
_ROUNDING_BYTES = 0.5  # of sums of parts of bytes


def _time_ms(parts: Sequence[Part]) -> float:
    return sum(part.recompute_ms for part in parts)


class _TooMany(Exception):
    """More partial choices than may be looked at."""


class Enumeration:
    """Enumerates the choices for one budget.

    Args:
        table: The units.
        budget_bytes: Cap on the live memory at every position.
        mixed: Units whose points are a selection from a finer curve. Its other known
            points count, and take the memory that mixtures of two points do.
        most_ms: Choices that take longer are of no interest.

    Attributes:
        most_ms: The same, or less: no faster point is unknown.
        nodes_left: How many more partial choices are looked at.
    """

    def __init__(
        self,
        table: Table,
        budget_bytes: int,
        *,
        mixed: Collection[int],
        most_ms: float,
    ) -> None:
        self.table = table
        self.budget_bytes = budget_bytes
        self.mixed = frozenset(mixed)
        self.nodes_left = MOST_NODES
        complete = (table.problem.units[u].mixed_from_ms for u in self.mixed)
        self.most_ms = min(most_ms, min(complete, default=math.inf))
        self.is_over = table.base > budget_bytes
        over = np.flatnonzero(self.is_over)
        stride = -(-len(over) // _MOST_ROWS) or 1
        rows = [int(table.base.argmax()), *over[::stride].tolist()]
        by_changes: dict[bytes, tuple[int, Floats]] = {}
        for q in rows:  # of those that are alike only the highest counts
            row = row_with_holds(table, q)
            excess = int(table.base[q]) - budget_bytes
            known = by_changes.get(row.tobytes())
            if known is None or excess > known[0]:
                by_changes[row.tobytes()] = excess, row
        tolerance_bytes = TOLERANCE_BYTES if self.mixed else _ROUNDING_BYTES
        least = [excess - tolerance_bytes for excess, _ in by_changes.values()]
        self.excess = np.array(least, dtype=np.float64)
        self.changes = np.stack([row for _, row in by_changes.values()], axis=1)
        self.ending = slice(None, None, -(-len(least) // _MOST_ENDING))

    @cached_property
    def items(self) -> Items:
        """Points that are of use."""
        return useful_items(
            self.table,
            self.changes,
            self.ending,
            is_over=self.is_over,
            mixed=self.mixed,
            most_ms=self.most_ms,
        )

    def below(
        self, limit_ms: float, *, is_minimal: bool = False
    ) -> list[tuple[float, tuple[Part, ...]]] | None:
        """All choices that take less than a time, the fastest first, with their times.

        Where a mixture stands for a known point, within a tolerance of the budget.

        Args:
            limit_ms: That time, at most `most_ms`.
            is_minimal: Only those that no unit can be left out of, as far as positions
                are concerned that are above the budget without AC.

        Returns:
            None if there are too many: at most half of the nodes that are left are
            looked at.
        """
        spared, self.nodes_left = self.nodes_left // 2, self.nodes_left // 2
        search = _Search(self, limit_ms, is_minimal=is_minimal)
        try:
            found = search.run()
        except _TooMany:
            return None
        finally:
            self.nodes_left += spared
        pairs = zip(found, self._keep_budget(found), strict=True)
        kept = [(_time_ms(parts), parts) for parts, keeps in pairs if keeps]
        return sorted(kept, key=lambda choice: choice[0])

    def _keep_budget(self, choices: Sequence[tuple[Part, ...]]) -> list[bool]:
        """Whether each of some choices does at all positions."""
        num_columns = len(self.table.times)
        size = max(1, _CHECKED_AT_ONCE // max(num_columns, len(self.table.base)))
        kept: list[bool] = []
        for start in range(0, len(choices), size):
            some = choices[start : start + size]
            weights = np.zeros((len(some), num_columns))
            for own, parts in zip(weights, some, strict=True):
                for part in parts:
                    column = self.table.first[part.unit] + part.point
                    own[column] = 1 - part.share
                    if part.share:
                        own[column + 1] = part.share
            is_mixed = [any(part.share for part in parts) for parts in some]
            cap = self.budget_bytes + TOLERANCE_BYTES * np.array(is_mixed)
            kept += (self.table.live(weights).max(axis=1) <= cap).tolist()
        return kept


@dataclass(frozen=True, slots=True)
class _Partial:
    """Partial choices to which the same units may be added.

    Attributes:
        nodes: Their numbers among all,
        times: what they take,
        excess: and what they leave above the budget at some rows.
    """

    nodes: Ints
    times: Floats
    excess: Floats

    def at(self, index: npt.NDArray[Any]) -> _Partial:
        """Some of them."""
        return _Partial(self.nodes[index], self.times[index], self.excess[index])


class _Tree:
    """All partial choices: each is another one and one part more; 0 has no part."""

    def __init__(self) -> None:
        self.size = 1
        self._before = np.zeros(1, dtype=np.int64)
        self._added = np.full(1, -1)

    def grow(self, before: Ints, added: Ints) -> Ints:
        """Add some; their numbers."""
        start, self.size = self.size, self.size + len(before)
        if self.size > len(self._before):
            room = max(self.size, 2 * len(self._before))
            self._before = np.resize(self._before, room)
            self._added = np.resize(self._added, room)
        self._before[start : self.size] = before
        self._added[start : self.size] = added
        return np.arange(start, self.size)

    def parts(self, nodes: Ints) -> Iterator[tuple[npt.NDArray[np.intp], Ints]]:
        """Parts of some, one of each at a time, the last first.

        Which of them have one more, and which it is.
        """
        which = np.flatnonzero(nodes)
        while len(which):
            yield which, self._added[nodes[which]]
            nodes = nodes.copy()
            nodes[which] = self._before[nodes[which]]
            which = which[nodes[which] > 0]


class _Search:
    """Choices that take less than one time."""

    def __init__(
        self, enumeration: Enumeration, limit_ms: float, *, is_minimal: bool
    ) -> None:
        self._of = enumeration
        self._items = enumeration.items
        self._limit_ms = limit_ms
        self._is_minimal = is_minimal
        self._tree = _Tree()
        self._found: list[Ints] = []

    def run(self) -> list[tuple[Part, ...]]:
        """All of them, in no order."""
        items, excess = self._items, self._of.excess
        if excess.max() <= 0.0:
            self._found.append(np.array([0]))
            if self._is_minimal:
                return [()]
        ending = excess[None, self._of.ending]
        waiting: list[list[_Partial]] = [[] for _ in range(len(items.behind) + 1)]
        waiting[0].append(_Partial(np.array([0]), np.array([0.0]), ending))
        for place, behind in enumerate(items.behind):
            here = self._possible(_joined(waiting[place]), place)
            waiting[place] = []
            waiting[place + 1].append(here)
            for which, added in self._pairs(here, place):
                waiting[behind].append(self._with_points(here, which, added, behind))
        nodes = np.concatenate([np.zeros(0, dtype=np.int64), *self._found])
        chosen: list[list[int]] = [[] for _ in range(len(nodes))]
        for which, added in self._tree.parts(nodes):
            for i, item in zip(which.tolist(), added.tolist(), strict=True):
                chosen[i].append(item)
        return [tuple(items.parts[k] for k in reversed(own)) for own in chosen]

    def _possible(self, partial: _Partial, place: int) -> _Partial:
        """Those that units from a place on can make keep the budget."""
        if len(partial.nodes) > _MOST_ALIVE:
            raise _TooMany
        self._of.nodes_left -= len(partial.nodes)
        left = (self._limit_ms - partial.times) / self._of.most_ms
        cells = np.minimum(CELLS, (left * CELLS + _NOISE).astype(np.int64))
        most = self._items.most[place, cells]
        return partial.at(np.flatnonzero((most >= partial.excess).all(axis=1)))

    def _pairs(
        self, partial: _Partial, place: int
    ) -> Iterator[tuple[npt.NDArray[np.intp], Ints]]:
        """Partial choices, and items at a place for which each has time left."""
        first, stop = self._items.first[place : place + 2]
        left_ms = self._limit_ms - partial.times
        counts = self._items.times[first:stop].searchsorted(left_ms)
        if self._of.nodes_left <= counts.sum():
            self._of.nodes_left = 0
            raise _TooMany
        which = np.repeat(np.arange(len(counts)), counts)
        added = first + np.arange(len(which))
        added -= np.repeat(np.cumsum(counts) - counts, counts)
        for start in range(0, len(which), _AT_ONCE):
            yield which[start : start + _AT_ONCE], added[start : start + _AT_ONCE]

    def _with_points(
        self,
        partial: _Partial,
        which: npt.NDArray[np.intp],
        added: Ints,
        behind: int,
    ) -> _Partial:
        """Some of partial choices, each with an item; other units come after it."""
        grown = self._possible(
            _Partial(
                np.arange(len(which)),
                partial.times[which] + self._items.times[added],
                partial.excess[which] + self._items.ending[added],
            ),
            behind,
        )
        which, added = which[grown.nodes], added[grown.nodes]
        nodes = self._tree.grow(partial.nodes[which], added)
        grown = _Partial(nodes, grown.times, grown.excess)
        keeps = np.flatnonzero((grown.excess <= 0.0).all(axis=1))
        is_found = np.zeros(len(nodes), dtype=bool)
        size = _CHECKED_AT_ONCE // len(self._of.excess)
        for start in range(0, len(keeps), size):
            some = keeps[start : start + size]
            is_found[some] = self._keep_rows(nodes[some])
        return grown.at(np.flatnonzero(~is_found)) if self._is_minimal else grown

    def _keep_rows(self, nodes: Ints) -> npt.NDArray[np.bool_]:
        """Which of some keep all rows; those that are wanted are found."""
        changes = self._items.changes
        excess = np.tile(self._of.excess, (len(nodes), 1))
        for which, added in self._tree.parts(nodes):
            excess[which] += changes[added]
        keeps = np.asarray((excess <= 0.0).all(axis=1))
        is_wanted = keeps.copy()
        if self._is_minimal:
            for which, added in self._tree.parts(nodes):
                is_needed = (excess[which] > changes[added]).any(axis=1)
                is_wanted[which[~is_needed]] = False
        self._found.append(nodes[is_wanted])
        if sum(map(len, self._found)) > _MOST_FOUND:
            raise _TooMany
        return keeps


def _joined(parts: list[_Partial]) -> _Partial:
    return _Partial(
        np.concatenate([part.nodes for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.excess for part in parts]),
    )
