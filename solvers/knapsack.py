"""Which results of one AC unit to save: a knapsack with reruns.

Groups g of ops, in execution order, whose results move together; s_g = 1 if the
results of g are saved, e_g = 1 if g is rerun in backward:

minimize    sum_g t_g e_g             recompute time [ms]
subject to  sum_g m_g s_g <= C        saved activation memory [bytes]          (1)
            s_g + e_g >= 1            for g in needed: backward reads it       (2)
            e_g <= s_h + e_h          for h in inputs of g: a rerun reads it   (3)
            e_g = 0                   for g in pinned: never rerun             (4)
            s_g = 0                   for g in unsavable                       (5)

e_g may stay continuous: times are not negative, so with s_g fixed to 0 or 1 the
least e_g that keep (2) and (3) are 0 or 1. Of equally fast solutions the one with the
fewest bytes is taken, by a second solve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import pulp

from solvers import _pulp
from solvers._pulp import Backend
from solvers._save_front import save_front
from solvers.solution import Solution, Termination

_MIB = 2**20  # bytes without a large common divisor stay within row tolerances in MiB
_LARGEST_COEFFICIENT = 2**20  # of a row in units of the common divisor
_LARGEST_TIME = 2.0**10  # of the scaled times: their sums stay above tolerances
_MOST_LABELS = 4096  # alive at once in the dynamic program,
_MOST_WORK = 400_000  # and in all: about a second
_ATTEMPTS = 5  # at a solution that also keeps (1) in integers


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProblem:
    """Save-or-rerun choice for the op groups of one AC unit.

    Attributes:
        saved_bytes: Activation memory that saving each group's results takes.
        runtime_ms: Forward time of each group, same length.
        inputs: The earlier groups whose results each group reads, same length.
        needed: Groups whose results backward reads.
        pinned: Groups that are never rerun.
        unsavable: Groups whose results cannot be saved.
        capacity_bytes: Largest sum of `saved_bytes` over the saved groups.
    """

    saved_bytes: tuple[int, ...]
    runtime_ms: tuple[float, ...]
    inputs: tuple[tuple[int, ...], ...]
    needed: frozenset[int]
    pinned: frozenset[int] = frozenset()
    unsavable: frozenset[int] = frozenset()
    capacity_bytes: int

    def __post_init__(self) -> None:
        lengths = (len(self.saved_bytes), len(self.runtime_ms), len(self.inputs))
        if len(set(lengths)) > 1:
            raise ValueError(
                "`saved_bytes`, `runtime_ms` and `inputs` must have the same length,"
                f" got {lengths}."
            )
        if any(nbytes < 0 for nbytes in self.saved_bytes):
            raise ValueError("`saved_bytes` must not be negative.")
        if any(not math.isfinite(t) or t < 0.0 for t in self.runtime_ms):
            raise ValueError("`runtime_ms` must be finite and not negative.")
        for g, read in enumerate(self.inputs):
            if any(not 0 <= h < g for h in read):
                raise ValueError(
                    f"`inputs[{g}]` must name groups before {g}, got {read}."
                )
        for g in self.needed | self.pinned | self.unsavable:
            if not 0 <= g < self.num_groups:
                raise ValueError(
                    f"`needed`, `pinned` and `unsavable` must name groups below"
                    f" {self.num_groups}, got {g}."
                )

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.saved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSolution(Solution):
    """What to save, and what is rerun as a consequence.

    Attributes:
        saved: Whether each group's results are saved; None without an incumbent.
        rerun: Whether each group is rerun: no more than `saved` makes necessary.
        recompute_ms: Time of the groups that are rerun.
        saved_bytes: Activation memory of the groups that are saved.
    """

    saved: tuple[bool, ...] | None = None
    rerun: tuple[bool, ...] | None = None
    recompute_ms: float | None = None
    saved_bytes: int | None = None


def solve(problem: SaveProblem, *, backend: Backend = "highs") -> SaveSolution:
    """Choose the saved groups with the least recompute time, then the fewest bytes.

    Args:
        problem: Sizes, times, dependencies and capacity.
        backend: Which MILP solver to run.

    Returns:
        The outcome. An infeasible problem is an outcome, not an error.
    """
    return _Model(problem, backend).least_time(problem.capacity_bytes)


def trade_off(
    problem: SaveProblem, *, num_points: int = 16
) -> tuple[SaveSolution, ...]:
    """Pareto points of recompute time against saved bytes, by dynamic programming.

    They are exact but for problems of hundreds of groups, where partial solutions of
    nearly the same size are thinned out.

    Args:
        problem: The groups; its capacity is ignored.
        num_points: Number of capacities to look at, evenly spaced between the
            fewest possible bytes and those of the least time. These two are always
            looked at.

    Returns:
        Solutions that no other one beats, the most saved bytes (and least recompute
        time) first. Empty if there is no solution at all.
    """
    most_labels = min(_MOST_LABELS, _MOST_WORK // (problem.num_groups + 1) + 16)
    front = save_front(problem, most_labels=most_labels)
    if not front:
        return ()
    solutions = [_optimum(problem, saved) for saved in front]
    most, fewest = (_bytes_of(solutions[i]) for i in (0, -1))
    points = [solutions[0]]
    last = max(num_points, 2) - 1
    for k in range(last - 1, -1, -1):
        capacity_bytes = fewest + (most - fewest) * k // last
        if _bytes_of(points[-1]) > capacity_bytes:
            fitting = (s for s in solutions if _bytes_of(s) <= capacity_bytes)
            points.append(next(fitting))
    return tuple(points)


def _optimum(problem: SaveProblem, saved: tuple[bool, ...]) -> SaveSolution:
    rerun = rerun_closure(problem, saved)
    cost_ms = recompute_ms(problem, rerun)
    return SaveSolution(
        termination=Termination.OPTIMAL,
        objective_ms=cost_ms,
        bound_ms=cost_ms,
        saved=saved,
        rerun=rerun,
        recompute_ms=cost_ms,
        saved_bytes=saved_bytes(problem, saved),
    )


def _bytes_of(solution: SaveSolution) -> int:
    assert solution.saved_bytes is not None
    return solution.saved_bytes


def rerun_closure(problem: SaveProblem, saved: Sequence[bool]) -> tuple[bool, ...]:
    """Groups that backward must rerun if exactly these groups are saved.

    Args:
        problem: The groups; pinned ones are listed too if they would be rerun.
        saved: Whether each group's results are saved.
    """
    rerun = [g in problem.needed and not saved[g] for g in range(problem.num_groups)]
    for g in reversed(range(problem.num_groups)):  # inputs come before their readers
        if rerun[g]:
            for h in problem.inputs[g]:
                rerun[h] = rerun[h] or not saved[h]
    return tuple(rerun)


def recompute_ms(problem: SaveProblem, rerun: Sequence[bool]) -> float:
    """Time of the groups that are rerun."""
    times = zip(problem.runtime_ms, rerun, strict=True)
    return math.fsum(runtime for runtime, is_rerun in times if is_rerun)


def saved_bytes(problem: SaveProblem, saved: Sequence[bool]) -> int:
    """Activation memory of the groups that are saved."""
    sizes = zip(problem.saved_bytes, saved, strict=True)
    return sum(nbytes for nbytes, is_saved in sizes if is_saved)


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
        self._time = _pulp.row(
            (e, problem.runtime_ms[g] * self._scale) for g, e in self._rerun.items()
        )
        self._bytes = _pulp.row(
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
        outcome, found = self._run(self._time, capacity_bytes, math.inf)
        if found is None:
            solve_s = perf_counter() - started
            return SaveSolution(termination=outcome.termination, solve_s=solve_s)
        assert found.recompute_ms is not None and found.saved_bytes is not None
        if found.saved_bytes:
            _, smaller = self._run(self._bytes, found.saved_bytes, found.recompute_ms)
            # Within the tolerance of its row the second solve may be slower.
            if smaller is not None and _is_better(smaller, found):
                found = smaller
        assert found.recompute_ms is not None
        bound_ms = None
        if outcome.bound is not None:
            bound_ms = max(0.0, min(outcome.bound / self._scale, found.recompute_ms))
        return replace(found, bound_ms=bound_ms, solve_s=perf_counter() - started)

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
                self._model += _pulp.row(self._available(g)) >= 1
            if g in self._rerun:
                for h in set(self._problem.inputs[g]):
                    terms = [*self._available(h), (self._rerun[g], -1.0)]
                    self._model += _pulp.row(terms) >= 0

    def _available(self, g: int) -> list[tuple[pulp.LpVariable, float]]:
        kinds = (self._saved, self._rerun)
        return [(variables[g], 1.0) for variables in kinds if g in variables]

    def _run(
        self, objective: pulp.LpAffineExpression, capacity_bytes: int, limit_ms: float
    ) -> tuple[_pulp.Outcome, SaveSolution | None]:
        """Minimise; again with less capacity while (1) is broken in integers."""
        problem = self._problem
        if not objective and self._saved:
            # PuLP's dummy for an objective without terms breaks CBC's next run.
            objective = _pulp.row([(next(iter(self._saved.values())), 0.0)])
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
            found = self._record(outcome)
            assert found.saved_bytes is not None
            if found.saved_bytes <= capacity_bytes:
                return first, found
            target -= found.saved_bytes - capacity_bytes
        raise ArithmeticError(
            f"The optimum of {self._backend} exceeds `capacity_bytes`="
            f"{problem.capacity_bytes} however often it is lowered."
        )

    def _run_within(self, capacity_bytes: int) -> _pulp.Outcome:
        if self._capacity_row is not None:
            is_whole = self._unit != _MIB
            divide = int.__floordiv__ if is_whole else int.__truediv__
            self._capacity_row.changeRHS(divide(capacity_bytes, self._unit))
        elif capacity_bytes < 0:
            return _pulp.Outcome(
                termination=Termination.INFEASIBLE, bound=None, solve_s=0.0
            )
        return _pulp.run(self._model, backend=self._backend)

    def _record(self, outcome: _pulp.Outcome) -> SaveSolution:
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
