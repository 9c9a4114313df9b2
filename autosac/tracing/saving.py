"""What a recorder keeps in place of the tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from autosac import _compat_dispatch
from autosac.step.tape import SavedTensor

if TYPE_CHECKING:
    from autosac.tracing.recorder import Recorder


class Holder:
    """Stands in for a tensor that autograd saved; reports when it is dropped.

    Attributes:
        index: Number of what was saved.
        tensor: The tensor, if it was there before the step;
        twin: else makes one like it.
        wrap: What makes the tensor that autograd saved of that; None for itself.
    """

    __slots__ = ("__weakref__", "index", "recorder", "tensor", "twin", "wrap")

    def __init__(
        self,
        recorder: Recorder,
        index: int,
        wrap: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.recorder = recorder
        self.index = index
        self.wrap = wrap
        self.tensor: torch.Tensor | None = None
        self.twin: Callable[[], torch.Tensor] | None = None

    def __del__(self) -> None:
        self.recorder.saved[self.index].released = self.recorder.tick()


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
