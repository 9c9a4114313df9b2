"""Trade-off curves: what freeing activation memory costs in recompute time.

The exact curve of an AC unit is a set of Pareto points. `fit` compresses it to a few
segments that never understate a point: with x_k, v_k the breakpoints and their
values, and (m_j, t_j) the points,

minimize    sum_j f(m_j)          f interpolates the v_k; overstatement [ms]
subject to  f(m_j) >= t_j         never below a point                        (1)
            v_{k+1} >= v_k        non-decreasing                             (2)
            v_0 = t_0             freeing nothing costs nothing              (3)

where the x_k are points of the curve: those nearest to the breakpoints of pwlf's
least-squares fit, then moved one at a time while that helps (a heuristic).
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pulp

from ..milp import pulp_runner

_CONVEX_TOLERANCE = 1e-9  # of the steepest slope: float noise, not shape
_SEED = 0  # pwlf starts its search at random breakpoints
_NUM_STARTS = 2


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

        Slopes may fall by 1e-9 of the steepest one, which is rounding.
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
        shift_ms: Largest lift of a breakpoint above pwlf's least-squares fit, which
            understates some points.
    """

    max_error_ms: float
    shift_ms: float


def is_convex(xs: Sequence[float], ys: Sequence[float]) -> bool:
    """Whether the line through the points bends upwards only; xs must increase."""
    slopes = [
        (ys[k + 1] - ys[k]) / (xs[k + 1] - xs[k]) for k in range(len(xs) - 1)
    ]  # fmt: skip
    slack = _CONVEX_TOLERANCE * max(map(abs, slopes), default=0.0)
    return all(slopes[k + 1] >= slopes[k] - slack for k in range(len(slopes) - 1))


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


def fit(curve: TradeoffCurve, *, num_segments: int = 4) -> FittedCurve:
    """Compress a curve to a few segments that never understate a point.

    Args:
        curve: The exact points.
        num_segments: Most segments of the result. A curve that has no more comes
            back as it is.

    Returns:
        The same for the same curve, from its first freed bytes to its last.

    Raises:
        ValueError: `num_segments` is less than 1.

    Source:
        Jekel and Venter, pwlf: a Python library for fitting 1D continuous piecewise
        linear functions (2019), `fitfast`.
    """
    if num_segments < 1:
        raise ValueError(f"`num_segments` must be at least 1, got {num_segments}.")
    xs, ys = curve.freed_bytes, curve.recompute_ms
    if len(xs) <= num_segments + 1 or ys[0] == ys[-1]:
        ends = (0, -1) if len(xs) > num_segments + 1 else range(len(xs))
        return FittedCurve(
            freed_bytes=tuple(xs[k] for k in ends),
            recompute_ms=tuple(ys[k] for k in ends),
            max_error_ms=0.0,
            shift_ms=0.0,
        )
    start, predict = _least_squares(curve, num_segments)
    picked = _exchange(start, curve, num_segments)
    breaks = tuple(xs[k] for k in picked)
    values = _lift(breaks, _lowest_values(breaks, curve), curve)
    errors = [_interpolate(breaks, values, x) - y for x, y in zip(xs, ys, strict=True)]
    lifts = [v - predict[k] for v, k in zip(values, picked, strict=True)]
    return FittedCurve(
        freed_bytes=breaks,
        recompute_ms=values,
        max_error_ms=max(errors),
        shift_ms=max(0.0, *lifts),
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


def _least_squares(
    curve: TradeoffCurve, num_segments: int
) -> tuple[frozenset[int], list[float]]:
    """Points nearest to the breakpoints of pwlf's fit, and the fit at every point.

    pwlf seeds NumPy's global generator; its state is put back afterwards.
    """
    import pwlf  # brings SciPy's statistics, which take as long as all the rest

    low, high = curve.freed_bytes[0], curve.freed_bytes[-1]
    xs = (np.array(curve.freed_bytes, dtype=float) - low) / (high - low)
    ys = np.array(curve.recompute_ms) / curve.recompute_ms[-1]
    state = np.random.get_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = pwlf.PiecewiseLinFit(xs, ys, seed=_SEED)
            breaks = fitted.fitfast(num_segments, pop=_NUM_STARTS)
            predicted = fitted.predict(xs)
    finally:
        np.random.set_state(state)
    nearest = {int(np.abs(xs - x).argmin()) for x in breaks}
    scale = curve.recompute_ms[-1]
    return frozenset(nearest | {0, len(xs) - 1}), [float(y) * scale for y in predicted]


def _exchange(
    start: frozenset[int], curve: TradeoffCurve, num_segments: int
) -> tuple[int, ...]:
    """Add or move one breakpoint at a time while the overstatement falls."""
    inner = range(1, len(curve.freed_bytes) - 1)
    picked, cost = start, _overstatement(start, curve)
    while True:
        others = [k for k in inner if k not in picked]
        moves = [picked - {k} | {j} for k in picked if k in inner for j in others]
        if len(picked) <= num_segments:
            moves += [picked | {j} for j in others]
        if not moves:
            return tuple(sorted(picked))
        best = min(moves, key=lambda move: (_overstatement(move, curve), sorted(move)))
        if (best_cost := _overstatement(best, curve)) >= cost:
            return tuple(sorted(picked))
        picked, cost = best, best_cost


def _overstatement(picked: frozenset[int], curve: TradeoffCurve) -> float:
    """Total above the points of the line through the picked ones, lifted over all."""
    breaks = [curve.freed_bytes[k] for k in sorted(picked)]
    values = _lift(breaks, [curve.recompute_ms[k] for k in sorted(picked)], curve)
    total = sum(_interpolate(breaks, values, x) for x in curve.freed_bytes)
    return total - sum(curve.recompute_ms)


def _lowest_values(breaks: Sequence[int], curve: TradeoffCurve) -> list[float]:
    """Solve the linear program of the module's docstring, in shares of 0 to 1."""
    model = pulp.LpProblem("fit", pulp.LpMinimize)
    last = len(breaks) - 1
    values = [model.add_variable(f"value_{k:03d}", 0.0) for k in range(last + 1)]
    total = pulp.LpAffineExpression()
    scale = curve.recompute_ms[-1]
    for x, y in zip(curve.freed_bytes, curve.recompute_ms, strict=True):
        left = min(bisect_right(breaks, x) - 1, last - 1)
        share = (x - breaks[left]) / (breaks[left + 1] - breaks[left])
        terms = [(values[left], 1.0 - share), (values[left + 1], share)]
        model += pulp_runner.row(terms) >= y / scale  # (1)
        for variable, coefficient in terms:
            total.addterm(variable, coefficient)
    model.setObjective(total)
    for k in range(last):
        model += values[k + 1] - values[k] >= 0  # (2)
    model += values[0] == curve.recompute_ms[0] / scale  # (3)
    outcome = pulp_runner.run(model)
    assert outcome.termination.has_incumbent, "a high enough line is always feasible"
    return [scale * (v.varValue or 0.0) for v in values]


def _lift(
    breaks: Sequence[int], values: list[float], curve: TradeoffCurve
) -> tuple[float, ...]:
    """Make (1), (2) and (3) hold exactly: the solver's tolerance may break them."""
    values[0] = curve.recompute_ms[0]
    for x, y in zip(curve.freed_bytes[1:], curve.recompute_ms[1:], strict=True):
        left = min(bisect_right(breaks, x) - 1, len(breaks) - 2)
        share = (x - breaks[left]) / (breaks[left + 1] - breaks[left])
        values[left + 1] = max(values[left], values[left + 1])
        while (missing := y - _interpolate(breaks, values, x)) > 0.0:
            step = max(missing, math.ulp(y))
            if left > 0:  # both ends: the whole segment moves up
                values[left] += step
                values[left + 1] += step
            else:  # the first value is fixed
                values[left + 1] += max(step / share, math.ulp(values[left + 1]))
    for k in range(len(values) - 1):
        values[k + 1] = max(values[k], values[k + 1])
    return tuple(values)
