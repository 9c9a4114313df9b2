"""What a step does that no op tells of."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

DIRTY = (
    "an autograd function in it marks a tensor as dirty, which may be changed where no"
    " op tells of it"
)


@contextlib.contextmanager
def noting(
    on_state: Callable[[torch.Tensor], None], on_dirty: Callable[[], None]
) -> Iterator[None]:
    """Inside, what this thread does is told: see `_noting_states`, `_noting_dirty`."""
    with _noting_states(on_state), _noting_dirty(on_dirty):
        yield


@contextlib.contextmanager
def _noting_states(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, ``note`` gets every state of the CPU generator that this thread copies.

    `torch.utils.checkpoint` keeps one for every call, and `torch.random.fork_rng` one
    while it is open: 5,056 bytes each.
    """
    get_rng_state, thread = torch.get_rng_state, threading.get_ident()

    def get() -> torch.Tensor:
        state = get_rng_state()
        if threading.get_ident() == thread:
            note(state)
        return state

    torch.get_rng_state = torch.random.get_rng_state = get
    try:
        yield
    finally:
        torch.get_rng_state = torch.random.get_rng_state = get_rng_state


@contextlib.contextmanager
def _noting_dirty(note: Callable[[], None]) -> Iterator[None]:
    """Inside, ``note`` is called when an autograd function marks a tensor as changed.

    It may have been changed where no op is seen, as by a kernel of one's own.
    """
    mark_dirty, thread = FunctionCtx.mark_dirty, threading.get_ident()

    def mark(self: Any, *tensors: torch.Tensor) -> None:
        mark_dirty(self, *tensors)
        if threading.get_ident() == thread:
            note()

    FunctionCtx.mark_dirty = mark  # type: ignore[method-assign]
    try:
        yield
    finally:
        FunctionCtx.mark_dirty = mark_dirty  # type: ignore[method-assign]
