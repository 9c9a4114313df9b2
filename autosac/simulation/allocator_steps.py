"""What the caching allocator does in the first steps of a training.

The first step differs from those that follow: the optimizer has no state yet. It makes
it in the first ``optimizer.step()``, when all that forward and backward used lies free
in the cache. Tensors of state come to lie in segments that the next forward would have
used whole, and it must reserve new ones. Gradients that are kept from step to step do
the same in the first backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from autosac.devices.allocator_settings import AllocatorSettings
from autosac.simulation.caching_allocator import CachingAllocator
from autosac.step.ledger import Ledger
from autosac.step.tape import IntArray, Op, Tape

_DEFAULT = AllocatorSettings()
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


def replay(
    step: Ledger,
    *,
    first: FirstStep | None = None,
    settings: AllocatorSettings = _DEFAULT,
    capacity_bytes: int | None = None,
    sizes: IntArray | None = None,
    live: dict[int, int] | None = None,
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
        live: Takes the most bytes handed out just after each time of a step; at time
            0, before it.

    Returns:
        The allocator after the last step.

    Raises:
        OutOfMemory: The steps do not fit the capacity.
    """
    allocator = CachingAllocator(capacity_bytes, settings)
    real = np.flatnonzero((step.nbytes > 0) & (step.died > step.born))
    old = real[step.born[real] <= 0].tolist()
    nbytes = step.nbytes.tolist()
    addresses: dict[int, int] = {}

    def allocate(index: int) -> None:
        address = addresses[index] = allocator.allocate(nbytes[index])
        if sizes is not None:
            sizes[index] = allocator.block_size(address)

    born: dict[int, int] = {}
    absent: frozenset[int] = frozenset()
    if first is not None:
        born = {**first.gradient_born, **first.state_born}
        absent = first.absent
        if settings.state_is_loaded:
            born = first.gradient_born
    for index in old:
        if index not in born:
            allocate(index)
    steady = _events(step, real)
    if live is not None:
        live[0] = allocator.allocated_bytes
    for number in range(_MOST_STEPS):
        reserved_bytes = allocator.peak_reserved_bytes
        events = steady
        if number == 0 and born:
            events = _events(_beginning(step, born), real[~np.isin(real, list(absent))])
        for time, index, is_birth in events:
            if is_birth:
                allocate(index)
            else:
                allocator.free(addresses.pop(index))
            if live is not None:
                live[time] = max(live.get(time, 0), allocator.allocated_bytes)
        # The next batch comes before the gradients of this one go.
        for index in old:
            if index not in addresses:
                allocate(index)
        for index in [i for i in addresses if step.born[i] > 0]:
            allocator.free(addresses.pop(index))
        if number and allocator.peak_reserved_bytes == reserved_bytes:
            break
    return allocator


def _beginning(step: Ledger, born: dict[int, int]) -> Ledger:
    """The allocations of a first step, in which some entries are born later."""
    births = step.born.copy()
    births[list(born)] = list(born.values())
    return Ledger(born=births, died=step.died, nbytes=step.nbytes, end=step.end)


def _events(step: Ledger, real: IntArray) -> list[tuple[int, int, bool]]:
    """Time, births and deaths in a step; at the same time deaths come first."""
    births = real[step.born[real] > 0]
    deaths = real[step.died[real] < step.end]
    index = np.concatenate([deaths, births])
    time = np.concatenate([step.died[deaths], step.born[births]])
    order = np.argsort(time, kind="stable")
    flags: Iterable[bool] = (order >= len(deaths)).tolist()
    times, places = time[order].tolist(), index[order].tolist()
    return list(zip(times, places, flags, strict=True))
