"""Profiles of workloads, and budgets between what they must have and could use."""

from __future__ import annotations

import torch

import autosac
from benchmarks.models import Workload


def calibrated_profile(work: Workload) -> autosac.Profile:
    """The step of a workload, always with the same parameters, with measured costs."""
    torch.manual_seed(0)
    model = work.make_model()
    return autosac.calibrate(
        autosac.profile(
            model,
            work.make_inputs(),
            loss_fn=work.loss_fn,
            optimizer=work.make_optimizer(model),
        ),
        refresh=True,  # cached times may be those of a busy machine
        progress=False,
    )


def budget_at(profile: autosac.Profile, fraction: float) -> int:
    """Bytes a fraction of the way from the floor to the plain step's peak."""
    low, high = autosac.floor(profile), profile.baseline_peak_bytes
    return low + int(fraction * (high - low))
