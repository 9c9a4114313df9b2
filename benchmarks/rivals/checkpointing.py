"""Rivals that treat whole blocks alike."""

from __future__ import annotations

from autosac.planning.planning import Choice
from autosac.planning.profiling import Profile
from benchmarks.rivals.blocks import find_blocks, policy_saving, unit_curves


def no_checkpointing(profile: Profile) -> Choice:
    """Nothing is recomputed."""
    return {}


def every_block(profile: Profile) -> Choice:
    """Every block keeps its arguments only ("full" recomputation)."""
    return every_kth_block(profile, 1)


def every_kth_block(profile: Profile, k: int) -> Choice:
    """Blocks 0, k, 2k, ... keep their arguments only, the others keep everything.

    Args:
        profile: The traced step.
        k: At least 1.
    """
    return {
        unit: policy_saving(unit, ())
        for index, unit in enumerate(find_blocks(profile))
        if index % k == 0
    }


def uniform_ratio(profile: Profile, ratio: float) -> Choice:
    """Every block recomputes at least the same ratio, each at its least cost.

    A block whose curve ends before the ratio takes its last point.

    Args:
        profile: The traced step.
        ratio: 0 to 1.
    """
    known = unit_curves(profile)
    chosen = {}
    for unit in find_blocks(profile):
        if unit in known:
            curve = known[unit]
            enough = (p for p, r in enumerate(curve.ratios) if r >= ratio)
            chosen[unit] = curve.policies[next(enough, len(curve.ratios) - 1)]
    return chosen


def uniform_ratios(profile: Profile) -> list[float]:
    """The ratios at which `uniform_ratio` changes, in ascending order."""
    known = unit_curves(profile)
    blocks = find_blocks(profile)
    return sorted({r for u in blocks if u in known for r in known[u].ratios})
