"""The MILP of a graph whose values may be moved: `model.py`, and what moves take.

The memory of a row is that of late moves (`moving.py`): no other places take less. Time
is what the step waits for copies at least, wherever values are freed and made again:

minimize    sum_o t_o x_o + E + F
subject to  E >= sum_{v made by i and later} out_v a_v - time of forward after i    (11)
            F >= sum_{v read by step t} back_v a_v - time of steps before t
                 - sum_{o may run again by step t} t_o x_o                          (12)
            sum_v m_v a_v <= H                     host memory                      (13)

All copies out begin after their ops and end within forward; all copies back begin
within backward and end before the first step that reads the value. Each way has one
link. So optima are bounds for every plan that recomputes a value at most once and moves
it at most once. (11) and (12) are sums over values in order: each adds one to the sum
before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ..milp import pulp_runner
from .model import GraphModel
from .moving import Choice, MoveProblem

_MIB = 2**20
_Expression = Any  # a pulp.LpAffineExpression: PuLP has no types


class MoveModel(GraphModel):
    """The model of a problem with rows for some positions."""

    def __init__(self, moves: MoveProblem, *, budget_bytes: int | None) -> None:
        """Args:
        moves: The step.
        budget_bytes: Cap on the peak; None to minimise the peak instead.
        """
        self.moves_of = moves
        super().__init__(moves.graph, budget_bytes=budget_bytes, movable=moves.movable)
        if moves.host_bytes is not None and self.moved:
            held = [
                (a, moves.graph.value_bytes[v] / _MIB) for v, a in self.moved.items()
            ]
            self.model += pulp_runner.row(held) <= moves.host_bytes / _MIB  # (13)

    def _objective(self) -> _Expression:
        total = super()._objective()
        if self.moved:
            total += (self._waited_out() + self._waited_back()) * self.time_scale
        return total

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
                self.model += more <= rerun + pulp_runner.row(reruns)
                rerun, reruns = more, []
            self.model += waited >= sums[i] - rerun - before_ms
            before_ms += moves.step_ms[step]
        return waited

    def choice(self, more_than: float = 0.5) -> Choice:
        """Values that the variables keep, and move, by more than a share."""
        kept = self.kept(more_than)
        return Choice(kept, self.moves(more_than) & kept)


def _after(times: tuple[float, ...]) -> list[float]:
    """Time of all ops after each."""
    after = [0.0] * len(times)
    for i in range(len(times) - 2, -1, -1):
        after[i] = after[i + 1] + times[i + 1]
    return after
