"""Where to cut a chain of blocks into stages: branch and bound over the cuts.

The search begins with the cuts whose bound is least, and moves blocks from the stage
that takes longest to others while that helps. Then stages are fixed from the first one
on. A branch is given up as soon as no step with its stages can be faster than the best
one known. The bound on the stages that are left is the best of all ways to cut them, by
dynamic programming over what each of them takes at least: its blocks recomputed
nowhere, or what is known of a stage of some of its blocks. What a stage really takes,
under its cap and at its place in the schedule, is asked for only when a branch comes to
it.

A step takes as long as its slowest stage works and waits: for the first micro-batch to
go on through all stages behind it and back, and for the last one to go back through
those before. Of p stages under 1F1B the first goes forward with p micro-batches by
then, under GPipe with all. On its way the first micro-batch waits in each stage until
parameters are gathered, and the first stage, the last one that is done, reduces
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from autosac.pipelines.playing import StageTimes, step_ms
from autosac.pipelines.schedules import Schedule

# Times of blocks from the first to before the last as a stage of that index; None if
# they do not fit.
TimesOf = Callable[[int, int, int], StageTimes | None]
_Array = npt.NDArray[np.float64]
_Times = TypeVar("_Times", float, _Array)
# Work, not time: steps played to the end, the most promising first, and their actions.
_MOST_PLAYED = 100
_MOST_ACTIONS = 2**21
# Stages that take by this more or less time than on average have not the least peak,
_UNEVEN = 1.75
_SHORT_CHAIN = 32  # unless there are less blocks than these.


class Cuts(NamedTuple):
    """Where a chain is cut.

    Attributes:
        step_ms: Time of a step with these stages.
        starts: First block of each of them; empty if none is faster than what is known.
    """

    step_ms: float
    starts: tuple[int, ...]


class _Behind(NamedTuple):
    """What stages take at least from one of them on, for each first block of that.

    Attributes:
        last_ms: Until all micro-batches went through them, if they come at once.
        one_ms: The first micro-batch, through all of them.
        busy_ms: Others, in the slowest of them, as `Cutting._busy_ms` says.
    """

    last_ms: _Array
    one_ms: _Array
    busy_ms: _Array


@dataclass(kw_only=True)
class Cutting:
    """The search for one schedule.

    Attributes:
        schedule: Of the pipeline.
        block_ms: Forward and backward of each block, nothing recomputed: no more than
            what it takes in a stage.
        forward_ms: Forward of it alone.
        sharding_ms: What each block takes at least to be gathered, and its gradients to
            be reduced; nothing if left out.
        cuts: Blocks that a stage may begin with, besides the first.
        times_of: Says what a stage takes.
        relative_gap: Another cutting must be faster by more.
        handed_bytes: What comes before each block and behind the last one. A stage that
            is handed and hands on no less than another, and has all its blocks, is
            taken to need no less memory and time.
        best_ms: Time of the best step so far; of other schedules to begin with.
        starts: First block of each of its stages; empty if none is better.
    """

    schedule: Schedule
    block_ms: Sequence[float]
    forward_ms: Sequence[float]
    cuts: Sequence[int]
    times_of: TimesOf
    relative_gap: float
    sharding_ms: Sequence[tuple[float, float]] | None = None
    handed_bytes: Sequence[int] | None = None
    best_ms: float = inf
    starts: tuple[int, ...] = ()
    _places: list[int] = field(init=False)  # to cut at, and both ends
    _place_of: dict[int, int] = field(init=False)
    _least: list[_Array] = field(init=False)
    _hidden: list[int] = field(init=False)  # forwards of each stage, see `_busy_ms`
    _first_of_last: int = field(init=False)  # forwards of the last one in its first go
    _suffix: list[_Behind] | None = field(init=False, default=None)
    _known: dict[tuple[int, int, int], StageTimes | None] = field(
        init=False, default_factory=dict
    )
    _played: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        size, last = len(self.block_ms), self.schedule.num_stages - 1
        self._plain = _between(self.block_ms)
        self._forward = _between(self.forward_ms)
        sharding_ms = self.sharding_ms or [(0.0, 0.0)] * size
        self._gather = _between([gather_ms for gather_ms, _ in sharding_ms])
        self._reduce = _between([reduce_ms for _, reduce_ms in sharding_ms])
        in_flight = [self.schedule.most_in_flight(s) for s in range(last + 1)]
        self._first_of_last = in_flight[-1]
        self._hidden = [number - in_flight[-1] for number in in_flight]
        self._handed = np.array(self.handed_bytes or [0] * (size + 1))
        may_begin = np.isin(np.arange(size + 1), [0, *self.cuts])
        may_end = np.isin(np.arange(size + 1), [*self.cuts, size])
        self._places = [0, *self.cuts, size]
        self._place_of = {first: place for place, first in enumerate(self._places)}
        after = np.arange(size + 1)[None, :] > np.arange(size + 1)[:, None]
        allowed = may_begin[:, None] & may_end[None, :] & after
        self._least = []
        for stage in range(last + 1):
            own = allowed.copy()
            own[1 if stage == 0 else size :, :] = False
            if stage:
                own[0, :] = False
            own[:, :size] &= stage < last
            own[:, size] &= stage == last
            self._least.append(np.where(own, self._plain, inf))

    @property
    def _is_done(self) -> bool:
        """Whether enough steps were played."""
        actions = 2 * self.schedule.num_stages * self.schedule.num_micro_batches
        most = min(_MOST_PLAYED, max(1, _MOST_ACTIONS // actions))
        return self._played >= most

    @property
    def bound_ms(self) -> float:
        """No cuts give a faster step, whatever fits: by the times of blocks alone."""
        return float(self._bounds([], 0, 0).min())

    def run(self) -> None:
        """Find the best cutting."""
        known = self.best_ms, self.starts
        if stages := self._most_promising():
            self.best_ms, self.starts = inf, ()
            self._play(stages)
            self._move_blocks()
            own_ms, (self.best_ms, _) = self.best_ms, known
            if self._is_lost(own_ms):
                self.starts = known[1]
                self._move_blocks()
            else:
                self.best_ms = own_ms
        self._extend([0], [])

    def _move_blocks(self) -> None:
        """Move blocks one by one while that is faster."""
        while self._has_moved_a_block():
            pass

    def _has_moved_a_block(self) -> bool:
        """Move one from the stage that takes longest to another, if that is faster."""
        stages = self._stages_at(self.starts)
        own_ms = [
            own.forward_ms + own.backward_ms
            for own in (self._ask(*stage) for stage in stages)
            if own is not None
        ]
        if not stages or len(own_ms) < len(stages):
            return False
        order = np.argsort(own_ms, kind="stable").tolist()
        moved = (self.moved(self.starts, order[-1], taker) for taker in order[:-1])
        return any(self._play(self._stages_at(starts)) for starts in moved if starts)

    def moved(self, starts: Sequence[int], sender: int, taker: int) -> tuple[int, ...]:
        """First blocks of stages one of which has a place to cut less, and one more.

        Those between the two begin at the next place, or at the one before.

        Args:
            starts: First blocks of the stages.
            sender: Index of the stage that has less,
            taker: and of that which has more.

        Returns:
            First blocks; none if a stage would have no block.
        """
        marks = [self._place_of[first] for first in (*starts, len(self.block_ms))]
        step = -1 if sender < taker else 1
        between = range(min(sender, taker) + 1, max(sender, taker) + 1)
        moved = [m + step if i in between else m for i, m in enumerate(marks)]
        if any(mark >= after for mark, after in pairwise(moved)):
            return ()
        return tuple(self._places[mark] for mark in moved[:-1])

    def _stages_at(self, starts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Index, first block and end of each stage, given the first blocks."""
        pairs = pairwise([*starts, len(self.block_ms)])
        return [(i, first, end) for i, (first, end) in enumerate(pairs)]

    def _most_promising(self) -> list[tuple[int, int, int]]:
        """Stages whose bound is least, all cuts considered; none if nothing fits."""
        while stages := self._least_by_bounds():
            if all(stage in self._known for stage in stages):
                return stages
            for stage in stages:
                self._ask(*stage)
        return []

    def _least_by_bounds(self) -> list[tuple[int, int, int]]:
        """Likewise, by what is known so far; none if all are lost."""
        stages, first, number = [], 0, self.schedule.num_micro_batches
        for index in range(self.schedule.num_stages):
            least, behind = self._least[index][first], self._behind()[index + 1]
            bounds = np.maximum(number * least, least + behind.last_ms)
            bounds += self._gather[first]
            end = int(bounds.argmin())
            if self._is_lost(bounds[end]):
                return []
            stages.append((index, first, end))
            first = end
        return stages

    def _play(self, stages: Sequence[tuple[int, int, int]]) -> bool:
        """Keep some stages if they are faster than the best; whether they are."""
        if not stages or self._is_done:
            return False
        times = [own for own in (self._ask(*stage) for stage in stages) if own]
        if len(times) < len(stages):
            return False
        index, first, end = stages[-1]
        if self._is_lost(self._bounds(times[:-1], index, first)[end]):
            return False
        self._played += 1
        time_ms = step_ms(self.schedule, times)
        if self._is_lost(time_ms):
            return False
        self.best_ms, self.starts = time_ms, tuple(first for _, first, _ in stages)
        return True

    def _extend(self, starts: list[int], times: list[StageTimes]) -> None:
        """Try all ends of the last stage, the most promising ones first."""
        index, first = len(times), starts[-1]
        is_last = index == self.schedule.num_stages - 1
        bounds = self._bounds(times, index, first)
        for end in np.argsort(bounds, kind="stable").tolist():
            if self._suffix is None:  # more is known
                bounds = self._bounds(times, index, first)
            if self._is_lost(bounds[end]) or self._is_done:
                continue
            own = self._ask(index, first, end)
            if self._suffix is None:
                bounds = self._bounds(times, index, first)
            if own is None or self._is_lost(bounds[end]):
                continue
            if not is_last:
                self._extend([*starts, end], [*times, own])
                continue
            self._play(self._stages_at(starts))

    def _is_lost(self, least_ms: float) -> bool:
        return bool(least_ms >= (1 - self.relative_gap) * self.best_ms)

    def _bounds(self, times: Sequence[StageTimes], index: int, first: int) -> _Array:
        """No step takes less with these stages and one from a block to each end.

        A stage waits for the first micro-batch, works on all, and the last one goes
        back through the stages before. Or it waits for the first one to come back, and
        works on the others.
        """
        number = self.schedule.num_micro_batches
        before_ms = through_ms = known_ms = busy_ms = 0.0
        for stage, own in enumerate(times):
            own_ms = own.forward_ms + own.backward_ms
            known_ms = max(known_ms, before_ms + own.gather_ms + number * own_ms)
            busy_ms = max(busy_ms, self._busy_ms(stage, own_ms, own.forward_ms))
            before_ms += own.gather_ms + own_ms + 2 * own.send_ms
            through_ms += own_ms + 2 * own.send_ms
            through_ms += own.gather_ms * self._first_comes_back
        least, behind = self._least[index][first], self._behind()[index + 1]
        gather_ms = self._gather[first]
        last_ms = np.maximum(number * least, least + behind.last_ms)
        rest: _Array = before_ms + gather_ms + last_ms
        own_busy_ms = self._busy_ms(index, least, self._forward[first])
        busy = np.maximum(np.maximum(busy_ms, own_busy_ms), behind.busy_ms)
        one_ms = gather_ms * self._first_comes_back + least + behind.one_ms
        rest = np.maximum(rest, through_ms + one_ms + busy)
        optimizer_ms = times[0].optimizer_ms if times else self._reduce[first]
        bounds: _Array = optimizer_ms + np.maximum(known_ms, rest)
        return bounds

    @property
    def _first_comes_back(self) -> bool:
        """Whether the first micro-batch comes back before the last one has gone on.

        Else other forwards may go on while stages behind are gathered.
        """
        return self.schedule.is_looped or self._first_of_last == 1

    def _busy_ms(self, stage: int, own_ms: _Times, forward_ms: _Times) -> _Times:
        """What a stage does at least besides one micro-batch, while that does not wait.

        Forwards before its first backward may be done while it waits for that, but for
        as many as the last stage begins with.

        Args:
            stage: Index of the stage.
            own_ms: Of a micro-batch, forward and backward,
            forward_ms: and forward alone.
        """
        others = self.schedule.num_micro_batches - 1
        # Of ranks with several stages other ones are in between.
        if self.schedule.is_looped or not others:
            return 0.0 * forward_ms
        return others * own_ms - self._hidden[stage] * forward_ms

    def _behind(self) -> list[_Behind]:
        """For each index and block the least that stages from there on take."""
        if self._suffix is None:
            last_ms = np.full(len(self.block_ms) + 1, inf)
            last_ms[-1] = 0.0
            behind = _Behind(last_ms, last_ms, last_ms)
            self._suffix = [behind]
            number = self.schedule.num_micro_batches
            for index, least in reversed(list(enumerate(self._least))):
                busy_ms = self._busy_ms(index, least, self._forward)
                last_ms = np.maximum(number * least, least + behind.last_ms)
                one_ms = self._gather * self._first_comes_back + least
                behind = _Behind(
                    (self._gather + last_ms).min(axis=1),
                    (one_ms + behind.one_ms).min(axis=1),
                    np.maximum(busy_ms, behind.busy_ms).min(axis=1),
                )
                self._suffix.insert(0, behind)
        return self._suffix

    def _ask(self, stage: int, first: int, end: int) -> StageTimes | None:
        """What a stage takes; bounds on others learn from it."""
        key = stage, first, end
        if key not in self._known:
            own = self._known[key] = self.times_of(*key)
            own_ms = inf if own is None else own.forward_ms + own.backward_ms
            self._learn(stage, first, end, own_ms)
        return self._known[key]

    def _learn(self, stage: int, first: int, end: int, own_ms: float) -> None:
        """A stage that has these blocks takes no less, nor one with more in flight."""
        larger = own_ms + self._plain - self._plain[first, end]
        no_less = (self._handed[: first + 1] >= self._handed[first])[:, None] & (
            self._handed[end:] >= self._handed[end]
        )
        is_inner = 0 < stage < self.schedule.num_stages - 1
        for other in range(1 if is_inner else stage, stage + 1):
            part = self._least[other][: first + 1, end:]
            np.maximum(part, larger[: first + 1, end:], out=part, where=no_less)
        self._suffix = None


def _between(values: Sequence[float]) -> _Array:
    """Sums over the blocks from each place to before each other one."""
    until = np.array([0.0, *accumulate(values)])
    sums: _Array = until[None, :] - until[:, None]
    return sums


def lowest_cut(
    block_ms: Sequence[float],
    cuts: Sequence[int],
    num_stages: int,
    lowest_of: Callable[[int, int, int], float],
) -> tuple[int, ...]:
    """First blocks of the stages whose highest peak is least.

    In long chains only of stages that take no such multiple of each other's time, if
    there are any.

    Args:
        block_ms: Time of each block.
        cuts: Blocks that a stage may begin with.
        num_stages: How many there are.
        lowest_of: Index, first block and end of a stage -> its least peak.
    """
    most = _UNEVEN if len(block_ms) >= _SHORT_CHAIN else inf
    return _lowest_cut(block_ms, cuts, num_stages, lowest_of, most) or _lowest_cut(
        block_ms, cuts, num_stages, lowest_of, inf
    )


def _lowest_cut(
    block_ms: Sequence[float],
    cuts: Sequence[int],
    num_stages: int,
    lowest_of: Callable[[int, int, int], float],
    uneven: float,
) -> tuple[int, ...]:
    """Likewise, of stages that take no such multiple of each other's time."""
    until = [0.0, *accumulate(block_ms)]
    share_ms = until[-1] / num_stages
    ends = [*cuts, len(block_ms)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(num_stages):
        left = num_stages - stage - 1
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in ends[stage : len(ends) - left] if left else ends[-1:]:
            for first, (before, starts) in best.items():
                own_ms = until[end] - until[first]
                if first < end and share_ms / uneven <= own_ms <= share_ms * uneven:
                    own = max(before, lowest_of(stage, first, end))
                    cut = own, (*starts, first)
                    reached[end] = min(reached.get(end, (inf, ())), cut)
        best = reached
    return best.get(ends[-1], (inf, ()))[1]
