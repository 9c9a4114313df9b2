"""What a recorder needs to follow a step that runs on real tensors.

Values decide shapes and branches of such a step, so that nobody can work its calls out:
each is made. And what autograd wants to save, it must get back with its data, while the
trace sees when the model's own code lets go of it. So the data is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from autosac import _compat
from autosac.fake_tensors.repeated_calls import (
    Call,
    RepeatedCalls,
    Tensors,
)
from autosac.pytrees import tensors_in


class RealCalls(RepeatedCalls):
    """Calls on real tensors, of which no two are equal."""

    def __init__(self) -> None:
        super().__init__(None)

    def key(self, func: Any, args: Any, kwargs: Any, tensors: Tensors) -> Hashable:
        """No key (None), as each call is made; its tensors are appended."""
        tensors.extend(tensors_in((args, kwargs)))
        return None

    def learn(self, key: Hashable, func: Any, args: Any, kwargs: Any, out: Any) -> Call:
        """Learn nothing, as no two calls are equal."""
        return Call()


class SavedCopies:
    """The data of tensors that autograd saves, each storage once.

    Attributes:
        nbytes: Of all copies that are alive.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._copies: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )

    def keep(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """A tensor of the same data and layout in other memory.

        Args:
            tensor: What autograd saves.
            index: Number of its storage.
        """
        with _compat.no_modes():
            copy = self._copies.get(index)
            if copy is None:
                copy = self._copies[index] = tensor.untyped_storage().clone()
                self.nbytes += copy.nbytes()
                weakref.finalize(copy, self._lose, copy.nbytes())
            return _within(copy, tensor)

    def forget(self, storages: tuple[int, ...]) -> None:
        """Storages were written to: what is saved of them from now on differs."""
        for index in storages:
            self._copies.pop(index, None)

    def _lose(self, nbytes: int) -> None:
        self.nbytes -= nbytes


def twin(kept: torch.Tensor) -> torch.Tensor:
    """A copy of a kept tensor, in memory of its own."""
    with _compat.no_modes():
        return _within(kept.untyped_storage().clone(), kept)


def _within(storage: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of another one's layout in other memory."""
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return _compat.read_as(view, is_conj=tensor.is_conj(), is_neg=tensor.is_neg())
