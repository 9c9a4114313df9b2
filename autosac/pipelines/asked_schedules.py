"""What is asked for of schedules and micro-batches of a pipeline, read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autosac.errors import ArgumentError, TraceError
from autosac.pipelines.micro_batches import MicroBatch, rows_of
from autosac.pipelines.schedules import INTERLEAVED, Schedule, can_have


def schedules_of(
    num_micro_batches: int | Sequence[int] | None,
    global_batch: int | None,
    num_ranks: int,
    names: Sequence[str],
    stages_per_rank: Sequence[int],
) -> tuple[Schedule, ...]:
    """Schedules to choose from, those of few micro-batches first.

    Args:
        num_micro_batches: Those asked for, None for all that divide the batch.
        global_batch: Its rows.
        num_ranks: Of the pipeline.
        names: Of schedules.
        stages_per_rank: Under interleaved 1F1B.

    Raises:
        ArgumentError: As `numbers_of`.
    """
    numbers = numbers_of(num_micro_batches, global_batch)
    return tuple(
        Schedule(
            name=name,
            num_ranks=num_ranks,
            num_micro_batches=number,
            stages_per_rank=stages,
        )
        for number in numbers
        for name in names
        for stages in (stages_per_rank if name == INTERLEAVED else (1,))
        # Of all numbers that there are, those that the schedule can have.
        if num_micro_batches is not None or can_have(name, num_ranks, number)
    )


def numbers_of(
    num_micro_batches: int | Sequence[int] | None, global_batch: int | None
) -> list[int]:
    """Numbers of micro-batches to choose from.

    Raises:
        ArgumentError: There is none, or it is no number.
    """
    if num_micro_batches is None:
        if global_batch is None:
            raise ArgumentError(
                "`num_micro_batches` is missing: pass a number, or some; or pass"
                " `global_batch`, the rows of a step, to try all that divide it."
            )
        return [n for n in range(1, global_batch + 1) if global_batch % n == 0]
    numbers = several(num_micro_batches)
    if not numbers or not all(number >= 1 for number in numbers):
        raise ArgumentError(
            "`num_micro_batches` must be a whole number of at least 1, or some, got"
            f" {num_micro_batches!r}."
        )
    return numbers


def several(numbers: int | Sequence[int]) -> list[int]:
    """A number, or some; nothing if one of them is no whole number."""
    own = list(numbers) if isinstance(numbers, Iterable) else [numbers]
    return own if all(type(number) is int for number in own) else []


def check_cut(num_rows: int, schedules: Sequence[Schedule]) -> None:
    """Refuse schedules that cannot share so many rows evenly.

    Raises:
        ArgumentError: Says which, or that there are none.
    """
    if not schedules:
        raise ArgumentError(
            f"No schedule has so few micro-batches as {num_rows} rows can be cut into:"
            " raise `global_batch`, or name 'GPipe' in `schedules`."
        )
    for schedule in schedules:
        if num_rows % schedule.num_micro_batches:
            raise ArgumentError(
                f"A batch of {num_rows} rows is not shared evenly by"
                f" {schedule.num_micro_batches} micro-batches; use another number."
            )


def cut_of(
    given: MicroBatch, num_rows: int, schedules: Sequence[Schedule]
) -> tuple[dict[int, MicroBatch], dict[int, TraceError]]:
    """The micro-batches of so many rows by their numbers, the smallest ones first.

    And why those fail that are too small, as for batch norm.

    Raises:
        TraceError: All fail.
    """
    numbers = sorted({one.num_micro_batches for one in schedules}, reverse=True)
    sizes = {number: num_rows // number for number in numbers}
    micro_batches: dict[int, MicroBatch] = {}
    failed: dict[int, TraceError] = {}
    for number, size in sizes.items():
        own = replace(
            given,
            inputs=rows_of(given.inputs, size),
            target=rows_of(given.target, size),
            undivided=next(iter(micro_batches.values()), None),
        )
        try:
            if not micro_batches:  # larger ones run as well
                assert own.chain
            micro_batches[number] = own
        except TraceError as error:
            failed[number] = error
    if not micro_batches:
        raise failed[numbers[-1]]
    return micro_batches, failed
