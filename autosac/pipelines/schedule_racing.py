"""One schedule of a pipeline: the cuts whose step is fastest and fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

from autosac.pipelines.constant_memory import besides_bytes
from autosac.pipelines.cutting import Cuts, Cutting, lowest_cut
from autosac.pipelines.estimating import Estimates, Shortened, extended, shortened
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.planned_stages import (
    Lowest,
    PlannedStage,
    of_pipeline,
    stage_plan,
)
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.playing import StageTimes, step_ms
from autosac.pipelines.schedules import GPIPE, Schedule
from autosac.pipelines.stage_choosing import (
    FarBytes,
    RankChooser,
    StageChoice,
    StageChooser,
)
from autosac.solving.solve_options import SolveOptions

MARGIN = 1.02  # by which an estimate may be wrong and still win
_MOST_MOVED = 12  # cuts with a block moved from the best ones that are planned


class Race:
    """One schedule under one budget.

    Args:
        micro_batch: The model.
        schedule: The schedule.
        budget_bytes: Cap on the peak of a rank.
        relative_gap: As in `plan_pipeline`.
        mesh: Its name for people, if there are several.
        far: What a rank may have in far memory; None for nothing.
        plain: The same without offload: what it has planned is known here, too.
    """

    def __init__(
        self,
        micro_batch: MicroBatch,
        schedule: Schedule,
        budget_bytes: int,
        relative_gap: float,
        mesh: str = "",
        far: FarBytes | None = None,
        plain: Race | None = None,
    ) -> None:
        self.micro_batch, self.schedule, self.mesh = micro_batch, schedule, mesh
        self.far, self.plain = far, plain
        self.budget_bytes, self.relative_gap = budget_bytes, relative_gap
        self._choosers: dict[tuple[int, tuple[int, ...]], StageChooser] = {}
        self._choices: dict[tuple[int, int, int], StageChoice | None] = {}
        # First blocks of stages that were planned: no cuts are found that are slower.
        self._known: list[tuple[int, ...]] = []
        self._lowest_bytes: dict[tuple[int, int, int], float] = {}
        self._estimates = Estimates(
            micro_batch=micro_batch,
            schedule=schedule,
            chooser_of=self._chooser_of_parts,
            cap_bytes=budget_bytes,
            options=SolveOptions(
                relative_gap=max(relative_gap, MARGIN - 1), polishes=False
            ),
        )

    @property
    def name(self) -> str:
        """The schedule in words."""
        number = self.schedule.num_micro_batches
        mesh = f"{self.mesh}, " if self.mesh else ""
        offload = " with offload" if self.far else ""
        return f"{mesh}{self.schedule.name}, {number} micro-batches{offload}"

    @property
    def may_offload(self) -> bool:
        """Whether stages may use far memory: not if they have collectives."""
        return not self.micro_batch.is_divided

    def offloading(self, far: FarBytes, starts: tuple[int, ...] = ()) -> Race:
        """The same whose stages may use far memory.

        Args:
            far: How much of it a rank may use.
            starts: First blocks of stages that it begins with, which are planned.
        """
        given = self.micro_batch, self.schedule, self.budget_bytes, self.relative_gap
        race = type(self)(*given, self.mesh, far, self)
        if starts:
            race._plan_cuts(starts)
        return race

    def anew(self) -> Race:
        """The same with nothing worked out, as that takes much memory."""
        own = self.micro_batch
        given = self.schedule, self.budget_bytes, self.relative_gap, self.mesh
        micro_batch = own.among(own.parallel, own.cluster)
        return type(self)(micro_batch, *given, self.far, self.plain)

    @cached_property
    def gap(self) -> float:
        """By how much others must be faster: not at all where nothing is estimated.

        So with more memory or faster links short chains are never slower by a gap.
        """
        is_short = shortened(self.micro_batch, 0, len(self.micro_batch.chain)) is None
        return 0.0 if is_short else self.relative_gap

    def run(self, best_ms: float) -> Cuts:
        """Find the best cuts, if they are faster than the best known step.

        Long stages are estimated until cuts with them win, and planned then. So are
        those of cuts with one block moved that may be faster.
        """
        cuts = self.guess(best_ms)
        while not all(map(self._is_planned, self.stages_at(cuts.starts))):
            self._plan_cuts(cuts.starts)
            cuts = self.guess(best_ms)
        if not cuts.starts and best_ms == inf and self._lowest_fits():
            return self.run(best_ms)
        return self._with_blocks_moved(cuts) if cuts.starts else cuts

    def _with_blocks_moved(self, cuts: Cuts) -> Cuts:
        """Faster cuts than these, one block moved after the other; all are planned."""
        neighbours = self._moved_cuts(cuts)
        for _ in range(_MOST_MOVED):
            starts = next(neighbours, None)
            if starts is None:
                break
            if self._plan_cuts(starts):
                own_ms = self._guessed_ms(starts)
                if own_ms < cuts.step_ms:
                    cuts = Cuts(own_ms, starts)
                    neighbours = self._moved_cuts(cuts)
        return cuts

    def _moved_cuts(self, cuts: Cuts) -> Iterator[tuple[int, ...]]:
        """Unknown cuts with one block moved that may be faster, the slowest first."""
        guessed = [self._guessed_times(*stage) for stage in self.stages_at(cuts.starts)]
        times = [own for own in guessed if own is not None]
        busy_ms = [own.forward_ms + own.backward_ms for own in times]
        order = sorted(range(len(times)), key=lambda stage: -busy_ms[stage])
        cutting = self._new_cutting(inf)
        for sender in order:
            for taker in order[::-1]:
                starts = cutting.moved(cuts.starts, sender, taker)
                if (
                    starts
                    and starts not in self._known
                    and self.moved_ms(starts, cuts.starts, times) < cuts.step_ms
                ):
                    yield starts

    def moved_ms(
        self,
        starts: Sequence[int],
        before: Sequence[int],
        times: Sequence[StageTimes],
    ) -> float:
        """Time of a step if blocks take as long as those of the stages before.

        Args:
            starts: First blocks of stages,
            before: and of those that were known, each at the same place,
            times: which took so long.
        """
        block_ms = self.micro_batch.block_ms
        pairs = zip(self.stages_at(before), self.stages_at(starts), strict=True)
        moved = []
        for (was, now), own in zip(pairs, times, strict=True):
            was_ms, now_ms = (sum(block_ms[slice(*each[1:])]) for each in (was, now))
            share = now_ms / was_ms if was_ms else 1.0
            forward_ms, backward_ms = share * own.forward_ms, share * own.backward_ms
            moved.append(replace(own, forward_ms=forward_ms, backward_ms=backward_ms))
        return step_ms(self.schedule, moved)

    def planned(self, cuts: Cuts) -> list[PlannedStage] | None:
        """All stages as they are, not only those that they are like; None if any does
        not fit."""
        planned = []
        for stage in self.stages_at(cuts.starts):
            choice = self.choice(*stage)
            if choice is None:
                return None
            late_bytes = self.micro_batch.late_bytes(*stage[1:])
            step = self.chooser(*stage).step
            planned.append(PlannedStage(step, choice, late_bytes))
        return planned

    def _new_cutting(self, best_ms: float) -> Cutting:
        return Cutting(
            schedule=self.schedule,
            block_ms=self.micro_batch.block_ms,
            forward_ms=self.micro_batch.forward_ms,
            sharding_ms=self.micro_batch.least_sharding_ms,
            cuts=self.micro_batch.cuts,
            times_of=self._guessed_times,
            relative_gap=self.gap,
            handed_bytes=self.micro_batch.handed_bytes,
            best_ms=best_ms,
        )

    @cached_property
    def bound_ms(self) -> float:
        """No cuts give a faster step, by the times of blocks alone."""
        return self._new_cutting(inf).bound_ms

    @property
    def plain_ms(self) -> float:
        """A step takes no less, or hardly, even if nothing is recomputed."""
        return self.bound_ms

    def guess(self, best_ms: float) -> Cuts:
        """The best cuts by what is known and estimated."""
        cutting = self._new_cutting(best_ms)
        known = [(self._guessed_ms(starts), starts) for starts in self._known]
        known_ms, starts = min(known, default=(inf, ()))
        if known_ms < best_ms:
            cutting.best_ms, cutting.starts = known_ms, starts
        cutting.run()
        return Cuts(cutting.best_ms, cutting.starts)

    def _guessed_ms(self, starts: Sequence[int]) -> float:
        """Time of a step of stages with these first blocks; inf if any does not fit."""
        times = [self._guessed_times(*stage) for stage in self.stages_at(starts)]
        fitting = [own for own in times if own]
        if len(fitting) < len(times):
            return inf
        return step_ms(self.schedule, fitting)

    def stages_at(self, starts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Index, first block and end of each stage; none if there are no starts."""
        ends = (*starts[1:], len(self.micro_batch.chain))
        pairs = zip(starts, ends, strict=False)
        return [(i, first, end) for i, (first, end) in enumerate(pairs)]

    def _is_planned(self, stage: tuple[int, int, int]) -> bool:
        index, first, end = stage
        return (index, *self.micro_batch.like(first, end)) in self._choices

    def _plan_cuts(self, starts: tuple[int, ...]) -> bool:
        """Plan stages like those with these first blocks; whether all fit."""
        choices = [self._plan_like(*stage) for stage in self.stages_at(starts)]
        if starts not in self._known:
            self._known.append(starts)
        return None not in choices

    def _plan_like(self, stage: int, first: int, end: int) -> StageChoice | None:
        """Plan the first stage that is like some blocks, and learn from it."""
        like = self.micro_batch.like(first, end)
        choice = self.choice(stage, *like)
        short = shortened(self.micro_batch, *like)
        if short is not None:
            own_ms = inf if choice is None else choice.recompute_ms
            self._estimates.learn(stage, (short,), own_ms)
        return choice

    def _lowest_fits(self) -> bool:
        """Plan the cuts of the least peak; whether they fit, and nobody knew."""
        if self.lowest_cut in self._known:
            return False
        return self._plan_cuts(self.lowest_cut)

    def chooser(self, stage: int, first: int, end: int) -> StageChooser:
        """Of some blocks as a stage of that index."""
        return self._chooser_of(stage, tuple(range(first, end)))

    def _chooser_of_parts(
        self, rank: int, parts: tuple[tuple[int, ...], ...]
    ) -> RankChooser:
        """Of a rank whose stages have these blocks."""
        (blocks,) = parts
        return self._chooser_of(rank, blocks)

    def _chooser_of(self, stage: int, blocks: tuple[int, ...]) -> StageChooser:
        key = stage, blocks
        if key not in self._choosers:
            self._choosers[key] = StageChooser(
                self.schedule,
                stage,
                self.micro_batch.step_of(blocks),
                besides_bytes=besides_bytes(self.micro_batch, self.schedule, stage),
                far=self.far,
            )
        return self._choosers[key]

    def choice(self, stage: int, first: int, end: int) -> StageChoice | None:
        """What they recompute; None if they do not fit."""
        key = stage, first, end
        if key not in self._choices:
            options = SolveOptions(relative_gap=self.relative_gap)
            left_bytes = self.budget_bytes - self.micro_batch.late_bytes(first, end)
            like = self.micro_batch.like(first, end)
            known = None if like == (first, end) else self._choices.get((stage, *like))
            own = self.chooser(*key)
            plain = None if self.plain is None else self.plain._choices.get(key)
            most_ms = inf
            if plain is not None:
                own.offer(plain.choice)
                most_ms = plain.recompute_ms
            choice = None
            if known is not None:
                choice = own.taken_over(self.chooser(stage, *like), known)
            if (
                choice is None
                or choice.peak_bytes > left_bytes
                or choice.recompute_ms > most_ms
            ):
                choice = own.choose(left_bytes, options)
            self._choices[key] = choice
        return self._choices[key]

    def _guessed_times(self, stage: int, first: int, end: int) -> StageTimes | None:
        """What blocks like these take, or are taken to; None if they do not fit."""
        like = self.micro_batch.like(first, end)
        short = shortened(self.micro_batch, *like)
        if self._is_planned((stage, *like)):
            return self.times_of(stage, *like)
        recompute_ms = self._guessed_recompute_ms(stage, like, short)
        if recompute_ms == inf:
            return None
        return self._estimated_times(stage, like, short, recompute_ms, end)

    def _estimated_times(
        self,
        stage: int,
        like: tuple[int, int],
        short: Shortened | None,
        recompute_ms: float,
        end: int,
    ) -> StageTimes:
        """What blocks like these take that recompute so long.

        Args:
            stage: Index of the stage.
            like: First block and end of those.
            short: What stands for them, if they are many.
            recompute_ms: What they recompute.
            end: Block behind the stage's own last one.
        """
        if short is None:
            return self.times_of_step(stage, tuple(range(*like)), recompute_ms, end)
        few, more = (
            self.times_of_step(stage, self.micro_batch.first_like(blocks), 0.0, end)
            for blocks in (short.few, short.more)
        )
        return extended(few, more, short, recompute_ms)

    def _guessed_recompute_ms(
        self, stage: int, like: tuple[int, int], short: Shortened | None
    ) -> float:
        """What blocks recompute as a stage of an index; inf if they do not fit.

        Between stages that are looked at it changes as evenly as what is in flight.
        """
        last = self.schedule.num_stages - 1
        marks = sorted({1, (1 + last) // 2, last - 1})
        if 1 < stage < last - 1 and stage not in marks:
            before = max(mark for mark in marks if mark < stage)
            behind = min(mark for mark in marks if mark > stage)
            high_ms, low_ms = (
                self._guessed_recompute_ms(mark, like, short)
                for mark in (before, behind)
            )
            if high_ms < inf and low_ms < inf:
                share = (stage - before) / (behind - before)
                return high_ms + share * (low_ms - high_ms)
        if short is not None and not self._is_planned((stage, *like)):
            return self._estimates.recompute_ms(stage, (short,))
        choice = self.choice(stage, *like)
        return inf if choice is None else choice.recompute_ms

    def times_of(self, stage: int, first: int, end: int) -> StageTimes | None:
        """What they take; None if they do not fit."""
        choice = self.choice(stage, first, end)
        if choice is None:
            return None
        blocks = tuple(range(first, end))
        return self.times_of_step(stage, blocks, choice.recompute_ms, end)

    def times_of_step(
        self, stage: int, blocks: tuple[int, ...], recompute_ms: float, end: int
    ) -> StageTimes:
        phase_ms = self.micro_batch.step_of(blocks).phase_ms
        gather_ms, reduce_ms = self.micro_batch.sharding_ms(blocks)
        return StageTimes(
            forward_ms=phase_ms["forward"],
            backward_ms=phase_ms["backward"] + recompute_ms,
            optimizer_ms=phase_ms["optimizer"] + reduce_ms,
            gather_ms=gather_ms,
            send_ms=self.micro_batch.send_ms(
                (self.schedule.rank_of(stage), self.schedule.rank_of(stage + 1)), end
            ),
        )

    def times_of_plan(
        self, starts: Sequence[int], planned: Sequence[PlannedStage]
    ) -> list[StageTimes]:
        """What stages with these first blocks take as they are planned."""
        return [
            self.times_of_step(
                stage, tuple(range(first, end)), own.choice.recompute_ms, end
            )
            for (stage, first, end), own in zip(
                self.stages_at(starts), planned, strict=True
            )
        ]

    @property
    def least_bytes(self) -> int:
        """What the fullest rank keeps at least; also what schedules differ in."""
        number, stages = self.schedule.num_micro_batches, self.schedule.num_ranks
        in_flight = number if self.schedule.name == GPIPE else stages
        handed_bytes = max(self.micro_batch.handed_bytes)
        return self.micro_batch.least_bytes // stages + in_flight * handed_bytes

    @property
    def guessed_lowest_bytes(self) -> float:
        """The least peak of a rank by estimates."""
        stages = self.stages_at(self.lowest_cut)
        return max(self._guessed_lowest(*stage) for stage in stages)

    @cached_property
    def lowest_cut(self) -> tuple[int, ...]:
        """First blocks of the stages whose highest peak is least."""
        return lowest_cut(
            self.micro_batch.block_ms,
            self.micro_batch.cuts,
            self.schedule.num_stages,
            self._guessed_lowest,
        )

    def lowest(self) -> Lowest:
        """Least peak of a rank that any cuts reach, and the stage that has it."""
        stages = self.stages_at(self.lowest_cut)
        lowest_bytes, stage = max((self._lowest(*stage), stage) for stage in stages)
        choice = self.chooser(*stage).lowest()
        late_bytes = self.micro_batch.late_bytes(*stage[1:])
        step = self.micro_batch.step(*stage[1:])
        return Lowest(
            max(lowest_bytes, choice.peak_bytes + late_bytes),
            *stage,
            step.later.composition(choice.choice),
            late_bytes,
        )

    def _lowest(self, stage: int, first: int, end: int) -> int:
        """Least peak of a stage, with what slow threads may hold."""
        like = self.micro_batch.like(first, end)
        lowest = self.chooser(stage, *like).lowest()
        return lowest.peak_bytes + self.micro_batch.late_bytes(*like)

    def _guessed_lowest(self, stage: int, first: int, end: int) -> float:
        like = self.micro_batch.like(first, end)
        key = stage, *like
        if key not in self._lowest_bytes:
            short = shortened(self.micro_batch, *like)
            self._lowest_bytes[key] = (
                self._lowest(stage, *like)
                if short is None
                else self._estimates.lowest_bytes(stage, (short,))
            )
        return self._lowest_bytes[key]

    def plan(
        self,
        cuts: Cuts,
        planned: Sequence[PlannedStage],
        alternatives: tuple[str, ...],
        bound_ms: float,
    ) -> PipelinePlan:
        """The plan of the best cuts.

        Args:
            cuts: Where stages begin.
            planned: What they do, as `planned` says.
            alternatives: What lost, and why.
            bound_ms: No step is faster.
        """
        times = self.times_of_plan(cuts.starts, planned)
        stages = zip(self.stages_at(cuts.starts), planned, times, strict=True)
        return PipelinePlan(
            stage_plans=tuple(
                stage_plan(self.micro_batch, self.schedule, *own) for own in stages
            ),
            budget_bytes=self.budget_bytes,
            step_ms=step_ms(self.schedule, times),
            bound_ms=bound_ms,
            alternatives=alternatives,
            **of_pipeline(self.micro_batch, self.schedule),
        )
