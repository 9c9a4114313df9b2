"""Which results of one AC unit to save: all Pareto points of a `SaveProblem` at once.

By dynamic programming (`curves/front.py`); of large units only the vertices of their
hull, by linear programs (`curves/hull.py`), and points near it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise

import numpy as np
import numpy.typing as npt

from .front import lower_hull, save_front
from .hull import save_hull
from .save_problem import SaveProblem

_MOST_LABELS = 524_288  # alive at once in the dynamic program,
_MOST_WORK = 10_000_000  # and in all: some tenths of a second
_MOST_CROSSINGS = 1024  # each way, of all neighbours on a hull

_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Front:
    """Pareto points of recompute time against saved bytes, the most bytes first.

    The vertices of the lower convex hull of all Pareto points are among them: no save
    set lies below the line through two neighbours of these.

    Attributes:
        problem: The groups.
        saved: Flags of shape (points, groups): whether each group's results are saved,
        rerun: and whether each group is rerun: no more than `saved` makes necessary.
        saved_bytes: Activation memory of the groups that are saved, at each point.
        recompute_ms: Time of the groups that are rerun, and what is fixed.
        complete_below_ms: No faster Pareto point is missing; infinite if none is.
    """

    problem: SaveProblem
    saved: _Flags
    rerun: _Flags
    saved_bytes: npt.NDArray[np.int64]
    recompute_ms: npt.NDArray[np.float64]
    complete_below_ms: float

    def __len__(self) -> int:
        return len(self.saved_bytes)

    @property
    def is_complete(self) -> bool:
        """Whether no Pareto point is missing."""
        return math.isinf(self.complete_below_ms)

    def within(self, most_bytes: int) -> Front:
        """The points that save no more than so many bytes."""
        start = int(np.searchsorted(-self.saved_bytes, -most_bytes))
        return replace(
            self,
            saved=self.saved[start:],
            rerun=self.rerun[start:],
            saved_bytes=self.saved_bytes[start:],
            recompute_ms=self.recompute_ms[start:],
        )

    def select(self, num_points: int) -> tuple[int, ...]:
        """Indices of the hull's vertices and of points evenly spaced in bytes.

        Args:
            num_points: All points if there are no more. Else number of capacities to
                look at, evenly spaced between the fewest possible bytes and those of
                the least time. These two are always looked at.
        """
        if len(self) <= num_points:
            return tuple(range(len(self)))
        sizes, last = self.saved_bytes, max(num_points, 2) - 1
        hull = lower_hull(sizes[::-1], self.recompute_ms[::-1])
        low, high = int(sizes[-1]), int(sizes[0])
        capacities = np.array([low + (high - low) * k // last for k in range(last + 1)])
        evenly = np.searchsorted(-sizes, -capacities)
        return tuple(sorted({*(len(sizes) - 1 - hull).tolist(), *evenly.tolist()}))


def front(problem: SaveProblem, *, most_labels: int | None = None) -> Front:
    """Pareto points: all of them, or some with the vertices of their hull.

    Args:
        problem: The groups.
        most_labels: Partial solutions to keep at once before they are thinned out;
            None for as many as take some tenths of a second.
    """
    limits = {"most_labels": _MOST_LABELS, "most_work": _MOST_WORK}
    if most_labels is not None:
        limits = {"most_labels": most_labels}
    pareto = save_front(problem, **limits)
    saved = pareto.saved
    if not pareto.has_hull:
        saved, _ = _unbeaten(problem, np.concatenate([saved, save_hull(problem)]))
    rerun = _rerun(problem, saved)
    if len(saved) and not math.isinf(pareto.complete_below_ms):
        saved, rerun = _with_crossings(problem, saved)
    return Front(
        problem=problem,
        saved=saved,
        rerun=rerun,
        saved_bytes=np.dot(saved, np.array(problem.saved_bytes, dtype=np.int64)),
        recompute_ms=problem.fixed_ms
        + np.dot(rerun, np.array(problem.runtime_ms, dtype=np.float64)),
        complete_below_ms=problem.fixed_ms + pareto.complete_below_ms,
    )


def _with_crossings(problem: SaveProblem, saved: _Flags) -> tuple[_Flags, _Flags]:
    """Points and crossings of neighbours on their hull: what is saved, what is rerun.

    A crossing saves what one vertex saves up to some group, and what the next vertex
    saves from there on. Where layers repeat, two vertices differ in all layers alike,
    and the points between them, at which some layers have changed already, lie next to
    the hull: these are found so, without the labels that they would take.

    Args:
        problem: The groups.
        saved: Flags of Pareto points, shape (points, groups), the most bytes first.
    """
    sizes, times, _ = _sums(problem, saved)
    vertices = saved[len(sizes) - 1 - lower_hull(sizes[::-1], times[::-1])]
    parts = [saved]
    share = _MOST_CROSSINGS // max(1, len(vertices) - 1)
    for before, after in pairwise(vertices):
        changed = np.flatnonzero(before != after)[1:]
        cuts = changed[:: -(-len(changed) // max(1, share)) or 1]
        is_crossed = np.arange(problem.num_groups) >= cuts[:, None]
        parts += [
            np.where(is_crossed, before, after),
            np.where(is_crossed, after, before),
        ]
    return _unbeaten(problem, np.concatenate(parts))


def _unbeaten(problem: SaveProblem, saved: _Flags) -> tuple[_Flags, _Flags]:
    """Points that are allowed and faster than all smaller ones, and what they rerun.

    Args:
        problem: The groups.
        saved: Flags of points in any order, shape (points, groups).

    Returns:
        Flags of the points that are left, the most bytes first, and of their reruns.
    """
    sizes, times, rerun = _sums(problem, saved)
    order = np.lexsort((times, sizes))
    # What must not run twice is not run twice in the points, but may be in a crossing.
    pinned = np.array(sorted(problem.pinned), dtype=np.int64)
    order = order[~rerun[order][:, pinned].any(axis=1)]
    fastest = np.minimum.accumulate(np.append(np.inf, times[order]))
    kept = order[times[order] < fastest[:-1]][::-1]
    return saved[kept], rerun[kept]


def _sums(
    problem: SaveProblem, saved: _Flags
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], _Flags]:
    """Saved bytes and recompute time of points, and what they rerun."""
    rerun = _rerun(problem, saved)
    nbytes = np.array(problem.saved_bytes, dtype=np.int64)
    runtime_ms = np.array(problem.runtime_ms, dtype=np.float64)
    return np.dot(saved, nbytes), np.dot(rerun, runtime_ms), rerun


def rerun_closure(problem: SaveProblem, saved: Sequence[bool]) -> tuple[bool, ...]:
    """Groups that backward must rerun if exactly these groups are saved.

    Args:
        problem: The groups; pinned ones are listed too if they would be rerun.
        saved: Whether each group's results are saved.
    """
    (rerun,) = _rerun(problem, np.array([saved], dtype=bool)).tolist()
    return tuple(rerun)


def _rerun(problem: SaveProblem, saved: _Flags) -> _Flags:
    """As `rerun_closure`, of many points at once: flags of shape (points, groups)."""
    left = np.ascontiguousarray(~saved.T)  # a group's flags lie side by side: quick
    by_group = np.zeros_like(left)
    needed = list(problem.needed)
    by_group[needed] = left[needed]
    for g in reversed(range(problem.num_groups)):  # inputs come before their readers
        for h in problem.inputs[g]:
            by_group[h] |= by_group[g] & left[h]
    return np.ascontiguousarray(by_group.T)


def recompute_ms(problem: SaveProblem, rerun: Sequence[bool]) -> float:
    """Time of the groups that are rerun, and what is fixed."""
    return math.fsum([problem.fixed_ms, *compress(problem.runtime_ms, rerun)])
