"""How many holds are alive: rows (4) to (6) of the MILP in `counts`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pulp

from ..milp import pulp_models
from .classes import Classes
from .holds import Held
from .table import Table

# How many members of a class lie between two points: the variable, the column before,
# the share of the way to the next one, and the time there in ms.
Between = tuple[pulp.LpVariable, int, float, float]


class HeldCounts:
    """Variables of holds in the MILP over classes, made where a row needs them.

    Args:
        model: The PuLP model, to which rows are added.
        table: The units.
        classes: Their classes.
        unit_counts: Y_c by class,
        point_counts: Z_ck by column of the class's first member,
        between: and what lies between points.
    """

    def __init__(
        self,
        model: pulp_models.Model,
        table: Table,
        classes: Classes,
        *,
        unit_counts: Mapping[int, pulp.LpVariable],
        point_counts: Mapping[int, pulp.LpVariable],
        between: Sequence[Between],
    ) -> None:
        self._model = model
        self._table = table
        self._classes = classes
        self._unit_counts = unit_counts
        self._point_counts = point_counts
        self._between = between
        self._held: dict[object, pulp.LpVariable | None] = {}

    def at(self, position: int) -> Iterator[tuple[pulp.LpVariable, int]]:
        """How many holds of a kind are alive at a position, and the bytes of each."""
        groups: dict[object, list[Held]] = {}
        for hold in self._table.holds.at(position):
            groups.setdefault(self._likeness(hold), []).append(hold)
        for holds in groups.values():
            key = tuple(hold.key for hold in holds)
            if key not in self._held:
                self._held[key] = self._add_held(holds)
            held = self._held[key]
            if held is not None:
                yield held, holds[0].added_bytes

    def _likeness(self, hold: Held) -> object:
        """A key that is equal for holds that are counted together: of one class."""
        if hold.columns is None:
            return hold.index
        columns = tuple(sorted(map(self._of_class, hold.columns.tolist())))
        of_unit = self._classes.of_unit
        holders = tuple(sorted(of_unit[u] for u in hold.holders))
        return hold.added_bytes, columns, holders

    def _of_class(self, column: int) -> int:
        """The same point's column of the first member of the class of its unit."""
        u = int(self._table.owner[column])
        first = self._classes.members[self._classes.of_unit[u]][0]
        return column - self._table.first[u] + self._table.first[first]

    def _add_held(self, holds: Sequence[Held]) -> pulp.LpVariable | None:
        """Rows (4), (5) or (6) of holds that are counted together."""
        if holds[0].columns is None:
            return self._add_hold(holds)
        return self._add_kept(holds) if holds[0].is_kept else self._add_freed(holds)

    def _add_hold(self, holds: Sequence[Held]) -> pulp.LpVariable:
        """Rows (4) of a single hold."""
        (hold,) = holds
        held = self._model.add_variable(_name(hold), 0, 1, pulp.LpInteger)
        holding = {self._classes.of_unit[u] for u in hold.holders.tolist()}
        for c in sorted(holding & self._unit_counts.keys()):
            path = [d for d in self._classes.path(c) if d in holding]
            size = float(len(self._classes.members[c]))
            terms = [
                (y, -share)
                for y, share in shares_of(self._classes, self._unit_counts, c, path)
            ]
            self._model += pulp_models.row([(held, size), *terms]) >= 0
        return held

    def _add_freed(self, holds: Sequence[Held]) -> pulp.LpVariable | None:
        """Rows (5); None if they cannot bind."""
        count, of_unit = len(holds), self._classes.of_unit
        freeing = [h.columns.tolist() for h in holds if h.columns is not None]
        freers = {int(self._table.owner[j]) for own in freeing for j in own}
        columns = frozenset(map(self._of_class, freeing[0]))
        outer = {of_unit[u] for u in freers}
        if len(freers) != count * len(outer):
            return None  # one unit has a part in several of the holds
        spare = sum(len(self._classes.members[c]) - count for c in outer)
        free = [
            (self._point_counts[j], -1.0)
            for j in sorted(columns & self._point_counts.keys())
        ]
        free += [
            (b, -1.0)
            for b, j, share, _ in self._between
            if j in columns and (not share or j + 1 in columns)
        ]
        held: pulp.LpVariable | None = None
        for c in sorted(
            {of_unit[u] for u in holds[0].holders} & self._unit_counts.keys()
        ):
            holders = [
                {u for u in h.holders.tolist() if of_unit[u] == c} for h in holds
            ]
            distinct = len(set[int]().union(*(sorted(own)[:1] for own in holders)))
            if not free or distinct != count:
                continue
            if held is None:
                held = self._model.add_variable(f"{_name(holds[0])}_{count}", 0, count)
            rest = len(self._classes.members[c]) - count
            terms = [(held, 1.0), (self._unit_counts[c], -1.0), *free]
            self._model += pulp_models.row(terms) >= -(count + spare + rest)
        return held

    def _add_kept(self, holds: Sequence[Held]) -> pulp.LpVariable | None:
        """Rows (6); None if nothing can be both kept and held."""
        every = (h.columns.tolist() for h in holds if h.columns is not None)
        columns = self._most_parts(every, self._of_class)
        keeping = [
            (self._point_counts[j], -most)
            for j, most in columns
            if j in self._point_counts
        ]
        parts = dict(columns)
        for b, j, share, _ in self._between:
            most = max(parts.get(j, 0.0), parts.get(j + 1, 0.0) if share else 0.0)
            if most:
                keeping.append((b, -most))
        holders = (hold.holders.tolist() for hold in holds)
        units = self._most_parts(holders, self._classes.of_unit.__getitem__)
        held = [
            (self._unit_counts[c], -most) for c, most in units if c in self._unit_counts
        ]
        if not keeping or not held:
            return None
        name = f"{_name(holds[0])}_{len(holds)}"
        both = self._model.add_variable(name, 0, len(holds))
        self._model += pulp_models.row([(both, 1.0), *keeping]) <= 0
        self._model += pulp_models.row([(both, 1.0), *held]) <= 0
        return both

    @staticmethod
    def _most_parts(
        holds: Iterable[list[int]], of_class: Callable[[int], int]
    ) -> list[tuple[int, float]]:
        """By class, the most holds that one of its units or columns has a part in."""
        counts = Counter(member for members in holds for member in members)
        most: dict[int, float] = {}
        for member, count in sorted(counts.items()):
            c = of_class(member)
            most[c] = max(most.get(c, 0.0), float(count))
        return sorted(most.items())


def shares_of(
    classes: Classes,
    unit_counts: Mapping[int, pulp.LpVariable],
    c: int,
    path: Sequence[int],
) -> list[tuple[pulp.LpVariable, float]]:
    """How many members of a class are, or lie in, chosen units of classes.

    Args:
        classes: Of the units.
        unit_counts: Y_c by class.
        c: The class.
        path: Classes that are it or lie around it.
    """
    size = len(classes.members[c])
    return [
        (unit_counts[d], size / len(classes.members[d]))
        for d in path
        if d in unit_counts
    ]


def _name(hold: Held) -> str:
    return "h_" + "_".join(f"{number:05d}" for number in hold.key)
