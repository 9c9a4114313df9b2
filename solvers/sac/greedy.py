"""Choices without a solver: round a relaxation, repair it, then trim it.

A heuristic, and deterministic: it turns what keeps most rows into what keeps all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .holds import Ints
from .table import Choice, Floats, Table

_MOST_TRIES = 1000  # of moves in a repair: where more are needed it goes astray


def round_and_repair(
    table: Table, budget_bytes: int, units: Collection[int], weights: Floats
) -> Choice | None:
    """Whole points close to continuous weights that keep the budget exactly.

    Args:
        table: The units.
        budget_bytes: Cap on the live memory at every position.
        units: Those that may be chosen.
        weights: Weight of each column.

    Returns:
        The choice, or None if the repair got stuck.
    """
    search = _Search(table, budget_bytes, units, rounded(table, weights))
    if not search.repair():
        return None
    search.trim()
    return search.choice


def trimmed(
    table: Table, budget_bytes: int, units: Collection[int], choice: Choice
) -> Choice:
    """A choice that keeps the budget, made faster unit by unit while it does."""
    search = _Search(table, budget_bytes, units, list(choice))
    search.trim()
    return search.choice


def rounded(table: Table, weights: Floats) -> list[int | None]:
    """The likeliest units, each at the first point that frees what it frees now."""
    choice: list[int | None] = [None] * len(table.parents)
    for u, shares in likely(table, weights).items():
        freed = table.freed[table.first[u] : table.first[u + 1]]
        near = np.flatnonzero(freed >= float(freed @ shares) - 1.0)
        choice[u] = int(near[0]) if len(near) else len(freed) - 1
    return choice


def likely(table: Table, weights: Floats) -> dict[int, Floats]:
    """The likeliest units, none inside another, and shares of their points."""
    totals = np.bincount(table.owner, weights, len(table.parents))
    shares: dict[int, Floats] = {}
    for u in sorted(np.flatnonzero(totals >= 0.5).tolist(), key=lambda u: -totals[u]):
        if shares.keys().isdisjoint(table.relatives(u)):
            own = slice(table.first[u], table.first[u + 1])
            shares[u] = weights[own] / totals[u]
    return shares


@dataclass(frozen=True, slots=True)
class _Reliefs:
    """Columns that lower a position, each of which is tried once.

    Attributes:
        columns: The columns, ascending.
        prices: What each takes per byte, in ms; infinite if it was tried.
    """

    columns: Ints
    prices: Floats

    def cheapest(self) -> int | None:
        """The cheapest column that was not tried; None if all were."""
        if not len(self.columns):
            return None
        place = int(self.prices.argmin())
        if self.prices[place] == np.inf:
            return None
        self.prices[place] = np.inf
        return int(self.columns[place])


class _Search:
    """A choice of points, its live memory, and single moves from it."""

    def __init__(
        self,
        table: Table,
        budget_bytes: int,
        units: Collection[int],
        choice: list[int | None],
    ) -> None:
        self.choice = choice
        self._table = table
        self._budget = budget_bytes
        self._live: Ints = table.live(table.weights(choice)).astype(np.int64)
        self._allowed = np.isin(table.owner, np.array(sorted(units), dtype=np.int64))
        self._columns = _columns(table, choice)

    def repair(self) -> bool:
        """Cheapest relief at the peak, until the peak is within the budget."""
        banned = ~self._allowed
        has_moved = False  # since columns were banned
        reliefs = None
        for _ in range(_MOST_TRIES):
            if reliefs is None:
                position = int(self._live.argmax())
                excess = int(self._live[position]) - self._budget
                if excess <= 0:
                    return True
                violation = self._violation(self._live)
                reliefs = self._reliefs(position, excess, banned)
            column = reliefs.cheapest()
            if column is None and has_moved:
                banned, has_moved = ~self._allowed, False
                reliefs = self._reliefs(position, excess, banned)
                column = reliefs.cheapest()
            if column is None:
                return False
            u = int(self._table.owner[column])
            k = column - self._table.first[u]
            changed = self._live + self._change(u, k)
            if self._violation(changed) < violation:
                self._move(u, k, changed)
                has_moved, reliefs = True, None
            else:
                banned[column] = True
        return False

    def trim(self) -> None:
        """Recompute less in one unit after the other while the budget allows it."""
        times = self._table.times
        used = [
            (float(times[self._table.first[u] + k]), u)
            for u, k in enumerate(self.choice)
            if k is not None
        ]
        for now_ms, u in sorted(used, key=lambda entry: (-entry[0], entry[1])):
            own = times[self._table.first[u] : self._table.first[u + 1]]
            cheaper = np.flatnonzero(own < now_ms)
            without = self._live + self._change(u, None)
            worst = int(without.argmax())
            if without[worst] <= self._budget:
                self._move(u, None, without)
                continue
            # What does not relieve the worst position need not be tried.
            row = self._table.own_row(u, worst)[cheaper]
            cheaper = cheaper[without[worst] + row <= self._budget]
            for k in cheaper[np.argsort(own[cheaper])].tolist():
                changed = self._live + self._change(u, k)
                if changed.max() <= self._budget:
                    self._move(u, k, changed)
                    break

    def _move(self, u: int, k: int | None, live: Ints) -> None:
        """Move a unit to a point or to None; units around or in it are dropped."""
        if k is not None:
            for v in self._table.relatives(u):
                self.choice[v], self._columns[v] = None, -1
        self.choice[u] = k
        self._columns[u] = -1 if k is None else self._table.first[u] + k
        self._live = live

    def _reliefs(
        self, position: int, excess: int, banned: npt.NDArray[np.bool_]
    ) -> _Reliefs:
        """Columns that lower a position, and their times per byte."""
        table = self._table
        row = table.row(position)
        used = np.flatnonzero(self._columns >= 0)
        columns = self._columns[used]
        of_unit = np.zeros(len(self.choice), dtype=np.int64)
        of_unit[used] = row[columns]
        of_unit_ms = np.zeros(len(self.choice))
        of_unit_ms[used] = table.times[columns]
        units, relatives = table.families
        now = np.zeros_like(of_unit)
        np.add.at(now, units, of_unit[relatives])
        now_ms = np.bincount(units, of_unit_ms[relatives], len(now))
        relief = now[table.owner] - row
        possible = np.flatnonzero((relief > 0) & ~banned)
        more_ms = table.times[possible] - now_ms[table.owner[possible]]
        price = np.maximum(more_ms, 0.0) / np.minimum(relief[possible], excess)
        return _Reliefs(possible, price)

    def _violation(self, live: Ints) -> int:
        return int(np.maximum(live - self._budget, 0).sum())

    def _change(self, u: int, k: int | None) -> Ints:
        """Change of the live memory if a unit moves to a point."""
        table = self._table
        change = np.zeros_like(self._live)
        leaving = [u, *(table.relatives(u) if k is not None else ())]
        moves = [
            (v, current, -1) for v in leaving if (current := self.choice[v]) is not None
        ]
        if k is not None:
            moves.append((u, k, 1))
        for v, point, sign in moves:
            column = table.first[v] + point
            freed = int(table.freed[column])
            change[table.froms[v] : table.untils[v]] -= sign * freed
            positions, work = table.working(column)
            np.add.at(change, positions, sign * work)
        of_unit = table.holds.of_unit
        touched = {index for v, _, _ in moves for index in of_unit[v]}
        if touched:
            after = list(self.choice)
            for v, _, _ in moves:
                after[v] = None
            after[u] = k
            for index in touched:
                nbytes = table.holds.added_bytes(index)
                change[slice(*table.holds.alive(index, self.choice))] -= nbytes
                change[slice(*table.holds.alive(index, after))] += nbytes
        return change


def _columns(table: Table, choice: Choice) -> Ints:
    """Column of each unit's point, -1 for none."""
    pairs = zip(table.first, choice, strict=False)
    columns = [-1 if k is None else first + k for first, k in pairs]
    return np.array(columns, dtype=np.int64)
