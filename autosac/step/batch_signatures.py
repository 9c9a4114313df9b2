"""What a batch looks like, but for its data: a plan knows by this which it is for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_USUAL = ("torch.float32", "torch.int64", "torch.bool")  # types that need no word
_Leaf = tuple[str, str, tuple[int, ...]]  # place, type and shape
_PLAIN = (bool, str)  # what steps branch on; numbers may count steps


@dataclass(frozen=True, slots=True)
class BatchSignature:
    """Places, types and shapes of all that a model is called with.

    Devices do not matter: a plan may be made where its batches do not lie. Nor do
    values of numbers, of which the number of a step may be one, and strides.

    Attributes:
        leaves: Place, type and shape of everything but None, in the order of places. A
            flag or text has its value for its type.
        thawed: Names of the parameters that are trained in its step, and were frozen
            when the model was planned.
    """

    leaves: tuple[_Leaf, ...]
    thawed: tuple[str, ...] = ()

    @property
    def num_elements(self) -> int:
        """Number of elements of all tensors together."""
        return sum(math.prod(shape) for _, kind, shape in self.leaves if _is(kind))

    @property
    def form(self) -> tuple[tuple[str, str, int], ...]:
        """The signature without its sizes."""
        return tuple((place, kind, len(shape)) for place, kind, shape in self.leaves)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes, in the order of places."""
        return tuple(size for _, _, shape in self.leaves for size in shape)

    def cast(self, dtype: torch.dtype) -> BatchSignature:
        """That of the same batch with its floating-point tensors in another type."""
        leaves = (
            (place, str(dtype) if _is_floating(kind) else kind, shape)
            for place, kind, shape in self.leaves
        )
        return replace(self, leaves=tuple(leaves))

    def is_like(self, other: BatchSignature) -> bool:
        """Whether a batch differs in nothing but sizes."""
        return self.form == other.form and self.thawed == other.thawed

    def covers(self, other: BatchSignature) -> bool:
        """Whether a batch is no larger in any dimension, and the same otherwise."""
        pairs = zip(other.sizes, self.sizes, strict=False)
        return self.is_like(other) and all(size <= most for size, most in pairs)

    def __str__(self) -> str:
        texts = [
            f"{place} {_type(kind)}{list(shape)}" if _is(kind) else f"{place}={kind}"
            for place, kind, shape in self.leaves
        ]
        text = ", ".join(texts) or "nothing"
        if self.thawed:
            more = f" and {len(self.thawed) - 1} more" if self.thawed[1:] else ""
            text += f", which trains `{self.thawed[0]}`{more}, frozen before,"
        return text


def _is(kind: str) -> bool:
    """Whether a leaf of this type is a tensor."""
    return kind.startswith("torch.")


def _is_floating(kind: str) -> bool:
    dtype = getattr(torch, kind.removeprefix("torch.")) if _is(kind) else None
    return dtype is not None and bool(dtype.is_floating_point)


def _type(kind: str) -> str:
    """An unusual type of tensors, for people; '' for a usual one."""
    return "" if kind in _USUAL else f"{kind.removeprefix('torch.')} "


def positional_names(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of what a model's ``forward`` takes by position."""
    try:
        parameters = inspect.signature(type(model).forward).parameters.values()
    except (TypeError, ValueError):  # of no Python function
        return ()
    return tuple(p.name for p in parameters if p.kind in _BY_POSITION)[1:]


def signature_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...] = ()
) -> BatchSignature:
    """The signature of a call.

    Args:
        args: Positional arguments,
        kwargs: and those by name.
        names: Those of the positional ones, as far as they have names: an argument
            is the same however it is passed.
    """
    leaves: list[_Leaf] = []
    for place, value in enumerate(args):
        _add(names[place] if place < len(names) else f"*{place}", value, leaves)
    for name, value in kwargs.items():
        _add(name, value, leaves)
    leaves.sort()
    return BatchSignature(tuple(leaves))


def _add(place: str, value: Any, leaves: list[_Leaf]) -> None:
    if isinstance(value, torch.Tensor):
        leaves.append((place, str(value.dtype), tuple(value.shape)))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _add(f"{place}[{number}]", item, leaves)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(f"{place}[{key!r}]", item, leaves)
    elif value is not None:
        kind = repr(value) if isinstance(value, _PLAIN) else type(value).__name__
        leaves.append((place, kind, ()))
