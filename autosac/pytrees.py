"""Tensors and other values in nested arguments."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from types import FunctionType, MethodType, ModuleType
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
_HOLDS_NOTHING = (type, FunctionType, MethodType, ModuleType)
_PLAIN_TYPES = frozenset(_PLAIN)  # to look up without their subclasses
_SEQUENCES = frozenset((list, tuple))  # likewise, as they have no attributes
_ITERABLES = (list, tuple, deque, set, frozenset)
_PROXIES = frozenset(weakref.ProxyTypes)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, tuples and mappings."""
    tensors: list[torch.Tensor] = []
    _collect(value if type(value) in _SEQUENCES else (value,), tensors)
    return iter(tensors)


def module_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that modules hold in containers of any depth, each once.

    Attributes of parameters, too, such as a gradient in another type, and what modules
    in containers hold, such as a teacher in a list. Not those of other objects: one may
    be a trainer, which knows all of the data.
    """
    seen: dict[int, Any] = {}
    return [
        tensor
        for part in (*module.modules(), *module.parameters())
        for tensor in held_tensors(vars(part), seen, in_objects=False)
    ]


def held_tensors(
    value: Any, seen: dict[int, Any] | None = None, *, in_objects: bool = True
) -> list[torch.Tensor]:
    """Tensors in containers and in attributes of objects, at any depth, each once.

    Args:
        value: What holds them. Functions and weak references hold nothing here.
        seen: Objects that need no look any more, by address; those found are added.
        in_objects: False for those in containers, dataclasses and modules alone.
    """
    seen = {} if seen is None else seen
    tensors: list[torch.Tensor] = []
    left = [value]
    while left:
        value = left.pop()
        kind = type(value)
        if kind in _PLAIN_TYPES or kind in _PROXIES or id(value) in seen:
            continue
        seen[id(value)] = value
        if kind is dict or (kind is OrderedDict and not in_objects):
            left.extend(reversed(value.values()))
        elif kind in _SEQUENCES:
            left.extend(reversed(value))
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
        else:
            left.extend(reversed(_inside(value, in_objects=in_objects)))
    return tensors


def contents(value: Any) -> list[Any]:
    """What a container holds, as its base tells: a subclass may have no length."""
    if isinstance(value, dict):
        return [*dict.values(value)]
    if isinstance(value, Mapping):
        try:
            return [*value.values()]
        except Exception:  # as of settings that wait for a value
            return []
    base = next((kind for kind in _ITERABLES if isinstance(value, kind)), None)
    return [] if base is None else [*base.__iter__(value)]


def _inside(value: Any, *, in_objects: bool) -> list[Any]:
    """What an object refers to by its items and attributes."""
    if isinstance(value, _HOLDS_NOTHING) or _is_distributed(value):
        return []
    items = contents(value)
    is_looked_into = is_dataclass(value) or isinstance(value, torch.nn.Module)
    if not in_objects and not is_looked_into:
        return items
    items += getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__[:-1]:
        slots = cls.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        items += [getattr(value, name, None) for name in names]
    return items


def _is_distributed(value: Any) -> bool:
    """Whether an object is a mesh, a group, or another of torch.distributed."""
    return type(value).__module__.startswith("torch.distributed")


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
        elif type(value) in _SEQUENCES:
            _collect(value, tensors)
        elif isinstance(value, (list, tuple, Mapping)):
            _collect(contents(value), tensors)


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
    if not isinstance(value, (list, tuple, Mapping)):
        return type(value).__name__
    names = map(opaque_type, contents(value))
    return next((name for name in names if name), None)
