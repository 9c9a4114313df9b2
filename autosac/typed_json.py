"""Values of JSON as the annotations of a dataclass want them, or a sentence why not.

Lists become tuples, and objects dataclasses. Numbers are sizes, counts, places, times
and shares: none is below 0 but bounds, and no share is above 1.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import repeat
from reprlib import repr as shortened
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_ROUNDING = 1e-6  # of times that are differences, and of shares
_SHARES = ("policy", "_fraction")  # how names of fields end
_FROM_ONE = ("degree", "parts", "num_calls", "num_batches")  # names of fields
_BOUNDS = "bound_ms"  # what is proven of a time may be less than nothing
_WORDS = {
    int: "a whole number of 0 or more",
    float: "a number of 0 or more",
    bool: "true or false",
    str: "text",
    tuple: "a list",
    dict: "an object",
    Mapping: "an object",
    types.NoneType: "null",
}


class _Wrong(ValueError):
    """A value is not what it must be.

    Args:
        wanted: What it must be, in words.
        value: The value.
    """

    def __init__(self, wanted: str, value: object) -> None:
        self.wanted, self.value = wanted, value
        self.place = ""

    def within(self, place: str) -> _Wrong:
        """The same, told from what holds the value."""
        dot = "." if self.place and self.place[0] != "[" else ""
        self.place = f"{place}{dot}{self.place}"
        return self

    def __str__(self) -> str:
        got = shortened(self.value)
        return f"`{self.place}` must be {self.wanted}, got {got}"


def built(kind: type[T], record: Mapping[str, Any]) -> T:
    """A dataclass of a JSON object.

    Fields that equality ignores are not part of files.

    Raises:
        ValueError: Something is missing, unknown or not what its annotation says.
    """
    plan: T = _dataclass(kind, record)
    return plan


def _dataclass(kind: Any, record: Any) -> Any:
    if not isinstance(record, Mapping):
        raise _Wrong(_WORDS[dict], record)
    known = {one.name: one for one in fields(kind) if one.compare}
    missing = [n for n, one in known.items() if n not in record and _is_needed(one)]
    if missing or (missing := [name for name in record if name not in known]):
        what = "lacks" if missing[0] in known else "has an unknown"
        raise ValueError(f"it {what} `{missing[0]}`")
    hints = _hints(kind)
    values = {}
    for name, value in record.items():
        try:
            values[name] = _value(hints[name], value, name)
        except _Wrong as wrong:
            raise wrong.within(name) from None
    return kind(**values)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, localns={"Self": kind})  # nobody imports it at runtime


def _is_needed(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _value(kind: Any, value: Any, name: str) -> Any:
    """A value of the field of a name, or of something in it."""
    if kind is Any or (kind is str and type(value) is str):
        return value  # as most values are
    if is_dataclass(kind):
        return _dataclass(kind, value)
    origin = get_origin(kind) or kind
    if origin in (Union, types.UnionType):
        return _one_of(get_args(kind), value, name)
    if origin is tuple:
        return _tuple(get_args(kind), value, name)
    if origin in (dict, Mapping):
        return _dict(get_args(kind)[1], value, name)
    if origin is Literal:
        if value in get_args(kind):
            return value
        raise _Wrong(_words(kind), value)
    if origin in (int, float):
        return _number(origin, value, name)
    if type(value) is not origin:
        raise _Wrong(_words(kind), value)
    return value


def _number(kind: type, value: Any, name: str) -> Any:
    if type(value) is not int and (type(value) is not float or kind is int):
        raise _Wrong(_words(kind), value)
    if kind is int:
        if name in _FROM_ONE and value < 1:
            raise _Wrong("a whole number of 1 or more", value)
        least, most = 0.0, math.inf
    else:
        least = -math.inf if name.endswith(_BOUNDS) else -_ROUNDING
        most = 1 + _ROUNDING if name.endswith(_SHARES) else math.inf
    if not least <= value <= most or (math.isinf(value) and least == 0):
        raise _Wrong(_words(kind) if most > 2 else "a share of 0 to 1", value)
    return value


def _one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not types.NoneType]
    for kind in others[:-1]:
        if type(value) is kind:
            return value
    try:
        return _value(others[-1], value, name)
    except _Wrong as wrong:
        if not wrong.place:  # it is this value, not one in it
            wrong.wanted = " or ".join(map(_words, kinds))
        raise


def _tuple(kinds: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _Wrong(_WORDS[tuple], value)
    if kinds[-1] is Ellipsis:
        pairs: Iterator[tuple[Any, Any]] = zip(repeat(kinds[0]), value)
    elif len(kinds) == len(value):
        pairs = zip(kinds, value, strict=True)
    else:
        raise _Wrong(f"a list of {len(kinds)}", value)
    return tuple(_inside(kind, i, v, name) for i, (kind, v) in enumerate(pairs))


def _dict(kind: Any, value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _Wrong(_WORDS[dict], value)
    return {key: _inside(kind, key, item, name) for key, item in value.items()}


def _inside(kind: Any, key: object, value: Any, name: str) -> Any:
    try:
        return _value(kind, value, name)
    except _Wrong as wrong:
        raise wrong.within(f"[{key!r}]") from None


def _words(kind: Any) -> str:
    """What values of an annotation are."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    return _WORDS[dict if is_dataclass(kind) else get_origin(kind) or kind]
