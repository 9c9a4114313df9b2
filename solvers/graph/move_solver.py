"""Which forward values to keep, make again or move under a cap on the true peak.

The relaxation and the MILP of `move_model.py` get rows where their choices break the
budget, as in `solver.py`. Each choice on the way gets places for its moves, is played,
and is improved value by value. A choice that takes longer than the model says is not
forbidden, as other places for its moves may be better: so every bound holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..milp import pulp_runner
from ..milp.solution import Backend, Solution, Termination
from . import move_search, relaxing
from .limits import Limits, charge_of
from .move_model import MoveModel
from .moving import (
    Choice,
    MovedStep,
    MovePlan,
    MoveProblem,
    late_peak_bytes,
    moved_at_floor,
    plan_moves,
)
from .recomputation import Position, stretches

_SPREAD = 6  # positions of forward, and of backward, to begin with
_MOST_WORK = 4_000_000  # of all MILPs of one budget: some ten seconds
_MOST_FORBIDDEN = 16  # choices, one by one
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSolution(Solution):
    """What becomes of forward's values.

    Attributes:
        plan: None without an incumbent.
    """

    plan: MovePlan | None = None


def solve(
    problem: MoveProblem,
    *,
    budget_bytes: int,
    start: Iterable[MovePlan] = (),
    time_limit_s: float | None = None,
    relative_gap: float = 0.0,
    backend: Backend = "highs",
) -> MoveSolution:
    """Keep, make again or move values within a budget, in little time.

    Args:
        problem: The step.
        budget_bytes: Cap on its peak.
        start: Plans that may fit; the result takes no more time than any that does.
        time_limit_s: Stop after about so long; None to stop after an amount of work.
        relative_gap: Stop as soon as a plan is proven this close to the best.
        backend: Which MILP solver to run.

    Returns:
        The outcome, with a bound for every plan that recomputes and moves a value at
        most once. A budget that no plan was found for is an outcome, not an error.
    """
    limits = Limits(
        backend=backend, time_limit_s=time_limit_s, relative_gap=relative_gap
    )
    search = _Search(problem, budget_bytes, limits)
    search.begin([*start])
    if not search.is_done():
        search.run()
    return search.solution()


class _Search:
    """Search with rows on demand.

    Attributes:
        best: The best plan that fits.
        bound_ms: Proven so far.
    """

    def __init__(self, problem: MoveProblem, budget_bytes: int, limits: Limits) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self._limits = limits
        self.model = MoveModel(problem, budget_bytes=budget_bytes)
        self.best: MovePlan | None = None
        self.bound_ms = 0.0
        self._tried: set[Choice] = set()

    def is_done(self) -> bool:
        """Whether the best plan is proven as close to the best as is asked for."""
        if self.best is None:
            return False
        return self._limits.closes(self.best.cost_ms, self.bound_ms)

    def _is_over(self) -> bool:
        return self.is_done() or self._limits.left_s < 0

    def begin(self, starts: list[MovePlan]) -> None:
        """Try out the best of some plans that fit, and keeping or moving everything."""
        problem, budget_bytes = self.problem, self.budget_bytes
        for plan in starts:
            if plan.peak_bytes <= budget_bytes and problem.holds(plan.choice.moved):
                self._take(plan)
                again = plan_moves(problem, plan.choice, budget_bytes)
                self._take(again or plan)  # with as many bytes as there are now
        kept = problem.graph.kept_plainly
        for choice in (Choice(kept), Choice(kept, moved_at_floor(problem, kept))):
            plain = plan_moves(problem, choice, budget_bytes)
            if plain is not None:
                self._take(plain)
        if self.best is not None:
            self._take(move_search.improved(problem, self.best, budget_bytes))

    def _take(self, plan: MovePlan) -> None:
        """Note a plan that fits, if it is the best."""
        if self.best is None or plan.rank < self.best.rank:
            self.best = plan

    def try_out(self, choice: Choice) -> None:
        """Repair a choice, and improve it if it fits then."""
        if choice in self._tried:
            return
        self._tried.add(choice)
        repaired = move_search.repair(self.problem, choice, self.budget_bytes)
        if repaired is None:
            return
        plan = plan_moves(self.problem, repaired, self.budget_bytes)
        if plan is not None:
            self._take(move_search.improved(self.problem, plan, self.budget_bytes))

    def _spread(self, choice: Choice) -> list[Position]:
        """Positions of forward and backward over the budget, evenly spread."""
        step = MovedStep(self.problem, choice)
        over = np.flatnonzero(step.replay.live_bytes > self.budget_bytes)
        num_forward = len(self.problem.graph.reads)
        places: list[int] = []
        for some in (over[over < num_forward], over[over >= num_forward]):
            picked = np.linspace(0, len(some) - 1, min(len(some), _SPREAD))
            places += some[picked.round().astype(int)].tolist()
        return [step.replay.position(place) for place in dict.fromkeys(places)]

    def _broken(self, choice: Choice) -> list[Position]:
        try:
            return broken(self.problem, choice, self.budget_bytes)
        except ValueError:  # it needs a pinned op again
            return []

    def _note_bound(self, bound: float | None, most_ms: float = math.inf) -> None:
        if bound is not None:
            self.bound_ms = max(self.bound_ms, min(self.model.in_ms(bound), most_ms))

    def run(self) -> None:
        """Solve the relaxation, round it, then the model until its choice fits."""
        for position in self._spread(Choice(self.problem.graph.kept_plainly)):
            self.model.add_row(position)
        ended = relaxing.relax(self.model, self._limits.backend, self._is_enough)
        if ended is not Termination.OPTIMAL:
            return
        for share in relaxing.SHARES:
            if self.is_done():
                return
            self.try_out(self.model.choice(share))
        self._branch()

    def _is_enough(self, bound: float) -> bool:
        self._note_bound(bound)
        return self._is_over()

    def _branch(self) -> None:
        """Solve the model until its choice fits, or the work is done."""
        work = self._limits.work(_MOST_WORK)
        while not self._is_over() and work > 0:
            most_ms = math.inf
            if self.best is not None:
                most_ms = self.best.cost_ms * (1.0 - self._limits.relative_gap)
                self.model.cut_off(most_ms)
            rate = charge_of(self.model)
            outcome = pulp_runner.run(
                self.model.model,
                backend=self._limits.backend,
                time_limit_s=self._limits.solver_limit_s,
                work_limit=int(work / rate),
                relative_gap=self._limits.relative_gap,
            )
            work -= max(1, int(outcome.work * rate))
            if outcome.termination is Termination.INFEASIBLE:
                if self.best is not None:
                    self.bound_ms = max(self.bound_ms, most_ms)
                return
            self._note_bound(outcome.bound, most_ms)
            if not outcome.termination.has_incumbent:
                return
            choice = self.model.choice()
            self.try_out(choice)
            if not relaxing.add_rows(self.model, self._broken(choice)):
                return

    def solution(self) -> MoveSolution:
        solve_s = self._limits.solve_s
        if self.best is None:
            return MoveSolution(termination=Termination.NO_INCUMBENT, solve_s=solve_s)
        is_done = self.is_done()
        cost_ms = self.best.cost_ms
        return MoveSolution(
            termination=Termination.OPTIMAL if is_done else Termination.FEASIBLE,
            objective_ms=cost_ms,
            bound_ms=min(self.bound_ms, cost_ms),
            solve_s=solve_s,
            plan=self.best,
        )


def broken(problem: MoveProblem, choice: Choice, cap_bytes: float) -> list[Position]:
    """The highest position of every stretch above a cap with late moves, highest first.

    Raises:
        ValueError: A pinned op would have to run again.
    """
    step = MovedStep(problem, choice)
    live = step.live_bytes(step.late)
    places = [
        first + int(live[first:end].argmax())
        for first, end in stretches(live > cap_bytes)
    ]
    places.sort(key=lambda place: -int(live[place]))
    return [step.replay.position(place) for place in places]


def lowest(
    problem: MoveProblem,
    *,
    start: Iterable[Choice] = (),
    time_limit_s: float | None = None,
    backend: Backend = "highs",
) -> tuple[int, Choice]:
    """The least peak that some work finds, with late moves, and its choice.

    Args:
        problem: The step.
        start: Choices that are known.
        time_limit_s: Stop branching after about so long.
        backend: Which MILP solver to run.
    """
    limits = Limits(backend=backend, time_limit_s=time_limit_s)
    plain = problem.graph.kept_plainly
    best = _least(problem, (Choice(plain), *start), 0)
    model = MoveModel(problem, budget_bytes=None)
    relaxing.add_rows(model, broken(problem, best[1], best[0] - 1))
    bounds: list[float] = []

    def is_enough(bound: float) -> bool:
        bounds.append(bound)
        return limits.left_s < 0

    relaxing.relax(model, backend, is_enough)
    rounded = [model.choice(share) for share in relaxing.SHARES] if bounds else []
    best = _least(problem, rounded, round(max(bounds, default=0.0) * _MIB), best)
    return _branched(problem, model, best, limits)


def _branched(
    problem: MoveProblem, model: MoveModel, best: tuple[int, Choice], limits: Limits
) -> tuple[int, Choice]:
    """Solve the model of the least peak until rows hold, or the work is done."""
    work = limits.work(_MOST_WORK)
    forbids = _MOST_FORBIDDEN
    while work > 0 and limits.left_s > 0:
        rate = charge_of(model)
        outcome = pulp_runner.run(
            model.model,
            backend=limits.backend,
            time_limit_s=limits.solver_limit_s,
            work_limit=int(work / rate),
        )
        work -= max(1, int(outcome.work * rate))
        if not outcome.termination.has_incumbent:
            break
        choice = model.choice()
        cap_bytes = round((outcome.bound or 0.0) * _MIB)
        best = _least(problem, (choice,), cap_bytes, best)
        if best[0] <= cap_bytes:
            break
        try:
            over = broken(problem, choice, cap_bytes)
        except ValueError:  # it needs a pinned op again
            break
        if not relaxing.add_rows(model, over):
            # All that it breaks are rows: of what is made again some count too little.
            if not forbids or not model.keep:
                break
            forbids -= 1
            model.forbid(choice.kept)
    return best


def _least(
    problem: MoveProblem,
    choices: Iterable[Choice],
    cap_bytes: int,
    best: tuple[int, Choice] | None = None,
) -> tuple[int, Choice]:
    """The choice of least peak of some, all moved or repaired, and of a known one."""
    for choice in choices:
        all_moved = Choice(choice.kept, moved_at_floor(problem, choice.kept))
        for one in (choice, all_moved):
            repaired = move_search.repair(problem, one, cap_bytes)
            if repaired is None:
                continue
            peak_bytes = late_peak_bytes(problem, repaired)
            if best is None or peak_bytes < best[0]:
                best = peak_bytes, repaired
    assert best is not None
    return best
