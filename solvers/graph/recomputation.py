"""One training step as a graph: which forward values are kept for backward?

A step runs forward ops i = 0..n-1 and then backward ops ("steps") t = 0..T-1. A value
that backward needs and that was not kept is recomputed once: just before the first step
that needs it, with all that this takes and is not there, in forward order. Later uses
read the same copy. Every copy is freed after its last use.

`timeline` gives the memory of every op of such a step, to the byte; `GraphProblem` is
what the greedy (`capuchin.py`) and the MILP (`graph.py`) choose from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class Position(NamedTuple):
    """One op of the step as it runs.

    Attributes:
        step: The backward step that runs or is about to; -1 in forward.
        op: The forward op that runs (in backward: again); None for the step itself.
    """

    step: int
    op: int | None


@dataclass(frozen=True, kw_only=True)
class GraphProblem:
    """Keep-or-recompute choice for the forward values of one training step.

    A *value* is a block of memory that a forward op makes. Parameters and inputs are
    none: they are always there.

    Attributes:
        value_bytes: Size of each value.
        runtime_ms: Time of each forward op.
        workspace_bytes: What each forward op allocates and frees inside itself.
        reads: The values that each forward op reads.
        makes: The values that each forward op makes; each value has one maker.
        pinned: Ops that are never run again.
        returned: Values that live until the end whatever is chosen.
        step_reads: The values that each backward step reads.
        step_bytes: All else that is alive while each step runs: parameters, inputs,
            what backward made, the step's workspace.
        carried_bytes: All else that is alive just before each step.
        other_bytes: All else that is alive in forward: parameters and inputs.
    """

    value_bytes: tuple[int, ...]
    runtime_ms: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    pinned: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()
    step_reads: tuple[tuple[int, ...], ...]
    step_bytes: tuple[int, ...]
    carried_bytes: tuple[int, ...]
    other_bytes: int

    def __post_init__(self) -> None:
        ops = (self.runtime_ms, self.workspace_bytes, self.reads, self.makes)
        steps = (self.step_reads, self.step_bytes, self.carried_bytes)
        for kind, lists in (("op", ops), ("step", steps)):
            if len({len(items) for items in lists}) > 1:
                raise ValueError(f"All lists with an entry per {kind} must agree.")
        all_values = sorted(v for values in self.makes for v in values)
        if all_values != list(range(len(self.value_bytes))):
            raise ValueError("`makes` must name every value exactly once.")
        for i, values in enumerate(self.reads):
            if any(self.maker[v] >= i for v in values):
                raise ValueError(f"`reads[{i}]` must name values made before op {i}.")

    @cached_property
    def maker(self) -> tuple[int, ...]:
        """The op that makes each value."""
        makers = [0] * len(self.value_bytes)
        for i, values in enumerate(self.makes):
            for v in values:
                makers[v] = i
        return tuple(makers)

    @cached_property
    def last_forward_read(self) -> tuple[int, ...]:
        """The last forward op that makes or reads each value."""
        last_ops = list(self.maker)
        for i, values in enumerate(self.reads):
            for v in values:
                last_ops[v] = i
        return tuple(last_ops)

    @cached_property
    def first_need(self) -> dict[int, int]:
        """Values that backward reads -> the first step that does."""
        first_steps: dict[int, int] = {}
        for t, values in enumerate(self.step_reads):
            for v in values:
                first_steps.setdefault(v, t)
        return first_steps

    @cached_property
    def last_need(self) -> dict[int, int]:
        """Values that backward reads -> the last step that does."""
        return {v: t for t, values in enumerate(self.step_reads) for v in values}

    @property
    def kept_plainly(self) -> frozenset[int]:
        """Values that are kept when nothing is recomputed."""
        return frozenset(self.first_need) - self.returned


def rerun_ops(
    problem: GraphProblem, values: Iterable[int], there: Set[int]
) -> set[int]:
    """Ops that must run again to make some values.

    Args:
        problem: The step.
        values: What is wanted.
        there: Values that are available.

    Raises:
        ValueError: A pinned op would have to run again.
    """
    ops: set[int] = set()
    pending = [v for v in values if v not in there]
    while pending:
        op = problem.maker[pending.pop()]
        if op in ops:
            continue
        if op in problem.pinned:
            raise ValueError(f"Op {op} is pinned: what it makes must be kept.")
        ops.add(op)
        pending += [v for v in problem.reads[op] if v not in there]
    return ops


def reruns(problem: GraphProblem, kept: Set[int]) -> dict[int, tuple[int, ...]]:
    """Steps -> the forward ops that run again just before each, in forward order.

    Raises:
        ValueError: As `rerun_ops`.
    """
    there = set(kept) | problem.returned
    by_step: dict[int, tuple[int, ...]] = {}
    for t, values in enumerate(problem.step_reads):
        ops = rerun_ops(problem, values, there)
        if ops:
            by_step[t] = tuple(sorted(ops))
            there.update(v for op in ops for v in problem.makes[op])
    return by_step


def recompute_ms(problem: GraphProblem, kept: Set[int]) -> float:
    """Time of all ops that run again."""
    again = reruns(problem, kept)
    return math.fsum(problem.runtime_ms[op] for ops in again.values() for op in ops)


class Moment(NamedTuple):
    """Memory while one op runs."""

    position: Position
    live_bytes: int


def timeline(problem: GraphProblem, kept: Set[int]) -> list[Moment]:
    """Memory of every op of the step, in the order in which they run.

    Args:
        problem: The step.
        kept: Values that are not freed after forward, if backward needs them.

    Raises:
        ValueError: As `rerun_ops`.
    """
    again = reruns(problem, kept)
    order = list(_positions(problem, again))
    lives = _lives(problem, kept, order)
    changes = [0] * (len(order) + 1)
    for value, first, last in lives:
        changes[first] += problem.value_bytes[value]
        changes[last + 1] -= problem.value_bytes[value]
    of_values = accumulate(changes)
    return [
        Moment(position, live + _beside(problem, position))
        for position, live in zip(order, of_values, strict=False)
    ]


def peak(moments: Iterable[Moment]) -> Moment:
    """The first moment of most memory."""
    return max(moments, key=lambda moment: moment.live_bytes)


def peak_bytes(problem: GraphProblem, kept: Set[int]) -> int:
    """Most memory of the step, see `timeline`."""
    return peak(timeline(problem, kept)).live_bytes


def _positions(
    problem: GraphProblem, again: dict[int, tuple[int, ...]]
) -> Iterator[Position]:
    for op in range(len(problem.reads)):
        yield Position(-1, op)
    for t in range(len(problem.step_reads)):
        for op in again.get(t, ()):
            yield Position(t, op)
        yield Position(t, None)


def _beside(problem: GraphProblem, position: Position) -> int:
    """Memory at a position besides that of the values."""
    if position.op is None:
        return problem.step_bytes[position.step]
    workspace_bytes = problem.workspace_bytes[position.op]
    if position.step < 0:
        return problem.other_bytes + workspace_bytes
    return problem.carried_bytes[position.step] + workspace_bytes


def _lives(
    problem: GraphProblem, kept: Set[int], order: list[Position]
) -> Iterator[tuple[int, int, int]]:
    """Each copy of a value: the value, and where in the order it lives."""
    stays = set(kept) | problem.returned
    first: dict[tuple[int, bool], int] = {}
    last: dict[tuple[int, bool], int] = {}
    for place, (step, op) in enumerate(order):
        is_again = step >= 0
        read = problem.step_reads[step] if op is None else problem.reads[op]
        for v in read:
            last[v, is_again and v not in stays] = place
        for v in () if op is None else problem.makes[op]:
            first[v, is_again] = last[v, is_again] = place
    for (value, is_again), place in first.items():
        if value in problem.returned and not is_again:
            yield value, place, len(order) - 1
        else:
            yield value, place, last[value, is_again]
