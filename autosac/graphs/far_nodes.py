"""Nodes that move a tensor of a graph to far memory and back.

    ticket = Send(memory)(tensor)      a copy out begins
    ticket = release(ticket, tensor)   waits for it; the last node that holds the tensor
    begun = fetch(ticket)              new memory, into which a copy back begins
    tensor = arrive(ticket, begun)     waits for that, where the tensor is first read

They are tied to one another, and to what reads the tensor, by their arguments alone, so
that nothing which keeps the order of a graph's nodes may drop or repeat one of them. A
ticket is a tensor without elements, as only tensors pass from forward to backward of a
compiled graph. What it stands for is an attribute of it: the copy lives as long as the
ticket, and its buffer goes back to the pool with it, whatever becomes of the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from autosac import _compat_fakes
from autosac.errors import UnsupportedError
from autosac.far_memory import FarMemory, Sent


class _Held(NamedTuple):
    """What a ticket stands for.

    Attributes:
        sent: The copy; None of a fake tensor.
        num_bytes: Size of the storage.
        dtype, size, stride, offset: What the tensor is of it.
    """

    sent: Sent | None
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Send:
    """Begin to copy the storage of a tensor to far memory; gives a ticket.

    An instance for each plan: graphs print and look up what they call by its name.

    Args:
        memory: Where the bytes go.
    """

    __name__ = "send"
    __qualname__ = "Send.__call__"

    def __init__(self, memory: FarMemory) -> None:
        self.memory = memory

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_fake = _compat_fakes.is_fake(tensor)
        sent = None if is_fake else self.memory.send(_bytes_of(tensor))
        ticket = tensor.new_empty(0, dtype=torch.uint8)
        _hold(
            ticket,
            _Held(
                sent,
                storage.nbytes(),
                tensor.dtype,
                tuple(tensor.shape),
                tensor.stride(),
                int(tensor.storage_offset()),
            ),
        )
        return ticket


def release(ticket: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a copy out; the program may let go of the tensor afterwards.

    Args:
        ticket: Of `Send`.
        tensor: What was sent, so that it lives until here.
    """
    held = _held_by(ticket)
    if held.sent is not None:
        held.sent.wait()
    released = ticket.new_empty(0)
    _hold(released, held)
    return released


def fetch(ticket: torch.Tensor) -> torch.Tensor:
    """Make memory for a tensor and begin to copy it back."""
    held = _held_by(ticket)
    storage = ticket.new_empty(held.num_bytes)
    if held.sent is not None:
        held.sent.begin(storage)
    tensor = storage.view(held.dtype)
    return tensor.as_strided(held.size, held.stride, held.offset)


def arrive(ticket: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor is back.

    Args:
        ticket: Of `release`.
        begun: Of `fetch`.
    """
    held = _held_by(ticket)
    if held.sent is not None:
        held.sent.fetch(_bytes_of(begun))
    return begun


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage()
    )


def _hold(ticket: torch.Tensor, held: _Held) -> None:
    ticket.autosac_held = held  # type: ignore[attr-defined]


def _held_by(ticket: Any) -> _Held:
    held = getattr(ticket, "autosac_held", None)
    if not isinstance(held, _Held):
        raise UnsupportedError(
            "What a graph with `offload` saved for backward was replaced by another"
            " tensor, as hooks on saved tensors do: run it without such hooks, or plan"
            " without `offload`."
        )
    return held
