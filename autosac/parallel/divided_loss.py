"""Losses of logits that stay divided over the vocabulary.

Under PyTorch's `loss_parallel` cross entropy of distributed logits is computed on what
each rank has. Backward of `nll_loss` then goes through `log_softmax` as well, whose own
backward hands on what it gets: gradients of anything else that is made of its result
would be wrong, without a word.

Source: torch/distributed/tensor/parallel/loss.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autosac.errors import UnsupportedError
from autosac.parallel.tp_styles import TensorParallel

AnyLoss = Callable[..., Any]

_NLL = ("NllLoss",)
_SHAPES = ("View", "Unsqueeze", "Squeeze", "Transpose", "Permute")
_ENTRANCE = "_FromTorchTensorBackward"  # where plain tensors become distributed ones


def loss_for(tensor: TensorParallel, loss_fn: AnyLoss) -> AnyLoss:
    """The loss function of a model that is divided so.

    It raises `UnsupportedError` where gradients of divided logits would be wrong.
    """
    return partial(_checked, loss_fn) if tensor.divides_loss else loss_fn


def _checked(loss_fn: AnyLoss, *args: Any) -> Any:
    loss = loss_fn(*args)
    if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
        _check(loss.grad_fn)
    return loss


def _check(last: Any) -> None:
    """Refuse a graph in which something else than `nll_loss` reads `log_softmax`."""
    waiting = [(last, False)]  # nodes, and whether only `nll_loss` is above them
    met = set(waiting)
    while waiting:
        node, is_behind = waiting.pop()
        is_behind = node.name().startswith(_NLL) or (
            is_behind and node.name().startswith(_SHAPES)
        )
        for before, _ in node.next_functions:
            if before is None or before.name() == _ENTRANCE:
                continue
            if before.name().startswith("LogSoftmax") and not is_behind:
                raise _wrong_gradients(node.name())
            if (before, is_behind) not in met:
                met.add((before, is_behind))
                waiting.append((before, is_behind))


def _wrong_gradients(reader: str) -> UnsupportedError:
    return UnsupportedError(
        "The loss takes `log_softmax` of divided logits for something else than"
        f" `nll_loss` ({reader}), to which PyTorch's `loss_parallel` would give wrong"
        " gradients: use `torch.nn.functional.cross_entropy` of class indices without"
        " label smoothing, or leave `loss_parallel` out."
    )
