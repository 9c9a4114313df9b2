"""Whether real steps are those that a plan was made for: warnings where they are not.

Each of these makes a measured peak that says nothing of the predicted one.
"""

from __future__ import annotations

from typing import Any

import torch

from autosac.planning.plan_data import PlanData
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.step.batch_signatures import positional_names, signature_of
from autosac.step.training_step import LossFn

# What a step computes of outputs without a `loss_fn`; of micro-steps, divided.
_SUMS = ("aten.sum.default", "aten.stack.default", "aten.div.Tensor")
_ROUNDED = 0.05  # of an optimizer's state, by the allocator of a GPU


def warn_of_another_loss(plan: Any, loss_fn: LossFn | None) -> None:
    """Warn where a plan was made with a loss, if that is known, and none is here."""
    traced = getattr(plan, "traced", None)
    if traced is None or loss_fn is not None:
        return
    in_loss = {op.name for op in traced.tape.ops if op.phase == "loss"}
    if not in_loss <= set(_SUMS):
        warn(
            "The plan was made with a `loss_fn`, and `verify` got none, so that the"
            " loss in it takes other memory: pass the same."
        )


def warn_of_another_batch(
    plan: Any, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Warn of a smaller batch than the only one that a plan was made for.

    Larger ones are said by the model under the plan.
    """
    if not isinstance(plan, PlanData) or len(plan.each) > 1:
        return
    planned = plan.each[0].signatures
    signature = signature_of(args, kwargs, positional_names(model))
    if len(planned) == 1 and signature not in planned and planned[0].covers(signature):
        warn(
            f"The batch has {signature}, and the plan was made for {planned[0]}, so"
            " that its predicted peak is that of another step: verify with a batch"
            " like the planned one."
        )


def warn_of_another_optimizer(plan: Any, state_bytes: int) -> None:
    """Warn of an optimizer whose state is not as large as in the planned step.

    Args:
        plan: The plan.
        state_bytes: What it takes after a step; 0 without one.
    """
    if not isinstance(plan, PlanData) or plan.far_state_bytes:
        return
    planned_bytes = plan.composition.get("optimizer", 0)
    if abs(state_bytes - planned_bytes) <= _ROUNDED * max(state_bytes, planned_bytes):
        return
    here, there = map(_told, (state_bytes, planned_bytes))
    warn(
        f"The optimizer holds {here} here, and {there} in the step that the plan was"
        " made for, so that its predicted peak is that of another step: pass the"
        " same optimizer as `make_optimizer`."
    )


def _told(state_bytes: int) -> str:
    return format_bytes(state_bytes) if state_bytes else "nothing"
