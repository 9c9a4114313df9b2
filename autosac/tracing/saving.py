"""What a recorder keeps in place of the tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autosac import _compat_dispatch, _compat_fakes
from autosac._compat_distributed import unwrapped
from autosac.step.tape import SavedTensor
from autosac.tracing.account import Account
from autosac.tracing.real_tensors import SavedCopies, twin


class Holder:
    """Stands in for a tensor that autograd saved; reports when it is dropped.

    Attributes:
        index: Number of what was saved.
        tensor: The tensor, if it was there before the step;
        twin: else makes one like it.
        wrap: What makes the tensor that autograd saved of that; None for itself.
    """

    __slots__ = ("__weakref__", "account", "index", "tensor", "twin", "wrap")

    def __init__(
        self,
        account: SavedTensors,
        index: int,
        wrap: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.account = account
        self.index = index
        self.wrap = wrap
        self.tensor: torch.Tensor | None = None
        self.twin: Callable[[], torch.Tensor] | None = None

    def __del__(self) -> None:
        self.account.saved[self.index].released = self.account.tick()


class Saved:
    """A `SavedTensor` that is still being written."""

    __slots__ = (
        *("packed", "released", "storage", "unpacked", "used_again", "used_until"),
        "is_number",
    )

    def __init__(self, storage: int, packed: int, *, is_number: bool) -> None:
        self.storage = storage
        self.is_number = is_number
        self.packed = packed
        self.unpacked: int | None = None
        self.released: int | None = None
        self.used_until: int | None = None
        self.used_again = False

    def is_read_first(self) -> bool:
        """Note that backward reads the tensor, and say whether for the first time."""
        is_first = self.unpacked is None
        self.used_again |= not is_first or _compat_dispatch.keeps_graph()
        return is_first

    def finished(self, end: int) -> SavedTensor:
        """The finished `SavedTensor`, at the last tick of the step."""
        released = end if self.released is None else self.released
        return SavedTensor(
            storage=self.storage,
            packed=self.packed,
            unpacked=self.unpacked,
            released=released,
            used_until=released if self.used_until is None else self.used_until,
            used_again=self.used_again,
            is_number=self.is_number,
        )


class SavedTensors(Account):
    """An account that has tensors which autograd saves, and when it reads them.

    Args:
        device_type: Only tensors on this type of device count.
        granularity_bytes: Allocations are rounded up to a multiple of this.
        mode: The mode of fake tensors; None if they are real.
    """

    def __init__(self, device_type: str, granularity_bytes: int, mode: Any) -> None:
        super().__init__(device_type, granularity_bytes)
        self._mode = mode
        self.saved: list[Saved] = []
        self.copies = SavedCopies()

    def pack(self, tensor: torch.Tensor) -> Holder | torch.Tensor:
        """What autograd keeps in place of a tensor that it saves."""
        if not self._counts(tensor):
            return tensor
        tensor, wrap = unwrapped(tensor)
        storage = self._index(tensor, 0, "input")
        holder = Holder(self, len(self.saved), wrap)
        number = _compat_dispatch.is_number(tensor)
        self.saved.append(Saved(storage, self.tick(), is_number=number))
        if self.born[storage] == 0:
            holder.tensor = _compat_fakes.detached(self._mode, tensor)
        elif self._mode is None:
            holder.twin = partial(twin, self.copies.keep(tensor, storage))
        else:
            holder.twin = _compat_fakes.maker_of_twins(self._mode, tensor)
        return holder

    def unpack(self, holder: Holder | torch.Tensor) -> torch.Tensor:
        """What backward reads, of what autograd keeps."""
        if isinstance(holder, torch.Tensor):
            return holder
        saved = self.saved[holder.index]
        if saved.is_read_first():
            saved.unpacked = self.tick()
        tensor = holder.tensor
        if tensor is None:
            assert holder.twin is not None
            tensor = holder.twin()
            storage = tensor.untyped_storage()
            self.ids[storage._cdata] = saved.storage
            self._watch(storage, self._on_used, holder.index)
        return tensor if holder.wrap is None else holder.wrap(tensor)

    def _on_used(self, index: int) -> None:
        self.saved[index].used_until = self.tick()
