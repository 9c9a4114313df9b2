"""Which forward values of a graph to keep under a cap on its true peak: a MILP.

Relaxations, and local searches around them, find choices and bounds (`search.py`).
While these are far apart, the search branches on when one large op runs again
(`probing.py`), and looks at what is left of each case by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..milp import pulp_runner
from ..milp.solution import Backend, Termination
from . import probing
from .limits import Limits
from .model import GraphModel
from .probing import Case
from .recomputation import GraphProblem, Position
from .search import (
    CLOSE,
    IF_CLOSE,
    LOOKING,
    LOOKING_FAR,
    MOST_WORK,
    GraphSolution,
    Search,
)

_WORK_ON_PROBES = 10_000_000  # of roots,
_PROBES_A_STEP = 2  # relaxations for each step before which an op may run again
_FAR = 0.06  # a gap from which on it is worth that
_MUCH = 0.05  # of the gap: what cases must tell more than the relaxation
_OF_A_CASE = 0.4  # of the work left, into what is left of one case
_OF_CASES = 0.2  # of the work, that is left when no more cases are looked at


def solve(
    problem: GraphProblem,
    *,
    budget_bytes: int,
    start: Iterable[frozenset[int]] = (),
    time_limit_s: float | None = None,
    relative_gap: float = 0.0,
    backend: Backend = "highs",
) -> GraphSolution:
    """Keep values so that the peak is within the budget, in the least time.

    Args:
        problem: The step.
        budget_bytes: Cap on its peak.
        start: Choices that may fit; the result takes no more time than any that does.
        time_limit_s: Stop branching after about so long; None to stop after an amount
            of work, which is the same in every run.
        relative_gap: Stop as soon as a choice is proven this close to the best.
        backend: Which MILP solver to run.

    Returns:
        The outcome. A budget that no choice meets is an outcome, not an error.
    """
    limits = Limits(
        backend=backend, time_limit_s=time_limit_s, relative_gap=relative_gap
    )
    search = OpSearch(problem, budget_bytes, limits)
    for kept in dict.fromkeys((problem.kept_plainly, *start)):
        search.try_out(kept)
    if search.is_done():
        return search.solution(Termination.OPTIMAL)
    return search.solution(search.run())


class OpSearch(Search):
    """The whole search, with cases by when large ops run again.

    Attributes:
        _rows: Positions that copies of the model have rows of.
        _probes: Work left for probing.
    """

    _rows: tuple[Position, ...] = ()
    _probes = _WORK_ON_PROBES

    def run(self) -> Termination:
        """Solve the relaxation, then the model until its choice fits."""
        relaxed = self.relax()
        if relaxed is Termination.INFEASIBLE:
            return relaxed
        if self.best is not None and not self.is_done():
            self.model.fix(self.best[0])
            self.dive()
            self._rows = tuple(self.model.rows)
            before = self.best
            whole, self.model = self.model, self._copy_of_model()
            self.jump()  # far and wide: the rows that this takes are left behind
            self.model = whole
            relaxed_ms = self.bound_ms
            self._probe()
            if self.best is before:
                self.try_out(self.exchanged(self.best[1]))
            work = min(self.work, MOST_WORK)  # of a time limit most is for the whole
            is_too_large = self.at_root(1.0) > work * (1.0 - LOOKING)
            self.look_around(int(work * (1.0 if is_too_large else LOOKING)))
            if self._cases_tell_more(relaxed_ms):
                return self._ended()
            if self.is_large and not is_too_large and self.gap_is_above(CLOSE):
                self.look_around(int(work * LOOKING_FAR))
        if self.best is not None and self.limits.backend == "highs":
            is_close = not self.gap_is_above(CLOSE)
            if is_close and self.work <= MOST_WORK and self.is_large:
                self.work = int(self.work * IF_CLOSE)
            self.branch_from_best()
        ended = self.branch()
        return ended if self.best is None else self._ended()

    def _cases_tell_more(self, relaxed_ms: float) -> bool:
        """Whether cases closed most of the gap: the model of the whole begins anew."""
        assert self.best is not None
        return 2 * self.bound_ms > self.best[0] + relaxed_ms

    def _ended(self) -> Termination:
        return Termination.OPTIMAL if self.is_done() else Termination.FEASIBLE

    def _probe(self) -> None:
        """Branch on when large ops run again, while that leads to bounds."""
        tried: set[int] = set()
        while self.gap_is_above(_FAR) and self._may_probe():
            outcome = pulp_runner.run(
                self.model.model,
                backend=self.limits.backend,
                relaxed=True,
                again=True,
            )
            if not outcome.termination.has_incumbent:
                return
            self.note_bound(outcome.bound)
            self._rows = tuple(self.model.binding_rows())
            op = probing.op_in_parts(self.model, tried)
            if op is None or self._is_too_large(op):
                return
            tried.add(op)
            much_ms = self.bound_ms + _MUCH * (self.most_ms - self.bound_ms)
            self.branch_on(op, much_ms)
            if self.bound_ms <= much_ms:
                return

    def _may_probe(self) -> bool:
        return self._probes > 0 and self.limits.left_s > 0

    def _is_too_large(self, op: int) -> bool:
        """Whether the work left would end before much is known of an op."""
        work, _ = pulp_runner.work_of(self._copy_of_model().model)
        a_probe = probing.OF_A_ROOT * work
        num_probes = _PROBES_A_STEP * len(self.model.occasions(op))
        return num_probes * a_probe > 2 * self._probes

    def branch_on(self, op: int, much_ms: float = -math.inf) -> None:
        """Search case by case, by when an op runs again.

        Args:
            op: The op.
            much_ms: Of cases with no higher bound the MILP of the whole tells as much.
        """
        most_ms = self.most_ms
        bound_ms = probing.branch(
            self.model.occasions(op),
            self._copy_of_model,
            lambda model, case: probing.bound_of(
                model, op, case, self.most_ms, self._pay, self.limits.backend
            ),
            lambda _, case: self._searched(op, case, much_ms),
            self._may_probe,
        )
        self.bound_ms = max(self.bound_ms, min(most_ms, bound_ms))

    def _copy_of_model(self) -> GraphModel:
        """A model with some of the rows, and with as much fixed as there is now."""
        model = GraphModel(self.problem, budget_bytes=self.budget_bytes)
        for position in self._rows:
            model.add_row(position)
        for v, k in self.model.keep.items():
            model.keep[v].lowBound, model.keep[v].upBound = k.lowBound, k.upBound
        return model

    def _pay(self, work: int) -> None:
        self._probes -= work

    def _searched(self, op: int, case: Case, much_ms: float) -> float:
        """Search among the choices of a case; returns what is proven of them."""
        is_of_use = much_ms < case.bound < self.most_ms
        if not is_of_use or self.work <= _OF_CASES * MOST_WORK:
            return case.bound
        search = Search(self.problem, self.budget_bytes, self.limits)
        search.model = self._copy_of_model()
        search.best, search.bound_ms = self.best, case.bound
        search.work = work = int(self.work * _OF_A_CASE)
        probing.add_rows(search.model, op, case)
        with probing.within(search.model, op, case):
            if search.relax() is Termination.INFEASIBLE:
                return self.most_ms
            search.branch()
        self.work -= work - search.work
        self.best = search.best
        return search.bound_ms
