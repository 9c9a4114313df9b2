"""Backward passes that fail, and what PyTorch holds of them.

Where an exception ends backward and the training loop catches it, PyTorch's engine
goes on holding the functions that were to run next, with their gradients and all that
they have saved, until the next backward pass. The next forward would come on top.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from autosac import _compat_autograd
from autosac.pytrees import tensors_in

_MOST_NODES = 16  # of outputs


class FailedBackward:
    """Lets go of a backward pass that came to a model's output and did not end."""

    def __init__(self) -> None:
        self._is_running = False
        self._handles: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_is_running": False, "_handles": []}  # graphs are not copied

    def begin(self) -> None:
        """The model is called."""
        if self._is_running and _compat_autograd.current_node() is None:
            self._is_running = False
            _compat_autograd.drop_failed_backward()

    def end(self, output: Any) -> None:
        """Forward has returned its output."""
        while self._handles:  # of outputs that live on
            self._handles.pop().remove()
        tensors = tensors_in((output,))
        nodes = {node for t in tensors if (node := t.grad_fn) is not None}
        for node in islice(nodes, _MOST_NODES):
            self._handles.append(node.register_prehook(self._run))

    def _run(self, _: Any) -> None:
        """Backward comes to the model."""
        if not (self._is_running or torch.compiler.is_compiling()):
            self._is_running = True
            _compat_autograd.at_end_of_backward(self._finish)

    def _finish(self) -> None:
        self._is_running = False
