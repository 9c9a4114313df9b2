"""The highest of several lines: how PyTorch's `sac_milp` states a trade-off curve."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

_NOISE = 1e-12  # of what a vertex lies below the line: rounding


def highest(
    slopes: Sequence[float], intercepts: Sequence[float], low: float, high: float
) -> tuple[tuple[float, float], ...]:
    """Vertices of the highest of some lines, or of 0 where all of them are below.

    That is a convex curve, and between two of its vertices it is straight.

    Args:
        slopes: Of each line.
        intercepts: Its value at 0.
        low: Where the curve begins,
        high: and where it ends, not below `low`.

    Returns:
        Pairs of a place and the value there, both ends among them; one pair if the ends
        are the same.
    """
    lines = [(0.0, 0.0), *zip(slopes, intercepts, strict=True)]
    places = {low, high}
    for (one_slope, one), (other_slope, other) in combinations(lines, 2):
        if one_slope != other_slope:
            crossing = (other - one) / (one_slope - other_slope)
            if low < crossing < high:
                places.add(crossing)

    def value(x: float) -> float:
        return max(slope * x + intercept for slope, intercept in lines)

    vertices = [(x, value(x)) for x in sorted(places)]
    return tuple(
        vertex
        for k, vertex in enumerate(vertices)
        if k in (0, len(vertices) - 1)
        or _bends(vertices[k - 1], vertex, vertices[k + 1])
    )


def _bends(
    before: tuple[float, float], vertex: tuple[float, float], after: tuple[float, float]
) -> bool:
    """Whether a vertex lies below the line between its neighbours."""
    (x0, y0), (x1, y1), (x2, y2) = before, vertex, after
    noise = _NOISE * (abs(y0) + abs(y1) + abs(y2)) * (x2 - x0)
    return (y1 - y0) * (x2 - x1) < (y2 - y1) * (x1 - x0) - noise
