"""Trade-off curves: what freeing activation memory costs in recompute time.

The exact curve of an AC unit is a set of Pareto points; `fitting` compresses it to a
few segments.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_CONVEX_TOLERANCE = 1e-9  # of the steepest slope: float noise, not shape
_ROUNDED = 4  # units in the last place that a rise of a line that was moved may be off


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffCurve:
    """Recompute time of one AC unit against the bytes that it frees.

    Attributes:
        freed_bytes: Activation memory that is not saved, strictly increasing.
        recompute_ms: Time to recompute it, same length, non-decreasing.
    """

    freed_bytes: tuple[int, ...]
    recompute_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        _validate(self.freed_bytes, self.recompute_ms)

    @property
    def max_freed_bytes(self) -> int:
        """Bytes that the last point frees."""
        return self.freed_bytes[-1]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Share of `max_freed_bytes` that each point frees; 0.0 if that is 0."""
        most = self.max_freed_bytes
        return tuple(freed / most if most else 0.0 for freed in self.freed_bytes)

    @property
    def is_convex(self) -> bool:
        """Whether each further byte costs at least as much as the one before.

        Slopes may fall by 1e-9 of the steepest one and by four units in the last place
        of a time, which is rounding.
        """
        return is_convex(self.freed_bytes, self.recompute_ms)

    def time_at(self, freed: float) -> float:
        """Time to free this many bytes, linear between the points.

        Raises:
            ValueError: The curve does not reach `freed`.
        """
        return _interpolate(self.freed_bytes, self.recompute_ms, freed)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCurve(TradeoffCurve):
    """A curve of few segments that is nowhere below the points it was fitted to.

    Attributes:
        max_error_ms: Largest overstatement at a point of the fitted curve.
    """

    max_error_ms: float

    @property
    def num_segments(self) -> int:
        """How many segments it has; none if there is one point."""
        return len(self.freed_bytes) - 1

    @property
    def slopes(self) -> tuple[float, ...]:
        """Milliseconds per byte of each segment."""
        points = zip(self.freed_bytes, self.recompute_ms, strict=True)
        return tuple((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points))

    @property
    def intercepts(self) -> tuple[float, ...]:
        """Milliseconds at which the line through each segment frees nothing."""
        starts = zip(self.freed_bytes, self.recompute_ms, self.slopes, strict=False)
        return tuple(y - slope * x for x, y, slope in starts)


def is_convex(xs: Sequence[float], ys: Sequence[float]) -> bool:
    """Whether the line through the points bends upwards only; xs must increase."""
    widths = [right - left for left, right in pairwise(xs)]
    rises = [after - before for before, after in pairwise(ys)]
    slopes = [rise / width for rise, width in zip(rises, widths, strict=True)]
    steepest = max(map(abs, slopes), default=0.0)
    unit = _ROUNDED * math.ulp(max(map(abs, ys), default=0.0))
    slacks = (
        _CONVEX_TOLERANCE * steepest + unit / one + unit / other
        for one, other in pairwise(widths)
    )
    pairs = zip(pairwise(slopes), slacks, strict=True)
    return all(after >= before - slack for (before, after), slack in pairs)


def pareto(points: Iterable[tuple[int, float]]) -> TradeoffCurve:
    """Drop the points that another one beats in bytes and in time.

    Args:
        points: Pairs of freed bytes and recompute time, in any order.

    Raises:
        ValueError: There are no points, or a time is negative or not finite.
    """
    kept: list[tuple[int, float]] = []
    for freed, time_ms in sorted(points, key=lambda point: (-point[0], point[1])):
        if not kept or time_ms < kept[-1][1]:
            kept.append((freed, time_ms))
    kept.reverse()
    return TradeoffCurve(
        freed_bytes=tuple(freed for freed, _ in kept),
        recompute_ms=tuple(time_ms for _, time_ms in kept),
    )


def _validate(freed_bytes: Sequence[int], recompute_ms: Sequence[float]) -> None:
    if not freed_bytes:
        raise ValueError("A curve needs at least one point, got none.")
    if len(freed_bytes) != len(recompute_ms):
        raise ValueError(
            "`freed_bytes` and `recompute_ms` must have the same length, got"
            f" {len(freed_bytes)} and {len(recompute_ms)}."
        )
    if any(not math.isfinite(t) or t < 0.0 for t in recompute_ms):
        raise ValueError(
            f"`recompute_ms` must be finite and not negative, got {recompute_ms}."
        )
    for k in range(len(freed_bytes) - 1):
        if freed_bytes[k] >= freed_bytes[k + 1]:
            raise ValueError(
                "`freed_bytes` must increase strictly, got"
                f" {freed_bytes[k]} before {freed_bytes[k + 1]}. Use `pareto`."
            )
        if recompute_ms[k] > recompute_ms[k + 1]:
            raise ValueError(
                "`recompute_ms` must not decrease, got"
                f" {recompute_ms[k]} before {recompute_ms[k + 1]}. Use `pareto`."
            )


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    if not xs[0] <= x <= xs[-1]:
        raise ValueError(f"`freed` must be from {xs[0]} to {xs[-1]} bytes, got {x}.")
    left = bisect_right(xs, x) - 1
    if xs[left] == x:
        return ys[left]
    share = (x - xs[left]) / (xs[left + 1] - xs[left])
    return ys[left] + share * (ys[left + 1] - ys[left])
