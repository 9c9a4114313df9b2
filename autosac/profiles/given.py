"""The profile that was passed in place of a model, or a new one."""

from __future__ import annotations

from typing import Any

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
    if inputs is None:
        raise ArgumentError("`inputs` is missing: pass what the model is called with.")
    return calibrated_if_present(profile(model, inputs, **options))


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
