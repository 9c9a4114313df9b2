"""What the caching allocator does in the first steps of a training.

The first step differs from those that follow: the optimizer has no state yet. It makes
it in the first ``optimizer.step()``, when all that forward and backward used lies free
in the cache. Tensors of state come to lie in segments that the next forward would have
used whole, and it must reserve new ones. Gradients that are kept from step to step do
the same in the first backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autosac.devices.allocator_settings import AllocatorSettings
from autosac.simulation.caching_allocator import (
    SMALL_BYTES,
    CachingAllocator,
    small_block_bytes,
)
from autosac.simulation.large_blocks import LargeBlocks
from autosac.step.ledger import Ledger
from autosac.step.tape import IntArray, Op, Tape

_DEFAULT = AllocatorSettings()
_MOST_STEPS = 8  # a bound on work: none was seen to need more than five
_PIECES = 16  # of a step, after each of which its peak may be known to be too high:
_FEWEST_EVENTS = 48  # of each


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """How the first step of a training differs from a steady one.

    Attributes:
        state_born: Entry of the optimizer's state -> instant at which it is made.
        gradient_born: Likewise of gradients that are kept from step to step.
        absent: Entries that it does not have: what is added to such gradients, which
            is the gradient itself there.
    """

    state_born: dict[int, int] = field(default_factory=dict)
    gradient_born: dict[int, int] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()


def first_step(tape: Tape, span: int) -> FirstStep:
    """The first step of a training, read off a steady one.

    Optimizers make the state of all parameters that they step on at once before their
    first kernel on any of it. What no op touches is taken to be there from the start.

    Args:
        tape: The steady step.
        span: Instants per tick.
    """
    storages = tape.storages
    before = [s.category if s.born <= 0 else "" for s in storages]
    state_born: dict[int, int] = {}
    gradient_born: dict[int, int] = {}
    absent = set()
    for run in _optimizer_runs(tape):
        touched = [
            {s for s in (*op.reads, *op.writes) if before[s] == "optimizer"}
            - state_born.keys()
            for op in run
        ]
        start = next((op.start for op, new in zip(run, touched, strict=True) if new), 0)
        state_born |= dict.fromkeys(set().union(*touched), start * span)
    for op in tape.ops:
        if op.phase != "backward":
            continue
        for gradient in op.writes:
            if before[gradient] == "gradient" and gradient not in gradient_born:
                added = [s for s in op.reads if s != gradient and storages[s].born > 0]
                alike = [
                    s for s in added if storages[s].nbytes == storages[gradient].nbytes
                ]
                absent |= set(alike[:1])
                born = storages[alike[0]].born if alike else op.start
                gradient_born[gradient] = born * span
    return FirstStep(
        state_born=state_born,
        gradient_born=gradient_born,
        absent=frozenset(absent),
    )


def _optimizer_runs(tape: Tape) -> Iterable[list[Op]]:
    """Ops of each call of an optimizer: of one, or of each that steps in backward."""
    run: list[Op] = []
    for op in tape.ops:
        if op.phase == "optimizer":
            run.append(op)
        elif run:
            yield run
            run = []
    if run:
        yield run


def block_bytes(
    step: Ledger, first: FirstStep | None, settings: AllocatorSettings
) -> IntArray:
    """Size of the block that each allocation of a step gets in the end; 0 for none."""
    blocks = _Requests(step.nbytes.tolist(), CachingAllocator(settings=settings))
    none_small = np.zeros_like(step.nbytes)
    _play(step, first, settings, blocks, none_small, len(step.nbytes))
    return np.array(blocks.sizes, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class HandedOut:
    """Size of all blocks in use during a step.

    Attributes:
        keys: Instants at which it changes, ascending, each once.
        nbytes: Bytes after all that happens at each.
        between_steps: Bytes when the next batch is there and the gradients are too.
    """

    keys: IntArray
    nbytes: IntArray
    between_steps: int

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at one instant."""
        return max(int(self.nbytes.max()), self.between_steps)


def handed_out(
    step: Ledger,
    *,
    first: FirstStep | None = None,
    settings: AllocatorSettings = _DEFAULT,
    gone: IntArray | None = None,
    most_bytes: int | None = None,
) -> list[HandedOut]:
    """What the allocator hands out in the first steps of a training.

    As `replay` finds it, in less time: small requests have segments of their own, in
    which a block is as large as the request, rounded up, so that they add up. Only
    large ones are replayed, until a step reserves nothing more for them.

    Args:
        step: As `replay`.
        first: As `replay`.
        settings: Of the allocator and the program.
        gone: Sizes of what was there before, and left free blocks.
        most_bytes: Ends in the midst of the first step whose peak is higher: a bound.
    """
    nbytes = _with_gone(step, gone)
    small_bytes = small_blocks(step.nbytes, settings)
    blocks: _Blocks
    if replace(settings, state_is_loaded=False) == _DEFAULT:
        blocks = LargeBlocks.of(nbytes)
    else:
        blocks = _Requests(nbytes.tolist(), CachingAllocator(settings=settings))
    return _play(step, first, settings, blocks, small_bytes, len(nbytes), most_bytes)


def small_blocks(nbytes: IntArray, settings: AllocatorSettings) -> IntArray:
    """Sizes of the blocks of requests that are small and add up; 0 for others."""
    if settings.garbage_collection_threshold is not None:
        return np.zeros_like(nbytes)  # what goes depends on all that is reserved
    return small_block_bytes(nbytes)


def _with_gone(step: Ledger, gone: IntArray | None) -> IntArray:
    """Sizes of requests: those of a step, then large ones that were there before."""
    return (
        step.nbytes
        if gone is None
        else np.append(step.nbytes, gone[gone > SMALL_BYTES])
    )


def replay(
    step: Ledger,
    *,
    first: FirstStep | None = None,
    settings: AllocatorSettings = _DEFAULT,
    capacity_bytes: int | None = None,
    steps: list[HandedOut] | None = None,
    gone: IntArray | None = None,
) -> CachingAllocator:
    """What the allocator does in the first steps of a training.

    What is there before the first step is allocated first. A step begins with what
    the one before left, holes included. They are replayed until one reserves nothing
    more, which is the second or third one as a rule.

    Args:
        step: The allocations of a steady one.
        first: How the first one differs; None for not at all.
        settings: Of the allocator and the program.
        capacity_bytes: Most that can be reserved; None for no limit.
        steps: Takes what is handed out during each step.
        gone: Sizes of what was there before, and left free blocks.

    Returns:
        The allocator after the last step.

    Raises:
        OutOfMemory: The steps do not fit the capacity.
    """
    allocator = CachingAllocator(capacity_bytes, settings)
    nbytes = _with_gone(step, gone)
    blocks = _Requests(nbytes.tolist(), allocator)
    none_small = np.zeros_like(step.nbytes)
    played = _play(step, first, settings, blocks, none_small, len(nbytes))
    if steps is not None:
        steps += played
    return allocator


class _Blocks(Protocol):
    """An allocator that plays events of numbered requests: see `LargeBlocks`."""

    @property
    def reserved_bytes(self) -> int:
        """The most that was reserved at once."""

    def play(self, events: IntArray) -> IntArray:
        """Give a block to each request i among the events, take it from each ~i.

        Returns:
            Bytes that each event adds to what is in use.
        """


@dataclass(slots=True)
class _Requests:
    """Plays events of numbered requests on any allocator, as `_Blocks`.

    Attributes:
        nbytes: Size of each request.
        allocator: Serves them.
        addresses: As `_Blocks`.
        sizes: Of each request's last block; 0 for none.
    """

    nbytes: list[int]
    allocator: CachingAllocator
    addresses: list[int] = field(init=False)
    sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.addresses = [-1] * len(self.nbytes)
        self.sizes = [0] * len(self.nbytes)

    @property
    def reserved_bytes(self) -> int:
        return self.allocator.peak_reserved_bytes

    def play(self, events: IntArray) -> IntArray:
        changes = []
        for event in events.tolist():
            if event >= 0:
                address = self.allocator.allocate(self.nbytes[event])
                self.addresses[event] = address
                self.sizes[event] = self.allocator.block_size(address)
                changes.append(self.sizes[event])
            else:
                self.allocator.free(self.addresses[~event])
                self.addresses[~event] = -1
                changes.append(-self.sizes[~event])
        return np.array(changes, dtype=np.int64)


def _play(
    step: Ledger,
    first: FirstStep | None,
    settings: AllocatorSettings,
    blocks: _Blocks,
    small_bytes: IntArray,
    num_requests: int,
    most_bytes: int | None = None,
) -> list[HandedOut]:
    """Play steps until one reserves nothing more: see `replay`.

    Args:
        step: The allocations of a steady one.
        first: How the first one differs; None for not at all.
        settings: When there is state before the first one.
        blocks: What gives blocks to those that are not small.
        small_bytes: Sizes of the blocks of those that are, which add up; 0 for others.
        num_requests: Those of the step, and behind them what was there before.
        most_bytes: As `handed_out`.
    """
    before = np.arange(len(step.nbytes), num_requests)
    is_old = (step.nbytes > 0) & (step.died > step.born) & (step.born <= 0)
    born = {} if first is None else _born(first, settings)
    later = list(born)
    is_first = is_old.copy()
    is_first[later] = False
    old, at_start = (np.flatnonzero(a & (small_bytes == 0)) for a in (is_old, is_first))
    small_at_start = int(small_bytes[is_old].sum())
    small = int(small_bytes[is_first].sum())
    blocks.play(np.concatenate([before, ~before]))
    large = int(blocks.play(at_start).sum())
    first_step = step if first is None else as_first(step, first, settings)
    events = _events(first_step, small_bytes)
    steps: list[HandedOut] = []
    for number in range(_MOST_STEPS):
        if number == 1 and first_step is not step:
            events = _events(step, small_bytes)
        reserved_bytes = blocks.reserved_bytes
        changes = events.changes.copy()
        changes[0] = large + small
        if not _play_events(blocks, events, changes, most_bytes):
            return [*steps, _as_far_as_played(events, changes)]
        played = changes[events.places]
        # The next batch comes before the gradients of this one go.
        missing = old[np.isin(~old, events.numbers)]
        large += int(played.sum()) + int(blocks.play(missing).sum())
        small = int(small_bytes[is_old | events.stays].sum())
        steps.append(
            HandedOut(
                keys=events.times[events.is_last],
                nbytes=np.cumsum(changes)[events.is_last],
                between_steps=large + small,
            )
        )
        left = np.flatnonzero(events.stays & (small_bytes == 0) & ~is_old)
        large += int(blocks.play(~left).sum())
        small = small_at_start
        if number and blocks.reserved_bytes == reserved_bytes:
            break
        if most_bytes is not None and steps[-1].peak_bytes > most_bytes:
            break
    return steps


def _play_events(
    blocks: _Blocks, events: _Events, changes: IntArray, most_bytes: int | None
) -> bool:
    """Play the events of a step, and note what each adds to what is in use.

    Args:
        blocks: As `_play`.
        events: Those of the step.
        changes: Takes what they add, 0 from where the step ends too early.
        most_bytes: As `handed_out`.

    Returns:
        Whether all were played.
    """
    num_events = len(events.numbers)
    length = max(_FEWEST_EVENTS, -(-num_events // _PIECES))
    in_use = done = 0
    for start in range(0, num_events, length):
        places = events.places[start : start + length]
        changes[places] = blocks.play(events.numbers[start : start + length])
        if most_bytes is None or start + length >= num_events:
            continue
        until = int(events.places[start + length])
        sums = np.cumsum(changes[done:until]) + in_use
        if int(sums.max()) > most_bytes:
            changes[until:] = 0
            return False
        in_use, done = int(sums[-1]), until
    return True


def _as_far_as_played(events: _Events, changes: IntArray) -> HandedOut:
    """What is handed out in a step that ended too early."""
    return HandedOut(keys=events.times, nbytes=np.cumsum(changes), between_steps=0)


def _born(first: FirstStep, settings: AllocatorSettings) -> dict[int, int]:
    """What the first step makes that is there when the others begin, and when."""
    if settings.state_is_loaded:
        return first.gradient_born
    return {**first.gradient_born, **first.state_born}


def as_first(step: Ledger, first: FirstStep, settings: AllocatorSettings) -> Ledger:
    """The allocations of a first step, in which some entries are born later."""
    born = _born(first, settings)
    if not born:
        return step
    births, nbytes = step.born.copy(), step.nbytes
    births[list(born)] = list(born.values())
    if first.absent:
        nbytes = nbytes.copy()
        nbytes[list(first.absent)] = 0
    return replace(step, born=births, nbytes=nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Events:
    """Births and deaths in a step; at the same time deaths come first.

    Attributes:
        times: Instants, the first one that of the beginning, shape (n,).
        is_last: Whether nothing else happens at the same one, likewise.
        changes: Bytes that each adds to the small blocks in use, likewise.
        numbers: Those of the other blocks, as `_Blocks.play` takes them,
        places: and which of the n they are.
        stays: What is born and does not die, by entry of the step.
    """

    times: IntArray
    is_last: npt.NDArray[np.bool_]
    changes: IntArray
    numbers: IntArray
    places: IntArray
    stays: npt.NDArray[np.bool_]


def _events(step: Ledger, small_bytes: IntArray) -> _Events:
    """Read the events of a step off its allocations."""
    is_real = (step.nbytes > 0) & (step.died > step.born)
    births = np.flatnonzero(is_real & (step.born > 0))
    deaths = np.flatnonzero(is_real & (step.died < step.end))
    times = np.concatenate([step.died[deaths], step.born[births]])
    order = np.argsort(times, kind="stable")
    times = np.append(0, times[order])
    nbytes = np.concatenate([-small_bytes[deaths], small_bytes[births]])[order]
    numbers = np.concatenate([~deaths, births])[order]
    is_large = nbytes == 0
    return _Events(
        times=times,
        is_last=np.append(times[1:] != times[:-1], True),
        changes=np.append(0, nbytes),
        numbers=numbers[is_large],
        places=np.flatnonzero(is_large) + 1,
        stays=is_real & (step.born > 0) & (step.died >= step.end),
    )
