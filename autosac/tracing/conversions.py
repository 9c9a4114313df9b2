"""Modules that convert themselves in forward, as in ``self.gate.to(torch.float32)``.

PyTorch swaps a fake parameter for the converted one, which it refuses where anybody has
a weak reference to it, even if nothing is to be converted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Convert = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def idle_conversions() -> Iterator[None]:
    """Leave modules alone that a conversion does not change."""
    apply: Callable[..., Any] = torch.nn.Module._apply

    def apply_if_needed(
        module: torch.nn.Module, convert: _Convert, recurse: bool = True
    ) -> Any:
        if _changes(module, convert, recurse):
            return apply(module, convert, recurse)
        return module

    torch.nn.Module._apply = apply_if_needed  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = apply  # type: ignore[method-assign]


def _changes(module: torch.nn.Module, convert: _Convert, recurse: bool) -> bool:
    """Whether some tensor of a module is another one when it is converted."""
    tensors = itertools.chain(module.parameters(recurse), module.buffers(recurse))
    with torch.no_grad():
        return any(convert(tensor) is not tensor for tensor in tensors)
