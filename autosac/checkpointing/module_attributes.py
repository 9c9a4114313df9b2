"""Attributes of modules, which a rerun must find and leave as forward did.

A module may count its calls, keep its last output, replace a buffer or have its
parameters swapped (`torch.func.functional_call`) while ``forward`` runs. Run a second
time in backward, it would do that twice, or meet other tensors.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch

from autosac.step.containers import CONTAINERS, base_of, set_items

_PLAIN = (bool, int, float, complex, str, type(None))
_DEEPEST = 3  # containers in containers
_OF_PYTORCH = frozenset(vars(torch.nn.Module()))
_TENSORS = ("_parameters", "_buffers")
_Attributes = dict[str, Any]


class _Owner:
    """The attributes of one module, sorted by what a snapshot takes of them.

    Attributes:
        own: All of them.
        names: Their names when they were sorted,
        types: their types,
        plain: and the names of plain values, `None` among them,
        tensors: of tensors other than parameters and buffers,
        containers: and of containers of the model's own.
    """

    __slots__ = ("containers", "names", "own", "plain", "tensors", "types")

    def __init__(self, own: _Attributes) -> None:
        self.own = own
        self.sort()

    def sort(self) -> None:
        """Sort all attributes by their types."""
        own = self.own
        self.names = frozenset(own)
        self.types = tuple(map(type, own.values()))
        self.plain = tuple(name for name, v in own.items() if isinstance(v, _PLAIN))
        self.tensors = tuple(n for n, v in own.items() if isinstance(v, torch.Tensor))
        self.containers = tuple(
            name
            for name, value in own.items()
            if isinstance(value, CONTAINERS) and name not in _OF_PYTORCH
        )

    def take(self) -> _Taken:
        """Snapshot of the attributes as they are now."""
        own = self.own
        if tuple(map(type, own.values())) != self.types:
            self.sort()
        try:
            plain = [own[name] for name in self.plain]
            held = [(own, name, own[name]) for name in self.tensors]
            contents = [(own, name, _Copy(own[name])) for name in self.containers]
        except KeyError:  # others, of the same types
            self.sort()
            return self.take()
        for kind in _TENSORS:
            tensors = own[kind]
            if tensors:
                held += [(tensors, n, t) for n, t in tensors.items() if t is not None]
        if any(buffer is None for buffer in own["_buffers"].values()):
            buffers = _Copy(own["_buffers"])  # which forward may set
            contents.append((own, "_buffers", buffers))
        refs = [(place, name, weakref.ref(tensor)) for place, name, tensor in held]
        return own, self.names, self.plain, plain, refs, contents


def _nested(values: Iterable[Any], depth: int = _DEEPEST) -> Iterator[Any]:
    """Containers among values, and in these."""
    for value in values:
        if isinstance(value, CONTAINERS):
            yield value
            if depth:
                items = value.values() if isinstance(value, dict) else value
                yield from _nested(items, depth - 1)


class _Weak(weakref.ref[torch.Tensor]):
    """Stands in for a tensor; a module's own weak references are values like others."""

    __slots__ = ()


class _Copy:
    """What a container held, and containers in it; keeps no tensor alive.

    One that holds tensors is not kept alive either: a module may have put another into
    its place since, and its tensors would not die.

    Args:
        container: The container.
        depth: How many more containers are looked into.
    """

    __slots__ = ("_address", "_container", "_content", "_type")

    def __init__(self, container: Any, depth: int = _DEEPEST) -> None:
        values = container.values() if isinstance(container, dict) else container
        items = [_reference(value, depth) for value in values]
        is_dict = isinstance(container, dict)
        self._content: Any = (
            dict(zip(container, items, strict=True)) if is_dict else items
        )
        self._type, self._address = type(container), id(container)
        self._container = None if self.holds_tensors() else container

    def _items(self) -> Iterable[Any]:
        content = self._content
        return content.values() if isinstance(content, dict) else content

    def holds_tensors(self) -> bool:
        """Whether it held any, or a container in it did."""
        return any(
            isinstance(item, _Weak)
            or (isinstance(item, _Copy) and item.holds_tensors())
            for item in self._items()
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those that are alive."""
        for item in self._items():
            if isinstance(item, _Copy):
                yield from item.tensors()
            elif isinstance(item, _Weak) and (tensor := item()) is not None:
                yield tensor

    def restored(self, present: Any) -> Any:
        """A container that holds what it held, unless a tensor is gone.

        Args:
            present: What stands in its place now.
        """
        is_same = type(present) is self._type and id(present) == self._address
        container = present if is_same else self._container
        if any(isinstance(item, _Weak) and item() is None for item in self._items()):
            return present if container is None else container
        content = self._content_beside(present if container is None else container)
        if container is None:
            container = self._empty(present)
        if container is None:
            return present
        set_items(container, base_of(container), content)
        return container

    def _content_beside(self, present: Any) -> Any:
        if isinstance(self._content, dict):
            others = present if isinstance(present, dict) else {}
            return {k: _value(v, others.get(k)) for k, v in self._content.items()}
        beside = list(present) if isinstance(present, (list, deque)) else []
        beside += [None] * (len(self._content) - len(beside))
        return [_value(v, o) for v, o in zip(self._content, beside, strict=False)]

    def _empty(self, present: Any) -> Any:
        if self._type in (list, dict, set):
            return self._type()
        if type(present) is not self._type:
            return None
        empty = present.copy()  # with what its type keeps besides
        base_of(empty).clear(empty)
        return empty


def _reference(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return _Weak(value)
    return _Copy(value, depth - 1) if depth and isinstance(value, CONTAINERS) else value


def _value(item: Any, present: Any) -> Any:
    if isinstance(item, _Copy):
        return item.restored(present)
    return item() if isinstance(item, _Weak) else item


_Reference = tuple[_Attributes, str, weakref.ref[torch.Tensor]]
_Contents = list[tuple[_Attributes, str, _Copy]]
_Names = tuple[str, ...]
_Taken = tuple[
    _Attributes, frozenset[str], _Names, list[Any], list[_Reference], _Contents
]


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
            for *_, copied in contents:
                yield from copied.tensors()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Tensors among the attributes that are alive."""
        for *_, refs, _ in self._taken:
            for *_, ref in refs:
                tensor = ref()
                if tensor is not None:
                    yield tensor

    def resume(self) -> _Present:
        """Set plain values and living tensors back to the snapshot, and containers.

        What was not there goes. A container of a tensor that is gone stays as it is.

        Returns:
            What restores the present.
        """
        present = _Present([own for own, *_ in self._taken])
        for own, names, plain, values, refs, contents in self._taken:
            _keep_only(own, names)
            own.update(zip(plain, values, strict=True))
            buffers = own["_buffers"]
            if all(name != "_buffers" for _, name, _ in contents):
                _keep_only(buffers, {n for place, n, _ in refs if place is buffers})
            for place, name, ref in refs:
                tensor = ref()
                if tensor is not None:
                    place[name] = tensor
            for place, name, copied in contents:
                place[name] = copied.restored(place.get(name))
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
            set_items(own, dict, attributes)
            for container, content in containers:
                set_items(container, base_of(container), content)


def _keep_only(attributes: _Attributes, names: Set[str]) -> None:
    for name in attributes.keys() - names:
        del attributes[name]
