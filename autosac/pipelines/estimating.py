"""What ranks of long stages recompute, estimated from short ones, to search for cuts.

Of like blocks a stage keeps and recomputes as many times more as it has more of them,
but for what does not depend on their number. So the peak of its rank is taken to lie on
the line through those of two short stages, and what it recomputes to be that of the
longer one of these under its share of the cap: on lines between a few caps, as very
many are asked for. Where a rank has several stages they are short together. No estimate
is part of a plan: the ranks of the cuts that win are planned themselves, and correct
the estimates of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import NamedTuple

import numpy as np

from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.playing import StageTimes
from autosac.pipelines.schedules import Schedule
from autosac.pipelines.stage_choosing import RankChooser
from autosac.solving.solve_options import SolveOptions

_FEW, _MORE = 2, 5  # like blocks of stages that stand for longer ones,
_LONG = 6  # of so many like blocks and more
# Caps between the least peak and that of nothing recomputed: times fall ever less fast.
_KNOTS = (0.0, *(2.0**-power for power in range(4, -1, -1)))

_Parts = tuple[tuple[int, ...], ...]  # blocks of each stage of a rank


class Shortened(NamedTuple):
    """Shorter stages that stand for one with a long stretch of like blocks.

    Attributes:
        num_like: Blocks of the stretch.
        few: Blocks of the stage with `_FEW` of these,
        more: and with `_MORE`.
    """

    num_like: int
    few: tuple[int, ...]
    more: tuple[int, ...]


def shortened(micro_batch: MicroBatch, first: int, end: int) -> Shortened | None:
    """What stands for a stage of some blocks; None if no long stretch is alike."""
    runs = [len(list(own)) for _, own in groupby(micro_batch.blocks.kinds[first:end])]
    longest = max(runs)
    if longest < _LONG or not micro_batch.shares:
        return None
    begin = first + sum(runs[: runs.index(longest)])
    blocks, stop = range(first, end), begin + longest
    return Shortened(
        num_like=longest,
        few=tuple(i for i in blocks if not begin + _FEW <= i < stop),
        more=tuple(i for i in blocks if not begin + _MORE <= i < stop),
    )


class _ShortRank(NamedTuple):
    """Likewise of all stages of a rank; the number is the mean of what is in flight."""

    num_like: float
    few: _Parts
    more: _Parts


@dataclass(kw_only=True)
class Estimates:
    """Estimates for one schedule under one cap.

    Attributes:
        micro_batch: Says which stages are like longer ones.
        schedule: The schedule.
        chooser_of: Makes the chooser of a rank whose stages have some blocks.
        cap_bytes: On the peak of a rank.
        options: How to solve.
    """

    micro_batch: MicroBatch
    schedule: Schedule
    chooser_of: Callable[[int, _Parts], RankChooser]
    cap_bytes: int
    options: SolveOptions
    _choosers: dict[tuple[int, _Parts], RankChooser] = field(default_factory=dict)
    _estimates: dict[tuple[int, _Parts, float], float] = field(default_factory=dict)
    _knots: dict[tuple[int, _Parts, int], float] = field(default_factory=dict)
    # Of ranks that were planned, by what they were estimated from.
    _planned: dict[tuple[int, _Parts], dict[float, float]] = field(default_factory=dict)

    def recompute_ms(self, rank: int, stages: Sequence[Shortened]) -> float:
        """What a rank recomputes; inf if its stages are taken not to fit."""
        short = self._together(rank, stages)
        own = self._of(rank, short)
        planned = self._planned.get((rank, short.more), {})
        if not planned:
            return own
        number = short.num_like
        near = min(planned, key=lambda other: (abs(other - number), other))
        if planned[near] == inf:
            return inf if number >= near else own
        other = self._of(rank, short._replace(num_like=near))
        if inf in (own, other):
            if number > near:
                return own
            return planned[near] * number / near
        return max(0.0, planned[near] + own - other)

    def learn(
        self, rank: int, stages: Sequence[Shortened], recompute_ms: float
    ) -> None:
        """What a rank does recompute; inf if its stages do not fit."""
        short = self._together(rank, stages)
        self._planned.setdefault((rank, short.more), {})[short.num_like] = recompute_ms

    def lowest_bytes(self, rank: int, stages: Sequence[Shortened]) -> float:
        """The least peak of a rank."""
        return self._lowest_bytes(rank, self._together(rank, stages))

    def _together(self, rank: int, stages: Sequence[Shortened]) -> _ShortRank:
        """Stages of a rank, each as the first that is like it."""
        like, schedule = self.micro_batch.first_like, self.schedule
        in_flight = [schedule.most_in_flight(s) for s in schedule.stages_of(rank)]
        pairs = zip(in_flight, stages, strict=True)
        return _ShortRank(
            num_like=sum(n * own.num_like for n, own in pairs) / sum(in_flight),
            few=tuple(like(own.few) for own in stages),
            more=tuple(like(own.more) for own in stages),
        )

    def _of(self, rank: int, short: _ShortRank) -> float:
        """An estimate by short stages alone."""
        key = rank, short.more, short.num_like
        if key not in self._estimates:
            self._estimates[key] = self._estimated(rank, short)
        return self._estimates[key]

    def _lowest_bytes(self, rank: int, short: _ShortRank) -> float:
        low, high = (
            self._chooser(rank, parts).lowest().peak_bytes
            for parts in (short.few, short.more)
        )
        each, fixed = _line(low, high)
        return fixed + short.num_like * each

    def _estimated(self, rank: int, short: _ShortRank) -> float:
        fewer, chooser = self._chooser(rank, short.few), self._chooser(rank, short.more)
        times = short.num_like / _MORE

        if self._lowest_bytes(rank, short) > self.cap_bytes:
            return inf
        each, fixed = _line(fewer.plain.peak_bytes, chooser.plain.peak_bytes)
        if fixed + short.num_like * each <= self.cap_bytes:
            return 0.0
        least_bytes = chooser.lowest().peak_bytes
        room_bytes = fixed + (self.cap_bytes - fixed) / times - least_bytes
        most_bytes = chooser.plain.peak_bytes - least_bytes
        share = min(1.0, max(0.0, room_bytes / max(1, most_bytes)))
        high = next(i for i in range(1, len(_KNOTS)) if share <= _KNOTS[i])
        at_knots = [self._at_knot(rank, short.more, knot) for knot in (high - 1, high)]
        return times * float(np.interp(share, _KNOTS[high - 1 : high + 1], at_knots))

    def _at_knot(self, rank: int, parts: _Parts, knot: int) -> float:
        """What short stages recompute in ms with so much memory."""
        key = rank, parts, knot
        if key not in self._knots:
            chooser = self._chooser(rank, parts)
            low, high = chooser.lowest().peak_bytes, chooser.plain.peak_bytes
            cap_bytes = low + int(_KNOTS[knot] * (high - low))
            choice = chooser.choose(cap_bytes, self.options)
            self._knots[key] = inf if choice is None else choice.recompute_ms
        return self._knots[key]

    def _chooser(self, rank: int, parts: _Parts) -> RankChooser:
        key = rank, parts
        if key not in self._choosers:
            self._choosers[key] = self.chooser_of(rank, parts)
        return self._choosers[key]


def _line(low: float, high: float) -> tuple[float, float]:
    """What each like block adds, and all that does not depend on their number."""
    each = (high - low) / (_MORE - _FEW)
    return each, high - _MORE * each


def extended(
    few: StageTimes, more: StageTimes, short: Shortened, recompute_ms: float
) -> StageTimes:
    """Times of the longer stage that two short ones stand for."""

    def total(low: float, high: float) -> float:
        each, fixed = _line(low, high)
        return fixed + short.num_like * each

    return StageTimes(
        forward_ms=total(few.forward_ms, more.forward_ms),
        backward_ms=total(few.backward_ms, more.backward_ms) + recompute_ms,
        optimizer_ms=total(few.optimizer_ms, more.optimizer_ms),
        gather_ms=total(few.gather_ms, more.gather_ms),
        send_ms=more.send_ms,
    )
