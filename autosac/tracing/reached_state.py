"""What the code of a step reaches of the user's own, and may change."""

from __future__ import annotations

import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autosac.step.arguments import warn
from autosac.step.random_streams import GENERATORS
from autosac.step.source_lines import is_users

# Those before dict and list are of these, too.
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set, tuple)
_WEAK = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_REGISTRIES = frozenset((dict, list, deque, set, *_WEAK))
# Nothing to look into, or of something that may be gone.
ATOMS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, *weakref.ProxyTypes)
)
_MOST_OBJECTS = 100_000  # some 0.4 s for each look
_TOO_MANY = (
    f"The loss and the model reach more than {_MOST_OBJECTS:,} objects: what a step"
    " changes of the farthest is not put back after planning."
)
_LIBRARIES = ("site-packages", "dist-packages")
# Other threads and processes go on with these while a step is planned.
_MACHINERY = tuple(
    f"{module}."
    for module in (
        *("_io", "_queue", "asyncio", "concurrent", "io", "logging", "multiprocessing"),
        *("queue", "rich", "threading", "_thread", "tqdm"),
        *("torch.distributed", "torch.utils.data"),
    )
)
# Trainers hold all of a training: of theirs only what the user's code names.
_LOOPS = ("accelerate.", "lightning.", "pytorch_lightning.", "transformers.trainer.")
_OF_MODULES = frozenset(vars(torch.nn.Module()))
EMPTY = object()
FUNCTIONS = (types.FunctionType, types.MethodType, partial)
_MEMBERS = (*FUNCTIONS, staticmethod, classmethod, property)
_NOT_PLAIN: tuple[Any, ...] = (
    *(*_MEMBERS, *GENERATORS, types.CellType, type, types.ModuleType),
    torch.Tensor,
)


class Reach:
    """Looks at all that objects reach.

    Args:
        roots: The objects.

    Attributes:
        seen: What they reach by its address; kept, so that none is used twice.
        namespaces: Variables of modules by address, and those that functions name.
        names: All names in functions of the user's.
    """

    def __init__(self, roots: tuple[Any, ...]) -> None:
        self.seen: dict[int, Any] = {}
        self.namespaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.names: set[str] = set()
        self.loops: list[Any] = []
        self.roots = set(map(id, roots))
        self._traits: dict[type, ClassTraits] = {}
        rest = deque(roots)
        while rest:
            self._look_at(rest)
            rest = deque(
                value
                for loop in self.loops
                for name, value in attributes_of(loop).items()
                if (name in self.names or _is_users(value)) and self._is_new(value)
            )

    def traits(self, value: Any) -> ClassTraits:
        """What is known of the class of an object."""
        kind = type(value)
        if kind not in self._traits:
            self._traits[kind] = ClassTraits.of(kind)
        return self._traits[kind]

    def _is_new(self, value: Any) -> bool:
        return type(value) not in ATOMS and id(value) not in self.seen

    def _look_at(self, rest: deque[Any]) -> None:
        """Look at the nearest first: there may be too many."""
        while rest:
            value = rest.popleft()
            if type(value) in ATOMS or id(value) in self.seen:
                continue
            if len(self.seen) >= _MOST_OBJECTS:
                warn(_TOO_MANY)
                return
            self.seen[id(value)] = value
            rest += self._parts(value)

    def _parts(self, value: Any) -> list[Any]:
        """What an object reaches directly, as far as its code may change it."""
        traits = self.traits(value)
        if traits.is_builtin:
            return _items(value, traits.base)
        if not traits.is_plain:
            return self._parts_of_code(value)
        if traits.is_machinery:
            return []
        if traits.is_loop:
            self.loops.append(value)
            return [type(value)]
        parts = [type(value), *_items(value, traits.base), *_inner(value)]
        return [*parts, *_contents_of(value, traits.slots)]

    def _parts_of_code(self, value: Any) -> list[Any]:
        """What a function, a class or a part of one reaches directly."""
        if isinstance(value, types.FunctionType):
            return self._parts_of_function(value)
        if isinstance(value, types.CellType):
            return [contents_of(value)]
        if isinstance(value, types.MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, (staticmethod, classmethod)):
            return [value.__func__]
        if isinstance(value, property):
            return [value.fget, value.fset]
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        return self._parts_of_class(value) if isinstance(value, type) else []

    def _parts_of_class(self, value: type) -> list[Any]:
        """Members of a class that is not a library's.

        Of trainers that a library derives, too, names are those of code of the user's.
        """
        if _comes_from(value, _LOOPS):
            own = [k for k in value.__mro__ if not _is_from(k, _LOOPS)]
            functions = [f for k in own for f in vars(k).values()]
            for function in functions:
                if isinstance(function, types.FunctionType):
                    self.names |= _names(function.__code__)
        if is_of_library(value):  # which may list the instances of its class
            is_module = issubclass(value, torch.nn.Module)
            members = vars(value).values() if is_module else ()
            return [*value.__bases__, *(v for v in members if type(v) in _REGISTRIES)]
        return [*value.__bases__, *vars(value).values()]

    def _parts_of_function(self, function: types.FunctionType) -> list[Any]:
        """What a function of the user's reads: cells, defaults and global names."""
        path = function.__code__.co_filename
        is_typed = path.startswith("<") and not path.startswith("<frozen")
        is_own = id(function) in self.roots or not is_of_library(function)
        if not is_own or not (is_typed or is_users(path)):
            return [function.__dict__]  # `__wrapped__`, of a decorator
        parts: list[Any] = [function.__defaults__, function.__kwdefaults__]
        parts += [function.__dict__, *(function.__closure__ or ())]
        names, variables = _names(function.__code__), function.__globals__
        self.names |= names
        self._name(variables, names)
        for value in [variables[name] for name in names if name in variables]:
            if not issubclass(type(value), types.ModuleType):
                parts.append(value)
            elif _is_library(value):
                members = [vars(value)[name] for name in names if name in vars(value)]
                kinds = (*GENERATORS, types.FunctionType)
                parts += [m for m in members if isinstance(m, kinds)]
            else:
                self._name(vars(value), names)
                parts += [vars(value)[name] for name in names if name in vars(value)]
        return parts

    def _name(self, namespace: dict[str, Any], names: set[str]) -> None:
        self.namespaces.setdefault(id(namespace), (namespace, set()))[1].update(names)


@dataclass(frozen=True)
class ClassTraits:
    """What is known of a class.

    Attributes:
        is_plain: Its objects are no code, tensors or generators.
        is_machinery: Other threads and processes go on with them.
        is_loop: They are trainers.
        is_builtin: They are containers without attributes.
        base: Which container they are, whatever else the class does; or None.
        slots: Their slots.
    """

    is_plain: bool
    is_machinery: bool
    is_loop: bool
    is_builtin: bool
    base: Any
    slots: tuple[Any, ...]

    @classmethod
    def of(cls, kind: type) -> ClassTraits:
        """What is known of a class."""
        is_module = issubclass(kind, torch.nn.Module)
        return cls(
            is_plain=not issubclass(kind, _NOT_PLAIN),
            is_machinery=_comes_from(kind, _MACHINERY),
            is_loop=not is_module and _comes_from(kind, _LOOPS),
            is_builtin=kind in _CONTAINERS and kind is not OrderedDict,
            base=next((base for base in _CONTAINERS if issubclass(kind, base)), None),
            slots=_slots(kind),
        )


def attributes_of(value: Any) -> dict[str, Any]:
    """Attributes of an object, which is asked nothing."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none, or a property of that name, which may do anything
        return {}
    return attributes if type(attributes) is dict else {}


def contents_of(cell: types.CellType) -> Any:
    """What is in a cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def content_of(value: Any, slot: Any) -> Any:
    """What is in a slot of an object."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return EMPTY


def _contents_of(value: Any, slots: tuple[Any, ...]) -> list[Any]:
    return [content_of(value, slot) for slot in slots]


def _inner(value: Any) -> Iterable[Any]:
    """Values of attributes; of those that all modules have, what is not empty."""
    attributes = attributes_of(value)
    if isinstance(value, torch.nn.Module):
        return [v for n, v in attributes.items() if n not in _OF_MODULES or v]
    if isinstance(value, torch.optim.Optimizer):  # changed by none but its `step`
        return [v for n, v in attributes.items() if n != "state"]
    return list(attributes.values())


def empty_parts_of(module: torch.nn.Module) -> list[dict[Any, Any]]:
    """Containers that all modules have, such as that of buffers, if they are empty."""
    parts = [v for n, v in attributes_of(module).items() if n in _OF_MODULES]
    return [part for part in parts if isinstance(part, dict) and not part]


def _slots(kind: type) -> tuple[Any, ...]:
    if all(base.__module__ == "builtins" for base in kind.__mro__):
        return ()
    return tuple(
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    )


def _items(value: Any, base: Any) -> list[Any]:
    """What a container holds; also keys, which may be objects."""
    if base is None:
        return []
    held = [list(base.__iter__(value))]
    if issubclass(base, dict):
        held.append(list(base.values(value)))
    return [v for part in held if not ATOMS.issuperset(map(type, part)) for v in part]


def _comes_from(kind: type, modules: tuple[str, ...]) -> bool:
    """Whether a class or one that it derives from is of some modules."""
    return any(_is_from(base, modules) for base in kind.__mro__)


def _is_from(kind: type, modules: tuple[str, ...]) -> bool:
    return f"{kind.__module__}.".startswith(modules)


def is_of_library(value: Any) -> bool:
    """Whether a function or class is Python's own or one of an installed package."""
    name = value.__module__
    module = sys.modules.get(name) if isinstance(name, str) else None
    return name == "builtins" or (
        isinstance(module, types.ModuleType) and _is_library(module)  # may be anything
    )


def _is_users(value: Any) -> bool:
    """Whether an object is a function, or of a class, that is no library's."""
    return type(value) in FUNCTIONS or not is_of_library(type(value))


def _is_library(module: types.ModuleType) -> bool:
    """Whether a module is Python's own, of an installed package, PyTorch or autosac."""
    path = getattr(module, "__file__", None)
    path = path if isinstance(path, str) else ""
    is_python = module.__name__.partition(".")[0] in sys.stdlib_module_names
    is_other = path and not is_users(path)
    return is_python or is_other or any(name in path for name in _LIBRARIES)


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes in a function and those that it defines.

    Also those that are texts, as for `getattr`.
    """
    consts = code.co_consts
    inner = (const for const in consts if isinstance(const, types.CodeType))
    texts = {const for const in consts if isinstance(const, str)}
    return {*code.co_names, *texts}.union(*map(_names, inner))
