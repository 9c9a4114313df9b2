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

    def is_in_them(value: Any) -> bool:
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        return is_plain and value.untyped_storage()._cdata in storages

    return bool(storages and _caches(is_in_them))


def forget_fakes() -> None:
    """Empty the caches that hold fake tensors."""
    for cache in _caches(_compat_fakes.is_fake):
        cache.cache_clear()


def forget_copies(reached: Iterable[Any], copies: dict[int, Any]) -> None:
    """Empty the caches, of what is reached, that hold copied modules or tensors."""
    kinds = (torch.nn.Module, torch.Tensor)
    own = {id(copied) for copied in copies.values() if isinstance(copied, kinds)}
    for cache in reached:
        if type(cache) is functools._lru_cache_wrapper and _holds(
            gc.get_referents(cache), lambda value: id(value) in own, _DEEPEST
        ):
            cache.cache_clear()


def _caches(wanted: Callable[[Any], bool]) -> list[_Cache]:
    """Caches with certain values; not those that `gc.freeze` hides."""
    return [
        thing
        for thing in gc.get_objects()
        if type(thing) is functools._lru_cache_wrapper
        and thing.cache_info().currsize
        and _holds(gc.get_referents(thing), wanted, _DEEPEST)
    ]


def _holds(values: Iterable[Any], wanted: Callable[[Any], bool], depth: int) -> bool:
    for value in values:
        if wanted(value):
            return True
        if depth and isinstance(value, (tuple, list, dict)):
            inner = value.values() if isinstance(value, dict) else value
            if _holds(inner, wanted, depth - 1):
                return True
    return False
