"""What the caching allocator of a GPU hands out to one rank, beyond what is asked for.

The streams of FSDP2 have free blocks of their own (`fsdp_hooks`), so that each is
replayed by itself. A model that fits the GPU is taken to have been made there as a
whole, in the stream of all ops, before it was sharded: its parameters leave free blocks
in which much of the rest comes to lie.
"""

from __future__ import annotations

from math import prod

import numpy as np

from autosac.simulation.allocator_steps import (
    FirstStep,
    HandedOut,
    handed_out,
    replay,
)
from autosac.step.ledger import Ledger
from autosac.step.tape import IntArray, Tape


def excess_bytes(ledger: Ledger, first: FirstStep, whole: IntArray) -> int:
    """Peak of what is handed out above that of what is asked for.

    Args:
        ledger: What a rank allocates in a steady step, with streams.
        first: How the first step of a training differs.
        whole: Sizes of the parameters before they are sharded.
    """
    own, *others = ledger.by_stream()
    played = [handed_out(own, first=first, gone=whole), *map(handed_out, others)]
    # Streams settle after different numbers of steps; their last ones come again.
    number = max(map(len, played))
    as_many = [steps + steps[-1:] * (number - len(steps)) for steps in played]
    peak_bytes = max(_peak_bytes(streams) for streams in zip(*as_many, strict=True))
    return peak_bytes + ledger.constant_bytes - ledger.timeline().peak_bytes


def reserved_bytes(ledger: Ledger, first: FirstStep, whole: IntArray) -> int:
    """What is reserved if nothing stops it; arguments as of `excess_bytes`."""
    own, *others = ledger.by_stream()
    replays = [replay(own, first=first, gone=whole), *map(replay, others)]
    return sum(allocator.peak_reserved_bytes for allocator in replays)


def _peak_bytes(streams: tuple[HandedOut, ...]) -> int:
    """Most bytes that several streams have at one instant."""
    keys = np.unique(np.concatenate([stream.keys for stream in streams]))
    total = sum(
        stream.nbytes[stream.keys.searchsorted(keys, side="right") - 1]
        for stream in streams
    )
    return int(np.max(total))


def whole_sizes(tape: Tape, memory_bytes: int) -> IntArray:
    """Sizes in bytes of the parameters of a model that fits a GPU, else none."""
    sizes = [prod(p.shape) * p.itemsize for p in tape.parameters]
    fitting = sizes if sum(sizes) <= memory_bytes else []
    return np.array(fitting, dtype=np.int64)
