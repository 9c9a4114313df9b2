"""Rivals that treat whole blocks alike."""

from __future__ import annotations

from autosac.profiles.traced_step import TracedStep
from autosac.solving.rules_of_thumb import Choice


def no_checkpointing(profile: TracedStep) -> Choice:
    """Nothing is recomputed."""
    return {}


def every_block(profile: TracedStep) -> Choice:
    """Every block keeps its arguments only ("full" recomputation)."""
    return every_kth_block(profile, 1)


def every_kth_block(profile: TracedStep, k: int) -> Choice:
    """Blocks 0, k, 2k, ... keep their arguments only, the others keep everything."""
    return profile.rules.every_kth_block(k)


def uniform_ratio(profile: TracedStep, ratio: float) -> Choice:
    """Every block recomputes at least the same ratio, each at its least cost."""
    return profile.rules.uniform_ratio(ratio)


def uniform_ratios(profile: TracedStep) -> list[float]:
    """The ratios at which `uniform_ratio` changes, in ascending order."""
    return profile.rules.uniform_ratios
