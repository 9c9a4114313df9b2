"""The MILP of a graph whose values may be moved: `model.py`, and what moves take.

The memory of a row is that of late moves (`moving.py`): no other places take less. Time
is what the step waits for copies at least, wherever values are freed and made again,
and b_v for which it is busy with those of a value:

minimize    sum_o t_o x_o + E + F + sum_v b_v a_v
subject to  E >= sum_{v made by i and later} out_v a_v - time of forward after i   (11)
            F >= sum_{v read by step t} back_v a_v - time of steps before t
                 - sum_{o may run again by step t} t_o x_o                         (12)
            sum_v m_v a_v <= H                     host memory                     (13)

All copies out begin after their ops and end within forward; all copies back begin
within backward and end before the first step that reads the value. Each way has one
link. (11) and (12) are sums over values in order: each adds one to the sum before.

Where memory has a row, what is not there must have left, or must come yet, in time.
g_vq = 1 if v has left when op q of forward runs, w_vt = 1 if its way back begins after
step t:

            g_vq, w_vt <= a_v                                                     (14)
            sum_{v made by i and later} out_v g_vq <= time of i+1 .. q-1 + E      (15)
            sum_{v read by step u} back_v w_vt <= time of steps t+1 .. u-1
                 + sum_{o may run again between} t_o x_o + F                      (16)

(15) and (16) are added for some i and u: the nearest ones, and ever fewer farther away.
Optima are bounds for every plan that recomputes a value at most once and moves it at
most once, wherever it is released and fetched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from ..milp import pulp_models
from .model import GraphModel
from .moving import Choice, MoveProblem
from .recomputation import Position

_MIB = 2**20
_WINDOWS = 1.4  # by how much more values each row (15) or (16) has than the last
_Expression = Any  # a pulp.LpAffineExpression: PuLP has no types


class MoveModel(GraphModel):
    """The model of a problem with rows for some positions."""

    def __init__(self, moves: MoveProblem, *, budget_bytes: int | None) -> None:
        """Args:
        moves: The step.
        budget_bytes: Cap on the peak; None to minimise the peak instead.
        """
        self.moves_of = moves
        self._timed: set[int] = set()  # steps with rows (16)
        self._left: dict[int, dict[int, Any]] = {}  # ops -> values -> g
        self._to_come: dict[int, dict[int, Any]] = {}  # steps -> values -> w
        self._forward_ms = [0.0, *accumulate(moves.graph.runtime_ms)]
        self._step_ms = [0.0, *accumulate(moves.step_ms)]
        super().__init__(moves.graph, budget_bytes=budget_bytes, movable=moves.movable)
        if moves.host_bytes is not None and self.moved:
            held = [
                (a, moves.graph.value_bytes[v] / _MIB) for v, a in self.moved.items()
            ]
            self.model += pulp_models.row(held) <= moves.host_bytes / _MIB  # (13)

    def _objective(self) -> _Expression:
        total = super()._objective()
        if self.moved:
            self._waits = self._waited_out(), self._waited_back()
            total += sum(self._waits) * self.time_scale
        if self.moved and self.moves_of.busy_ms:
            busy = [(a, self.moves_of.busy_ms[v]) for v, a in self.moved.items()]
            total += pulp_models.row(busy) * self.time_scale
        return total

    def add_row(self, position: Position) -> None:
        """Cap the memory at a position, with the time that it takes to get there."""
        is_new = position not in self.rows
        super().add_row(position)
        if not is_new or self.budget_bytes is None or not self.moved:
            return
        if position.step < 0:
            assert position.op is not None
            self._add_times_of_leaving(position.op)
        else:
            self._add_times_of_coming(position.step)

    def gone(self, value: int, op: int) -> _Expression:
        """g_vq."""
        if self.budget_bytes is None:
            return super().gone(value, op)
        left = self._left.setdefault(op, {})
        if value not in left:
            left[value] = self._binary(f"g{value}_{op}")
            self.model += left[value] <= self.moved[value]  # (14)
        return left[value] + 0.0

    def away(self, value: int, step: int) -> _Expression:
        """w_vt."""
        if self.budget_bytes is None:
            return super().away(value, step)
        to_come = self._to_come.setdefault(step, {})
        if value not in to_come:
            to_come[value] = self._binary(f"w{value}_{step}")
            self.model += to_come[value] <= super().away(value, step)  # (10), (14)
        return to_come[value] + 0.0

    def _add_times_of_leaving(self, op: int) -> None:
        """Rows (15)."""
        maker, left = self.problem.maker, self._left.pop(op, {})
        order = sorted(left, key=lambda v: (-maker[v], v))
        for count in _windows(len(order)):
            first = maker[order[count - 1]]
            copies = [(left[v], self.moves_of.out_ms[v]) for v in order[:count]]
            between_ms = self._forward_ms[op] - self._forward_ms[first + 1]
            self.model += pulp_models.row(copies) <= self._waits[0] + between_ms

    def _add_times_of_coming(self, step: int) -> None:
        """Rows (16), once for every step."""
        needs, to_come = self.problem.first_need, self._to_come.get(step, {})
        if step in self._timed:
            return
        self._timed.add(step)
        order = sorted(to_come, key=lambda v: (needs[v], v))
        for count in _windows(len(order)):
            last = needs[order[count - 1]]
            copies = [(to_come[v], self.moves_of.back_ms[v]) for v in order[:count]]
            between = ((1 << (last + 1)) - 1) >> (step + 1) << (step + 1)
            reruns = [
                (x, self.problem.runtime_ms[op])
                for op, x in self.run.items()
                if self._occasions[op] & between
            ]
            between_ms = self._step_ms[last] - self._step_ms[step + 1]
            hidden = self._waits[1] + between_ms + pulp_models.row(reruns)
            self.model += pulp_models.row(copies) <= hidden

    def _sums(self, name: str, parts: Iterable[tuple[Any, float]]) -> list[Any]:
        """A variable for each sum of the first parts, in a row."""
        sums: list[Any] = []
        for i, (a, ms) in enumerate(parts):
            total = self.model.add_variable(f"{name}{i}", 0.0)
            self.model += total >= (sums[-1] if sums else 0.0) + a * ms
            sums.append(total)
        return sums

    def _waited_out(self) -> Any:
        """E, with rows (11)."""
        moves, maker = self.moves_of, self.problem.maker
        waited = self.model.add_variable("waited_out", 0.0)
        order = sorted(self.moved, key=lambda v: (-maker[v], v))
        sums = self._sums("out", ((self.moved[v], moves.out_ms[v]) for v in order))
        after_ms, places = _after(self.problem.runtime_ms), range(len(order))
        for i in places:
            op = maker[order[i]]
            if i + 1 == len(order) or maker[order[i + 1]] != op:
                self.model += waited >= sums[i] - after_ms[op]
        return waited

    def _waited_back(self) -> Any:
        """F, with rows (12)."""
        moves, problem = self.moves_of, self.problem
        waited = self.model.add_variable("waited_back", 0.0)
        by_first_step: dict[int, list[int]] = defaultdict(list)
        for op in self.run:
            occasions = self._occasions[op]
            if occasions:
                first = (occasions & -occasions).bit_length() - 1
                by_first_step[first].append(op)
        needs = problem.first_need
        order = sorted(self.moved, key=lambda v: (needs[v], v))
        sums = self._sums("back", ((self.moved[v], moves.back_ms[v]) for v in order))
        reruns: list[tuple[Any, float]] = []
        rerun = self.model.add_variable("rerun0", 0.0)
        self.model += rerun <= 0.0
        before_ms, done = 0.0, 0
        for i, v in enumerate(order):
            step = needs[v]
            while done <= step:
                reruns += [
                    (self.run[op], problem.runtime_ms[op])
                    for op in by_first_step.get(done, ())
                ]
                before_ms += moves.step_ms[done] if done < step else 0.0
                done += 1
            if i + 1 < len(order) and needs[order[i + 1]] == step:
                continue
            if reruns:
                more = self.model.add_variable(f"rerun{i + 1}", 0.0)
                self.model += more <= rerun + pulp_models.row(reruns)
                rerun, reruns = more, []
            self.model += waited >= sums[i] - rerun - before_ms
            before_ms += moves.step_ms[step]
        return waited

    def choice(self, more_than: float = 0.5) -> Choice:
        """Values that the variables keep, and move, by more than a share."""
        kept, moved = self.kept(more_than), self.moved.items()
        away = frozenset(v for v, a in moved if (a.varValue or 0.0) > more_than)
        return Choice(kept, away & kept)


def _after(times: tuple[float, ...]) -> list[float]:
    """Time of all ops after each."""
    after = [0.0] * len(times)
    for i in range(len(times) - 2, -1, -1):
        after[i] = after[i + 1] + times[i + 1]
    return after


def _windows(most: int) -> list[int]:
    """1, 2, 3, ... and ever fewer numbers up to the most."""
    counts: list[int] = []
    count = 1
    while count < most:
        counts.append(count)
        count = max(count + 1, int(count * _WINDOWS))
    return [*counts, most] if most else []
