"""Greedy: most bytes freed per millisecond added, until the peak fits."""

from __future__ import annotations

from autosac.profiles.traced_step import TracedStep
from autosac.solving.rules_of_thumb import Choice


def greedy(profile: TracedStep, budget_bytes: int) -> Choice | None:
    """The first choice on the greedy path whose simulated peak fits; None if none.

    Args:
        profile: The traced step.
        budget_bytes: Cap on the peak.
    """
    for chosen in greedy_path(profile):
        if profile.peak_bytes(chosen) <= budget_bytes:
            return chosen
    return None


def greedy_path(profile: TracedStep) -> list[Choice]:
    """Choices from no checkpointing on, each one move further: see `Rules`."""
    return profile.rules.greedy_path()
