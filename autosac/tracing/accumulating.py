"""Which sums of gradients autograd makes in place.

A tensor that is used several times gets several gradients. The engine adds them up as
they come: into the first one if nothing else refers to it, else into a new tensor
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`). Under a dispatch mode
it always makes a new one; a trace that follows it would see memory that no real step
takes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from autosac import _compat_autograd

_Target = tuple[Hashable, int]  # a function of the graph and one of its inputs


class Accumulations:
    """Recognises the engine's sums of gradients.

    Args:
        loss: What backward starts from; None before there is one.
    """

    def __init__(self, loss: torch.Tensor | None = None) -> None:
        root = None if loss is None else loss.grad_fn
        arrivals = Counter(target for _, target in _edges(root))
        self._shared = {target for target, count in arrivals.items() if count > 1}

    def in_place(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an op of backward is a sum that a real step makes in place."""
        if func is not torch.ops.aten.add.Tensor or len(args) != 2:
            return False
        node = _compat_autograd.current_node()
        if node is None or not any(target in self._shared for target in _targets(node)):
            return False
        into, gradient = args
        return (
            isinstance(into, torch.Tensor)
            and isinstance(gradient, torch.Tensor)
            and into.shape == gradient.shape
            and into.dtype == gradient.dtype
            and _is_dense(into)
            and _compat_autograd.is_the_engines_own()
            and _compat_autograd.held_by_engine_only(into)
            # Hooks may keep a gradient; the trace itself refers to both alike.
            and sys.getrefcount(into) <= sys.getrefcount(gradient)
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory and there are no holes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _targets(node: Any) -> Iterator[_Target]:
    for function, place in node.next_functions:
        if function is not None:
            yield _key(function), place


def _edges(root: Any) -> Iterator[tuple[Hashable, _Target]]:
    """All edges of a graph of autograd functions."""
    pending = [] if root is None else [root]
    seen = {_key(function) for function in pending}
    while pending:
        node = pending.pop()
        for function, place in node.next_functions:
            if function is None:
                continue
            key = _key(function)
            yield _key(node), (key, place)
            if key not in seen:
                seen.add(key)
                pending.append(function)


def _key(function: Any) -> Hashable:
    """Key of an autograd function, whose Python objects come and go."""
    variable = getattr(function, "variable", None)
    return function._sequence_nr() if variable is None else ("leaf", id(variable))
