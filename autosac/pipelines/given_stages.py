"""What is passed for the stages of a pipeline's plan, and for its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage

from autosac.errors import ArgumentError
from autosac.pipelines.schedules import Schedule
from autosac.step.arguments import short

_AS_MADE = "pass what `plan.stages(model, mesh)` returns"


def read_stages(stages: Any, pipeline: Schedule) -> list[PipelineStage]:
    """The stages of one rank; a single one stands for itself, as in PyTorch.

    Args:
        stages: What was passed.
        pipeline: Of the plan.

    Raises:
        ArgumentError: They are no stages, or not those of a rank of the plan.
    """
    own = [stages] if isinstance(stages, PipelineStage) else stages
    if not isinstance(own, Sequence) or isinstance(own, str):
        raise ArgumentError(f"`stages` is {short(stages)}: {_AS_MADE}.")
    wrong = [stage for stage in own if not isinstance(stage, PipelineStage)]
    if wrong:
        raise ArgumentError(
            f"`stages` has {short(wrong[0])}, which is no PipelineStage: {_AS_MADE}."
        )
    planned = [pipeline.stages_of(rank) for rank in range(pipeline.num_ranks)]
    places = tuple(stage.stage_index for stage in own)
    numbers = {stage.num_stages for stage in own} or {pipeline.num_stages}
    if places not in planned or numbers != {pipeline.num_stages}:
        got = " and ".join(f"{s.stage_index} of {s.num_stages}" for s in own)
        wanted = " and ".join(map(str, planned[0]))
        raise ArgumentError(
            f"`stages` has {got or 'none'}, and a rank of this plan has as many of its"
            f" {pipeline.num_stages} stages as the first, whose are {wanted}:"
            f" {_AS_MADE}."
        )
    return list(own)


def check_loss(loss_fn: Any) -> None:
    """Refuse what is no loss of a pipeline.

    Raises:
        ArgumentError: Says what to pass.
    """
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise ArgumentError(
            f"`loss_fn`={short(loss_fn)}: a pipeline needs a function of output and"
            " target, such as `torch.nn.functional.cross_entropy`."
        )
