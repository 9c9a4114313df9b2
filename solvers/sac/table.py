"""The numbers of a `SacProblem` in arrays: rows of memory and sums over choices.

Points of all units are numbered through: ``first[u] + k`` is point k of unit u, called
a *column* below. Nothing here depends on the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .holds import Holds, Ints, Numbers
from .problem import SacProblem, Unit
from .relief import elsewhere
from .segments import Segments, segments

Floats = npt.NDArray[np.float64]
Choice = Sequence[int | None]  # point of each unit, None if it is not under AC


class Table:
    """Columns of a problem.

    Args:
        problem: Its budget is ignored.

    Attributes:
        problem: The problem.
        base: Live memory at each position without AC.
        first: First column of each unit, and the number of columns.
        owner: Unit of each column.
        times: Recompute time of each column in ms.
        freed: Bytes that each column frees.
        depth_first: Units, every one after the unit around it.
        parents: Unit around each unit, -1 for none.
        shapes: Equal numbers for units with equal curves.
        holds: What units hold together.
    """

    def __init__(self, problem: SacProblem) -> None:
        units = problem.units
        self.problem = problem
        self.base = np.array(problem.base_bytes, dtype=np.int64)
        sizes = [len(unit.points) for unit in units]
        self.first: list[int] = np.cumsum([0, *sizes]).tolist()
        self.owner = np.repeat(np.arange(len(units)), sizes)
        points = [point for unit in units for point in unit.points]
        self.times = np.array([point.recompute_ms for point in points])
        self.freed = np.array([point.freed_bytes for point in points], dtype=np.int64)
        self.froms = np.array([unit.freed_from for unit in units], dtype=np.int64)
        self.untils = np.array([unit.freed_until for unit in units], dtype=np.int64)
        self.parents = [-1 if unit.parent is None else unit.parent for unit in units]
        self.depth_first = _parents_first(self.parents)
        self._number: dict[object, int] = {}
        self._segments: dict[tuple[int, float], Segments | None] = {}
        self.shapes = [self._numbered(_curve(unit)) for unit in units]
        self._by_column(units)
        self.holds = Holds(problem.holds, self.first, self.shapes)
        self._relatives: list[list[int]] | None = None
        self._rows: dict[int, Ints] = {}  # of few positions, again and again
        self._elsewhere: dict[int, Ints] = {}

    def raised(self, added_bytes: Ints) -> Table:
        """The table with more live memory at each position."""
        table = copy(self)
        table.base = self.base + added_bytes
        return table

    def live(self, weights: Numbers) -> Numbers:
        """Live memory at each position, given the weight of each column.

        Of one choice, or of several in rows. Exact integers if the weights are
        integers.
        """
        by_choice = np.atleast_2d(weights)
        which, used = by_choice.nonzero()
        shares, owner = by_choice[which, used], self.owner[used]
        change = np.zeros((len(by_choice), len(self.base) + 1), dtype=weights.dtype)
        freed = self.freed[used] * shares
        np.subtract.at(change, (which, self.froms[owner]), freed)
        np.add.at(change, (which, self.untils[owner]), freed)
        if self.problem.holds:
            of_units = np.zeros((len(by_choice), len(self.parents)), weights.dtype)
            np.add.at(of_units, (which, owner), shares)
            self.holds.add(of_units, by_choice, change)
        live = self.base + np.cumsum(change[:, :-1], axis=1)
        firsts, counts = self._work_first[used], self._work_counts[used]
        entries = np.repeat(firsts - np.cumsum(counts) + counts, counts)
        entries += np.arange(len(entries))
        added = self._work[entries] * np.repeat(shares, counts)
        np.add.at(live, (np.repeat(which, counts), self._work_at[entries]), added)
        lives: Numbers = live.reshape(*weights.shape[:-1], -1)
        return lives

    def row(self, position: int) -> Ints:
        """What each column adds to the live memory at a position; not to be changed."""
        if position not in self._rows:
            self._rows[position] = self._row(position)
            self._rows[position].setflags(write=False)
        return self._rows[position]

    def _row(self, position: int) -> Ints:
        covers = (self.froms <= position) & (position < self.untils)
        added = np.where(covers[self.owner], -self.freed, 0)
        for u, _, extras in self._workers(position):
            added[self.first[u] : self.first[u + 1]] += extras
        return added

    def elsewhere(self, position: int) -> Ints:
        """What units neither around nor inside each unit take away there at most."""
        if position not in self._elsewhere:
            row = self.row(position)
            self._elsewhere[position] = elsewhere(row, self.first, self.parents)
        return self._elsewhere[position]

    def own_row(self, u: int, position: int) -> Ints:
        """What each column of one unit adds there."""
        added = -self.freed[self.first[u] : self.first[u + 1]]
        if not self.froms[u] <= position < self.untils[u]:
            added[:] = 0
        for v, _, extras in self._workers(position):
            if v == u:
                added += extras
        return added

    def role(self, position: int) -> Ints:
        """Equal numbers for units of one shape that have equal entries in a row."""
        covers = (self.froms <= position) & (position < self.untils)
        roles = covers.astype(np.int64)
        for u, number, _ in self._workers(position):
            roles[u] += 2 + 2 * number
        return roles

    def weights(self, choice: Choice) -> Ints:
        """Weights of 0 and 1 for the columns."""
        weights = np.zeros(len(self.times), dtype=np.int64)
        for u, k in enumerate(choice):
            if k is not None:
                weights[self.first[u] + k] = 1
        return weights

    def choice(self, weights: Floats) -> Choice:
        """The choice that has whole weights."""
        choice: list[int | None] = [None] * len(self.parents)
        for column in np.flatnonzero(weights > 0.5).tolist():
            u = int(self.owner[column])
            choice[u] = column - self.first[u]
        return choice

    def relatives(self, u: int) -> list[int]:
        """Units around and inside a unit: not to be chosen together with it."""
        if self._relatives is None:
            around: list[list[int]] = [[] for _ in self.parents]
            relatives: list[list[int]] = [[] for _ in self.parents]
            for v in self.depth_first:
                parent = self.parents[v]
                if parent >= 0:
                    around[v] = [parent, *around[parent]]
                for outer in around[v]:
                    relatives[v].append(outer)
                    relatives[outer].append(v)
            self._relatives = relatives
        return self._relatives[u]

    @cached_property
    def families(self) -> tuple[Ints, Ints]:
        """Every unit with itself and each of its relatives: the pairs in two arrays."""
        families = [[u, *self.relatives(u)] for u in range(len(self.parents))]
        sizes = [len(family) for family in families]
        members = [v for family in families for v in family]
        return np.repeat(np.arange(len(families)), sizes), np.array(members, np.int64)

    def segments(self, u: int, limit_ms: float) -> Segments | None:
        """All known points of a unit: see `segments`."""
        key = self.shapes[u], limit_ms
        if key not in self._segments:
            unit = self.problem.units[u]
            self._segments[key] = segments(unit, limit_ms)
        return self._segments[key]

    def working(self, column: int) -> tuple[Ints, Ints]:
        """Positions of a column's working set, and its bytes there."""
        low, high = self._work_first[column : column + 2]
        return self._work_at[low:high], self._work[low:high]

    @property
    def works(self) -> tuple[Ints, Ints, Ints]:
        """Columns, positions and bytes of all working sets."""
        columns = np.repeat(np.arange(len(self.times)), self._work_counts)
        return columns, self._work_at, self._work

    def _numbered(self, key: object) -> int:
        return self._number.setdefault(key, len(self._number))

    def _by_column(self, units: Sequence[Unit]) -> None:
        """Working sets, column by column."""
        positions, work, places = [_NONE], [_NONE], [_NONE]
        counts = [_NONE]
        for unit in units:
            own = np.array([q for q, _ in unit.working], dtype=np.int64)
            by_point = _extras(unit).T
            columns, rows = by_point.nonzero()
            positions.append(own[rows])
            work.append(by_point[columns, rows])
            counts.append(np.bincount(columns, minlength=len(unit.points)))
            places.append(own)
        self._work_counts = np.concatenate(counts)
        self._work_first = np.cumsum(np.append(0, self._work_counts))
        self._work_at = np.concatenate(positions)
        self._work = np.concatenate(work)
        self._by_position(places[1:])

    def _by_position(self, places: Sequence[Ints]) -> None:
        """Which units work at each position: in the order of positions, then units."""
        sizes = [len(own) for own in places]
        joined = np.concatenate([_NONE, *places])
        order = np.argsort(joined, kind="stable")
        self._places = joined[order]
        self._place_units = np.repeat(np.arange(len(sizes)), sizes)[order]
        self._place_rows = order - np.cumsum([0, *sizes])[self._place_units]
        self._numbered_workers: dict[int, list[tuple[int, int, Ints]]] = {}

    def _workers(self, position: int) -> list[tuple[int, int, Ints]]:
        """Units that work at a position, in arrays: few positions are asked for."""
        if position not in self._numbered_workers:
            self._numbered_workers[position] = [
                (u, self._numbered(added), np.array(added, np.int64))
                for u, added in self._work_there(position).items()
            ]
        return self._numbered_workers[position]

    def _work_there(self, position: int) -> dict[int, tuple[int, ...]]:
        """Working sets at a position by unit; a unit may name it twice."""
        low, high = self._places.searchsorted([position, position + 1])
        by_unit: dict[int, tuple[int, ...]] = {}
        for u, row in zip(
            self._place_units[low:high].tolist(),
            self._place_rows[low:high].tolist(),
            strict=True,
        ):
            extras = self.problem.units[u].working[row][1]
            if u in by_unit:
                extras = tuple(map(int.__add__, by_unit[u], extras))
            by_unit[u] = extras
        return by_unit


_NONE = np.zeros(0, dtype=np.int64)


def _curve(unit: Unit) -> object:
    return (unit.points, unit.between, unit.mixed_from_ms)


def _extras(unit: Unit) -> Ints:
    """Working set of a unit, position by position, which are often the same object."""
    extras = [e for _, e in unit.working]
    ids = np.fromiter(map(id, extras), np.int64, len(extras))
    is_new = np.append(True, ids[1:] != ids[:-1])[: len(extras)]
    firsts = np.flatnonzero(is_new)
    rows = [extras[i] for i in firsts.tolist()]
    distinct = np.array(rows, np.int64).reshape(len(rows), len(unit.points))
    return np.repeat(distinct, np.diff(firsts, append=len(extras)), axis=0)


def _parents_first(parents: Sequence[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for u, parent in enumerate(parents):
        children.setdefault(parent, []).append(u)
    order: list[int] = []
    waiting = children.get(-1, [])[::-1]
    while waiting:
        u = waiting.pop()
        order.append(u)
        waiting += children.get(u, [])[::-1]
    return order
