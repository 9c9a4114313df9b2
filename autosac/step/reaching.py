"""What a function reaches besides its arguments: modules, tensors and generators.

Found where Python keeps them: the function itself, the object it is bound to, its
closure, defaults and globals, and attributes of these that it names.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from autosac import _compat
from autosac.pytrees import contents
from autosac.step.random_streams import generators_kept

_FUNCTION = types.FunctionType
_FOUND_IN_MODULES = (torch.nn.Module, torch.Tensor, torch.Generator)  # of Python


@dataclass(slots=True)
class Reached:
    """Modules, tensors and generators that a callable reaches by itself.

    Attributes:
        modules: In the order of finding; what is inside one of them is not listed.
        tensors: Those that belong to no module,
        generators: and such random generators.
    """

    modules: list[torch.nn.Module] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)

    def parameters(self) -> list[torch.Tensor]:
        """Tensors that require gradients, each once."""
        owned = (p for module in self.modules for p in module.parameters())
        tensors = {id(t): t for t in (*owned, *self.tensors) if t.requires_grad}
        return list(tensors.values())

    def constants(self) -> list[torch.Tensor]:
        """Parameters and other tensors without gradients, each once; no buffers."""
        owned = (p for module in self.modules for p in module.parameters())
        tensors = {id(t): t for t in (*owned, *self.tensors) if not t.requires_grad}
        return list(tensors.values())

    def all_generators(self) -> list[torch.Generator]:
        """Random generators, those of modules too, each once; not PyTorch's default."""
        inner = (part for module in self.modules for part in module.modules())
        owned = [value for part in inner for value in vars(part).values()]
        generators = [g for g in owned if isinstance(g, torch.Generator)]
        return list(dict.fromkeys([*generators, *self.generators]))


def reached(function: Callable[..., Any]) -> Reached:
    """Find what a callable reaches by itself."""
    reach = Reached()
    _visit(function, frozenset(), reach, set())
    return reach


def op_generators(func: Any) -> tuple[torch.Generator, ...]:
    """Random generators that the Python code of an operator's kernels reaches."""
    reaches = map(reached, _compat.python_kernels(func))
    return tuple(dict.fromkeys(g for reach in reaches for g in reach.all_generators()))


def op_generators_kept(funcs: Iterable[Any]) -> AbstractContextManager[None]:
    """Restore the random generators that operators have of their own."""
    return generators_kept(g for func in set(funcs) for g in op_generators(func))


def _visit(value: Any, names: frozenset[str], reach: Reached, seen: set[int]) -> None:
    """Look at one value, which is reached by code that mentions ``names``."""
    if isinstance(value, torch.nn.Module):
        if id(value) not in seen:
            reach.modules.append(value)
            seen.update(map(id, value.modules()))
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        reach.tensors.append(value)
    elif isinstance(value, torch.Generator):
        reach.generators.append(value)
    elif isinstance(value, types.ModuleType):
        for name in sorted(names & value.__dict__.keys()):
            if isinstance(value.__dict__[name], _FOUND_IN_MODULES):
                _visit(value.__dict__[name], names, reach, seen)
    elif isinstance(value, _FUNCTION):
        _visit_function(value, reach, seen)
    elif isinstance(value, types.MethodType):
        _visit_bound(value.__self__, value.__func__, reach, seen)
    elif not isinstance(value, type):
        for part in _parts(value):
            _visit(part, names, reach, seen)
        call = inspect.getattr_static(type(value), "__call__", None)
        if isinstance(call, _FUNCTION):
            _visit_bound(value, call, reach, seen)
        _visit_members(value, names, reach, seen)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    else:
        yield from contents(value)


def _visit_function(
    function: types.FunctionType, reach: Reached, seen: set[int]
) -> None:
    names = _names(function.__code__)
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    if not function.__module__.startswith("torch."):
        variables = function.__globals__
        values += [variables[name] for name in sorted(names & variables.keys())]
    for value in values:
        _visit(value, names, reach, seen)


def _visit_bound(
    owner: Any, function: Callable[..., Any], reach: Reached, seen: set[int]
) -> None:
    if id(function) in seen:
        return
    _visit(function, frozenset(), reach, seen)
    _visit(owner, frozenset(), reach, seen)
    if isinstance(function, _FUNCTION):
        _visit_members(owner, _names(function.__code__), reach, seen)


def _visit_members(
    owner: Any, names: frozenset[str], reach: Reached, seen: set[int]
) -> None:
    """Look at the attributes and methods of an object that code mentions."""
    if isinstance(owner, torch.nn.Module):
        return
    own = getattr(owner, "__dict__", {})
    for name in sorted(names):
        if name in own:
            _visit(own[name], names, reach, seen)
        elif own and isinstance(method := getattr(type(owner), name, None), _FUNCTION):
            _visit_bound(owner, method, reach, seen)


def _names(code: types.CodeType) -> frozenset[str]:
    """Globals and attributes that code mentions, functions inside it included."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, type(code))]
    return frozenset(code.co_names).union(*inner)
