"""Attributes of modules, which a rerun must find and leave as forward did.

A module may count its calls, keep its last output or replace a buffer in ``forward``.
Run a second time in backward, it would do that twice.
"""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, type(None))
_Attributes = dict[str, Any]


class Attributes:
    """What the attributes of a module and of all inside it were at one moment.

    Args:
        module: The module.
    """

    __slots__ = ("_plain",)

    def __init__(self, module: torch.nn.Module) -> None:
        self._plain = [
            (own, {name: v for name, v in own.items() if isinstance(v, _PLAIN)})
            for own in (vars(inner) for inner in module.modules())
        ]

    def resume(self) -> _Present:
        """Set plain values back to that moment; tensors and containers stay.

        Returns:
            What restores the present.
        """
        present = _Present([own for own, _ in self._plain])
        for own, plain in self._plain:
            own.update(plain)
        return present


class _Present:
    """All attributes of modules, with the contents of their lists, dicts and sets."""

    __slots__ = ("_saved",)

    def __init__(self, owners: list[_Attributes]) -> None:
        self._saved = [
            (own, dict(own), [(v, v.copy()) for v in own.values() if _is_container(v)])
            for own in owners
        ]

    def restore(self) -> None:
        """Undo what was done to them since."""
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
