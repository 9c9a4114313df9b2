"""The parts of a search for a graph's choice: relax, round, jump, exchange, branch.

The model (`graph/model.py`) starts without memory rows. What it keeps is replayed
(`recomputation.Replay`); positions above the budget become rows, until none is left.
Every model on the way is a relaxation, so that its bound is a bound for all choices
that recompute a value at most once, just before its first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..milp import pulp_runner
from ..milp.solution import Solution, Termination
from . import fractional, local_search, relaxing
from .limits import Limits, charge_of, look_at_root
from .model import GraphModel
from .recomputation import (
    GraphProblem,
    Position,
    Replay,
    peak_bytes,
    recompute_ms,
)

MOST_WORK = 8_000_000  # of all MILPs, see `charge_of`: some ten seconds
CLOSE = 0.03  # a gap from which on large models get less work, as they prove little:
IF_CLOSE = 0.25  # times as much
_IF_WIDE = 2.0  # times the work, while the gap of the whole is wide
LOOKING = 0.1  # of the work, into stretches of the step before the whole of it,
LOOKING_FAR = 0.5  # and into larger ones of large models, if the gap is wide then
_DECIDED = 0.25  # of the fractions, at once
_DIVE_ROUNDS = 100  # of deciding about them: a heuristic
_WORK_ON_JUMPS = 6_000_000  # of roots alone, as jumps look at nothing else
OF_A_JUMP = 0.4  # of a root's work, as presolve is most of it
MOST_JUMPS = 12
PATIENCE = 6  # jumps in vain, one after the other
_LOOSE = 100.0  # times the best: a cutoff that leaves out nothing of use
JUMPS_TO = (0.9, 0.5, 0.25)  # of the gap above the bound, in turns: a heuristic
_STRETCH = 1 / 3  # of the values, or less: what is decided about at once
_OF_A_STRETCH = 0.25  # of the work on stretches: the most that one counts
_LEAST_STRETCH = 40  # values that are decided about at once
_WORTHWHILE = 1e-3  # of the time: what stretches must save


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSolution(Solution):
    """Which values are kept, and the peak of that.

    Attributes:
        kept: Values that are kept, None without an incumbent.
        peak_bytes: True peak of that.
        bound_bytes: No peak is below, where that is what was asked for.
    """

    kept: frozenset[int] | None = None
    peak_bytes: int | None = None
    bound_bytes: int | None = None


class Search:
    """Search with rows on demand: positions where a choice breaks the budget.

    Attributes:
        problem, budget_bytes, limits: What is asked for.
        model: The model with the rows so far.
        best: Time and kept values of the best choice that fits.
        bound_ms: Proven so far.
        work: Left for MILPs.
    """

    def __init__(
        self, problem: GraphProblem, budget_bytes: int, limits: Limits
    ) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.limits = limits
        self.work = limits.work(MOST_WORK)
        self.model = GraphModel(problem, budget_bytes=budget_bytes)
        self.best: tuple[float, frozenset[int]] | None = None
        self.bound_ms = 0.0

    def is_done(self) -> bool:
        """Whether the best choice is proven as close to the best as is asked for."""
        if self.best is None:
            return False
        return self.limits.closes(self.best[0], self.bound_ms)

    def is_over(self) -> bool:
        """Whether nothing more is to be looked for."""
        return self.is_done() or self.limits.left_s < 0

    def try_out(self, kept: frozenset[int]) -> list[Position]:
        """Replay a choice: improve it if it fits, else list positions over the cap."""
        try:
            replay = Replay(self.problem, kept)
        except ValueError:  # it needs a pinned op again
            return []
        broken = [moment.position for moment in replay.above(self.budget_bytes)]
        if not broken:
            kept = local_search.keep_again(self.problem, kept, self.budget_bytes)
            cost_ms = recompute_ms(self.problem, kept)
            if self.best is None or cost_ms < self.best[0]:
                self.best = cost_ms, kept
        return broken

    def _repair(self, kept: frozenset[int]) -> None:
        """Try out a choice with as little changed as makes it fit."""
        repaired = local_search.repair(self.problem, kept, self.budget_bytes)
        if repaired is not None:
            self.try_out(repaired)

    def add_rows(self, positions: Iterable[Position]) -> bool:
        """Make some positions rows; whether any is new."""
        return relaxing.add_rows(self.model, positions)

    @property
    def most_ms(self) -> float:
        """What choices must be cheaper than to be looked for."""
        gap = self.limits.relative_gap
        return math.inf if self.best is None else self.best[0] * (1.0 - gap)

    def relax(self) -> Termination:
        """Solve relaxations until they keep the budget; repair the last, rounded."""
        self.add_rows(self.try_out(self.problem.kept_plainly))
        ended = relaxing.relax(self.model, self.limits.backend, self._is_enough)
        if ended is Termination.OPTIMAL:
            for share in relaxing.SHARES:
                self._repair(self.model.kept(share))
        return ended

    def _is_enough(self, bound: float) -> bool:
        self.note_bound(bound)
        return self.is_over()

    def note_bound(self, bound: float | None, most_ms: float = math.inf) -> None:
        """Note a bound on the model's objective, as far as it holds."""
        if bound is not None:
            self.bound_ms = max(self.bound_ms, min(self.model.in_ms(bound), most_ms))

    def exchanged(self, kept: frozenset[int]) -> frozenset[int]:
        """A choice with values exchanged for others."""
        return local_search.exchange(self.problem, kept, self.budget_bytes)

    def branch(self) -> Termination:
        """Solve the model until its choice fits and is proven, or the work is done.

        With a choice at hand only such as are enough cheaper are looked for.
        """
        while not self.is_over() and self.work > 0:
            most_ms = self.most_ms
            if self.best is not None:
                self.model.cut_off(most_ms)
            outcome = self._solve(self.work)
            if outcome.termination is Termination.INFEASIBLE:
                if self.best is not None:
                    self.bound_ms = max(self.bound_ms, most_ms)
                return outcome.termination
            self.note_bound(outcome.bound, most_ms)
            if not outcome.termination.has_incumbent:
                break
            self._take(self.model.kept())
        return Termination.NO_INCUMBENT

    def branch_from_best(self) -> None:
        """Solve the model with the best choice as its first incumbent.

        By that HiGHS fixes variables and prunes, which it does not by a row. Whether
        a choice is better by less than the tie-break is not told apart here.
        """
        while not self.is_over() and self.work > 0:
            assert self.best is not None
            cost_ms, best = self.best
            self.model.cut_off(_LOOSE * cost_ms)
            with self.model.held(best, ()):
                held = pulp_runner.run(self.model.model, backend=self.limits.backend)
            if not held.termination.has_incumbent:
                return
            before = self.model.kept()
            gap = max(0.0, self.limits.relative_gap - self.model.tie_break_ms / cost_ms)
            outcome = self._solve(
                self.work, relative_gap=gap, warm_start=True, more_if_wide=_IF_WIDE
            )
            self.note_bound(outcome.bound, cost_ms)
            if not outcome.termination.has_incumbent or self.model.kept() == before:
                return
            self._take(self.model.kept())

    def jump(self) -> None:
        """Jump to choices between the bound and the best: a heuristic.

        Where parts of the step are alike it finds what no dive does.
        """
        work, in_vain = _WORK_ON_JUMPS, 0
        for seed in range(MOST_JUMPS):
            work -= int(OF_A_JUMP * pulp_runner.work_of(self.model.model)[0])
            if work < 0 or self.is_over() or in_vain == PATIENCE:
                return
            assert self.best is not None
            before = self.best
            cost_ms = before[0]
            room_ms = JUMPS_TO[seed % len(JUMPS_TO)] * (cost_ms - self.bound_ms)
            most_ms = min(self.bound_ms + room_ms, cost_ms * (1.0 - _WORTHWHILE))
            self.model.cut_off(most_ms)
            outcome = pulp_runner.run(
                self.model.model, backend=self.limits.backend, jump=seed
            )
            if outcome.termination is Termination.INFEASIBLE:
                self.bound_ms = max(self.bound_ms, most_ms)
            elif outcome.termination.has_incumbent:
                self._take(self.model.kept())
            in_vain = in_vain + 1 if self.best is before else 0

    @property
    def is_large(self) -> bool:
        """Whether work on the whole model counts more than its size tells."""
        return charge_of(self.model) > 1.0

    def gap_is_above(self, share: float) -> bool:
        """Whether the best choice is further from the bound, relative to its time."""
        return self.best is None or self.best[0] - self.bound_ms > share * self.best[0]

    def dive(self) -> None:
        """Round relaxations step by step, what is nearest to whole first.

        A heuristic for steps of many like parts, where whole models tell little.
        """
        kept = self.model.kept()
        with self.model.released():
            for _ in range(_DIVE_ROUNDS):
                outcome = pulp_runner.run(
                    self.model.model,
                    backend=self.limits.backend,
                    relaxed=True,
                    again=True,
                )
                if self.limits.left_s < 0:
                    return
                if not outcome.termination.has_incumbent:
                    break
                kept = self.model.kept()
                fractions = self.model.fractions()
                broken = fractional.broken(self.model, self.budget_bytes)
                is_new = self.add_rows(broken)
                if not fractions and not is_new:
                    break
                count = max(1, int(len(fractions) * _DECIDED))
                self.model.decide(v for _, v in fractions[:count])
        if self.try_out(kept):
            self._repair(kept)

    def look_around(self, work: int) -> None:
        """Solve for the values of one stretch of the step at a time, all others held.

        A heuristic: such models are small; what they find is the next one's others.
        """
        least = self.work - work
        values = sorted(self.model.keep)
        share = _STRETCH
        while self.at_root(share) > _OF_A_STRETCH * work:
            share /= 2
        size = max(_LEAST_STRETCH, int(len(values) * share))
        starts = range(0, len(values), max(1, size // 2))
        for first in starts:
            while not self.is_over() and self.work > least:
                assert self.best is not None
                before = self.best
                self.model.cut_off(before[0] * (1.0 - _WORTHWHILE))
                with self.model.held(before[1], values[first : first + size]):
                    free = min(1.0, size / len(values))
                    most = min(self.work - least, int(_OF_A_STRETCH * work))
                    outcome = self._solve(most, free)
                if not outcome.termination.has_incumbent:
                    break
                if not self._take(self.model.kept()) and self.best is before:
                    break

    def at_root(self, share: float) -> float:
        """What the root of the model counts if a share of its values is free."""
        return pulp_runner.work_of(self.model.model)[0] * charge_of(self.model, share)

    def _solve(
        self,
        work: int,
        share: float = 1.0,
        *,
        relative_gap: float | None = None,
        warm_start: bool = False,
        more_if_wide: float = 1.0,
    ) -> pulp_runner.Outcome:
        """Solve the model as it is; the work done counts.

        Args:
            work: The most.
            share: Of the values, that are not held.
            relative_gap: None for the one that is asked for.
            warm_start, more_if_wide: See `pulp_runner.run`.
        """
        charge = charge_of(self.model, share)
        outcome = pulp_runner.run(
            self.model.model,
            backend=self.limits.backend,
            time_limit_s=self.limits.solver_limit_s,
            work_limit=int(work / charge),
            relative_gap=self.limits.relative_gap
            if relative_gap is None
            else relative_gap,
            warm_start=warm_start,
            more_if_wide=more_if_wide,
            look_at_root=look_at_root(self.model, share),
        )
        self.work -= max(1, int(outcome.work * charge))
        return outcome

    def _take(self, kept: frozenset[int]) -> bool:
        """Try out the model's choice, and leave it out of the model if it is no good.

        Rows do that; or a cut, where it breaks them by less than solvers can tell.

        Returns:
            Whether there are rows that were not there before.
        """
        before = self.best
        broken = self.try_out(kept)
        is_new = self.add_rows(broken)
        if broken:
            self._repair(kept)
        if not is_new and (broken or self.best is before):
            self.model.forbid(kept)
        return is_new

    def solution(self, termination: Termination) -> GraphSolution:
        """What was found."""
        solve_s = self.limits.solve_s
        if self.best is None or not termination.has_incumbent:
            return GraphSolution(termination=termination, solve_s=solve_s)
        cost_ms, kept = self.best
        return GraphSolution(
            termination=termination,
            objective_ms=cost_ms,
            bound_ms=min(self.bound_ms, cost_ms),
            solve_s=solve_s,
            kept=kept,
            peak_bytes=peak_bytes(self.problem, kept),
        )
