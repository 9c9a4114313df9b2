"""A profile of a step that differs a little from one that was traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autosac.profiles.given import calibrated_if_present
from autosac.profiles.profile import Profile, profile_of_step, read_step
from autosac.tracing.learned import Learned


def options_of(traced: Profile) -> dict[str, Any]:
    """The options that a step was profiled with, but for its loss."""
    step = traced.step
    return {
        "optimizer": step.optimizer,
        "device": traced.device,
        "autocast": step.autocast,
        "accumulate": step.accumulate,
        "clip_grad_norm": step.clip_grad_norm,
        "gradients_in_forward": step.gradients_in_forward,
        "keeps_gradients": step.keeps_gradients,
        "allocator": traced.allocator,
        "exclude": traced.exclude,
        "opaque": tuple(sorted(step.opaque)),
    }


def traced_again(
    traced: Profile,
    *,
    model: torch.nn.Module | None = None,
    inputs: Any = None,
    options: Mapping[str, Any],
    compute_dtype: torch.dtype | None = None,
) -> Profile:
    """The profile of a changed step, with the same units and cap; measured if it was.

    No real step runs to hold it against.

    Args:
        traced: The step.
        model: Another model; None for the same.
        inputs: Another batch; None for the same.
        options: Those that differ.
        compute_dtype: Of parameters and inputs, see `Step`; None for their own.
    """
    step = traced.step
    every = {**options_of(traced), "loss_fn": step.loss_fn, **options}
    own = {name: every.pop(name) for name in ("allocator", "exclude")}
    new_step, device = read_step(
        step.model if model is None else model,
        (step.args, step.kwargs) if inputs is None else inputs,
        **every,
    )
    is_like = device == traced.device  # then calls of ops have the same results
    learned = Learned(calls=step.learned.calls) if is_like else Learned()
    changed = profile_of_step(
        replace(new_step, compute_dtype=compute_dtype, learned=learned),
        device,
        **own,
    )
    changed = replace(changed, given=traced.given, cap=traced.cap)
    if not traced.calibrated:
        return changed
    return calibrated_if_present(changed, progress=False, real_step=False)
