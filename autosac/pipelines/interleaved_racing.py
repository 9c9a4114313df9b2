"""Interleaved 1F1B: the cuts whose step is fastest, where a rank has several stages.

What a stage recomputes depends on the others of its rank, so no stage can be asked for
alone. Cuts begin as those that are fastest by the times of blocks. All stages of a rank
are planned together (`stage_choosing.SharedRankChooser`), and then a block moves from
the rank that does not fit, or takes longest, to another one, while that is better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from autosac.pipelines.constant_memory import besides_bytes
from autosac.pipelines.cutting import Cuts, Cutting
from autosac.pipelines.estimating import Shortened, shortened
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.planned_stages import Lowest, PlannedStage
from autosac.pipelines.playing import StageTimes, step_ms
from autosac.pipelines.schedule_racing import MARGIN, Race
from autosac.pipelines.schedules import ONE_F_ONE_B, Schedule
from autosac.pipelines.stage_choosing import (
    RankChooser,
    SharedRankChooser,
    StageChoice,
)
from autosac.pipelines.stage_steps import StageStep
from autosac.solving.incumbents import recompute_ms
from autosac.solving.solve_options import SolveOptions

_Stage = tuple[int, int, int]  # index, first block and end
_MOST_PLAYED = 1024  # cuts by times alone
_MOST_TRIED = 48  # cuts whose ranks are estimated, or planned
_LONG = 4  # micro-batches for each stage, with which the longest one counts


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """Cuts whose ranks were planned.

    Attributes:
        starts: First blocks of stages.
        times: Of the stages.
        step_ms: Of a step; inf if a rank does not fit.
        excess_bytes: By which the lowest peak of each rank is above the budget.
    """

    starts: tuple[int, ...]
    times: tuple[StageTimes, ...]
    step_ms: float
    excess_bytes: tuple[float, ...]

    @property
    def cost(self) -> tuple[list[float], float]:
        """What is made least: what ranks lack, the most first, and then the time."""
        lacking = (excess for excess in self.excess_bytes if excess > 0)
        return sorted(lacking, reverse=True), self.step_ms


class InterleavedRace(Race):
    """Interleaved 1F1B under one budget; see `Race`."""

    def _plan_cuts(self, starts: tuple[int, ...]) -> bool:
        """Plan stages like those with these first blocks; whether all fit."""
        if starts not in self._known:
            self._known.append(starts)
        return self._try_planned(starts).step_ms < inf

    @property
    def name(self) -> str:
        """The schedule in words."""
        return f"{super().name}, {self.schedule.stages_per_rank} stages a rank"

    @cached_property
    def bound_ms(self) -> float:
        """No cuts give a faster step: every rank works on all its stages."""
        number, ranks = self.schedule.num_micro_batches, self.schedule.num_ranks
        work_ms = number * sum(self.micro_batch.block_ms) / ranks
        return max(work_ms, self._new_cutting(inf).bound_ms)

    @property
    def plain_ms(self) -> float:
        """Of the best cuts that were found if nothing is recomputed."""
        return self._by_time.step_ms

    def run(self, best_ms: float) -> Cuts:
        """The best cuts found, if they are faster than the best known step.

        Ranks of all cuts that are tried are planned, unless estimates say that none
        win.
        """
        cuts = self.guess(best_ms)
        if not cuts.starts and best_ms < inf:
            return cuts
        guessed = self._try_planned(self._best_below(best_ms).starts)
        searched = self._search(self._first(self._try_planned), self._try_planned)
        best = min(searched, guessed, key=lambda tried: tried.cost)
        self._searched[self.micro_batch.shares] = best
        return self.guess(best_ms)

    def guess(self, best_ms: float) -> Cuts:
        """The best cuts by what is known and estimated.

        With offload they need not be faster by a gap: they begin with those without.
        """
        faster_ms = best_ms if self.plain else (1 - self.gap) * best_ms
        if self.plain_ms < faster_ms:
            best = self._best_below(faster_ms)
            if best.step_ms < faster_ms:
                return Cuts(best.step_ms, best.starts)
        return Cuts(best_ms, ())

    def planned(self, cuts: Cuts) -> list[PlannedStage] | None:
        """All stages as they are; None if a rank does not fit."""
        planned: dict[int, PlannedStage] = {}
        for rank, stages in enumerate(self._by_rank(cuts.starts)):
            chooser, late_bytes = self._own_chooser(rank, stages)
            left_bytes = self.budget_bytes - late_bytes
            known = self._choice(rank, stages)
            if known is not None:  # which is looked at as well then
                chooser.taken_over(self._chooser(rank, stages), known)
            choice = chooser.choose(left_bytes, self._options)
            if choice is None:
                return None
            for stage, own in chooser.by_stage(choice.choice).items():
                planned[stage] = PlannedStage(
                    chooser.steps[stage],
                    StageChoice(
                        choice=own,
                        recompute_ms=recompute_ms(own),
                        peak_bytes=choice.peak_bytes,
                    ),
                    late_bytes,
                )
        return [planned[stage] for stage in range(self.schedule.num_stages)]

    @property
    def least_bytes(self) -> int:
        """What the fullest rank keeps at least; also what schedules differ in."""
        handed_bytes = max(self.micro_batch.handed_bytes)
        own_bytes = self.micro_batch.least_bytes // self.schedule.num_ranks
        return own_bytes + self.schedule.num_stages * handed_bytes

    @property
    def guessed_lowest_bytes(self) -> float:
        """The least peak of a rank that was found."""
        return self.budget_bytes + max(self._best.excess_bytes)

    def lowest(self) -> Lowest:
        """Likewise, with the rank's first stage."""
        excess = self._best.excess_bytes
        rank = excess.index(max(excess))
        stages = self._by_rank(self._best.starts)[rank]
        chooser, late_bytes = self._own_chooser(rank, stages)
        lowest = chooser.lowest()
        choice = chooser.by_stage(lowest.choice)[rank]
        return Lowest(
            lowest.peak_bytes + late_bytes,
            *stages[0],
            chooser.steps[rank].later.composition(choice),
            late_bytes,
        )

    @property
    def _options(self) -> SolveOptions:
        return SolveOptions(relative_gap=self.relative_gap)

    @property
    def _roughly(self) -> SolveOptions:
        gap = max(self.relative_gap, MARGIN - 1)
        return SolveOptions(relative_gap=gap, polishes=False)

    @cached_property
    def _even(self) -> Cutting:
        """The search for stages that take about as long, by the times of blocks.

        Of those of a pipeline with a rank for each the longest one says how long a step
        takes.
        """
        stages = self.schedule.num_stages
        alone = Schedule(
            name=ONE_F_ONE_B, num_ranks=stages, num_micro_batches=_LONG * stages
        )
        return Cutting(
            schedule=alone,
            block_ms=self.micro_batch.block_ms,
            forward_ms=self.micro_batch.forward_ms,
            cuts=self.micro_batch.cuts,
            times_of=self._plain_times,
            relative_gap=0.0,
        )

    def _plain_times(self, _: int, first: int, end: int) -> StageTimes:
        """What blocks take without recomputation, taken to be 2/3 backward."""
        own_ms = sum(self.micro_batch.block_ms[first:end])
        return StageTimes(forward_ms=own_ms / 3, backward_ms=own_ms * 2 / 3)

    @property
    def _best(self) -> _Tried:
        """The best cuts that were found."""
        return self._best_below(inf)

    def _best_below(self, most_ms: float) -> _Tried:
        """Likewise; of long chains the first ones where none are taken to be faster."""
        shares = self.micro_batch.shares
        if shares not in self._searched:
            first = self._first(self._try)
            if self.gap and self._evened_ms(first) >= most_ms:
                return first
            self._searched[shares] = self._search(first, self._try)
        return self._searched[shares]

    def _first(self, try_: Callable[[tuple[int, ...]], _Tried]) -> _Tried:
        """The best of the cuts that are known and those by time."""
        tried = [try_(starts) for starts in (self._by_time.starts, *self._known)]
        return min(tried, key=lambda tried: tried.cost)

    def _search(
        self, first: _Tried, try_: Callable[[tuple[int, ...]], _Tried]
    ) -> _Tried:
        """The best cuts that are found from some on."""
        own = self._descend(first, try_)
        if own.step_ms == inf:  # even stages may need less memory
            even = self._descend(try_(self._even.starts), try_)
            own = min(own, even, key=lambda tried: tried.cost)
        return own

    def _evened_ms(self, tried: _Tried) -> float:
        """Of a step whose ranks work as long as these, but all equally long.

        Blocks that move recompute about as much elsewhere. What does not fit recomputes
        nothing here, so that it says little. A rank with several stages waits as many
        times less for the first micro-batch.
        """
        busy_ms = sum(own.forward_ms + own.backward_ms for own in tried.times)
        ranks, stages = self.schedule.num_ranks, self.schedule.stages_per_rank
        waits = (ranks - 1) / stages
        return busy_ms * (self.schedule.num_micro_batches + waits) / ranks

    @cached_property
    def _by_time(self) -> _Tried:
        """The best cuts that were found if nothing is recomputed."""
        self._even.run()
        even = self._plain(self._even.starts)
        return self._descend(even, self._plain, _MOST_PLAYED)

    @cached_property
    def _searched(self) -> dict[bool, _Tried]:
        """Likewise, with like stages taken to be alike and without."""
        return {}

    def _descend(
        self,
        best: _Tried,
        try_: Callable[[tuple[int, ...]], _Tried],
        most: int = _MOST_TRIED,
    ) -> _Tried:
        """Move one block after the other from the best cuts, so many times at most."""
        neighbours = self._neighbours(best)
        for _ in range(most):
            neighbour = next(neighbours, None)
            if neighbour is None:
                break
            other = try_(neighbour)
            if other.cost < best.cost:
                best, neighbours = other, self._neighbours(other)
        return best

    def _neighbours(self, tried: _Tried) -> Iterator[tuple[int, ...]]:
        """Cuts with one block moved that may be better, from the worst ranks first."""
        ranks = range(self.schedule.num_ranks)
        worst: list[float] = list(tried.excess_bytes)
        if tried.step_ms < inf:
            busy = [own.forward_ms + own.backward_ms for own in tried.times]
            worst = [sum(busy[s] for s in self.schedule.stages_of(r)) for r in ranks]
        order = sorted(ranks, key=lambda rank: -worst[rank])
        ordered = [s for rank in order for s in self.schedule.stages_of(rank)]
        for sender in ordered:
            for taker in ordered[::-1]:
                starts = self._even.moved(tried.starts, sender, taker)
                if starts and self._may_be_faster(starts, tried):
                    yield starts

    def _may_be_faster(self, starts: tuple[int, ...], tried: _Tried) -> bool:
        """Whether a step is faster if blocks take as long as those of their stages."""
        if tried.step_ms == inf:
            return True
        may_be_off = MARGIN if self.gap == 0 else 1.0  # long chains have many cuts
        moved_ms = self.moved_ms(starts, tried.starts, tried.times)
        return moved_ms < may_be_off * tried.step_ms

    def _plain(self, starts: tuple[int, ...]) -> _Tried:
        """Play what takes no recomputation, as if all fitted."""
        times = tuple(self._plain_times(*stage) for stage in self.stages_at(starts))
        return _Tried(
            starts=starts,
            times=times,
            step_ms=step_ms(self.schedule, times),
            excess_bytes=(0.0,) * self.schedule.num_ranks,
        )

    def _try(self, starts: tuple[int, ...]) -> _Tried:
        """What all ranks do, by what is known and estimated."""
        times: dict[int, StageTimes] = {}
        excess: list[float] = []
        for rank, stages in enumerate(self._by_rank(starts)):
            rerun_ms, excess_bytes = self._rank(rank, stages)
            excess.append(excess_bytes)
            for (stage, first, end), own_ms in zip(stages, rerun_ms, strict=True):
                like = self.micro_batch.like(first, end)
                short = self._shortened((stage, first, end))
                times[stage] = self._estimated_times(stage, like, short, own_ms, end)
        in_order = tuple(times[stage] for stage in range(len(times)))
        fits = max(excess) <= 0
        return _Tried(
            starts=starts,
            times=in_order,
            step_ms=step_ms(self.schedule, in_order) if fits else inf,
            excess_bytes=tuple(excess),
        )

    def _try_planned(self, starts: tuple[int, ...]) -> _Tried:
        """Plan all ranks."""
        for rank, stages in enumerate(self._by_rank(starts)):
            self._choice(rank, stages)
        return self._try(starts)

    def _rank(
        self, rank: int, stages: Sequence[_Stage]
    ) -> tuple[Sequence[float], float]:
        """What stages of a rank recompute, and by what their peak is above the budget.

        The peak is the least one if they do not fit.
        """
        shorts = [s for s in map(self._shortened, stages) if s is not None]
        is_planned = self._key(rank, stages) in self._of_ranks
        if is_planned or len(shorts) < len(stages):
            choice, chooser = self._choice(rank, stages), self._chooser(rank, stages)
            needed = chooser.lowest() if choice is None else choice
            by_stage = chooser.by_stage(needed.choice).values()
            late_bytes = self._late_bytes(stages)
            excess_bytes = needed.peak_bytes + late_bytes - self.budget_bytes
            return [recompute_ms(own) for own in by_stage], excess_bytes
        own_ms = self._estimates.recompute_ms(rank, shorts)
        if own_ms == inf:
            lowest_bytes = self._estimates.lowest_bytes(rank, shorts)
            return [0.0] * len(stages), max(1.0, lowest_bytes - self.budget_bytes)
        total = sum(short.num_like for short in shorts)
        return [own_ms * short.num_like / total for short in shorts], 0.0

    def _shortened(self, stage: _Stage) -> Shortened | None:
        return shortened(self.micro_batch, *self.micro_batch.like(*stage[1:]))

    def _chooser_of_parts(
        self, rank: int, parts: tuple[tuple[int, ...], ...]
    ) -> RankChooser:
        indices = self.schedule.stages_of(rank)
        return self._new_chooser(rank, self._steps(zip(indices, parts, strict=True)))

    def _by_rank(self, starts: Sequence[int]) -> list[list[_Stage]]:
        stages = self.stages_at(starts)
        ranks = range(self.schedule.num_ranks)
        return [[stages[s] for s in self.schedule.stages_of(r)] for r in ranks]

    def _choice(self, rank: int, stages: Sequence[_Stage]) -> StageChoice | None:
        """What stages like these recompute; None if they do not fit."""
        key = self._key(rank, stages)
        if key not in self._of_ranks:
            left_bytes = self.budget_bytes - self._late_bytes(stages)
            chooser = self._chooser(rank, stages)
            self._of_ranks[key] = chooser.choose(left_bytes, self._roughly)
        return self._of_ranks[key]

    @cached_property
    def _of_ranks(self) -> dict[tuple[object, ...], StageChoice | None]:
        return {}

    @cached_property
    def _rank_choosers(self) -> dict[tuple[object, ...], SharedRankChooser]:
        return {}

    def _key(self, rank: int, stages: Sequence[_Stage]) -> tuple[object, ...]:
        return rank, *(self.micro_batch.like(*stage[1:]) for stage in stages)

    def _late_bytes(self, stages: Sequence[_Stage]) -> int:
        """What slow threads may hold of what stages like these exchange."""
        like = (self.micro_batch.like(*stage[1:]) for stage in stages)
        return sum(self.micro_batch.late_bytes(*own) for own in like)

    def _chooser(self, rank: int, stages: Sequence[_Stage]) -> SharedRankChooser:
        """Of stages like these; two that are alike have units of their own."""
        key = self._key(rank, stages)
        if key not in self._rank_choosers:
            parts = (
                (stage, tuple(range(*self.micro_batch.like(first, end))))
                for stage, first, end in stages
            )
            self._rank_choosers[key] = self._new_chooser(rank, self._steps(parts))
        return self._rank_choosers[key]

    def _steps(
        self, parts: Iterable[tuple[int, tuple[int, ...]]]
    ) -> dict[int, StageStep]:
        """Steps of stages of some blocks; like ones have units of their own."""
        seen: Counter[tuple[int, ...]] = Counter()
        steps: dict[int, StageStep] = {}
        for stage, blocks in parts:
            steps[stage] = self.micro_batch.step_of(blocks).twin(seen[blocks])
            seen[blocks] += 1
        return steps

    def _own_chooser(
        self, rank: int, stages: Sequence[_Stage]
    ) -> tuple[SharedRankChooser, int]:
        """Of just these stages, and what slow threads may hold."""
        steps = {s: self.micro_batch.step(first, end) for s, first, end in stages}
        late_bytes = sum(self.micro_batch.late_bytes(*stage[1:]) for stage in stages)
        return self._new_chooser(rank, steps), late_bytes

    def _new_chooser(self, rank: int, steps: dict[int, StageStep]) -> SharedRankChooser:
        """Of these steps, the same one each time."""
        key = rank, *steps.values()
        if key not in self._of_steps:
            self._of_steps[key] = SharedRankChooser(
                self.schedule,
                rank,
                steps,
                besides_bytes=besides_bytes(self.micro_batch, self.schedule, rank),
                far=self.far,
                without=self._chooser_without(rank, steps),
            )
        return self._of_steps[key]

    def _chooser_without(
        self, rank: int, steps: dict[int, StageStep]
    ) -> SharedRankChooser | None:
        """That of the race without offload; None if this one is without."""
        if self.plain is None:
            return None
        assert isinstance(self.plain, InterleavedRace)
        return self.plain._new_chooser(rank, steps)

    @cached_property
    def _of_steps(self) -> dict[tuple[object, ...], SharedRankChooser]:
        return {}


def race_of(
    micro_batch: MicroBatch,
    schedule: Schedule,
    budget_bytes: int,
    relative_gap: float,
    mesh: str = "",
) -> Race:
    """The race of a schedule; see `Race`."""
    kind = InterleavedRace if schedule.is_looped else Race
    return kind(micro_batch, schedule, budget_bytes, relative_gap, mesh)
