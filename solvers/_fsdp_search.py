"""Solves the parallel MILP with few rows of memory, and adds those that are broken."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import pulp

from solvers import _pulp, step_time
from solvers._fsdp_model import FsdpModel
from solvers._fsdp_sites import Sites
from solvers._pulp import Backend
from solvers._sac_table import Table
from solvers.fsdp_problem import (
    FsdpChoice,
    FsdpProblem,
    broken_rules,
    live,
    mixed_live,
    schedule,
)
from solvers.solution import Solution, Termination
from solvers.step_time import StepTime

_MIB = 2**20
_NOISE = 1e-6  # of an objective: solvers keep rows within such a tolerance
_SLACK_BYTES = 256.0  # whole rows are kept, shares only to a solver's tolerance
_PEAK_BYTES = 4096.0  # a least peak is found to this
_MOST_ROWS = 8  # new rows a round
_MOST_ROUNDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSolution(Solution):
    """FSDP units, what reshards and AC points; all None without an incumbent.

    Attributes:
        choice: What was decided. `objective_ms` is the time of a step under it in the
            linear form of `step_time`, and `bound_ms` is on that.
        step: Where that time goes.
        simulated: The same by `step_time.simulate`.
        predicted_peak_bytes: Most live memory of a rank at any position.
    """

    choice: FsdpChoice | None = None
    step: StepTime | None = None
    simulated: StepTime | None = None
    predicted_peak_bytes: int | None = None


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


def candidates(problem: FsdpProblem, *, least_unit_bytes: int = 0) -> list[int]:
    """Modules that may be FSDP units: those of a kind only if all of it may.

    Args:
        problem: The modules.
        least_unit_bytes: Leaves out modules whose parameters, with those of all that
            is inside, gather to less than this.
    """
    modules = problem.modules
    inside = [module.gather_bytes for module in modules]
    for index in reversed(range(1, len(modules))):
        inside[modules[index].parent or 0] += inside[index]
    may = [
        module.can_be_unit and inside[index] >= max(1, least_unit_bytes)
        for index, module in enumerate(modules)
    ]
    barred = {m.kind for m, good in zip(modules, may, strict=True) if not good}
    barred.discard(None)
    return [
        index
        for index, module in enumerate(modules)
        if index == 0 or (may[index] and module.kind not in barred)
    ]


def _simple_units(
    problem: FsdpProblem, open_ones: Sequence[int]
) -> list[tuple[int, ...]]:
    """Plans that people write by hand: every layer, or every part of one, a unit."""
    modules = problem.modules
    alone = [index for index in open_ones if index and modules[index].kind is None]
    kinds = dict.fromkeys(modules[index].kind for index in open_ones)
    plans = [{0, *alone}, {0}]
    for kind in kinds:
        if kind is not None:
            same = [index for index in open_ones if modules[index].kind == kind]
            plans.append({0, *alone, *same})
    around = {modules[index].parent for index in open_ones}
    plans.append({0, *(index for index in open_ones if index not in around)})
    found = []
    for plan in plans:
        choice = FsdpChoice(
            units=tuple(index in plan for index in range(len(modules))),
            reshard=(False,) * len(modules),
            points=(None,) * len(problem.sac.units),
        )
        chosen = tuple(sorted(plan))
        if chosen not in found and not broken_rules(problem, choice):
            found.append(chosen)
    return found


class Search:
    """One solve: see `solvers.fsdp.solve` for its options."""

    def __init__(
        self,
        problem: FsdpProblem,
        *,
        backend: Backend,
        time_limit_s: float | None,
        relative_gap: float,
        fixed_reshard: Mapping[int, bool] | None,
        fixed_points: Sequence[int | None] | None,
    ) -> None:
        self._started = perf_counter()
        self._problem = problem
        self._table = Table(problem.sac)
        self._backend: Backend = backend
        self._limit_s = self._deadline_s = time_limit_s
        self._gap = relative_gap
        self._reshard = dict(fixed_reshard or {})
        self._points = None if fixed_points is None else tuple(fixed_points)
        self._rows: set[int] = set()
        self._check()

    def run(
        self,
        fixed_units: Collection[int] | None,
        least_unit_bytes: int,
        *,
        peak: bool,
    ) -> FsdpSolution:
        """Decide on what is open."""
        problem = self._problem
        if fixed_units is not None:
            chosen = {0, *fixed_units}
            self._check_units(chosen)
            return self._whole(sorted(chosen), forced=True, peak=peak, bound=None)
        open_ones = candidates(problem, least_unit_bytes=least_unit_bytes)
        kinds = [problem.modules[index].kind for index in open_ones]
        named = [kind for kind in kinds if kind is not None]
        if len(named) == len(set(named)):
            return self._whole(open_ones, forced=False, peak=peak, bound=None)
        return self._two_steps(open_ones, peak=peak)

    def _two_steps(self, open_ones: Sequence[int], *, peak: bool) -> FsdpSolution:
        """Decide on the units with the rest in shares, then on the rest."""
        self._deadline_s = None if self._limit_s is None else self._limit_s / 2
        best = self._best_simple(open_ones, peak=peak)
        model = self._model(open_ones, forced=False, integral=False, peak=peak)
        bound, chosen = None, None
        if best is not None:
            chosen = best[1]
            bound = self._relaxed_bound(model)
        if best is None or bound is None or best[0] - bound > self._gap / 2 * best[0]:
            if chosen is not None:
                self._offer(model, chosen)
            termination, of_branching = self._until_kept(
                model, integral=False, peak=peak, warm_start=chosen is not None
            )
            if of_branching is not None:
                bound = max(of_branching, bound or 0.0)
            if termination.has_incumbent:
                units = model.units()
                chosen = tuple(index for index, unit in enumerate(units) if unit)
            elif termination is Termination.INFEASIBLE or chosen is None:
                return self._nothing(termination, bound)
        if bound is None:  # a limit ended branching, perhaps with tightened rows
            model = self._model(open_ones, forced=False, integral=False, peak=peak)
            bound = self._relaxed_bound(model)
        assert chosen is not None
        self._deadline_s = self._limit_s
        found = self._whole(chosen, forced=True, peak=peak, bound=bound)
        if found.termination is Termination.INFEASIBLE:  # in shares it was not
            return self._whole(open_ones, forced=False, peak=peak, bound=bound)
        return found

    def _relaxed_bound(self, model: FsdpModel) -> float | None:
        """Bound of the relaxation; slow where that is infeasible."""
        relaxed = _pulp.run(model.model, backend=self._backend, relaxed=True)
        return None if relaxed.bound is None else relaxed.bound + model.constant_ms

    def _best_simple(
        self, open_ones: Sequence[int], *, peak: bool
    ) -> tuple[float, tuple[int, ...]] | None:
        """The best of a few plans by hand, with the rest in shares: value and units."""
        best: tuple[float, tuple[int, ...]] | None = None
        for chosen in _simple_units(self._problem, open_ones):
            model = self._model(chosen, forced=True, integral=False, peak=peak)
            termination, _ = self._until_kept(model, integral=False, peak=peak)
            if termination.has_incumbent:
                value = float(pulp.value(model.model.objective)) + model.constant_ms
                if best is None or value < best[0]:
                    best = value, chosen
        return best

    def _offer(self, model: FsdpModel, chosen: Sequence[int]) -> None:
        """Leave the best solution with given units in the variables."""
        model.fix_units(chosen)
        _pulp.run(model.model, backend=self._backend, relaxed=True)
        model.fix_units(None)

    def _whole(
        self,
        open_ones: Sequence[int],
        *,
        forced: bool,
        peak: bool,
        bound: float | None,
    ) -> FsdpSolution:
        """Decide in whole; a bound that is given holds instead of the model's own."""
        model = self._model(open_ones, forced=forced, integral=True, peak=peak)
        termination, own_bound = self._until_kept(model, integral=True, peak=peak)
        if bound is None:
            bound = own_bound
        if not termination.has_incumbent:
            return self._nothing(termination, bound)
        found = estimate(self._problem, model.choice())
        solve_s = perf_counter() - self._started
        if peak:
            assert found.predicted_peak_bytes is not None
            least = 0.0 if bound is None else bound * _MIB
            slack = _PEAK_BYTES + self._gap * found.predicted_peak_bytes
            if found.predicted_peak_bytes - least > slack:
                termination = Termination.FEASIBLE
            return replace(found, termination=termination, solve_s=solve_s)
        assert found.objective_ms is not None
        if bound is not None:
            bound = min(bound, found.objective_ms)  # rounding may put it above
        is_proven = (
            bound is not None
            and found.objective_ms - bound <= (self._gap + _NOISE) * found.objective_ms
        )
        return replace(
            found,
            termination=Termination.OPTIMAL if is_proven else Termination.FEASIBLE,
            bound_ms=bound,
            solve_s=solve_s,
        )

    def _nothing(self, termination: Termination, bound: float | None) -> FsdpSolution:
        if termination is Termination.INFEASIBLE:
            bound = None
        return FsdpSolution(
            termination=termination,
            bound_ms=bound,
            solve_s=perf_counter() - self._started,
        )

    def _model(
        self, open_ones: Sequence[int], *, forced: bool, integral: bool, peak: bool
    ) -> FsdpModel:
        sites = Sites(self._problem, open_ones, forced=forced)
        model = FsdpModel(
            self._problem,
            self._table,
            sites,
            forced=forced,
            integral=integral,
            peak=peak,
            reshard=self._reshard,
            points=self._points,
        )
        self._rows |= self._first_rows(open_ones)
        for position in sorted(self._rows):
            model.add_row(position)
        return model

    def _first_rows(self, open_ones: Sequence[int]) -> set[int]:
        """Where memory peaks with all candidates as units, or none, resharded."""
        problem = self._problem
        nothing = [[0.0] * len(unit.points) for unit in problem.sac.units]
        every = [index in set(open_ones) for index in range(len(problem.modules))]
        none = [index == 0 for index in range(len(problem.modules))]
        found = set()
        for units in (every, none):
            shares = [float(unit and index > 0) for index, unit in enumerate(units)]
            found.add(int(mixed_live(problem, units, shares, nothing).argmax()))
        return found

    def _until_kept(
        self,
        model: FsdpModel,
        *,
        integral: bool,
        peak: bool,
        warm_start: bool = False,
    ) -> tuple[Termination, float | None]:
        """Solve until no position is broken; the bound is of the rows as they are."""
        bound: float | None = None
        tightened = False
        for num_rounds in itertools.count(1):
            outcome = _pulp.run(
                model.model,
                backend=self._backend,
                time_limit_s=self._left_s(num_rounds),
                relative_gap=self._gap if integral else self._gap / 2,
                warm_start=warm_start and num_rounds == 1,
            )
            if not tightened and outcome.bound is not None:
                bound = outcome.bound + model.constant_ms
            if not outcome.termination.has_incumbent:
                return outcome.termination, bound
            broken = self._broken(model, integral=integral, peak=peak)
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

    def _broken(
        self, model: FsdpModel, *, integral: bool, peak: bool
    ) -> list[tuple[int, float]]:
        """Positions above the cap, the worst of their surroundings, and by how much."""
        problem = self._problem
        if integral:
            found = live(problem, model.choice())
        else:
            found = mixed_live(
                problem, model.units(), model.reshards(), model.weights()
            )
        cap = float(problem.sac.budget_bytes) + (0.0 if integral else _SLACK_BYTES)
        if peak:
            # A peak that rows already cap is what it is.
            capped = [found[q] for q in self._rows if model.has_row(q)]
            cap = max(capped, default=0.0) + _PEAK_BYTES
        excess = found - cap
        above = np.flatnonzero(excess > 0.0)
        if not len(above):
            return []
        # One per stretch of broken positions, the worst first.
        stretches = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1)
        worst = [int(part[excess[part].argmax()]) for part in stretches]
        worst.sort(key=lambda q: -excess[q])
        return [(q, float(excess[q])) for q in worst[:_MOST_ROWS]]

    def _left_s(self, num_rounds: int) -> float | None:
        """Time for a solve; rounds that the limit would end get a share of it."""
        if self._deadline_s is None or self._limit_s is None:
            return None
        left = self._deadline_s - (perf_counter() - self._started)
        return max(left, self._limit_s / (10 * num_rounds))

    def _check(self) -> None:
        count = len(self._problem.modules)
        for index in self._reshard:
            if not 0 <= index < count:
                raise ValueError(
                    f"`fixed_reshard` must name modules below {count}, got {index}."
                )
        if self._reshard.get(0):
            raise ValueError("`fixed_reshard` names the root, which does not reshard.")
        units = self._problem.sac.units
        if self._points is None:
            return
        if len(self._points) != len(units):
            raise ValueError(
                f"`fixed_points` must have an entry for each of {len(units)} AC units,"
                f" got {len(self._points)}."
            )
        for unit, point in zip(units, self._points, strict=True):
            if point is not None and not 0 <= point < len(unit.points):
                raise ValueError(
                    f"`fixed_points` of {unit.fqn!r} must be below"
                    f" {len(unit.points)}, got {point}."
                )
        alone = FsdpChoice(
            units=(True, *(False,) * (count - 1)),
            reshard=(False,) * count,
            points=self._points,
        )
        nested = [text for text in broken_rules(self._problem, alone) if "nest" in text]
        if nested:
            raise ValueError(f"`fixed_points` breaks rules: {' '.join(nested)}")

    def _check_units(self, chosen: Collection[int]) -> None:
        count = len(self._problem.modules)
        if not all(0 <= index < count for index in chosen):
            raise ValueError(
                f"`fixed_units` must name modules below {count}, got {sorted(chosen)}."
            )
        choice = FsdpChoice(
            units=tuple(index in chosen for index in range(count)),
            reshard=(False,) * count,
            points=self._points or (None,) * len(self._problem.sac.units),
        )
        if broken := broken_rules(self._problem, choice):
            raise ValueError(f"`fixed_units` breaks rules: {' '.join(broken)}")
