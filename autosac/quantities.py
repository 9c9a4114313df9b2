"""Bytes and milliseconds as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from numbers import Integral, Real

from autosac.errors import ArgumentError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_TEXT = re.compile(
    r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgt]?)(i?)b|([kmgt])i?|(%))\s*", re.I
)


def parse_bytes(
    value: int | str,
    *,
    total_bytes: int | None = None,
    name: str = "memory_budget",
) -> int:
    """Read an amount of memory; fractions of a byte are dropped.

    Args:
        value: Bytes, or text: "24GiB" (2**30), "24GB" (10**9), "80%"; "24G" and "24Gi"
            are "24GiB", as on most command lines.
        total_bytes: What a percentage is of; None if none is meant.
        name: The argument's name, for the error message.

    Raises:
        ArgumentError: ``value`` is no such amount, or is less than one byte.
    """
    if isinstance(value, str):
        num_bytes = _parse_text(value, total_bytes, name)
    elif isinstance(value, Integral) and not isinstance(value, bool):
        num_bytes = int(value)
    else:
        raise _unreadable(value, name, total_bytes)
    if num_bytes < 1:
        raise _unreadable(value, name, total_bytes)
    return num_bytes


def read_host_budget(value: int | str | None, *, offload: object) -> int | None:
    """Read a cap on what lies in far memory, None for none.

    Args:
        value: What was passed for `host_budget`, as `parse_bytes` reads it.
        offload: True or "auto" where something may lie there.

    Raises:
        ArgumentError: ``value`` is no amount of memory, or nothing is capped.
    """
    if value is None:
        return None
    host_bytes = parse_bytes(value, name="host_budget")
    if not offload:
        raise ArgumentError(
            f"`host_budget`={host_bytes} ({format_bytes(host_bytes)}) caps what is"
            " offloaded, and nothing is: pass `offload`=True, or leave it out."
        )
    return host_bytes


def _parse_text(text: str, total_bytes: int | None, name: str) -> int:
    match = _TEXT.fullmatch(text)
    if match is None or (match[3] and not match[2]):  # "5iB"
        raise _unreadable(text, name, total_bytes)
    amount = Fraction(match[1])
    if not match[5]:
        unit = match[4] or match[2]
        is_binary = match[4] or match[3]
        base = 1024 if is_binary else 1000
        return int(amount * base ** _POWERS[unit.lower()])
    if total_bytes is None:
        raise ArgumentError(
            f"`{name}`={text!r} is a share, and here it is of nothing that is known:"
            " give bytes, or text such as '24GiB', '24GB' or '512MiB'."
        )
    if amount > 100:
        raise ArgumentError(f"`{name}`={text!r} must be at most '100%'.")
    return int(amount * total_bytes / 100)


def _unreadable(value: object, name: str, total_bytes: int | None) -> ArgumentError:
    examples = "'24GiB', '24GB' or '512MiB'"
    if total_bytes is not None:
        examples = "'24GiB', '24GB', '512MiB' or '80%'"
    return ArgumentError(
        f"`{name}`={value!r} must be a positive int of bytes or text such as"
        f" {examples}."
    )


def is_whole(value: object) -> bool:
    """Whether it is a whole number; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole_number(value: object, *, name: str, least: int = 1) -> int:
    """A number of things that a user asks for.

    Args:
        value: What was passed.
        name: The argument's name, for the error message.
        least: The least number that there may be.

    Raises:
        ArgumentError: It is no whole number, or less than that.
    """
    if is_whole(value) and value >= least:  # type: ignore[operator]
        return int(value)  # type: ignore[call-overload, no-any-return]
    raise ArgumentError(
        f"`{name}` must be a whole number of at least {least}, got {value!r}."
    )


def read_budgets(memory_budgets: object, n: object) -> tuple[int | str, ...] | None:
    """Budgets that a user asks for; None for so many evenly spaced ones.

    Raises:
        ArgumentError: Neither or both are given, there are no budgets, or `n` is no
            whole number of at least 2.
    """
    if (memory_budgets is None) == (n is None):
        raise ArgumentError(
            "Pass either `memory_budgets` or `n`, the number of budgets."
        )
    if memory_budgets is None:
        whole_number(n, name="n", least=2)
        return None
    is_list = isinstance(memory_budgets, Iterable) and not isinstance(
        memory_budgets, (str, bytes)
    )
    budgets = tuple(memory_budgets) if is_list else ()  # type: ignore[arg-type]
    if not budgets:
        raise ArgumentError(
            f"`memory_budgets`={memory_budgets!r} must be a list of budgets that is"
            " not empty, such as ['20GiB', '80%']."
        )
    return budgets


def is_positive(value: object) -> bool:
    """Whether it is a number above 0; infinity is, and NaN and True are not."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and value > 0  # type: ignore[operator]


def rounded_up(num_bytes: int, granularity_bytes: int) -> int:
    """The least multiple of an allocator's granularity that holds so many bytes."""
    return -(-num_bytes // granularity_bytes) * granularity_bytes


def format_bytes(num_bytes: int) -> str:
    """Write bytes in the largest binary unit that keeps them at or above one."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    amount = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if abs(amount) < 1023.95:  # 1023.95 would be written as 1024.0
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"


def format_parts(composition: Mapping[str, int]) -> str:
    """Write what memory is made of, without what takes none of it."""
    parts = (f"{format_bytes(n)} {name}" for name, n in composition.items() if n)
    return ", ".join(parts)


def share_above(value: float, bound: float) -> float:
    """Share of a value that a lower bound leaves open; 0.0 for a value of 0."""
    return max(0.0, (value - bound) / value) if value else 0.0


def byte_unit(nbytes: int) -> tuple[str, int]:
    """The unit in which an amount reads best, and its size."""
    for name, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return name, size
    return "KiB", 2**10


def format_ms(time_ms: float) -> str:
    """Write a time with three digits or so, in milliseconds or seconds."""
    if abs(time_ms) >= 1000:
        return f"{time_ms / 1000:.2f} s"
    decimals = 0 if abs(time_ms) >= 100 else 1 if abs(time_ms) >= 1 else 3
    return f"{time_ms:.{decimals}f} ms"
