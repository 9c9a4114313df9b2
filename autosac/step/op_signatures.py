"""Signatures: op calls without their data."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor argument of an op's signature.

    Attributes:
        size: Its shape.
        stride: Its strides, in elements.
        dtype: Its type.
        is_conj: It is a conjugate view, which some kernels copy first.
        is_neg: Likewise a negative view.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """An op call without data: equal for calls that do the same work.

    Attributes:
        func: The operator.
        args: Its positional arguments; tensors are `Layout`, lists are tuples.
        kwargs: Its keyword arguments likewise, as sorted pairs.
    """

    func: Any
    args: tuple[Hashable, ...]
    kwargs: tuple[tuple[str, Hashable], ...]


def layouts(call: Signature) -> Iterator[Layout]:
    """The tensors among the positional arguments of a call, in order."""
    pending = list(call.args)
    while pending:
        value = pending.pop(0)
        if isinstance(value, Layout):
            yield value
        elif isinstance(value, tuple):
            pending = [*value, *pending]


FAR_COPIES = "autosac.far_copies"  # name of such an op


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies between a device and its far memory, one beside the other.

    Attributes:
        out_sizes: Bytes of each tensor that leaves the device,
        back_sizes: and of each that comes back.
    """

    out_sizes: tuple[int, ...]
    back_sizes: tuple[int, ...]

    @property
    def out_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(self.out_sizes)

    @property
    def back_bytes(self) -> int:
        """Bytes that come back."""
        return sum(self.back_sizes)


def signature(func: Any, args: Any, kwargs: Any) -> Signature:
    """The signature of a call."""
    pairs = ((name, _freeze(value)) for name, value in sorted(kwargs.items()))
    return Signature(func, tuple(_freeze(arg) for arg in args), tuple(pairs))


def _freeze(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return Layout(
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.is_conj(),
            value.is_neg(),
        )
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    return value if isinstance(value, Hashable) else str(value)
