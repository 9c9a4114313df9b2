"""What decides the result of a cell, as text, so that a finished one is found again.

A function counts with its module's source file and those of all of the user's own
modules that are reached from it by import; installed packages with their versions.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import joblib

from autosac.errors import ArgumentError

_ROOT = Path(__file__).resolve().parents[2]


@functools.lru_cache(maxsize=1)
def own_version() -> str:
    """autosac's version and a digest of its source, solvers included."""
    digest = hashlib.sha256()
    for folder, _, names in sorted(os.walk(_ROOT / "autosac", followlinks=True)):
        for path in (Path(folder, name) for name in sorted(names)):
            if path.suffix == ".py":
                digest.update(path.relative_to(_ROOT).as_posix().encode())
                digest.update(path.read_bytes())
    return f"{_version('autosac')} {digest.hexdigest()[:16]}"


def versions(packages: Iterable[str]) -> str:
    """Versions of packages."""
    return ", ".join(f"{package} {_version(package)}" for package in packages)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", ""))


def code_of(function: Callable[..., Any]) -> str:
    """A digest of the user's own source files that a function may depend on.

    Raises:
        ArgumentError: It comes from no file, as in a notebook.
    """
    digests: dict[str, str] = {}
    first = _unwrapped(function).__module__
    waiting = [first]
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None or name in digests or _is_installed(name):
            continue
        path = Path(getattr(module, "__file__", None) or "")
        if not path.is_file():
            if name not in (first, "__main__"):
                continue
            raise ArgumentError(
                f"`directory` keeps cells by the code that makes them, and {name!r} is"
                " no file; pass `version`, any text that you change with the code."
            )
        digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        for value in vars(module).values():
            is_module = isinstance(value, types.ModuleType)
            around = value.__name__ if is_module else getattr(value, "__module__", None)
            waiting += [around] if isinstance(around, str) else []
    return text_of(digests)


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def _is_installed(name: str) -> bool:
    """Whether a module is of an installed package, autosac or the standard library."""
    top = name.partition(".")[0]
    if top == "autosac" or top in sys.stdlib_module_names:
        return True
    path = Path(getattr(sys.modules.get(top), "__file__", None) or "")
    return bool({"site-packages", "dist-packages"} & set(path.parts))


def text_of(value: Any) -> str:
    """A text that tells a value from others, the same in every process.

    Values that hold addresses, such as tensors, may get another one in every process:
    their cells are done again.

    Raises:
        ArgumentError: Nothing tells such values apart.
    """
    return _text_of(value, ())


def _text_of(value: Any, around: tuple[types.FunctionType, ...]) -> str:
    """The text of a value that some functions reach; these may reach themselves."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"

    def texts(values: Iterable[Any]) -> str:
        return ", ".join(_text_of(one, around) for one in values)

    if isinstance(value, Mapping):
        return f"{kind}({texts(part for item in value.items() for part in item)})"
    if isinstance(value, (list, tuple)):
        return f"{kind}({texts(value)})"
    if isinstance(value, functools.partial):
        return f"{kind}({texts((value.func, value.args, value.keywords))})"
    if isinstance(value, types.FunctionType):
        if value in around:
            return f"{kind} {value.__qualname__}"
        around += (value,)
        code = value.__code__
        plain = [part for part in code.co_consts if not isinstance(part, type(code))]
        cells = [_contents(cell) for cell in value.__closure__ or ()]
        parts = (
            value.__module__, value.__qualname__, code.co_firstlineno, code.co_code,
            code.co_names, plain, value.__defaults__, value.__kwdefaults__, cells,
        )  # fmt: skip
        return f"{kind}({texts(parts)})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{kind}({texts(getattr(value, f.name) for f in fields(value))})"
    try:
        return f"{kind} {joblib.hash(value)}"
    except Exception as error:  # pickling runs the code of any type
        raise ArgumentError(
            f"{value!r} cannot be told from others ({error}), so that no cell of it can"
            " be kept; leave out `directory`, or give plainer values."
        ) from error


class _Nothing:
    """Stands for what a closure's cell holds before anything is assigned to it."""


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _Nothing
