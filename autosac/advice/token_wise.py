"""Whether a module's output at each token depends on that token only: by its ops.

The module runs once on meta tensors, on an input whose number of tokens is a prime
above every size of the module. No other dimension can have that size by chance, so a
tensor's tokens are the dimension that has it, and each op that keeps them apart is
known: elementwise ops, products with what has no tokens, sums over other dimensions,
norms of the last one, and views that move or keep the dimension as a whole. Whatever
else meets the tokens is refused: what cannot be proven is not tiled.
"""

from __future__ import annotations

import copy
import math
import operator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosac.pytrees import tensors_in
from autosac.tracing.shared_handles import handles_shared

_KEPT = frozenset(  # their results have the tokens in one dimension, or not at all
    {
        "alias", "detach", "_to_copy", "expand", "unsqueeze", "squeeze", "t",
        "transpose", "permute", "split", "split_with_sizes", "slice", "select",
        "unbind", "cat", "stack", "sum", "mean", "amax", "amin", "glu", "_prelu_kernel",
        "hardswish",
    }
)  # fmt: skip
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
# What a forward raises that does not take an input of one tensor of a guessed width.
_MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError,
            TypeError, ValueError)  # fmt: skip


class _MixesError(Exception):
    """An op that may mix tokens, in words."""


class _Tokens(TorchDispatchMode):
    """Refuses ops that may mix tokens.

    Args:
        count: The number of tokens, and size of no other dimension.

    Attributes:
        num_products: Matrix products of what has tokens.
        numbers: Each op with its numbers that may not depend on how many there are.
    """

    def __init__(self, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count
        self.num_products = 0
        self.numbers: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        given = [x for x in tensors_in((args, kwargs)) if self.has(x)]
        made = list(tensors_in(results))
        if not given or torch.Tag.pointwise in func.tags:
            leaves = tree_leaves((args, kwargs))
            numbers = (x for x in leaves if isinstance(x, (int, float)))
            self.numbers.append((func, *numbers))
        if not given:
            if any(map(self.has, made)):
                raise _MixesError(f"`{func}` knows how many tokens there are")
            return results
        if any(x.shape.count(self.count) != 1 for x in (*given, *made)):
            raise _MixesError(f"`{func}` sums or picks tokens")
        if not self._keeps_apart(func, args, given, made):
            raise _MixesError(f"`{func}` is not known to keep tokens apart")
        return results

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has tokens."""
        return self.count in tensor.shape

    def _keeps_apart(self, func: Any, args: Any, given: Any, made: Any) -> bool:
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False  # tiles would draw other numbers
        if name in _PRODUCTS:
            self.num_products += 1
            return sum(map(self.has, args[-2:])) == 1
        if name in _VIEWS:
            return self._inner_numel(given[0]) == self._inner_numel(made[0])
        if name in _NORMS:
            return self.count not in args[1]
        return torch.Tag.pointwise in func.tags or name in _KEPT

    def _inner_numel(self, tensor: torch.Tensor) -> int:
        """Elements of one token."""
        return math.prod(tensor.shape[tensor.shape.index(self.count) + 1 :])


def why_not_token_wise(module: torch.nn.Module) -> str:
    """Why a module cannot be run on some of its tokens alone; '' if it can.

    It takes one tensor (batch, sequence, width), returns one like it, and multiplies
    matrices twice or more. Nothing is run but a copy on the meta device.
    """
    sizes = sorted({size for p in module.parameters() for size in p.shape})
    why = "it has no parameters"
    for width in sizes:
        batch = _Tokens(_prime_above(sizes[-1]))
        sequence = _Tokens(_prime_above(batch.count))
        try:
            why = _why_not(module, (batch.count, 1, width), batch)
            why = why or _why_not(module, (1, sequence.count, width), sequence)
        except _MISFITS:
            why = "it does not take one tensor (batch, sequence, width)"
            continue
        if not why and batch.numbers != sequence.numbers:
            why = "it computes with the number of tokens"
        return why
    return why


def _why_not(
    module: torch.nn.Module, shape: tuple[int, int, int], tokens: _Tokens
) -> str:
    """Likewise, of inputs of one shape.

    Raises one of `_MISFITS` if the module does not take such inputs.
    """
    on_meta = _on_meta(module)
    dtype = next(p.dtype for p in module.parameters())
    hidden = torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)
    kept = [hidden, *on_meta.parameters(), *on_meta.buffers()]
    versions = [tensor._version for tensor in kept]
    try:
        with torch.enable_grad(), tokens:
            result = on_meta(hidden)
    except _MixesError as mixes:
        return str(mixes)
    after = [hidden, *on_meta.parameters(), *on_meta.buffers()]
    if len(kept) != len(after) or any(map(operator.is_not, kept, after)):
        return "it replaces its buffers"
    if versions != [tensor._version for tensor in after]:
        return "it changes its input or its buffers"
    if not isinstance(result, torch.Tensor) or result.shape != hidden.shape:
        return "it does not return one tensor like the one it takes"
    if _has_own_backward(result):
        return "it has a `torch.autograd.Function`, whose backward is not known"
    return "" if tokens.num_products > 1 else "it is a single layer"


def _has_own_backward(result: torch.Tensor) -> bool:
    """Whether Python code differentiates a part of a graph."""
    seen: set[Any] = {None}
    left: list[Any] = [result.grad_fn]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return any(isinstance(node, BackwardCFunction) for node in seen)


def _on_meta(module: torch.nn.Module) -> torch.nn.Module:
    """A copy without data."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        data = torch.empty_like(parameter.detach(), device="meta")
        memo[id(parameter)] = torch.nn.Parameter(data, parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer.detach(), device="meta")
    with handles_shared():
        return copy.deepcopy(module, memo)


def _prime_above(size: int) -> int:
    size += 1
    while any(size % factor == 0 for factor in range(2, math.isqrt(size) + 1)):
        size += 1
    return size
