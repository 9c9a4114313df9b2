"""Tensors of an AC unit by where they lie, for ops that are run again."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from autosac import _compat, _compat_dispatch, _compat_fakes

Layout = tuple[Any, ...]


def layout_of(tensor: torch.Tensor) -> Layout:
    """How a tensor lies in its storage."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def layout_in(tensor: torch.Tensor, dtype: torch.dtype) -> Layout:
    """Layout of a tensor, without what is clear in a storage of one type."""
    own = tensor.dtype
    if own is not dtype or own.is_complex:
        return layout_of(tensor)
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def key_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage: its identity while it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, where nobody counts
        return 0


def version_before(tensor: torch.Tensor, noted: tuple[torch.Tensor, int] | None) -> int:
    """Version of a tensor before a rerun began to write to its storage.

    Args:
        tensor: A tensor, as it is now.
        noted: What the rerun wrote to first, and its version before; None for nothing.
    """
    now = version_of(tensor)
    if noted is None:
        return now
    other, before = noted
    version = version_of(other)
    _compat_dispatch.set_version(other, version + 1)
    count_together = version_of(tensor) != now  # not so with `.data`
    _compat_dispatch.set_version(other, version)
    return before if count_together else now


def alias_of(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor that lies in the storage of another one."""
    if len(layout) == 3:
        return whole.as_strided(*layout)
    size, stride, offset, dtype, is_conjugate, is_negative = layout
    if dtype != whole.dtype:
        whole = elements(whole).view(dtype)
    alias = whole.as_strided(size, stride, offset)
    return _compat.read_as(alias, is_conj=is_conjugate, is_neg=is_negative)


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor's storage, as they lie in memory."""
    tensor = _compat.read_as(tensor, is_conj=False, is_neg=False)
    number = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((number,), (1,), 0)


def equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether real tensors lie alike in their storages and hold the same bytes."""
    if layout_of(one) != layout_of(other) or one.device != other.device:
        return False
    if _compat_fakes.is_fake(one) or _compat_fakes.is_fake(other):
        return False
    with _compat.no_modes():  # no part of the step
        plain = (tensor.resolve_conj().resolve_neg() for tensor in (one, other))
        rows = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in plain)
        return torch.equal(*rows)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor in a copy of its whole storage."""
    return alias_of(elements(tensor).clone(), layout_of(tensor))


class Result:
    """A storage that a unit made.

    Attributes:
        action: What becomes of it.
        available: For which reruns it is there again.
        kept: For which of these it stays until their end, as somebody reads it then.
        version: How often ops that are known changed it in place,
        apart: and how often each tensor in it that is counted by itself.
        dtype: Of the tensor that an op returned,
        whole: which can be told from its views while it lives.
        tensor: That tensor; None while it is lost.
        copied: Its version when a real op was about to change it and the tensor became
            a copy; None if it is none.
    """

    __slots__ = (
        *("action", "apart", "available", "copied", "dtype", "kept", "tensor"),
        *("version", "whole"),
    )

    def __init__(self, action: str, available: int, tensor: torch.Tensor) -> None:
        self.action = action
        self.available = available
        self.kept = 0
        self.version = 0
        self.apart: dict[int, int] | None = None
        self.dtype = tensor.dtype
        self.whole = weakref.ref(tensor)
        self.tensor: torch.Tensor | None = None
        self.copied: int | None = None

    def count_apart(self, tensor: torch.Tensor) -> None:
        """Let a tensor in the storage and its views count their own changes."""
        self.apart = self.apart or {}
        self.apart[tensor._cdata] = 0

    def count_change(self, tensor: torch.Tensor) -> None:
        """Count a change of a tensor in the storage."""
        address = _address_of_base(tensor)
        if self.apart is not None and address in self.apart:
            self.apart[address] += 1
        else:
            self.version += 1

    def counted(self, tensor: torch.Tensor) -> int:
        """How often known ops changed a tensor in the storage."""
        if self.apart is None:
            return self.version
        return self.apart.get(_address_of_base(tensor), self.version)


def _address_of_base(tensor: torch.Tensor) -> int:
    """Address that tells a tensor and its views from others in the same storage."""
    base = tensor._base
    address: int = (tensor if base is None else base)._cdata
    return address


class Part:
    """A tensor that an op read, or that autograd saved.

    Attributes:
        source: The result that it lies in, the number of an argument of the unit, or
            itself if it comes from elsewhere.
        layout: How it lies there; None if it is the whole tensor.
        version: How often it had been changed; None if nobody else can change it.
    """

    __slots__ = ("layout", "source", "version")

    source: Result | int | torch.Tensor | None
    layout: Layout | None
    version: int | None

    def tensor_of(self, given: Sequence[torch.Tensor], fqn: str) -> torch.Tensor:
        """The tensor, from where it lies or made again.

        Args:
            given: The tensors among the unit's arguments.
            fqn: Name of the unit, for the error.
        """
        whole = self.whole_of(given)
        version = self.version
        if version is not None and version != version_of(whole):
            raise changed(whole, version, fqn)
        layout = self.layout
        return whole if layout is None else alias_of(whole, layout)

    def whole_of(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that the part lies in."""
        whole: Any = self.source
        if type(whole) is Result:
            whole = whole.tensor
        elif type(whole) is int:
            whole = given[whole]
        return whole  # type: ignore[no-any-return]


def changed(tensor: torch.Tensor, version: int | None, fqn: str) -> RuntimeError:
    """The error that a tensor was changed in place since forward read it."""
    return RuntimeError(
        f"A tensor of shape {tuple(tensor.shape)} that AC unit `{fqn}` read has been"
        f" changed in place since it read version {version} of it in forward. Change it"
        " after backward, or exclude the unit from the plan with `exclude`."
    )


def gone(fqn: str) -> RuntimeError:
    """The error that what a unit kept is not there any more."""
    return RuntimeError(
        f"AC unit `{fqn}` goes backward a second time, or a function in it reads"
        " `ctx.saved_tensors` twice; what it saved is gone after the first. Pass"
        " `retain_graph=True` to the first backward, and read saved tensors once."
    )


class Literal:
    """A tensor that the model's code made of numbers, kept as their bytes."""

    __slots__ = ("data", "device", "dtype", "size")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        with _compat.no_modes():  # no part of the step
            tensor = tensor.cpu().contiguous()
        nbytes = tensor.numel() * tensor.element_size()
        self.data = ctypes.string_at(tensor.data_ptr(), nbytes)

    def tensor(self) -> torch.Tensor:
        """The tensor made again, below all modes, as the model's code makes it."""
        with _compat.no_modes():
            if not self.data:
                return torch.empty(self.size, dtype=self.dtype, device=self.device)
            elements = torch.frombuffer(bytearray(self.data), dtype=self.dtype)
            return elements.view(self.size).to(self.device, copy=True)
