"""Tensors and other values in nested arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_PLAIN_TYPES = frozenset(_PLAIN)  # to look up without their subclasses


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, tuples and mappings."""
    tensors: list[torch.Tensor] = []
    _collect((value,), tensors)
    return iter(tensors)


def first_function(value: Any) -> Any:
    """The autograd function of the first tensor in nested values that has one."""
    functions = (tensor.grad_fn for tensor in tensors_in((value,)))
    return next((function for function in functions if function is not None), None)


def _collect(values: Iterable[Any], tensors: list[torch.Tensor]) -> None:
    for value in values:
        if type(value) in _PLAIN_TYPES:
            continue
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, tensors)
        elif isinstance(value, Mapping):
            _collect(value.values(), tensors)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """An op's arguments or results with every leaf changed: lists, tuples, dicts."""
    if isinstance(value, tuple):
        return tuple([mapped(change, item) for item in value])
    if isinstance(value, list):
        return [mapped(change, item) for item in value]
    if isinstance(value, dict):
        return {name: mapped(change, item) for name, item in value.items()}
    return change(value)


def opaque_type(value: Any) -> str | None:
    """Name of the first type in ``value`` that is neither tensor nor plain value."""
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        return None
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, (list, tuple)):
        items = list(value)
    else:
        return type(value).__name__
    return next((name for item in items if (name := opaque_type(item))), None)
