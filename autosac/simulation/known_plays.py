"""Large requests that were replayed before: plans that differ in small ones only.

A replay of the allocator gives the same blocks to the same requests in the same order.
Where plans of one step differ in what is small, which adds up without a replay, their
large requests are replayed once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autosac.simulation.large_blocks import LargeBlocks, units_of
from autosac.step.tape import IntArray

_MOST_REQUESTS = 200_000  # of all that are known, some 100 bytes each


@dataclass(slots=True)
class _Known:
    """What an allocator answered, call by call, and its state after the last one."""

    blocks: LargeBlocks
    answers: list[IntArray] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Again:
    """Answers what is known, and asks the allocator for the rest.

    Attributes:
        known: What is known.
        ranks: Its number of each request.
        asked: How often it was asked.
    """

    known: _Known
    ranks: IntArray
    asked: int = 0

    @property
    def reserved_bytes(self) -> int:
        """Size of all segments."""
        return self.known.reserved[self.asked - 1] if self.asked else 0

    def play(self, events: Sequence[int] | IntArray) -> IntArray:
        """Give and take blocks: see `LargeBlocks.play`."""
        known = self.known
        if self.asked == len(known.answers):
            ranked = _ranked(np.asarray(events, dtype=np.int64), self.ranks)
            known.answers.append(known.blocks.play(ranked.tolist()))
            known.reserved.append(known.blocks.reserved_bytes)
        self.asked += 1
        return known.answers[self.asked - 1]


@dataclass(slots=True)
class KnownPlays:
    """Replays of the plans of one step, those that were asked for last."""

    _known: OrderedDict[tuple[bytes, ...], _Known] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, nbytes: IntArray, sequences: Sequence[IntArray]) -> _Again:
        """A replay from the beginning.

        Args:
            nbytes: Size of each request.
            sequences: All that decides what will be played: numbers i of requests, and
                ~i.
        """
        is_used = np.zeros(len(nbytes), dtype=bool)
        for events in sequences:
            is_used[np.where(events < 0, ~events, events)] = True
        ranks = np.cumsum(is_used) - 1
        units = units_of(nbytes[is_used])
        parts = [_ranked(events, ranks).tobytes() for events in sequences]
        key = (units.tobytes(), *parts)
        known = self._known.pop(key, None) or _Known(LargeBlocks(units.tolist()))
        self._known[key] = known  # the last one
        if len(self._known) > 1 and len(self._known) * len(units) > _MOST_REQUESTS:
            self._known.popitem(last=False)
        return _Again(known, ranks)


def _ranked(events: IntArray, ranks: IntArray) -> IntArray:
    """Events of requests by other numbers."""
    gone = events < 0
    ranked: IntArray = ranks[np.where(gone, ~events, events)]
    return np.where(gone, ~ranked, ranked)
