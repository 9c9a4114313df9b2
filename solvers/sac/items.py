"""Points of units that are of use to choices, and what they take away together.

A point that takes nothing away is of no use, and left out. So is one that takes no time
and nothing away from where there is too much.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .holds import Ints
from .surrogate import behind_of
from .table import Floats, Table

CELLS = 128  # of a grid of times
_LEAST_MS = 1e-9


@dataclass(frozen=True, slots=True)
class Part:
    """A point that is chosen.

    Attributes:
        unit: Of which unit.
        point: Which of its points, or the one before it,
        share: and how far it is on the way to the next one.
        recompute_ms: What it takes.
    """

    unit: int
    point: int
    share: float
    recompute_ms: float


@dataclass(frozen=True, slots=True)
class Items:
    """Points that are of use, unit by unit, those around others first.

    Attributes:
        parts: The points, the fastest of each unit first,
        times: and what they take.
        changes: What each adds at some rows,
        ending: and at those of them that partial choices end by.
        first: The first of each unit, and their number.
        behind: Of each unit the next one that is not inside it.
        most: What units from each on take away at most there, by cells of time.
    """

    parts: list[Part]
    times: Floats
    changes: Floats
    ending: Floats
    first: list[int]
    behind: list[int]
    most: Floats


def row_with_holds(table: Table, position: int) -> Floats:
    """What each column adds to the live memory at a position, at least.

    Of what units hold together each adds its part, or all where it is taken away.
    """
    row = table.row(position).astype(np.float64)
    for hold in table.holds.at(position):
        if hold.columns is not None:  # counts if one of these is chosen as well
            row[hold.columns] += min(hold.added_bytes, 0)
            continue
        num_parts = len(hold.holders) if hold.added_bytes > 0 else 1
        added = hold.added_bytes / num_parts
        for u in hold.holders.tolist():
            row[table.first[u] : table.first[u + 1]] += added
    return row


def useful_items(
    table: Table,
    by_column: Floats,
    ending: slice,
    *,
    is_over: npt.NDArray[np.bool_],
    mixed: Collection[int],
    most_ms: float,
) -> Items:
    """The points of a table that take less than a time and are of use.

    Args:
        table: The units.
        by_column: What each column adds at some rows.
        ending: Those rows that partial choices end by.
        is_over: Which of all positions are above the budget without AC.
        mixed: Units whose points are a selection from a finer curve.
        most_ms: That time. The grid ends there.
    """
    useful = _useful(table, is_over)
    order: list[int] = []
    parts: list[list[Part]] = []
    changes, times = [by_column[:0]], [np.zeros(0)]
    for u in table.depth_first:
        own, own_changes = _points(table, u, by_column, useful, most_ms, u in mixed)
        if own:
            order.append(u)
            parts.append(own)
            changes.append(own_changes)
            times.append(np.array([part.recompute_ms for part in own]))
    joined_times, joined = np.concatenate(times), np.concatenate(changes)
    first, behind = np.cumsum([0, *map(len, parts)]).tolist(), behind_of(table, order)
    at_ending = np.ascontiguousarray(joined[:, ending])
    cells = (joined_times / most_ms * CELLS).astype(np.int64)
    return Items(
        parts=[part for own in parts for part in own],
        times=joined_times,
        changes=joined,
        ending=at_ending,
        first=first,
        behind=behind,
        most=_knapsacks(at_ending, cells, first, behind),
    )


def _points(
    table: Table,
    u: int,
    by_column: Floats,
    useful: npt.NDArray[np.bool_],
    most_ms: float,
    is_mixed: bool,
) -> tuple[list[Part], Floats]:
    """Points of a unit, and what each adds at the rows."""
    first, stop = table.first[u : u + 2]
    times, index = table.times[first:stop], np.arange(stop - first)
    share = np.zeros(len(index))
    if is_mixed:
        segments = table.segments(u, most_ms)
        if segments is None:
            return [], by_column[:0]
        index, share, times = segments.index, segments.share, segments.times
    after = np.where(share > 0.0, index + 1, index)
    is_useful = useful[first + index] | useful[first + after]
    kept = np.flatnonzero(is_useful & (times < most_ms))
    kept = kept[np.argsort(times[kept], kind="stable")]
    index, after, share = index[kept], after[kept], share[kept]
    values = zip(index.tolist(), share.tolist(), times[kept].tolist(), strict=True)
    before, behind = by_column[first + index], by_column[first + after]
    changes: Floats = before + (behind - before) * share[:, None]
    return [Part(u, *value) for value in values], changes


def _useful(table: Table, is_over: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Columns that take memory away, with no time where there is too much."""
    columns, places, nbytes = table.works
    lowered, num_columns = nbytes < 0, len(table.times)
    frees, froms, untils = table.freed > 0, table.froms, table.untils
    num_over = np.cumsum(np.append(0, is_over))
    works = np.bincount(columns[lowered], minlength=num_columns) > 0
    frees_any = frees & (froms < untils)[table.owner]
    lowered &= is_over[places]
    works_over = np.bincount(columns[lowered], minlength=num_columns) > 0
    frees_over = frees & (num_over[untils] > num_over[froms])[table.owner]
    useful: npt.NDArray[np.bool_] = np.where(
        table.times < _LEAST_MS, works_over | frees_over, works | frees_any
    )
    return useful


def _knapsacks(
    changes: Floats, cells: Ints, first: Sequence[int], behind: Sequence[int]
) -> Floats:
    """What units from each on take away at most from each row, by time.

    Args:
        changes: What each of their points adds at the rows.
        cells: Of the grid of times, in which each point is.
        first, behind: As in `Items`.
    """
    most = np.zeros((len(behind) + 1, CELLS + 1, changes.shape[1]))
    for place in reversed(range(len(behind))):
        own, others = most[place], most[behind[place]]
        own[:] = most[place + 1]
        start, stop = first[place : place + 2]
        distinct, starts = np.unique(cells[start:stop], return_index=True)
        least = np.minimum.reduceat(changes[start:stop], starts)
        for cell, change in zip(distinct.tolist(), least, strict=True):
            taken = others[: CELLS + 1 - cell] - change
            np.maximum(own[cell:], taken, out=own[cell:])
    return most
