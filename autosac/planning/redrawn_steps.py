"""Steps of drawn or learned sizes: a plan for one of them must hold for others, too.

Noise in a router moves rows from one expert to another, and so does its training. The
plain step takes about as much memory whatever the rows are, but a plan works on one
expert at a time, and its peak is that of a larger or a smaller one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from autosac.profiles.traced_step import TracedStep
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_TIMES_APART = 3


def margin_bytes(profile: TracedStep, chosen: Mapping[Unit, Policy]) -> int:
    """How far below a budget the peak of a plan must stay for the steps that come.

    Above the highest peak of the few that were traced, three times as much as these
    are apart: a heuristic. 0 where neither draws nor training decide sizes.

    Args:
        profile: The step.
        chosen: What it recomputes.
    """
    if not chosen:
        return 0
    own_bytes = profile.simulator.peak_bytes(chosen, workspaces=False)
    above = [0]
    for other in profile.redrawn:
        units = {_name(unit): unit for unit in other.candidates}
        choice = {
            units[name]: policy
            for unit, policy in chosen.items()
            if (name := _name(unit)) in units
        }
        if len(choice) == len(chosen):  # else that step takes another branch
            peak_bytes = other.simulator.peak_bytes(choice, workspaces=False)
            above.append(peak_bytes - own_bytes)
    return max(above) + _TIMES_APART * (max(above) - min(above))


def _name(unit: Unit) -> Hashable:
    """Key by which a unit of one trace is found in another trace of the same step."""
    sizes = (len(unit.groups), len(unit.calls))
    return unit.label, unit.call_index, unit.around, sizes
