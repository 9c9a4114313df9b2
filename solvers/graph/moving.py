"""Forward values in far memory, from a place of forward to a place of backward.

A kept value that backward reads may be *moved*. It is sent as soon as it is made: a
copy out begins. After a later op of forward, none before the last that reads it, the
step waits for that copy and frees the value: its *release*. Just before a step of
backward, and what runs again for it, memory for the value is made and the copy back
begins: its *fetch*, at the latest with the step for which it is read first. The first
reader waits for it.

So memory depends on places alone. Time is played: copies out follow one another, copies
back too, and the step waits where it says above; all that it waits is *exposed*, with
the time for which it is busy with the copies themselves.

*Late* moves take the least memory: released after the last op that reads the value,
fetched where it is read. `moves` puts the two apart as far as copies ask for and the
budget allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .recomputation import GraphProblem, Replay, recompute_ms

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MoveProblem:
    """Keep, recompute or move, for the forward values of one training step.

    Attributes:
        graph: The step.
        step_ms: Time of each backward step.
        movable: Values that may be moved; backward reads them.
        out_ms: Time that it takes to copy each value out,
        back_ms: and back.
        busy_ms: Time for which the step does nothing else if a value is moved, of each;
            empty if that is none.
        host_bytes: Most bytes in far memory; None for as many as one likes.
    """

    graph: GraphProblem
    step_ms: tuple[float, ...]
    movable: frozenset[int]
    out_ms: tuple[float, ...]
    back_ms: tuple[float, ...]
    busy_ms: tuple[float, ...] = ()
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        if len(self.step_ms) != len(self.graph.step_reads):
            raise ValueError("`step_ms` must have an entry for every step.")
        if not self.movable <= self.graph.kept_plainly:
            raise ValueError("`movable` values must be kept for backward.")

    @cached_property
    def durations(self) -> tuple[_Floats, _Floats]:
        """Time of each forward op, and of each step."""
        return np.array(self.graph.runtime_ms), np.array(self.step_ms)

    def far_bytes(self, moved: Iterable[int]) -> int:
        """What lies in far memory."""
        return sum(self.graph.value_bytes[v] for v in moved)

    def all_busy_ms(self, moved: Iterable[int]) -> float:
        """Time for which the step does nothing but begin copies."""
        return math.fsum(self.busy_ms[v] for v in moved) if self.busy_ms else 0.0

    def holds(self, moved: Iterable[int]) -> bool:
        """Whether far memory has room for it."""
        return self.host_bytes is None or self.far_bytes(moved) <= self.host_bytes


class Choice(NamedTuple):
    """What becomes of forward's values.

    Attributes:
        kept: Those that are not made again: on the device all along, or moved.
        moved: Those that are in far memory in between.
    """

    kept: frozenset[int]
    moved: frozenset[int] = frozenset()


class Move(NamedTuple):
    """Where a moved value goes and comes back.

    Attributes:
        released_after: The op of forward after which it is freed.
        fetched_before: The step before which, and before what runs again for it, its
            memory is made anew.
    """

    released_after: int
    fetched_before: int


@dataclass(frozen=True, kw_only=True)
class MovePlan:
    """A choice with the places of its moves.

    Attributes:
        choice: What is kept and moved.
        moves: Where, of each moved value.
        fetch_order: Moved values in the order in which copies back begin.
        moved_bytes: Bytes in far memory.
        peak_bytes: Of the step.
        recompute_ms: Time of what runs again,
        exposed_ms: and for which the step waits for copies, or is busy with them.
    """

    choice: Choice
    moves: Mapping[int, Move]
    fetch_order: tuple[int, ...] = ()
    moved_bytes: int
    peak_bytes: int
    recompute_ms: float
    exposed_ms: float

    @property
    def cost_ms(self) -> float:
        """All that the plan adds to the step."""
        return self.recompute_ms + self.exposed_ms

    @property
    def rank(self) -> tuple[float, int]:
        """Least is best: time, then bytes that are moved."""
        return self.cost_ms, self.moved_bytes


class MovedStep:
    """A step with a choice: its memory and time wherever values go and come back.

    Attributes:
        replay: Of the same step with nothing moved.
        late: Moves that take the least memory.
    """

    def __init__(self, problem: MoveProblem, choice: Choice) -> None:
        """Args:
        problem: The step.
        choice: Moved values must be kept, and movable.

        Raises:
            ValueError: A pinned op would have to run again.
        """
        self.problem = problem
        self.choice = choice
        self.replay = Replay(problem.graph, choice.kept)
        self._use_places: dict[int, int] = {}
        self.late = self._late()

    def _late(self) -> dict[int, Move]:
        """Also notes where each moved value is read first in backward."""
        graph, replay = self.problem.graph, self.replay
        uses: dict[int, tuple[int, int]] = {}  # step, place
        for t, ops in replay.again.items():
            first_place = int(replay.first_places[t])
            for offset, op in enumerate(ops):
                for v in graph.reads[op]:
                    if v in self.choice.moved and v not in uses:
                        uses[v] = t, first_place + offset
        late: dict[int, Move] = {}
        for v in sorted(self.choice.moved):
            t = graph.first_need[v]
            step, place = uses.get(v, (t, int(replay.step_places[t])))
            if step > t:
                step, place = t, int(replay.step_places[t])
            self._use_places[v] = place
            late[v] = Move(graph.last_forward_read[v], step)
        return late

    def live_bytes(self, moves: Mapping[int, Move]) -> _Ints:
        """Memory by place of `replay`."""
        live = self.replay.live_bytes
        if not moves:
            return live
        changes = np.zeros(len(live) + 1, np.int64)
        for v, (released_after, fetched_before) in moves.items():
            size = self.problem.graph.value_bytes[v]
            changes[released_after + 1] -= size
            changes[self.replay.first_places[fetched_before]] += size
        return np.asarray(live + changes[:-1].cumsum())

    @cached_property
    def _times(self) -> tuple[_Floats, _Floats]:
        """When each place begins and ends if nothing waits: from 0, in backward too."""
        forward_ms, step_ms = self.problem.durations
        ms = np.zeros(len(self.replay.live_bytes))
        ms[self.replay.step_places] = step_ms
        for t, ops in self.replay.again.items():
            first = int(self.replay.first_places[t])
            ms[first : first + len(ops)] = forward_ms[list(ops)]
        ends = ms.cumsum()
        ends[: len(forward_ms)] = forward_ms.cumsum()
        return ends - ms, ends

    def exposed_ms(self, moves: Mapping[int, Move]) -> float:
        """For how long the step waits for copies, or is busy with them."""
        if not moves:
            return 0.0
        waits_ms = self._waits_for_copies_out(moves)
        waits_ms += self._waits_for_copies_back(moves)
        return waits_ms + self.problem.all_busy_ms(moves)

    def _waits_for_copies_out(self, moves: Mapping[int, Move]) -> float:
        _, ends = self._times
        maker = self.problem.graph.maker
        events = [(maker[v], 0, v) for v in moves]
        events += [(move.released_after, 1, v) for v, move in moves.items()]
        waited_ms = free_ms = 0.0
        done: dict[int, float] = {}
        for op, is_release, v in sorted(events):
            now = float(ends[op]) + waited_ms
            if is_release:
                waited_ms += max(0.0, done[v] - now)
            else:
                free_ms = done[v] = max(now, free_ms) + self.problem.out_ms[v]
        return waited_ms

    def _waits_for_copies_back(self, moves: Mapping[int, Move]) -> float:
        starts, _ = self._times
        waited_ms = free_ms = 0.0
        done: dict[int, float] = {}
        for place, is_use, _, v in self._events_of_backward(moves):
            now = float(starts[place]) + waited_ms
            if is_use:
                waited_ms += max(0.0, done[v] - now)
            else:
                free_ms = done[v] = max(now, free_ms) + self.problem.back_ms[v]
        return waited_ms

    def _events_of_backward(
        self, moves: Mapping[int, Move]
    ) -> list[tuple[int, int, int, int]]:
        """Fetches, and first reads: place, 0 or 1, place of the read, value."""
        uses = self._use_places
        events = [
            (int(self.replay.first_places[move.fetched_before]), 0, uses[v], v)
            for v, move in moves.items()
        ]
        events += [(uses[v], 1, 0, v) for v in moves]
        return sorted(events)

    def fetch_order(self, moves: Mapping[int, Move]) -> tuple[int, ...]:
        """Moved values in the order in which their copies back begin."""
        events = self._events_of_backward(moves)
        return tuple(v for _, is_use, _, v in events if not is_use)

    def moves(self, budget_bytes: int) -> dict[int, Move]:
        """Moves that expose little, within a budget that late ones keep.

        A heuristic: each is released as late, and fetched as early, as its copy takes
        if nothing else waits, or as far as what the others left of the budget allows.
        """
        slack = budget_bytes - self.live_bytes(self.late)
        released = self._released(slack)
        fetched = self._fetched(slack)
        return {v: Move(released[v], fetched[v]) for v in self.late}

    def _released(self, slack: _Ints) -> dict[int, int]:
        graph = self.problem.graph
        forward_ms, _ = self.problem.durations
        ends = forward_ms.cumsum()
        free_ms = 0.0
        released: dict[int, int] = {}
        for v in sorted(self.late, key=lambda v: (graph.maker[v], v)):
            start_ms = max(free_ms, float(ends[graph.maker[v]]))
            free_ms = start_ms + self.problem.out_ms[v]
            last = graph.last_forward_read[v]
            wanted = min(int(np.searchsorted(ends, free_ms)), len(ends) - 1)
            window = slack[last + 1 : wanted + 1]
            if (short := np.flatnonzero(window < graph.value_bytes[v])).size:
                window = window[: short[0]]
            window -= graph.value_bytes[v]
            released[v] = last + len(window)
        return released

    def _fetched(self, slack: _Ints) -> dict[int, int]:
        starts, _ = self._times
        first_places = self.replay.first_places
        step_starts = starts[first_places]
        sizes = self.problem.graph.value_bytes
        next_ms = math.inf
        fetched: dict[int, int] = {}
        for v in sorted(self.late, key=lambda v: (-self._use_places[v], v)):
            use_ms = float(starts[self._use_places[v]])
            next_ms = min(use_ms, next_ms) - self.problem.back_ms[v]
            wanted = int(np.searchsorted(step_starts, next_ms, side="right")) - 1
            late = self.late[v].fetched_before
            wanted = min(max(wanted, 0), late)
            first, end = int(first_places[wanted]), int(first_places[late])
            if (short := np.flatnonzero(slack[first:end] < sizes[v])).size:
                first += int(short[-1]) + 1
            step = int(np.searchsorted(first_places, first))
            slack[first_places[step] : end] -= sizes[v]
            fetched[v] = step
        return fetched


def plan_moves(
    problem: MoveProblem, choice: Choice, budget_bytes: int
) -> MovePlan | None:
    """A choice with places for its moves; None if it cannot keep the budget.

    Raises:
        ValueError: A pinned op would have to run again.
    """
    if not problem.holds(choice.moved):
        return None
    step = MovedStep(problem, choice)
    if int(step.live_bytes(step.late).max()) > budget_bytes:
        return None
    moves = step.moves(budget_bytes)
    return MovePlan(
        choice=choice,
        moves=moves,
        fetch_order=step.fetch_order(moves),
        moved_bytes=problem.far_bytes(choice.moved),
        peak_bytes=int(step.live_bytes(moves).max()),
        recompute_ms=recompute_ms(problem.graph, choice.kept),
        exposed_ms=step.exposed_ms(moves),
    )


def late_peak_bytes(problem: MoveProblem, choice: Choice) -> int:
    """Peak of a choice with late moves: the least that it takes.

    Raises:
        ValueError: As `plan_moves`.
    """
    step = MovedStep(problem, choice)
    return int(step.live_bytes(step.late).max())


def moved_at_floor(problem: MoveProblem, kept: Set[int]) -> frozenset[int]:
    """Values of a choice that are moved if time is no matter: largest first."""
    sizes, moved, total_bytes = problem.graph.value_bytes, set[int](), 0
    for v in sorted(problem.movable & kept, key=lambda v: (-sizes[v], v)):
        if problem.host_bytes is None or total_bytes + sizes[v] <= problem.host_bytes:
            moved.add(v)
            total_bytes += sizes[v]
    return frozenset(moved)
