"""What units hold together, in arrays: the holds of a `SacProblem`.

Points are numbered through as in `_sac_table`: `first[u] + k` is point k of unit u.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from solvers.sac_problem import Hold

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Held:
    """A hold at a position.

    Attributes:
        index: Its number.
        nbytes: Its size.
        holders: Units that hold it there.
        freeing: Columns that count it as freed there, one of which must be chosen as
            well; None if the holders are enough.
    """

    index: int
    nbytes: int
    holders: Ints
    freeing: Ints | None

    @property
    def key(self) -> tuple[int, int, int]:
        """Equal for positions with equal holders and columns: these are nested sets."""
        num_freeing = 0 if self.freeing is None else len(self.freeing)
        return (self.index, len(self.holders), num_freeing)


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
        self._froms: list[Ints] = []
        self.of_unit: list[list[int]] = [[] for _ in shapes]
        alike: dict[object, list[int]] = {}
        for index, hold in enumerate(holds):
            pairs = [
                (first[u] + k, start)
                for u, froms in hold.freed_by
                for k, start in enumerate(froms)
            ]
            self._columns.append(_ints(column for column, _ in pairs))
            self._froms.append(_ints(start for _, start in pairs))
            for u in self.parties(index):
                self.of_unit[u].append(index)
            self._stretches.append(hold.stretches() if hold.freed_by else [])
            if hold.freed_by:
                of_shape = sorted(shapes[u] for u in self.parties(index))
                alike.setdefault((hold.nbytes, *of_shape), []).append(index)
        self._alike = {index: family for family in alike.values() for index in family}

    def parties(self, index: int) -> set[int]:
        """Units that hold something, or count it as freed."""
        hold = self._holds[index]
        return {u for u, _ in (*hold.holders, *hold.freed_by)}

    def alike(self, index: int) -> list[int]:
        """Holds of the same size, freed and held by units with equal curves."""
        return self._alike[index]

    def at(self, position: int) -> list[Held]:
        """Those that can be alive at a position."""
        found = []
        for index, hold in enumerate(self._holds):
            ends = self._ends[index]
            if not len(ends) or not hold.held_from <= position < ends[0]:
                continue
            freeing = None
            if hold.freed_by:
                freeing = self._columns[index][self._froms[index] <= position]
                if not len(freeing):
                    continue
            units = self._units[index][ends > position]
            found.append(Held(index, hold.nbytes, units, freeing))
        return found

    def alive(self, index: int, choice: Sequence[int | None]) -> tuple[int, int]:
        """First position at which a choice holds it, and the first after these."""
        hold = self._holds[index]
        start = hold.held_from
        if hold.freed_by:
            points = ((choice[u], froms) for u, froms in hold.freed_by)
            starts = [froms[k] for k, froms in points if k is not None]
            if not starts:
                return start, start
            start = min(starts)
        ends = (end for u, end in self._by_end[index] if choice[u] is not None)
        return start, max(start, next(ends, start))

    def partners(self, u: int) -> set[int]:
        """Units that free what a unit holds, or hold what it frees."""
        found: set[int] = set()
        for index in self.of_unit[u]:
            hold = self._holds[index]
            freeing, holding = {v for v, _ in hold.freed_by}, dict(hold.holders)
            if freeing and u in holding:
                found |= freeing
            if u in freeing:
                found |= holding.keys()
        return found - {u}

    def add(self, shares: Numbers, weights: Numbers, change: Numbers) -> None:
        """Add what is held to the changes of the live memory.

        Args:
            shares: How much of each unit is chosen,
            weights: and of each column.
            change: By position; changed in place.
        """
        for index, hold in enumerate(self._holds):
            units, ends = self._units[index], self._ends[index]
            if not len(units):
                continue
            # From the last end backwards, what is held can only grow.
            held = np.maximum.accumulate(shares[units])
            if not held[-1]:
                continue
            if hold.freed_by:
                self._add_freed(index, held, weights, change)
                continue
            gained = hold.nbytes * np.diff(held, prepend=held.dtype.type(0))
            change[hold.held_from] += hold.nbytes * held[-1]
            np.subtract.at(change, ends, gained)

    def _add_freed(
        self, index: int, held: Numbers, weights: Numbers, change: Numbers
    ) -> None:
        """A hold that counts only as far as it was counted as freed."""
        hold, ends, froms = self._holds[index], self._ends[index], self._froms[index]
        own = weights[self._columns[index]]
        if not own.any():
            return
        for start, stop in self._stretches[index]:
            both = own[froms <= start].sum() + held[(ends > start).sum() - 1] - 1
            if both > 0:
                change[start] += hold.nbytes * both
                change[stop] -= hold.nbytes * both


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)
