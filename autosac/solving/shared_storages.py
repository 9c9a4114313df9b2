"""Storages that more than one candidate unit keeps alive, as the MILP's holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from autosac.simulation.simulator import Simulator
from autosac.solvers import sac
from autosac.step.tape import IntArray
from autosac.units.curves import UnitCurve
from autosac.units.unit import Unit

_Ends = tuple[tuple[int, int], ...]  # units, and ticks until which they hold
_ByPoint = tuple[tuple[int, tuple[int, ...]], ...]  # units, and a tick for each point


class Holders:
    """Who keeps a storage alive, besides one unit, in blocks of any size.

    Attributes:
        freed: Tick at which each is freed in the plain step.
        shared: Arguments of several units that can be chosen together, with the units
            that hold each of them longer than the plain step does, and until when.
            Such a storage is there but once: no unit alone is charged for it.
        kept: Arguments that a unit holds although another one, chosen alone, would
            free them: with those that hold, and those that free by point.
        twice: Results that a unit keeps by some of its points although the plain step
            frees them earlier, and that other units hold as arguments: both are charged
            for them. With those that hold, and those that keep by point.
    """

    def __init__(
        self, simulator: Simulator, units: Sequence[Unit], curves: Sequence[UnitCurve]
    ) -> None:
        tape = simulator.tape
        self.freed: list[int] = tape.freed.tolist()
        self.saves: dict[int, list[int]] = defaultdict(list)
        for i, saved in enumerate(tape.saved):
            self.saves[saved.storage].append(i)
        self.until: list[int] = tape.saved_until.tolist()
        self.died: list[int] = tape.died.tolist()
        self._storages: list[int] = tape.saved_storage.tolist()
        self._without: dict[range, dict[int, int]] = {}
        takers: dict[int, list[int]] = defaultdict(list)
        for u, unit in enumerate(units):  # in the order of entering
            for storage in unit.call.inputs:
                takers[storage].append(u)
        self.shared: dict[int, _Ends] = {}
        for storage, taking in takers.items():
            first_exit = min(units[u].call.exit for u in taking)
            if any(units[u].call.enter > first_exit for u in taking):
                held = [(u, units[u].held_until(storage)) for u in taking]
                self.shared[storage] = tuple(
                    (u, until) for u, until in held if until > self.freed[storage]
                )
        self.kept = self._find_kept(simulator, units, curves, takers)
        self.twice = self._find_twice(simulator, units, curves, takers)

    def cuts(self) -> set[int]:
        """Ticks at which a shared storage is freed, in the plain step or by a unit."""
        ticks: set[int] = set()
        for storage, held in self.shared.items():
            if held:
                ticks |= {self.freed[storage], *(until for _, until in held)}
        for held, freeing in self.kept.values():
            ticks |= {until for _, until in held}
            ticks |= {tick for _, froms in freeing for tick in froms}
        for storage, (held, keeping) in self.twice.items():
            ticks |= {self.freed[storage], *(until for _, until in held)}
            ticks |= {tick for _, untils in keeping for tick in untils}
        return ticks

    def holds(self, edges: IntArray, nbytes: IntArray) -> tuple[sac.Hold, ...]:
        """What units hold together; storages that live alike are added up.

        Args:
            edges: First tick of every position.
            nbytes: Size of each storage.
        """
        size_of: list[int] = nbytes.tolist()
        sizes: dict[tuple[int, _Ends, _ByPoint, _ByPoint], int] = defaultdict(int)
        for storage, held in self.shared.items():
            if held:
                sizes[self.freed[storage], held, (), ()] += size_of[storage]
        for storage, (held, freeing) in self.kept.items():
            first = min(tick for _, froms in freeing for tick in froms)
            sizes[first, held, freeing, ()] += size_of[storage]
        for storage, (held, keeping) in self.twice.items():
            sizes[self.freed[storage], held, (), keeping] += size_of[storage]

        def place(tick: int) -> int:
            return int(np.searchsorted(edges, tick))

        def place_all(by_point: _ByPoint) -> _ByPoint:
            return tuple((u, tuple(map(place, ticks))) for u, ticks in by_point)

        return tuple(
            sac.Hold(
                nbytes=all_bytes,
                held_from=place(first),
                holders=tuple((u, place(until)) for u, until in held),
                freed_by=place_all(freeing),
                kept_by=place_all(keeping),
            )
            for (first, held, freeing, keeping), all_bytes in sizes.items()
        )

    def saved_without(self, own: range) -> dict[int, int]:
        """Storages that ``own`` saves -> tick at which each is freed if it does not."""
        freed_at = self._without.get(own)
        if freed_at is None:
            freed_at = {}
            for storage in {self._storages[i] for i in own}:
                others = (self.until[i] for i in self.saves[storage] if i not in own)
                freed_at[storage] = max(self.died[storage], max(others, default=0))
            self._without[own] = freed_at
        return freed_at

    def _find_kept(
        self,
        simulator: Simulator,
        units: Sequence[Unit],
        curves: Sequence[UnitCurve],
        takers: dict[int, list[int]],
    ) -> dict[int, tuple[_Ends, _ByPoint]]:
        """Storages that a unit saves last, and so would free, and others hold.

        All units that save a storage last have that save in common: they lie in one
        another, and at most one of them is chosen.
        """
        held: dict[int, dict[int, int]] = defaultdict(dict)
        freeing: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        for u, (unit, curve) in enumerate(zip(units, curves, strict=True)):
            without = self.saved_without(unit.saved)
            for storage in sorted(
                without.keys() & takers.keys() - set(unit.call.inputs)
            ):
                freed = self.freed[storage]
                first = without[storage]
                if first >= freed:
                    continue
                ends = {
                    v: min(freed, units[v].held_until(storage))
                    for v in takers[storage]
                    if unit.is_apart_from(units[v])
                }
                ends = {v: until for v, until in ends.items() if until > first}
                if not ends:
                    continue
                froms = self._freed_from(simulator, unit, curve, storage, first)
                if min(froms) < max(ends.values()):
                    freeing[storage].append((u, froms))
                    held[storage] |= ends
        return {
            storage: (tuple(sorted(held[storage].items())), tuple(entries))
            for storage, entries in freeing.items()
        }

    def _find_twice(
        self,
        simulator: Simulator,
        units: Sequence[Unit],
        curves: Sequence[UnitCurve],
        takers: dict[int, list[int]],
    ) -> dict[int, tuple[_Ends, _ByPoint]]:
        """Results that points of a unit keep longer than the plain step does.

        Others hold them as arguments. All units that keep one make it: they lie in one
        another.
        """
        held: dict[int, dict[int, int]] = defaultdict(dict)
        keeping: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        kept_untils: dict[Hashable, list[dict[int, int]]] = {}
        for u, (unit, curve) in enumerate(zip(units, curves, strict=True)):
            results = [s for group in unit.groups for s in group.storages]
            for place, storage in enumerate(results):
                if storage not in takers or storage in unit.call.inputs:
                    continue
                freed = self.freed[storage]
                ends = {
                    v: until
                    for v in takers[storage]
                    if unit.is_apart_from(units[v])
                    and (until := units[v].held_until(storage)) > freed
                }
                if not ends:
                    continue
                like = (unit.key, unit.last_use - unit.trigger, len(results))
                if like not in kept_untils:
                    kept_untils[like] = _kept_until(simulator, unit, curve, results)
                untils = tuple(
                    max(freed, unit.trigger + ticks[place]) if place in ticks else freed
                    for ticks in kept_untils[like]
                )
                if max(untils) > freed:
                    keeping[storage].append((u, untils))
                    held[storage] |= ends
        return {
            storage: (tuple(sorted(held[storage].items())), tuple(entries))
            for storage, entries in keeping.items()
        }

    def _freed_from(
        self,
        simulator: Simulator,
        unit: Unit,
        curve: UnitCurve,
        storage: int,
        without: int,
    ) -> tuple[int, ...]:
        """Tick at which a unit alone frees a storage, by point of its curve.

        Args:
            without: That tick if the unit saves nothing.
        """
        ticks = []
        for policy in curve.policies:
            effect = simulator.effect(unit, policy)
            own = effect.held_until[effect.held == storage]
            held = -(-int(own.max(initial=0)) // simulator.span)
            ticks.append(min(max(without, held), self.freed[storage]))
        return tuple(ticks)


def _kept_until(
    simulator: Simulator, unit: Unit, curve: UnitCurve, results: Sequence[int]
) -> list[dict[int, int]]:
    """By point of a curve: place among a unit's results -> tick until which it is kept.

    Ticks are counted from the rerun, so that they are those of all units alike.
    """
    places = {storage: place for place, storage in enumerate(results)}
    by_point = []
    for policy in curve.policies:
        effect = simulator.effect(unit, policy)
        kept = zip(effect.held.tolist(), effect.held_until.tolist(), strict=True)
        by_point.append(
            {
                places[storage]: -(-until // simulator.span) - unit.trigger
                for storage, until in kept
                if storage in places
            }
        )
    return by_point
