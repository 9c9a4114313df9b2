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

import numpy as np
import numpy.typing as npt

from autosac.devices.allocator_settings import AllocatorSettings
from autosac.simulation.caching_allocator import (
    CachingAllocator,
    small_block_bytes,
)
from autosac.step.ledger import Ledger
from autosac.step.tape import IntArray, Op, Tape

_DEFAULT = AllocatorSettings()
_NEVER = 2**62  # after all instants
_MOST_STEPS = 8  # a bound on work: none was seen to need more than five


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
    sizes = np.zeros_like(step.nbytes)
    replay(step, first=first, settings=settings, sizes=sizes)
    return sizes


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
) -> list[HandedOut]:
    """What the allocator hands out in the first steps of a training.

    As `replay` finds it, in less time: small requests have segments of their own, in
    which a block is as large as the request, rounded up, so that they add up. Only
    large ones are replayed, until a step reserves nothing more for them.
    """
    small_bytes = small_block_bytes(step.nbytes)
    if settings.garbage_collection_threshold is not None:
        small_bytes[:] = 0  # what goes depends on all that is reserved
    steps: list[HandedOut] = []
    is_small = small_bytes > 0
    large = replace(step, nbytes=np.where(is_small, 0, step.nbytes))
    replay(large, first=first, settings=settings, steps=steps)
    small = replace(step, nbytes=small_bytes, constant_bytes=0)
    of_first = small
    if first is not None:
        of_first = _first(small, _born(first, settings), first.absent)
    is_old = step.born <= 0
    return [
        _with_small(found, small if number else of_first, is_old)
        for number, found in enumerate(steps)
    ]


def _with_small(
    large: HandedOut, small: Ledger, is_old: npt.NDArray[np.bool_]
) -> HandedOut:
    """What is handed out to large requests and to small ones.

    Args:
        large: What large ones get in a step.
        small: The small ones of that step.
        is_old: Which entries are there when a step begins.
    """
    stays = small.died >= small.end
    died = np.where(stays, _NEVER, small.died)
    nbytes = np.where(died > small.born, small.nbytes, 0)
    timeline = replace(small, died=died, nbytes=nbytes).timeline()
    keys = np.union1d(large.keys, timeline.keys.clip(min=0))
    keys = keys[keys < _NEVER]
    of_large = large.keys.searchsorted(keys, side="right") - 1
    of_small = timeline.keys.searchsorted(keys, side="right")
    return HandedOut(
        keys=keys,
        nbytes=large.nbytes[of_large] + np.append(0, timeline.live_bytes)[of_small],
        between_steps=large.between_steps + int(small.nbytes[stays | is_old].sum()),
    )


def replay(
    step: Ledger,
    *,
    first: FirstStep | None = None,
    settings: AllocatorSettings = _DEFAULT,
    capacity_bytes: int | None = None,
    sizes: IntArray | None = None,
    steps: list[HandedOut] | None = None,
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
        sizes: Takes the size of every allocation's last block.
        steps: Takes what is handed out during each step.

    Returns:
        The allocator after the last step.

    Raises:
        OutOfMemory: The steps do not fit the capacity.
    """
    allocator = CachingAllocator(capacity_bytes, settings)
    is_real = (step.nbytes > 0) & (step.died > step.born)
    old = np.flatnonzero(is_real & (step.born <= 0)).tolist()
    nbytes = step.nbytes.tolist()
    addresses: dict[int, int] = {}

    def allocate(index: int) -> None:
        address = addresses[index] = allocator.allocate(nbytes[index])
        if sizes is not None:
            sizes[index] = allocator.block_size(address)

    born = {} if first is None else _born(first, settings)
    for index in old:
        if index not in born:
            allocate(index)
    steady = _events(step)
    for number in range(_MOST_STEPS):
        reserved_bytes = allocator.peak_reserved_bytes
        events = steady
        if number == 0 and first is not None and born:
            events = _events(_first(step, born, first.absent))
        live = {0: allocator.allocated_bytes}
        for time, index, is_birth in events:
            if is_birth:
                allocate(index)
            else:
                allocator.free(addresses.pop(index))
            live[time] = allocator.allocated_bytes
        # The next batch comes before the gradients of this one go.
        for index in old:
            if index not in addresses:
                allocate(index)
        if steps is not None:
            steps.append(_handed_out(live, allocator.allocated_bytes))
        for index in [i for i in addresses if step.born[i] > 0]:
            allocator.free(addresses.pop(index))
        if number and allocator.peak_reserved_bytes == reserved_bytes:
            break
    return allocator


def _born(first: FirstStep, settings: AllocatorSettings) -> dict[int, int]:
    """What the first step makes that is there when the others begin, and when."""
    if settings.state_is_loaded:
        return first.gradient_born
    return {**first.gradient_born, **first.state_born}


def _first(step: Ledger, born: dict[int, int], absent: frozenset[int]) -> Ledger:
    """The allocations of a first step, in which some entries are born later."""
    births, nbytes = step.born.copy(), step.nbytes
    births[list(born)] = list(born.values())
    if born and absent:
        nbytes = nbytes.copy()
        nbytes[list(absent)] = 0
    return replace(step, born=births, nbytes=nbytes)


def _events(step: Ledger) -> list[tuple[int, int, bool]]:
    """Time, births and deaths in a step; at the same time deaths come first."""
    real = np.flatnonzero((step.nbytes > 0) & (step.died > step.born))
    births = real[step.born[real] > 0]
    deaths = real[step.died[real] < step.end]
    index = np.concatenate([deaths, births])
    time = np.concatenate([step.died[deaths], step.born[births]])
    order = np.argsort(time, kind="stable")
    flags: Iterable[bool] = (order >= len(deaths)).tolist()
    times, places = time[order].tolist(), index[order].tolist()
    return list(zip(times, places, flags, strict=True))


def _handed_out(live: dict[int, int], between_steps: int) -> HandedOut:
    return HandedOut(
        keys=np.fromiter(live, dtype=np.int64),
        nbytes=np.fromiter(live.values(), dtype=np.int64),
        between_steps=between_steps,
    )
