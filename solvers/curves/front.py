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
labels were dropped, no point is missing. Where frontiers are too many, only those that
are reached fastest are followed: then the hull is lost, but not the fast points.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .save_problem import SaveProblem

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

_MOST_FRONTIERS = 60_000  # of all groups: half a second or so
_MOST_AT_ONCE = 512  # of one group: where there are more, they grow beyond all bounds
_FEWEST_AT_ONCE = 8  # that are followed if that is so
_FEWEST_LABELS, _ANY_WORK = 16, 2**62
_STEEPER = 1.0 + 1e-9  # than the line past it: a vertex, not rounding


@dataclass(slots=True)  # thousands are made: frozen ones take three times as long
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

    def take(self, which: npt.NDArray[np.generic] | slice) -> _Labels:
        """Some of the labels, by index or by flag."""
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
        """Record that labels save one more group, and return their new links."""
        self.groups.append(group)
        self.before.append(before)
        self.size += len(before)
        return np.arange(self.size - len(before), self.size)

    def flags(self, last: _Ints, num_groups: int) -> _Flags:
        """Flags of labels, shape (labels, groups), given their last links."""
        flags = np.zeros((len(last), num_groups), dtype=bool)
        if self.groups:
            group_of = np.repeat(self.groups, list(map(len, self.before)))
            before = np.concatenate(self.before)
            rows = np.arange(len(last))
            while len(rows := rows[last >= 0]):
                last = last[last >= 0]
                flags[rows, group_of[last]] = True
                last = before[last]
        return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFront:
    """What to save at Pareto points.

    Attributes:
        saved: Flags, shape (points, groups), the most bytes first; no points if there
            is no solution, or none that is known.
        complete_below_ms: No faster Pareto point is missing; infinite if none is.
        has_hull: The vertices of the lower convex hull are among the points.
    """

    saved: _Flags
    complete_below_ms: float
    has_hull: bool


def save_front(
    problem: SaveProblem,
    *,
    most_labels: int,
    most_work: int = _ANY_WORK,
    most_frontiers: int = _MOST_FRONTIERS,
) -> SaveFront:
    """Find the Pareto points of a problem.

    Args:
        problem: The groups.
        most_labels: Thin labels out when more are alive at once,
        most_work: or when there would be more over all groups if none went.
        most_frontiers: When there were more, over all groups (or very many of one),
            follow only those that are reached fastest.

    Returns:
        All Pareto points, or some: with the vertices of their lower convex hull, or
        the fastest ones.
    """
    nothing = _Labels(np.zeros(1, np.int64), np.zeros(1), np.full(1, -1))
    states, saved = {0: nothing}, _Saved()
    complete_below_ms, left, has_hull = math.inf, most_frontiers, True
    at_once = most_frontiers // max(1, problem.num_groups)
    at_once = min(max(_FEWEST_AT_ONCE, at_once), _MOST_AT_ONCE)
    for g in reversed(range(problem.num_groups)):
        reached = _step(problem, g, states, saved)
        states = {frontier: _unbeaten(parts) for frontier, parts in reached.items()}
        most = min(most_labels, max(_FEWEST_LABELS, most_work // (g + 1)))
        if (alive := sum(map(len, states.values()))) > most:
            states, complete_below_ms = _thinned(states, most // 2, complete_below_ms)
            alive = sum(map(len, states.values()))
        most_work -= alive
        left -= len(states)
        if len(states) > (_MOST_AT_ONCE if left >= 0 else at_once):
            states, complete_below_ms = _fastest(states, at_once, complete_below_ms)
            has_hull = False
    front = states.get(0, nothing.take(np.arange(0)))
    return SaveFront(
        saved=saved.flags(front.last[::-1], problem.num_groups),
        complete_below_ms=complete_below_ms,
        has_hull=has_hull,
    )


def _fastest(
    states: dict[int, _Labels], num_frontiers: int, complete_below_ms: float
) -> tuple[dict[int, _Labels], float]:
    """Keep the frontiers that are reached fastest, as long as they are; as `_thinned`.

    Args:
        states: Labels by frontier.
        num_frontiers: How many frontiers to keep.
        complete_below_ms: So far.
    """
    least_ms = sorted(float(labels.ms[-1]) for labels in states.values())
    complete_below_ms = min(complete_below_ms, least_ms[num_frontiers])
    fast = {
        frontier: labels.take(labels.ms < complete_below_ms)
        for frontier, labels in states.items()
        if labels.ms[-1] < complete_below_ms
    }
    return fast, complete_below_ms


def _thinned(
    states: dict[int, _Labels], rank: int, complete_below_ms: float
) -> tuple[dict[int, _Labels], float]:
    """Keep fast labels and hull vertices; return the time below which none is missing.

    Args:
        states: Labels by frontier.
        rank: How many labels of all frontiers are fast.
        complete_below_ms: So far.
    """
    labels = _joined(list(states.values()))
    complete_below_ms = min(
        complete_below_ms, float(np.partition(labels.ms, rank)[rank])
    )
    stops = np.cumsum([len(own) for own in states.values()])
    is_end = np.zeros(len(labels), dtype=bool)
    is_end[stops[:-1]] = is_end[stops - 1] = is_end[0] = True
    kept = labels.ms < complete_below_ms
    kept[_lower_hulls(labels.nbytes, labels.ms, is_end)] = True
    left = labels.take(kept)
    places = [0, *np.cumsum(kept)[stops - 1].tolist()]
    by_frontier = {
        frontier: left.take(slice(start, stop))
        for frontier, (start, stop) in zip(states, pairwise(places), strict=True)
    }
    return by_frontier, complete_below_ms


def lower_hull(nbytes: _Ints | _Floats, ms: _Floats) -> _Ints:
    """Indices of the vertices of the lower convex hull.

    Args:
        nbytes: Bytes of each point, or another measure of them, rising.
        ms: Time of each point, falling.
    """
    is_end = np.zeros(len(nbytes), dtype=bool)
    is_end[[0, -1]] = True
    return _lower_hulls(nbytes, ms, is_end)


def _lower_hulls(nbytes: _Ints | _Floats, ms: _Floats, is_end: _Flags) -> _Ints:
    """As `lower_hull`, of several curves one after the other.

    Args:
        nbytes: Bytes of each point, rising in each curve.
        ms: Time of each point, falling in each curve.
        is_end: Whether it is the first or the last point of its curve.
    """
    kept = np.arange(len(nbytes))
    with np.errstate(divide="ignore", invalid="ignore"):  # between two curves
        while True:
            x, y, is_vertex = nbytes[kept], ms[kept], is_end[kept]
            fall = (y[:-1] - y[1:]) / (x[1:] - x[:-1])
            # What lies on or above the line between its neighbours is no vertex. All
            # of these may go at once, as each lies on or above what is left.
            is_vertex[1:-1] |= fall[:-1] > _STEEPER * fall[1:]
            if is_vertex.all():
                return kept
            kept = kept[is_vertex]


def _step(
    problem: SaveProblem, g: int, states: dict[int, _Labels], saved: _Saved
) -> dict[int, list[_Labels]]:
    """Labels by frontier after a group is decided."""
    reached: dict[int, list[_Labels]] = defaultdict(list)
    bit, is_needed = 1 << g, g in problem.needed
    # What autograd needs is decided in any case, whoever reads it.
    inputs = sum(1 << h for h in set(problem.inputs[g]) - problem.needed)
    for frontier, labels in states.items():
        if not is_needed and not frontier & bit:
            reached[frontier].append(labels)  # nobody reads it
            continue
        rest = frontier & ~bit
        if g not in problem.unsavable:
            reached[rest].append(_with_saved(problem, g, labels, saved))
            if not problem.saved_bytes[g]:
                continue  # saving what takes no memory beats everything
        if g not in problem.pinned:
            ms = labels.ms + problem.runtime_ms[g]
            reached[rest | inputs].append(_Labels(labels.nbytes, ms, labels.last))
    return reached


def _with_saved(
    problem: SaveProblem, g: int, labels: _Labels, saved: _Saved
) -> _Labels:
    """Labels of a frontier after each has saved one more group."""
    nbytes = labels.nbytes + problem.saved_bytes[g]
    return _Labels(nbytes, labels.ms, saved.add(g, labels.last))


def _unbeaten(parts: list[_Labels]) -> _Labels:
    """Labels that are faster than all smaller ones.

    Args:
        parts: Labels of which that holds part by part.
    """
    if len(parts) == 1:
        return parts[0]
    labels = _joined(parts)
    order = labels.nbytes.argsort(kind="stable")  # quick: the parts are sorted
    least_ms = np.minimum.accumulate(labels.ms[order])
    is_faster = np.empty(len(order), dtype=bool)
    is_faster[0] = True
    np.less(least_ms[1:], least_ms[:-1], out=is_faster[1:])
    faster = labels.take(order[is_faster])
    is_last = faster.nbytes[1:] != faster.nbytes[:-1]
    if np.count_nonzero(is_last) == len(is_last):
        return faster
    return faster.take(np.append(is_last, True))  # the fastest of each size


def _joined(parts: list[_Labels]) -> _Labels:
    """Labels one part after the other."""
    return _Labels(
        np.concatenate([part.nbytes for part in parts]),
        np.concatenate([part.ms for part in parts]),
        np.concatenate([part.last for part in parts]),
    )
