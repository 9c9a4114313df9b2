"""A model compiled with its loss under a budget, and run once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autosac.graphs.compiled_peaks import CompiledPlan
from autosac.graphs.compiling import compile, compiled_plans
from autosac.step.training_step import LossFn, default_loss, normalize_inputs


class _WithLoss(torch.nn.Module):
    """Forward and loss as one module, so that both are in the graph."""

    def __init__(self, model: torch.nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.loss_fn(self.model(*args, **kwargs))


def plan_of(parts: Mapping[str, Any], **how: Any) -> CompiledPlan:
    """The plan of forward and loss, which are one graph.

    Args:
        parts: Model, inputs and loss.
        how: As in `autosac.compile`.
    """
    model = _WithLoss(parts["model"], parts.get("loss_fn") or default_loss)
    compiled = compile(model, **how)
    args, kwargs = normalize_inputs(parts["inputs"])
    compiled(*args, **kwargs).backward()
    return compiled_plans(compiled)[0]
