"""The MILP over AC units whose points may be mixed with their neighbours, in PuLP.

For fitted curves, and for the lines of module statistics (PyTorch's `sac_milp`); whole
points are in `sac/counts.py`. y_u = 1 if unit u is under AC, z_uk the weight of point k
of its curve:

minimize    sum_uk t_uk z_uk                        recompute time [ms]
subject to  sum_k z_uk = y_u                        for every unit             (1)
            sum_u y_u <= 1                          on a path: no nesting      (2)
            z_uk <= w_u,k-1 + w_uk                  neighbours only            (3)
            D_q = D_q-1 + sum_k m_uk z_uk           u starts at q; - ends      (4)
            B_q - D_q + sum_uk x_uqk z_uk <= P      at every position q        (5)
            h_j >= h_j+1, h_j >= y_u                u holds until e_j or later (6)
            h_j >= y_u + sum_vk z_vk - 1            vk free it, u holds it     (7)
            h_j <= sum_vk z_vk, h_j <= sum_u y_u    vk keep it, u holds it     (8)

with m freed bytes, x working sets, B live memory without AC and P the budget. (3) is
there only if a unit's curve is not convex: w_us = 1 for the segment in use. h_j = 1 if
what some units hold together is alive between its ends e_j-1 and e_j; (4) takes it out
of D from its first position on and puts it back end by end. (7) instead of (6) is for
holds with `freed_by`, (8) for those with `kept_by`, which are added to D; one h_j for
every stretch. Bytes are in MiB.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pulp

from ..curves.curve import is_convex
from ..milp import pulp_models
from .problem import Hold, SacProblem, Unit

_MIB = 2**20  # coefficients of (4) and (5) in MiB stay within row tolerances
_LARGEST_TIME = 2.0**10  # of the scaled times: their sums stay above tolerances


_Terms = list[tuple[pulp.LpVariable, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of (5) that can bind."""

    position: int
    base_bytes: int


class SacModel:
    """The model of a problem and the way back from its variables.

    Attributes:
        model: The PuLP model.
        units: Indices of the units that may be chosen.
        time_scale: Objective of the model per millisecond.
    """

    def __init__(
        self,
        problem: SacProblem,
        *,
        units: Collection[int],
    ) -> None:
        self.model = pulp_models.Model("sac")
        self._problem = problem
        self.units = sorted(units)
        longest = max(
            (p.recompute_ms for u in self.units for p in problem.units[u].points),
            default=0.0,
        )
        exponent = math.frexp(_LARGEST_TIME / longest)[1] if longest else 0
        self.time_scale = math.ldexp(1.0, exponent)
        self._add_weights()
        self._add_no_nesting()
        self._add_memory()
        times = (
            (z, point.recompute_ms * self.time_scale)
            for u in self.units
            for z, point in zip(self._z[u], problem.units[u].points, strict=True)
        )
        self.model.setObjective(pulp_models.row(times))

    def weights(self) -> list[list[float]]:
        """Weights of the points of all units of the problem, by the variables."""
        weights = [[0.0] * len(unit.points) for unit in self._problem.units]
        for u in self.units:
            weights[u] = [min(1.0, max(0.0, z.varValue or 0.0)) for z in self._z[u]]
        return weights

    def _add_weights(self) -> None:
        """Row (1), and (3) where a curve needs it."""
        add = self.model.add_variable
        self._y: dict[int, pulp.LpVariable] = {}
        self._z: dict[int, list[pulp.LpVariable]] = {}
        convex = convex_units(self._problem)
        for u in self.units:
            unit = self._problem.units[u]
            self._y[u] = add(f"y_{u:05d}", 0, 1, pulp.LpInteger)
            self._z[u] = [
                add(f"z_{u:05d}_{k:03d}", 0, 1) for k in range(len(unit.points))
            ]
            terms = [(z, 1.0) for z in self._z[u]]
            self.model += pulp_models.row([*terms, (self._y[u], -1.0)]) == 0
            if u not in convex:
                self._add_segments(u)

    def _add_segments(self, u: int) -> None:
        """Row (3)."""
        points = self._z[u]
        segments = [
            self.model.add_variable(f"w_{u:05d}_{s:03d}", 0, 1, pulp.LpInteger)
            for s in range(len(points) - 1)
        ]
        total = [(w, 1.0) for w in segments]
        self.model += pulp_models.row([*total, (self._y[u], -1.0)]) == 0
        for k, z in enumerate(points):
            around = [(w, -1.0) for w in segments[max(k - 1, 0) : k + 1]]
            self.model += pulp_models.row([(z, 1.0), *around]) <= 0

    def _add_no_nesting(self) -> None:
        """Row (2)."""
        seen = set()
        for path in self._problem.paths():
            chosen = tuple(u for u in path if u in self._y)
            if len(chosen) > 1 and chosen not in seen:
                seen.add(chosen)
                self.model += pulp_models.row((self._y[u], 1.0) for u in chosen) <= 1

    def _add_memory(self) -> None:
        """Rows (4) and (5), left out where they cannot bind."""
        working = self._working()
        events = self._events()
        freed: pulp.LpVariable | None = None
        pending: dict[pulp.LpVariable, float] = defaultdict(float)
        positions = iter(sorted(events))
        upcoming = next(positions, None)
        for row in _binding_rows(self._problem, self.units):
            while upcoming is not None and upcoming <= row.position:
                for variable, coefficient in events[upcoming]:
                    pending[variable] += coefficient
                upcoming = next(positions, None)
            changes = [
                (v, coefficient) for v, coefficient in pending.items() if coefficient
            ]
            pending.clear()
            if changes:
                freed = self._add_link(freed, changes, row.position)  # (4)
            terms = [
                (z, extra / _MIB)
                for u, extras in working.get(row.position, ())
                for z, extra in zip(self._z[u], extras, strict=True)
                if extra
            ]
            if freed is not None:
                terms.append((freed, -1.0))
            spare_bytes = self._problem.budget_bytes - row.base_bytes
            self.model += pulp_models.row(terms) <= spare_bytes / _MIB  # (5)

    def _add_link(
        self, before: pulp.LpVariable | None, terms: _Terms, position: int
    ) -> pulp.LpVariable:
        freed = self.model.add_variable(f"d_{position:06d}")
        links = [(freed, -1.0), *terms]
        if before is not None:
            links.append((before, 1.0))
        self.model += pulp_models.row(links) == 0
        return freed

    def _working(self) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
        working: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        for u in self.units:
            for position, extras in self._problem.units[u].working:
                working[position].append((u, extras))
        return working

    def _events(self) -> dict[int, _Terms]:
        """Terms in MiB by which the freed memory D of (4) changes at each position."""
        events: dict[int, _Terms] = defaultdict(list)
        for u in self.units:
            unit = self._problem.units[u]
            if unit.freed_from < unit.freed_until:
                for z, point in zip(self._z[u], unit.points, strict=True):
                    events[unit.freed_from].append((z, point.freed_bytes / _MIB))
                    events[unit.freed_until].append((z, -point.freed_bytes / _MIB))
        for index, hold in enumerate(self._problem.holds):
            if hold.freed_by:
                self._add_freed(index, hold, events)
            elif hold.kept_by:
                self._add_kept(index, hold, events)
            else:
                self._add_hold(index, hold, events)
        return events

    def _add_freed(self, index: int, hold: Hold, events: dict[int, _Terms]) -> None:
        """Rows (7) of what units hold that others free, and when it is alive."""
        size = hold.nbytes / _MIB
        for start, stop in hold.stretches():
            freeing = [
                (z, -1.0)
                for u, froms in hold.freed_by
                for z, first in zip(self._z.get(u, ()), froms, strict=False)
                if first <= start
            ]
            ends = {u: end for u, end in hold.holders if u in self._y and end > start}
            if not freeing or not ends:
                continue
            held = self.model.add_variable(f"f_{index:05d}_{start:06d}", 0, 1)
            for u in ends:
                taken = [
                    (self._y[v], -1.0) for v in self._problem.ancestry(u) if v in ends
                ]
                self.model += pulp_models.row([(held, 1.0), *taken, *freeing]) >= -1
            events[start].append((held, -size))
            events[stop].append((held, size))

    def _add_kept(self, index: int, hold: Hold, events: dict[int, _Terms]) -> None:
        """Rows (8) of what units hold that others keep, and when it counts."""
        size = hold.nbytes / _MIB
        for start, stop in hold.stretches():
            keeping = [
                (z, -1.0)
                for u, untils in hold.kept_by
                for z, until in zip(self._z.get(u, ()), untils, strict=False)
                if until > start
            ]
            ends = {u: end for u, end in hold.holders if u in self._y and end > start}
            if not keeping or not ends:
                continue
            both = self.model.add_variable(f"k_{index:05d}_{start:06d}", 0, 1)
            taken = [(self._y[u], -1.0) for u in ends]
            self.model += pulp_models.row([(both, 1.0), *keeping]) <= 0
            self.model += pulp_models.row([(both, 1.0), *taken]) <= 0
            events[start].append((both, size))
            events[stop].append((both, -size))

    def _add_hold(self, index: int, hold: Hold, events: dict[int, _Terms]) -> None:
        """Rows (6) of what units hold together, and when it is alive."""
        size = hold.nbytes / _MIB
        ends = {u: end for u, end in hold.holders if u in self._y}
        later: pulp.LpVariable | None = None
        for end in sorted(set(ends.values()), reverse=True):
            held = self.model.add_variable(f"h_{index:05d}_{end:06d}", 0, 1)
            own = [u for u in ends if ends[u] == end]
            for u in own:
                # At most one of these is chosen: a tighter row than one for each.
                nested = [
                    v for v in self._problem.ancestry(u) if ends.get(v, -1) >= end
                ]
                taken = [(self._y[v], -1.0) for v in nested]
                self.model += pulp_models.row([(held, 1.0), *taken]) >= 0
            events[end].append((held, size))
            if later is not None:
                self.model += pulp_models.row([(held, 1.0), (later, -1.0)]) >= 0
                events[end].append((later, -size))
            later = held
        if later is not None:
            events[hold.held_from].append((later, -size))


def convex_units(problem: SacProblem) -> frozenset[int]:
    """Units of which mixing far points never beats mixing neighbours.

    So it is if time and all working sets are convex in the freed bytes, and no hold
    depends on which of the points is mixed; and if there is but one.
    """
    in_holds = {u for h in problem.holds for u, _ in (*h.freed_by, *h.kept_by)}
    return frozenset(
        u
        for u, unit in enumerate(problem.units)
        if len(unit.points) == 1 or (u not in in_holds and _bends_upwards(unit))
    )


def _bends_upwards(unit: Unit) -> bool:
    freed = [point.freed_bytes for point in unit.points]
    if any(freed[k] >= freed[k + 1] for k in range(len(freed) - 1)):
        return False
    curves = [[point.recompute_ms for point in unit.points]]
    curves += [list(extras) for _, extras in unit.working]
    return all(is_convex(freed, values) for values in curves)


def least_live_bytes(problem: SacProblem, units: Sequence[int]) -> list[int]:
    """What the live memory at each position cannot go below, whatever is chosen."""
    return _ranges(problem, units)[0]


def _binding_rows(problem: SacProblem, units: Sequence[int]) -> Iterator[_Row]:
    """Positions whose row can bind: of each stretch without changes, the highest.

    A row cannot bind if its live memory stays within the budget whatever is chosen.
    """
    _, high, plain, edges = _ranges(problem, units)
    best: int | None = None
    for q, base in enumerate(problem.base_bytes):
        if q in edges and best is not None:
            yield _Row(position=best, base_bytes=problem.base_bytes[best])
            best = None
        if high[q] <= problem.budget_bytes:
            continue
        if not plain[q]:
            yield _Row(position=q, base_bytes=base)
        elif best is None or base > problem.base_bytes[best]:
            best = q
    if best is not None:
        yield _Row(position=best, base_bytes=problem.base_bytes[best])


def _ranges(
    problem: SacProblem, units: Sequence[int]
) -> tuple[list[int], list[int], list[bool], set[int]]:
    """Least and most live memory at each position, whatever is chosen; whether no
    working set lies there; and where the freed memory changes."""
    size = len(problem.base_bytes)
    falls, rises = [0] * (size + 1), [0] * (size + 1)
    low_extra, high_extra = [0] * size, [0] * size
    plain = [True] * size
    edges = set()
    for u in units:
        unit = problem.units[u]
        if unit.freed_from < unit.freed_until:
            edges |= {unit.freed_from, unit.freed_until}
            most = max(0, *(point.freed_bytes for point in unit.points))
            least = min(0, *(point.freed_bytes for point in unit.points))
            for changes, value in ((falls, most), (rises, least)):
                changes[unit.freed_from] -= value
                changes[unit.freed_until] += value
        for position, extras in unit.working:
            plain[position] = False
            low_extra[position] += min(0, *extras)
            high_extra[position] += max(0, *extras)
    chosen = set(units)
    for hold in problem.holds:
        ends = {end for u, end in hold.holders if u in chosen}
        if ends:
            edges |= {hold.held_from, *ends}
            by_point = hold.freed_by or hold.kept_by
            edges |= {bound for _, bounds in by_point for bound in bounds}
            changes = falls if hold.kept_by else rises
            changes[hold.held_from] += hold.added_bytes
            changes[max(ends)] -= hold.added_bytes
    base = problem.base_bytes
    lowest = zip(base, accumulate(falls[:-1]), low_extra, strict=True)
    highest = zip(base, accumulate(rises[:-1]), high_extra, strict=True)
    low = [b + moved + extra for b, moved, extra in lowest]
    high = [b + moved + extra for b, moved, extra in highest]
    return low, high, plain, edges
