"""A first incumbent for the main MILP: round the relaxation, repair, then trim.

A heuristic, and deterministic. Identical layers leave a MILP solver with many equal
choices; with an incumbent in hand it has only the bound to prove.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence, Set

import numpy as np
import numpy.typing as npt

from solvers.sac_problem import Hold, SacProblem, live_bytes

Choice = dict[int, int]  # unit -> point

_MOVES_PER_UNIT = 4  # of the repair: more only shift memory back and forth


def round_and_repair(
    problem: SacProblem, units: Collection[int], weights: Sequence[Sequence[float]]
) -> list[list[float]] | None:
    """Whole points close to continuous weights that keep the budget exactly.

    Args:
        problem: Units, memory and budget.
        units: Those that may be chosen.
        weights: A solution of the LP relaxation.

    Returns:
        Weights of 0 and 1, or None if the repair got stuck.
    """
    search = _Search(problem, units)
    for u, k in _rounded(problem, weights):
        if not any(v in search.choice for v in search.relatives[u]):
            search.move(u, k)
    if not search.repair():
        return None
    search.trim()
    return [
        [int(search.choice.get(u) == k) for k in range(len(unit.points))]
        for u, unit in enumerate(problem.units)
    ]


def _rounded(
    problem: SacProblem, weights: Sequence[Sequence[float]]
) -> Iterator[tuple[int, int]]:
    """The likeliest units, each at the first point that frees what it frees now."""
    totals = [sum(shares) for shares in weights]
    for u in sorted(range(len(totals)), key=lambda u: (-totals[u], u)):
        if totals[u] < 0.5:
            return
        freed = [point.freed_bytes for point in problem.units[u].points]
        wanted = sum(f * w for f, w in zip(freed, weights[u], strict=True)) / totals[u]
        near = [k for k, f in enumerate(freed) if f >= wanted - 1.0]
        yield u, near[0] if near else len(freed) - 1


class _Search:
    """A choice of points, its live memory, and single moves from it."""

    def __init__(self, problem: SacProblem, units: Collection[int]) -> None:
        self.choice: Choice = {}
        self.relatives = _relatives(problem)
        self._problem = problem
        self._units = sorted(units)
        self._working = [dict(unit.working) for unit in problem.units]
        self._holds: dict[int, list[Hold]] = defaultdict(list)
        for hold in problem.holds:
            for u, _ in hold.holders:
                self._holds[u].append(hold)
        nothing = [[0] * len(unit.points) for unit in problem.units]
        self._live = np.array(live_bytes(problem, nothing), dtype=np.int64)

    def move(self, u: int, k: int | None) -> None:
        """Move a unit to a point or to None; units around or in it are dropped."""
        self._live += self._change(u, k)
        for v in (u, *self.relatives[u]):
            if v == u or k is not None:
                self.choice.pop(v, None)
        if k is not None:
            self.choice[u] = k

    def repair(self) -> bool:
        """Cheapest relief at the peak, until the peak is within the budget."""
        budget = self._problem.budget_bytes
        banned: set[tuple[int, int]] = set()
        for _ in range(_MOVES_PER_UNIT * len(self._units) + 1):
            position = int(self._live.argmax())
            excess = int(self._live[position]) - budget
            if excess <= 0:
                return True
            move = self._best_relief(position, excess, banned)
            if move is None:
                return False
            before = self._violation(self._live)
            if self._violation(self._live + self._change(*move)) < before:
                self.move(*move)
            else:
                banned.add(move)
        return False

    def trim(self) -> None:
        """Recompute less in one unit after the other while the budget allows it."""
        budget = self._problem.budget_bytes
        for u in sorted(self.choice, key=lambda u: (-self._time(u), u)):
            times = [point.recompute_ms for point in self._problem.units[u].points]
            cheaper = [k for k, ms in enumerate(times) if ms < self._time(u)]
            for k in (None, *sorted(cheaper, key=times.__getitem__)):
                if (self._live + self._change(u, k)).max() <= budget:
                    self.move(u, k)
                    break

    def _best_relief(
        self, position: int, excess: int, banned: set[tuple[int, int]]
    ) -> tuple[int, int] | None:
        best: tuple[float, int, int] | None = None
        for u in self._units:
            family = [u, *self.relatives[u]]
            now = sum(self._at(v, self.choice.get(v), position) for v in family)
            now_ms = sum(self._time(v) for v in family)
            for k, point in enumerate(self._problem.units[u].points):
                relief = now - self._at(u, k, position)
                if relief <= 0 or (u, k) in banned or self.choice.get(u) == k:
                    continue
                price = max(0.0, point.recompute_ms - now_ms) / min(relief, excess)
                if best is None or (price, u, k) < best:
                    best = (price, u, k)
        return best and (best[1], best[2])

    def _violation(self, live: npt.NDArray[np.int64]) -> int:
        return int(np.maximum(live - self._problem.budget_bytes, 0).sum())

    def _time(self, u: int) -> float:
        k = self.choice.get(u)
        return 0.0 if k is None else self._problem.units[u].points[k].recompute_ms

    def _at(self, u: int, k: int | None, position: int) -> int:
        """What a unit at a point adds to the live memory at a position."""
        if k is None:
            return 0
        unit = self._problem.units[u]
        added = 0
        if unit.freed_from <= position < unit.freed_until:
            added -= unit.points[k].freed_bytes
        extras = self._working[u].get(position)
        return added if extras is None else added + extras[k]

    def _change(self, u: int, k: int | None) -> npt.NDArray[np.int64]:
        """Change of the live memory if a unit moves to a point."""
        change = np.zeros_like(self._live)
        leaving = (u, *self.relatives[u]) if k is not None else (u,)
        moves = [(v, self.choice[v], -1) for v in leaving if v in self.choice]
        if k is not None:
            moves.append((u, k, 1))
        for v, point, sign in moves:
            unit = self._problem.units[v]
            freed = unit.points[point].freed_bytes
            change[unit.freed_from : unit.freed_until] -= sign * freed
            for position, extras in unit.working:
                change[position] += sign * extras[point]
        left = {v for v, _, sign in moves if sign < 0}
        taken = {v for v, _, sign in moves if sign > 0}
        holds = {id(hold): hold for v in left | taken for hold in self._holds[v]}
        for hold in holds.values():
            before = _held_until(hold, self.choice.keys())
            after = _held_until(hold, (self.choice.keys() - left) | taken)
            change[before:after] += hold.nbytes
            change[after:before] -= hold.nbytes
        return change


def _held_until(hold: Hold, chosen: Set[int]) -> int:
    return max((end for u, end in hold.holders if u in chosen), default=hold.held_from)


def _relatives(problem: SacProblem) -> list[list[int]]:
    """Units around and inside each unit: not to be chosen together with it."""
    found: list[set[int]] = [set() for _ in problem.units]
    for path in problem.paths():
        for i, inner in enumerate(path):
            for outer in path[i + 1 :]:
                found[inner].add(outer)
                found[outer].add(inner)
    return [sorted(relatives) for relatives in found]
