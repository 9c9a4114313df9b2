"""Random generators of the user's own, which code of a step draws from: put back.

A global name, a closure, or an attribute of a class or an object may hold one. Copies
of the model share it.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from autosac.step.random_streams import GENERATORS, generators_kept
from autosac.step.source_lines import is_users

_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set, tuple)
# Nothing to look into, or of something that may be gone.
_ATOMS = (type(None), bool, int, float, complex, str, bytes, *weakref.ProxyTypes)
_MOST_ITEMS = 1000  # of a container that is looked at
_MOST_OBJECTS = 100_000  # a tenth of a second
_LIBRARIES = ("site-packages", "dist-packages")


@contextlib.contextmanager
def own_generators_kept(*reaching: Any) -> Iterator[None]:
    """Restore the generators that functions, modules and other objects reach."""
    with generators_kept(own_generators(*reaching)):
        yield


def own_generators(*reaching: Any) -> list[Any]:
    """The generators that functions, modules and other objects reach, each once."""
    found: list[Any] = []
    seen: dict[int, Any] = {}  # kept, so that no address is used twice
    rest = list(reversed(reaching))
    while rest and len(seen) < _MOST_OBJECTS:
        value = rest.pop()
        kind = type(value)
        if kind in _ATOMS or (kind in _CONTAINERS and not value) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, GENERATORS):
            found.append(value)
        else:
            rest += _parts(value)
    return found


def _parts(value: Any) -> list[Any]:
    """What an object reaches directly, as far as its code may draw from it."""
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, type):
        return _parts_of_class(value)
    if type(value) in _CONTAINERS:
        items = value.values() if isinstance(value, dict) else value
        return list(items) if len(value) <= _MOST_ITEMS else []
    if isinstance(value, (torch.Tensor, types.ModuleType)):
        return []
    try:  # asks nothing of the object
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return [type(value)]
    return [type(value), *attributes.values()]


def _parts_of_class(value: type) -> list[Any]:
    """Members of a class that is not a library's."""
    if _is_of_library(value):
        return []
    kinds = (types.FunctionType, staticmethod, classmethod, property, *GENERATORS)
    members = [v for v in vars(value).values() if isinstance(v, kinds)]
    return [*value.__bases__, *members]


def _is_of_library(value: Any) -> bool:
    """Whether a function or class is Python's own or one of an installed package."""
    module = sys.modules.get(value.__module__ or "")
    path = getattr(module, "__file__", None) or ""
    return value.__module__ == "builtins" or any(name in path for name in _LIBRARIES)


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    """What a function of the user's reads: its cells, defaults and global names."""
    path = function.__code__.co_filename
    is_typed = path.startswith("<") and not path.startswith("<frozen")
    if _is_of_library(function) or not (is_typed or is_users(path)):
        return [function.__dict__]  # `__wrapped__`, of a decorator
    parts: list[Any] = [function.__defaults__, function.__kwdefaults__]
    parts.append(function.__dict__)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            parts.append(cell.cell_contents)
    names, variables = _names(function.__code__), function.__globals__
    for value in [variables[name] for name in names if name in variables]:
        if issubclass(type(value), types.ModuleType):
            members = [vars(value)[name] for name in names if name in vars(value)]
            kinds = (*GENERATORS, types.FunctionType)
            parts += [m for m in members if isinstance(m, kinds)]
        else:
            parts.append(value)
    return parts


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes in a function and those that it defines."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
