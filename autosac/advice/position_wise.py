"""Whether a module's output at each position depends on that position only: by its ops.

The module runs once on meta tensors, on an input whose number of positions is a prime
above every size of the module. No other dimension can have that size by chance, so a
tensor's positions are the dimension that has it, and each op that keeps them apart is
known: elementwise ops, products with what has no positions, sums over other dimensions,
norms of the last one, and views that move or keep the dimension as a whole. Whatever
else meets the positions is refused: what cannot be proven is not tiled.
"""

from __future__ import annotations

import copy
import math
import operator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autosac.pytrees import tensors_in

_KEPT = frozenset(  # their results have the positions in one dimension, or not at all
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
    """An op that may mix positions, in words."""


class _Positions(TorchDispatchMode):
    """Refuses ops that may mix positions.

    Args:
        count: The number of positions, and size of no other dimension.

    Attributes:
        num_products: Matrix products of what has positions.
    """

    def __init__(self, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count
        self.num_products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        given = [x for x in tensors_in((args, kwargs)) if self.has(x)]
        made = list(tensors_in(results))
        if not given:
            if any(map(self.has, made)):
                raise _MixesError(f"`{func}` knows how many positions there are")
            return results
        if any(x.shape.count(self.count) != 1 for x in (*given, *made)):
            raise _MixesError(f"`{func}` sums or picks positions")
        if not self._keeps_apart(func, args, given, made):
            raise _MixesError(f"`{func}` is not known to keep positions apart")
        return results

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has positions."""
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
        """Elements of one position."""
        return math.prod(tensor.shape[tensor.shape.index(self.count) + 1 :])


def why_not_position_wise(module: torch.nn.Module) -> str:
    """Why a module cannot be run on some of its positions alone; '' if it can.

    It takes one tensor (batch, sequence, width), returns one like it, and multiplies
    matrices twice or more.
    Nothing is run but a copy on the meta device.
    """
    sizes = sorted({size for p in module.parameters() for size in p.shape})
    why = "it has no parameters"
    for width in sizes:
        try:
            return _why_not(module, width, 0, sizes[-1]) or _why_not(
                module, width, 1, sizes[-1]
            )
        except _MISFITS:
            why = "it does not take one tensor (batch, sequence, width)"
    return why


def _why_not(module: torch.nn.Module, width: int, dim: int, largest: int) -> str:
    """Likewise, of inputs of one width, with all positions in one dimension.

    Raises one of `_MISFITS` if the module does not take such inputs.
    """
    on_meta = _on_meta(module)
    shape = [1, 1, width]
    shape[dim] = count = _prime_above(largest)
    dtype = next(p.dtype for p in module.parameters())
    hidden = torch.empty(shape, device="meta", dtype=dtype)
    kept = [hidden, *on_meta.parameters(), *on_meta.buffers()]
    versions = [tensor._version for tensor in kept]
    positions = _Positions(count)
    try:
        with torch.no_grad(), positions:
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
    return "" if positions.num_products > 1 else "it is a single layer"


def _on_meta(module: torch.nn.Module) -> torch.nn.Module:
    """A copy without data."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        data = torch.empty_like(parameter.detach(), device="meta")
        memo[id(parameter)] = torch.nn.Parameter(data, parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer.detach(), device="meta")
    return copy.deepcopy(module, memo)


def _prime_above(size: int) -> int:
    size += 1
    while any(size % factor == 0 for factor in range(2, math.isqrt(size) + 1)):
        size += 1
    return size
