"""Choices of units with tensors in far memory, for tests."""

from itertools import cycle

from autosac.units.far_units import FarUnit
from autosac.units.unit import Unit
from tests.models import random_choice

KINDS = {
    "late": ("late",),
    "early": ("early", "late"),
    "results": ("results", "early", "late"),
}


def kind_of(unit):
    """Which twin a unit is: late, early, or one with results."""
    if unit.fetched is None:
        return "late"
    return "results" if unit.results else "early"


def twins_of(step):
    """Module call -> kind -> twin."""
    twins = {}
    for unit in step.far_units:
        twins.setdefault(unit.call, {})[kind_of(unit)] = unit
    return twins


def with_twins(step, chosen, kinds):
    """A choice with twins of some kind where there are such.

    Args:
        step: The step.
        chosen: The choice.
        kinds: Kinds of twins, by turns.
    """
    twins, turn = twins_of(step), cycle(kinds)
    choice = {}
    for unit, policy in chosen.items():
        known = twins.get(unit.call, {}) if type(unit) in (Unit, FarUnit) else {}
        wanted = (known[kind] for kind in KINDS[next(turn)] if kind in known)
        choice[next(wanted, unit)] = policy
    return choice


def far_choice(step, seed, kinds):
    """A random choice of units, of twins where there are such."""
    return with_twins(step, random_choice(step, seed), kinds)
