"""Attributes of modules, which a rerun must find and leave as forward did.

A module may count its calls, keep its last output, replace a buffer or have its
parameters swapped (`torch.func.functional_call`) while ``forward`` runs. Run a second
time in backward, it would do that twice, or meet other tensors.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set, deque)
_DEEPEST = 3  # containers in containers
_OF_PYTORCH = frozenset(vars(torch.nn.Module()))
_TENSORS = ("_parameters", "_buffers")
_Attributes = dict[str, Any]


class _Owner:
    """The attributes of one module, sorted by what a snapshot takes of them.

    Attributes:
        own: All of them.
        types: Their types when they were sorted,
        plain: and the names of plain values, `None` among them,
        tensors: of tensors other than parameters and buffers,
        containers: and of containers of the model's own.
    """

    __slots__ = ("containers", "own", "plain", "tensors", "types")

    def __init__(self, own: _Attributes) -> None:
        self.own = own
        self.sort()

    def sort(self) -> None:
        """Sort all attributes by their types."""
        own = self.own
        self.types = tuple(map(type, own.values()))
        self.plain = tuple(name for name, v in own.items() if isinstance(v, _PLAIN))
        self.tensors = tuple(n for n, v in own.items() if isinstance(v, torch.Tensor))
        self.containers = tuple(
            name
            for name, value in own.items()
            if isinstance(value, _CONTAINERS) and name not in _OF_PYTORCH
        )

    def take(self) -> _Taken:
        """Snapshot of the attributes as they are now."""
        own = self.own
        if tuple(map(type, own.values())) != self.types:
            self.sort()
        try:
            plain = [own[name] for name in self.plain]
            held = [(own, name, own[name]) for name in self.tensors]
            outermost = [own[name] for name in self.containers]
        except KeyError:  # others, of the same types
            self.sort()
            return self.take()
        for kind in _TENSORS:
            tensors = own[kind]
            if tensors:
                held += [(tensors, n, t) for n, t in tensors.items() if t is not None]
        if any(buffer is None for buffer in own["_buffers"].values()):
            outermost.append(own["_buffers"])  # which forward may set
        refs = [(place, name, weakref.ref(tensor)) for place, name, tensor in held]
        contents = [(c, _weakly(c)) for c in _nested(outermost)] if outermost else []
        return own, self.plain, plain, refs, contents


def _nested(values: Iterable[Any], depth: int = _DEEPEST) -> Iterator[Any]:
    """Containers among values, and in these."""
    for value in values:
        if isinstance(value, _CONTAINERS):
            yield value
            if depth:
                items = value.values() if isinstance(value, dict) else value
                yield from _nested(items, depth - 1)


def _weakly(container: Any) -> Any:
    """A copy of what a container holds, which keeps no tensor alive."""
    if isinstance(container, dict):
        return {key: _reference(value) for key, value in container.items()}
    return [_reference(value) for value in container]


class _Weak(weakref.ref[torch.Tensor]):
    """Stands in for a tensor; a module's own weak references are values like others."""

    __slots__ = ()


def _reference(value: Any) -> Any:
    return _Weak(value) if isinstance(value, torch.Tensor) else value


def _strongly(content: Any) -> Any:
    """What a container held, from its copy."""
    if isinstance(content, dict):
        return {key: _value(value) for key, value in content.items()}
    return [_value(value) for value in content]


def _value(value: Any) -> Any:
    return value() if isinstance(value, _Weak) else value


def _tensors_of(content: Any) -> Iterator[torch.Tensor | None]:
    values = content.values() if isinstance(content, dict) else content
    return (value() for value in values if isinstance(value, _Weak))


def _refill(container: Any, content: Any) -> None:
    """Make a container hold what it held."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


_Reference = tuple[_Attributes, str, weakref.ref[torch.Tensor]]
_Contents = list[tuple[Any, Any]]
_Taken = tuple[_Attributes, tuple[str, ...], list[Any], list[_Reference], _Contents]


class Attributes:
    """What the attributes of a module and of all inside it were at one moment.

    Plain values, what containers held and which tensors stood where; tensors are not
    kept alive.
    """

    __slots__ = ("_kept", "_taken")

    def __init__(self, taken: list[_Taken]) -> None:
        self._taken = taken
        self._kept: list[torch.Tensor] = []

    def keep(self) -> None:
        """Keep the tensors alive from now on."""
        self._kept = [*self.tensors(), *self._contained()]

    def _contained(self) -> Iterator[torch.Tensor]:
        """Tensors in containers that are alive."""
        for *_, contents in self._taken:
            for _, content in contents:
                yield from (t for t in _tensors_of(content) if t is not None)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Tensors among the attributes that are alive."""
        for *_, refs, _ in self._taken:
            for *_, ref in refs:
                tensor = ref()
                if tensor is not None:
                    yield tensor

    def resume(self) -> _Present:
        """Set plain values and living tensors back to the snapshot, and containers.

        One that held a tensor which is gone stays as it is.

        Returns:
            What restores the present.
        """
        present = _Present([own for own, *_ in self._taken])
        for own, names, values, refs, contents in self._taken:
            own.update(zip(names, values, strict=True))
            for place, name, ref in refs:
                tensor = ref()
                if tensor is not None:
                    place[name] = tensor
            for container, content in contents:
                if all(tensor is not None for tensor in _tensors_of(content)):
                    _refill(container, _strongly(content))
        return present


class Snapshots:
    """Takes `Attributes` of one module, many times.

    Args:
        module: The module.
    """

    __slots__ = ("_children", "_module", "_owners")

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._owners: list[_Owner] = []
        self._children: list[tuple[_Attributes, tuple[Any, ...]]] = []

    def __reduce__(self) -> tuple[type[Snapshots], tuple[torch.nn.Module]]:
        return Snapshots, (self._module,)  # a copy has looked at nothing yet

    def take(self) -> Attributes:
        """Snapshot of the attributes as they are now."""
        if not self._owners or any(
            tuple(modules.values()) != children for modules, children in self._children
        ):
            of_modules = [vars(module) for module in self._module.modules()]
            self._owners = [_Owner(own) for own in of_modules]
            inner = [own["_modules"] for own in of_modules]
            self._children = [(modules, tuple(modules.values())) for modules in inner]
        return Attributes([owner.take() for owner in self._owners])


class _Present:
    """All attributes of modules, with the contents of their lists, dicts and sets."""

    __slots__ = ("_saved",)

    def __init__(self, owners: list[_Attributes]) -> None:
        self._saved = [
            (own, dict(own), [(c, c.copy()) for c in _nested(own.values())])
            for own in owners
        ]

    def restore(self) -> None:
        """Undo what was done to the attributes since."""
        for own, attributes, containers in self._saved:
            if not _same(own, attributes):
                own.clear()
                own.update(attributes)
            for container, content in containers:
                if not _same(container, content):
                    _refill(container, content)


def _same(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects that a copy of it holds."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), content.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    return all(a is b for a, b in zip(container, content, strict=True))
