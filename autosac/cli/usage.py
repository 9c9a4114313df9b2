"""What the command line says of what was typed."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

# What a grid may vary besides the arguments of a factory.
OPTIONS = ("optimizer", "device", "autocast", "accumulate", "on", "batch", "length")
_OPTION_OF = {  # what Python calls otherwise
    "memory_budget": "budget",
    "memory_budgets": "budget",
    "make_optimizer": "optimizer",
    "num_gpus": "gpus",
    "num_micro_batches": "micro_batches",
    "path": "out",
    "schedules": "schedule",
    "target": "to",
}
_NOT_TYPED = {  # what only Python can pass, and what is typed instead
    r",? or pass (a `\w+Spec`|`\w+=\w+`)": "",
    r", or an optimizer\b": "",
    r"\ba dict of styles, ": "",
    r"names from `model\.named_modules\(\)`, (patterns .*), or classes": r"names or \1",
    r"torch\.bfloat16, 'bfloat16' or 'bf16'": "bfloat16 or bf16",
    r"`autosac\.compile\(.*?\)`": "`autosac compile`",
    r"`make_model`": "The factory",
    r"\bNone tries all\b": "any tries all",  # degrees of --mesh
}
_MESH = re.compile(r"(mesh=)?\{('(?:pp|replicate|fsdp|cp|tp)': [^{}]*)\}")
_NAMED = re.compile(
    r"`(?:--)?(\w[\w-]*)`(?:=('[^']*'|\"[^\"]*\"|\S+?(?=[.,:;]?(?:\s|$))))?"
)
_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z`])")
_flags: ContextVar[Mapping[str, str]] = ContextVar("flags")


class UsageError(ValueError):
    """What was typed cannot be meant; says what can."""


@contextmanager
def usage(**typed: str) -> Iterator[None]:
    """Turn a `ValueError` about a typed value into a `UsageError`.

    Args:
        typed: Options by the arguments that they are passed as, where it is not those
            of `as_typed`.
    """
    try:
        yield
    except ValueError as error:
        message = str(error)
        for argument, option in typed.items():
            message = message.replace(f"`{argument}`", f"`--{option}`")
        raise UsageError(message) from error


def know_options(parameters: Iterable[Any]) -> None:
    """Tell `as_typed` the options of the command that runs, as Click has them."""
    _flags.set(
        {
            parameter.name: max(parameter.opts, key=len)
            for parameter in parameters
            if parameter.param_type_name == "option"
        }
    )


def as_typed(message: str) -> str:
    """An error of the library in the words of the command line.

    Arguments become options. What names one that cannot be typed is left out: a phrase,
    or a whole sentence after the first, such as the advice to offload.
    """
    for pattern, typed in _NOT_TYPED.items():
        message = re.sub(pattern, typed, message)
    message = _MESH.sub(_degrees, message)
    first, *others = _SENTENCES.split(message)
    typed_ones = [one for one in others if not _names_what_is_not_typed(one)]
    return _NAMED.sub(_option, " ".join([first, *typed_ones]))


def _degrees(match: re.Match[str]) -> str:
    """Degrees by dimension, as they are typed."""
    typed = match[2].replace("None", "any").replace("...", "N")
    typed = typed.replace("'", "").replace(": ", "=").replace(", ", ",")
    return f"--mesh {typed}" if match[1] else typed


def _names_what_is_not_typed(sentence: str) -> bool:
    return any(
        match[2] is not None and _flag(match[1]) is None
        for match in _NAMED.finditer(sentence)
    )


def _option(match: re.Match[str]) -> str:
    """An argument that a message names, as it is typed; others stay as they are."""
    flag, value = _flag(match[1]), match[2]
    if flag is None:
        return match[0]
    if value is None or value == "True":
        return flag
    is_word = " " not in value and len(value) > len("''")
    return f"{flag} {value.strip(chr(39)) if is_word else value}"


def _flag(name: str) -> str | None:
    """What is typed for an argument of Python; None if nothing is."""
    key = name.replace("-", "_")
    return _flags.get({}).get(_OPTION_OF.get(key, key))


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings as one line each, without a line of source."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(as_typed(str(message)).split())
        print(f"autosac: warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def check_needed(option: str, is_given: object, needed: str, is_there: object) -> None:
    """Complain of an option that has no effect without another one."""
    if is_given and not is_there:
        raise UsageError(f"{option} needs {needed}: add that, or leave {option} out.")


def check_files(*paths: Path | None) -> None:
    """Complain of files that cannot be written before any work is done."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}.")
        if path.is_dir():
            raise UsageError(f"{path} is a folder: name a file.")


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Let an `OSError` name what could not be written: the system need not say it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def typed_bytes(text: str) -> int | str:
    """What was typed as an amount of memory: digits alone are bytes."""
    return int(text) if text.isdecimal() else text
