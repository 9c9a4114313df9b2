"""The step of a model as FSDP2 runs it: in another type, its gradients in shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    return _changed(profile, compute_dtype=dtype)


def as_sharded(profile: Profile) -> Profile:
    """The profile of a step whose earlier gradients are shards: see `Step.sharded`."""
    return _changed(profile, sharded=True)


def _changed(profile: Profile, **changes: Any) -> Profile:
    step = replace(profile.step, **changes)
    tape = trace(step)
    costs = modelled_costs(tape, profile.device)
    return replace(profile, step=step, tape=tape, costs=costs)
