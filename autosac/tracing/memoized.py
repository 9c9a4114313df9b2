"""Functions that remember their results over steps: `functools.lru_cache`.

Models keep tables of positions so. Only the first step of many makes what such a cache
holds. In a trace it gets fakes, which the user's own steps must never find.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autosac import _compat_fakes

_Cache = Any  # `functools._lru_cache_wrapper`
_DEEPEST = 4  # containers between a cache and a tensor


def remember(storages: set[int]) -> bool:
    """Whether functions remember tensors in some storages, given by address."""
    return bool(
        storages and _caches(lambda tensor: tensor.untyped_storage()._cdata in storages)
    )


def forget_fakes() -> None:
    """Empty the caches that hold fake tensors."""
    for cache in _caches(_compat_fakes.is_fake):
        cache.cache_clear()


def _caches(wanted: Callable[[torch.Tensor], bool]) -> list[_Cache]:
    """Caches with certain tensors; not those that `gc.freeze` hides."""
    return [
        thing
        for thing in gc.get_objects()
        if type(thing) is functools._lru_cache_wrapper
        and thing.cache_info().currsize
        and _holds(gc.get_referents(thing), wanted, _DEEPEST)
    ]


def _holds(
    values: Iterable[Any], wanted: Callable[[torch.Tensor], bool], depth: int
) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and wanted(value):
                return True
        elif depth and isinstance(value, (tuple, list, dict)):
            inner = value.values() if isinstance(value, dict) else value
            if _holds(inner, wanted, depth - 1):
                return True
    return False
