"""Where to cut a chain of blocks into stages: branch and bound over the cuts.

Stages are fixed from the first one on. A branch is given up as soon as no step with
its stages can be faster than the best one known: `playing.least_step_ms` of the times
of its stages, with the blocks that are left taken to be recomputed nowhere and spread
as evenly as can be. What a stage really takes, under its cap and at its place in the
schedule, is asked for only when a branch comes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from autosac.pipelines.playing import StageTimes, least_step_ms, step_ms
from autosac.pipelines.schedules import Schedule

# Times of blocks from the first to before the last as a stage of that index; None if
# they do not fit.
TimesOf = Callable[[int, int, int], StageTimes | None]


@dataclass(kw_only=True)
class Cutting:
    """The search for one schedule.

    Attributes:
        schedule: Of the pipeline.
        block_ms: Forward and backward of each block, nothing recomputed: no more than
            what it takes in a stage.
        cuts: Blocks that a stage may begin with, besides the first.
        times_of: Says what a stage takes.
        relative_gap: Another cutting must be faster by more.
        best_ms: Time of the best step so far; of other schedules to begin with.
        starts: First block of each of its stages; empty if none is better.
    """

    schedule: Schedule
    block_ms: Sequence[float]
    cuts: Sequence[int]
    times_of: TimesOf
    relative_gap: float
    best_ms: float = inf
    starts: tuple[int, ...] = ()
    _until_ms: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._until_ms = [0.0, *accumulate(self.block_ms)]

    def run(self) -> None:
        """Find the best cutting."""
        self._extend([0], [])

    def _extend(self, starts: list[int], times: list[StageTimes]) -> None:
        """Try all ends of the last stage, the most even ones first."""
        index, first = len(times), starts[-1]
        num_left = self.schedule.num_stages - index
        size = len(self.block_ms)
        if num_left == 1:
            ends = [size]
        else:
            later = [cut for cut in self.cuts if cut > first]
            ends = later[: len(later) - (num_left - 2)]
        share_ms = self._between(first, size) / num_left
        for end in sorted(ends, key=lambda b: abs(self._between(first, b) - share_ms)):
            if self._is_lost(times, self._between(first, end), end):
                continue
            own = self.times_of(index, first, end)
            if own is None:
                continue
            if self._is_lost(times, own.forward_ms + own.backward_ms, end):
                continue
            if num_left > 1:
                self._extend([*starts, end], [*times, own])
                continue
            time_ms = step_ms(self.schedule, [*times, own])
            if time_ms < (1 - self.relative_gap) * self.best_ms:
                self.best_ms, self.starts = time_ms, tuple(starts)

    def _between(self, first: int, end: int) -> float:
        return self._until_ms[end] - self._until_ms[first]

    def _is_lost(self, times: list[StageTimes], own_ms: float, end: int) -> bool:
        """Whether no step is better that has these stages and this one."""
        known = [t.forward_ms + t.backward_ms for t in times] + [own_ms]
        num_left = self.schedule.num_stages - len(known)
        rest_ms = self._between(end, len(self.block_ms))
        even = [rest_ms / num_left] * num_left if num_left else []
        least_ms = max(
            least_step_ms(known, self.schedule.num_micro_batches),
            # One of the others takes its share at least, and comes after all these.
            sum(known) + (self.schedule.num_micro_batches * even[0] if even else 0.0),
            sum(known) + rest_ms,
        )
        return least_ms >= (1 - self.relative_gap) * self.best_ms
