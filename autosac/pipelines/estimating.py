"""What long stages recompute, estimated from short ones: guides the search for cuts.

Of like blocks a stage keeps and recomputes as many times more as it has more of them,
but for what does not depend on their number. So its peak is taken to lie on the line
through those of two short stages, and what it recomputes to be that of the longer one
of these under its share of the cap: on lines between a few caps, as very many are asked
for. No estimate is part of a plan: the stages of the cuts that win are planned
themselves, and correct the estimates of others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import NamedTuple

import numpy as np

from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.playing import StageTimes
from autosac.pipelines.stage_choosing import StageChooser
from autosac.solving.solve_options import SolveOptions

_FEW, _MORE = 2, 5  # like blocks of stages that stand for longer ones,
_LONG = 6  # of so many like blocks and more
# Caps between the least peak and that of nothing recomputed: times fall ever less fast.
_KNOTS = (0.0, *(2.0**-power for power in range(4, -1, -1)))


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


@dataclass(kw_only=True)
class Estimates:
    """Estimates for one schedule under one cap.

    Attributes:
        micro_batch: Says which stages are like longer ones.
        chooser_of: Makes the chooser of some blocks as a stage of an index.
        cap_bytes: On the peak of a rank.
        options: How to solve.
    """

    micro_batch: MicroBatch
    chooser_of: Callable[[int, tuple[int, ...]], StageChooser]
    cap_bytes: int
    options: SolveOptions
    _choosers: dict[tuple[int, tuple[int, ...]], StageChooser] = field(
        default_factory=dict
    )
    _estimates: dict[tuple[int, tuple[int, ...], int], float] = field(
        default_factory=dict
    )
    _knots: dict[tuple[int, tuple[int, ...], int], float] = field(default_factory=dict)
    # Of stages that were planned, by what they were estimated from.
    _planned: dict[tuple[int, tuple[int, ...]], dict[int, float]] = field(
        default_factory=dict
    )

    def recompute_ms(self, stage: int, short: Shortened) -> float:
        """What a stage recomputes; inf if it is taken not to fit."""
        own = self._of(stage, short)
        planned = self._planned.get((stage, self._alike(short.more)), {})
        if not planned:
            return own
        number = short.num_like
        near = min(planned, key=lambda other: (abs(other - number), other))
        if planned[near] == inf:
            return inf if number >= near else own
        other = self._of(stage, short._replace(num_like=near))
        if inf in (own, other):
            if number > near:
                return own
            return planned[near] * number / near
        return max(0.0, planned[near] + own - other)

    def learn(self, stage: int, short: Shortened, recompute_ms: float) -> None:
        """What a stage does recompute; inf if it does not fit."""
        key = stage, self._alike(short.more)
        self._planned.setdefault(key, {})[short.num_like] = recompute_ms

    def _of(self, stage: int, short: Shortened) -> float:
        """An estimate by short stages alone."""
        more = self._alike(short.more)
        key = stage, more, short.num_like
        if key not in self._estimates:
            few = self._alike(short.few)
            self._estimates[key] = self._estimated(stage, few, more, short)
        return self._estimates[key]

    def lowest_bytes(self, stage: int, short: Shortened) -> float:
        """The least peak of a stage's rank."""
        few, more = map(self._alike, (short.few, short.more))
        low, high = (
            self._chooser(stage, blocks).lowest().peak_bytes for blocks in (few, more)
        )
        each, fixed = _line(low, high)
        return fixed + short.num_like * each

    def _estimated(
        self, stage: int, few: tuple[int, ...], more: tuple[int, ...], short: Shortened
    ) -> float:
        fewer, chooser = self._chooser(stage, few), self._chooser(stage, more)
        times = short.num_like / _MORE

        if self.lowest_bytes(stage, short) > self.cap_bytes:
            return inf
        each, fixed = _line(fewer.plain.peak_bytes, chooser.plain.peak_bytes)
        if fixed + short.num_like * each <= self.cap_bytes:
            return 0.0
        least_bytes = chooser.lowest().peak_bytes
        room_bytes = fixed + (self.cap_bytes - fixed) / times - least_bytes
        most_bytes = chooser.plain.peak_bytes - least_bytes
        share = min(1.0, max(0.0, room_bytes / max(1, most_bytes)))
        high = next(i for i in range(1, len(_KNOTS)) if share <= _KNOTS[i])
        at_knots = [self._at_knot(stage, more, knot) for knot in (high - 1, high)]
        return times * float(np.interp(share, _KNOTS[high - 1 : high + 1], at_knots))

    def _at_knot(self, stage: int, blocks: tuple[int, ...], knot: int) -> float:
        """What a short stage recomputes in ms with so much memory."""
        key = stage, blocks, knot
        if key not in self._knots:
            chooser = self._chooser(stage, blocks)
            low, high = chooser.lowest().peak_bytes, chooser.plain.peak_bytes
            cap_bytes = low + int(_KNOTS[knot] * (high - low))
            choice = chooser.choose(cap_bytes, self.options)
            self._knots[key] = inf if choice is None else choice.recompute_ms
        return self._knots[key]

    def _alike(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return self.micro_batch.first_like(blocks)

    def _chooser(self, stage: int, blocks: tuple[int, ...]) -> StageChooser:
        key = stage, blocks
        if key not in self._choosers:
            self._choosers[key] = self.chooser_of(stage, blocks)
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
