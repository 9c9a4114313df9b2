"""Ops on lists of tensors, as optimizers call them: alike items are worked out once.

A `_foreach_` or `_fused_` op does to every item of its lists what it would do to that
item alone. So its fake kernel runs on one item of each kind, and the other results get
the layouts of that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from autosac import _compat, _compat_fakes
from autosac.fake_tensors.repeated_calls import extent

Run = Callable[[Any], Any]  # positional arguments -> results


def run_distinct(mode: Any, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
    """Results of an op on fakes that have nothing but a layout.

    Args:
        mode: Their fake tensor mode.
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        run: Makes the call with other positional arguments.
    """
    lists = _lists(func, args, kwargs)
    if not lists:
        return run(args)
    firsts: dict[Hashable, int] = {}  # kind of item -> place among the distinct ones
    kinds: list[int] = []
    picked: list[int] = []
    for i, items in enumerate(zip(*(args[k] for k in lists), strict=True)):
        kind = firsts.setdefault(tuple(map(_kind, items)), len(firsts))
        kinds.append(kind)
        if kind == len(picked):
            picked.append(i)
    if len(picked) == len(kinds):
        return run(args)
    shorter = list(args)
    for k in lists:
        shorter[k] = [args[k][i] for i in picked]
    out = run(tuple(shorter))
    if out is None or out == ():
        return out
    if not (type(out) in (list, tuple) and all(map(is_plain, out))):
        return run(args)
    return type(out)(
        out[kind] if picked[kind] == i else made_like(mode, out[kind])
        for i, kind in enumerate(kinds)
    )


def _lists(func: Any, args: Any, kwargs: Any) -> list[int]:
    """Positions of the lists whose items belong together; none if that is unsure."""
    if any(isinstance(value, (list, tuple)) for value in kwargs.values()):
        return []
    places = [k for k in _compat.item_lists(func) if k < len(args) and args[k]]
    lengths = {len(args[k]) for k in places}
    return places if len(lengths) == 1 else []


def _kind(item: Any) -> Hashable:
    if isinstance(item, torch.Tensor):
        return (
            item.shape,
            item.stride(),
            item.storage_offset(),
            item.dtype,
            item.device,
            item.requires_grad,
        )
    return type(item), item


def is_plain(result: Any) -> bool:
    """Whether a result has memory of its own without holes, and no graph."""
    if not isinstance(result, torch.Tensor) or result.requires_grad:
        return False
    taken = extent(tuple(result.shape), result.stride()) * result.itemsize
    return not result.storage_offset() and result.untyped_storage().nbytes() == taken


def made_like(mode: Any, result: torch.Tensor) -> torch.Tensor:
    """A fake tensor of a result's layout with memory of its own."""
    size, stride = tuple(result.shape), result.stride()
    return _compat_fakes.new_fake(mode, size, stride, result.dtype, result.device)
