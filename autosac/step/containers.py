"""What containers hold, read and written past what their classes do with items.

A class may count what is put into it, forbid changes (the configurations of diffusers)
or copy; `base` is the built-in type whose methods are used instead.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from operator import is_
from typing import Any

CONTAINERS = (list, dict, set, deque)


def base_of(value: Any) -> Any:
    """The built-in type of a container."""
    return next(b for b in (OrderedDict, *CONTAINERS) if isinstance(value, b))


def set_items(value: Any, base: Any, old: Any) -> None:
    """Make a container hold what it held; nothing is done where it does.

    Args:
        value: The container.
        base: Its built-in type.
        old: A dict of what it held, or items in their order.
    """
    now = snapshot(value, base)
    if _is_same(now, old):
        return
    if not isinstance(now, set) and _are_alike(now, old):  # others may iterate over it
        places = old.items() if isinstance(old, dict) else enumerate(old)
        for place, item in places:
            if now[place] is not item:
                base.__setitem__(value, place, item)
        return
    base.clear(value)
    if issubclass(base, dict):
        for key, item in old.items():
            base.__setitem__(value, key, item)
    elif base is set:
        set.update(value, old)
    else:
        base.extend(value, old)


def _are_alike(one: Any, other: Any) -> bool:
    """Whether snapshots have the same places, in the same order."""
    if len(one) != len(other):
        return False
    return not isinstance(one, dict) or all(map(is_, one, other))


def snapshot(value: Any, base: Any) -> Any:
    """Items as they are now, taken at once: threads may change a container."""
    if base is dict:
        return dict.copy(value)
    if base is OrderedDict:
        return dict(zip(list(base.keys(value)), list(base.values(value)), strict=False))
    return set.copy(value) if base is set else list(base.__iter__(value))


def _is_same(one: Any, other: Any) -> bool:
    """Whether snapshots hold the same objects in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return one.issubset(other)
    if isinstance(one, dict) and not all(map(is_, one.values(), other.values())):
        return False
    return all(map(is_, one, other))
