"""Storages of the user's that are copied as an op is about to write to them.

A step that is only planned reaches weights of other models, or data, by far more often
than it writes to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autosac import _compat
from autosac.pytrees import tensors_in

_waiting: dict[int, tuple[torch.UntypedStorage, Callable[[], object]]] = {}


def wait_for(storage: torch.UntypedStorage, copy: Callable[[], object]) -> None:
    """Call a function before the first op that writes to a storage, if one does."""
    _waiting.setdefault(storage._cdata, (storage, copy))


def leave(storage: torch.UntypedStorage) -> None:
    """Wait no longer for writes to a storage."""
    _waiting.pop(storage._cdata, None)


def before_op(func: Any, args: Any, kwargs: Any) -> None:
    """An op is about to run on real tensors."""
    if not _waiting:
        return
    for tensor in tensors_in(_compat.written_arguments(func, args, kwargs)):
        _, copy = _waiting.pop(tensor.untyped_storage()._cdata, (None, None))
        if copy is not None:
            copy()


def are_larger(num_bytes: int) -> bool:
    """Whether storages that wait are of more bytes in all."""
    return sum(storage.nbytes() for storage, _ in _waiting.values()) > num_bytes


class Watching(_compat.DispatchMode):
    """Ops run as without it, behind the copies of what they write to."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before_op(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def copy_all(most_bytes: int | None = None) -> None:
    """Ops are about to run that nobody looks at.

    Args:
        most_bytes: Of each storage that they may write to; None for any number.
    """
    for address, (storage, copy) in list(_waiting.items()):
        if most_bytes is None or storage.nbytes() <= most_bytes:
            del _waiting[address]
            copy()
