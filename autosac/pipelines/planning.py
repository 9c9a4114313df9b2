"""From a model and a number of ranks to a plan of a pipeline.

Schedules and numbers of micro-batches are enumerated; `cutting` finds the cuts of each,
and a MILP for each stage that comes into question what it recomputes there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from typing import Any

import torch

from autosac.errors import (
    ArgumentError,
    InfeasibleBudgetError,
    SolverError,
    UnsupportedError,
)
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.preparing import cluster_of
from autosac.pipelines.blocks import Passed, Stage, chain_of, check_cuts, possible_cuts
from autosac.pipelines.cutting import Cutting
from autosac.pipelines.like_blocks import kinds
from autosac.pipelines.plans import PipelinePlan, StagePlan
from autosac.pipelines.playing import StageTimes, step_ms
from autosac.pipelines.schedules import GPIPE, ONE_F_ONE_B, Schedule
from autosac.pipelines.stage_choosing import StageChoice, StageChooser
from autosac.pipelines.stage_steps import (
    PipelineLoss,
    StageStep,
    check_step,
    loss_with,
    stage_step,
)
from autosac.planning.make_plan import difference_in_dry_run, policy_ratios
from autosac.planning.spelling import spell_out
from autosac.profiles.fingerprints import fingerprint
from autosac.profiles.given import calibrated_if_present
from autosac.profiles.profile import Profile, profile
from autosac.quantities import format_bytes, format_ms, parse_bytes
from autosac.solving.solve_options import RELATIVE_GAP, SolveOptions

_NOT_IN_PIPELINES = (
    *("accumulate", "autocast", "clip_grad_norm"),
    *("gradients_in_forward", "keeps_gradients"),
    *("offload", "host_budget", "offload_dir"),
)
_MODEL_PHASES = ("forward", "loss", "backward")


def plan_pipeline(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    *,
    target: Any,
    loss_fn: PipelineLoss,
    num_ranks: int,
    num_micro_batches: int | Sequence[int],
    memory_budget: int | str,
    schedules: Sequence[str] = (ONE_F_ONE_B, GPIPE),
    cluster: str | ClusterSpec | None = None,
    relative_gap: float = RELATIVE_GAP,
    **options: Any,
) -> PipelinePlan:
    """Find stages, schedule and recomputation for the least step time under a budget.

    Args:
        model: A chain of blocks; see `blocks`.
        inputs: A whole batch: it is cut into micro-batches along its first dimension.
        target: Likewise, of the batch.
        loss_fn: Output and target of a micro-batch -> their mean loss.
        num_ranks: Ranks of the pipeline.
        num_micro_batches: Of a step; several numbers to choose the best.
        memory_budget: Cap on the peak of a rank: bytes, or text such as "72GiB".
        schedules: Of ``"1F1B"`` and ``"GPipe"``.
        cluster: A `ClusterSpec`, or the name of a known one, whose GPUs the ranks are,
            all in one node; None for `device`, with sending taken to cost nothing.
        relative_gap: A plan is given up for another that is faster by more.
        options: As in `profile`, such as `optimizer`.

    Raises:
        InfeasibleBudgetError: No plan fits; says the least peak.
        UnsupportedError: The model is no chain, or its blocks share parameters that no
            stages can hold together.
        ArgumentError: An argument cannot be read, or the batch cannot be cut so.
        SolverError: A stage's dry run does not confirm its plan.
    """
    spec = None if cluster is None else cluster_of(cluster, None)
    if spec is not None:
        options = {**options, "device": spec.device}
    _check_options(options)
    numbers = _numbers(num_micro_batches)
    _check_batch(inputs, target, numbers)
    races = []
    for number in numbers:
        micro_batch = _MicroBatch(
            model=model,
            inputs=inputs[: len(inputs) // number],
            target=target[: len(inputs) // number],
            loss_fn=loss_fn,
            options=options,
            cluster=spec,
        )
        check_cuts(model, list(micro_batch.chain), micro_batch.cuts, num_ranks)
        races += [
            _Race(
                micro_batch,
                Schedule(name=name, num_ranks=num_ranks, num_micro_batches=number),
                parse_bytes(memory_budget, total_bytes=micro_batch.memory_bytes),
                relative_gap,
            )
            for name in schedules
        ]
    return _fastest(races)


def _fastest(races: Sequence[_Race]) -> PipelinePlan:
    """The plan of the fastest step that fits."""
    best: tuple[_Race, Cutting] | None = None
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


def _check_options(options: dict[str, Any]) -> None:
    """Refuse what a pipeline's step does otherwise than a step of one process."""
    for name in _NOT_IN_PIPELINES:
        if name in options:
            raise UnsupportedError(
                f"`{name}` is not planned in pipelines: leave it out, and out of the"
                " training loop."
            )


def _numbers(num_micro_batches: int | Sequence[int]) -> list[int]:
    numbers = (
        [num_micro_batches]
        if isinstance(num_micro_batches, int)
        else list(num_micro_batches)
    )
    if not numbers or not all(isinstance(n, int) and n >= 1 for n in numbers):
        raise ArgumentError(
            "`num_micro_batches` must be a whole number of at least 1, or some, got"
            f" {num_micro_batches!r}."
        )
    return numbers


def _check_batch(inputs: Any, target: Any, numbers: Sequence[int]) -> None:
    for name, value in (("inputs", inputs), ("target", target)):
        if not isinstance(value, torch.Tensor) or not value.ndim:
            raise ArgumentError(
                f"`{name}` must be a tensor with a batch dimension, got"
                f" {type(value).__name__}: a pipeline cuts it into micro-batches."
            )
    for number in numbers:
        if len(inputs) % number or len(target) != len(inputs):
            raise ArgumentError(
                f"`inputs` has {len(inputs)} rows and `target` {len(target)}, which"
                f" {number} micro-batches cannot share evenly; use another number."
            )


@dataclass(kw_only=True, eq=False)
class _MicroBatch:
    """A model and one micro-batch: all that does not depend on the schedule.

    Attributes:
        shares: Stages of like blocks are taken to be alike in the search for cuts.
    """

    model: torch.nn.Module
    inputs: torch.Tensor
    target: torch.Tensor
    loss_fn: PipelineLoss
    options: dict[str, Any]
    cluster: ClusterSpec | None
    shares: bool = True
    _steps: dict[tuple[int, int], StageStep] = field(default_factory=dict)
    _alike: dict[Hashable, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def chain(self) -> dict[str, Passed]:
        """The model's blocks, and what they hand on."""
        return chain_of(self.model, self.inputs)

    @cached_property
    def cuts(self) -> list[int]:
        """Blocks that a stage may begin with."""
        return possible_cuts(self.model, self.chain)

    @cached_property
    def whole(self) -> Profile:
        """The step of the whole model."""
        loss_fn = partial(loss_with, self.loss_fn, self.target)
        stage = Stage(self.model, list(self.chain))
        whole = profile(stage, self.inputs, loss_fn=loss_fn, **self.options)
        check_step(whole)
        calibrated = calibrated_if_present(whole)
        assert isinstance(calibrated, Profile)
        return calibrated

    @property
    def memory_bytes(self) -> int:
        """Of the device."""
        return self.whole.device.memory_bytes

    @cached_property
    def block_ms(self) -> list[float]:
        """Forward and backward of each block."""
        tree, fqns = self.whole.tape.modules, list(self.chain)
        place = {tree.index[fqn]: i for i, fqn in enumerate(fqns)}
        times = [0.0] * len(fqns)
        for op, op_ms in zip(self.whole.tape.ops, self.whole.op_ms, strict=True):
            if op.phase in _MODEL_PHASES:
                around = [op.module, *tree.ancestors(op.module)]
                owner = next((place[m] for m in around if m in place), None)
                if owner is not None:
                    times[owner] += op_ms
        return times

    def received(self, first: int) -> Passed:
        """What a stage gets that begins with a block."""
        if not first:
            dtype = str(self.inputs.dtype).removeprefix("torch.")
            return Passed(tuple(self.inputs.shape), dtype)
        return list(self.chain.values())[first - 1]

    @cached_property
    def _kinds(self) -> list[Hashable]:
        return kinds(self.whole, self.model, list(self.chain))

    def like(self, first: int, end: int) -> tuple[int, int]:
        """Blocks that do the same as a stage as these: the first that were met."""
        if not self.shares:
            return first, end
        size = len(self.chain)
        passed = self.received(first), self.received(end)
        places = first == 0, end == size
        key = (places, passed, tuple(self._kinds[first:end]))
        return self._alike.setdefault(key, (first, end))

    def step(self, first: int, end: int) -> StageStep:
        """The step of some blocks as a stage."""
        if (first, end) not in self._steps:
            device = next(self.model.parameters()).device
            is_last = end == len(self.chain)
            received = self.inputs
            if first:
                received = self.received(first).example(device)
            self._steps[first, end] = stage_step(
                Stage(self.model, list(self.chain)[first:end]),
                received,
                loss_fn=self.loss_fn if is_last else None,
                target=self.target,
                **self.options,
            ).calibrated_if_present()
        return self._steps[first, end]

    def send_ms(self, end: int) -> float:
        """Time in which what a stage hands on arrives."""
        if self.cluster is None or end == len(self.chain):
            return 0.0
        passed, links = list(self.chain.values())[end - 1], self.cluster.fabric
        nbytes = passed.example("meta").nbytes
        latency_ms = links.base_latency_ms + links.intra_latency_ms
        return latency_ms + 1e3 * nbytes / links.intra_bandwidth_bytes_per_s


class _Race:
    """One schedule under one budget.

    Args:
        micro_batch: The model.
        schedule: The schedule.
        budget_bytes: Cap on the peak of a rank.
        relative_gap: As in `plan_pipeline`.
    """

    def __init__(
        self,
        micro_batch: _MicroBatch,
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
            self._choosers[key] = StageChooser(self.schedule, stage, step)
        return self._choosers[key]

    def choice(self, stage: int, first: int, end: int) -> StageChoice | None:
        """What they recompute; None if they do not fit."""
        key = stage, first, end
        if key not in self._choices:
            options = SolveOptions(relative_gap=self.relative_gap)
            self._choices[key] = self.chooser(*key).choose(self.budget_bytes, options)
        return self._choices[key]

    def times_of(self, stage: int, first: int, end: int) -> StageTimes | None:
        """What they take; None if they do not fit."""
        choice = self.choice(stage, first, end)
        if choice is None:
            return None
        phase_ms = self.micro_batch.step(first, end).phase_ms
        return StageTimes(
            forward_ms=phase_ms["forward"],
            backward_ms=phase_ms["backward"] + choice.recompute_ms,
            optimizer_ms=phase_ms["optimizer"],
            send_ms=self.micro_batch.send_ms(end),
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
                        chooser = self.chooser(
                            stage, *self.micro_batch.like(first, end)
                        )
                        own = (chooser.lowest().peak_bytes, stage, first, end)
                        reached[end] = min(
                            reached.get(end, (2**63, 0, 0, 0)), max(before, own)
                        )
            best = reached
        return best[ends[-1]]

    def plan(self, cutting: Cutting, alternatives: tuple[str, ...]) -> PipelinePlan:
        """The plan of the best cuts."""
        whole, stages = self.micro_batch.whole, self._stages(cutting)
        times = [t for t in (self.times_of(*s) for s in stages) if t is not None]
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
            received=self.micro_batch.received(first),
            sent=self.micro_batch.received(end),
        )


def _infeasible(races: Sequence[_Race]) -> InfeasibleBudgetError:
    (lowest_bytes, stage, first, end), race = min(
        ((race.lowest(), race) for race in races), key=lambda pair: pair[0][0]
    )
    choice = race.chooser(stage, first, end).lowest()
    lowest_bytes = max(lowest_bytes, choice.peak_bytes)
    step, budget_bytes = race.micro_batch.step(first, end), race.budget_bytes
    fqns = list(race.micro_batch.chain)
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}) on"
        f" {race.schedule.num_ranks} ranks: the lowest peak is {lowest_bytes} bytes"
        f" ({format_bytes(lowest_bytes)}), of stage {stage} (`{fqns[first]}` to"
        f" `{fqns[end - 1]}`) under {race.schedule.name} with"
        f" {race.schedule.num_micro_batches} micro-batches. Raise the budget to that,"
        " or use more micro-batches or ranks.",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest_bytes,
        composition=step.later.composition(choice.choice),
    )
