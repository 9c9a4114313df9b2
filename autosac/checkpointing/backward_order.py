"""Edges of the autograd graph that only say what goes backward before what.

A schedule of a pipeline is an order of its stages' forward and backward runs. Autograd
keeps no order between stages of different micro-batches, unless an edge gives it one:
`fork` leaves an empty tensor, the *phony*, which `join` ties to another tensor.

Source:
    Kim et al., torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models,
    2020, section 3.2; torchgpipe 0.0.7, ``dependency.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autosac.errors import ArgumentError
from autosac.kinds import check_kind

_FROM_FORK = "the second tensor that `autosac.fork` returns"


def fork(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split off a phony: what ``tensor`` was made of goes backward after the joined.

    Args:
        tensor: Any tensor.

    Returns:
        The same values, to go on with, and the phony. Where no gradient is asked for,
        neither is part of a graph.

    Raises:
        ArgumentError: It is no tensor.
    """
    check_kind(tensor, torch.Tensor, name="tensor", wanted="a tensor")
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor, phony(tensor.device, requires_grad=False)
    forked: tuple[torch.Tensor, torch.Tensor] = _Fork.apply(tensor)
    return forked


def join(tensor: torch.Tensor, phony: torch.Tensor) -> torch.Tensor:
    """Tie a phony to a tensor, so that what is made of the result goes backward first.

    After ``a, phony = fork(a)`` and ``b = join(b, phony)`` backward goes through all
    that is made of ``b`` before it goes through what ``a`` was made of.

    Args:
        tensor: A tensor, used after this by the result alone.
        phony: From `fork`.

    Returns:
        The same values. It requires a gradient if either of the two does.

    Raises:
        ArgumentError: One of them is no tensor, or `phony` is not from `fork`.
    """
    check_kind(tensor, torch.Tensor, name="tensor", wanted="a tensor")
    check_kind(phony, torch.Tensor, name="phony", wanted=_FROM_FORK)
    if phony.numel():
        raise ArgumentError(
            f"`phony` must be {_FROM_FORK}, got a tensor of shape {tuple(phony.shape)}."
        )
    if not (torch.is_grad_enabled() and (tensor.requires_grad or phony.requires_grad)):
        return tensor
    joined: torch.Tensor = _Join.apply(tensor, phony)
    return joined


def phony(device: torch.device, *, requires_grad: bool) -> torch.Tensor:
    """A tensor without elements: it takes no memory and has no gradient to lose."""
    return torch.empty(0, device=device, requires_grad=requires_grad)


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor.detach(), phony(tensor.device, requires_grad=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return gradient


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, phony: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None]:
        return gradient, None
