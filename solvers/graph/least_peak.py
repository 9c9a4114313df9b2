"""The choice of least peak: a MILP with rows for the highest positions of choices.

No choice is below what each step needs at once. From there relaxations raise the bound,
and cases of when a large op runs again (`probing.py`). Relaxations that are rounded and
repaired, jumps and a MILP lower what is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..milp import pulp_runner
from ..milp.solution import Backend, Termination
from . import local_search, probing, relaxing
from .limits import Limits, charge_of
from .model import GraphModel
from .recomputation import GraphProblem, Position, Replay, peak_bytes, recompute_ms
from .search import JUMPS_TO, MOST_JUMPS, OF_A_JUMP, PATIENCE, GraphSolution

_WORK = 2_000_000  # of MILPs,
_WORK_ON_JUMPS = 4_000_000  # and of roots alone, as jumps look at nothing else
_WORK_ON_PROBES = 2_000_000  # of roots, likewise
_LOOSE = 2  # times the best: a cutoff by which HiGHS finds less is worse than none
_ROUNDS_TO_RISE = 8  # many positions are as high as the highest: a heuristic
_MIB = 2**20
_TOLERANCE = 1e-5  # of solvers, relative to a peak: rows keep theirs in MiB


def needed_at_once(problem: GraphProblem) -> int:
    """Bytes that some op or step takes, whatever is kept: no peak is below."""
    sizes, returned = problem.value_bytes, problem.returned
    returned_bytes = sum(sizes[v] for v in returned)
    at_steps = (
        during + returned_bytes + sum(sizes[v] for v in set(values) - returned)
        for during, values in zip(problem.step_bytes, problem.step_reads, strict=True)
    )
    in_forward = problem.arrays.forward.max(initial=0)
    return max(int(in_forward), *at_steps) if problem.step_reads else int(in_forward)


def lowest(
    problem: GraphProblem,
    *,
    start: Iterable[frozenset[int]] = (),
    time_limit_s: float | None = None,
    backend: Backend = "highs",
) -> GraphSolution:
    """The choice of least peak.

    Args:
        problem: The step.
        start: Choices that are known.
        time_limit_s: As `solve`.
        backend: Which MILP solver to run.

    Returns:
        As `solve`; ``peak_bytes`` is the least that was found, ``bound_bytes`` is
        proven, ``termination`` says whether they are equal (to the solver's tolerance).
    """
    limits = Limits(backend=backend, time_limit_s=time_limit_s)
    search = LeastPeakSearch(problem, start, limits)
    for with_ops in (False, True):  # both find what the other does not: a heuristic
        search.relax(with_ops=with_ops)
        if with_ops:
            search.probe()
        search.jump()
    search.branch()
    return search.solution()


class LeastPeakSearch:
    """Search with rows on demand: the highest positions of choices.

    Attributes:
        best: The choice of least peak so far,
        best_bytes: its peak,
        bound_bytes: and what no choice is below.
    """

    def __init__(
        self,
        problem: GraphProblem,
        start: Iterable[frozenset[int]],
        limits: Limits,
    ) -> None:
        self.problem = problem
        self._limits = limits
        self.best = _least(problem, (problem.kept_plainly, *start))
        self.best_bytes = peak_bytes(problem, self.best)
        self.bound_bytes = needed_at_once(problem)
        self._probes = _WORK_ON_PROBES
        self._model = GraphModel(problem, budget_bytes=None)
        self._model.set_peak(at_least=self.bound_bytes)
        self._add_highest(Replay(problem, self.best))

    def _is_done(self) -> bool:
        is_proven = self.best_bytes <= self.bound_bytes * (1 + _TOLERANCE)
        return is_proven or self._limits.left_s < 0

    def relax(self, *, with_ops: bool) -> None:
        """Add the rows that relaxations break, and round the last one.

        Args:
            with_ops: Rows of ops that run again, too, not of steps alone.
        """
        self._model.set_peak(at_most=_LOOSE * self.best_bytes)
        ended = relaxing.relax(
            self._model,
            self._limits.backend,
            self._is_enough,
            with_ops=with_ops,
            rows_a_round=2 * relaxing.ROWS_A_ROUND,
            rounds_to_rise=_ROUNDS_TO_RISE,
        )
        if ended is Termination.OPTIMAL and not self._is_done():
            rounded = [self._model.kept(share) for share in relaxing.SHARES]
            self._try_out(self.best, *rounded)

    def _is_enough(self, bound: float) -> bool:
        self._note_bound(bound)
        return self._is_done()

    def probe(self) -> None:
        """Raise the bound by when large ops run again, see `probing.py`."""
        tried: set[int] = set()
        while not self._is_done() and self._probes > 0:
            outcome = pulp_runner.run(
                self._model.model,
                backend=self._limits.backend,
                relaxed=True,
                again=True,
            )
            if outcome.bound is None:
                return
            op = probing.op_in_parts(self._model, tried)
            if op is None or not self.branch_on(op):
                return
            tried.add(op)

    def branch_on(self, op: int) -> bool:
        """Tell cases of an op apart; whether that raises the bound."""
        rows = self._model.binding_rows()
        before_bytes, most = self.bound_bytes, self.best_bytes / (1 - _TOLERANCE)
        bound = probing.branch(
            self._model.occasions(op),
            lambda: self._copy_of_model(rows),
            lambda model, case: probing.bound_of(
                model, op, case, most, self._pay, self._limits.backend
            ),
            lambda _, case: case.bound,
            lambda: self._probes > 0 and self._limits.left_s > 0,
        )
        self._note_bound(min(most, bound) / _MIB)
        return self.bound_bytes > before_bytes

    def _copy_of_model(self, rows: Iterable[Position]) -> GraphModel:
        model = GraphModel(self.problem, budget_bytes=None)
        model.set_peak(at_least=self.bound_bytes)
        for position in rows:
            model.add_row(position)
        return model

    def _pay(self, work: int) -> None:
        self._probes -= work

    def jump(self) -> None:
        """Jump to choices between the bound and the best, as `solver` does."""
        work, in_vain = _WORK_ON_JUMPS, 0
        for seed in range(MOST_JUMPS):
            work -= int(OF_A_JUMP * pulp_runner.work_of(self._model.model)[0])
            if work < 0 or self._is_done() or in_vain == PATIENCE:
                return
            before_bytes = self.best_bytes
            room = JUMPS_TO[seed % len(JUMPS_TO)] * (self.best_bytes - self.bound_bytes)
            most = min(self.bound_bytes + int(room), self.best_bytes - 1)
            self._model.set_peak(at_most=most)
            with self._model.any_peak():
                outcome = pulp_runner.run(
                    self._model.model, backend=self._limits.backend, jump=seed
                )
            if outcome.termination is Termination.INFEASIBLE:
                self._note_bound(most / _MIB)
            elif outcome.termination.has_incumbent:
                self._take(most)
            in_vain = 0 if self.best_bytes < before_bytes else in_vain + 1

    def branch(self) -> None:
        """Solve the MILP until what it chooses is proven, or the work is done."""
        work = self._limits.work(_WORK)
        while work > 0 and not self._is_done():
            self._model.set_peak(at_most=_LOOSE * self.best_bytes)
            charge = charge_of(self._model)
            outcome = pulp_runner.run(
                self._model.model,
                backend=self._limits.backend,
                time_limit_s=self._limits.solver_limit_s,
                work_limit=int(work / charge),
            )
            work -= max(1, int(outcome.work * charge))
            if outcome.termination is Termination.INFEASIBLE:
                self.bound_bytes = self.best_bytes
                return
            self._note_bound(outcome.bound)
            if not outcome.termination.has_incumbent:
                return
            self._take(self.bound_bytes)

    def _note_bound(self, bound: float | None) -> None:
        if bound is not None:
            proven_bytes = math.floor(bound * _MIB * (1 - _TOLERANCE))
            self.bound_bytes = max(self.bound_bytes, proven_bytes)

    def _take(self, above_bytes: int) -> None:
        """Try out the model's choice, and add what it breaks to the model."""
        kept = self._model.kept()
        self._try_out(kept)
        if not self._add_highest(Replay(self.problem, kept), above_bytes):
            # An op that runs again makes once more what is kept of it: no row has that.
            self._model.forbid(kept)

    def _try_out(self, *choices: frozenset[int]) -> None:
        """Compare choices, as they are and repaired, with the best."""
        repaired = (
            local_search.repair(self.problem, kept, self.bound_bytes)
            for kept in choices
        )
        others = [kept for kept in repaired if kept is not None]
        self.best = _least(self.problem, (self.best, *choices, *others))
        self.best_bytes = peak_bytes(self.problem, self.best)

    def _add_highest(self, replay: Replay, above_bytes: int = 0) -> bool:
        """Make the highest positions rows; whether any is new."""
        highest = replay.peak.live_bytes
        limit = max(above_bytes, highest - (highest - above_bytes) // 2)
        positions = (moment.position for moment in replay.above(limit))
        return relaxing.add_rows(self._model, positions)

    def solution(self) -> GraphSolution:
        is_proven = self.best_bytes <= self.bound_bytes * (1 + _TOLERANCE)
        return GraphSolution(
            termination=Termination.OPTIMAL if is_proven else Termination.FEASIBLE,
            objective_ms=recompute_ms(self.problem, self.best),
            solve_s=self._limits.solve_s,
            kept=self.best,
            peak_bytes=self.best_bytes,
            bound_bytes=min(self.bound_bytes, self.best_bytes),
        )


def _least(problem: GraphProblem, choices: Iterable[frozenset[int]]) -> frozenset[int]:
    """The choice of least peak among those that can run."""
    peaks: list[tuple[int, frozenset[int]]] = []
    for kept in choices:
        try:
            peaks.append((peak_bytes(problem, kept), kept))
        except ValueError:  # it needs a pinned op again
            continue
    return min(peaks, key=lambda item: item[0])[1]
