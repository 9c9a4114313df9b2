"""Stages as they are planned, and what a plan says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from autosac.errors import SolverError
from autosac.parallel.followed_plans import casts_alone
from autosac.parallel.tp_tracing import draws
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.playing import StageTimes
from autosac.pipelines.schedules import Schedule
from autosac.pipelines.stage_choosing import StageChoice
from autosac.pipelines.stage_plans import StagePlan
from autosac.pipelines.stage_steps import StageStep
from autosac.planning.choices import policy_ratios
from autosac.planning.dry_running import difference_in_dry_run
from autosac.planning.spelling import spell_out
from autosac.profiles.fingerprints import fingerprint
from autosac.profiles.step_facts import StepFacts, step_facts
from autosac.solving.incumbents import far_bytes
from autosac.solving.rules_of_thumb import Choice
from autosac.step.tape import CATEGORIES


class PlannedStage(NamedTuple):
    """A stage, and what it recomputes.

    Attributes:
        step: Its step,
        choice: what of it is recomputed, and the peak of its rank.
        late_bytes: What slow threads may hold on that besides.
    """

    step: StageStep
    choice: StageChoice
    late_bytes: int


class Lowest(NamedTuple):
    """The least peak of a rank.

    Attributes:
        peak_bytes: It, with what slow threads may hold.
        stage: Index of a stage of the rank,
        first: its first block,
        end: and the one behind its last.
        composition: Bytes by category of one of its micro-batches,
        late_bytes: and what slow threads may hold.
    """

    peak_bytes: int
    stage: int
    first: int
    end: int
    composition: dict[str, int]
    late_bytes: int


def of_pipeline(micro_batch: MicroBatch, schedule: Schedule) -> dict[str, Any]:
    """What a plan says of its model, its mesh and its device."""
    whole, tensor = micro_batch.whole, micro_batch.tensor
    if tensor.degree > 1:
        tensor = replace(tensor, draws=draws(whole))
    return {
        "pipeline": schedule,
        "device": whole.device.name,
        "calibrated": whole.calibrated,
        "model": fingerprint(micro_batch.model),
        "torch_version": torch.__version__,
        "tensor": tensor,
        "context": micro_batch.context,
        "parallel": micro_batch.parallel,
    }


def stage_plan(
    micro_batch: MicroBatch,
    schedule: Schedule,
    place: tuple[int, int, int],
    own: PlannedStage,
    times: StageTimes,
) -> StagePlan:
    """What a plan says of a stage.

    Args:
        micro_batch: The model.
        schedule: The schedule.
        place: Index of the stage, its first block and the one behind its last.
        own: The stage,
        times: and what it takes.

    Raises:
        SolverError: The stage's dry run does not confirm its peak.
    """
    stage, first, end = place
    step, choice = own.step.later, own.choice.choice
    if choice:
        difference = difference_in_dry_run(step, choice)
        if difference:
            raise SolverError(difference)
    return StagePlan(
        fqns=tuple(micro_batch.chain)[first:end],
        policy=policy_ratios(step, choice),
        op_policies=spell_out(step, choice),
        peak_bytes=own.choice.peak_bytes,
        forward_ms=times.forward_ms,
        backward_ms=times.backward_ms,
        recompute_ms=own.choice.recompute_ms,
        late_bytes=own.late_bytes,
        exchange_ms=micro_batch.exchange_ms(first, end),
        gather_ms=times.gather_ms,
        reduce_ms=micro_batch.sharding_ms(tuple(range(first, end)))[1],
        waits_ms=sum(unit.waits_ms(policy) for unit, policy in choice.items()),
        far_bytes=schedule.most_in_flight(stage) * far_bytes(choice),
        state_bytes=_state_bytes(own.step, choice),
        facts=_facts(own.step),
        received=micro_batch.received(first),
        sent=micro_batch.received(end),
    )


def _facts(step: StageStep) -> StepFacts:
    """What is known of the step of a micro-batch.

    Others are in flight, as the stage is called again before backward.
    """
    facts = replace(step_facts(step.first, None), finds_gradients=False)
    facts = replace(facts, calls_again=True)
    sharded = step.sharded
    if sharded is not None and casts_alone(sharded.parallel.sharding([])):
        facts = replace(facts, forward_bytes=None)
    return facts


def _state_bytes(step: StageStep, chosen: Choice) -> int:
    """What a rank keeps of the optimizer's state for a stage."""
    source = step.first.simulator if step.sharded is None else step.sharded
    tape, nbytes = step.first.tape, source.ledger(chosen).nbytes
    is_state = tape.categories == CATEGORIES.index("optimizer")
    return int(nbytes[: len(is_state)][is_state & (tape.born <= 0)].sum())
