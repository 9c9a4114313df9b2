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


class Case(NamedTuple):
    """When an op runs again.

    Attributes:
        bound: Time that no such choice is below.
        first, last: Its occasions, by number; both -1 if it does not.
    """

    bound: float
    first: int
    last: int

    @property
    def is_single(self) -> bool:
        """Whether it is known when it runs, or that it does not."""
        return self.first == self.last


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


def cases(
    steps: Sequence[int],
    make_model: Callable[[], GraphModel],
    solve: Callable[[GraphModel, Case], float | None],
    may_go_on: Callable[[], bool],
) -> list[Case]:
    """When an op may run again, as far as choices of use do; least bound first.

    Args:
        steps: The occasions of the op.
        make_model: Makes a model; each part of the occasions has its own, as rows of
            others would only make it larger.
        solve: Bound on a case's choices, None if none is of use.
        may_go_on: Whether more intervals are to be halved.
    """
    size = -(-len(steps) // _PARTS)
    starts = range(0, len(steps), size)
    ends: list[Case] = []
    queue: list[tuple[Case, GraphModel]] = []
    pending = [
        (Case(0.0, i, min(i + size, len(steps)) - 1), make_model()) for i in starts
    ]
    pending.append((Case(0.0, -1, -1), make_model()))
    while pending:
        for case, model in pending:
            bound = solve(model, case)
            if bound is None:
                continue
            case = case._replace(bound=bound)
            if case.is_single:
                ends.append(case)
            else:
                queue.append((case, model))
        pending = []
        if queue and may_go_on():
            queue.sort(key=lambda one: one[0], reverse=True)
            (_, first, last), model = queue.pop()
            middle = (first + last) // 2
            halves = Case(0.0, first, middle), Case(0.0, middle + 1, last)
            pending = [(half, model) for half in halves]
    return sorted([*ends, *(case for case, _ in queue)])


def add_rows(model: GraphModel, op: int, case: Case) -> None:
    """Add what a case's memory is capped by."""
    if case.first >= 0:
        steps = model.occasions(op)
        model.add_interval_row(op, steps[case.first], steps[case.last])
        if case.is_single:
            model.add_row(Position(steps[case.first], op))


@contextmanager
def within(model: GraphModel, op: int, case: Case) -> Iterator[None]:
    """The op runs again at one of a case's occasions, or never."""
    steps = model.occasions(op)
    if case.last < 0:
        changes = [(model.run[op], "upBound", 0.0)]
    else:
        changes = [(model.has_run(op, steps[case.last]), "lowBound", 1.0)]
        if case.first > 0:
            before = model.has_run(op, steps[case.first - 1])
            changes.append((before, "upBound", 0.0))
    bounds = [(x, name, getattr(x, name)) for x, name, _ in changes]
    for x, name, bound in changes:
        setattr(x, name, bound)
    try:
        yield
    finally:
        for x, name, bound in bounds:
            setattr(x, name, bound)
