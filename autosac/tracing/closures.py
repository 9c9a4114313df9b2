"""What the functions of a step reach besides their arguments.

`copy.deepcopy` hands functions on as they are. A hook or an activation that closes over
its module, or a loss over the model, would go on with the user's own objects while the
copies run. Here such functions get others that reach the copies. What else they may
write to, such as a dict of features or a number that is ``nonlocal``, is put back.
"""

from __future__ import annotations

import copy
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from autosac.step.source_lines import is_users
from autosac.tracing.learned import Learned
from autosac.tracing.own_state import reached_state_kept
from autosac.tracing.reached_copies import copy_of, hold_copies, notices_writes
from autosac.tracing.reached_state import (
    ATOMS,
    FUNCTIONS,
    Reach,
    attributes_of,
    contents_of,
)

_MOST_COPIED = 2**24  # bytes of a tensor
_MOST_ITEMS = 1000  # of a container that is looked at
_HOLDING = threading.RLock()
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set, tuple)


def own_functions(
    model: torch.nn.Module,
    original: torch.nn.Module,
    loss_fn: Any,
    memo: dict[int, Any],
    *,
    optimizer: Any = None,
    is_real: bool,
    learned: Learned,
) -> tuple[Any, ExitStack]:
    """Let functions of a copied model reach copies.

    Args:
        model: The copy, whose functions are exchanged.
        original: What it is a copy of.
        loss_fn: The user's.
        memo: Copies by the addresses of the user's objects, as of `copy.deepcopy`.
        optimizer: A copy, too, whose functions are hooks.
        is_real: Ops change the data of tensors, so that those that functions reach
            are copied as well.
        learned: Told how large the tensors are that a step writes to.

    Returns:
        A loss that reaches them, too; and what puts back, as it closes, what functions
        and the objects that they reach may write to.
    """
    copies = dict(memo)
    own = _Own(memo, is_real)
    users = {id(module) for module in original.modules()}
    for module in model.modules():
        if id(module) not in users:
            own.exchange_in(vars(module))
    if isinstance(optimizer, torch.optim.Optimizer):
        own.exchange_in(vars(optimizer))
    own_loss = own.of(loss_fn)
    # Containers are reached from these, behind what is nearer.
    met = [v for v in own.met.values() if type(v) not in _CONTAINERS]
    of_modules = [v for module in original.modules() for v in vars(module).values()]
    kept = ExitStack()
    try:
        if learned.reached:  # threads would put back what others hold
            kept.enter_context(_HOLDING)
        reach = Reach((original, loss_fn, optimizer, *met))
        kept.push(reached_state_kept(reach, memo, learned))
        if learned.reached:
            hold_copies(reach, copies, {*copies, *map(id, of_modules), *own.copies})
        kept.push(notices_writes(original, copies, learned))
    except BaseException:
        kept.close()
        raise
    return own_loss, kept


class _Own:
    """Functions that reach the copies of a memo where the user's reach originals.

    Args:
        memo: Copies by the addresses of the originals.
        is_real: Tensors are copied as well.
    """

    def __init__(self, memo: dict[int, Any], is_real: bool) -> None:
        self.memo = memo
        # Copied methods are of copies, but their functions are the user's.
        copies = (v for v in memo.values() if not isinstance(v, types.MethodType))
        self.copies = set(map(id, copies))
        self.is_real = is_real
        self.cells: dict[int, types.CellType] = {}
        self.namespaces: dict[int, dict[str, Any]] = {}
        self.met: dict[int, Any] = {}  # kept, so that no address is used twice
        self.unchanged: set[int] = set()

    def exchange_in(self, attributes: dict[str, Any]) -> None:
        """Exchange functions and weak references among attributes of a copied module.

        Also those in containers.
        """
        self._exchange(attributes, attributes.items())
        for value in list(attributes.values()):
            if isinstance(value, dict):
                self._exchange(value, value.items())
            elif isinstance(value, list):
                self._exchange(value, enumerate(value))

    def _exchange(self, container: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in list(items):
            if isinstance(value, FUNCTIONS):
                container[key] = self.of(value)
            elif isinstance(value, weakref.ref):
                container[key] = copy_of(value, self.memo)

    def of(self, value: Any, *, opens: bool = True) -> Any:
        """What stands for a value where the copies run; often the value itself.

        Args:
            value: Something that a function reaches, or a function.
            opens: Attributes of a plain object are looked at.
        """
        if id(value) in self.memo:
            return self.memo[id(value)]
        if id(value) in self.unchanged or id(value) in self.copies:
            return value
        if not self._reaches(value, set(), opens):
            if id(value) in self.met:
                self.unchanged.add(id(value))
            return value
        of = partial(self.of, opens=opens)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(of(value.__func__), of(value.__self__))
        if isinstance(value, partial):
            named = {name: of(item) for name, item in value.keywords.items()}
            return partial(of(value.func), *map(of, value.args), **named)
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            return self._deepcopy(value)
        if isinstance(value, _CONTAINERS):
            return self._container(value, of)
        return self._object(value)

    def _reaches(self, value: Any, seen: set[int], opens: bool = True) -> bool:
        """Whether something that a value reaches is copied."""
        if type(value) in ATOMS or id(value) in self.copies:  # as what a method is of
            return False
        if id(value) in self.memo or isinstance(value, torch.nn.Module):
            return True
        if isinstance(value, torch.Tensor):  # large ones, of other models, are put back
            is_small = value.requires_grad or value.nbytes <= _MOST_COPIED
            return self.is_real and is_small
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            parts = self._met_in(value)
        elif isinstance(value, types.MethodType):
            parts = [value.__func__, value.__self__]
        elif isinstance(value, partial):
            parts = [value.func, value.args, value.keywords]
        elif type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS:
            self.met[id(value)] = value
            parts = list(value.values() if isinstance(value, dict) else value)
        elif opens and _is_plain_object(value):
            self.met[id(value)] = value
            parts, opens = list(attributes_of(value).values()), False
        else:
            parts = []
        # Of all of them: what is met is put back.
        if ATOMS.issuperset(map(type, parts)):
            return False
        return any([self._reaches(part, seen, opens) for part in parts])

    def _met_in(self, function: types.FunctionType) -> list[Any]:
        """What a function reaches directly."""
        cells = function.__closure__ or ()
        self.met[id(function)] = function
        self.met.update({id(cell): cell for cell in cells})
        parts = [*map(contents_of, cells), *_named_globals(function).values()]
        return [*parts, function.__defaults__, function.__kwdefaults__]

    def _deepcopy(self, value: Any) -> Any:
        """A copy of a module or tensor that the model does not hold.

        Parameters of such a module are not changed in forward: the copy has the same
        ones.
        """
        if isinstance(value, torch.nn.Module):
            for parameter in value.parameters():
                self.memo.setdefault(id(parameter), parameter)
        return copy.deepcopy(value, self.memo)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        own_cells = tuple(self.cells.get(id(cell), types.CellType()) for cell in cells)
        replaced = self.namespaces.get(id(function.__globals__), function.__globals__)
        names = {
            name: value
            for name, value in _named_globals(function).items()
            if self._reaches(value, set())
        }
        if names and replaced is function.__globals__:
            replaced = self.namespaces[id(replaced)] = dict(replaced)
        return self._filled(function, own_cells, replaced, names)

    def _filled(
        self,
        function: types.FunctionType,
        own_cells: tuple[types.CellType, ...],
        namespace: dict[str, Any],
        names: dict[str, Any],
    ) -> types.FunctionType:
        """A function of cells and a namespace, which then get what they hold."""
        kept = []
        for cell, own_cell in zip(function.__closure__ or (), own_cells, strict=True):
            is_own = id(cell) in self.cells or self._reaches(contents_of(cell), set())
            kept.append(own_cell if is_own else cell)
        made = types.FunctionType(
            function.__code__, namespace, function.__name__, None, tuple(kept) or None
        )
        self.memo[id(function)] = made  # before what it reaches: it may reach itself
        for cell, own_cell in zip(function.__closure__ or (), kept, strict=True):
            if own_cell is not cell and id(cell) not in self.cells:
                self.cells[id(cell)] = own_cell
                own_cell.cell_contents = self.of(contents_of(cell))
        for name, value in names.items():
            namespace[name] = self.of(value)
        made.__defaults__ = self.of(function.__defaults__)
        made.__kwdefaults__ = self.of(function.__kwdefaults__)
        made.__dict__.update(function.__dict__)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        return made

    def _container(self, value: Any, of: Callable[[Any], Any]) -> Any:
        if isinstance(value, tuple):
            return tuple(map(of, value))
        made = self.memo[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            made.update({key: of(item) for key, item in value.items()})
        elif isinstance(value, set):
            made.clear()
            made.update(map(of, value))
        else:
            made.clear()
            made.extend(map(of, value))
        return made

    def _object(self, value: Any) -> Any:
        made = self.memo[id(value)] = object.__new__(type(value))
        attributes = attributes_of(value).items()
        vars(made).update({n: self.of(item, opens=False) for n, item in attributes})
        return made


def _is_plain_object(value: Any) -> bool:
    """Whether an object is nothing but its attributes; asks nothing of the object."""
    kind: Any = type(value)
    others = (type, types.ModuleType, torch.nn.Module, torch.optim.Optimizer)
    return (
        not issubclass(kind, (*others, *FUNCTIONS))
        and kind.__new__ is object.__new__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__dictoffset__ != 0
    )


def _named_globals(function: types.FunctionType) -> dict[str, Any]:
    """Global objects that a function of the user's names, and that it may reach."""
    if not is_users(function.__code__.co_filename):
        return {}
    namespace = function.__globals__
    values = {n: namespace[n] for n in _names(function.__code__) if n in namespace}
    return {n: value for n, value in values.items() if _is_looked_at(value, namespace)}


def _is_looked_at(value: Any, namespace: dict[str, Any]) -> bool:
    """Whether a global object is: of functions those of the same file."""
    if type(value) in weakref.ProxyTypes:  # of something that may be gone
        return False
    if isinstance(value, types.FunctionType):
        return value.__globals__ is namespace
    kinds = (torch.nn.Module, torch.Tensor, *FUNCTIONS, *_CONTAINERS)
    return issubclass(type(value), kinds) or _is_plain_object(value)


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes in a function and those that it defines."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
