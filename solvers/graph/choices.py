"""Choices of a graph's MILP: what is kept, what runs again, and what that takes.

The rows are (1), (2) and (9) of `graph/model.py`; ops that run again together share
one variable.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import pulp

from ..milp import pulp_models
from .dominance import dominated_values, may_be_kept, runs_with
from .recomputation import GraphProblem

_TIE_BREAK = 1e-6  # weight of kept bytes against all of the time: a heuristic

_WHOLE = 1e-4  # what is left to a whole number by solvers
_DUAL_NOISE = 1e-4  # of reduced costs; the objective is 1024 or so

Expression = Any  # a pulp.LpAffineExpression: PuLP has no types


def number(value: float) -> Expression:
    """A constant as an expression."""
    return pulp.LpAffineExpression(constant=value)


class Choices:
    """What is kept and what runs again, as a PuLP model without an objective.

    Attributes:
        problem: The step.
        model: The PuLP model.
        keep: Values -> whether they are kept.
        run: Ops -> whether they run again.
        moved: Values -> whether they are in far memory between forward and backward.
    """

    def __init__(self, problem: GraphProblem, *, movable: Collection[int]) -> None:
        self.problem = problem
        self._movable = frozenset(movable)
        self.model = pulp_models.Model("graph")
        self.keep: dict[int, pulp.LpVariable] = {}
        self.run: dict[int, pulp.LpVariable] = {}
        self.moved: dict[int, pulp.LpVariable] = {}
        self._cutoff: pulp.LpConstraint | None = None
        self._add_choices()

    @cached_property
    def ops(self) -> list[int]:
        """Ops whose values backward reads, or which it takes to recompute these."""
        pending = [self.problem.maker[v] for v in self.problem.first_need]
        needed: set[int] = set()
        while pending:
            op = pending.pop()
            if op not in needed:
                needed.add(op)
                if op not in self.problem.pinned:
                    pending += [self.problem.maker[v] for v in self.problem.reads[op]]
        return sorted(needed)

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Values -> the ops of `ops` that read them if they run again."""
        readers = defaultdict(list)
        for op in self.ops:
            if op not in self.problem.pinned:
                for v in self.problem.reads[op]:
                    readers[v].append(op)
        return readers

    def _add_choices(self) -> None:
        problem = self.problem
        for op in reversed(self.ops):
            if (reader := self._runs_with.get(op)) is not None:
                self.run[op] = self.run[reader]
            elif op not in problem.pinned:
                self.run[op] = self._binary(f"x{op}")
        for op in self.ops:
            for v in problem.makes[op]:
                if not may_be_kept(self.problem, self.readers, v):
                    continue
                self.keep[v] = self._binary(f"k{v}")
                kept_or_run = self.keep[v] + self._run(op)
                if v in problem.first_need:
                    self.model += kept_or_run >= 1  # (1)
                if len(problem.makes[op]) == 1 and op in self.run:
                    self.model += kept_or_run <= 1
                if op not in self._runs_with:
                    for reader in self.readers.get(v, ()):
                        self.model += self.run[reader] <= kept_or_run  # (2)
                if v in self._dominated:
                    self.keep[v].upBound = 0.0
                if v in self._movable:
                    self.moved[v] = self._binary(f"a{v}")
                    self.model += self.moved[v] <= self.keep[v]  # (9)

    @cached_property
    def _dominated(self) -> frozenset[int]:
        return dominated_values(self.problem, self.readers)

    @cached_property
    def _runs_with(self) -> dict[int, int]:
        return runs_with(self.problem, self.readers, self._dominated)

    def _binary(self, name: str) -> pulp.LpVariable:
        """A variable of 0 or 1.

        Whole k make all others whole; but solvers cut and fix better if they know it.
        """
        return self.model.add_variable(name, cat=pulp.LpBinary)

    def _run(self, op: int) -> Expression:
        return number(0) if op not in self.run else self.run[op] + 0.0

    @cached_property
    def time_scale(self) -> float:
        """Objective per millisecond: all of the time is 1024 or so."""
        total_ms = sum(self.problem.runtime_ms[op] for op in self.run)
        return math.ldexp(1.0, 10 - math.frexp(total_ms)[1]) if total_ms else 1.0

    @cached_property
    def tie_break_ms(self) -> float:
        """The most that keeping and moving bytes counts in the objective."""
        return _TIE_BREAK * sum(self.problem.runtime_ms[op] for op in self.run)

    def in_ms(self, bound: float) -> float:
        """Time that no choice is below, by a bound on the objective."""
        return bound / self.time_scale - self.tie_break_ms

    def _objective(self) -> Expression:
        sizes = self.problem.value_bytes
        stays = [*self.keep.items(), *self.moved.items()]
        weight = self.tie_break_ms / (sum(sizes[v] for v, _ in stays) or 1)
        terms = [(x, self.problem.runtime_ms[op]) for op, x in self.run.items()]
        terms += [(x, weight * sizes[v]) for v, x in stays]
        return pulp_models.row((x, ms * self.time_scale) for x, ms in terms)

    # --- solutions ----------------------------------------------------------------

    def kept(self, more_than: float = 0.5) -> frozenset[int]:
        """Values that the variables keep by more than a share."""
        keep = self.keep.items()
        return frozenset(v for v, k in keep if (k.varValue or 0.0) > more_than)

    def cut_off(self, cost_ms: float) -> None:
        """Leave out choices that take more than so much time."""
        limit = (cost_ms + self.tie_break_ms) * self.time_scale
        if self._cutoff is None:
            self._cutoff = self.model.objective <= limit
            self.model += self._cutoff
        self._cutoff.changeRHS(limit)

    def fix(self, cost_ms: float) -> None:
        """Fix what no choice below a time has otherwise, by reduced costs.

        The variables hold the optimum of the relaxation.
        """
        bound = self.model.objective.value()
        room = (cost_ms + self.tie_break_ms) * self.time_scale - bound + _DUAL_NOISE
        for k in self.keep.values():
            if k.lowBound == k.upBound:
                continue  # a dominated value, which is never kept whatever it saves
            if (k.dj or 0.0) > room:
                k.upBound = 0.0
            elif -(k.dj or 0.0) > room:
                k.lowBound = 1.0

    def fractions(self) -> list[tuple[float, int]]:
        """Values whose variables are not whole: how far from it, and which."""
        shares = [(k.varValue or 0.0, v) for v, k in self.keep.items()]
        distances = [(min(share, 1.0 - share), v) for share, v in shares]
        return sorted(one for one in distances if one[0] > _WHOLE)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Put bounds of variables back at the end."""
        before = {v: (k.lowBound, k.upBound) for v, k in self.keep.items()}
        yield
        for v, bounds in before.items():
            self.keep[v].lowBound, self.keep[v].upBound = bounds

    def decide(self, values: Iterable[int]) -> None:
        """Fix values as the variables hold them, rounded."""
        for v in values:
            k = self.keep[v]
            k.lowBound = k.upBound = float((k.varValue or 0.0) > 0.5)

    @contextmanager
    def held(self, kept: Set[int], free: Collection[int]) -> Iterator[None]:
        """Decide about some values only; all others are as in a choice."""
        with self.released():
            for v in self.keep.keys() - set(free):
                self.keep[v].lowBound = self.keep[v].upBound = float(v in kept)
            yield

    def forbid(self, kept: Set[int]) -> None:
        """Cut off one choice that breaks rows by less than their tolerance."""
        self.model += (
            pulp.lpSum(1 - k if v in kept else k for v, k in self.keep.items()) >= 1
        )
