"""What a rank of a pipeline holds all the time besides what its stages do.

The mesh; and of ranks that have parts of a sequence the whole ones, from which the loop
cuts them: inputs on the ranks of the first stage, and targets on those of the last one.
"""

from __future__ import annotations

import torch

from autosac.parallel.sequence_parts import is_cut
from autosac.parallel.sharding import mesh_bytes
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.schedules import Schedule
from autosac.quantities import rounded_up


def besides_bytes(micro_batch: MicroBatch, schedule: Schedule, rank: int) -> int:
    """What a rank of the schedule holds so.

    Args:
        micro_batch: The model, and one micro-batch as the rank has it.
        schedule: Of the pipeline.
        rank: Of the schedule: the first of those that a stage lies on.
    """
    stages = schedule.stages_of(rank)
    num_ranks = schedule.num_ranks * micro_batch.ranks_per_stage
    held_bytes = mesh_bytes(num_ranks, micro_batch.whole.device.type)
    if 0 in stages:
        held_bytes += _whole_bytes(micro_batch, micro_batch.inputs, schedule)
    if schedule.num_stages - 1 in stages:
        held_bytes += _whole_bytes(micro_batch, micro_batch.target, schedule)
    return held_bytes


def _whole_bytes(
    micro_batch: MicroBatch, part: torch.Tensor, schedule: Schedule
) -> int:
    """Of what all micro-batches' parts like this one are cut from; 0 if none is."""
    degree = micro_batch.context.degree
    if degree == 1 or not is_cut(part):
        return 0
    nbytes = schedule.num_micro_batches * degree * part.nbytes
    grain = micro_batch.whole.device.allocation_granularity_bytes
    return rounded_up(nbytes, grain)
