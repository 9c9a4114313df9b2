"""The save-or-rerun choice as a MILP: an oracle for the dynamic program.

It shares no code with `solvers.curves.front`. The rows are those of
`solvers.curves.save_problem`. e_g may stay continuous: times are not negative, so with
s_g fixed to 0 or 1 the least e_g that keep (2) and (3) are 0 or 1. Of equally fast
solutions the one with the fewest bytes is taken, by a second solve.
"""

from __future__ import annotations

import math
from dataclasses import replace
from time import perf_counter

import pulp

from autosac.solvers.curves.knapsack import recompute_ms, rerun_closure
from autosac.solvers.curves.save_problem import SaveProblem
from autosac.solvers.milp import pulp_models, pulp_runner
from autosac.solvers.milp.solution import Backend, Termination
from tests.solvers.save_solutions import SaveSolution, saved_bytes

_MIB = 2**20  # bytes without a large common divisor stay within row tolerances in MiB
_LARGEST_COEFFICIENT = 2**20  # of a row in units of the common divisor
_LARGEST_TIME = 2.0**10  # of the scaled times: their sums stay above tolerances
_ATTEMPTS = 5  # at a solution that also keeps (1) in integers


def solve(problem: SaveProblem, *, backend: Backend = "highs") -> SaveSolution:
    """Choose the saved groups with the least recompute time, then the fewest bytes.

    Args:
        problem: Sizes, times, dependencies and capacity.
        backend: Which MILP solver to run.

    Returns:
        The outcome. An infeasible problem is an outcome, not an error.
    """
    return _Model(problem, backend).least_time(problem.capacity_bytes)


def _relevant(problem: SaveProblem) -> list[int]:
    """The needed groups and what they are made of; no other matters."""
    nothing = [False] * problem.num_groups
    return [g for g, rerun in enumerate(rerun_closure(problem, nothing)) if rerun]


class _Model:
    """The model, built once; only the right-hand sides of two rows change."""

    def __init__(self, problem: SaveProblem, backend: Backend) -> None:
        self._problem = problem
        self._backend = backend
        self._groups = _relevant(problem)
        self._model = pulp.LpProblem("save", pulp.LpMinimize)
        self._unit = self._unit_bytes()
        times = [problem.runtime_ms[g] for g in self._groups]
        longest = max(times, default=0.0)
        # A power of two: scaling rounds nothing.
        exponent = math.frexp(_LARGEST_TIME / longest)[1] if longest else 0
        self._scale = math.ldexp(1.0, exponent)
        self._add_variables()
        self._add_dependencies()
        self._time = pulp_models.row(
            (e, problem.runtime_ms[g] * self._scale) for g, e in self._rerun.items()
        )
        self._bytes = pulp_models.row(
            (s, problem.saved_bytes[g] / self._unit) for g, s in self._saved.items()
        )
        self._capacity_row: pulp.LpConstraint | None = None
        self._time_row: pulp.LpConstraint | None = None
        if self._bytes:
            self._capacity_row = self._bytes <= 0
            self._model.addConstraint(self._capacity_row, "capacity")  # (1)
        if self._time:
            self._time_row = self._time <= 0
            self._model.addConstraint(self._time_row, "time")
        self._most = sum(v for v in self._time.values()) + 1.0

    def least_time(self, capacity_bytes: int) -> SaveSolution:
        """Least time within a capacity; among those, the fewest bytes."""
        started = perf_counter()
        outcome, observed = self._run(self._time, capacity_bytes, math.inf)
        if observed is None:
            solve_s = perf_counter() - started
            return SaveSolution(termination=outcome.termination, solve_s=solve_s)
        assert observed.recompute_ms is not None and observed.saved_bytes is not None
        if observed.saved_bytes:
            _, smaller = self._run(
                self._bytes, observed.saved_bytes, observed.recompute_ms
            )
            # Within the tolerance of its row the second solve may be slower.
            if smaller is not None and _is_better(smaller, observed):
                observed = smaller
        assert observed.recompute_ms is not None
        bound_ms = None
        if outcome.bound is not None:
            bound_ms = max(0.0, min(outcome.bound / self._scale, observed.recompute_ms))
        return replace(observed, bound_ms=bound_ms, solve_s=perf_counter() - started)

    def _unit_bytes(self) -> int:
        problem = self._problem
        sizes = [problem.saved_bytes[g] for g in self._groups]
        divisor = math.gcd(*sizes) or 1
        if max(sizes, default=0) // divisor <= _LARGEST_COEFFICIENT:
            return divisor
        return _MIB

    def _add_variables(self) -> None:
        """(4) and (5) are variables left out; what takes no bytes is saved."""
        problem = self._problem
        add = self._model.add_variable
        self._saved = {
            g: add(f"saved_{g:05d}", int(not problem.saved_bytes[g]), 1, pulp.LpInteger)
            for g in self._groups
            if g not in problem.unsavable
        }
        self._rerun = {
            g: add(f"rerun_{g:05d}", 0, 1)
            for g in self._groups
            if g not in problem.pinned
        }

    def _add_dependencies(self) -> None:
        """Rows (2) and (3)."""
        for g in self._groups:
            if g in self._problem.needed:
                self._model += pulp_models.row(self._available(g)) >= 1
            if g in self._rerun:
                for h in set(self._problem.inputs[g]):
                    terms = [*self._available(h), (self._rerun[g], -1.0)]
                    self._model += pulp_models.row(terms) >= 0

    def _available(self, g: int) -> list[tuple[pulp.LpVariable, float]]:
        kinds = (self._saved, self._rerun)
        return [(variables[g], 1.0) for variables in kinds if g in variables]

    def _run(
        self, objective: pulp.LpAffineExpression, capacity_bytes: int, limit_ms: float
    ) -> tuple[pulp_runner.Outcome, SaveSolution | None]:
        """Minimise; again with less capacity while (1) is broken in integers."""
        problem = self._problem
        if not objective and self._saved:
            # PuLP's dummy for an objective without terms breaks CBC's next run.
            objective = pulp_models.row([(next(iter(self._saved.values())), 0.0)])
        self._model.setObjective(objective.copy())
        if self._time_row is not None:
            limit = self._most if math.isinf(limit_ms) else limit_ms * self._scale
            self._time_row.changeRHS(limit)
        target = capacity_bytes
        first = None
        for _ in range(_ATTEMPTS):
            outcome = self._run_within(target)
            first = first or outcome
            if not outcome.termination.has_incumbent:
                return replace(first, termination=outcome.termination), None
            record = self._record(outcome)
            assert record.saved_bytes is not None
            if record.saved_bytes <= capacity_bytes:
                return first, record
            target -= record.saved_bytes - capacity_bytes
        raise ArithmeticError(
            f"The optimum of {self._backend} exceeds `capacity_bytes`="
            f"{problem.capacity_bytes} however often it is lowered."
        )

    def _run_within(self, capacity_bytes: int) -> pulp_runner.Outcome:
        if self._capacity_row is not None:
            is_whole = self._unit != _MIB
            divide = int.__floordiv__ if is_whole else int.__truediv__
            self._capacity_row.changeRHS(divide(capacity_bytes, self._unit))
        elif capacity_bytes < 0:
            return pulp_runner.Outcome(
                termination=Termination.INFEASIBLE, bound=None, solve_s=0.0
            )
        return pulp_runner.run(self._model, backend=self._backend)

    def _record(self, outcome: pulp_runner.Outcome) -> SaveSolution:
        """Reruns follow from what is saved; saves that nobody reads are dropped."""
        problem = self._problem
        flags = [
            g in self._saved and (self._saved[g].varValue or 0.0) > 0.5
            for g in range(problem.num_groups)
        ]
        rerun = rerun_closure(problem, flags)
        assert not any(rerun[g] for g in problem.pinned), "(4) holds within tolerance"
        read = {h for g, again in enumerate(rerun) if again for h in problem.inputs[g]}
        saved = tuple(
            flag and (g in problem.needed or g in read) for g, flag in enumerate(flags)
        )
        cost_ms = recompute_ms(problem, rerun)
        return SaveSolution(
            termination=outcome.termination,
            objective_ms=cost_ms,
            saved=saved,
            rerun=rerun,
            recompute_ms=cost_ms,
            saved_bytes=saved_bytes(problem, saved),
        )


def _is_better(solution: SaveSolution, other: SaveSolution) -> bool:
    assert solution.recompute_ms is not None and other.recompute_ms is not None
    assert solution.saved_bytes is not None and other.saved_bytes is not None
    if solution.recompute_ms > other.recompute_ms:
        return False
    return solution.saved_bytes < other.saved_bytes
