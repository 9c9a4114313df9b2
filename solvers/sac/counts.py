"""The MILP over classes of units: how many of each take which point, in PuLP.

Y_c members of class c are under AC, Z_ck of them at point k:

minimize    sum_ck t_ck Z_ck  (or P)                recompute time [ms], or peak
subject to  sum_k Z_ck = Y_c                        for every class            (1)
            sum_d Y_d |c| / |d| <= |c|              d = c and around it: no    (2)
                                                    nesting
            B_q + sum_ck a_qck Z_ck + sum_j n_j h_j <= P    at the rows' positions q (3)
            sum_d Y_d |c| / |d| <= |c| h_j          d as in (2) that hold j    (4)
            sum_ek Z_ek + Y_d - m - r <= h_g        g: m holds of like units   (5)
            h_g <= sum_ek Z_ek, h_g <= sum_d Y_d    likewise                   (6)
            sum_k a_qck Z_ck <= (P - B_q + r_qc) Y_c                           (7)

with a what a point adds to the live memory B, and h_j = 1 if any unit holds j. (5)
instead of (4) is for holds with `freed_by`: points ek free what d holds, h_g is how
many of m such holds are alive, and r how many members of e and d have no part in them.
(6) is for holds with `kept_by`, whose n_j is negative: points ek keep what d holds.
Both are exact for classes of one member, else a relaxation. Classes of equal units of
one tree split in equal parts, so that |c| / |d| is an integer, and every solution in
integers can be dealt out to the units (`classes.spread`). With one member each
this is the MILP over units itself. (7) follows from (3) for whole numbers, and holds
relaxations to it, see `relief`: r is what units elsewhere take away at most. Bytes are
in MiB.
"""

from __future__ import annotations

import math
from collections.abc import (
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import pairwise

import numpy as np
import pulp

from ..milp import pulp_models
from .classes import Classes, Part
from .held_counts import Between, HeldCounts, shares_of
from .point_variables import PointVariables
from .segments import least_on_hull
from .table import Floats, Table

MIB = 2**20  # coefficients of (3) in MiB stay within row tolerances
_WHOLE = 1e-6  # what an integer may be off
Cuts = Mapping[int, Collection[int]]  # points of units, by shape
_LARGEST_TIME = 2.0**10  # of the scaled times: their sums stay above tolerances
_OwnLimit = tuple[pulp.LpConstraint, pulp.LpVariable]  # a row (7), and its Y_c


class CountModel:
    """The model for a few rows, and the way back from its variables.

    Args:
        table: The units.
        classes: Their classes, which the rows cannot tell apart.
        rows: Positions whose memory is capped.
        units: Those that may be chosen.
        budget_bytes: The cap; None to minimise it.
        mixed: Units that stand for finer curves: they may take points between theirs,
            and mixtures where points are missing. None if all take whole points.
        surcharges: What a solution costs at least beyond the relaxation if it uses a
            column, in ms.
        room_ms: Columns with a larger surcharge are left out.
        tolerance_ms: Points are mixed in segments of this tolerance only, see
            `segments`; infinite if they are mixed at will, and only classes and
            holds are counted in integers. Of no account without `mixed`.
        least_using: What choices take at least that use a point of a unit, see
            `surrogate`,
        limit_ms: and what they may take.
        cuts: Points after which a segment must end, by the unit's shape.

    Attributes:
        model: The PuLP model.
        classes: As above.
        scale: Objective of the model per millisecond, or per byte of the cap.
        unit_counts: Y_c by class,
        point_counts: and Z_ck by column of the class's first member.
        nesting_rows: Where rows (2) lie among those of the model.
    """

    def __init__(
        self,
        table: Table,
        classes: Classes,
        rows: Sequence[int],
        *,
        units: Collection[int],
        budget_bytes: int | None,
        mixed: Collection[int] | None = None,
        surcharges: Floats | None = None,
        room_ms: float = math.inf,
        tolerance_ms: float = math.inf,
        least_using: Mapping[int, Floats] | None = None,
        limit_ms: float = math.inf,
        cuts: Cuts | None = None,
    ) -> None:
        self.model = pulp_models.Model("counts")
        self._cuts = cuts or {}
        self._least_using = least_using or {}
        self._limit_ms = limit_ms
        self._table = table
        self.classes = classes
        self._surcharges = np.zeros(len(table.times))
        if surcharges is not None:
            self._surcharges = surcharges
        self._room_ms = room_ms
        self._tolerance_ms = tolerance_ms
        self._mixed = None if mixed is None else frozenset(mixed)
        longest = float(table.times.max(initial=0.0))
        exponent = math.frexp(_LARGEST_TIME / longest)[1] if longest else 0
        self.scale = 1.0 / MIB if budget_bytes is None else math.ldexp(1.0, exponent)
        self._add_weights(frozenset(units))
        self._add_no_nesting()
        self._peak: pulp.LpVariable | None = None
        if budget_bytes is None:
            self._peak = self.model.add_variable("peak")
            self.model.setObjective(pulp_models.row([(self._peak, 1.0)]))
        else:
            self.model.setObjective(
                pulp_models.row(
                    (z, time_ms * self.scale) for z, time_ms in self._timed()
                )
            )
        self._variables = PointVariables(
            table, classes, self.unit_counts, self.point_counts, self._between
        )
        self._held = HeldCounts(
            self.model,
            table,
            classes,
            unit_counts=self.unit_counts,
            point_counts=self.point_counts,
            between=self._between,
        )
        self._limits = [(self._add_row(q), int(table.base[q])) for q in rows]
        self._own_limits: list[list[_OwnLimit]] = [[] for _ in rows]
        if budget_bytes is not None:
            self.set_budget(budget_bytes)
            for q, limits in zip(rows, self._own_limits, strict=True):
                limits += self._add_own_limits(q, budget_bytes)

    @property
    def is_for_one_budget(self) -> bool:
        """Whether rows (7), which hold for one budget only, are there."""
        return any(self._own_limits)

    def set_budget(self, budget_bytes: int) -> None:
        """Change the right-hand sides of (3), if there are no rows (7)."""
        for constraint, base in self._limits:
            constraint.changeRHS((budget_bytes - base) / MIB)

    def num_integers(self) -> int:
        """How many variables a MILP has to branch on at most."""
        return sum(v.cat == pulp.LpInteger for v in self.model.variables())

    def parts(self, *, whole: bool) -> list[Part]:
        """What the members of each class take together."""
        parts = []
        for column, z in self.point_counts.items():
            value = max(0.0, z.varValue or 0.0)
            parts.append(Part(column, 0.0, round(value) if whole else value))
        for b, column, share, _ in self._between:
            parts.append(Part(column, share, max(0.0, b.varValue or 0.0)))
        return [part for part in parts if part.amount > 0.0]

    def mixes_known(self) -> bool:
        """Whether a solution mixes points between which no point is missing."""
        point_weights = [b.varValue or 0.0 for b, *_ in self._between]
        if any(abs(share - round(share)) > _WHOLE for share in point_weights):
            return True
        for c, y in self.unit_counts.items():
            unit = self.classes.members[c][0]
            columns = range(*self._table.first[unit : unit + 2])
            shares = [
                (j, self.point_counts[j].varValue or 0.0)
                for j in columns
                if j in self.point_counts
            ]
            if all(abs(share - round(share)) <= _WHOLE for _, share in shares):
                continue
            time_ms = sum(share * float(self._table.times[j]) for j, share in shares)
            if time_ms < self._complete_ms(unit) * round(y.varValue or 0.0):
                return True
        return False

    def mixtures(self) -> Cuts:
        """Where the solution mixes points: by shape, the last ones before mixtures.

        A mixture takes no less memory than its points only where rows follow times. A
        segment that ends there has no such mixture.
        """
        places: dict[int, set[int]] = {}
        for shape, vertices, variables in self._segments:
            place = _mean(vertices, variables)
            if place is not None:
                last = min(int(place), vertices[-1] - 1)
                places.setdefault(shape, set()).add(last)
        for c in self.unit_counts:
            u = self.classes.members[c][0]
            first, stop = self._table.first[u : u + 2]
            own = [j for j in range(first, stop) if j in self.point_counts]
            ratios = [self._table.problem.units[u].points[j - first].ratio for j in own]
            ratio = _mean(ratios, [self.point_counts[j] for j in own])
            segments = self._table.segments(u, self._complete_ms(u))
            if ratio is None or segments is None:
                continue
            last = int(segments.along.searchsorted(ratio)) - 1
            if 0 <= last < len(segments.along) - 1:
                places.setdefault(self._table.shapes[u], set()).add(last)
        return places

    def prices(self) -> list[float]:
        """What a byte of the budget saves at each row, in the objective's unit.

        By the duals of (3) and (7) in the relaxation solved last.
        """
        prices = []
        for (constraint, _), own in zip(self._limits, self._own_limits, strict=True):
            dual = constraint.pi or 0.0
            dual += sum((row.pi or 0.0) * (y.varValue or 0.0) for row, y in own)
            prices.append(-dual / MIB)
        return prices

    def is_binding(self) -> list[bool]:
        """Whether each row's (3) or one of its (7) bounds the last relaxation."""
        return [
            any((row.pi or 0.0) < 0.0 for row in (limit, *(row for row, _ in own)))
            for (limit, _), own in zip(self._limits, self._own_limits, strict=True)
        ]

    def surcharges(self) -> Floats:
        """What a solution costs at least beyond the LP optimum if it uses a column.

        In the objective's unit, by reduced costs of the relaxation solved last.
        """
        surcharges = np.zeros(len(self._table.times))
        for c, y in self.unit_counts.items():
            members = self.classes.members[c]
            first = self._table.first[members[0]]
            size = self._table.first[members[0] + 1] - first
            own = np.zeros(size)
            for k in range(size):
                z = self.point_counts.get(first + k)
                if z is not None:
                    own[k] = (z.dj or 0.0) + max(0.0, y.dj or 0.0)
            for u in members:
                surcharges[self._table.first[u] : self._table.first[u + 1]] = own
        return surcharges

    def _add_weights(self, units: frozenset[int]) -> None:
        """Row (1)."""
        add = self.model.add_variable
        self.unit_counts: dict[int, pulp.LpVariable] = {}
        self.point_counts: dict[int, pulp.LpVariable] = {}
        self._between: list[Between] = []
        self._segments: list[tuple[int, list[int], list[pulp.LpVariable]]] = []
        for c, members in enumerate(self.classes.members):
            first, size = members[0], len(members)
            if first not in units:
                continue
            using_ms = self._using_ms(members)
            if using_ms is not None and using_ms.min() > self._limit_ms:
                continue
            terms = []
            columns = [*range(*self._table.first[first : first + 2])]
            if self._mixed is None:
                for j in columns:
                    if self._surcharges[j] <= self._room_ms:
                        self.point_counts[j] = add(
                            f"z_{j:06d}", 0, size, pulp.LpInteger
                        )
                        terms.append((self.point_counts[j], 1.0))
            elif not math.isinf(self._tolerance_ms):
                terms += self._add_between(first, columns, size, using_ms)
                terms += self._add_mixture(first, columns, size, using_ms)
            else:
                terms += self._add_points(columns, size, 0.0)
            if terms:
                self.unit_counts[c] = add(f"y_{c:05d}", 0, size, pulp.LpInteger)
                self.model += (
                    pulp_models.row([*terms, (self.unit_counts[c], -1.0)]) == 0
                )

    def _using_ms(self, members: Sequence[int]) -> Floats | None:
        """Least time of the choices that use each point of any of some equal units."""
        bounds_ms = [self._least_using[u] for u in members if u in self._least_using]
        if len(bounds_ms) < len(members):
            return None
        return bounds_ms[0] if len(bounds_ms) == 1 else np.min(bounds_ms, axis=0)

    def _add_between(
        self,
        u: int,
        columns: Sequence[int],
        size: int,
        using_ms: Floats | None,
    ) -> list[tuple[pulp.LpVariable, float]]:
        """All points of a unit that are faster than any that is missing.

        How many members lie in which segment is counted in integers.
        """
        limit_ms = self._complete_ms(u)
        segments = self._table.segments(u, limit_ms)
        if segments is None:
            return []
        shape = self._table.shapes[u]
        own = segments.between(self._surcharges[columns]) + segments.times
        own -= segments.between(self._table.times[columns])
        if using_ms is not None:
            own[using_ms[: len(own)] > self._limit_ms] = math.inf
        kept = np.flatnonzero(own <= self._room_ms)
        terms = []
        cuts = self._cuts.get(shape, ())
        parts = segments.vertices(kept, self._tolerance_ms, cuts)
        for n, vertices in enumerate(parts):
            category = pulp.LpInteger if len(vertices) == 1 else pulp.LpContinuous
            points = []
            for v in vertices:
                column, share = (
                    columns[int(segments.index[v])],
                    float(segments.share[v]),
                )
                name = f"b_{column + (share > 0.0):06d}_{v:05d}"
                b = self.model.add_variable(name, 0, size, category)
                self._between.append((b, column, share, float(segments.times[v])))
                points.append((b, 1.0))
            if len(vertices) > 1:
                self._segments.append((shape, vertices, [b for b, _ in points]))
                name = f"s_{columns[0]:06d}_{n:05d}"
                count = self.model.add_variable(name, 0, size, pulp.LpInteger)
                self.model += pulp_models.row([*points, (count, -1.0)]) == 0
                points = [(count, 1.0)]
            terms += points
        return terms

    def _add_mixture(
        self,
        u: int,
        columns: Sequence[int],
        size: int,
        using_ms: Floats | None,
    ) -> list[tuple[pulp.LpVariable, float]]:
        """What stands for missing points: mixtures that take as long as any of them."""
        least_ms = self._complete_ms(u)
        if math.isinf(least_ms):
            return []
        if using_ms is not None:
            segments = self._table.segments(u, least_ms)
            num_known = 0 if segments is None else len(segments.times)
            if using_ms[num_known:].min(initial=math.inf) > self._limit_ms:
                return []
        points = self._add_points(columns, size, least_ms)
        if not points:
            return []
        count = self.model.add_variable(f"m_{columns[0]:06d}", 0, size, pulp.LpInteger)
        self.model += pulp_models.row([*points, (count, -1.0)]) == 0
        if least_ms > 0.0:
            times = self._table.times[columns] * self.scale
            slower = [(z, t) for (z, _), t in zip(points, times.tolist(), strict=True)]
            self.model += (
                pulp_models.row([*slower, (count, -least_ms * self.scale)]) >= 0
            )
        return [(count, 1.0)]

    def _add_points(
        self, columns: Sequence[int], size: int, least_ms: float
    ) -> list[tuple[pulp.LpVariable, float]]:
        """Points to be mixed; none if all mixtures of a time or more cost too much."""
        own = self._surcharges[columns]
        if least_on_hull(self._table.times[columns], own, least_ms) > self._room_ms:
            return []
        points = {j: self.model.add_variable(f"z_{j:06d}", 0, size) for j in columns}
        self.point_counts |= points
        return [(z, 1.0) for z in points.values()]

    def _complete_ms(self, u: int) -> float:
        """Time of a unit below which no point is missing."""
        if self._mixed is None or u not in self._mixed:
            return math.inf
        return self._table.problem.units[u].mixed_from_ms

    def _timed(self) -> Iterator[tuple[pulp.LpVariable, float]]:
        for column, z in self.point_counts.items():
            yield z, float(self._table.times[column])
        for b, _, _, time_ms in self._between:
            yield b, time_ms

    def _add_no_nesting(self) -> None:
        """Row (2)."""
        before = self.model.numConstraints()
        for c in self.classes.innermost:
            path = self.classes.path(c)
            terms = shares_of(self.classes, self.unit_counts, c, path)
            if len(terms) > 1:
                self.model += pulp_models.row(terms) <= len(self.classes.members[c])
        self.nesting_rows = slice(before, self.model.numConstraints())

    def _add_row(self, position: int) -> pulp.LpConstraint:
        """Row (3)."""
        added = self._variables.added(self._table.row(position)) / MIB
        is_used = added != 0.0
        is_used[len(self.point_counts) :] = True
        terms = self._variables.terms(np.flatnonzero(is_used), added)
        terms += [
            (held, added_bytes / MIB) for held, added_bytes in self._held.at(position)
        ]
        if self._peak is not None:
            terms.append((self._peak, -1.0))
            constraint = (
                pulp_models.row(terms) <= -float(self._table.base[position]) / MIB
            )
        else:
            constraint = pulp_models.row(terms) <= 0
        self.model += constraint
        return constraint

    def _add_own_limits(self, position: int, budget_bytes: int) -> list[_OwnLimit]:
        """Rows (7), of classes that (3) of whole points binds alone."""
        table = self._table
        added, elsewhere = table.row(position), table.elsewhere(position)
        spare = budget_bytes - int(table.base[position])
        spare -= sum(min(h.added_bytes, 0) for h in table.holds.at(position))
        own, places = self._variables.added(added), self._variables.places
        most = float(spare) + self._variables.most(elsewhere)
        binds = np.zeros(len(most), dtype=bool)
        binds[places[own > most[places]]] = True
        used = np.flatnonzero(binds[places] & (own != 0.0))
        used = used[np.argsort(places[used], kind="stable")]
        binding = np.flatnonzero(binds)
        stops = places[used].searchsorted(binding, side="right").tolist()
        counts = list(self.unit_counts.values())
        limits = []
        parts = pairwise([0, *stops])
        for place, part in zip(binding.tolist(), parts, strict=True):
            row = self._variables.terms(used[slice(*part)], own / MIB)
            row.append((counts[place], -float(most[place]) / MIB))
            constraint = pulp_models.row(row) <= 0
            self.model += constraint
            limits.append((constraint, counts[place]))
        return limits


def _mean(
    values: Sequence[float], variables: Sequence[pulp.LpVariable]
) -> float | None:
    """Mean of values, by what variables have beyond whole numbers; None if nothing."""
    shares = np.array([variable.varValue or 0.0 for variable in variables])
    shares -= np.floor(shares + _WHOLE)
    if shares.sum() <= _WHOLE:
        return None
    return float(shares @ np.array(values) / shares.sum())
