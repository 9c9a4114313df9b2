"""Large requests of a step at the allocator's default settings, replayed fast.

What `autosac.simulation.caching_allocator` does, without what other settings and small
requests ask for: blocks are numbers. A free one is its size and address in one integer,
so that the list of them is ascending as the allocator's is; two dictionaries find the
free neighbours of a block that is freed. One unit is `_UNIT_BYTES`; segments lie one
unit apart, so that no block of one is a neighbour of a block of another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autosac.simulation.caching_allocator import (
    MIN_BLOCK_BYTES as _UNIT_BYTES,
)
from autosac.simulation.caching_allocator import (
    SMALL_BYTES,
    segment_bytes,
)
from autosac.step.tape import IntArray

_SHIFT = 48  # of a size, to the left of an address
_ADDRESS = (1 << _SHIFT) - 1
_MOST_LEFT_OVER = SMALL_BYTES // _UNIT_BYTES  # by a block, which is then not split


@dataclass(slots=True)
class LargeBlocks:
    """The state of the allocator, for requests that are numbered.

    Args:
        units: Rounded size of each request.

    Attributes:
        addresses: That of each request's block, -1 while it has none,
        sizes: and the size of its last one.
        reserved: Size of all segments.
    """

    units: Sequence[int]
    addresses: list[int] = field(init=False)
    sizes: list[int] = field(init=False)
    reserved: int = 0
    _next_address: int = 0
    _free: list[int] = field(default_factory=list)
    _size_at: dict[int, int] = field(default_factory=dict)  # of free blocks
    _start_of: dict[int, int] = field(default_factory=dict)  # by where they end

    def __post_init__(self) -> None:
        self.addresses = [-1] * len(self.units)
        self.sizes = [0] * len(self.units)

    @classmethod
    def of(cls, nbytes: IntArray) -> LargeBlocks:
        """No blocks yet, for requests of some sizes in bytes."""
        return cls((-(-nbytes // _UNIT_BYTES)).tolist())

    @property
    def reserved_bytes(self) -> int:
        """Size of all segments."""
        return self.reserved * _UNIT_BYTES

    def play(self, events: IntArray) -> IntArray:
        """Give and take blocks.

        Args:
            events: The number i of a request that gets a block, ~i where it goes.

        Returns:
            Bytes that each event adds to what is in use.
        """
        units, addresses, sizes = self.units, self.addresses, self.sizes
        free, size_at, start_of = self._free, self._size_at, self._start_of
        changes = []
        for event in events.tolist():
            if event >= 0:
                size = units[event]
                place = bisect_left(free, size << _SHIFT)
                if place < len(free):
                    block = free.pop(place)
                    address, block = block & _ADDRESS, block >> _SHIFT
                    end = address + block
                    del size_at[address], start_of[end]
                else:
                    block = segment_bytes(size * _UNIT_BYTES) // _UNIT_BYTES
                    address, end = self._next_address, self._next_address + block
                    self._next_address = end + 1
                    self.reserved += block
                if block - size > _MOST_LEFT_OVER:
                    rest = address + size
                    start_of[end] = rest
                    end, block = end - rest, size
                    size_at[rest] = end
                    insort(free, end << _SHIFT | rest)
                addresses[event], sizes[event] = address, block
                changes.append(block)
            else:
                event = ~event
                address, size = addresses[event], sizes[event]
                addresses[event] = -1
                end = address + size
                changes.append(-size)
                after = size_at.pop(end, 0)
                if after:
                    del free[bisect_left(free, after << _SHIFT | end)]
                    end += after
                before = start_of.pop(address, -1)
                if before >= 0:
                    del free[bisect_left(free, (address - before) << _SHIFT | before)]
                    address = before
                size_at[address] = size = end - address
                start_of[end] = address
                insort(free, size << _SHIFT | address)
        return np.array(changes, dtype=np.int64) * _UNIT_BYTES
