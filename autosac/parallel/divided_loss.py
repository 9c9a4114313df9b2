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
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autosac import _compat, _compat_fakes
from autosac._compat_autograd import name_of
from autosac.errors import UnsupportedError
from autosac.parallel.tp_styles import TensorParallel

AnyLoss = Callable[..., Any]

_NLL = ("NllLoss",)
_SHAPES = ("View", "Unsqueeze", "Squeeze", "Transpose", "Permute")
_ENTRANCE = "_FromTorchTensorBackward"  # where plain tensors become distributed ones


def loss_for(tensor: TensorParallel, loss_fn: AnyLoss) -> AnyLoss:
    """The loss function of a model that is divided so.

    It raises `UnsupportedError` where gradients of divided logits would be wrong, or
    PyTorch's `loss_parallel` fails for real though its trace does not.
    """
    return partial(_checked, loss_fn) if tensor.divides_loss else loss_fn


def _checked(loss_fn: AnyLoss, *args: Any) -> Any:
    with _CheckedTargets():
        loss = loss_fn(*args)
    if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
        _check(loss.grad_fn)
    return loss


class _CheckedTargets(TorchFunctionMode):
    """Refuses class weights where a target that is ignored is none of the classes.

    `loss_parallel` looks up the weights of all targets before it leaves out those that
    are ignored (`_nll_loss_forward` in torch/distributed/tensor/parallel/loss.py,
    torch 2.15).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (functional.cross_entropy, functional.nll_loss):
            _check_targets(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _check_targets(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    *_: Any,
    **__: Any,
) -> None:
    num_classes = logits.shape[min(logits.dim() - 1, 1)]
    if weight is None or 0 <= ignore_index < num_classes:
        return
    if target.is_meta or _compat_fakes.is_fake(target):
        return  # its values are not known
    with _compat.no_modes():
        is_met = bool((target == ignore_index).any())
    if is_met:
        raise UnsupportedError(
            f"Targets are ignored by `ignore_index`={ignore_index}, which is none of"
            f" the {num_classes} classes, in a loss with class weights: PyTorch's"
            " `loss_parallel` looks up a weight for it and fails. Mark them by one of"
            " the classes, leave the weights out, or leave `loss_parallel` out."
        )


def _check(last: Any) -> None:
    """Refuse a graph in which something else than `nll_loss` reads `log_softmax`."""
    waiting = [(last, False)]  # nodes, and whether only `nll_loss` is above them
    met = set(waiting)
    while waiting:
        node, is_behind = waiting.pop()
        is_behind = name_of(node).startswith(_NLL) or (
            is_behind and name_of(node).startswith(_SHAPES)
        )
        for before, _ in node.next_functions:
            if before is None or name_of(before) == _ENTRANCE:
                continue
            if name_of(before).startswith("LogSoftmax") and not is_behind:
                raise _wrong_gradients(name_of(node))
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
