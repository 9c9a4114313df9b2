"""A storage that lies in far memory until backward reads it."""

from __future__ import annotations

import torch

from autosac import _compat, _compat_dispatch, _compat_fakes
from autosac.checkpointing.tensor_parts import elements
from autosac.far_memory import FarMemory, Sent


class Place:
    """A storage in far memory.

    Attributes:
        sent: The copy; None of a fake tensor.
        num_elements: What the new storage is to hold.
        like: A tensor of no elements of its type and device.
        tensor: All of the new storage, until a rerun has got it.
        is_filled: It holds what was sent.
    """

    __slots__ = ("is_filled", "like", "num_elements", "sent", "tensor")

    def __init__(self, tensor: torch.Tensor, memory: FarMemory) -> None:
        self.like = tensor.new_empty(0)
        self.num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.tensor: torch.Tensor | None = None
        self.is_filled = False
        self.sent: Sent | None = None
        if not _compat_fakes.is_fake(tensor):
            with _compat.no_modes():
                whole = elements(_compat_dispatch.detached(tensor))
                self.sent = memory.send(whole.view(torch.uint8))

    def allocate(self) -> torch.Tensor:
        """New memory, the same each time until it is dropped."""
        if self.tensor is None:
            # From a tensor: in a dry run what is made of nothing may be no fake.
            self.tensor = self.like.new_empty(self.num_elements)
        return self.tensor

    def begin(self) -> None:
        """Begin to copy into memory that is allocated and not filled."""
        if self.tensor is not None and not self.is_filled and self.sent is not None:
            with _compat.no_modes():
                self.sent.begin(self.tensor.view(torch.uint8))

    def fetch(self) -> torch.Tensor:
        """All elements in new memory, the same ones each time until it is dropped."""
        tensor = self.allocate()
        if not self.is_filled and self.sent is not None:
            with _compat.no_modes():
                self.sent.fetch(tensor.view(torch.uint8))
        self.is_filled = True
        return tensor

    def drop(self) -> None:
        """Let go of the new memory, which others have now."""
        self.tensor, self.is_filled = None, False


def is_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all that there is to know of its memory."""
    return _compat_dispatch.is_plain(type(tensor)) and tensor.layout == torch.strided
