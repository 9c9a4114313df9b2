"""Trade-off curves in few linear segments that never understate a point.

With x_k, v_k the breakpoints and their values, and (m_j, t_j) the points,

minimize    sum_j f(m_j)          f interpolates the v_k; overstatement [ms]
subject to  f(m_j) >= t_j         never below a point                        (1)
            v_{k+1} >= v_k        non-decreasing                             (2)
            v_0 = t_0             freeing nothing costs nothing              (3)
            slopes do not fall    instead of (3) if it must be convex        (4)

where the x_k are points of the curve: those nearest to the breakpoints of pwlf's
least-squares fit, then moved one at a time while that helps (a heuristic). Between two
breakpoints only points on the upper hull can make (1) bind.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from numbers import Integral

import numpy as np
import numpy.typing as npt
import pulp

from ..milp import pulp_models, pulp_runner
from .curve import FittedCurve, TradeoffCurve
from .front import lower_hull

_SEED = 0  # pwlf starts its search at random breakpoints
_NUM_STARTS = 2
_MOST_BREAKS = 48  # points of a curve that may become breakpoints, evenly spaced
_KEPT = 1024  # fits; those of a large model's curves are some dozens

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


def check_segments(num_segments: object, *, name: str = "num_segments") -> int:
    """The number of segments that was asked for.

    Args:
        num_segments: What was passed.
        name: The argument's name, for the error message.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is less than 1.
    """
    if not isinstance(num_segments, Integral) or isinstance(num_segments, bool):
        raise TypeError(
            f"`{name}` must be a whole number of segments, 1 or more, got"
            f" {num_segments!r}."
        )
    if num_segments < 1:
        raise ValueError(f"`{name}` must be at least 1, got {num_segments}.")
    return int(num_segments)


@lru_cache(maxsize=_KEPT)
def fit(
    curve: TradeoffCurve,
    *,
    num_segments: int = 4,
    convex: bool = False,
    above: TradeoffCurve | None = None,
) -> FittedCurve:
    """Compress a curve to a few segments that never understate a point.

    Equal curves are fitted once.

    Args:
        curve: The points that may become breakpoints.
        num_segments: Most segments of the result: fewer where they overstate no point
            by as much, unless it must be convex. A curve that has no more comes back as
            it is.
        convex: Whether slopes must not fall, so that the highest of the lines through
            the segments is the fit.
        above: Further points that the fit must not understate, from the first freed
            bytes of the curve to its last.

    Returns:
        The same for the same curve, from its first freed bytes to its last.

    Raises:
        TypeError: `num_segments` is no whole number.
        ValueError: `num_segments` is less than 1.

    Source:
        Jekel and Venter, pwlf: a Python library for fitting 1D continuous piecewise
        linear functions (2019), `fitfast`.
    """
    num_segments = check_segments(num_segments)
    own = _of_segments(curve, num_segments, convex, above)
    if num_segments == 1 or convex:
        return own
    fewer = fit(curve, num_segments=num_segments - 1, above=above)
    return min(own, fewer, key=lambda fitted: fitted.max_error_ms)


def _of_segments(
    curve: TradeoffCurve, num_segments: int, convex: bool, above: TradeoffCurve | None
) -> FittedCurve:
    points = _points(curve, above)
    ms = np.array(curve.recompute_ms)
    is_least_squares = False
    if len(ms) == 1:
        picked = [0]
    elif ms[0] == ms[-1]:
        picked = [0, len(ms) - 1]
    elif len(ms) <= num_segments + 1:
        picked = list(range(len(ms)))
    else:
        allowed = _evenly(len(ms))
        num_segments = min(num_segments, len(allowed) - 1)
        start = _least_squares(curve, allowed, num_segments)
        picked = _exchange(start, allowed, curve, points, num_segments)
        is_least_squares = True
    breaks = np.array(curve.freed_bytes)[picked]
    values = ms[picked]
    is_done = not (points.missing(breaks, values) > 0.0).any()
    if is_least_squares or not is_done or (convex and not curve.is_convex):
        values = _lowest_values(breaks, points, convex=convex)
        values = _raised(breaks, values, points, convex=convex)
    return FittedCurve(
        freed_bytes=tuple(breaks.tolist()),
        recompute_ms=tuple(values.tolist()),
        max_error_ms=max(0.0, float(-points.missing(breaks, values).min())),
    )


@dataclass(frozen=True, slots=True)
class _Points:
    """Points that a fit must not understate.

    Attributes:
        freed: Bytes that each frees, rising.
        ms: What each takes.
    """

    freed: _Ints
    ms: _Floats

    def missing(self, breaks: _Ints, values: _Floats) -> _Floats:
        """How far each point is above the line through the breakpoints.

        Worked out as `TradeoffCurve.time_at` does: equal to the last digit.
        """
        if len(breaks) == 1:
            return np.asarray(self.ms - values[0])
        left = np.searchsorted(breaks, self.freed, side="right") - 1
        left = np.minimum(left, len(breaks) - 2)
        share = (self.freed - breaks[left]) / (breaks[left + 1] - breaks[left])
        line = values[left] + share * (values[left + 1] - values[left])
        line = np.where(share == 1.0, values[left + 1], line)
        missing: _Floats = self.ms - line
        return missing

    def binding(self, breaks: _Ints) -> _Points:
        """Points on the upper hull between each two breakpoints, which are enough."""
        kept = np.zeros(len(self.freed), dtype=bool)
        places = np.searchsorted(self.freed, breaks).tolist()
        for start, stop in pairwise(places):
            own = slice(start, stop + 1)
            kept[start + lower_hull(self.freed[own], -self.ms[own])] = True
        return _Points(self.freed[kept], self.ms[kept])


def _points(curve: TradeoffCurve, above: TradeoffCurve | None) -> _Points:
    """The points of a curve and those further ones that lie in its range."""
    highest = dict(zip(curve.freed_bytes, curve.recompute_ms, strict=True))
    first, last = curve.freed_bytes[0], curve.freed_bytes[-1]
    if above is not None:
        for freed, ms in zip(above.freed_bytes, above.recompute_ms, strict=True):
            if first < freed <= last:
                highest[freed] = max(ms, highest.get(freed, ms))
    ordered = sorted(highest)
    times = np.array([highest[freed] for freed in ordered])
    return _Points(np.array(ordered, np.int64), times)


def _evenly(size: int) -> _Ints:
    """Indices of points that may become breakpoints."""
    spaced = np.linspace(0, size - 1, min(size, _MOST_BREAKS))
    return np.unique(spaced.round().astype(np.int64))


def _least_squares(
    curve: TradeoffCurve, allowed: _Ints, num_segments: int
) -> frozenset[int]:
    """Points nearest to the breakpoints of pwlf's fit.

    pwlf seeds NumPy's global generator; its state is put back afterwards.
    """
    import pwlf  # brings SciPy's statistics, which take as long as all the rest

    freed, scale = np.array(curve.freed_bytes, np.float64), curve.recompute_ms[-1]
    xs = (freed - freed[0]) / (freed[-1] - freed[0])
    ys = np.array(curve.recompute_ms) / scale
    state = np.random.get_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = pwlf.PiecewiseLinFit(xs[allowed], ys[allowed], seed=_SEED)
            breaks = fitted.fitfast(num_segments, pop=_NUM_STARTS)
    finally:
        np.random.set_state(state)
    nearest = {int(allowed[np.abs(xs[allowed] - x).argmin()]) for x in breaks}
    return frozenset(nearest | {0, len(xs) - 1})


def _exchange(
    start: frozenset[int],
    allowed: _Ints,
    curve: TradeoffCurve,
    points: _Points,
    num_segments: int,
) -> list[int]:
    """Add or move one breakpoint at a time while the overstatement falls."""
    freed, ms = np.array(curve.freed_bytes), np.array(curve.recompute_ms)

    def overstatement(picked: frozenset[int]) -> float:
        own = sorted(picked)
        values = _raised(freed[own], ms[own], points, convex=False)
        return -float(points.missing(freed[own], values).sum())

    inner = [k for k in allowed.tolist() if 0 < k < len(ms) - 1]
    picked, cost = start, overstatement(start)
    while True:
        others = [k for k in inner if k not in picked]
        moves = [picked - {k} | {j} for k in picked if k in inner for j in others]
        if len(picked) <= num_segments:
            moves += [picked | {j} for j in others]
        if not moves:
            return sorted(picked)
        costs = [overstatement(move) for move in moves]
        best_cost = min(costs)
        if best_cost >= cost:
            return sorted(picked)
        ties = (m for m, c in zip(moves, costs, strict=True) if c == best_cost)
        picked, cost = min(ties, key=sorted), best_cost


def _lowest_values(breaks: _Ints, points: _Points, *, convex: bool) -> _Floats:
    """Solve the linear program of the module's docstring, in shares of 0 to 1."""
    model = pulp.LpProblem("fit", pulp.LpMinimize)
    last = len(breaks) - 1
    values = [model.add_variable(f"value_{k:03d}", 0.0) for k in range(last + 1)]
    scale = float(points.ms[-1]) or 1.0
    left = np.searchsorted(breaks, points.freed, side="right") - 1
    left = np.minimum(left, last - 1)
    share = (points.freed - breaks[left]) / (breaks[left + 1] - breaks[left])
    weights = np.bincount(left, 1.0 - share, minlength=last + 1)
    weights += np.bincount(left + 1, share, minlength=last + 1)
    model.setObjective(pulp_models.row(zip(values, weights.tolist(), strict=True)))
    binding = points.binding(breaks)
    places = np.searchsorted(points.freed, binding.freed)
    for j, ms in zip(places.tolist(), (binding.ms / scale).tolist(), strict=True):
        k, part = int(left[j]), float(share[j])
        row = pulp_models.row([(values[k], 1.0 - part), (values[k + 1], part)])
        model += row >= ms  # (1)
    for k in range(last):
        model += values[k + 1] - values[k] >= 0  # (2)
    if not convex:
        model += values[0] == float(points.ms[0]) / scale  # (3)
    else:
        widths = np.diff(breaks) / (breaks[-1] - breaks[0])
        for k, (one, other) in enumerate(pairwise(widths.tolist())):  # (4)
            steps = [(values[k + 2], one), (values[k + 1], -one - other)]
            model += pulp_models.row([*steps, (values[k], other)]) >= 0
    outcome = pulp_runner.run(model)
    assert outcome.termination.has_incumbent, "a high enough line is always feasible"
    return np.array([scale * (v.varValue or 0.0) for v in values])


def _raised(
    breaks: _Ints, values: _Floats, points: _Points, *, convex: bool
) -> _Floats:
    """Make (1) to (4) hold exactly: the solver's tolerance may break them."""
    values = np.maximum.accumulate(values)
    if convex:
        slopes = np.maximum.accumulate(np.diff(values) / np.diff(breaks))
        values = values[0] + np.append(0.0, np.cumsum(slopes * np.diff(breaks)))
    else:
        values[0] = points.ms[0]
    while ((missing := points.missing(breaks, values)) > 0.0).any():
        short = missing > 0.0
        gap, freed = np.maximum(missing, np.spacing(points.ms))[short], points.freed
        if convex:  # the whole line moves up
            values = values + gap.max()
            continue
        left = np.searchsorted(breaks, freed[short], side="right") - 1
        left = np.minimum(left, len(breaks) - 2)
        share = (freed[short] - breaks[left]) / (breaks[left + 1] - breaks[left])
        inner = left > 0  # the first value is fixed; elsewhere the segment moves up
        alone = gap / np.where(inner, 1.0, share)
        step = np.where(inner, gap, np.maximum(alone, math.ulp(values[1])))
        added = np.zeros(len(breaks))
        np.maximum.at(added, left + 1, step)
        np.maximum.at(added, left[inner], step[inner])
        values = np.maximum.accumulate(values + added)
    return values
