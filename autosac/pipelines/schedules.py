"""Schedules of pipelines: what each rank computes, in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from autosac import _compat_pipelining
from autosac.errors import ArgumentError
from autosac.quantities import whole_number

GPIPE, ONE_F_ONE_B, INTERLEAVED = "GPipe", "1F1B", "Interleaved1F1B"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)


class Action(NamedTuple):
    """Forward or backward of one micro-batch through one stage.

    Attributes:
        is_forward: Forward and, in the last stage, the loss; else backward.
        stage: Index of the stage in the pipeline.
        micro_batch: Index of the micro-batch in the step.
    """

    is_forward: bool
    stage: int
    micro_batch: int

    @property
    def adds(self) -> bool:
        """Whether it is a backward but the first, which adds to gradients."""
        return bool(self.micro_batch) and not self.is_forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule of torch.distributed.pipelining with its numbers.

    Stage ``s`` is on rank ``s % num_ranks``.

    Attributes:
        name: One of `SCHEDULES`.
        num_ranks: Ranks of the pipeline.
        num_micro_batches: Of a step.
        stages_per_rank: More than 1 for interleaved 1F1B only.

    Raises:
        ArgumentError: PyTorch has no such schedule of these numbers.
    """

    name: str
    num_ranks: int
    num_micro_batches: int
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ArgumentError(
                f"There is no schedule {self.name!r} to plan with; use one of"
                f" {', '.join(SCHEDULES)}."
            )
        for name in ("num_ranks", "num_micro_batches", "stages_per_rank"):
            whole_number(getattr(self, name), name=name)
        if self.is_looped != (self.stages_per_rank > 1):
            raise ArgumentError(
                f"{self.name} has {'several stages' if self.is_looped else '1 stage'}"
                f" per rank, not {self.stages_per_rank}."
            )
        if can_have(self.name, self.num_ranks, self.num_micro_batches):
            return
        if self.name == ONE_F_ONE_B:
            raise ArgumentError(
                f"1F1B needs a micro-batch for each of {self.num_ranks} ranks, not"
                f" {self.num_micro_batches}; use smaller ones."
            )
        raise ArgumentError(
            f"Interleaved 1F1B runs {self.num_micro_batches} micro-batches on"
            f" {self.num_ranks} ranks in {self.num_micro_batches // self.num_ranks}"
            " rounds, which does not divide them; use a multiple of the ranks."
        )

    @property
    def is_looped(self) -> bool:
        """Whether ranks have several stages each."""
        return self.name == INTERLEAVED

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.num_ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that a stage is on."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank."""
        return tuple(range(rank, self.num_stages, self.num_ranks))

    def actions(self, rank: int) -> tuple[Action, ...]:
        """What a rank computes in a step, in order."""
        return _actions(self, rank)

    def in_flight(
        self, stage: int, *, adding: bool = False
    ) -> frozenset[tuple[int, ...]]:
        """Micro-batches in flight on a stage's rank while it computes, each time.

        Those that a stage has gone forward with and not yet backward; the one whose
        backward is running counts.

        Args:
            stage: The stage.
            adding: Only while a backward but the first runs, which adds to gradients.

        Returns:
            Numbers of each of `stages_of` the rank.
        """
        return _in_flight(self, stage, adding)

    def most_in_flight(self, stage: int, *, adding: bool = False) -> int:
        """Most micro-batches of a stage that are in flight while it computes.

        Args:
            stage: The stage,
            adding: and when, as in `in_flight`.
        """
        own = self.stages_of(self.rank_of(stage)).index(stage)
        numbers = self.in_flight(stage, adding=adding)
        return max((each[own] for each in numbers), default=0)


def can_have(name: str, num_ranks: int, num_micro_batches: int) -> bool:
    """Whether a schedule of so many ranks can have so many micro-batches."""
    if name == ONE_F_ONE_B:
        return num_micro_batches >= num_ranks
    if name == INTERLEAVED:
        return num_micro_batches % max(1, num_micro_batches // num_ranks) == 0
    return True


@cache
def _in_flight(
    schedule: Schedule, stage: int, adding: bool
) -> frozenset[tuple[int, ...]]:
    rank = schedule.rank_of(stage)
    numbers, seen = dict.fromkeys(schedule.stages_of(rank), 0), set()
    for action in schedule.actions(rank):
        numbers[action.stage] += action.is_forward
        if action.stage == stage and (action.adds or not adding):
            seen.add(tuple(numbers.values()))
        numbers[action.stage] -= not action.is_forward
    return frozenset(seen)


@cache
def _actions(schedule: Schedule, rank: int) -> tuple[Action, ...]:
    order = _compat_pipelining.compute_order(
        schedule.name,
        rank,
        num_ranks=schedule.num_ranks,
        stages_per_rank=schedule.stages_per_rank,
        num_micro_batches=schedule.num_micro_batches,
    )
    actions = tuple(Action(*computation) for computation in order)
    of_each = Counter(actions)
    expected = 2 * schedule.num_micro_batches * schedule.stages_per_rank
    assert len(actions) == len(of_each) == expected, (schedule, rank)
    return actions
