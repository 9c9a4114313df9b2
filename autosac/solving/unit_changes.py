"""What changes in memory over a step if one unit alone is rerun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autosac.simulation.simulator import Simulator
from autosac.solving.shared_storages import Holders
from autosac.step.tape import IntArray
from autosac.units.policies import Policy
from autosac.units.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes of memory under some policies, in the order of policies and keys.

    Attributes:
        policies: Number of the policy of each change,
        keys: when it is (see `autosac.simulation.simulator`),
        deltas: and how many bytes more are alive from then on.
        num_policies: How many policies there are.
        span: Keys per tick.
    """

    policies: IntArray
    keys: IntArray
    deltas: IntArray
    num_policies: int
    span: int

    def by_policy(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Keys and sizes of the changes under each policy."""
        edges = self.policies.searchsorted(np.arange(self.num_policies + 1)).tolist()
        for start, stop in pairwise(edges):
            yield self.keys[start:stop], self.deltas[start:stop]

    def at(
        self, positions: range, live: IntArray, stops: IntArray, base: IntArray
    ) -> IntArray:
        """Change of the most bytes alive by policy and position.

        Args:
            positions: Some of the positions.
            live: Bytes alive after every tick when nothing is recomputed.
            stops: First tick of every position, and the number of ticks.
            base: Most bytes alive at every position when nothing is recomputed.
        """
        # The policies' changes lie one after the other on one axis: ``level[i]`` is
        # what all before the i-th come to, ``others`` what those of policies before do.
        begins = np.arange(self.num_policies) * (len(live) + 2)
        keys = self.keys + begins[self.policies] * self.span
        level = np.concatenate([[0], np.cumsum(self.deltas)])
        others = level[keys.searchsorted(begins * self.span)]
        own_stops = stops[positions.start : positions.stop + 1]
        edges = own_stops + begins[:, None]
        before = keys.searchsorted(edges[:, :-1] * self.span, side="right")
        after = keys.searchsorted(edges[:, 1:] * self.span, side="left")
        change: IntArray = level[before] - others[:, None]
        policy, place = np.nonzero(before != after)
        if not len(place):
            return change
        firsts, lengths = edges[policy, place], np.diff(own_stops)[place]
        starts = np.cumsum(lengths) - lengths
        ticks = np.repeat(firsts - starts, lengths) + np.arange(lengths.sum())
        alive = live[ticks - np.repeat(begins[policy], lengths)]
        alive += level[keys.searchsorted(ticks * self.span, side="right")]
        most = np.maximum.reduceat(alive, starts)
        # Changes between two ticks (a rerun) come on top of the earlier tick.
        tick = keys // self.span
        stretch = firsts.searchsorted(tick, side="right") - 1
        inside = np.flatnonzero((stretch >= 0) & (tick < (firsts + lengths)[stretch]))
        on_top = live[tick[inside] - begins[self.policies[inside]]] + level[inside + 1]
        np.maximum.at(most, stretch[inside], on_top)
        own_base = base[positions.start : positions.stop]
        change[policy, place] = most - others[policy] - own_base[place]
        return change


def changes_of(
    simulator: Simulator, holders: Holders, unit: Unit, policies: Sequence[Policy]
) -> Changes:
    """What changes if a unit is rerun under each of some policies.

    Args:
        simulator: Of the step.
        holders: Who keeps which storage.
        unit: The unit.
        policies: At least one.
    """
    tape, span = simulator.tape, simulator.span
    effects = [simulator.effect(unit, policy) for policy in policies]
    saved = holders.saved_without(unit.saved)
    held = np.concatenate([effect.held for effect in effects])
    storages = np.unique(np.concatenate([held, np.array(list(saved), dtype=np.int64)]))
    freed = tape.freed[storages]
    pairs = zip(storages.tolist(), freed.tolist(), strict=True)
    without = np.array([saved.get(*pair) for pair in pairs], dtype=np.int64)
    before, after = freed * span, np.tile(without * span, (len(effects), 1))
    cells = _numbered([effect.held for effect in effects]), storages.searchsorted(held)
    until = np.concatenate([effect.held_until for effect in effects])
    after[cells] = np.maximum(after[cells], until)
    together = holders.shared.keys() & set(unit.call.inputs)
    changed = (after != before) & ~np.isin(storages, list(together))
    number, column = np.nonzero(changed)
    moved = np.array([before[column], after[number, column], storages[column]]).T
    copies = np.concatenate([effect.copies for effect in effects])
    works = np.concatenate([effect.works for effect in effects])
    pieces = np.concatenate([moved, copies, works])
    number = np.concatenate(
        [
            number,
            _numbered([effect.copies for effect in effects]),
            _numbered([effect.works for effect in effects]),
        ]
    )
    numbers, keys = np.tile(number, 2), pieces[:, :2].T.ravel()
    order, nbytes = np.lexsort((keys, numbers)), simulator.sizes[pieces[:, 2]]
    return Changes(
        policies=numbers[order],
        keys=keys[order],
        deltas=np.concatenate([nbytes, -nbytes])[order],
        num_policies=len(effects),
        span=span,
    )


def _numbered(parts: Sequence[IntArray]) -> IntArray:
    """Number of the part that each item is in, when they lie one after the other."""
    return np.repeat(np.arange(len(parts)), [len(part) for part in parts])
