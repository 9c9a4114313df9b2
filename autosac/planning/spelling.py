"""Choices of units and Pareto points, spelled out op by op."""

from __future__ import annotations

from collections.abc import Collection

from autosac.costs.host import Followed
from autosac.profiles.traced_step import TracedStep
from autosac.solving.rules_of_thumb import Choice
from autosac.units.policies import RERUN, OpPolicy


def spell_out(profile: TracedStep, chosen: Choice) -> tuple[OpPolicy, ...]:
    """What a choice does to every op of its units."""
    return tuple(
        spelled
        for unit, policy in chosen.items()
        for spelled in unit.op_policies(profile.tape, policy, training=profile.training)
    )


def followed(op_policies: Collection[OpPolicy]) -> Followed:
    """What a GPU's host follows of units."""
    return Followed(
        units=len(op_policies),
        calls=sum(len(one.names) for one in op_policies),
        reruns=sum((one.actions + one.onward).count(RERUN) for one in op_policies),
    )
