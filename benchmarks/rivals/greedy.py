"""Greedy: most bytes freed per millisecond added, until the peak fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from autosac.candidates.units import Unit
from autosac.planning.planning import Choice
from autosac.planning.profiling import Profile
from benchmarks.rivals.blocks import find_blocks, overlap, unit_curves

_LEAST_MS = 1e-9  # of a move: free ones come first, by size


def greedy(profile: Profile, budget_bytes: int) -> Choice | None:
    """The first choice on the greedy path whose simulated peak fits; None if none.

    Args:
        profile: The traced step.
        budget_bytes: Cap on the peak.
    """
    for chosen in greedy_path(profile):
        if profile.peak_bytes(chosen) <= budget_bytes:
            return chosen
    return None


def greedy_path(profile: Profile) -> Iterator[Choice]:
    """Choices from no checkpointing on, each one move further.

    A move takes one unit to a point of its curve, in place of all chosen units that
    lie inside or around it. That with the most freed bytes per added millisecond, by
    the curves, is next; the path ends when no move frees anything. Modules around
    blocks are left out: they free most and, rerun as a whole, lower no peak.
    """
    known = unit_curves(profile)
    blocks = find_blocks(profile)
    units = [unit for unit in known if not _is_around(unit, blocks)]
    freed, cost_ms = _tables(profile, units)
    nested = np.array([[overlap(a, b) for b in units] for a in units], dtype=float)
    point = np.full(len(units), -1)
    yield {}
    while units:
        taken = point >= 0
        own_freed = np.where(taken, freed[range(len(units)), point], 0.0)
        own_ms = np.where(taken, cost_ms[range(len(units)), point], 0.0)
        gain = freed - (nested @ own_freed)[:, None]
        added = np.maximum(cost_ms - (nested @ own_ms)[:, None], _LEAST_MS)
        rate = np.where(gain > 0, gain / added, 0.0)
        u, p = np.unravel_index(int(rate.argmax()), rate.shape)
        if rate[u, p] <= 0:
            return
        point[nested[u] > 0] = -1
        point[u] = p
        yield {
            unit: known[unit].policies[q]
            for unit, q in zip(units, point, strict=True)
            if q >= 0
        }


def _is_around(unit: Unit, blocks: Sequence[Unit]) -> bool:
    """Whether a block lies inside a unit that is none itself."""
    return unit not in blocks and any(
        unit.call.enter <= block.call.enter and block.call.exit <= unit.call.exit
        for block in blocks
    )


def _tables(
    profile: Profile, units: list[Unit]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Freed bytes and milliseconds of every point, shape (units, most points)."""
    known = unit_curves(profile)
    most = max((len(known[unit].policies) for unit in units), default=0)
    freed = np.full((len(units), most), -np.inf)
    cost_ms = np.zeros((len(units), most))
    for u, unit in enumerate(units):
        points = known[unit].points
        freed[u, : len(points.freed_bytes)] = points.freed_bytes
        cost_ms[u, : len(points.recompute_ms)] = points.recompute_ms
    return freed, cost_ms
