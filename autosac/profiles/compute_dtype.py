"""The step of a model whose parameters and inputs are in another type."""

from __future__ import annotations

from dataclasses import replace

import torch

from autosac.costs.sources import modelled_costs
from autosac.profiles.profile import Profile
from autosac.tracing.trace import trace


def in_compute_dtype(profile: Profile, dtype: torch.dtype | None) -> Profile:
    """The profile of a step with parameters and inputs of its model in another type.

    That is how a step runs under a mixed-precision policy of FSDP2.

    Args:
        profile: The traced step.
        dtype: The type, or None for each parameter's own.
    """
    step = replace(profile.step, compute_dtype=dtype)
    tape = trace(step)
    costs = modelled_costs(tape, profile.device)
    return replace(profile, step=step, tape=tape, costs=costs)
