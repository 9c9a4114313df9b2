"""A model whose parameters, and so its gradients and optimizer states, are bfloat16.

Optimizers of torch.optim keep their states in the type of the parameter.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from autosac.step.training_step import OptimizerInBackward
from autosac.tracing.copying import AnyCopies


def in_bf16(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model, converted; the model is left as it is."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        data = cast(parameter.detach())
        if data.dtype != parameter.dtype:  # else copied like everything else
            memo[id(parameter)] = torch.nn.Parameter(data, parameter.requires_grad)
    with AnyCopies():
        return copy.deepcopy(model, memo).to(torch.bfloat16)


def cast(values: Any) -> Any:
    """Nested values with all floating-point tensors in bfloat16."""

    def one(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if is_float else value

    return tree_map(one, values)


def optimizer_of_copy(optimizer: Any, model: torch.nn.Module) -> Any:
    """What builds such an optimizer, in its first state, for a copy of its model."""
    if isinstance(optimizer, OptimizerInBackward):
        return partial(OptimizerInBackward, make_optimizer=optimizer.make_optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return partial(_rebuilt, optimizer, tuple(model.parameters()))
    return optimizer


def _rebuilt(
    optimizer: torch.optim.Optimizer,
    originals: Sequence[torch.nn.Parameter],
    parameters: Iterable[torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """The optimizer with other parameters in its groups, and no states."""
    copies = dict(zip(originals, parameters, strict=True))
    rebuilt = copy.copy(optimizer)
    rebuilt.state = defaultdict(dict)
    rebuilt.param_groups = [
        {**group, "params": [copies[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return rebuilt
