"""Which functions of autograd write in place in a real step, but not in a trace.

Backward of `gather`, `x[index]`, `sort` and others fills a tensor of zeros in place,
unless a dispatch mode is active: then PyTorch runs the op that makes a new tensor
(`areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and
aten/src/ATen/native/TensorAdvancedIndexing.cpp). A trace that follows it would see
memory that no real step takes.
"""

from __future__ import annotations

from typing import Any

import torch

from autosac import _compat_autograd, _compat_dispatch
from autosac.tracing.accumulating import Accumulations

_aten = torch.ops.aten
_OF_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"
# By the op of a trace: that of a real step, further arguments, and the functions.
_IN_PLACE: dict[Any, tuple[Any, tuple[Any, ...], frozenset[str]]] = {
    _aten.scatter_add.default: (
        _aten.scatter_add_.default,
        (),
        frozenset({"GatherBackward0", "CummaxBackward0", "CumminBackward0"}),
    ),
    _aten.scatter.src: (
        _aten.scatter_.src,
        (),
        frozenset(
            {
                *("SortBackward0", "SortBackward1", "TopkBackward0", "ModeBackward0"),
                *("MedianBackward1", "NanmedianBackward1", "KthvalueBackward0"),
                *("MaxBackward0", "MinBackward0"),
            }
        ),
    ),
    _aten.index_put.default: (
        _aten._index_put_impl_.default,
        (True,),
        frozenset({"IndexBackward0"}),
    ),
    _aten.index_add.default: (
        _aten.index_add_.default,
        (),
        frozenset({"IndexSelectBackward0"}),
    ),
    _aten.put.default: (_aten.put_.default, (), frozenset({"TakeBackward0"})),
    _aten.masked_scatter.default: (
        _aten.masked_scatter_.default,
        (),
        frozenset({"MaskedSelectBackward0"}),
    ),
    _aten.masked_fill.Scalar: (
        _aten.masked_fill_.Scalar,
        (),
        frozenset(
            {"MinimumBackward0", "MaximumBackward0", "Atan2Backward0"}
            | _compat_autograd.MASKED_IN_PLACE
        ),
    ),
    _aten.logical_and.default: (
        _aten.logical_and_.default,
        (),
        frozenset({"ClampBackward0"}),
    ),
    _aten.logical_or.default: (
        _aten.logical_or_.default,
        (),
        frozenset({"ClampBackward0"}),
    ),
    _aten.sub.Tensor: (
        _aten.sub_.Tensor,
        (),
        frozenset({_OF_LOGITS}),
    ),
    _aten.mul.Tensor: (
        _aten.mul_.Tensor,
        (),
        frozenset({"BinaryCrossEntropyBackward0", _OF_LOGITS}),
    ),
    _aten.index_fill.int_Tensor: (
        _aten.index_fill_.int_Tensor,
        (),
        frozenset({"TraceBackward0"}),
    ),
}
_BY_ADDRESS = {id(func): (func, *entry) for func, entry in _IN_PLACE.items()}


# Losses of logits write every product over its first factor, but for these two.
_NEW_PRODUCTS_AFTER = (None, _aten.neg.default)  # of weights of positives; of targets


class RealOps:
    """Ops of backward that a real step runs for those of a trace.

    Args:
        loss: What backward starts from; None before there is one.
    """

    def __init__(self, loss: torch.Tensor | None = None) -> None:
        self._accumulations = Accumulations(loss)
        self._last: tuple[int, Any] = (-1, None)  # a loss of logits, and its last op

    def of(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The op of a real step, and its arguments.

        Args:
            func: The op of the trace.
            args: Its positional arguments.
        """
        if self._accumulations.in_place(func, args):
            return _aten.add_.Tensor, args
        node = _compat_autograd.current_node()
        if node is None or torch.is_grad_enabled():
            return func, args
        before = self._before(node, func)
        entry = _BY_ADDRESS.get(id(func))  # ops are slow to hash
        if entry is None or _compat_autograd.name_of(node) not in entry[3]:
            return func, args
        if func is _aten.mul.Tensor and not _writes_product(node, args, before):
            return func, args
        _, real, more, _ = entry
        return real, (*args, *more)

    def _before(self, node: Any, func: Any) -> Any:
        """The op that ran before in a loss of logits, but for views; None for none."""
        if (
            _compat_autograd.name_of(node) != _OF_LOGITS
            or _compat_dispatch.traits(func).is_view
        ):
            return None
        number = _compat_autograd.sequence_nr(node)
        last_number, last = self._last
        self._last = number, func
        return last if number == last_number else None


def _writes_product(node: Any, args: tuple[Any, ...], before: Any) -> bool:
    """Whether a loss writes a product over its first factor, which it has made."""
    if _compat_autograd.name_of(node) == _OF_LOGITS:
        return before not in _NEW_PRODUCTS_AFTER
    return _compat_autograd.held_by_engine_only(args[0])
