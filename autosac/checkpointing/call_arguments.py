"""Arguments of a call, taken apart so that it can get them again."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch

from autosac import _compat_dispatch
from autosac.pytrees import opaque_type


class Handed:
    """A tensor among the arguments of a call.

    Attributes:
        tensor: It.
        is_result: It is no leaf: autocast and in-place ops treat it as a result.
    """

    __slots__ = ("is_result", "tensor")

    def __init__(self, tensor: torch.Tensor, *, is_result: bool) -> None:
        self.tensor = tensor
        self.is_result = is_result

    def cut_off(self) -> None:
        """Let go of what made the tensor: it may be done with before this call is."""
        if self.is_result:
            self.tensor = _compat_dispatch.detached(self.tensor)


class Source(Protocol):
    """Knows the arguments of a call.

    Attributes:
        template: Those that are kept, nested, with `Handed` in place of tensors.
    """

    template: Any

    def again(self) -> Any:
        """Positional and keyword arguments, with `Handed` in place of tensors."""

    def relayed(self) -> Collection[int]:
        """Numbers of the tensors among the arguments that are not kept."""

    def keep_tensors_alone(self) -> None:
        """The rerun is op by op: let go of what else is among the arguments.

        An object that layers fill (keys and values that they share) would keep tensors.
        """


class Kept:
    """Source of a call that keeps all its arguments.

    Args:
        arguments: Positional and keyword arguments.
    """

    __slots__ = ("template",)

    def __init__(self, arguments: Any) -> None:
        self.template = take_apart(arguments)

    def again(self) -> Any:
        """As `Source.again`."""
        return self.template

    def relayed(self) -> Collection[int]:
        """As `Source.relayed`."""
        return ()

    def keep_tensors_alone(self) -> None:
        """As `Source.keep_tensors_alone`."""
        self.template = tuple(leaves(self.template, Handed))


def take_apart(arguments: Any) -> Any:
    """Arguments with `Handed` in place of tensors, one for each."""
    taken: dict[int, Handed] = {}

    def take(tensor: torch.Tensor) -> Handed:
        handed = taken.get(id(tensor))
        if handed is None:
            is_result = tensor.requires_grad and not tensor.is_leaf
            handed = taken[id(tensor)] = Handed(tensor, is_result=is_result)
        return handed

    return map_nested(arguments, torch.Tensor, take)


def put_together(template: Any) -> Any:
    """Arguments for Python code, which must not touch the graph of the real ones."""
    ready: dict[int, torch.Tensor] = {}

    def give(handed: Handed) -> torch.Tensor:
        if id(handed) not in ready:
            tensor = handed.tensor
            ready[id(handed)] = as_result(tensor) if handed.is_result else tensor
        return ready[id(handed)]

    return map_nested(template, Handed, give)


# What graphs of aliases begin with: they hold it, where they would hold the memory of
# a tensor that requires a gradient itself.
_BEGINNING = torch.empty(0, device="cpu", requires_grad=True)


class _Alias(torch.autograd.Function):
    """A tensor's memory behind a graph of its own; no view: these cannot be changed."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, beginning: torch.Tensor
    ) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None  # nobody asks for it


def as_result(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that requires a gradient and is no leaf, cut off from its graph."""
    with torch.enable_grad():
        alias: torch.Tensor = _Alias.apply(tensor.detach(), _BEGINNING)
    return alias


def map_nested(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Nested values with all of one kind changed, in copies of what they are in."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(
            [
                change(item)
                if isinstance(item, kind)
                else map_nested(item, kind, change)
                for item in value
            ]
        )
    if isinstance(value, tuple):  # a named one, a `torch.Size`, a `torch.return_types`
        items = [map_nested(item, kind, change) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return getattr(value, "_make", type(value))(items)
    if type(value) is dict:
        return {k: map_nested(item, kind, change) for k, item in value.items()}
    if isinstance(value, dict):  # an ordered one, or an output of Transformers
        mapping = copy.copy(value)
        for name, item in value.items():
            mapping[name] = map_nested(item, kind, change)
        return mapping
    if isinstance(value, list):
        items = copy.copy(value)
        items[:] = [map_nested(item, kind, change) for item in value]
        return items
    return value


def leaves(value: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """Leaves of one kind in nested values."""
    gathered: list[Any] = []
    is_sequence = type(value) is list or type(value) is tuple
    _gather(value if is_sequence else (value,), kind, gathered)
    return gathered


def _gather(
    values: Iterable[Any], kind: type | tuple[type, ...], gathered: list[Any]
) -> None:
    for value in values:
        if isinstance(value, kind):
            gathered.append(value)
        elif isinstance(value, (list, tuple)):
            _gather(value, kind, gathered)
        elif isinstance(value, dict):
            _gather(value.values(), kind, gathered)


def is_simple(value: Any) -> bool:
    """Whether nested values are tensors and plain values in what is copied here."""
    if isinstance(value, (list, tuple)):
        return all(map(is_simple, value))
    if isinstance(value, dict):
        return all(map(is_simple, value.values()))
    return opaque_type((value,)) is None and not isinstance(value, Mapping)
