"""The profile that was passed in place of a model, or a new one."""

from __future__ import annotations

from typing import Any

import torch

from autosac.errors import ArgumentError
from autosac.profiles.profile import Profile, calibrate, profile
from autosac.profiles.traced_step import TracedStep
from autosac.statistics.by_module import Statistics


def profile_of(model: Any, inputs: Any, options: dict[str, Any]) -> TracedStep:
    """The profile that was passed, or a new one, calibrated where the model lies."""
    if isinstance(model, Statistics):
        raise ArgumentError(
            "`model` is statistics, which hold no ops to simulate: `autosac.plan` and"
            " `autosac.policy` take them, all else needs the model or its profile."
        )
    if isinstance(model, TracedStep):
        if inputs is not None or options:
            raise ArgumentError(
                "A profile knows its inputs and options already; pass only"
                " `memory_budget`."
            )
        return model
    refuse_plan(model)
    if inputs is None:
        raise ArgumentError("`inputs` is missing: pass what the model is called with.")
    return calibrated_if_present(profile(model, inputs, **options))


def is_plan(model: object) -> bool:
    """Whether it is a plan, which has its step as an attribute."""
    is_step = isinstance(model, (torch.nn.Module, TracedStep))
    return not is_step and hasattr(model, "traced")


def refuse_plan(model: Any, *, name: str = "model") -> None:
    """Refuse a plan where a step is asked for.

    Raises:
        ArgumentError: It is one; names the step that it was made for.
    """
    if not is_plan(model):
        return
    traced = "`plan.traced`, the step it was made for"
    raise ArgumentError(
        f"`{name}` is a {type(model).__name__}, and a step is needed: pass"
        f" {traced if model.traced is not None else 'the model, or its profile'}."
    )


def calibrated_if_present(
    profile: Profile, *, progress: bool | None = None, real_step: bool = True
) -> Profile:
    """The profile with measured figures if its model lies here, or as it is.

    What is not here cannot be measured; what is, must keep its promise.

    Args:
        profile: The profile.
        progress: As in `calibrate`,
        real_step: likewise.
    """
    is_meta = any(parameter.is_meta for parameter in profile.step.model.parameters())
    if profile.step.lens is not None or is_meta:
        return profile
    return calibrate(profile, progress=progress, real_step=real_step)
