"""Units that a few rows of memory cannot tell apart, and what to make of their sums.

Layers of a network repeat. Given only a few positions of the step, most of their units
have equal columns, and any two of them can be swapped, with all that is inside. The
model then only needs to know *how many* units of such a class take each point: the
same optimum (a relaxation of all rows, exact for the given ones), far fewer integers,
and none of the symmetry that branching cannot get through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .table import Floats, Table


class Part(NamedTuple):
    """What members of a class take together: of one point, or of one between two.

    Attributes:
        column: Of the first member: the point, or the first of the two,
        share: and how far it is on the way to the next one.
        amount: Sum of the members' weights.
    """

    column: int
    share: float
    amount: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Units grouped so that rows cannot tell members of a group apart.

    Attributes:
        members: Units of each class, the one that frees memory longest first.
        around: Class of the unit around the members of each class, -1 for none.
        of_unit: Class of each unit.
        innermost: Classes whose units contain no other unit.
    """

    members: tuple[tuple[int, ...], ...]
    around: tuple[int, ...]
    of_unit: tuple[int, ...]
    innermost: tuple[int, ...]

    def is_alone(self, u: int) -> bool:
        """Whether a unit is the only one of its class."""
        return len(self.members[self.of_unit[u]]) == 1

    def path(self, c: int) -> list[int]:
        """A class and those around it, innermost first."""
        path = []
        while c >= 0:
            path.append(c)
            c = self.around[c]
        return path


def classify(table: Table, rows: Sequence[int], kinds: Sequence[int]) -> Classes:
    """Group units by all that rows at a few positions show of them.

    Which units share holds with `freed_by` or `kept_by` is left out: that would tell
    most layers apart. Units of a class have the same part in holds that are alike. The
    model counts them, see `counts`; where that is not enough, `Search._tell_apart`.

    Args:
        table: The units.
        rows: The positions.
        kinds: A number for each unit; units of different numbers are kept apart.
    """
    columns = [np.array(table.shapes), np.array(kinds)]
    shared: list[list[tuple[int, int, int]]] = [[] for _ in table.parents]
    for number, position in enumerate(rows):
        columns.append(table.role(position))
        for hold in table.holds.at(position):
            if hold.columns is None:
                held = np.zeros(len(table.parents), dtype=np.int64)
                held[hold.holders] = 1
                columns.append(held)
                continue
            alike = number, table.holds.alike(hold.index)[0]
            for u in hold.holders.tolist():
                shared[u].append((*alike, -1))
            for column in hold.columns.tolist():
                u = int(table.owner[column])
                shared[u].append((*alike, column - table.first[u]))
    keys = np.stack(columns, axis=1)
    marks: list[object] = [
        (row.tobytes(), *sorted(parts)) for row, parts in zip(keys, shared, strict=True)
    ]
    # First what is inside a unit, then what is around it.
    inside: list[list[int]] = [[] for _ in marks]
    seen: dict[object, int] = {}
    subtree = [0] * len(marks)
    for u in reversed(table.depth_first):
        key = (marks[u], tuple(sorted(inside[u])))
        subtree[u] = seen.setdefault(key, len(seen))
        if table.parents[u] >= 0:
            inside[table.parents[u]].append(subtree[u])
    numbers: dict[tuple[int, int], int] = {}
    of_unit = [0] * len(marks)
    members: dict[int, list[int]] = defaultdict(list)
    around: dict[int, int] = {}
    for u in table.depth_first:
        parent = table.parents[u]
        outer = of_unit[parent] if parent >= 0 else -1
        of_unit[u] = numbers.setdefault((subtree[u], outer), len(numbers))
        members[of_unit[u]].append(u)
        around[of_unit[u]] = outer
    return Classes(
        members=tuple(
            tuple(sorted(members[c], key=lambda u: _longest_first(table, u)))
            for c in range(len(numbers))
        ),
        around=tuple(around[c] for c in range(len(numbers))),
        of_unit=tuple(of_unit),
        innermost=tuple(c for c in range(len(numbers)) if not inside[members[c][0]]),
    )


def spread(table: Table, classes: Classes, parts: Iterable[Part]) -> Floats:
    """Weights of single units from those of whole classes.

    Units that free memory longest take the points that free most: in a network that
    runs backward in the opposite order, these rerun when memory is lowest. Units that
    hold what others free are taken where these are not, and units that hold what others
    keep where these are, as far as there are such. A point between two others is one
    unit's: two units at either of these are another choice.

    Args:
        table: The units.
        classes: Their classes.
        parts: What the members of each class take.

    Returns:
        The weight of each column; integers if the parts are whole points in integers.
    """
    by_class: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        by_class[classes.of_unit[table.owner[part.column]]].append(part)
    weights = np.zeros(len(table.times))
    room = np.ones(len(table.parents))  # what is left of each unit's weight of 1
    outermost_first = sorted(
        range(len(classes.members)), key=lambda c: len(classes.path(c))
    )
    for c in outermost_first:
        members = classes.members[c]
        start = table.first[members[0]]
        for u in members:
            if table.parents[u] >= 0:
                room[u] = room[table.parents[u]]
        if any(partners := [table.holds.partners(u) for u in members]):
            taken = np.bincount(table.owner, weights, len(table.parents))
            beside = {
                u: float(sum(sign * taken[v] for v, sign in others.items()))
                for u, others in zip(members, partners, strict=True)
            }
            members = tuple(sorted(members, key=lambda u: beside[u]))
        moved = [p._replace(column=p.column - start) for p in by_class[c]]
        _spread_one(table, members, moved, room, weights)
    return weights


def _spread_one(
    table: Table,
    members: Sequence[int],
    parts: Iterable[Part],
    room: Floats,
    weights: Floats,
) -> None:
    """Deal out the parts of one class, whose columns count from the unit's first."""
    freed = table.freed[slice(*table.first[members[0] : members[0] + 2])]
    places = np.arange(len(freed))
    waiting = iter(members)
    u = next(waiting)
    for k, share, left in sorted(
        parts, key=lambda p: -float(np.interp(p.column + p.share, places, freed))
    ):
        while left > 1e-9:
            amount = min(left, float(room[u]))
            weights[table.first[u] + k] += amount * (1.0 - share)
            if share:
                weights[table.first[u] + k + 1] += amount * share
            room[u] -= amount
            left -= amount
            if left > 1e-9:
                following = next(waiting, None)
                if following is None:
                    return
                u = following


def _longest_first(table: Table, u: int) -> tuple[int, int]:
    return int(table.froms[u] - table.untils[u]), u
