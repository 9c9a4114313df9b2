"""Figures of modules as people read them: a tree, equal layers once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from autosac.quantities import format_bytes, format_ms
from autosac.summaries import Table

_MOST_ROWS = 36  # deeper levels that need more are left out
_INDENT = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEstimate:
    """Figures of one module, what runs inside it included.

    Attributes:
        fqn: Its name; '' for the model itself.
        class_name: Name of its class.
        calls: How often a step calls it.
        parameter_bytes: Its parameters,
        gradient_bytes: their gradients,
        buffer_bytes: and its buffers.
        activation_bytes: What it keeps for backward, its output excluded.
        peak_bytes: Results of its ops that are alive at the peak of the step:
            activations, temporaries and gradients that a step makes.
        forward_ms: Time of its forward ops,
        backward_ms: and of the backward ops that belong to it.
        refused: Why it cannot be an AC unit, if that is so.
    """

    fqn: str
    class_name: str
    calls: int
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    activation_bytes: int
    peak_bytes: int
    forward_ms: float
    backward_ms: float
    refused: str | None


def table_of(modules: Sequence[ModuleEstimate]) -> Table:
    """The tree of modules, as deep as a screen holds.

    Neighbours of the same class with equal figures in memory, inside as well, are one
    row with the figures of each, the highest where they differ.

    Args:
        modules: In the order of ``named_modules()``, the model first.
    """
    children: defaultdict[str, list[int]] = defaultdict(list)
    keys: list[Hashable] = [None] * len(modules)
    for i in reversed(range(1, len(modules))):  # children come after their parents
        own = modules[i]
        inside = tuple(keys[j] for j in reversed(children[own.fqn]))
        keys[i] = own.class_name, own.parameter_bytes, own.activation_bytes, inside
        children[own.fqn.rpartition(".")[0]].append(i)

    def rows(fqn: str, depth: int, deepest: int) -> Iterator[tuple[str, ...]]:
        for _, equal in groupby(reversed(children[fqn]), key=keys.__getitem__):
            alike = [modules[i] for i in equal]
            yield _row(alike, depth)
            if depth < deepest:
                yield from rows(alike[0].fqn, depth + 1, deepest)

    shown: tuple[tuple[str, ...], ...] = ()
    for deepest in range(len(modules)):
        deeper = tuple(rows("", 0, deepest))
        if shown and (len(deeper) == len(shown) or len(deeper) > _MOST_ROWS):
            break
        shown = deeper
    heads = ("module", "parameters", "kept", "at the peak", "time")
    return Table(heads=heads, rows=shown, clips=True)


def _row(alike: Sequence[ModuleEstimate], depth: int) -> tuple[str, ...]:
    times = f" x {len(alike)}" if alike[1:] else ""
    name = f"{_INDENT * depth}{_names(alike)} ({alike[0].class_name}){times}"
    is_called = alike[0].calls > 0  # unlike most containers
    time_ms = max(one.forward_ms + one.backward_ms for one in alike)
    return (
        name,
        format_bytes(alike[0].parameter_bytes),
        format_bytes(alike[0].activation_bytes) if is_called else "",
        format_bytes(max(one.peak_bytes for one in alike)),
        format_ms(time_ms) if is_called else "",
    )


def _names(alike: Sequence[ModuleEstimate]) -> str:
    first, *more = (one.fqn.rpartition(".")[2] for one in alike)
    if not more:
        return first
    return f"{first}-{more[-1]}" if first.isdigit() else ", ".join((first, *more))
