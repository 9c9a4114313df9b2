"""One training step as a graph: which forward values are kept for backward?

A step runs forward ops i = 0..n-1 and then backward ops ("steps") t = 0..T-1. A value
that backward needs and that was not kept is recomputed once: just before the first step
that needs it, with all that this takes and is not there, in forward order. Later uses
read the same copy. Every copy is freed after its last use.

`Replay` gives the memory of every op of such a step, to the byte; `GraphProblem` is
what the greedy (`capuchin.py`) and the MILP (`model.py`) choose from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]


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

    @cached_property
    def first_needs(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Steps, and the values that no step before them reads."""
        by_step: dict[int, list[int]] = {}
        for v, t in self.first_need.items():
            by_step.setdefault(t, []).append(v)
        return tuple((t, tuple(by_step[t])) for t in sorted(by_step))

    @cached_property
    def arrays(self) -> GraphArrays:
        """The same as arrays."""
        return GraphArrays(self)

    @property
    def kept_plainly(self) -> frozenset[int]:
        """Values that are kept when nothing is recomputed."""
        return frozenset(self.first_need) - self.returned


class GraphArrays:
    """What replays of a problem have in common.

    Attributes:
        value_bytes, last_forward_read: As of the problem.
        last_need: The last step that reads each value; -1 if none does.
        is_returned: Whether each value lives until the end.
        forward: Memory of each forward op when nothing is kept or returned.
        workspace_bytes, step_bytes, carried_bytes: As of the problem.
    """

    def __init__(self, problem: GraphProblem) -> None:
        num_values = len(problem.value_bytes)
        self.value_bytes = np.array(problem.value_bytes, np.int64)
        self.last_forward_read = np.array(problem.last_forward_read, np.int64)
        self.workspace_bytes = np.array(problem.workspace_bytes, np.int64)
        self.step_bytes = np.array(problem.step_bytes, np.int64)
        self.carried_bytes = np.array(problem.carried_bytes, np.int64)
        self.last_need = np.full(num_values, -1, np.int64)
        for v, t in problem.last_need.items():
            self.last_need[v] = t
        self.is_returned = np.zeros(num_values, bool)
        self.is_returned[list(problem.returned)] = True
        changes = np.zeros(len(problem.reads) + 1, np.int64)
        np.add.at(changes, np.array(problem.maker, np.int64), self.value_bytes)
        np.subtract.at(changes, self.last_forward_read + 1, self.value_bytes)
        beside = self.workspace_bytes + problem.other_bytes
        self.forward = changes[:-1].cumsum() + beside


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


def all_rerun_ops(problem: GraphProblem, kept: Set[int]) -> set[int]:
    """Ops that run again in backward: each once, whichever step needs it first.

    Raises:
        ValueError: As `rerun_ops`.
    """
    return rerun_ops(problem, problem.first_need, set(kept) | problem.returned)


def reruns(problem: GraphProblem, kept: Set[int]) -> dict[int, tuple[int, ...]]:
    """Steps -> the forward ops that run again just before each, in forward order.

    Raises:
        ValueError: As `rerun_ops`.
    """
    there = set(kept) | problem.returned
    by_step: dict[int, tuple[int, ...]] = {}
    for t, values in problem.first_needs:
        missing = [v for v in values if v not in there]
        if missing:
            ops = tuple(sorted(rerun_ops(problem, missing, there)))
            by_step[t] = ops
            there.update(v for op in ops for v in problem.makes[op])
    return by_step


def recompute_ms(problem: GraphProblem, kept: Set[int]) -> float:
    """Time of all ops that run again.

    Raises:
        ValueError: As `rerun_ops`.
    """
    return math.fsum(problem.runtime_ms[op] for op in all_rerun_ops(problem, kept))


class Moment(NamedTuple):
    """Memory while one op runs."""

    position: Position
    live_bytes: int


class Replay:
    """Memory of every op of the step, in the order in which they run.

    Attributes:
        again: Steps -> the ops that run again before each.
        live_bytes: By place in that order.
    """

    def __init__(self, problem: GraphProblem, kept: Set[int]) -> None:
        """Args:
        problem: The step.
        kept: Values that are not freed after forward, if backward needs them.

        Raises:
            ValueError: As `rerun_ops`.
        """
        self.again = again = reruns(problem, kept)
        self._runtime_ms = problem.runtime_ms
        self._num_forward = len(problem.reads)
        self._steps = [t for t, ops in again.items() for _ in ops]
        self._ops = [op for ops in again.values() for op in ops]
        counts = np.zeros(len(problem.step_reads), np.int64)
        counts[list(again)] = [len(ops) for ops in again.values()]
        self._step_places = (counts + 1).cumsum() + self._num_forward - 1
        # The k-th op that runs again follows all forward ops, steps and k others.
        own = np.arange(len(self._ops), dtype=np.int64)
        self._op_places = own + self._num_forward + np.array(self._steps, np.int64)
        self.live_bytes = self._beside(problem) + self._of_values(problem, kept)

    def _beside(self, problem: GraphProblem) -> _Ints:
        """Forward's memory if nothing is kept; in backward all but values."""
        arrays = problem.arrays
        num_places = self._num_forward + len(self._step_places) + len(self._ops)
        beside = np.zeros(num_places, np.int64)
        beside[: self._num_forward] = arrays.forward
        beside[self._step_places] = arrays.step_bytes
        carried = arrays.carried_bytes[self._steps]
        beside[self._op_places] = carried + arrays.workspace_bytes[self._ops]
        return beside

    def _of_values(self, problem: GraphProblem, kept: Set[int]) -> _Ints:
        """Memory of what is kept after its last use in forward, and of copies."""
        arrays = problem.arrays
        num_places = self._num_forward + len(self._step_places) + len(self._ops)
        stays = arrays.is_returned.copy()
        stays[list(kept)] = True
        read = arrays.last_need >= 0
        last = np.full(len(stays), -1, np.int64)
        last[read] = self._step_places[arrays.last_need[read]]
        first = np.full(len(stays), -1, np.int64)  # of copies
        for place, op in zip(self._op_places.tolist(), self._ops, strict=True):
            for v in problem.reads[op]:
                last[v] = max(last[v], place)
            for v in problem.makes[op]:
                first[v] = place
        changes = np.zeros(num_places + 1, np.int64)
        ends = np.where(arrays.is_returned, num_places - 1, last)
        lives_on = stays & (ends >= 0)
        sizes = arrays.value_bytes
        np.add.at(changes, arrays.last_forward_read[lives_on] + 1, sizes[lives_on])
        np.subtract.at(changes, ends[lives_on] + 1, sizes[lives_on])
        is_copy = first >= 0
        ends = np.where(stays, first, np.maximum(first, last))
        np.add.at(changes, first[is_copy], sizes[is_copy])
        np.subtract.at(changes, ends[is_copy] + 1, sizes[is_copy])
        return changes[:-1].cumsum()

    @property
    def step_places(self) -> _Ints:
        """Places of the steps themselves."""
        return self._step_places

    @cached_property
    def first_places(self) -> _Ints:
        """Where each step begins: the first of what runs again for it, or itself."""
        before = np.array([self._num_forward - 1], np.int64)
        return np.concatenate([before, self._step_places[:-1]]) + 1

    def position(self, place: int) -> Position:
        """What runs at a place of the order."""
        if place < self._num_forward:
            return Position(-1, place)
        step = int(np.searchsorted(self._step_places, place))
        if self._step_places[step] == place:
            return Position(step, None)
        return Position(step, self._ops[place - self._num_forward - step])

    def moment(self, place: int) -> Moment:
        """Memory at a place of the order."""
        return Moment(self.position(place), int(self.live_bytes[place]))

    @property
    def peak(self) -> Moment:
        """The first moment of most memory."""
        return self.moment(int(self.live_bytes.argmax()))

    @property
    def recompute_ms(self) -> float:
        """Time of all ops that run again: each does once."""
        return math.fsum(self._runtime_ms[op] for op in self._ops)

    def above(self, budget_bytes: float) -> list[Moment]:
        """The highest moment of every stretch above a budget, highest first."""
        highest = [
            self.moment(first + int(self.live_bytes[first:end].argmax()))
            for first, end in stretches(self.live_bytes > budget_bytes)
        ]
        return sorted(highest, key=lambda moment: -moment.live_bytes)


def stretches(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Beginning and end of all runs of flags that are set."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


def timeline(problem: GraphProblem, kept: Set[int]) -> list[Moment]:
    """Memory of every op of the step, see `Replay`."""
    replay = Replay(problem, kept)
    return [replay.moment(place) for place in range(len(replay.live_bytes))]


def peak_bytes(problem: GraphProblem, kept: Set[int]) -> int:
    """Most memory of the step, see `Replay`."""
    return int(Replay(problem, kept).live_bytes.max())
