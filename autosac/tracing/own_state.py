"""What the code of a step reaches of the user's own, and may change: put back.

A global name, a closure, or an attribute of a class or an object, such as the trainer
whose method computes the loss, may hold running means, lists, modules and random
generators. Copies of the model share them.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from autosac import _compat, _compat_dispatch, _compat_fakes
from autosac.step import copies_on_write
from autosac.step.random_streams import GENERATORS, generators_kept
from autosac.step.source_lines import is_users
from autosac.tracing.learned import Learned

# Those before dict and list are of these, too.
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set, tuple)
# Nothing to look into, or of something that may be gone.
_ATOMS = (type(None), bool, int, float, complex, str, bytes, *weakref.ProxyTypes)
_MOST_ITEMS = 1000  # of a container that is looked at
_MOST_OBJECTS = 100_000  # a tenth of a second
_MOST_COPIED = 2**24  # bytes of tensors; others are copied only if need be
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
_EMPTY = object()
_FUNCTIONS = (types.FunctionType, types.MethodType, partial)
_MEMBERS = (*_FUNCTIONS, staticmethod, classmethod, property)


@contextlib.contextmanager
def own_generators_kept(*reaching: Any) -> Iterator[None]:
    """Restore the generators that functions, modules and other objects reach."""
    with generators_kept(own_generators(*reaching)):
        yield


def own_generators(*reaching: Any) -> list[Any]:
    """The generators that functions, modules and other objects reach, each once."""
    reach = _Reach(reaching)
    return [value for value in reach.seen.values() if isinstance(value, GENERATORS)]


def own_state_kept(
    *reaching: Any,
    memo: dict[int, Any],
    learned: Learned,
) -> ExitStack:
    """What puts back, as it closes, all that functions and objects reach as it is now.

    Attributes, items, variables, generators, and values of tensors. Until then leaves
    have no gradient: a step would add to the user's.

    Args:
        reaching: Functions, modules and other objects.
        memo: Copies by the addresses of what is copied, and runs in place of it.
        learned: Told if a step writes to large tensors.
    """
    stack = ExitStack()
    reach = _Reach(reaching)
    stack.enter_context(
        generators_kept(v for v in reach.seen.values() if isinstance(v, GENERATORS))
    )
    copies = set(map(id, memo.values()))
    storages: set[int] = set()
    left_bytes = _MOST_COPIED
    for value in reach.seen.values():
        if not isinstance(value, torch.Tensor):
            for put_back in _restorers(value):
                stack.callback(put_back)
        elif memo.get(id(value), value) is value and (
            id(value) in memo or id(value) not in copies
        ):
            left_bytes -= _keep_tensor(value, stack, storages, left_bytes, learned)
    for namespace, names in reach.namespaces.values():
        for name in names:
            old = namespace.get(name, _EMPTY)
            stack.callback(_put_back_name, namespace, name, old)
    return stack


class _Reach:
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
        rest = list(reversed(roots))
        while rest:
            self._look_at(rest)
            rest = [
                value
                for loop in self.loops
                for name, value in _attributes(loop).items()
                if (name in self.names or _is_users(value)) and self._is_new(value)
            ]

    def _is_new(self, value: Any) -> bool:
        is_full = len(self.seen) >= _MOST_OBJECTS
        return not is_full and type(value) not in _ATOMS and id(value) not in self.seen

    def _look_at(self, rest: list[Any]) -> None:
        while rest:
            value = rest.pop()
            if self._is_new(value):
                self.seen[id(value)] = value
                rest += self._parts(value)

    def _parts(self, value: Any) -> list[Any]:
        """What an object reaches directly, as far as its code may change it."""
        if isinstance(value, types.FunctionType):
            return self._parts_of_function(value)
        if isinstance(value, types.CellType):
            return [contents] if (contents := _contents(value)) is not _EMPTY else []
        if isinstance(value, types.MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, (staticmethod, classmethod)):
            return [value.__func__]
        if isinstance(value, property):
            return [value.fget, value.fset]
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, type):
            return self._parts_of_class(value)
        if isinstance(value, (torch.Tensor, types.ModuleType, *GENERATORS)):
            return []
        kind = type(value)
        if _comes_from(kind, _MACHINERY):
            return []
        if not isinstance(value, torch.nn.Module) and _comes_from(kind, _LOOPS):
            self.loops.append(value)
            return [kind]
        return [kind, *_items(value), *_inner(value), *_slots(value).values()]

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
        if _is_of_library(value):
            return []
        return [*value.__bases__, *vars(value).values()]

    def _parts_of_function(self, function: types.FunctionType) -> list[Any]:
        """What a function of the user's reads: cells, defaults and global names."""
        path = function.__code__.co_filename
        is_typed = path.startswith("<") and not path.startswith("<frozen")
        is_own = id(function) in self.roots or not _is_of_library(function)
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


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes of an object, which is asked nothing."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


def _inner(value: Any) -> list[Any]:
    """Values of attributes; of those that all modules have, what is not empty."""
    attributes = _attributes(value)
    if isinstance(value, torch.nn.Module):
        return [v for n, v in attributes.items() if n not in _OF_MODULES or v]
    if isinstance(value, torch.optim.Optimizer):  # changed by none but its `step`
        return [v for n, v in attributes.items() if n != "state"]
    return list(attributes.values())


def _slots(value: Any) -> dict[Any, Any]:
    """Slots of an object, and what is in them."""
    kinds = type(value).__mro__
    if all(kind.__module__ == "builtins" for kind in kinds):
        return {}
    members = [
        member
        for kind in kinds
        if "__slots__" in vars(kind)
        for member in vars(kind).values()
        if isinstance(member, types.MemberDescriptorType)
    ]
    found = {}
    for member in members:
        with contextlib.suppress(AttributeError):  # it is empty
            found[member] = member.__get__(value)
    return found


def _base(value: Any) -> Any:
    """Which container an object is, whatever else its class does; or None."""
    return next((kind for kind in _CONTAINERS if issubclass(type(value), kind)), None)


def _items(value: Any) -> list[Any]:
    """What a container holds, as far as it is looked at."""
    base = _base(value)
    if base is None or base.__len__(value) > _MOST_ITEMS:
        return []
    return list(base.values(value) if issubclass(base, dict) else base.__iter__(value))


def _comes_from(kind: type, modules: tuple[str, ...]) -> bool:
    """Whether a class or one that it derives from is of some modules."""
    return any(_is_from(base, modules) for base in kind.__mro__)


def _is_from(kind: type, modules: tuple[str, ...]) -> bool:
    return f"{kind.__module__}.".startswith(modules)


def _is_of_library(value: Any) -> bool:
    """Whether a function or class is Python's own or one of an installed package."""
    module = sys.modules.get(value.__module__ or "")
    return value.__module__ == "builtins" or (
        module is not None and _is_library(module)
    )


def _is_users(value: Any) -> bool:
    """Whether an object is a function, or of a class, that is no library's."""
    return type(value) in _FUNCTIONS or not _is_of_library(type(value))


def _is_library(module: types.ModuleType) -> bool:
    """Whether a module is Python's own, of an installed package, PyTorch or autosac."""
    path = getattr(module, "__file__", None) or ""
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


def _restorers(value: Any) -> Iterator[Callable[[], object]]:
    """What puts an object back to how it is now."""
    if isinstance(value, types.CellType):
        yield partial(_put_back_cell, value, _contents(value))
        return
    if isinstance(value, type):
        if not _is_of_library(value):
            yield partial(_put_back_members, value, dict(vars(value)))
        return
    if isinstance(value, (*_MEMBERS, types.ModuleType, *GENERATORS)):
        return
    base = _base(value)
    if base not in (None, tuple):
        old = dict(base.items(value)) if issubclass(base, dict) else base(value)
        yield partial(_put_back_items, value, base, old)
    if _comes_from(type(value), _MACHINERY):
        return
    if attributes := _attributes(value):
        yield partial(_put_back_items, attributes, dict, dict(attributes))
    elif hasattr(type(value), "__dict__") and type(value).__dictoffset__:
        yield partial(_clear, value)
    for member, content in _slots(value).items():
        yield partial(_put_back_slot, value, member, content)


def _keep_tensor(
    tensor: torch.Tensor,
    stack: ExitStack,
    storages: set[int],
    left_bytes: int,
    learned: Learned,
) -> int:
    """Let a stack put a tensor back to what it is now; return the bytes copied.

    Args:
        tensor: The tensor.
        stack: Of callbacks.
        storages: Known by now.
        left_bytes: How many may be copied.
        learned: Told if a step writes to what was not copied.
    """
    if tensor.is_leaf and tensor.requires_grad:
        stack.callback(setattr, tensor, "grad", tensor.grad)
        tensor.grad = None
    kinds = (torch.Tensor, torch.nn.Parameter)
    is_here = type(tensor) in kinds and tensor.layout is torch.strided
    if not is_here or tensor.is_meta or _compat_fakes.is_fake(tensor):
        return 0
    version = 0 if tensor.is_inference() else tensor._version
    stack.callback(_put_back_data, tensor, tensor.detach(), version)
    storage = tensor.untyped_storage()
    if storage._cdata in storages:
        return 0
    storages.add(storage._cdata)
    if storage.nbytes() <= left_bytes:
        _keep_bytes(storage, stack)
        return storage.nbytes()

    def keep() -> None:
        learned.writes_large = True
        _keep_bytes(storage, stack)

    copies_on_write.wait_for(storage, keep)
    stack.callback(copies_on_write.leave, storage)
    return 0


def _keep_bytes(storage: torch.UntypedStorage, stack: ExitStack) -> None:
    with _compat.no_modes():
        old = torch.UntypedStorage(storage.nbytes()).copy_(storage)  # on the CPU
    stack.callback(_put_back_bytes, storage, old)


def _put_back_data(tensor: torch.Tensor, data: torch.Tensor, version: int) -> None:
    """Give a tensor the memory that it had, and its version."""
    if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
        tensor.data = data
    if not tensor.is_inference() and tensor._version != version:
        _compat_dispatch.set_version(tensor, version)


def _put_back_bytes(storage: torch.UntypedStorage, old: torch.UntypedStorage) -> None:
    with _compat.no_modes():
        if storage.nbytes() != old.nbytes():
            storage.resize_(old.nbytes())
        storage.copy_(old)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _EMPTY


def _put_back_cell(cell: types.CellType, contents: Any) -> None:
    if contents is not _EMPTY:
        cell.cell_contents = contents
    elif _contents(cell) is not _EMPTY:
        del cell.cell_contents


def _put_back_name(names: dict[str, Any], name: str, old: Any) -> None:
    if names.get(name, _EMPTY) is old:
        return
    if old is _EMPTY:
        names.pop(name, None)
    else:
        names[name] = old


def _put_back_members(kind: type, old: dict[str, Any]) -> None:
    for name in [name for name in vars(kind) if name not in old]:
        type.__delattr__(kind, name)
    for name, value in old.items():
        if vars(kind).get(name, _EMPTY) is not value:
            type.__setattr__(kind, name, value)


def _put_back_slot(value: Any, member: Any, content: Any) -> None:
    member.__set__(value, content)


def _clear(value: Any) -> None:
    """Take away attributes of an object that had none."""
    _attributes(value).clear()


def _put_back_items(value: Any, base: Any, old: Any) -> None:
    """Fill a container again, past what its class does with items."""
    if base is set:
        is_same = set.__len__(value) == len(old) and set.issubset(value, old)
    else:
        flat = _flat(value, base)
        is_same = len(flat) == len(_flat(old, type(old))) and all(
            one is other for one, other in zip(flat, _flat(old, type(old)), strict=True)
        )
    if is_same:
        return
    base.clear(value)
    if issubclass(base, dict):
        for key, item in old.items():
            base.__setitem__(value, key, item)
    elif base is set:
        set.update(value, old)
    else:
        base.extend(value, old)


def _flat(value: Any, base: Any) -> list[Any]:
    if issubclass(base, dict):
        return [part for item in base.items(value) for part in item]
    return list(base.__iter__(value))
