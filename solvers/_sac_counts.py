"""The MILP over classes of units: how many of each take which point, in PuLP.

Y_c members of class c are under AC, Z_ck of them at point k:

minimize    sum_ck t_ck Z_ck  (or P)                recompute time [ms], or peak
subject to  sum_k Z_ck = Y_c                        for every class            (1)
            sum_d Y_d |c| / |d| <= |c|              d = c and around it: no    (2)
                                                    nesting
            B_q + sum_ck a_qck Z_ck + sum_j n_j h_j <= P    at the rows' positions q (3)
            sum_d Y_d |c| / |d| <= |c| h_j          d as in (2) that hold j    (4)

with a what a point adds to the live memory B, and h_j = 1 if any unit holds j. Classes
of equal units of one tree split in equal parts, so that |c| / |d| is an integer, and
every solution in integers can be dealt out to the units (`_sac_classes.spread`). With
one member each this is the MILP over units itself. Bytes are in MiB.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import pulp

from solvers import _pulp
from solvers._sac_classes import Classes
from solvers._sac_table import Floats, Table

MIB = 2**20  # coefficients of (3) in MiB stay within row tolerances
_LARGEST_TIME = 2.0**10  # of the scaled times: their sums stay above tolerances


class CountModel:
    """The model for a few rows, and the way back from its variables.

    Args:
        table: The units.
        classes: Their classes, which the rows cannot tell apart.
        rows: Positions whose memory is capped.
        units: Those that may be chosen.
        budget_bytes: The cap; None to minimise it.
        mixed: Units whose points may be mixed; others take whole points.
        left_out: Columns that must not be used.

    Attributes:
        model: The PuLP model.
        scale: Objective of the model per millisecond, or per byte of the cap.
    """

    def __init__(
        self,
        table: Table,
        classes: Classes,
        rows: Sequence[int],
        *,
        units: Collection[int],
        budget_bytes: int | None,
        mixed: Collection[int] = (),
        left_out: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.model = pulp.LpProblem("counts", pulp.LpMinimize)
        self._table = table
        self._classes = classes
        self._left_out = left_out
        longest = float(table.times.max(initial=0.0))
        exponent = math.frexp(_LARGEST_TIME / longest)[1] if longest else 0
        self.scale = 1.0 / MIB if budget_bytes is None else math.ldexp(1.0, exponent)
        self._add_weights(frozenset(units), frozenset(mixed))
        self._add_no_nesting()
        self._peak: pulp.LpVariable | None = None
        if budget_bytes is None:
            self._peak = self.model.add_variable("peak")
            self.model.setObjective(_pulp.row([(self._peak, 1.0)]))
        else:
            self.model.setObjective(
                _pulp.row(
                    (z, float(table.times[column]) * self.scale)
                    for column, z in self._z.items()
                )
            )
        self._held: dict[tuple[int, int], pulp.LpVariable] = {}
        self._limits = [(self._add_row(q), int(table.base[q])) for q in rows]
        if budget_bytes is not None:
            self.set_budget(budget_bytes)

    def set_budget(self, budget_bytes: int) -> None:
        """Change the right-hand sides of (3)."""
        for constraint, base in self._limits:
            constraint.changeRHS((budget_bytes - base) / MIB)

    def totals(self, *, whole: bool) -> Floats:
        """Sums of the members' weights, in the columns of each class's first member."""
        found = np.zeros(len(self._table.times))
        for column, z in self._z.items():
            value = max(0.0, z.varValue or 0.0)
            found[column] = round(value) if whole else value
        return found

    def price(self) -> float:
        """What a byte of the budget saves, in the objective's unit.

        The sum of the duals of (3) in the relaxation solved last.
        """
        return -sum(constraint.pi or 0.0 for constraint, _ in self._limits) / MIB

    def surcharges(self) -> Floats:
        """What a solution costs at least beyond the LP optimum if it uses a column.

        In the objective's unit, by reduced costs of the relaxation solved last.
        """
        found = np.zeros(len(self._table.times))
        for c, y in self._y.items():
            members = self._classes.members[c]
            first = self._table.first[members[0]]
            size = self._table.first[members[0] + 1] - first
            own = np.zeros(size)
            for k in range(size):
                z = self._z.get(first + k)
                if z is not None:
                    own[k] = max(0.0, z.dj or 0.0) + max(0.0, y.dj or 0.0)
            for u in members:
                found[self._table.first[u] : self._table.first[u + 1]] = own
        return found

    def _add_weights(self, units: frozenset[int], mixed: frozenset[int]) -> None:
        """Row (1)."""
        add = self.model.add_variable
        self._y: dict[int, pulp.LpVariable] = {}
        self._z: dict[int, pulp.LpVariable] = {}
        for c, members in enumerate(self._classes.members):
            first, size = members[0], len(members)
            if first not in units:
                continue
            kind = pulp.LpContinuous if first in mixed else pulp.LpInteger
            columns = [*range(*self._table.first[first : first + 2])]
            if self._left_out is not None:
                columns = [j for j in columns if not self._left_out[j]]
            if not columns:
                continue
            points = {j: add(f"z_{j:06d}", 0, size, kind) for j in columns}
            self._y[c] = add(f"y_{c:05d}", 0, size, pulp.LpInteger)
            terms = [(z, 1.0) for z in points.values()]
            self.model += _pulp.row([*terms, (self._y[c], -1.0)]) == 0
            self._z |= points

    def _add_no_nesting(self) -> None:
        """Row (2)."""
        for c in self._classes.innermost:
            path = self._classes.path(c)
            terms = self._shares(c, path)
            if len(terms) > 1:
                self.model += _pulp.row(terms) <= len(self._classes.members[c])

    def _shares(
        self, c: int, path: Sequence[int]
    ) -> list[tuple[pulp.LpVariable, float]]:
        """How many members of a class are, or lie in, chosen units of classes."""
        size = len(self._classes.members[c])
        return [
            (self._y[d], size / len(self._classes.members[d]))
            for d in path
            if d in self._y
        ]

    def _add_row(self, position: int) -> pulp.LpConstraint:
        """Row (3)."""
        added = self._table.row(position)
        terms = [
            (z, float(added[column]) / MIB)
            for column, z in self._z.items()
            if added[column]
        ]
        for index, nbytes, holders in self._table.holders(position):
            key = (index, len(holders))  # holders of a hold are nested sets
            if key not in self._held:
                self._held[key] = self._add_hold(key, holders.tolist())
            terms.append((self._held[key], nbytes / MIB))
        if self._peak is not None:
            terms.append((self._peak, -1.0))
            constraint = _pulp.row(terms) <= -float(self._table.base[position]) / MIB
        else:
            constraint = _pulp.row(terms) <= 0
        self.model += constraint
        return constraint

    def _add_hold(self, key: tuple[int, int], holders: list[int]) -> pulp.LpVariable:
        """Rows (4)."""
        index, count = key
        held = self.model.add_variable(
            f"h_{index:05d}_{count:05d}", 0, 1, pulp.LpInteger
        )
        holding = {self._classes.of_unit[u] for u in holders}
        for c in sorted(holding & self._y.keys()):
            path = [d for d in self._classes.path(c) if d in holding]
            size = float(len(self._classes.members[c]))
            terms = [(y, -share) for y, share in self._shares(c, path)]
            self.model += _pulp.row([(held, size), *terms]) >= 0
        return held
