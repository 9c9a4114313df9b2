"""Choices of units and Pareto points, spelled out op by op."""

from __future__ import annotations

from autosac.candidates.policies import OpPolicy, op_policies
from autosac.planning.profiling import TracedStep
from autosac.planning.rules import Choice


def spell_out(made: TracedStep, chosen: Choice) -> tuple[OpPolicy, ...]:
    """What a choice does to every op of its units."""
    return tuple(
        spelled
        for unit, policy in chosen.items()
        for spelled in op_policies(made.tape, unit, policy, training=made.training)
    )
