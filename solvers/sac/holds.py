"""What units hold together, in arrays: the holds of a `SacProblem`.

Points are numbered through as in `table`: `first[u] + k` is point k of unit u.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .problem import Hold

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Held:
    """A hold at a position.

    Attributes:
        index: Its number, of equal ones that of the first.
        added_bytes: What it adds to the live memory.
        holders: Units that hold it there.
        columns: Columns that count it as freed there, or as kept, one of which must be
            chosen as well; None if the holders are enough.
        is_kept: Whether they keep it.
    """

    index: int
    added_bytes: int
    holders: Ints
    columns: Ints | None
    is_kept: bool

    @property
    def key(self) -> tuple[int, int, int]:
        """A key, equal for positions with equal holders and columns: nested sets."""
        num_columns = 0 if self.columns is None else len(self.columns)
        return (self.index, len(self.holders), num_columns)

    def with_more(self, added_bytes: int) -> Held:
        """The hold with the bytes of an equal one added."""
        return replace(self, added_bytes=self.added_bytes + added_bytes)


class Holds:
    """All holds of a problem.

    Args:
        holds: The holds.
        first: First column of each unit.
        shapes: Equal numbers for units with equal curves.

    Attributes:
        of_unit: Holds that each unit has a part in.
    """

    def __init__(
        self, holds: Sequence[Hold], first: Sequence[int], shapes: Sequence[int]
    ) -> None:
        self._holds = holds
        self._by_end = [
            sorted(hold.holders, key=lambda held: -held[1]) for hold in holds
        ]
        self._units = [_ints(u for u, _ in held) for held in self._by_end]
        self._ends = [_ints(end for _, end in held) for held in self._by_end]
        self._columns: list[Ints] = []
        self._stretches: list[list[tuple[int, int]]] = []
        self._bounds: list[Ints] = []  # where columns free it, or keep it no more
        self.of_unit: list[list[int]] = [[] for _ in shapes]
        alike: dict[object, list[int]] = {}
        for index, hold in enumerate(holds):
            by_point = hold.freed_by or hold.kept_by
            pairs = [
                (first[u] + k, bound)
                for u, bounds in by_point
                for k, bound in enumerate(bounds)
            ]
            self._columns.append(_ints(column for column, _ in pairs))
            self._bounds.append(_ints(bound for _, bound in pairs))
            for u in self.parties(index):
                self.of_unit[u].append(index)
            self._stretches.append(hold.stretches() if by_point else [])
            if by_point:
                of_shape = sorted(shapes[u] for u in self.parties(index))
                alike.setdefault((hold.added_bytes, *of_shape), []).append(index)
        self._alike = {index: family for family in alike.values() for index in family}

    def parties(self, index: int) -> set[int]:
        """Units with a part in a hold: they hold it, or count it as freed or kept."""
        hold = self._holds[index]
        return {u for u, _ in (*hold.holders, *hold.freed_by, *hold.kept_by)}

    def alike(self, index: int) -> list[int]:
        """Holds of the same size, in which units with equal curves have a part."""
        return self._alike[index]

    def at(self, position: int) -> list[Held]:
        """Holds that can be alive at a position; equal ones are added up.

        A model that counts holds of different units cannot tell equal ones apart.
        """
        held: dict[object, Held] = {}
        for index, hold in enumerate(self._holds):
            ends = self._ends[index]
            if not len(ends) or not hold.held_from <= position < ends[0]:
                continue
            columns, bounds = None, self._bounds[index]
            if len(bounds):
                there = bounds > position if hold.kept_by else bounds <= position
                columns = self._columns[index][there]
                if not len(columns):
                    continue
            units = self._units[index][ends > position]
            nbytes, is_kept = hold.added_bytes, bool(hold.kept_by)
            own = None if columns is None else frozenset(columns.tolist())
            key = frozenset(units.tolist()), own, is_kept
            if key in held:
                held[key] = held[key].with_more(nbytes)
            else:
                held[key] = Held(index, nbytes, units, columns, is_kept)
        return list(held.values())

    def added_bytes(self, index: int) -> int:
        """What a hold adds to the live memory."""
        return self._holds[index].added_bytes

    def alive(self, index: int, choice: Sequence[int | None]) -> tuple[int, int]:
        """First position at which a hold counts in a choice, and the first after it."""
        hold = self._holds[index]
        start = hold.held_from
        last = next((e for u, e in self._by_end[index] if choice[u] is not None), start)
        if hold.kept_by:
            kept = ((choice[u], untils) for u, untils in hold.kept_by)
            untils = [ends[k] for k, ends in kept if k is not None]
            return start, min(last, max(untils, default=start))
        if hold.freed_by:
            points = ((choice[u], froms) for u, froms in hold.freed_by)
            starts = [froms[k] for k, froms in points if k is not None]
            if not starts:
                return start, start
            start = min(starts)
        return start, max(start, last)

    def partners(self, u: int) -> dict[int, int]:
        """Units that free, or keep, what a unit holds, or hold what it frees or keeps.

        1 for each that is better not chosen together with it, -1 for the others.
        """
        signs: dict[int, int] = {}
        for index in self.of_unit[u]:
            hold = self._holds[index]
            by_point = {v for v, _ in hold.freed_by or hold.kept_by}
            holding = {v for v, _ in hold.holders}
            others = (by_point if u in holding else set[int]()) | (
                holding if u in by_point else set[int]()
            )
            sign = -1 if hold.kept_by else 1
            signs |= {v: sign for v in others if v != u}
        return signs

    def add(self, shares: Numbers, weights: Numbers, change: Numbers) -> None:
        """Add what is held to the changes of the live memory.

        Args:
            shares: How much of each unit is chosen, by choice in rows,
            weights: and of each column.
            change: By position; changed in place.
        """
        for index, hold in enumerate(self._holds):
            units, ends = self._units[index], self._ends[index]
            if not len(units):
                continue
            # From the last end backwards, what is held can only grow.
            held = np.maximum.accumulate(shares[:, units], axis=1)
            which = held[:, -1].nonzero()[0]
            if not len(which):
                continue
            held = held[which]
            if hold.kept_by:
                held = np.minimum(np.cumsum(shares[which][:, units], axis=1), 1)
            if hold.freed_by or hold.kept_by:
                self._add_both(index, which, held, weights, change)
                continue
            gained = hold.nbytes * np.diff(held, prepend=held.dtype.type(0))
            change[which, hold.held_from] += hold.nbytes * held[:, -1]
            np.subtract.at(change, (which[:, None], ends), gained)

    def _add_both(
        self,
        index: int,
        which: npt.NDArray[np.intp],
        held: Numbers,
        weights: Numbers,
        change: Numbers,
    ) -> None:
        """Add a hold that counts only as far as it was counted as freed, or as kept."""
        hold, ends, bounds = self._holds[index], self._ends[index], self._bounds[index]
        own = weights[which][:, self._columns[index]]
        if not own.any():
            return
        for start, stop in self._stretches[index]:
            of_units = held[:, (ends > start).sum() - 1]
            if hold.kept_by:
                both = np.minimum(own[:, bounds > start].sum(axis=1), of_units)
            else:
                both = own[:, bounds <= start].sum(axis=1) + of_units - 1
            added = hold.added_bytes * np.maximum(both, 0)
            change[which, start] += added
            change[which, stop] -= added


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)
