"""All known points of a unit, in segments that a MILP can tell apart.

A unit of hundreds of points is too much for a MILP with an integer variable for each:
branching on one of them proves next to nothing. In a segment, points may be mixed; its
size is such that a mixture saves little time over the points. What is left to branch on
is in which segment a unit lies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..curves.front import lower_hull
from .problem import Unit

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_MOST_KNOWN = 1000  # ways to cut a curve, a KiB or two each


@dataclass(frozen=True, slots=True)
class Segments:
    """Points of a unit up to where some may be missing, the fastest first.

    Attributes:
        index: The point of the MILP that each is or follows,
        share: how far it is on the way to the next one,
        times: and its recompute time in ms.
        along: How far each point is, as the ratio of what it frees.
    """

    index: _Ints
    share: _Floats
    times: _Floats
    along: _Floats
    _known: dict[tuple[bytes, float, tuple[int, ...]], list[list[int]]] = field(
        default_factory=dict, repr=False
    )

    def vertices(
        self, kept: _Ints, tolerance_ms: float, cuts: Collection[int] = ()
    ) -> list[list[int]]:
        """Cut some of the points into as few segments as a tolerance allows.

        Many units have one curve: what was cut in the same way is known.

        Args:
            kept: Which points.
            tolerance_ms: How much faster a mixture that frees a little more than one
                point of a segment may be than the next point.
            cuts: Points after which a segment must end.

        Returns:
            Of each segment the points whose mixtures are below all others of it, its
            first and its last point among them.
        """
        key = kept.tobytes(), tolerance_ms, tuple(sorted(cuts))
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._cut_anew(kept, tolerance_ms, cuts)
        return self._known[key]

    def _cut_anew(
        self, kept: _Ints, tolerance_ms: float, cuts: Collection[int]
    ) -> list[list[int]]:
        ends = kept.searchsorted(np.array(sorted(cuts), dtype=np.int64), side="right")
        return [
            part[vertices].tolist()
            for part in np.split(kept, ends)
            for vertices in _cut(self.along[part], self.times[part], tolerance_ms)
        ]

    def between(self, values: _Floats) -> _Floats:
        """Values at all points, given those at the points of the MILP."""
        after = np.minimum(self.index + 1, len(values) - 1)
        first_part: _Floats = values[self.index] * (1.0 - self.share)
        return first_part + values[after] * self.share


def segments(unit: Unit, limit_ms: float) -> Segments | None:
    """All known points of a unit that take less than a time; None if none does."""
    points = [(k, 0.0, point.recompute_ms) for k, point in enumerate(unit.points)]
    points += [(b.point, b.share, b.recompute_ms) for b in unit.between]
    points = sorted(point for point in points if point[2] < limit_ms)
    if not points:
        return None
    index = np.array([point[0] for point in points], dtype=np.int64)
    share, times = np.array([point[1:] for point in points]).T
    ratios = np.array([point.ratio for point in unit.points])
    after = np.minimum(index + 1, len(ratios) - 1)
    along = ratios[index] * (1.0 - share) + ratios[after] * share
    return Segments(index=index, share=share, times=times, along=along)


def _cut(along: _Floats, times: _Floats, tolerance_ms: float) -> Iterator[list[int]]:
    """Vertices of segments, each as long as it may be."""
    start, size = 0, len(along)
    while start < size:
        vertices, length = [start], 1
        step = 1
        while step:  # twice as far while that is well, then half
            stop = start + length + step
            hull = None
            if stop <= size:
                hull = _vertices(along[start:stop], times[start:stop], tolerance_ms)
            if hull is None:
                step //= 2
            else:
                vertices, length = [start + v for v in hull], length + step
                step *= 2
        yield vertices
        start += length


def _vertices(along: _Floats, times: _Floats, tolerance_ms: float) -> list[int] | None:
    """Vertices of the lower hull; None if it lies too far below the points."""
    if not (np.diff(along) > 0.0).all():
        return None
    hull = len(along) - 1 - lower_hull(-along[::-1], times[::-1])[::-1]
    below = np.interp(along, along[hull], times[hull])
    if (times[1:] - below[:-1]).max() > tolerance_ms:
        return None
    vertices: list[int] = hull.tolist()
    return vertices


def least_on_hull(times: _Floats, values: _Floats, least_ms: float) -> float:
    """Least value of a mixture of points that takes a time at least; inf if none."""
    slow = times >= least_ms
    if not slow.any():
        return math.inf
    least = float(values[slow].min())
    if slow.all():
        return least
    # A mixture of a faster and a slower point, at exactly that time.
    fast_ms, slow_ms = times[~slow][:, None], times[slow][None, :]
    share = (least_ms - fast_ms) / (slow_ms - fast_ms)
    mixed = values[~slow][:, None] * (1.0 - share) + values[slow][None, :] * share
    return min(least, float(mixed.min()))
