"""Positions of the parallel MILP: cells of ticks, and instants of hooks before them.

Every gather before forward or backward and every reduction after backward gets an
instant of its own, at which nothing is computed. Within a cell, instants come before
what else happens there, such as the rerun that backward sets off.

The MILP wants backwards that nest like modules, and siblings one after the other. Where
those of the tape do not (two branches that autograd walks in turn), the later one's
beginning ends the earlier one; the simulation of a plan has the hooks as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autosac.parallel.fsdp_candidates import Candidate
from autosac.step.tape import IntArray

_ENTER, _END, _BEGIN, _FINAL = range(4)  # at one tick in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """First position of a module's forward and backward, and the first one after."""

    forward: tuple[int, int]
    backward: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Positions in order.

    Attributes:
        cell_of: Cell that each position lies in.
        first: First position of each cell, an instant if it has any,
        rest: and the last one, which is none.
        spans: Of each candidate.
    """

    cell_of: IntArray
    first: IntArray
    rest: IntArray
    spans: tuple[Span, ...]


def hook_ticks(candidates: Sequence[Candidate], final: int) -> set[int]:
    """Ticks after which hooks of candidates run: each must be a cell of its own."""
    ticks = {final}
    for candidate in candidates:
        hooks = candidate.hooks
        ticks |= {hooks.pre_forward, hooks.post_forward}
        ticks |= {t for t in (hooks.pre_backward, hooks.post_backward) if t is not None}
    return ticks


def place(candidates: Sequence[Candidate], edges: IntArray, final: int) -> Positions:
    """Number the positions of a step.

    Args:
        candidates: Modules, each after those around it.
        edges: First tick of every cell.
        final: Tick at which backward is over.
    """
    instants: list[list[tuple[int, int]]] = [[] for _ in edges]  # part, candidate
    for part, tick, index in _events(candidates, final):
        cell = int(np.searchsorted(edges, tick, side="right")) - 1
        instants[cell].append((part, index))
    sizes = np.array([len(events) + 1 for events in instants])
    rest = np.cumsum(sizes) - 1
    first = rest - sizes + 1
    position_of: dict[tuple[int, int], int] = {}
    for cell, events in enumerate(instants):
        position_of.update({key: int(first[cell]) + i for i, key in enumerate(events)})

    def cell_at(tick: int) -> int:
        return int(np.searchsorted(edges, tick, side="right")) - 1

    return Positions(
        cell_of=np.repeat(np.arange(len(edges)), sizes),
        first=first,
        rest=rest,
        spans=tuple(
            Span(
                forward=(
                    position_of[_ENTER, i],
                    int(first[cell_at(c.hooks.post_forward)]),
                ),
                backward=(position_of[_BEGIN, i], position_of[_END, i] + 1),
            )
            for i, c in enumerate(candidates)
        ),
    )


def _events(
    candidates: Sequence[Candidate], final: int
) -> Iterator[tuple[int, int, int]]:
    """Kind, tick and candidate of every hook, in an order in which modules nest."""
    for index in sorted(
        range(len(candidates)), key=lambda i: candidates[i].hooks.pre_forward
    ):
        yield _ENTER, candidates[index].hooks.pre_forward, index
    planned = []
    for index, candidate in enumerate(candidates):
        hooks = candidate.hooks
        assert hooks.pre_backward is not None
        # At one tick what ends does so before others begin, inner modules first.
        after = final if hooks.post_backward is None else hooks.post_backward
        planned.append((after, _END, -index, index) if index else (final, _FINAL, 0, 0))
        planned.append((hooks.pre_backward, _BEGIN, index, index))
    is_open: list[int] = []  # candidates in whose backward we are, outermost first
    begun: set[int] = set()

    def close(until: int | None, tick: int) -> Iterator[tuple[int, int, int]]:
        while is_open and is_open[-1] != until:
            yield _END, tick, is_open.pop()

    def begin(index: int, tick: int) -> Iterator[tuple[int, int, int]]:
        if index in begun:
            return
        parent = candidates[index].parent
        if parent is not None:
            yield from begin(parent, tick)
        yield from close(parent, tick)
        begun.add(index)
        is_open.append(index)
        yield _BEGIN, tick, index

    for tick, kind, _, index in sorted(planned):
        if kind == _BEGIN:
            yield from begin(index, tick)
        elif index in is_open:
            if is_open[-1] != index:
                yield from close(index, tick)
            yield _END, tick, is_open.pop()
