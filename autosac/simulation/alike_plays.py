"""Plans that break a budget where another one with the same large requests did.

The allocator gives the same blocks to the same large requests in the same order, and
small ones add up. Where one plan broke a budget, another one with these large requests
has the same large blocks at that instant, and its own small ones: mostly that is too
much as well, and takes no replay to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from autosac.devices.allocator_settings import AllocatorSettings
from autosac.simulation.allocator_steps import (
    FirstStep,
    HandedOut,
    as_first,
    small_blocks,
)
from autosac.step.ledger import Ledger
from autosac.step.tape import IntArray

_DIGEST_BYTES = 16
_MOST_KNOWN = 50_000  # sets of large requests, some 200 bytes each


class _Instant(NamedTuple):
    """A key of the first step of a training, or of a later one."""

    is_first: bool
    key: int


@dataclass(frozen=True, slots=True)
class Alike:
    """A plan's step, and what is known of all with the same large requests.

    Attributes:
        step: Its allocations.
        small_bytes: Sizes of the blocks of small ones; 0 for others.
        large_bytes: What is in use in large blocks at some instants, at least: of all
            of these plans.
        among: All plans.
    """

    step: Ledger
    small_bytes: IntArray
    large_bytes: dict[_Instant, int]
    among: AlikePlays

    def least_bytes(self, enough: int) -> int:
        """What the plan has in use at one of the known instants, or at several.

        The most of them, or the first that is more than `enough`; 0 if none is known.
        """
        most = 0
        for instant, large_bytes in self.large_bytes.items():
            most = max(most, large_bytes + self._small_at(instant))
            if most > enough:
                break
        return most

    def note(self, steps: list[HandedOut], budget_bytes: int) -> None:
        """Note where a replay of this plan broke a budget, if it did.

        Args:
            steps: What was handed out; the last one may have ended there.
            budget_bytes: That budget.
        """
        last = steps[-1]
        over = np.flatnonzero(last.nbytes > budget_bytes)
        if len(over):
            key, nbytes = int(last.keys[over[0]]), int(last.nbytes[over[0]])
            instant = _Instant(len(steps) == 1, key)
            self.large_bytes[instant] = nbytes - self._small_at(instant)

    def _small_at(self, instant: _Instant) -> int:
        """What is in use in small blocks after all that happens at an instant."""
        step = self.step
        if instant.is_first:
            step = as_first(step, self.among.first, self.among.settings)
        is_alive = step.alive(instant.key) & (step.nbytes > 0)
        return int(self.small_bytes[is_alive].sum())


@dataclass(slots=True)
class AlikePlays:
    """Plans of one step by their large requests.

    Args:
        first: How the first step of a training differs.
        settings: Of the allocator and the program.
    """

    first: FirstStep
    settings: AllocatorSettings
    _large_bytes: dict[bytes, dict[_Instant, int]] = field(default_factory=dict)

    def of(self, step: Ledger) -> Alike:
        """What is known of the plans that are like one.

        Args:
            step: Its allocations, those of the tape first.
        """
        small_bytes = small_blocks(step.nbytes, self.settings)
        is_large = (step.nbytes > 0) & (step.died > step.born) & (small_bytes == 0)
        large = np.flatnonzero(is_large)  # of the tape the same in all plans
        parts = (
            step.born[large],
            np.minimum(step.died[large], step.end),
            step.nbytes[large],
        )
        name = blake2b(digest_size=_DIGEST_BYTES)
        for part in parts:
            name.update(part.tobytes())
        if len(self._large_bytes) >= _MOST_KNOWN:
            self._large_bytes.clear()
        known = self._large_bytes.setdefault(name.digest(), {})
        return Alike(step, small_bytes, known, self)
