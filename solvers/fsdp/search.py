"""Solves the parallel MILP with few rows of memory, and adds those that are broken."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import numpy.typing as npt
import pulp

from ..milp import pulp_runner
from ..milp.solution import Backend, Solution, Termination
from ..sac.table import Table
from . import step_time
from .greedy import by_hand, least_live, plain, rounded, simple_units
from .model import FsdpModel
from .problem import FsdpChoice, FsdpProblem, broken_rules, live, schedule, sharded_live
from .sites import Sites
from .step_time import StepTime
from .time_rows import TimedModel

_MIB = 2**20
_NOISE = 1e-6  # of an objective: solvers keep rows within such a tolerance
_SLACK_BYTES = 256.0  # whole rows are kept, shares only to a solver's tolerance
_PEAK_BYTES = 4096.0  # a least peak is found to this
_MOST_ROWS = 8  # new rows a round
_MOST_ROUNDS = 200
_MOST_WORK = 8_000_000  # of all MILPs together, see `pulp_runner.run`
_WHOLE_WORK = 2_000_000  # of that is left for what follows the units
_UNITS_SHARE = 0.9  # of what is left of a time limit is for the units
_ABOVE = (0.0, 0.01, 0.1, 0.3)  # of what a peak in shares is below the best one
_WELL = 0.2  # of the gap: what rounding may lose before a MILP is worth it


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSolution(Solution):
    """FSDP units, what reshards and AC points; all None without an incumbent.

    Attributes:
        choice: What was decided. `objective_ms` is the time of a step under it in the
            linear form of `step_time`, and `bound_ms` is on that.
        step: Where that time goes.
        simulated: The same by `step_time.simulate`.
        predicted_peak_bytes: Most live memory of a rank at any position.
        rows: Positions whose memory was capped.
    """

    choice: FsdpChoice | None = None
    step: StepTime | None = None
    simulated: StepTime | None = None
    predicted_peak_bytes: int | None = None
    rows: frozenset[int] = frozenset()


def estimate(problem: FsdpProblem, choice: FsdpChoice) -> FsdpSolution:
    """Time and peak of a choice; nothing is optimised, and the budget is ignored.

    Raises:
        ValueError: The choice breaks a rule of FSDP2 or AC.
    """
    if broken := broken_rules(problem, choice):
        raise ValueError(f"`choice` breaks rules: {' '.join(broken)}")
    plan = schedule(problem, choice)
    step = step_time.linear(plan)
    return FsdpSolution(
        termination=Termination.FEASIBLE,
        objective_ms=step.total_ms,
        choice=choice,
        step=step,
        simulated=step_time.simulate(plan),
        predicted_peak_bytes=int(live(problem, choice).max()),
    )


def candidates(problem: FsdpProblem) -> list[int]:
    """Modules that may be FSDP units: those of a kind only if all of it may."""
    modules = problem.modules
    inside = [module.gather_bytes for module in modules]
    for index in reversed(range(1, len(modules))):
        inside[modules[index].parent or 0] += inside[index]
    may = [
        module.can_be_unit and inside[index] > 0 for index, module in enumerate(modules)
    ]
    barred = {m.kind for m, good in zip(modules, may, strict=True) if not good}
    barred.discard(None)
    return [
        index
        for index, module in enumerate(modules)
        if index == 0 or (may[index] and module.kind not in barred)
    ]


class Search:
    """One solve: see `solvers.fsdp.solve` for its options.

    Args:
        problem: Modules, AC units, costs and budget.
        peak: Whether the least peak is searched, not the least time.
        backend: Which solver to run.
        time_limit_s: Stop branching after this long; relaxations are solved in full.
        relative_gap: Stop when proven this close to the optimum.
        rows: Positions to cap from the start.
    """

    def __init__(
        self,
        problem: FsdpProblem,
        *,
        peak: bool,
        backend: Backend,
        time_limit_s: float | None,
        relative_gap: float,
        rows: Collection[int] = (),
    ) -> None:
        self._started = perf_counter()
        self._problem = problem
        self._table = Table(problem.sac)
        self._peak = peak
        self._backend: Backend = backend
        self._ends = None if time_limit_s is None else self._started + time_limit_s
        self._gap = relative_gap
        self._rows = set(rows)
        self._work_left, self._reserve = _MOST_WORK, 0
        # By units, the value of the best solution with the rest in shares.
        self._in_shares: dict[tuple[int, ...], float] = {}
        self._best: FsdpSolution | None = None
        self._best_value = math.inf  # in ms, or in MiB if it is a peak

    def run(self, fixed_units: Collection[int] | None) -> FsdpSolution:
        """Decide on what is open."""
        problem = self._problem
        if fixed_units is not None:
            chosen = tuple(sorted({0, *fixed_units}))
            self._check(chosen)
            self._offer_by_hand([chosen])
            return self._result(*self._whole(chosen, forced=True))
        open_ones = candidates(problem)
        simple = simple_units(problem, open_ones)
        self._offer_by_hand(simple)
        kinds = [problem.modules[index].kind for index in open_ones]
        named = [kind for kind in kinds if kind is not None]
        if len(named) == len(set(named)):
            return self._result(*self._whole(open_ones, forced=False))
        return self._two_steps(open_ones, simple)

    def _check(self, chosen: Sequence[int]) -> None:
        """Refuse fixed units that break a rule of FSDP2, or are no modules."""
        count = len(self._problem.modules)
        if not all(0 <= index < count for index in chosen):
            raise ValueError(f"`fixed_units` must name modules below {count}.")
        if broken := broken_rules(self._problem, plain(self._problem, chosen)):
            raise ValueError(f"`fixed_units` breaks rules: {' '.join(broken)}")

    def bound(self) -> float | None:
        """Bound of the relaxation with the first rows; None if it has no solution."""
        open_ones = candidates(self._problem)
        model = self._model(open_ones, forced=False, integral=False)
        relaxed = self._run(model, relaxed=True)
        if relaxed.termination is Termination.INFEASIBLE:
            return None
        return 0.0 if relaxed.bound is None else relaxed.bound + model.constant_ms

    def _two_steps(
        self, open_ones: Sequence[int], simple: Sequence[tuple[int, ...]]
    ) -> FsdpSolution:
        """Decide on the units with the rest in shares, then on the rest."""
        self._reserve = _WHOLE_WORK
        chosen = self._best_simple(simple)
        model = self._model(open_ones, forced=False, integral=False)
        bound = None if chosen is None else self._relaxed_bound(model)
        if chosen is None or bound is None or not self._is_near(chosen, bound):
            termination, bound = self._decide_units(model, chosen, bound)
            if termination.has_incumbent:
                units = model.units()
                chosen = tuple(index for index, unit in enumerate(units) if unit)
                self._note(model, chosen)
            elif termination is Termination.INFEASIBLE or chosen is None:
                return self._result(termination, bound)
        if bound is None:  # a limit ended branching, perhaps with tightened rows
            bound = self._relaxed_bound(
                self._model(open_ones, forced=False, integral=False)
            )
        self._reserve = 0
        if self._is_rounded_well(chosen):
            return self._result(Termination.FEASIBLE, bound)
        termination, _ = self._whole(chosen, forced=True)
        if termination is Termination.INFEASIBLE and self._best is None:
            # In shares it was not.
            termination, _ = self._whole(open_ones, forced=False)
        return self._result(termination, bound)

    def _best_simple(self, simple: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """The best units of a few plans by hand, with the rest in shares."""
        least = {chosen: self._least_value(chosen) for chosen in simple}
        for chosen in sorted(simple, key=least.__getitem__):
            if least[chosen] >= self._best_value:
                break
            if self._is_hopeless(chosen):
                continue
            model = self._model(chosen, forced=True, integral=False)
            termination, _ = self._until_kept(model, integral=False)
            if termination.has_incumbent:
                self._note(model, chosen)
        if self._in_shares:
            return min(self._in_shares, key=self._in_shares.__getitem__)
        if self._best is None or self._best.choice is None:
            return None
        units = self._best.choice.units
        return tuple(index for index, unit in enumerate(units) if unit)

    def _note(self, model: FsdpModel, chosen: tuple[int, ...]) -> None:
        """Record the objective of units with the rest in shares; round what may win."""
        value = float(pulp.value(model.model.objective)) + model.constant_ms
        if value < self._best_value:
            self._offer_rounded(model, value)
        self._in_shares[chosen] = value

    def _decide_units(
        self, model: FsdpModel, chosen: tuple[int, ...] | None, bound: float | None
    ) -> tuple[Termination, float | None]:
        """Branch on the units; how that ended, and the bound."""
        if chosen is not None:  # the best solution with these is in the variables
            model.fix_units(chosen)
            self._run(model, relaxed=True)
            model.fix_units(None)
        termination, of_branching = self._until_kept(
            model, integral=False, warm_start=chosen is not None
        )
        if of_branching is not None:
            bound = max(of_branching, bound or 0.0)
        return termination, bound

    def _relaxed_bound(self, model: FsdpModel) -> float | None:
        """Bound of the relaxation; None, after a while, where that is infeasible."""
        relaxed = self._run(model, relaxed=True)
        return None if relaxed.bound is None else relaxed.bound + model.constant_ms

    def _whole(
        self, open_ones: Sequence[int], *, forced: bool
    ) -> tuple[Termination, float | None]:
        """Solve the MILP without shares: how that ended, and the model's own bound."""
        model = self._model(open_ones, forced=forced, integral=True)
        termination, bound = self._until_kept(model, integral=True)
        if termination.has_incumbent:
            self._offer(model.choice())
        return termination, bound

    def _is_near(self, chosen: tuple[int, ...], bound: float) -> bool:
        """Whether no other units can be much better, with the rest in shares."""
        value = self._in_shares.get(chosen, self._best_value)
        return value - bound <= self._gap / 2 * value

    def _is_rounded_well(self, chosen: tuple[int, ...]) -> bool:
        """Whether the best choice takes hardly longer than its units must.

        Compute that is there in any case does not count.
        """
        value = self._in_shares.get(chosen, -math.inf)
        compute_ms = 0.0 if self._peak else sum(self._problem.compute_ms)
        return self._best_value - value <= _WELL * self._gap * (value - compute_ms)

    def _least_value(self, chosen: Collection[int]) -> float:
        """Nothing with these units takes less: what it takes if memory is ample."""
        if self._peak:
            return 0.0
        plan = schedule(self._problem, plain(self._problem, chosen))
        return step_time.linear(plan).total_ms

    def _is_hopeless(self, chosen: Collection[int]) -> bool:
        """Whether a position is above the cap although all that lowers it is done."""
        if self._peak:
            return False
        least = least_live(self._problem, self._table, chosen, self._rows)
        return least > self._problem.sac.budget_bytes

    # --- choices ------------------------------------------------------------------

    def _offer_by_hand(self, simple: Sequence[tuple[int, ...]]) -> None:
        """Offer plans that people write by hand as first incumbents."""
        for units in simple:
            for choice in by_hand(self._problem, units):
                self._offer(choice)

    def _offer_rounded(self, model: FsdpModel, value: float) -> None:
        """Round a solution in shares, or one that breaks rows, and offer the choice.

        Args:
            model: It holds the solution,
            value: of this objective. A peak is rounded to one somewhat above it, on
                the way to the best one, or else to twice as much.
        """
        caps = [self._problem.sac.budget_bytes]
        if self._peak:
            above = self._best_value if math.isfinite(self._best_value) else 2 * value
            more = max(0.0, above - value)
            caps = [int((value + share * more) * _MIB) for share in _ABOVE]
        shares = model.units(), model.reshards(), model.weights()
        for cap_bytes in caps:
            choice = rounded(self._problem, self._table, cap_bytes, shares)
            if choice is not None:
                self._offer(choice)
                return

    def _offer(self, choice: FsdpChoice) -> None:
        """Keep a choice if it fits and none is known that is better."""
        if not self._problem.keeps_host(choice):
            return
        peak_bytes = int(self._live(choice).max())
        if not self._peak and peak_bytes > self._problem.sac.budget_bytes:
            return
        if self._peak and peak_bytes / _MIB >= self._best_value:
            return
        solution = estimate(self._problem, choice)
        assert solution.objective_ms is not None
        value = peak_bytes / _MIB if self._peak else solution.objective_ms
        if value < self._best_value:
            self._best, self._best_value = solution, value

    def _live(self, choice: FsdpChoice) -> npt.NDArray[np.float64]:
        """Live memory at each position."""
        points = self._table.live(self._table.weights(choice.points))
        return points + sharded_live(self._problem, choice.units, choice.reshard)

    def _result(self, termination: Termination, bound: float | None) -> FsdpSolution:
        """The best choice; without one, how the last solve ended."""
        solve_s = perf_counter() - self._started
        best = self._best
        if best is None:
            is_infeasible = termination is Termination.INFEASIBLE
            return FsdpSolution(
                termination=termination,
                bound_ms=None if is_infeasible or self._peak else bound,
                solve_s=solve_s,
                rows=frozenset(self._rows),
            )
        if bound is not None:
            bound = min(bound, self._best_value)  # rounding may put it above
        slack = (self._gap + _NOISE) * self._best_value
        if self._peak:
            slack += _PEAK_BYTES / _MIB
        is_proven = bound is not None and self._best_value - bound <= slack
        return replace(
            best,
            termination=Termination.OPTIMAL if is_proven else Termination.FEASIBLE,
            bound_ms=None if self._peak else bound,
            solve_s=solve_s,
            rows=frozenset(self._rows),
        )

    # --- solving models -----------------------------------------------------------

    def _model(
        self, open_ones: Sequence[int], *, forced: bool, integral: bool
    ) -> FsdpModel:
        sites = Sites(self._problem, open_ones, forced=forced)
        parts = (self._problem, self._table, sites)
        model = (
            FsdpModel(*parts, forced=forced, integral=integral, peak=True)
            if self._peak
            else TimedModel(*parts, forced=forced, integral=integral)
        )
        self._rows |= self._first_rows(open_ones)
        for position in sorted(self._rows):
            model.add_row(position)
        return model

    def _first_rows(self, open_ones: Sequence[int]) -> set[int]:
        """Where memory peaks with all candidates as units, or none, resharded."""
        problem, among = self._problem, set(open_ones)
        every = [index in among for index in range(len(problem.modules))]
        none = [index == 0 for index in range(len(problem.modules))]
        peaks = set()
        for units in (every, none):
            shares = [float(unit and index > 0) for index, unit in enumerate(units)]
            added = sharded_live(problem, units, shares)
            peaks.add(int((self._table.base + added).argmax()))
        return peaks

    def _until_kept(
        self, model: FsdpModel, *, integral: bool, warm_start: bool = False
    ) -> tuple[Termination, float | None]:
        """Solve until no position is broken; the bound is of the rows as they are."""
        bound: float | None = None
        tightened = False
        for num_rounds in itertools.count(1):
            outcome = self._run(
                model,
                relaxed=model.is_linear,
                relative_gap=self._gap if integral else self._gap / 2,
                warm_start=warm_start and num_rounds == 1,
            )
            if not tightened and outcome.bound is not None:
                bound = outcome.bound + model.constant_ms
            if not outcome.termination.has_incumbent:
                return outcome.termination, bound
            if bound is not None and bound >= self._best_value:
                return Termination.NO_INCUMBENT, bound  # none that is better
            broken = self._broken(model, integral=integral)
            if not broken:
                return outcome.termination, bound
            if num_rounds == _MOST_ROUNDS:
                break
            for position, excess in broken:
                if model.has_row(position):  # broken within the solver's tolerance
                    model.add_row(position, slack_bytes=excess + _SLACK_BYTES)
                    tightened = True
                else:
                    model.add_row(position)
                    self._rows.add(position)
        return Termination.NO_INCUMBENT, bound

    def _run(
        self,
        model: FsdpModel,
        *,
        relaxed: bool = False,
        relative_gap: float = 0.0,
        warm_start: bool = False,
    ) -> pulp_runner.Outcome:
        """Solve a model within what is left of work and time."""
        left_s, work_left = None, None
        if self._ends is not None and not relaxed:
            left_s = max(0.0, self._ends - perf_counter())
            left_s *= _UNITS_SHARE if self._reserve else 1.0
        elif not relaxed:
            work_left = max(0, self._work_left - self._reserve)
        outcome = pulp_runner.run(
            model.model,
            backend=self._backend,
            time_limit_s=left_s,
            work_limit=work_left,
            relative_gap=relative_gap,
            relaxed=relaxed,
            warm_start=warm_start,
        )
        if not relaxed:
            self._work_left -= max(1, outcome.work)
        return outcome

    def _broken(self, model: FsdpModel, *, integral: bool) -> list[tuple[int, float]]:
        """Positions above the cap, the worst of their surroundings, and by how much."""
        problem = self._problem
        if integral:
            live_bytes = self._live(model.choice())
        else:
            weights = np.concatenate([[0.0], *model.weights()])[1:]
            live_bytes = self._table.live(weights)
            live_bytes += sharded_live(problem, model.units(), model.reshards())
        cap = float(problem.sac.budget_bytes) + (0.0 if integral else _SLACK_BYTES)
        if self._peak:
            # A peak that rows already cap is what it is.
            capped = [live_bytes[q] for q in self._rows if model.has_row(q)]
            cap = max(capped, default=0.0) + _PEAK_BYTES
        excess = live_bytes - cap
        above = np.flatnonzero(excess > 0.0)
        if not len(above):
            return []
        # One per stretch of broken positions, the worst first.
        stretches = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1)
        worst = [int(part[excess[part].argmax()]) for part in stretches]
        worst.sort(key=lambda q: -excess[q])
        return [(q, float(excess[q])) for q in worst[:_MOST_ROWS]]
