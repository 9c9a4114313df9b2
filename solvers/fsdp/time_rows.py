"""Rows of the parallel MILP for exposed communication: the linear form in PuLP.

With candidates numbered in the order in which their forward begins, c_i the compute
from there to the next candidate's beginning and g_i the all-gather of candidate i, 0
if it is no unit:

    D_i >= g_i+1 - c_i,   D_i >= D_i+1 - c_i - M x_i+1,   e_i >= D_i - M (1 - x_i)

is what the compute of the unit that began last at or before i leaves of the next unit's
all-gather. In backward likewise, with recomputation in c_i, and the reduce-scatters of
units that end between two beginnings carried in U:

    U_i >= r_i,   U_i >= U_i-1 + r_i - M x_i,   e_i >= U_i-1 + D_i - M (1 - x_i)

with r_i those of candidates that end between the beginnings of candidates i and i + 1.
D may then be negative, and is cut off where no U makes up for it.

By (5) of `step_time`, with s what collectives take from compute beside them, a step
takes its compute, (1 - s) of what is exposed, and s of all collectives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import pulp

from ..milp import pulp_models
from ..sac.table import Table
from .model import FsdpModel, Terms
from .problem import FsdpProblem
from .sites import Sites

_MIB = 2**20


class TimedModel(FsdpModel):
    """The model that minimises the time of a step; its arguments are `FsdpModel`'s."""

    def __init__(
        self,
        problem: FsdpProblem,
        table: Table,
        sites: Sites,
        *,
        forced: bool,
        integral: bool,
    ) -> None:
        super().__init__(
            problem, table, sites, forced=forced, integral=integral, peak=False
        )
        self.constant_ms = sites.compute_between(0, len(problem.compute_ms))
        points = [point for unit in problem.sac.units for point in unit.points]
        self._objective: Terms = [
            (z, point.recompute_ms) for z, point in zip(self._z, points, strict=True)
        ]
        self._reruns = self._rerun_terms()
        self._add_collectives()
        self._exposed: Terms = []
        self._forward_waits: list[pulp.LpVariable] = []
        self._waits: dict[int, pulp.LpVariable] = {}  # e of backward, by candidate
        self._add_forward()
        self._add_backward()
        self._add_tail()
        if not forced:
            self._add_cuts()
        self._objective += self._communication()
        self.model.setObjective(pulp_models.row(self._objective))

    def _rerun_terms(self) -> list[tuple[int, Terms]]:
        """By position, the AC units that rerun there, and their times without waits."""
        columns = iter(self._z)
        reruns = [
            (
                position,
                [(next(columns), point.rerun_ms) for point in unit.points],
            )
            for unit, position in zip(
                self._problem.sac.units, self._problem.rerun_at, strict=True
            )
        ]
        return sorted(reruns, key=lambda rerun: rerun[0])

    def _add_collectives(self) -> None:
        """Times of the collectives of each candidate, 0 if it is no unit."""
        sites, problem = self._sites, self._problem
        has_gather = self._owns("og", sites.gather)
        has_reduce = self._owns("or", sites.reduce)
        gather, reduce, total = problem.gather, problem.reduce, problem.all_reduce
        count = range(len(sites.modules))
        per_mib = gather.ms_per_byte * _MIB
        self._gathers = [
            [(has_gather[m], gather.latency_ms), (self._gathered[m], per_mib)]
            for m in count
        ]
        self._regathers = [
            [
                (self._reshards[m], gather.latency_ms),
                (self._gathered[m], per_mib),
                (self._stays[m], -per_mib),
            ]
            for m in count
        ]
        self._regathers[0] = []  # the root stays
        self._reduces, self._totals = (
            [
                [
                    (has_reduce[m], cost.latency_ms),
                    (self._reduced[m], cost.ms_per_byte * _MIB),
                ]
                for m in count
            ]
            for cost in (reduce, total)
        )
        self._most_gather = [gather.ms(nbytes) for nbytes in sites.most_gather]
        self._most_reduce = [reduce.ms(nbytes) for nbytes in sites.most_reduce]
        self._most_total = [total.ms(nbytes) for nbytes in sites.most_reduce]

    def _owns(self, name: str, values: Sequence[int]) -> list[pulp.LpVariable]:
        """By candidate, whether it owns parameters with a value."""
        flags = []
        for unit, x in enumerate(self._x):
            if unit and all(
                values[t] or not self._sites.gather[t]
                for t, nearest in enumerate(self._nearest)
                if unit in nearest
            ):
                flags.append(x)  # a unit owns something
                continue
            owns = self.model.add_variable(f"{name}_{unit:05d}", 0, 1)
            for t, nearest in enumerate(self._nearest):
                if unit in nearest and values[t]:
                    terms = [(owns, 1.0), (nearest[unit], -1.0)]
                    self.model += pulp_models.row(terms) >= 0
            flags.append(owns)
        return flags

    def _add_forward(self) -> None:
        sites, order = self._sites, self._sites.forward_order
        end = sites.begins[0]
        segments = sites.segments([sites.starts[m] for m in order], end)
        self._exposed += self._gathers[order[0]]
        left: pulp.LpVariable | None = None  # D of the candidate after
        most_left = 0.0
        for k in reversed(range(len(order) - 1)):
            unit, after = order[k], order[k + 1]
            compute = sites.compute_between(*segments[k])
            carried = 0.0 if self._forced else most_left
            most = max(0.0, self._most_gather[after] - compute, carried - compute)
            if most == 0.0:
                left, most_left = None, 0.0
                continue
            here = self.model.add_variable(f"df_{unit:05d}", 0)
            gather = [(v, -c) for v, c in self._gathers[after]]
            self.model += pulp_models.row([(here, 1.0), *gather]) >= -compute
            if left is not None and not self._forced:
                terms = [(here, 1.0), (left, -1.0), (self._x[after], most_left)]
                self.model += pulp_models.row(terms) >= -compute
            wait = self.model.add_variable(f"ef_{unit:05d}", 0)
            terms = [(wait, 1.0), (here, -1.0), (self._x[unit], -most)]
            self.model += pulp_models.row(terms) >= -most
            self._forward_waits.append(wait)
            left, most_left = here, most
        self._exposed += [(wait, 1.0) for wait in self._forward_waits]

    def _add_backward(self) -> None:
        sites, order = self._sites, self._sites.backward_order
        segments = sites.segments([sites.begins[m] for m in order], sites.ends[0])
        loads, most_loads = self._loads(order, segments)
        # Below minus the largest load before it, D makes no wait.
        floors = [0.0, *accumulate(most_loads[:-1], max)]
        left: pulp.LpVariable | None = None
        most_left = 0.0
        for k in reversed(range(len(order))):
            unit = order[k]
            compute = sites.compute_between(*segments[k])
            rerun = self._rerun_within(*segments[k])
            after = order[k + 1] if k + 1 < len(order) else None
            most_after = 0.0 if after is None else self._most_gather[after]
            most = most_after - compute
            here = self.model.add_variable(f"db_{unit:05d}", -floors[k])
            terms = [(here, 1.0), *rerun]
            if after is None:
                self.model += pulp_models.row(terms) >= -compute
            else:
                gather = [(v, -c) for v, c in self._regathers[after]]
                floor = 0.0 if self._forced else floors[k + 1]
                row = [*terms, *gather, (self._x[after], -floor)]
                self.model += pulp_models.row(row) >= -compute - floor
                if not self._forced:
                    assert left is not None
                    most = max(most, most_left - compute)
                    over = max(0.0, most_left)
                    row = [*terms, (left, -1.0), (self._x[after], over)]
                    self.model += pulp_models.row(row) >= -compute
            load = most_loads[k - 1] if k else 0.0
            if load + most > 0.0:
                self._add_wait(unit, here, loads[k - 1] if k else None, load + most)
            left, most_left = here, most

    def _add_wait(
        self,
        unit: int,
        left: pulp.LpVariable,
        load: pulp.LpVariable | None,
        most: float,
    ) -> None:
        wait = self.model.add_variable(f"eb_{unit:05d}", 0)
        terms = [(wait, 1.0), (left, -1.0), (self._x[unit], -most)]
        if load is not None:
            terms.append((load, -1.0))
        self.model += pulp_models.row(terms) >= -most
        self._exposed.append((wait, 1.0))
        self._waits[unit] = wait

    def _loads(
        self, order: Sequence[int], segments: Sequence[tuple[int, int]]
    ) -> tuple[list[pulp.LpVariable], list[float]]:
        """Load U after each unit's backward begins, and the most that it can be."""
        sites = self._sites
        ends = iter(sites.end_order)
        ending = next(ends, None)
        loads: list[pulp.LpVariable] = []
        most: list[float] = []
        for (_, stop), unit in zip(segments, order, strict=True):
            reduces: Terms = []
            most_here = 0.0
            while ending is not None and sites.ends[ending] <= stop:
                reduces += self._reduces[ending]
                most_here += self._most_reduce[ending]
                ending = next(ends, None)
            load = self.model.add_variable(f"u_{unit:05d}", 0)
            terms = [(load, 1.0), *((v, -c) for v, c in reduces)]
            self.model += pulp_models.row(terms) >= 0
            if loads and not self._forced:
                row = [*terms, (loads[-1], -1.0), (self._x[unit], most[-1])]
                self.model += pulp_models.row(row) >= 0
                most_here += most[-1]
            loads.append(load)
            most.append(most_here)
        return loads, most

    def _add_tail(self) -> None:
        """Collectives that are left when a unit ends, and when the compute does."""
        sites, order = self._sites, self._sites.end_order
        tail: pulp.LpVariable | None = None
        stop = sites.ends[0]
        later_reduces: Terms = []
        later_totals: Terms = []
        most_reduces = most_totals = 0.0
        for k, unit in enumerate(reversed(order)):
            most_reduces += self._most_reduce[unit]
            most_totals += self._most_total[unit]
            later_reduces = self._summed(f"sr_{k:05d}", later_reduces, unit, "reduce")
            if most_totals:
                later_totals = self._summed(f"st_{k:05d}", later_totals, unit, "total")
            hidden = sites.compute_between(sites.ends[unit], stop)
            queues = [(later_reduces, most_reduces)]
            if most_totals:
                queues.append(
                    (
                        [*later_totals, *self._reduces[unit]],
                        most_totals + self._most_reduce[unit],
                    )
                )
            for terms, most in queues:
                if most <= hidden:
                    continue
                if tail is None:
                    tail = self.model.add_variable("tail", 0)
                    self._exposed.append((tail, 1.0))
                row = [(tail, 1.0), *((v, -c) for v, c in terms)]
                row += self._rerun_within(sites.ends[unit], stop)
                row += [
                    (wait, 1.0)
                    for begun, wait in self._waits.items()
                    if sites.begins[begun] >= sites.ends[unit]
                ]
                self.model += pulp_models.row(row) >= -hidden

    def _communication(self) -> Terms:
        """What collectives add to the compute, by (5) of `step_time`."""
        share = self._problem.contention
        if not share:
            return self._exposed
        kinds = (self._gathers, self._regathers, self._reduces, self._totals)
        every = [term for kind in kinds for terms in kind for term in terms]
        return [
            *((v, c * (1.0 - share)) for v, c in self._exposed),
            *((v, c * share) for v, c in every),
        ]

    def _add_cuts(self) -> None:
        """Forward and backward as a whole take no less than their collectives.

        Implied by the rows above if units are whole; not in the relaxation. A
        reduce-scatter counts if a module of the same kind begins after its end: then
        some unit does, if it is one.
        """
        sites = self._sites
        modules = [sites.problem.modules[index] for index in sites.modules]
        last: dict[int, int] = {}
        for module in modules:
            if module.kind is not None:
                latest = max(last.get(module.kind, 0), module.backward[0])
                last[module.kind] = latest
        forward = [term for terms in self._gathers[1:] for term in terms]
        backward = [term for terms in self._regathers for term in terms]
        for unit, module in enumerate(modules):
            if module.kind is not None and last[module.kind] >= module.backward[1]:
                backward += self._reduces[unit]
        compute = sites.compute_between(sites.starts[0], sites.begins[0])
        terms = [(wait, 1.0) for wait in self._forward_waits]
        terms += [(v, -c) for v, c in forward]
        self.model += pulp_models.row(terms) >= -compute
        compute = sites.compute_between(sites.begins[0], sites.ends[0])
        terms = [(wait, 1.0) for wait in self._waits.values()]
        terms += [(v, -c) for v, c in backward]
        terms += self._rerun_within(sites.begins[0], sites.ends[0])
        self.model += pulp_models.row(terms) >= -compute

    def _summed(self, name: str, later: Terms, unit: int, kind: str) -> Terms:
        """A variable for a sum that goes on from unit to unit."""
        own = self._reduces[unit] if kind == "reduce" else self._totals[unit]
        total = self.model.add_variable(name, 0)
        terms = [(v, -c) for v, c in [*later, *own]]
        self.model += pulp_models.row([(total, 1.0), *terms]) == 0
        return [(total, 1.0)]

    def _rerun_within(self, start: int, stop: int) -> Terms:
        begin, end = (
            bisect_left(self._reruns, q, key=lambda rerun: rerun[0])
            for q in (start, stop)
        )
        return [term for _, terms in self._reruns[begin:end] for term in terms]
