"""What an optimizer keeps over steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

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


@contextlib.contextmanager
def step_left_alone(optimizer: Any) -> Iterator[None]:
    """Inside, copies of an optimizer are made; its class has its `step` afterwards.

    A copy patches the `step` of a class whose optimizers never called
    `torch.optim.Optimizer.__init__`, as some that wrap another one: theirs then fails.
    """
    kind = type(optimizer)
    own = vars(kind).get("step")
    try:
        yield
    finally:
        if vars(kind).get("step") is not own:
            if own is None:
                del kind.step
            else:
                kind.step = own


def hook_tensors(optimizer: AnyOptimizer | None) -> list[torch.Tensor]:
    """Tensors that an optimizer's hooks close over, such as averaged weights."""
    attributes = {} if optimizer is None else vars(optimizer)
    tables = [value for value in attributes.values() if isinstance(value, dict)]
    hooks = [hook for table in tables for hook in table.values()]
    return held_tensors([list(_bound(hook)) for hook in hooks])


def _bound(function: Any) -> Iterator[Any]:
    """What a function, a method or a `partial` holds of other objects."""
    if isinstance(function, partial):
        yield from (function.args, function.keywords)
        yield from _bound(function.func)
    elif isinstance(function, MethodType):
        yield function.__self__
        yield from _bound(function.__func__)
    elif isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                yield cell.cell_contents
