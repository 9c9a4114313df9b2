"""Attributes of modules, which a rerun must find and leave as forward did.

A module may count its calls, keep its last output, replace a buffer or have its
parameters swapped (`torch.func.functional_call`) while ``forward`` runs. Run a second
time in backward, it would do that twice, or meet other tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, type(None))
_TENSORS = ("_parameters", "_buffers")
_Attributes = dict[str, Any]


class _Owner:
    """The attributes of one module, sorted by what a snapshot takes of them.

    Attributes:
        own: All of them.
        types: Their types when they were sorted,
        plain: and the names of plain values, `None` among them,
        tensors: and of tensors other than parameters and buffers.
    """

    __slots__ = ("own", "plain", "tensors", "types")

    def __init__(self, own: _Attributes) -> None:
        self.own = own
        self.sort()

    def sort(self) -> None:
        """Sort all attributes by their types."""
        own = self.own
        self.types = tuple(map(type, own.values()))
        self.plain = tuple(name for name, v in own.items() if isinstance(v, _PLAIN))
        self.tensors = tuple(n for n, v in own.items() if isinstance(v, torch.Tensor))

    def take(self) -> _Taken:
        """Snapshot of the attributes as they are now."""
        own = self.own
        if tuple(map(type, own.values())) != self.types:
            self.sort()
        try:
            plain = [own[name] for name in self.plain]
            held = [(own, name, own[name]) for name in self.tensors]
        except KeyError:  # others, of the same types
            self.sort()
            return self.take()
        for kind in _TENSORS:
            tensors = own[kind]
            if tensors:
                held += [(tensors, n, t) for n, t in tensors.items() if t is not None]
        refs = [(place, name, weakref.ref(tensor)) for place, name, tensor in held]
        return own, self.plain, plain, refs


_Reference = tuple[_Attributes, str, weakref.ref[torch.Tensor]]
_Taken = tuple[_Attributes, tuple[str, ...], list[Any], list[_Reference]]


class Attributes:
    """What the attributes of a module and of all inside it were at one moment.

    Plain values and which tensors stood where; tensors are not kept alive.
    """

    __slots__ = ("_kept", "_taken")

    def __init__(self, taken: list[_Taken]) -> None:
        self._taken = taken
        self._kept: list[torch.Tensor] = []

    def keep(self) -> None:
        """Keep the tensors alive from now on."""
        self._kept = list(self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Tensors among the attributes that are alive."""
        for *_, refs in self._taken:
            for *_, ref in refs:
                tensor = ref()
                if tensor is not None:
                    yield tensor

    def resume(self) -> _Present:
        """Set plain values and living tensors back to the snapshot; containers stay.

        Returns:
            What restores the present.
        """
        present = _Present([own for own, *_ in self._taken])
        for own, names, values, refs in self._taken:
            own.update(zip(names, values, strict=True))
            for place, name, ref in refs:
                tensor = ref()
                if tensor is not None:
                    place[name] = tensor
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
            (own, dict(own), [(v, v.copy()) for v in own.values() if _is_container(v)])
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
                    container.clear()
                    if isinstance(container, list):
                        container.extend(content)
                    else:
                        container.update(content)


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict, set))  # empty ones too: they may fill


def _same(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects that a copy of it holds."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), content.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    return all(a is b for a, b in zip(container, content, strict=True))
