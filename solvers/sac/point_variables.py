"""Variables of points in the MILP over classes, as arrays: see `counts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pulp

from .classes import Classes
from .held_counts import Between
from .holds import Ints
from .table import Floats, Table


class PointVariables:
    """Variables of points, then of those between two, and what rows say of them.

    Args:
        table: The units.
        classes: Their classes.
        unit_counts: As those of the model,
        point_counts: likewise,
        between: and what lies between points.

    Attributes:
        places: Of each variable, that of its class among those of `unit_counts`.
    """

    def __init__(
        self,
        table: Table,
        classes: Classes,
        unit_counts: Mapping[int, pulp.LpVariable],
        point_counts: Mapping[int, pulp.LpVariable],
        between: Sequence[Between],
    ) -> None:
        self._variables = [*point_counts.values(), *(b for b, *_ in between)]
        columns = [*point_counts, *(column for _, column, *_ in between)]
        shares = [0.0] * len(point_counts) + [share for _, _, share, _ in between]
        self._columns = np.array(columns, dtype=np.int64)
        self._shares = np.array(shares)
        self._next = self._columns + (self._shares > 0.0)
        place_of = np.zeros(len(classes.members), dtype=np.int64)
        place_of[list(unit_counts)] = np.arange(len(unit_counts))
        of_unit = np.array(classes.of_unit, dtype=np.int64)
        self.places: Ints = place_of[of_unit[table.owner[self._columns]]]
        members = [classes.members[c] for c in unit_counts]
        self._members = np.array([u for own in members for u in own], dtype=np.int64)
        sizes = [len(own) for own in members]
        self._first = np.cumsum([0, *sizes], dtype=np.int64)[:-1]

    def added(self, row: Ints) -> Floats:
        """What each variable adds to a row, given what each column does."""
        before = row[self._columns] * (1.0 - self._shares)
        added: Floats = before + row[self._next] * self._shares
        return added

    def most(self, values: Ints) -> Floats:
        """The most that any member of each class has of some values by unit."""
        if not len(self._first):
            return np.zeros(0)
        most = np.maximum.reduceat(values[self._members], self._first)
        return most.astype(np.float64)

    def terms(
        self, numbers: Ints, coefficients: Floats
    ) -> list[tuple[pulp.LpVariable, float]]:
        """Some of the variables, each with its coefficient."""
        variables = [self._variables[i] for i in numbers.tolist()]
        return list(zip(variables, coefficients[numbers].tolist(), strict=True))
