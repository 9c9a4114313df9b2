"""Profiles of workloads, and budgets between what they must have and could use."""

from __future__ import annotations

import autosac
from benchmarks.models.workload import Workload, profile_of


def calibrated_profile(work: Workload) -> autosac.Profile:
    """The step of a workload, always with the same parameters, with measured costs."""
    return autosac.calibrate(
        profile_of(work),
        refresh=True,  # cached times may be those of a busy machine
        progress=False,
    )


def budget_at(profile: autosac.Profile, fraction: float) -> int:
    """Bytes a fraction of the way from the floor to the plain step's peak."""
    low, high = autosac.floor(profile), profile.baseline_peak_bytes
    return low + int(fraction * (high - low))
