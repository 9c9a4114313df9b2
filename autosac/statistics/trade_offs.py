"""Trade-off curves of modules as PyTorch states them: shares, and lines above them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autosac.solvers.curves.curve import pareto
from autosac.solvers.curves.fitting import fit
from autosac.statistics.by_module import ModuleStatistics, Statistics

NUM_SEGMENTS = 2  # as in PyTorch's ``SACEstimator.pwlf_sac_tradeoff_curve``


def with_trade_off(
    figures: ModuleStatistics,
    curve: Sequence[tuple[float, float]],
    *,
    sac_memory: int,
    sac_runtime: float,
    max_ratio: float,
    num_segments: int = NUM_SEGMENTS,
) -> ModuleStatistics:
    """Figures of a module with its trade-off curve and lines that never understate it.

    Args:
        figures: Of the module.
        curve: Pairs as in `ModuleStatistics.tradeoff_curve`, with rising shares.
        sac_memory: Bytes that shares of memory are of, not 0.
        sac_runtime: Milliseconds that shares of time are of, not 0.
        max_ratio: Largest share of memory that can be discarded.
        num_segments: Most lines that stand for the curve.
    """
    points = pareto(
        (round(x * sac_memory), y * sac_runtime) for x, y in curve if y >= 0.0
    )
    fitted = fit(points, num_segments=num_segments, convex=True)
    slopes = [slope * sac_memory / sac_runtime for slope in fitted.slopes]
    intercepts = [ms / sac_runtime for ms in fitted.intercepts]
    if not slopes:  # one point
        slopes, intercepts = [0.0], [fitted.recompute_ms[0] / sac_runtime]
    while (missing := _missing(slopes, intercepts, curve)) > 0.0:  # rounding
        intercepts = [math.nextafter(b + missing, math.inf) for b in intercepts]
    breaks = [freed / sac_memory for freed in fitted.freed_bytes]
    return replace(
        figures,
        sac_memory=sac_memory,
        sac_runtime=sac_runtime,
        n_segments=len(slopes),
        slopes=tuple(slopes),
        intercepts=tuple(intercepts),
        breakpoints=tuple(breaks if len(breaks) > 1 else breaks * 2),
        tradeoff_curve=tuple(curve),
        max_ratio=max_ratio,
    )


def _missing(
    slopes: Sequence[float],
    intercepts: Sequence[float],
    curve: Sequence[tuple[float, float]],
) -> float:
    """How far the points of a curve are above the highest line, at most."""
    lines = list(zip(slopes, intercepts, strict=True))
    return max(y - max(slope * x + b for slope, b in lines) for x, y in curve)


def refitted(statistics: Statistics, num_segments: int) -> Statistics:
    """Statistics whose trade-off curves have other numbers of lines."""
    return replace(
        statistics,
        modules=tuple(
            with_trade_off(
                module,
                module.tradeoff_curve,
                sac_memory=module.sac_memory,
                sac_runtime=module.sac_runtime,
                max_ratio=module.max_ratio,
                num_segments=num_segments,
            )
            if module.n_segments
            else module
            for module in statistics.modules
        ),
    )
