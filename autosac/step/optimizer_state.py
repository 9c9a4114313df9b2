"""What an optimizer keeps over steps."""

from __future__ import annotations

import torch

from autosac.pytrees import held_tensors
from autosac.step.offloaded_optimizer import offloaded_parts
from autosac.step.training_step import AnyOptimizer


def optimizer_tensors(optimizer: AnyOptimizer | None) -> list[torch.Tensor]:
    """Tensors in an optimizer's state, options and attributes, and in its hooks'.

    None that it trains, and none that lies in far memory.
    """
    if optimizer is None:
        return []
    left_out = [p for group in optimizer.param_groups for p in group["params"]]
    for part in offloaded_parts(optimizer):
        left_out += part.far_tensors()
    return held_tensors(optimizer, {id(tensor): tensor for tensor in left_out})
