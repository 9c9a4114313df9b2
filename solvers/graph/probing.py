"""Probing: before which step does a large op run again, if at all?

A relaxation keeps a part of a large value and makes the rest again before many steps, a
little before each, so that no position sees much of it. Whole, its op runs again before
one step, or never. What that costs at least is found by halving intervals of steps,
those of least bound first: each is a relaxation with bounds of two variables changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

from ..milp import pulp_runner
from ..milp.solution import Backend
from . import fractional
from .model import GraphModel
from .recomputation import Position

_RUNS = 1e-2  # how much of an op must run again
_PARTS = 16  # intervals of occasions to begin with: a heuristic
_WHOLE = 1 - 1e-6
OF_A_ROOT = 0.1  # as a relaxation takes less, and begins where the last ended
_ROWS_A_ROUND = 4  # positions that become rows at once: a heuristic
_ROUNDS = 3  # of adding them for one occasion; none for intervals, as halves follow


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


def branch(
    steps: Sequence[int],
    make_model: Callable[[], GraphModel],
    solve: Callable[[GraphModel, Case], float | None],
    close: Callable[[GraphModel, Case], float],
    may_go_on: Callable[[], bool],
) -> float:
    """Tell cases of an op apart, least bound first.

    Args:
        steps: The occasions of the op.
        make_model: Makes a model; each part of the occasions has its own, as rows of
            others would only make it larger.
        solve: Bound on a case's choices, None if none is of use.
        close: What is proven of a case where it is known when the op runs: the last
            that is done about it.
        may_go_on: Whether more is to be done.

    Returns:
        The least bound of all cases, infinite if none is of use.
    """
    size = -(-len(steps) // _PARTS)
    starts = range(0, len(steps), size)
    pending = [
        (Case(0.0, i, min(i + size, len(steps)) - 1), make_model()) for i in starts
    ]
    pending.append((Case(0.0, -1, -1), make_model()))
    queue: list[tuple[Case, GraphModel]] = []
    closed = math.inf
    while pending:
        for case, model in pending:
            if (bound := solve(model, case)) is not None:
                queue.append((case._replace(bound=bound), model))
        pending = []
        queue.sort(key=lambda one: one[0], reverse=True)
        while queue and queue[-1][0].bound < closed and may_go_on() and not pending:
            case, model = queue.pop()
            if case.is_single:
                closed = min(closed, close(model, case))
            else:
                middle = (case.first + case.last) // 2
                halves = (case.first, middle), (middle + 1, case.last)
                pending = [(Case(0.0, *half), model) for half in halves]
    return min([closed, *(case.bound for case, _ in queue)])


def bound_of(
    model: GraphModel,
    op: int,
    case: Case,
    most: float,
    pay: Callable[[int], None],
    backend: Backend,
) -> float | None:
    """Bound on a case's choices, see `GraphModel.bound`; None if none is of use.

    Args:
        model: What rows it lacks is added.
        op: The op.
        case: The case.
        most: What choices must be below to be of use.
        pay: Told the work of each relaxation.
        backend: Which LP solver to run.
    """
    add_rows(model, op, case)
    left = _ROUNDS if case.is_single else 0
    with within(model, op, case):
        while True:
            pay(int(OF_A_ROOT * pulp_runner.work_of(model.model)[0]))
            outcome = pulp_runner.run(
                model.model, backend=backend, relaxed=True, again=True
            )
            if not outcome.termination.has_incumbent or outcome.bound is None:
                return None
            bound = model.bound(outcome.bound)
            if bound >= most:
                return None
            if not left:
                return bound
            left -= 1
            broken = fractional.broken(model, model.cap_bytes(outcome.bound))
            new = [position for position in broken if position not in model.rows]
            if not new:
                return bound
            for position in new[:_ROWS_A_ROUND]:
                model.add_row(position)


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
