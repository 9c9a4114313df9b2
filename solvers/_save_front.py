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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # only its fields are read
    from solvers.knapsack import SaveProblem

# Saved bytes, recompute time, groups saved so far as a linked list.
_Label = tuple[int, float, Any]

_BYTES_AND_TIME = itemgetter(0, 1)
_STEEPER = 1.0 + 1e-9  # than the line past it: a vertex, not rounding


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
    states: dict[int, list[_Label]] = {0: [(0, 0.0, None)]}
    complete_below_ms, has_hull = math.inf, True
    for g in reversed(range(problem.num_groups)):
        reached = _step(problem, g, states)
        states = {frontier: _unbeaten(labels) for frontier, labels in reached.items()}
        if sum(map(len, states.values())) > most_labels:
            complete_below_ms = min(
                complete_below_ms, _time_of_rank(states, most_labels // 2)
            )
            states = {
                frontier: _thinned(labels, complete_below_ms)
                for frontier, labels in states.items()
            }
        if len(states) > most_frontiers:
            complete_below_ms, has_hull = 0.0, False
            narrow = sorted(states, key=int.bit_count)[: most_frontiers // 2]
            states = {frontier: states[frontier] for frontier in narrow}
    front = states.get(0, [])
    saved = [_flags(problem, label) for label in reversed(front)]
    return SaveFront(
        saved=saved, complete_below_ms=complete_below_ms, has_hull=has_hull
    )


def _time_of_rank(states: dict[int, list[_Label]], rank: int) -> float:
    """Time that so many labels are faster than."""
    return sorted(label[1] for labels in states.values() for label in labels)[rank]


def _thinned(labels: list[_Label], complete_below_ms: float) -> list[_Label]:
    """The fast labels and the hull's vertices."""
    hull = set(lower_hull(labels))
    return [
        label
        for i, label in enumerate(labels)
        if i in hull or label[1] < complete_below_ms
    ]


def lower_hull(points: Sequence[tuple[Any, ...]]) -> list[int]:
    """Indices of the vertices of the lower convex hull.

    Args:
        points: Bytes and time of each; bytes rise and times fall.
    """
    kept: list[int] = []
    for i, point in enumerate(points):
        while len(kept) > 1:
            before, last = points[kept[-2]], points[kept[-1]]
            steep = (before[1] - last[1]) / (last[0] - before[0])
            if steep > _STEEPER * (before[1] - point[1]) / (point[0] - before[0]):
                break
            kept.pop()
        kept.append(i)
    return kept


def _step(
    problem: SaveProblem, g: int, states: dict[int, list[_Label]]
) -> dict[int, list[_Label]]:
    """Labels by frontier after a group is decided."""
    reached: dict[int, list[_Label]] = defaultdict(list)
    for frontier, labels in states.items():
        for onward, more in _decisions(problem, g, frontier, labels):
            reached[onward] += more
    return reached


def _decisions(
    problem: SaveProblem, g: int, frontier: int, labels: list[_Label]
) -> Iterator[tuple[int, list[_Label]]]:
    """Frontier and labels after saving a group, and after rerunning it."""
    bit = 1 << g
    if g not in problem.needed and not frontier & bit:
        yield frontier, labels  # nobody reads it
        return
    rest = frontier & ~bit
    nbytes, runtime_ms = problem.saved_bytes[g], problem.runtime_ms[g]
    if g not in problem.unsavable:
        yield rest, [(b + nbytes, t, (g, saved)) for b, t, saved in labels]
        if not nbytes:
            return  # saving what takes no memory beats everything
    if g not in problem.pinned:
        for h in problem.inputs[g]:
            rest |= 1 << h
        yield rest, [(b, t + runtime_ms, saved) for b, t, saved in labels]


def _unbeaten(labels: list[_Label]) -> list[_Label]:
    """Labels that are faster than all smaller ones, the fewest bytes first."""
    labels.sort(key=_BYTES_AND_TIME)
    kept: list[_Label] = []
    least_ms = math.inf
    for label in labels:
        if label[1] < least_ms:
            kept.append(label)
            least_ms = label[1]
    return kept


def _flags(problem: SaveProblem, label: _Label) -> tuple[bool, ...]:
    flags = [False] * problem.num_groups
    saved = label[2]
    while saved is not None:
        group, saved = saved
        flags[group] = True
    return tuple(flags)
