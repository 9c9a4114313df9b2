"""Does a step write to memory that views look at, in a way that autograd follows?"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch

from autosac import _compat


class ViewWritten(BaseException):
    """Autograd makes functions of views anew, which only plain fakes show.

    No `Exception`: models catch these.
    """


class LiveViews:
    """Views that a step has made so far, by the storage that they look at.

    Attributes:
        written: Whether one of them was alive when autograd followed a write to it.
    """

    def __init__(self) -> None:
        self.written = False
        self._views: dict[int, list[weakref.ref[torch.Tensor]]] = defaultdict(list)

    def look(
        self,
        func: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        storages: tuple[int, ...],
    ) -> None:
        """Look at an op that made no memory.

        Args:
            func: The operator.
            inputs: The tensors in its arguments.
            outputs: Those that it returned.
            storages: Indices of their storages.

        Raises:
            ViewWritten: It is such a write.
        """
        if not torch.is_grad_enabled() or func is torch.ops.aten.detach.default:
            return
        if not _compat.returned_arguments(func):
            for output in outputs:
                self._views[storages[0]].append(weakref.ref(output))
        elif any(tensor.requires_grad for tensor in inputs) and any(
            view() is not None for i in storages for view in self._views.get(i, ())
        ):
            self.written = True
            raise ViewWritten
