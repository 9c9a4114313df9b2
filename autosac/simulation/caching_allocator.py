"""PyTorch's caching allocator for CUDA, as far as it decides what is reserved.

The rules, read off c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h
of torch 2.15, on one stream and without rounding to powers of two:
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
What `AllocatorSettings` change about them:
    - `expandable_segments`: either kind has one segment without end, whose pages (2 MiB
      small, 20 MiB large) are reserved as they are needed, next to free blocks where
      these end at pages that are not; what is left of a block is always split off; a
      block beside such pages counts as large as it can become;
    - `max_split_size_mb`: blocks of that size and more are not split, serve no smaller
      request, and a larger one only if they are less than 20 MiB too large;
    - `garbage_collection_threshold`: before a segment is reserved, wholly free large
      ones go that were free for longer than their mean, until what is above the
      threshold is gone.

New segments are taken to lie above older ones, which the driver does not promise; it
matters only among free blocks of equal size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from autosac.devices.allocator_settings import AllocatorSettings
from autosac.errors import AutosacError
from autosac.quantities import rounded_up
from autosac.step.tape import IntArray

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 2**20  # kSmallSize
_SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer
_LARGE_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer
_MIN_LARGE_BYTES = 10 * 2**20  # kMinLargeAlloc
_LARGE_ROUND_BYTES = 2 * 2**20  # kRoundLarge
_WITHOUT_END = _LARGE_SEGMENT_BYTES * 2**32  # addresses of an expandable segment


@dataclass(slots=True, eq=False)
class _Pool:
    """Blocks of a kind, small or large.

    Attributes:
        is_small: Which kind.
        page_bytes: Size of the pages of its expandable segment.
        free: Size, address and record of every free block, ascending.
        unmapped: Address and record of what an expandable segment has not reserved,
            ascending.
        requests: How often a free block was looked for: the clock of ages.
    """

    is_small: bool
    page_bytes: int
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    unmapped: list[tuple[int, _Block]] = field(default_factory=list)
    requests: int = 0


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment."""

    address: int
    size: int
    pool: _Pool
    is_free: bool = False
    is_mapped: bool = True  # reserved; only parts of expandable segments are not
    before: _Block | None = None  # neighbours in the segment
    after: _Block | None = None
    freed_at: int = 0

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None


class OutOfMemory(AutosacError):
    """The allocator would raise ``torch.OutOfMemoryError``."""


@dataclass(slots=True)
class CachingAllocator:
    """The state of the allocator of one device.

    Attributes:
        capacity_bytes: Most that can be reserved; None for no limit.
        settings: What is not at its default.
        allocated_bytes: Size of the blocks in use, which may be larger than what was
            asked for by what was not worth splitting off, as in
            ``torch.cuda.memory_allocated``.
        reserved_bytes: Size of all segments.
        peak_allocated_bytes: The most that was in use at once.
        peak_reserved_bytes: The most that was reserved at once.
    """

    capacity_bytes: int | None = None
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    _small: _Pool = field(default_factory=lambda: _Pool(True, _SMALL_SEGMENT_BYTES))
    _large: _Pool = field(default_factory=lambda: _Pool(False, _LARGE_SEGMENT_BYTES))
    _in_use: dict[int, _Block] = field(default_factory=dict)  # by address
    _next_address: int = 0
    _expands: bool = False
    _most_split_bytes: int | None = None

    def __post_init__(self) -> None:
        self._expands = self.settings.expandable_segments
        if self.settings.max_split_size_mb is not None:
            self._most_split_bytes = self.settings.max_split_size_mb * 2**20

    def allocate(self, num_bytes: int) -> int:
        """Hand out a block of at least so many bytes.

        Args:
            num_bytes: At least 1: a tensor without elements asks for nothing.

        Returns:
            Its address.

        Raises:
            OutOfMemory: A new segment would exceed the capacity.
        """
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pool = self._small if size <= SMALL_BYTES else self._large
        pool.requests += 1
        free = pool.free
        place = bisect_left(free, (size,))
        if place < len(free) and (self._expands or self._most_split_bytes):
            place = self._place_by_settings(pool, size, place)
        block = free.pop(place)[2] if place < len(free) else self._grow(pool, size)
        block.is_free = False
        rest = block.size - size
        if rest and self._is_split(pool, size, rest):
            self._insert_alone(self._cut(block, size))
        self._in_use[block.address] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block.address

    def free(self, address: int) -> None:
        """Take a block back.

        Raises:
            ValueError: No block in use has this address.
        """
        block = self._in_use.pop(address, None)
        if block is None:
            raise ValueError(f"No block in use has the address {address}.")
        self.allocated_bytes -= block.size
        self._insert(block)

    def release(self) -> None:
        """Give back all that is wholly free, as ``empty_cache`` does."""
        for pool in (self._large, self._small):
            for _, _, block in tuple(pool.free):
                if self._expands:
                    self._unmap(block)
                elif block.is_segment:
                    self._give_back(block)

    def block_size(self, address: int) -> int:
        """Size of the block in use at an address."""
        return self._in_use[address].size

    def blocks_in_use(self) -> list[tuple[int, int]]:
        """Address and size of every block in use, ascending."""
        return sorted((b.address, b.size) for b in self._in_use.values())

    # --- free blocks ------------------------------------------------------------------

    def _place_by_settings(self, pool: _Pool, size: int, place: int) -> int:
        """Which free block to take; as many as there are for none."""
        if self._expands:
            while place + 1 < len(pool.free) and _expanded(
                pool.free[place + 1][2]
            ) < _expanded(pool.free[place][2]):
                place += 1
        most, free_size = self._most_split_bytes, pool.free[place][0]
        if most is not None:
            if size < most <= free_size:
                return len(pool.free)
            if size >= most and free_size >= size + _LARGE_SEGMENT_BYTES:
                return len(pool.free)
        return place

    def _insert(self, block: _Block) -> None:
        """Make a block free, as one with its free neighbours."""
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._forget(before)
            self._absorb(before, block)
            block = before
        if after is not None and after.is_free:
            self._forget(after)
            self._absorb(block, after)
        block.is_free = True
        block.freed_at = block.pool.requests
        insort(block.pool.free, (block.size, block.address, block))

    def _is_split(self, pool: _Pool, size: int, rest: int) -> bool:
        """Whether what is left of a block beyond a request becomes one of its own."""
        if pool.is_small or self._expands:
            return rest >= MIN_BLOCK_BYTES
        most = self._most_split_bytes
        return rest > SMALL_BYTES and (most is None or size < most)

    def _cut(self, block: _Block, size: int) -> _Block:
        """Cut a block in two; returns what is behind so many bytes."""
        after, rest = block.after, block.size - size
        other = _Block(
            block.address + size, rest, block.pool, False, block.is_mapped, block, after
        )
        if after is not None:
            after.before = other
        block.after, block.size = other, size
        return other

    def _forget(self, block: _Block) -> None:
        """Take a block off the free ones."""
        free = block.pool.free
        del free[bisect_left(free, (block.size, block.address))]

    def _absorb(self, block: _Block, after: _Block) -> None:
        """Make one block of two neighbours."""
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block

    # --- segments ---------------------------------------------------------------------

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """A block of a new segment, or of new pages."""
        self._collect_garbage()
        segment, limit = segment_bytes(size), self.capacity_bytes
        if limit is not None and self.reserved_bytes + segment > limit:
            self._release_oversized(pool, size)
        if limit is not None and self.reserved_bytes + segment > limit:
            self.release()
            if self.reserved_bytes + segment > limit:
                raise OutOfMemory(
                    f"A segment of {segment} bytes does not fit: {self.reserved_bytes}"
                    f" of {limit} bytes are reserved."
                )
        if self._expands:
            return self._expand(pool, size)
        block = _Block(self._next_address, segment, pool)
        self._next_address += segment
        self._add_reserved(segment)
        return block

    def _add_reserved(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _give_back(self, block: _Block) -> None:
        """Give back a segment that is one free block."""
        self._forget(block)
        self.reserved_bytes -= block.size

    def _release_oversized(self, pool: _Pool, size: int) -> None:
        """Give back blocks that are never split, as few as make room for a request.

        `release_available_cached_blocks`: the least that is large enough, or else the
        largest ones until they are.
        """
        most = self._most_split_bytes
        if most is None or self._expands:
            return
        wanted = max(size, most)
        place = bisect_left(pool.free, (wanted, 0))
        if place < len(pool.free):
            self._give_back(pool.free[place][2])
            return
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= most:
            block = pool.free[-1][2]
            released += block.size
            self._give_back(block)

    def _collect_garbage(self) -> None:
        """Give back wholly free segments that were free for longer than their mean."""
        threshold, limit = (
            self.settings.garbage_collection_threshold,
            self.settings.memory_limit_bytes,
        )
        if threshold is None or limit is None or self._expands:
            return
        excess = self.reserved_bytes - int(threshold * limit)
        blocks = (block for _, _, block in self._large.free)
        ages = {b: self._large.requests - b.freed_at for b in blocks if b.is_segment}
        while excess > 0 and ages:
            mean = sum(ages.values()) / len(ages)
            for block in [b for b, age in ages.items() if age >= mean]:
                excess -= block.size
                del ages[block]
                self._give_back(block)

    # --- expandable segments ----------------------------------------------------------

    def _expand(self, pool: _Pool, size: int) -> _Block:
        """A block of the segment without end: free bytes, and pages where none are."""
        if not pool.unmapped:
            address = 0 if not pool.is_small else _WITHOUT_END
            whole = _Block(address, _WITHOUT_END, pool, is_mapped=False)
            pool.unmapped.append((address, whole))
        block = next(b for b in self._starts(pool) if _room(b) >= size)
        if not block.is_mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            assert block.after is not None
            block = self._map(block.after, min(size - block.size, block.after.size))
        self._forget(block)
        return block

    def _starts(self, pool: _Pool) -> list[_Block]:
        """Where pages can be added, by address: free blocks before them come along."""
        starts = []
        for _, block in pool.unmapped:
            before = block.before
            is_free = before is not None and before.is_free
            starts.append(before if is_free and before is not None else block)
        return starts

    def _map(self, block: _Block, size: int) -> _Block:
        """Reserve the first pages of a block; returns the free block they belong to."""
        pool, size = block.pool, rounded_up(size, block.pool.page_bytes)
        pool.unmapped.remove((block.address, block))
        if size < block.size:
            rest = self._cut(block, size)
            insort(pool.unmapped, (rest.address, rest))
        block.is_mapped = True
        self._add_reserved(size)
        before = block.before
        self._insert(block)
        return before if before is not None and before.is_free else block

    def _unmap(self, block: _Block) -> None:
        """Give back the pages of an expandable segment that are wholly free."""
        pool = block.pool
        start = rounded_up(block.address, pool.page_bytes)
        end = (block.address + block.size) // pool.page_bytes * pool.page_bytes
        if end <= start:
            return
        self._forget(block)
        block.is_free = False
        pages = (
            self._cut(block, start - block.address) if start > block.address else block
        )
        if pages is not block:
            self._insert_alone(block)
        if end < pages.address + pages.size:
            self._insert_alone(self._cut(pages, end - pages.address))
        pages.is_mapped = False
        self.reserved_bytes -= end - start
        insort(pool.unmapped, (pages.address, pages))
        before, after = pages.before, pages.after
        if after is not None and not after.is_mapped:
            pool.unmapped.remove((after.address, after))
            self._absorb(pages, after)
        if before is not None and not before.is_mapped:
            pool.unmapped.remove((pages.address, pages))
            self._absorb(before, pages)

    def _insert_alone(self, block: _Block) -> None:
        """Make a block free whose neighbours are not."""
        block.is_free = True
        block.freed_at = block.pool.requests
        insort(block.pool.free, (block.size, block.address, block))


def _expanded(block: _Block) -> int:
    """Size of a free block with the pages after it that are not reserved yet."""
    after = block.after
    grows = after is not None and not after.is_mapped
    return block.size + (after.size if grows and after is not None else 0)


def _room(block: _Block) -> int:
    """Bytes from a block on, as far as nothing is in use."""
    room, after = 0, block
    while after is not None and (after.is_free or not after.is_mapped):
        room += after.size
        after = after.after  # type: ignore[assignment]
    return room


def least_block_bytes(nbytes: IntArray) -> IntArray:
    """Size of the smallest blocks that requests can get; 0 for none."""
    return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def small_block_bytes(nbytes: IntArray) -> IntArray:
    """Size of the blocks of small requests, likewise; 0 for none and for large ones."""
    sizes = least_block_bytes(nbytes)
    return np.where(sizes <= SMALL_BYTES, sizes, 0)


def segment_bytes(size: int) -> int:
    """Size of the segment that is reserved for a rounded request."""
    if size <= SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size < _MIN_LARGE_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size // _LARGE_ROUND_BYTES) * _LARGE_ROUND_BYTES
