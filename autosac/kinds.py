"""Arguments of another kind than is taken: one sentence each."""

from __future__ import annotations

import os
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from autosac.errors import ArgumentError


def check_kind(value: object, kind: type, *, name: str, wanted: str) -> None:
    """Refuse what is no instance of a class.

    Args:
        value: What was passed.
        kind: The class.
        name: The argument's name, for the error message.
        wanted: What to pass, for it too.

    Raises:
        ArgumentError: It is none.
    """
    if not isinstance(value, kind):
        raise _other(value, name, wanted)


def check_function(value: object, *, name: str, wanted: str) -> None:
    """Refuse what cannot be called, and a built module, which can.

    Args:
        value: What was passed.
        name: The argument's name, for the error message.
        wanted: What to pass, for it too.

    Raises:
        ArgumentError: It is no such function.
    """
    is_built = hasattr(value, "named_modules") and not isinstance(value, type)
    if not callable(value) or is_built:
        raise _other(value, name, wanted)


def check_profile(value: object, kind: type) -> None:
    """Refuse what is no profile.

    Args:
        value: What was passed.
        kind: The class of profiles.

    Raises:
        ArgumentError: It is none.
    """
    check_kind(value, kind, name="profile", wanted="what `autosac.profile` returns")


def file_path(path: Any) -> Path:
    """The file that a user names.

    Raises:
        ArgumentError: It is no path.
        IsADirectoryError: It is that of a folder.
    """
    try:
        named = Path(path)
    except TypeError:
        raise _other(path, "path", "the name of a file") from None
    if named.is_dir():
        raise IsADirectoryError(f"`path`={str(path)!r} is a folder: name a file.")
    return named


def new_file(path: Any) -> Path:
    """The file that a user wants written.

    Raises:
        ArgumentError: It is no path.
        OSError: It is that of a folder, or in a folder that is not there.
    """
    named = file_path(path)
    if not named.parent.is_dir():
        raise FileNotFoundError(
            f"`path`={str(path)!r}: there is no folder {str(named.parent)!r}; make it"
            " before."
        )
    return named


def read_directory(path: Any) -> str | None:
    """Where files of far memory shall lie, None for the system's temporary directory.

    Args:
        path: What was passed for `offload_dir`.

    Raises:
        ArgumentError: It is no directory that is there.
    """
    if path is None:
        return None
    named = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if isinstance(named, str) and os.path.isdir(named):
        return os.path.abspath(named)  # the step may run in another one
    raise ArgumentError(
        f"`offload_dir`={named!r} is no directory: make it, or name another."
    )


def _other(value: object, name: str, wanted: str) -> ArgumentError:
    is_plain = value is None or isinstance(value, (str, int, float))
    got = shortened(value) if is_plain else type(value).__name__
    return ArgumentError(f"`{name}` must be {wanted}, got {got}.")
