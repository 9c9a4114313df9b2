"""The time of a pipeline's step: its schedule, played action by action.

A rank computes its actions in order. One begins when the rank is free and what it needs
has arrived: the activation of the stage before, or the gradient of the stage behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autosac.pipelines.schedules import Action, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one stage in ms.

    Attributes:
        forward_ms: Of one micro-batch, with the loss in the last stage.
        backward_ms: Likewise, with what is recomputed.
        optimizer_ms: Of the step's end, with what gradients take to be reduced.
        gather_ms: Of gathering parameters, in the first forward of a step.
        send_ms: Of its output on the way to the next stage, and of the gradient back.
    """

    forward_ms: float
    backward_ms: float
    optimizer_ms: float = 0.0
    gather_ms: float = 0.0
    send_ms: float = 0.0


class Played(NamedTuple):
    """One action of a played schedule.

    Attributes:
        action: What was computed,
        start_ms: from when
        end_ms: until when.
    """

    action: Action
    start_ms: float
    end_ms: float


def play(schedule: Schedule, times: Sequence[StageTimes]) -> list[list[Played]]:
    """When each rank computes what.

    Args:
        schedule: Of the pipeline.
        times: Of each stage.

    Returns:
        For each rank its actions in order.
    """
    ends: dict[Action, float] = {}
    ranks = range(schedule.num_ranks)
    played: list[list[Played]] = [[] for _ in ranks]
    left = {rank: list(schedule.actions(rank))[::-1] for rank in ranks}
    while any(left.values()):
        for rank, actions in left.items():
            while actions:
                arrival_ms = _arrival(schedule, times, ends, actions[-1])
                if arrival_ms is None:
                    break
                action = actions.pop()
                free_ms = played[rank][-1].end_ms if played[rank] else 0.0
                start_ms = max(free_ms, arrival_ms)
                of_stage = times[action.stage]
                took_ms = of_stage.backward_ms
                if action.is_forward:
                    took_ms = of_stage.forward_ms
                    took_ms += 0.0 if action.micro_batch else of_stage.gather_ms
                ends[action] = start_ms + took_ms
                played[rank].append(Played(action, start_ms, ends[action]))
    return played


def step_ms(schedule: Schedule, times: Sequence[StageTimes]) -> float:
    """Time of a step: that of the rank that is done last, with its optimizer."""
    return max(
        actions[-1].end_ms
        + sum(times[stage].optimizer_ms for stage in schedule.stages_of(rank))
        for rank, actions in enumerate(play(schedule, times))
    )


def _arrival(
    schedule: Schedule,
    times: Sequence[StageTimes],
    ends: dict[Action, float],
    action: Action,
) -> float | None:
    """When all that an action needs is there; None if it is not known yet."""
    stage = action.stage
    if action.is_forward:
        if not stage:
            return 0.0
        sender, send_ms = action._replace(stage=stage - 1), times[stage - 1].send_ms
    elif stage == schedule.num_stages - 1:
        sender, send_ms = action._replace(is_forward=True), 0.0
    else:
        sender, send_ms = action._replace(stage=stage + 1), times[stage].send_ms
    return None if sender not in ends else ends[sender] + send_ms
