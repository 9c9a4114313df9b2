"""PyTorch's caching allocator for CUDA, as far as it decides what is reserved.

The rules, read off c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h
of torch 2.15, at default settings (no expandable segments, no rounding to powers of
two, blocks of any size may be split) and on one stream:
    - a request is rounded up to 512 bytes; up to 1 MiB it is small, else large, and
      either kind has segments and free blocks of its own;
    - the least free block that is large enough is taken, at equal size the one of
      the lowest address;
    - without one a segment is reserved: 2 MiB for a small request, 20 MiB for one
      below 10 MiB, else the request rounded up to 2 MiB;
    - what is left of a block becomes a free block if it is at least 512 bytes
      (small) or more than 1 MiB (large), else it stays with the block;
    - a freed block merges with free neighbours in its segment, which stays reserved;
    - a segment that does not fit any more makes all wholly free ones go first.

New segments are taken to lie above older ones, which the driver does not promise; it
matters only among free blocks of equal size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from autosac.errors import AutosacError
from autosac.quantities import rounded_up
from autosac.step.ledger import Ledger
from autosac.step.tape import IntArray

_MIN_BLOCK_BYTES = 512  # kMinBlockSize
_SMALL_BYTES = 2**20  # kSmallSize
_SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer
_LARGE_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer
_MIN_LARGE_BYTES = 10 * 2**20  # kMinLargeAlloc
_LARGE_ROUND_BYTES = 2 * 2**20  # kRoundLarge

_FreeBlocks = list[tuple[int, int]]  # size and address of each, ascending


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment."""

    address: int
    size: int
    free_blocks: _FreeBlocks  # of its kind, small or large
    is_free: bool = False
    before: _Block | None = None  # neighbours in the segment
    after: _Block | None = None


class OutOfMemory(AutosacError):
    """The allocator would raise ``torch.OutOfMemoryError``."""


@dataclass(slots=True)
class CachingAllocator:
    """The state of the allocator of one device.

    Attributes:
        capacity_bytes: Most that can be reserved; None for no limit.
        allocated_bytes: Size of the blocks in use, which may be larger than what was
            asked for by what was not worth splitting off, as in
            ``torch.cuda.memory_allocated``.
        reserved_bytes: Size of all segments.
        peak_allocated_bytes: The most that was in use at once.
        peak_reserved_bytes: The most that was reserved at once.
    """

    capacity_bytes: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    _small: _FreeBlocks = field(default_factory=list)
    _large: _FreeBlocks = field(default_factory=list)
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, num_bytes: int) -> int:
        """Hand out a block of at least so many bytes.

        Args:
            num_bytes: At least 1: a tensor without elements asks for nothing.

        Returns:
            Its address.

        Raises:
            OutOfMemory: A new segment would exceed the capacity.
        """
        size = rounded_up(num_bytes, _MIN_BLOCK_BYTES)
        free_blocks = self._small if size <= _SMALL_BYTES else self._large
        place = bisect_left(free_blocks, (size, 0))
        if place < len(free_blocks):
            _, address = free_blocks.pop(place)
            block = self._blocks[address]
        else:
            block = self._reserve(segment_bytes(size), free_blocks)
        block.is_free = False
        self._split(block, size)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.address

    def free(self, address: int) -> None:
        """Take a block back.

        Raises:
            ValueError: No block in use has this address.
        """
        block = self._blocks.get(address)
        if block is None or block.is_free:
            raise ValueError(f"No block in use has the address {address}.")
        self.allocated_bytes -= block.size
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._forget(before)
            self._absorb(before, block)
            block = before
        if after is not None and after.is_free:
            self._forget(after)
            self._absorb(block, after)
        block.is_free = True
        insort(block.free_blocks, (block.size, block.address))

    def release(self) -> None:
        """Give back every segment that is wholly free, as ``empty_cache`` does."""
        for free_blocks in (self._small, self._large):
            kept = []
            for size, address in free_blocks:
                block = self._blocks[address]
                if block.before is None and block.after is None:
                    del self._blocks[address]
                    self.reserved_bytes -= size
                else:
                    kept.append((size, address))
            free_blocks[:] = kept

    def block_size(self, address: int) -> int:
        """Size of the block at an address."""
        return self._blocks[address].size

    def blocks_in_use(self) -> list[tuple[int, int]]:
        """Address and size of every block in use, ascending."""
        blocks = self._blocks.values()
        return sorted((b.address, b.size) for b in blocks if not b.is_free)

    def _reserve(self, size: int, free_blocks: _FreeBlocks) -> _Block:
        limit = self.capacity_bytes
        if limit is not None and self.reserved_bytes + size > limit:
            self.release()
            if self.reserved_bytes + size > limit:
                raise OutOfMemory(
                    f"A segment of {size} bytes does not fit: {self.reserved_bytes} of"
                    f" {limit} bytes are reserved."
                )
        block = _Block(self._next_address, size, free_blocks)
        self._blocks[block.address] = block
        self._next_address += size
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _split(self, block: _Block, size: int) -> None:
        """Keep so many bytes of a block and free the rest, if that is worth it."""
        rest = block.size - size
        is_small = block.free_blocks is self._small
        if rest < _MIN_BLOCK_BYTES if is_small else rest <= _SMALL_BYTES:
            return
        address = block.address + size
        other = _Block(
            address, rest, block.free_blocks, True, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = other
        block.after, block.size = other, size
        self._blocks[address] = other
        insort(block.free_blocks, (rest, address))

    def _forget(self, block: _Block) -> None:
        """Take a block off the free ones."""
        place = bisect_left(block.free_blocks, (block.size, block.address))
        del block.free_blocks[place]

    def _absorb(self, block: _Block, after: _Block) -> None:
        """Make one block of two neighbours."""
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        del self._blocks[after.address]


def segment_bytes(size: int) -> int:
    """Size of the segment that is reserved for a rounded request."""
    if size <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size < _MIN_LARGE_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size // _LARGE_ROUND_BYTES) * _LARGE_ROUND_BYTES


# --- steps --------------------------------------------------------------------


def block_bytes(step: Ledger) -> IntArray:
    """Size of the block that each allocation of a step gets in the end; 0 for none."""
    sizes = np.zeros_like(step.nbytes)
    replay(step, sizes=sizes)
    return sizes


def replay(
    step: Ledger,
    *,
    num_steps: int = 2,
    capacity_bytes: int | None = None,
    sizes: IntArray | None = None,
    live: dict[int, int] | None = None,
) -> CachingAllocator:
    """What the allocator does in a few equal steps.

    What is there before the first step is allocated first. A step begins with what
    the one before left, holes included; after two of them little changes.

    Args:
        step: Its allocations.
        num_steps: How many there are.
        capacity_bytes: Most that can be reserved; None for no limit.
        sizes: Takes the size of every allocation's last block.
        live: Takes the most bytes handed out just after each time of a step; at time
            0, before it.

    Returns:
        The allocator after the last step.

    Raises:
        OutOfMemory: The steps do not fit the capacity.
    """
    allocator = CachingAllocator(capacity_bytes)
    real = np.flatnonzero((step.nbytes > 0) & (step.died > step.born))
    old = real[step.born[real] <= 0].tolist()
    nbytes = step.nbytes.tolist()
    addresses: dict[int, int] = {}

    def allocate(index: int) -> None:
        address = addresses[index] = allocator.allocate(nbytes[index])
        if sizes is not None:
            sizes[index] = allocator.block_size(address)

    for index in old:
        allocate(index)
    events = _events(step, real)
    if live is not None:
        live[0] = allocator.allocated_bytes
    for _ in range(num_steps):
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
    return allocator


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
