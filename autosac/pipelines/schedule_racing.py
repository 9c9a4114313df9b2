"""Schedules of a pipeline against each other: the fastest step that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import torch

from autosac.errors import InfeasibleBudgetError, SolverError
from autosac.parallel.racing import LATE
from autosac.parallel.tp_tracing import draws
from autosac.pipelines.cutting import Cutting
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.plans import PipelinePlan, StagePlan
from autosac.pipelines.playing import StageTimes, step_ms
from autosac.pipelines.schedules import Schedule
from autosac.pipelines.stage_choosing import StageChoice, StageChooser
from autosac.planning.make_plan import difference_in_dry_run, policy_ratios
from autosac.planning.spelling import spell_out
from autosac.profiles.fingerprints import fingerprint
from autosac.quantities import format_bytes, format_ms
from autosac.solving.solve_options import SolveOptions


class Race:
    """One schedule under one budget.

    Args:
        micro_batch: The model.
        schedule: The schedule.
        budget_bytes: Cap on the peak of a rank.
        relative_gap: As in `plan_pipeline`.
    """

    def __init__(
        self,
        micro_batch: MicroBatch,
        schedule: Schedule,
        budget_bytes: int,
        relative_gap: float,
    ) -> None:
        self.micro_batch, self.schedule = micro_batch, schedule
        self.budget_bytes, self.relative_gap = budget_bytes, relative_gap
        self._choosers: dict[tuple[int, int, int], StageChooser] = {}
        self._choices: dict[tuple[int, int, int], StageChoice | None] = {}

    @property
    def name(self) -> str:
        """The schedule in words."""
        return f"{self.schedule.name}, {self.schedule.num_micro_batches} micro-batches"

    def run(self, best_ms: float) -> Cutting:
        """Find the best cuts, if they are faster than the best known step."""
        cutting = Cutting(
            schedule=self.schedule,
            block_ms=self.micro_batch.block_ms,
            cuts=self.micro_batch.cuts,
            times_of=lambda i, first, end: self.times_of(
                i, *self.micro_batch.like(first, end)
            ),
            relative_gap=self.relative_gap,
            best_ms=best_ms,
        )
        cutting.run()
        stages = self._stages(cutting)
        if self.micro_batch.shares and None in (self.choice(*s) for s in stages):
            self.micro_batch.shares = False  # they were not so alike
            return self.run(best_ms)
        return cutting

    def _stages(self, cutting: Cutting) -> list[tuple[int, int, int]]:
        """Index, first block and end of each stage; none if nothing fits."""
        ends = (*cutting.starts[1:], len(self.micro_batch.chain))
        pairs = zip(cutting.starts, ends, strict=False)
        return [(i, first, end) for i, (first, end) in enumerate(pairs)]

    def chooser(self, stage: int, first: int, end: int) -> StageChooser:
        """Of some blocks as a stage of that index."""
        key = stage, first, end
        if key not in self._choosers:
            step = self.micro_batch.step(first, end)
            self._choosers[key] = StageChooser(
                self.schedule,
                stage,
                step,
                besides_bytes=self.micro_batch.mesh_bytes(self.schedule.num_ranks),
            )
        return self._choosers[key]

    def choice(self, stage: int, first: int, end: int) -> StageChoice | None:
        """What they recompute; None if they do not fit."""
        key = stage, first, end
        if key not in self._choices:
            options = SolveOptions(relative_gap=self.relative_gap)
            left_bytes = self.budget_bytes - self.micro_batch.late_bytes(first, end)
            self._choices[key] = self.chooser(*key).choose(left_bytes, options)
        return self._choices[key]

    def times_of(self, stage: int, first: int, end: int) -> StageTimes | None:
        """What they take; None if they do not fit."""
        choice = self.choice(stage, first, end)
        if choice is None:
            return None
        phase_ms = self.micro_batch.step(first, end).phase_ms
        gather_ms, reduce_ms = self.micro_batch.sharding_ms(first, end)
        return StageTimes(
            forward_ms=phase_ms["forward"],
            backward_ms=phase_ms["backward"] + choice.recompute_ms,
            optimizer_ms=phase_ms["optimizer"] + reduce_ms,
            gather_ms=gather_ms,
            send_ms=self.micro_batch.send_ms(stage, end),
        )

    def lowest(self) -> tuple[int, int, int, int]:
        """Least peak of a rank that any cuts reach, with the stage that has it."""
        ends = [*self.micro_batch.cuts, len(self.micro_batch.chain)]
        best = {0: (0, 0, 0, 0)}  # end of the stages so far -> highest peak and stage
        for stage in range(self.schedule.num_stages):
            left = self.schedule.num_stages - stage - 1
            reached: dict[int, tuple[int, int, int, int]] = {}
            for end in ends[stage : len(ends) - left] if left else ends[-1:]:
                for first, before in best.items():
                    if first < end:
                        like = self.micro_batch.like(first, end)
                        own = (self._lowest(stage, *like), stage, first, end)
                        reached[end] = min(
                            reached.get(end, (2**63, 0, 0, 0)), max(before, own)
                        )
            best = reached
        return best[ends[-1]]

    def _lowest(self, stage: int, first: int, end: int) -> int:
        """Least peak of a stage, with what slow threads may hold."""
        lowest = self.chooser(stage, first, end).lowest()
        return lowest.peak_bytes + self.micro_batch.late_bytes(first, end)

    def plan(self, cutting: Cutting, alternatives: tuple[str, ...]) -> PipelinePlan:
        """The plan of the best cuts."""
        whole, stages = self.micro_batch.whole, self._stages(cutting)
        times = [t for t in (self.times_of(*s) for s in stages) if t is not None]
        tensor = self.micro_batch.tensor
        if tensor.degree > 1:
            tensor = replace(tensor, draws=draws(whole))
        return PipelinePlan(
            pipeline=self.schedule,
            stage_plans=tuple(self._stage(*stage) for stage in stages),
            budget_bytes=self.budget_bytes,
            step_ms=step_ms(self.schedule, times),
            alternatives=alternatives,
            device=whole.device.name,
            calibrated=whole.calibrated,
            model=fingerprint(self.micro_batch.model),
            torch_version=torch.__version__,
            tensor=tensor,
            parallel=self.micro_batch.parallel,
        )

    def _stage(self, stage: int, first: int, end: int) -> StagePlan:
        choice, step = self.choice(stage, first, end), self.micro_batch.step(first, end)
        times = self.times_of(stage, first, end)
        assert choice is not None
        assert times is not None
        if choice.choice:
            difference = difference_in_dry_run(step.later, choice.choice)
            if difference:
                raise SolverError(difference)
        return StagePlan(
            fqns=tuple(self.micro_batch.chain)[first:end],
            policy=policy_ratios(step.later, choice.choice),
            op_policies=spell_out(step.later, choice.choice),
            peak_bytes=choice.peak_bytes,
            forward_ms=times.forward_ms,
            backward_ms=times.backward_ms,
            recompute_ms=choice.recompute_ms,
            late_bytes=self.micro_batch.late_bytes(first, end),
            exchange_ms=self.micro_batch.exchange_ms(first, end),
            gather_ms=times.gather_ms,
            reduce_ms=self.micro_batch.sharding_ms(first, end)[1],
            received=self.micro_batch.received(first),
            sent=self.micro_batch.received(end),
        )


def fastest(races: Sequence[Race]) -> PipelinePlan:
    """The plan of the fastest step that fits."""
    best: tuple[Race, Cutting] | None = None
    alternatives = []
    for race in races:
        cutting = race.run(best[1].best_ms if best else inf)
        if not cutting.starts:
            alternatives.append(f"{race.name}: nothing{' faster' * bool(best)} fits")
            continue
        if best is not None:
            slower_ms = best[1].best_ms
            alternatives.append(f"{best[0].name}: {format_ms(slower_ms)} a step")
        best = race, cutting
    if best is None:
        raise _infeasible(races)
    return best[0].plan(best[1], tuple(alternatives))


def _infeasible(races: Sequence[Race]) -> InfeasibleBudgetError:
    (lowest_bytes, stage, first, end), race = min(
        ((race.lowest(), race) for race in races), key=lambda pair: pair[0][0]
    )
    choice = race.chooser(stage, first, end).lowest()
    late = race.micro_batch.late_bytes(first, end)
    lowest_bytes = max(lowest_bytes, choice.peak_bytes + late)
    step, budget_bytes = race.micro_batch.step(first, end), race.budget_bytes
    fqns, degree = list(race.micro_batch.chain), race.micro_batch.tensor.degree
    sizes = {
        **race.micro_batch.parallel.sizes,
        **({"tp": degree} if degree > 1 else {}),
    }
    times = "".join(f" x {name}={size}" for name, size in sizes.items())
    composition = step.later.composition(choice.choice)
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}) on"
        f" {race.schedule.num_ranks}{times} ranks: the lowest peak is"
        f" {lowest_bytes} bytes ({format_bytes(lowest_bytes)}), of stage {stage}"
        f" (`{fqns[first]}` to `{fqns[end - 1]}`) under {race.schedule.name} with"
        f" {race.schedule.num_micro_batches} micro-batches. Raise the budget to that,"
        " or use more micro-batches or ranks.",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest_bytes,
        composition={**composition, **({LATE: late} if late else {})},
    )
