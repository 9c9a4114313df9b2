"""The MILP over the forward values of one graph, in PuLP.

k_v = 1 if value v is kept, x_o = 1 if op o runs again, s_ot = 1 if it did so before or
at step t, y_vq = 1 if a copy of v is alive at position q:

minimize    sum_o t_o x_o                          recompute time [ms]
subject to  k_v + x_o >= 1                         backward reads v, made by o    (1)
            x_o <= k_v + x_p                       o reads v, made by p           (2)
            s_ot >= 1 - k_v                        some step <= t reads v         (3)
            s_ot >= s_ct - k_v                     c reads v, made by o           (4)
            s_ot <= sum of what (3) and (4) ask of it                             (5)
            y_vq = 1                               steps up to q and later read v (6)
            y_vq >= k_v, s_ot, 1 - (x_o - s_ot)    later ones do, none before     (6)
            y_vq >= (x_c - s_ct) - (x_o - s_ot)    c reads v and is still to run  (7)
            y_vq >= a + (x_c - s_ct) - 1           so it does, and o makes more   (7)
            sum_v m_v y_vq + b_q <= P              at position q: the peak        (8)

with a = k_v or s_ot: a copy is there. Of values that may be moved (`moving.py`), a_v
is 1 if v is, and w_vt is 1 if it is in far memory still when step t begins, before any
step reads it: rows (8) have y_vq - w_vt; and k_v - a_v once forward has read v the last
time.

            a_v <= k_v                             it is not made again           (9)
            w_vt <= a_v, 1 - s_ct                  c reads v                      (10)

(3) to (8) and (10) are added for the positions that turn out to bind. At a position
inside the ops that run again before a step, s is that of the step for ops before the
position and that of the step before for all others. For an op with one value
k_v + x_o <= 1, which makes (6) a sum. Bytes are in MiB.

s_ot changes only where o may run again, so that positions share it between two such
occasions; and y_vq where they ask the same of it. A value is never kept if it is never
worse to keep others instead (`dominance.py`): of many parts with the same costs, each
has fewer choices that are nearly as good. An op whose value is made for one other op
alone, and never kept, runs again with that op: both have one x and s.

x_o - s_ot says that o runs again after q: what is needed then is there already, or o is
still to make it. Without that in (6) and (7), half of a value kept and half of its op
rerun would take no memory at all, and relaxations would be worth little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pulp

from .choices import Expression, number
from .recomputation import GraphProblem, Position
from .reruns import TimedChoices

_MIB = 2**20


class Term(NamedTuple):
    """One of the terms of a row (8).

    Attributes:
        expression: Whether a value is there: 0 or 1.
        size: Its bytes.
        kept: The value, if it is there whenever it is kept.
    """

    expression: Expression
    size: int
    kept: int | None = None


class Capped(NamedTuple):
    """A row (8).

    Attributes:
        terms: What varies.
        left_bytes: The cap without what does not.
    """

    terms: list[Term]
    left_bytes: int


class GraphModel(TimedChoices):
    """The model of a problem with rows for some positions.

    Attributes:
        budget_bytes: Cap on the peak; None where it is minimised.
        rows: Positions that have a row -> the row.
        capped: These rows, and others that memory has.
    """

    def __init__(
        self,
        problem: GraphProblem,
        *,
        budget_bytes: int | None,
        movable: Collection[int] = (),
    ) -> None:
        """Args:
        problem: The step.
        budget_bytes: Cap on the peak; None to minimise the peak instead.
        movable: Values that backward reads and that may be moved, see `moving.py`.
        """
        super().__init__(problem, movable=movable)
        self.budget_bytes = budget_bytes
        self.rows: dict[Position, pulp.LpConstraint] = {}  # in order
        self.capped: list[Capped] = []
        self._alive_if: dict[tuple[int, frozenset[Any]], Expression] = {}
        self._away_if: dict[tuple[int, frozenset[str]], Expression] = {}
        if budget_bytes is None:
            self._cap: pulp.LpVariable | float = self.model.add_variable("peak", 0.0)
            self.model += self._cap + 0.0
        else:
            self._cap = budget_bytes / _MIB
            self.model += self._objective()

    def add_row(self, position: Position) -> None:
        """Cap the memory at a position."""
        if position in self.rows:
            return
        terms, constant_bytes = (
            self._in_forward(position)
            if position.step < 0
            else self._in_backward(position)
        )
        self.rows[position] = self._add_cap(terms, constant_bytes)

    def binding_rows(self) -> list[Position]:
        """Positions whose rows the optimum of the relaxation hangs on: a few of all."""
        return [position for position, row in self.rows.items() if row.pi]

    def _add_cap(self, terms: list[Term], constant_bytes: int) -> pulp.LpConstraint:
        total = pulp.lpSum(term.expression * (term.size / _MIB) for term in terms)
        row = total + constant_bytes / _MIB <= self._cap
        self.model += row
        if self.budget_bytes is not None:
            left_bytes = self.budget_bytes - constant_bytes
            self.capped.append(Capped(terms=terms, left_bytes=left_bytes))
        return row

    def add_interval_row(self, op: int, first: int, last: int) -> None:
        """Cap the memory where an op runs again before a step of an interval.

        Before whichever step that is, what is there before the first one and needed at
        the last or later is there as well.
        """
        problem, sizes = self.problem, self.problem.value_bytes
        own = self._own_values(op)
        here = self.again(op, last) - self.again(op, first - 1)
        terms = [Term(here, self.own_bytes(op))]
        for v in self.keep:
            if v not in own and problem.last_need.get(v, -1) >= last:
                alive = self._alive(v, Position(first, op))
                assert alive is not None  # it is needed later
                terms.append(Term(alive, sizes[v]))
        steps = (step for step in self.occasions(op) if first <= step <= last)
        constant_bytes = min(problem.carried_bytes[step] for step in steps)
        constant_bytes += sum(sizes[v] for v in problem.returned)
        self._add_cap(terms, constant_bytes)

    def own_bytes(self, op: int) -> int:
        """What an op makes, reads and takes inside itself, but for results."""
        sizes = self.problem.value_bytes
        values = sum(sizes[v] for v in self._own_values(op))
        return values + self.problem.workspace_bytes[op]

    def _own_values(self, op: int) -> frozenset[int]:
        values = (*self.problem.makes[op], *self.problem.reads[op])
        return frozenset(values) - self.problem.returned

    def bound(self, bound: float) -> float:
        """A bound on the objective as one on time, or on the peak in bytes."""
        return bound * _MIB if self.budget_bytes is None else self.in_ms(bound)

    def cap_bytes(self, bound: float) -> float:
        """The budget, or a bound on the peak, where the objective is that."""
        return bound * _MIB if self.budget_bytes is None else self.budget_bytes

    def set_peak(
        self, *, at_least: int | None = None, at_most: int | None = None
    ) -> None:
        """Bound the peak that is minimised, in bytes; what is not given stays."""
        assert isinstance(self._cap, pulp.LpVariable)
        if at_least is not None:
            self._cap.lowBound = at_least / _MIB
        if at_most is not None:
            self._cap.upBound = at_most / _MIB

    @contextmanager
    def any_peak(self) -> Iterator[None]:
        """Look for any choice within `set_peak` for a while: none is better.

        HiGHS jumps to one and is done, where it would solve the root else.
        """
        objective = self.model.objective
        self.model.objective = pulp.LpAffineExpression({self._cap: 0.0})
        try:
            yield
        finally:
            self.model.objective = objective

    def _in_forward(self, position: Position) -> tuple[list[Term], int]:
        problem, here = self.problem, position.op
        assert here is not None
        constant = problem.other_bytes + problem.workspace_bytes[here]
        terms: list[Term] = []
        for v, op in enumerate(problem.maker):
            if op > here:
                continue
            if v in problem.returned or problem.last_forward_read[v] >= here:
                constant += problem.value_bytes[v]
            elif v in self.moved:
                here_still = self.keep[v] - self.gone(v, here)
                terms.append(Term(here_still, problem.value_bytes[v]))
            elif v in self.keep:
                kept = v if v in problem.first_need else None
                terms.append(Term(self.keep[v] + 0.0, problem.value_bytes[v], kept))
        return terms, constant

    def _in_backward(self, position: Position) -> tuple[list[Term], int]:
        problem, (step, here) = self.problem, position
        sizes = problem.value_bytes
        constant = sum(sizes[v] for v in problem.returned)
        terms: list[Term] = []
        if here is None:
            constant += problem.step_bytes[step]
        else:
            constant += problem.carried_bytes[step]
            now = self.again(here, step) - self.again(here, step - 1)
            terms.append(Term(now, problem.workspace_bytes[here]))
        for op in self.ops:
            for v in problem.makes[op]:
                if v in self.keep and (alive := self._alive(v, position)) is not None:
                    is_needed = len(alive) and problem.last_need.get(v, -1) >= step
                    if v in self.moved and problem.first_need[v] > step:
                        terms.append(Term(alive - self.away(v, step), sizes[v]))
                        continue
                    terms.append(Term(alive, sizes[v], v if is_needed else None))
                elif here == op:  # nobody reads it; made all the same
                    terms.append(Term(now, sizes[v]))
        return terms, constant

    def _last_step(self, op: int, position: Position) -> int:
        """The last step by which an op must have run to be done at a position."""
        is_ahead = position.op is not None and op >= position.op
        return position.step - 1 if is_ahead else position.step

    def _alive(self, value: int, position: Position) -> Expression | None:
        """y_vq, or an expression equal to it; None if no copy is ever alive there."""
        problem, keep = self.problem, self.keep[value]
        op = problem.maker[value]
        # While the op itself runs, its values are there.
        is_here = op == position.op
        last_step = position.step if is_here else self._last_step(op, position)
        is_single = len(problem.makes[op]) == 1
        is_needed = problem.last_need.get(value, -1) >= position.step
        if is_needed and problem.first_need[value] <= last_step:
            return number(1)
        copy = self.again(op, last_step)
        if is_needed and is_single:
            return keep + copy
        ahead = self._run(op) - copy  # it runs again, but later
        if is_needed:
            return self._at_least(value, position, [keep + 0.0, copy, 1 - ahead])
        asked = []
        for c in self.readers.get(value, ()):
            step = self._last_step(c, position)
            if not self._has_run(c, step):
                needs = self.run[c] - self.again(c, step)
                asked.append(needs - ahead)
                if not is_single:
                    asked += [keep + needs - 1, copy + needs - 1]
        if is_here:
            asked.append(copy - self.again(op, position.step - 1))
        asked = [e for e in asked if len(e) or e.constant > 0.0]
        return self._at_least(value, position, asked) if asked else None

    def gone(self, value: int, op: int) -> Expression:
        """Whether a moved value has left when an op of forward runs."""
        return self.moved[value] + 0.0

    def away(self, value: int, step: int) -> Expression:
        """w_vt, or an expression equal to it; before the first step that reads it."""
        readers = self.readers.get(value, ())
        asked = [term for c in readers if len(term := self.again(c, step))]
        if not asked:
            return self.moved[value] + 0.0
        rows = frozenset(str(term) for term in asked)
        if (value, rows) not in self._away_if:
            w = self._binary(f"w{value}_{step}")
            self.model += w <= self.moved[value]
            for term in asked:
                self.model += w <= 1 - term  # (10)
            self._away_if[value, rows] = w + 0.0
        return self._away_if[value, rows]

    def _at_least(
        self, value: int, position: Position, asked: Collection[Expression]
    ) -> Expression:
        rows = frozenset(
            (e.constant, *sorted((x.name, share) for x, share in e.items()))
            for e in asked
        )
        if (value, rows) not in self._alive_if:  # positions have them in common
            here = "end" if position.op is None else position.op
            y = self._binary(f"y{value}_{position.step}_{here}")
            for expression in asked:
                self.model += y >= expression  # (6), (7)
            self._alive_if[value, rows] = y + 0.0
        return self._alive_if[value, rows]
