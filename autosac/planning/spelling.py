"""Choices of units and Pareto points, spelled out op by op."""

from __future__ import annotations

from autosac.profiles.traced_step import TracedStep
from autosac.solving.rules_of_thumb import Choice
from autosac.units.policies import OpPolicy


def spell_out(profile: TracedStep, chosen: Choice) -> tuple[OpPolicy, ...]:
    """What a choice does to every op of its units."""
    return tuple(
        spelled
        for unit, policy in chosen.items()
        for spelled in unit.op_policies(profile.tape, policy, training=profile.training)
    )
