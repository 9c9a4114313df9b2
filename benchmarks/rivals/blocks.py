"""The blocks of a model, and policies that save given results."""

from __future__ import annotations

from autosac.profiles.traced_step import TracedStep
from autosac.solving.rules_of_thumb import policy_saving
from autosac.units.curves import UnitCurve
from autosac.units.unit import Unit

__all__ = ["find_blocks", "overlap", "policy_saving", "unit_curves"]


def find_blocks(profile: TracedStep) -> tuple[Unit, ...]:
    """All calls of the model's blocks, in forward order: see `Rules.blocks`."""
    return profile.rules.blocks


def unit_curves(profile: TracedStep) -> dict[Unit, UnitCurve]:
    """Trade-off curves of the candidates that free memory."""
    return profile.rules.curves


def overlap(one: Unit, other: Unit) -> bool:
    """Whether a unit is the other one, lies in it or around it."""
    return one.call.enter < other.call.exit and other.call.enter < one.call.exit
