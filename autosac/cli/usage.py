"""What the command line says of what was typed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What a grid may vary besides the arguments of a factory.
OPTIONS = ("optimizer", "device", "autocast", "accumulate", "on", "batch", "length")
_AS_TYPED = {  # what errors call it in Python -> what is typed
    r"`memory_budget`=(\S+)": r"`--budget` \1",
    r"`memory_budget`": "`--budget`",
    r"`offload`=True": "`--offload`",
    r"`host_budget`=(\S+)": r"`--host-budget` \1",
    r"`make_model`": "The factory",
}


class UsageError(ValueError):
    """What was typed cannot be meant; says what can."""


@contextmanager
def usage() -> Iterator[None]:
    """Turn a `ValueError` about a typed value into a `UsageError`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def as_typed(message: str) -> str:
    """An error of the library in the words of the command line."""
    for pattern, typed in _AS_TYPED.items():
        message = re.sub(pattern, typed, message)
    return message


def check_needed(option: str, is_given: object, needed: str, is_there: object) -> None:
    """Complain of an option that has no effect without another one."""
    if is_given and not is_there:
        raise UsageError(f"{option} needs {needed}: add that, or leave {option} out.")


def check_folders(*paths: Path | None) -> None:
    """Complain of files that cannot be written before any work is done."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}.")
