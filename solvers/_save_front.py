"""The whole Pareto front of a `SaveProblem` at once, by dynamic programming.

Groups are visited from the last to the first. What the decisions so far leave to be
decided is the set of earlier groups that a rerun reads (the frontier); labels with the
same frontier are (saved bytes, recompute time), and of these only those that no other
beats can become part of an optimum. Ops of a module read few results from far back, so
frontiers are few, and sizes repeat, so labels are few. Where they are too many, labels
of nearly the same size are thinned out: the front is then feasible, but not exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # only its fields are read
    from solvers.knapsack import SaveProblem

# Saved bytes, recompute time, groups saved so far as a linked list.
_Label = tuple[int, float, Any]


def save_front(problem: SaveProblem, *, most_labels: int) -> list[tuple[bool, ...]]:
    """Which groups to save at every Pareto point, the most bytes first.

    Args:
        problem: The groups; its capacity is ignored.
        most_labels: Thin labels out when more are alive at once.

    Returns:
        Flags per group for each point; empty if there is no solution.
    """
    states: dict[int, list[_Label]] = {0: [(0, 0.0, None)]}
    for g in reversed(range(problem.num_groups)):
        reached: dict[int, list[_Label]] = defaultdict(list)
        for frontier, labels in states.items():
            for onward, more in _decisions(problem, g, frontier, labels):
                reached[onward] += more
        states = {frontier: _unbeaten(labels) for frontier, labels in reached.items()}
        if sum(map(len, states.values())) > most_labels:
            narrow = sorted(states, key=int.bit_count)[: most_labels // 2]
            share = most_labels // len(narrow)
            states = {f: _thinned(states[f], share) for f in narrow}
    front = states.get(0, [])
    return [_flags(problem, label) for label in reversed(front)]


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
    labels.sort(key=lambda label: label[:2])
    kept: list[_Label] = []
    for label in labels:
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    return kept


def _thinned(labels: list[_Label], most: int) -> list[_Label]:
    """The fastest label of each of so many ranges of bytes, and the smallest one."""
    first, last = labels[0][0], labels[-1][0]
    width = (last - first) // most + 1
    fastest = {(label[0] - first) // width: label for label in labels}
    kept = list(fastest.values())
    return kept if kept[0] is labels[0] else [labels[0], *kept]


def _flags(problem: SaveProblem, label: _Label) -> tuple[bool, ...]:
    flags = [False] * problem.num_groups
    saved = label[2]
    while saved is not None:
        group, saved = saved
        flags[group] = True
    return tuple(flags)
