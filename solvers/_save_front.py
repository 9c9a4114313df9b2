"""The whole Pareto front of a `SaveProblem` at once, by dynamic programming.

Groups are visited from the last to the first. What the decisions so far leave to be
decided is the set of earlier groups that a rerun reads (the frontier); labels with the
same frontier are (saved bytes, recompute time), and of these only those that no other
beats can become part of an optimum. Ops of a module read few results from far back, so
frontiers are few, and sizes repeat, so labels are few. Where they are too many, only
the vertices of each frontier's lower convex hull are kept, and the fastest half.
Whatever a byte costs, the cheapest label of a frontier is one of the vertices, and all
that may follow adds the same to all labels: so the hull of the front is exact, and only
points above it are missing. Labels only grow slower: so up to the least time at which
labels were dropped, no point is missing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # only its fields are read
    from solvers.knapsack import SaveProblem

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_STEEPER = 1.0 + 1e-9  # than the line past it: a vertex, not rounding


@dataclass(frozen=True, slots=True)
class _Labels:
    """Labels of one frontier, the fewest bytes first.

    Attributes:
        nbytes: Saved bytes of each.
        ms: Recompute time of each.
        last: What each has saved last, see `_Saved`; -1 for nothing.
    """

    nbytes: _Ints
    ms: _Floats
    last: _Ints

    def __len__(self) -> int:
        return len(self.nbytes)

    def take(self, which: npt.NDArray[np.generic]) -> _Labels:
        """Some of them, by place or by flag."""
        return _Labels(self.nbytes[which], self.ms[which], self.last[which])


@dataclass(slots=True)
class _Saved:
    """Which groups labels have saved, as linked lists whose links are numbered.

    Attributes:
        groups: Groups, each with the links that say it was saved:
        before: each link's own last link.
        size: Number of links.
    """

    groups: list[int] = field(default_factory=list)
    before: list[_Ints] = field(default_factory=list)
    size: int = 0

    def add(self, group: int, before: _Ints) -> _Ints:
        """Links of labels that save a group as well."""
        self.groups.append(group)
        self.before.append(before)
        self.size += len(before)
        return np.arange(self.size - len(before), self.size)

    def flags(self, last: _Ints, num_groups: int) -> list[tuple[bool, ...]]:
        """Flags per group of labels, given their last links."""
        flags = np.zeros((len(last), num_groups), dtype=bool)
        if self.groups:
            group_of = np.repeat(self.groups, list(map(len, self.before)))
            before = np.concatenate(self.before)
            rows = np.arange(len(last))
            while len(rows := rows[last >= 0]):
                last = last[last >= 0]
                flags[rows, group_of[last]] = True
                last = before[last]
        return list(map(tuple, flags.tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFront:
    """What to save at Pareto points.

    Attributes:
        saved: Flags per group for each point, the most bytes first; empty if there is
            no solution.
        complete_below_ms: No faster Pareto point is missing; infinite if none is.
        has_hull: The vertices of the lower convex hull of all Pareto points are there.
    """

    saved: list[tuple[bool, ...]]
    complete_below_ms: float
    has_hull: bool


def save_front(
    problem: SaveProblem, *, most_labels: int, most_frontiers: int = 4096
) -> SaveFront:
    """Find the Pareto points of a problem; its capacity is ignored.

    Args:
        problem: The groups.
        most_labels: Thin labels out when more are alive at once.
        most_frontiers: Drop the widest frontiers when more are alive at once.
    """
    nothing = _Labels(np.zeros(1, np.int64), np.zeros(1), np.full(1, -1))
    states, saved = {0: nothing}, _Saved()
    complete_below_ms, has_hull = math.inf, True
    for g in reversed(range(problem.num_groups)):
        reached = _step(problem, g, states, saved)
        states = {frontier: _unbeaten(parts) for frontier, parts in reached.items()}
        if sum(map(len, states.values())) > most_labels:
            times = np.concatenate([labels.ms for labels in states.values()])
            rank = most_labels // 2
            time_of_rank = float(np.partition(times, rank)[rank])
            complete_below_ms = min(complete_below_ms, time_of_rank)
            states = {
                frontier: _thinned(labels, complete_below_ms)
                for frontier, labels in states.items()
            }
        if len(states) > most_frontiers:
            complete_below_ms, has_hull = 0.0, False
            narrow = sorted(states, key=int.bit_count)[: most_frontiers // 2]
            states = {frontier: states[frontier] for frontier in narrow}
    front = states.get(0, nothing.take(np.arange(0)))
    return SaveFront(
        saved=saved.flags(front.last[::-1], problem.num_groups),
        complete_below_ms=complete_below_ms,
        has_hull=has_hull,
    )


def _thinned(labels: _Labels, complete_below_ms: float) -> _Labels:
    """The fast labels and the hull's vertices."""
    kept = labels.ms < complete_below_ms
    if kept[0]:  # the slowest
        return labels
    kept[lower_hull(labels.nbytes, labels.ms)] = True
    return labels.take(kept)


def lower_hull(nbytes: _Ints, ms: _Floats) -> _Ints:
    """Indices of the vertices of the lower convex hull.

    Args:
        nbytes: Bytes of each point, rising.
        ms: Time of each point, falling.
    """
    kept = np.arange(len(nbytes))
    while len(kept) > 2:
        x, y = nbytes[kept], ms[kept]
        fall = (y[:-1] - y[1:]) / (x[1:] - x[:-1])
        # What lies on or above the line between its neighbours is no vertex. All of
        # these may go at once, as each lies on or above what is left.
        (vertices,) = (fall[:-1] > _STEEPER * fall[1:]).nonzero()
        if len(vertices) == len(kept) - 2:
            break
        kept = kept[np.concatenate(([0], vertices + 1, [-1]))]
    return kept


def _step(
    problem: SaveProblem, g: int, states: dict[int, _Labels], saved: _Saved
) -> dict[int, list[_Labels]]:
    """Labels by frontier after a group is decided."""
    reached: dict[int, list[_Labels]] = defaultdict(list)
    for frontier, labels in states.items():
        for onward, more in _decisions(problem, g, frontier, labels, saved):
            reached[onward].append(more)
    return reached


def _decisions(
    problem: SaveProblem, g: int, frontier: int, labels: _Labels, saved: _Saved
) -> Iterator[tuple[int, _Labels]]:
    """Frontier and labels after saving a group, and after rerunning it."""
    bit = 1 << g
    if g not in problem.needed and not frontier & bit:
        yield frontier, labels  # nobody reads it
        return
    rest = frontier & ~bit
    nbytes, runtime_ms = problem.saved_bytes[g], problem.runtime_ms[g]
    if g not in problem.unsavable:
        links = saved.add(g, labels.last)
        yield rest, _Labels(labels.nbytes + nbytes, labels.ms, links)
        if not nbytes:
            return  # saving what takes no memory beats everything
    if g not in problem.pinned:
        for h in problem.inputs[g]:
            rest |= 1 << h
        yield rest, _Labels(labels.nbytes, labels.ms + runtime_ms, labels.last)


def _unbeaten(parts: list[_Labels]) -> _Labels:
    """Labels that are faster than all smaller ones.

    Args:
        parts: Labels of which that holds part by part.
    """
    if len(parts) == 1:
        return parts[0]
    labels = _Labels(
        np.concatenate([part.nbytes for part in parts]),
        np.concatenate([part.ms for part in parts]),
        np.concatenate([part.last for part in parts]),
    )
    order = np.lexsort((labels.ms, labels.nbytes))
    least_ms = np.minimum.accumulate(labels.ms[order])
    is_faster = np.append(True, least_ms[1:] < least_ms[:-1])
    return labels.take(order[is_faster])
