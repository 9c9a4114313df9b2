"""Memory over time of a step with a plan, from the tape, byte for byte.

Time is a *key*: tick times `_span` plus, for what happens while a unit is rerun,
the place inside the rerun. A rerun takes place between the tick before its unit's
trigger and the trigger itself.

What `torch.utils.checkpoint` (non-reentrant, early stop) does to lifetimes, read
off torch/utils/checkpoint.py of torch 2.15:
    - in a unit's forward nothing is kept for backward but its arguments, and the
      outputs that the policy saves;
    - at the first read of a saved tensor the unit is rerun up to its last saved
      tensor; all saved tensors are then kept until backward has used each;
    - the arguments live until the last saved tensor of the unit is dropped.
Blocks of a chain keep only arguments that come from outside the chain. The others are
made once more at the chain's trigger, just before its last block is rerun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property

import numpy as np

from autosac.devices.allocator_settings import AllocatorSettings, Cap
from autosac.simulation.alike_plays import AlikePlays
from autosac.simulation.allocator_steps import (
    FirstStep,
    HandedOut,
    block_bytes,
    first_step,
    handed_out,
    replay,
)
from autosac.simulation.caching_allocator import CachingAllocator
from autosac.simulation.effects import Effect, Effects
from autosac.simulation.reruns import rows, sizes_of
from autosac.step.ledger import Ledger, Timeline
from autosac.step.tape import CATEGORIES, IntArray, Tape
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_MOST_BLOCKS = 100_000  # of an allocator in several replays: some tenths of a second
_FEWEST_REPLAYS = 4
_MOST_ABOVE = 20_000  # choices known to break a budget, a KiB each
_SLOW = 10  # times as long takes a replay of small requests, too


class Simulator:
    """Replays a tape under plans.

    Args:
        tape: The traced step.
        settings: Of the allocator of a GPU.
        cap: What a budget caps on a GPU: what the allocator hands out, or all that it
            reserves.
        effects: Of the units of this tape, if some are known.
        sizes: Bytes of all that spans may name, if they are not those of the tape: see
            `autosac.simulation.reruns`.

    Attributes:
        num_replayed: How often the allocator was replayed for a true peak.
    """

    def __init__(
        self,
        tape: Tape,
        settings: AllocatorSettings | None = None,
        cap: Cap = "allocated",
        effects: Effects | None = None,
        sizes: IntArray | None = None,
    ) -> None:
        self.tape = tape
        self.settings = settings or AllocatorSettings()
        self.cap = cap
        self.span = tape.num_ticks + 2
        self._effects = effects or Effects(tape, self.span)
        self._allocator_peaks: dict[
            tuple[Cap, frozenset[tuple[Unit, Policy]]], int
        ] = {}
        self._above: dict[frozenset[tuple[Unit, Policy]], int] = {}
        self.num_replayed = 0
        self._born = tape.born * self.span
        self._died = tape.died * self.span
        self._saved_until = tape.saved_until * self.span
        library = [(0, tape.num_ticks) for _ in tape.library_bytes]
        used = [(op.made, op.end) for op in tape.ops if op.workspace_bytes]
        earlier = [(more.begin, more.end) for more in tape.earlier]
        # What libraries and kernels hold for themselves, and what earlier steps do.
        places = [*library, *used, *earlier]
        always = enumerate(places, start=len(tape.storages))
        self._always = rows(((*span, place) for place, span in always), 3)
        self._always[:, :2] *= self.span
        self.sizes = sizes_of(tape) if sizes is None else sizes
        self._nbytes = self.sizes[: len(tape.storages)]
        # Numbers that autograd may keep as CPU tensors, from forward and from rerun:
        # an upper bound, as no fake tensor shows them.
        wrapped = sum(op.wrapped_numbers for op in tape.ops)
        self.number_bytes = 16 * wrapped if tape.device_type == "cpu" else 0

    @cached_property
    def _first_step(self) -> FirstStep:
        return first_step(self.tape, self.span)

    @cached_property
    def _alike_plays(self) -> AlikePlays:
        return AlikePlays(self._first_step, self.settings)

    def timeline(
        self, chosen: Mapping[Unit, Policy], *, workspaces: bool = True
    ) -> Timeline:
        """Live memory of a step in which the chosen units run under policies.

        Args:
            chosen: The AC units.
            workspaces: Count what kernels allocate inside themselves, and what
                libraries keep.
        """
        return self.ledger(chosen, workspaces=workspaces).timeline()

    def ledger(
        self, chosen: Mapping[Unit, Policy], *, workspaces: bool = True
    ) -> Ledger:
        """All that a step allocates in which the chosen units run under policies."""
        effects = self._effects_of(chosen)
        parts = [effect.copies for effect in effects]
        if workspaces:
            parts += [self._always, *(effect.works for effect in effects)]
        added = np.concatenate([rows((), 3), *parts])
        return Ledger(
            born=np.concatenate([self._born, added[:, 0]]),
            died=np.concatenate([self._freed(chosen, effects), added[:, 1]]),
            nbytes=np.concatenate([self._nbytes, self.sizes[added[:, 2]]]),
            end=self.tape.num_ticks * self.span,
            constant_bytes=self.number_bytes if workspaces else 0,
        )

    def capped(self, cap: Cap) -> Simulator:
        """This simulator for budgets that cap something else; shares what it knows."""
        other = copy(self)
        other.cap = cap
        return other

    def replay(
        self,
        chosen: Mapping[Unit, Policy],
        settings: AllocatorSettings | None = None,
    ) -> CachingAllocator:
        """What a GPU's caching allocator does in the first steps of a training.

        Args:
            chosen: The AC units.
            settings: Of the allocator; None for those of the simulator.
        """
        return replay(
            self.ledger(chosen),
            first=self._first_step,
            settings=settings or self.settings,
        )

    def handed_out(
        self, chosen: Mapping[Unit, Policy], most_bytes: int | None = None
    ) -> list[HandedOut]:
        """What a GPU's allocator hands out in the first steps, up to some bytes."""
        return self._handed_out(self.ledger(chosen), most_bytes)

    def _handed_out(self, step: Ledger, most_bytes: int | None) -> list[HandedOut]:
        return handed_out(
            step,
            first=self._first_step,
            settings=self.settings,
            most_bytes=most_bytes,
        )

    def allocator_peak_bytes(self, chosen: Mapping[Unit, Policy], cap: Cap) -> int:
        """Most bytes that a GPU's caching allocator hands out, or reserves."""
        key = cap, frozenset(chosen.items())
        if key not in self._allocator_peaks:
            self.num_replayed += 1
            if cap == "reserved":
                peak_bytes = self.replay(chosen).peak_reserved_bytes
            else:
                peak_bytes = max(step.peak_bytes for step in self.handed_out(chosen))
            self._allocator_peaks[key] = peak_bytes
        return self._allocator_peaks[key]

    def takes_replay(self, chosen: Mapping[Unit, Policy]) -> bool:
        """Whether nobody has asked for a true peak before, which takes a replay."""
        key = frozenset(chosen.items())
        is_known = (self.cap, key) in self._allocator_peaks or key in self._above
        return self.tape.device_type == "cuda" and not is_known

    @property
    def num_storages(self) -> int:
        """What a simulation takes is about proportional to it."""
        return max(1, len(self.tape.storages))

    @property
    def num_blocks(self) -> int:
        """What a replay takes is about proportional to it."""
        return self.num_storages * (_SLOW if self.cap == "reserved" else 1)

    def num_replays(self, most: int) -> int:
        """How many true peaks to ask for: as many as `most`, fewer of a long step."""
        affordable = _MOST_BLOCKS // self.num_blocks
        return max(_FEWEST_REPLAYS, min(most, affordable))

    def true_peak_bytes(self, chosen: Mapping[Unit, Policy]) -> int:
        """Peak of a step as the device counts it, which a budget caps.

        On a GPU that is what the caching allocator hands out, which is a little more
        than is asked of it (`autosac.simulation.caching_allocator`), or what it
        reserves.
        """
        if self.tape.device_type != "cuda":
            return self.peak_bytes(chosen)
        return self.allocator_peak_bytes(chosen, self.cap)

    def fits(self, chosen: Mapping[Unit, Policy], budget_bytes: int) -> bool:
        """Whether the true peak is at most a budget: see `true_peak_bytes`.

        The allocator is replayed until it has handed out more, unless what is known of
        plans with the same large requests says enough.
        """
        key = frozenset(chosen.items())
        is_known = (self.cap, key) in self._allocator_peaks
        if self.tape.device_type != "cuda" or self.cap != "allocated" or is_known:
            return Simulator.true_peak_bytes(self, chosen) <= budget_bytes
        if self._above.get(key, -1) > budget_bytes:
            return False
        step = self.ledger(chosen)
        alike = self._alike_plays.of(step)
        peak_bytes = alike.least_bytes(budget_bytes)
        if peak_bytes <= budget_bytes:
            peak_bytes = step.peak_bytes
        if peak_bytes <= budget_bytes:
            steps = self._handed_out(step, budget_bytes)
            alike.note(steps, budget_bytes)
            self.num_replayed += 1
            peak_bytes = max(played.peak_bytes for played in steps)
        if peak_bytes > budget_bytes:
            if len(self._above) >= _MOST_ABOVE:
                self._above.clear()
            self._above[key] = peak_bytes
            return False
        self._allocator_peaks[self.cap, key] = peak_bytes
        return True

    def true_timeline(self, chosen: Mapping[Unit, Policy]) -> Timeline:
        """Memory of a step as the device counts it: see `true_peak_bytes`.

        What is reserved besides what is handed out counts at each instant alike.
        """
        if self.tape.device_type != "cuda":
            return self.timeline(chosen)
        steps = self.handed_out(chosen)
        keys = np.unique(np.concatenate([step.keys for step in steps]))
        timelines = (Timeline(keys=s.keys, live_bytes=s.nbytes) for s in steps)
        of_steps = [timeline.at(keys) for timeline in timelines]
        peak_bytes = max(step.peak_bytes for step in steps)
        if self.cap == "allocated":
            key = self.cap, frozenset(chosen.items())
            self._allocator_peaks.setdefault(key, peak_bytes)
        added_bytes = self.true_peak_bytes(chosen) - peak_bytes
        return Timeline(keys=keys, live_bytes=np.max(of_steps, axis=0) + added_bytes)

    @cached_property
    def in_blocks(self) -> Simulator:
        """The simulator of this step with each allocation as large as its block.

        Blocks are those of the plain step's replay, so what is alive in it adds up to
        what the allocator hands out. Under a plan a block may turn out a little
        larger or smaller: see `autosac.simulation.usual_blocks`.
        """
        if self.tape.device_type != "cuda":
            return self
        return self.resized(self.block_bytes({}))

    def in_blocks_of(self, chosen: Mapping[Unit, Policy]) -> Simulator:
        """Likewise, with blocks as they are under a plan.

        What is allocated without that plan alone is as large as in the plain step.
        """
        plain, own = self.block_bytes({}), self.block_bytes(chosen)
        return self.resized(np.where(own > 0, own, plain))

    @cached_property
    def requested_bytes(self) -> IntArray:
        """Sizes of all that the plain step allocates.

        Its storages, then what libraries and kernels hold for themselves, and what
        earlier steps take besides.
        """
        return self.sizes[:-1]  # but for the state of random numbers

    def block_bytes(self, chosen: Mapping[Unit, Policy]) -> IntArray:
        """Sizes of the blocks that the allocator gives to all of these under a plan.

        0 for none.
        """
        return self._block_bytes(chosen) if chosen else self._plain_block_bytes

    @cached_property
    def _plain_block_bytes(self) -> IntArray:
        return self._block_bytes({})

    def _block_bytes(self, chosen: Mapping[Unit, Policy]) -> IntArray:
        first_work = len(self.tape.storages)
        sizes = block_bytes(self.ledger(chosen), self._first_step, self.settings)
        num_copies = sum(len(effect.copies) for effect in self._effects_of(chosen))
        works = sizes[first_work + num_copies :][: len(self._always)]
        return np.concatenate([sizes[:first_work], works])

    def resized(self, requested_bytes: IntArray) -> Simulator:
        """The simulator of this step with other sizes of all that it allocates."""
        sizes = np.append(requested_bytes, self.sizes[-1:])
        return Simulator(self.tape, self.settings, self.cap, self._effects, sizes)

    def peak_bytes(
        self, chosen: Mapping[Unit, Policy], *, workspaces: bool = True
    ) -> int:
        """Peak of a step in which the chosen units run under policies."""
        return self.ledger(chosen, workspaces=workspaces).peak_bytes

    @cached_property
    def baseline(self) -> Timeline:
        """Live memory when nothing is recomputed."""
        return self.timeline({})

    def composition(self, chosen: Mapping[Unit, Policy]) -> dict[str, int]:
        """Bytes alive at the peak, per category; rerun results are activations."""
        ledger = self.ledger(chosen)
        alive = ledger.alive(ledger.timeline().peak_key)
        sums = np.zeros(len(CATEGORIES), dtype=np.int64)
        np.add.at(sums, self.categories(chosen)[alive], ledger.nbytes[alive])
        by_category = dict(zip(CATEGORIES, sums.tolist(), strict=True))
        by_category["temporary"] += self.number_bytes
        return by_category

    def categories(self, chosen: Mapping[Unit, Policy]) -> IntArray:
        """Index into `CATEGORIES` of all that `ledger` has, in its order."""
        effects = self._effects_of(chosen)
        copied = sum(len(effect.copies) for effect in effects)
        num_works = len(self._always) + sum(len(effect.works) for effect in effects)
        return np.concatenate(
            [
                self.tape.categories,
                np.full(copied, CATEGORIES.index("activation"), dtype=np.int64),
                np.full(num_works, CATEGORIES.index("workspace"), dtype=np.int64),
            ]
        )

    def effect(self, unit: Unit, policy: Policy) -> Effect:
        """How one unit under one policy changes lifetimes."""
        return self._effects.of(unit, policy)

    def _effects_of(self, chosen: Mapping[Unit, Policy]) -> list[Effect]:
        return [self.effect(unit, policy) for unit, policy in chosen.items()]

    def _freed(
        self, chosen: Mapping[Unit, Policy], effects: Sequence[Effect]
    ) -> IntArray:
        """Key at which each storage is freed."""
        outside = np.ones(len(self._saved_until), dtype=bool)
        for unit in chosen:
            outside[unit.saved.start : unit.saved.stop] = False
        freed: IntArray = self._died.copy()
        until = self._saved_until[outside]
        np.maximum.at(freed, self.tape.saved_storage[outside], until)
        if effects:
            held = np.concatenate([effect.held for effect in effects])
            held_until = np.concatenate([effect.held_until for effect in effects])
            np.maximum.at(freed, held, held_until)
        return freed
