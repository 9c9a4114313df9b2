"""The time of a pipeline's step: its schedule, played action by action.

A rank computes its actions in order. One begins when the rank is free and what it needs
has arrived: the activation of the stage before, or the gradient of the stage behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from autosac.pipelines.schedules import Action, Schedule

_SCHEDULES = 4  # whose orders are kept: 35 MB of one with 131,072 actions


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


class _Place(NamedTuple):
    """An action in the order in which all can be worked out.

    Attributes:
        rank: Whose.
        action: The action.
        after: Place of what it waits for, -1 for nothing,
        sender: and the stage that sends this; -1 if nothing is sent.
    """

    rank: int
    action: Action
    after: int
    sender: int


def play(schedule: Schedule, times: Sequence[StageTimes]) -> list[list[Played]]:
    """When each rank computes what.

    Args:
        schedule: Of the pipeline.
        times: Of each stage.

    Returns:
        For each rank its actions in order.
    """
    played: list[list[Played]] = [[] for _ in range(schedule.num_ranks)]
    order = _order(schedule)
    for place, start_ms, end_ms in zip(order, *_worked_out(order, times), strict=True):
        played[place.rank].append(Played(place.action, start_ms, end_ms))
    return played


def step_ms(schedule: Schedule, times: Sequence[StageTimes]) -> float:
    """Time of a step: that of the rank that is done last, with its optimizer."""
    order = _order(schedule)
    _, ends = _worked_out(order, times)
    last = {place.rank: end_ms for place, end_ms in zip(order, ends, strict=True)}
    return max(
        end_ms + sum(times[stage].optimizer_ms for stage in schedule.stages_of(rank))
        for rank, end_ms in last.items()
    )


def _worked_out(
    order: Sequence[_Place], times: Sequence[StageTimes]
) -> tuple[list[float], list[float]]:
    """When each action begins and ends."""
    sends = [own.send_ms for own in times]
    forward = [own.forward_ms for own in times]
    first = [own.forward_ms + own.gather_ms for own in times]
    backward = [own.backward_ms for own in times]
    starts, ends, free = list[float](), list[float](), dict[int, float]()
    for rank, (is_forward, stage, micro_batch), after, sender in order:
        start_ms = free.get(rank, 0.0)
        if after >= 0:
            arrival_ms = ends[after] + (sends[sender] if sender >= 0 else 0.0)
            if arrival_ms > start_ms:
                start_ms = arrival_ms
        kind = backward
        if is_forward:
            kind = forward if micro_batch else first
        free[rank] = end_ms = start_ms + kind[stage]
        starts.append(start_ms)
        ends.append(end_ms)
    return starts, ends


@lru_cache(maxsize=_SCHEDULES)
def _order(schedule: Schedule) -> tuple[_Place, ...]:
    """All actions, each behind those that it waits for, whatever they take."""
    places: dict[Action, int] = {}
    order: list[_Place] = []
    left = {
        rank: list(schedule.actions(rank))[::-1] for rank in range(schedule.num_ranks)
    }
    while any(left.values()):
        for rank, actions in left.items():
            while actions:
                awaited, sender = _awaited(schedule, actions[-1])
                if awaited is not None and awaited not in places:
                    break
                action = actions.pop()
                after = -1 if awaited is None else places[awaited]
                places[action] = len(order)
                order.append(_Place(rank, action, after, sender))
    return tuple(order)


def _awaited(schedule: Schedule, action: Action) -> tuple[Action | None, int]:
    """What an action waits for, and the stage that sends that; -1 if nothing is sent.

    A gradient comes back over the link that the stage's own output went over.
    """
    stage = action.stage
    if action.is_forward:
        if not stage:
            return None, -1
        return action._replace(stage=stage - 1), stage - 1
    if stage == schedule.num_stages - 1:
        return action._replace(is_forward=True), -1
    return action._replace(stage=stage + 1), stage
