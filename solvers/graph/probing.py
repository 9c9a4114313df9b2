"""Probing: before which step does a large op run again, if at all?

A relaxation keeps a part of a large value and makes the rest again before many steps, a
little before each, so that no position sees much of it. Whole, its op runs again before
one step, or never. What that costs at least is found by halving intervals of steps,
those of least bound first: each is a relaxation with bounds of two variables changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

from . import fractional
from .model import GraphModel
from .recomputation import Position

_RUNS = 1e-2  # how much of an op must run again
_PARTS = 16  # intervals of occasions to begin with: a heuristic
_WHOLE = 1 - 1e-6


class Leaf(NamedTuple):
    """When an op runs again.

    Attributes:
        bound: Objective that no such choice is below.
        first, last: Its occasions, by number; both -1 if it does not.
    """

    bound: float
    first: int
    last: int


def op_in_parts(model: GraphModel, tried: Set[int]) -> int | None:
    """The op of most bytes that the variables have run again in parts.

    Args:
        model: Solved as a relaxation; its variables hold values.
        tried: Ops that are left out.
    """
    best: tuple[int, int] | None = None
    for op, again in fractional.Shares(model).again.items():
        if op in tried or again[-1] < _RUNS or len(model.occasions(op)) < 2:
            continue
        steps = again[1:] - again[:-1]
        if steps.max() < _WHOLE:
            best = max(best or (0, 0), (model.own_bytes(op), op))
    return None if best is None else best[1]


def leaves(
    steps: Sequence[int],
    make_model: Callable[[], GraphModel],
    solve: Callable[[GraphModel, Leaf], float | None],
    may_go_on: Callable[[], bool],
) -> list[Leaf]:
    """When an op may run again, as far as choices of use do; least bound first.

    Args:
        steps: The occasions of the op.
        make_model: Makes a model; each part of the occasions has its own, as rows of
            others would only make it larger.
        solve: Bound on a leaf's choices, None if none is of use.
        may_go_on: Whether more leaves are to be halved.
    """
    size = -(-len(steps) // _PARTS)
    starts = range(0, len(steps), size)
    ends: list[Leaf] = []
    queue: list[tuple[Leaf, GraphModel]] = []
    pending = [(Leaf(0.0, i, min(i + size, len(steps)) - 1), make_model()) for i in starts]
    pending.append((Leaf(0.0, -1, -1), make_model()))
    while pending:
        for leaf, model in pending:
            bound = solve(model, leaf)
            if bound is None:
                continue
            leaf = leaf._replace(bound=bound)
            if leaf.first == leaf.last:
                ends.append(leaf)
            else:
                queue.append((leaf, model))
        pending = []
        if queue and may_go_on():
            queue.sort(key=lambda one: one[0], reverse=True)
            (_, first, last), model = queue.pop()
            middle = (first + last) // 2
            halves = Leaf(0.0, first, middle), Leaf(0.0, middle + 1, last)
            pending = [(half, model) for half in halves]
    return sorted([*ends, *(leaf for leaf, _ in queue)])


def add_rows(model: GraphModel, op: int, leaf: Leaf) -> None:
    """Add what a leaf's memory is capped by."""
    if leaf.first >= 0:
        steps = model.occasions(op)
        model.add_interval_row(op, steps[leaf.first], steps[leaf.last])
        if leaf.first == leaf.last:
            model.add_row(Position(steps[leaf.first], op))


@contextmanager
def within(model: GraphModel, op: int, leaf: Leaf) -> Iterator[None]:
    """The op runs again at one of a leaf's occasions, or never."""
    steps = model.occasions(op)
    if leaf.last < 0:
        changes = [(model.run[op], "upBound", 0.0)]
    else:
        changes = [(model.has_run(op, steps[leaf.last]), "lowBound", 1.0)]
        if leaf.first > 0:
            before = model.has_run(op, steps[leaf.first - 1])
            changes.append((before, "upBound", 0.0))
    bounds = [(x, name, getattr(x, name)) for x, name, _ in changes]
    for x, name, bound in changes:
        setattr(x, name, bound)
    yield
    for x, name, bound in bounds:
        setattr(x, name, bound)
