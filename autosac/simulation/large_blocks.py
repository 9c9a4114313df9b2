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
        reserved: Size of all segments.
    """

    units: Sequence[int]
    reserved: int = 0
    _starts: list[int] = field(init=False)  # of the block of each request,
    _ends: list[int] = field(init=False)  # and where it ends
    _next_address: int = 0
    _free: list[int] = field(default_factory=list)
    _end_of: dict[int, int] = field(default_factory=dict)  # of free blocks, by address
    # By where they end; of others, too, that were free: `_end_of` tells.
    _start_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._starts = [0] * len(self.units)
        self._ends = [0] * len(self.units)

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
        units, starts, ends = self.units, self._starts, self._ends
        free, end_of, start_of = self._free, self._end_of, self._start_of
        changes: list[int] = []
        change = changes.append
        for event in events.tolist():
            if event >= 0:
                size = units[event]
                place = bisect_left(free, size << _SHIFT)
                if place < len(free):
                    start = free.pop(place) & _ADDRESS
                    end = end_of.pop(start)
                else:
                    start = self._next_address
                    end = start + segment_bytes(size * _UNIT_BYTES) // _UNIT_BYTES
                    self._next_address = end + 1
                    self.reserved += end - start
                rest = start + size
                if end - rest > _MOST_LEFT_OVER:
                    end_of[rest] = end
                    start_of[end] = rest
                    insort(free, end - rest << _SHIFT | rest)
                    end = rest
                starts[event], ends[event] = start, end
                change(end - start)
            else:
                start, end = starts[~event], ends[~event]
                change(start - end)
                after = end_of.pop(end, 0)
                if after:
                    del free[bisect_left(free, after - end << _SHIFT | end)]
                    end = after
                before = start_of.get(start, -1)
                if end_of.get(before) == start:
                    del free[bisect_left(free, start - before << _SHIFT | before)]
                    start = before
                end_of[start] = end
                start_of[end] = start
                insort(free, end - start << _SHIFT | start)
        return np.array(changes, dtype=np.int64) * _UNIT_BYTES
