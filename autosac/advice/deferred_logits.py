"""A model whose head hands its input on to the loss, as a chunked loss would have it.

The head returns a stand-in for its logits; `cross_entropy` of that is
`chunked_cross_entropy` of what the head got. Reshaping, slicing of rows and casts are
followed on the way; a loss that does anything else with logits cannot be chunked so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from autosac.errors import UnsupportedError
from autosac.profiles.profile import Profile
from autosac.step.chunked_cross_entropy import chunked_cross_entropy


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Stands in for the logits of a linear head.

    Attributes:
        hidden: What the head got, shape (..., width).
        head: The head.
        chunk_bytes: Cap on what a chunk takes.
        upcast: Whether the loss casts logits to float32.
    """

    hidden: torch.Tensor
    head: torch.nn.Linear
    chunk_bytes: int
    upcast: bool = False

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """Of the logits."""
        return self.hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> DeferredLogits:
        """As of a tensor."""
        return replace(self, upcast=True)

    def contiguous(self) -> DeferredLogits:
        """As of a tensor."""
        return self

    def view(self, *shape: Any) -> DeferredLogits:
        """As of a tensor, as long as classes stay the last dimension."""
        sizes = list(shape[0] if isinstance(shape[0], (tuple, list)) else shape)
        known = -math.prod(sizes)
        if -1 in sizes and known:
            sizes[sizes.index(-1)] = math.prod(self.shape) // known
        if sizes[-1] != self.head.out_features:
            raise _unknown(f"view{tuple(shape)}")
        rows = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
        return replace(self, hidden=rows)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits:
        """As of a tensor, as long as classes stay the last dimension."""
        if end_dim % self.ndim == self.ndim - 1:
            raise _unknown("flatten")
        return replace(self, hidden=self.hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> DeferredLogits:
        parts = index if isinstance(index, tuple) else (index,)
        reaches_classes = Ellipsis in parts or len(parts) == self.ndim
        if reaches_classes and parts[-1] not in (slice(None), Ellipsis):
            raise _unknown(f"[{index}]")
        return replace(self, hidden=self.hidden[index])

    def __getattr__(self, name: str) -> Any:
        raise _unknown(f".{name}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not functional.cross_entropy or not isinstance(args[0], cls):
            raise _unknown(getattr(func, "__name__", str(func)))
        return args[0]._loss(*args[1:], **(kwargs or {}))

    def _loss(
        self,
        target: torch.Tensor,
        weight: Any = None,
        *_: Any,
        ignore_index: int = -100,
        reduction: Any = "mean",
        label_smoothing: Any = 0.0,
        **__: Any,
    ) -> torch.Tensor:
        if weight is not None or label_smoothing:
            raise _unknown("cross_entropy with weights or smoothing")
        return chunked_cross_entropy(
            self.hidden,
            self.head.weight,
            target,
            bias=self.head.bias,
            memory_budget=self.chunk_bytes,
            ignore_index=ignore_index,
            reduction=reduction,
            upcast=self.upcast,
        )


def _unknown(what: str) -> UnsupportedError:
    return UnsupportedError(
        "What the last linear layer makes is not given to `cross_entropy` alone:"
        f" {what}."
    )


class _Head:
    """Stands in for the ``forward`` of a head."""

    def __init__(self, module: torch.nn.Linear, chunk_bytes: int) -> None:
        self.module = module
        self.chunk_bytes = chunk_bytes
        self.__wrapped__ = type(module).forward.__get__(module)

    def __call__(self, hidden: torch.Tensor) -> Any:
        return DeferredLogits(hidden, self.module, self.chunk_bytes)


def head_of(profile: Profile) -> tuple[str, torch.nn.Linear, int] | None:
    """FQN of the linear layer that runs last, the layer, and bytes of its logits."""
    tape = profile.tape
    modules = dict(profile.step.model.named_modules())
    for call in reversed(tape.calls):
        fqn = tape.modules[call.module].fqn
        module = modules.get(fqn)
        if call.phase == "forward" and isinstance(module, torch.nn.Linear):
            logits_bytes = sum(tape.storages[i].nbytes for i in call.outputs)
            return fqn, module, logits_bytes
    return None


@contextlib.contextmanager
def deferred(head: torch.nn.Linear, chunk_bytes: int) -> Iterator[None]:
    """Let a head return stand-ins for its logits inside."""
    own = head.__dict__.get("forward")
    head.__dict__["forward"] = _Head(head, chunk_bytes)
    try:
        yield
    finally:
        del head.__dict__["forward"]
        if own is not None:
            head.__dict__["forward"] = own
