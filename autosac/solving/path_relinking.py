"""Path relinking: from a choice that fits towards a cheaper one that does not.

Glover's heuristic (Fundamentals of scatter search and path relinking, 2000). A GPU's
allocator adds a little to every choice that the MILP cannot foresee, and a cheap choice
may break the budget by a few blocks. Most parts of it often fit: they are taken over
together, and where that breaks the budget, half of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autosac.simulation.simulator import Simulator
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_MOST_REPLAYS = 64  # of the allocator, some 10 ms each


@dataclass(frozen=True, slots=True)
class _Part:
    """Units in or around one another, and their policies in the cheaper choice."""

    units: Sequence[Unit]
    policies: dict[Unit, Policy]


def relink(
    simulator: Simulator, fitting: Choice, cheaper: Choice, budget_bytes: int
) -> Choice:
    """Take over parts of a cheaper choice while the budget holds.

    Args:
        simulator: Says the peaks.
        fitting: A choice whose true peak is within the budget.
        cheaper: One that breaks it.
        budget_bytes: Cap on the true peak.
    """
    parts = []
    for units in _families(fitting, cheaper):
        ours = {unit: fitting[unit] for unit in units if unit in fitting}
        theirs = {unit: cheaper[unit] for unit in units if unit in cheaper}
        if recompute_ms(ours) > recompute_ms(theirs):
            parts.append(_Part(units, theirs))
    return _Relinking(simulator, budget_bytes).take(fitting, parts)


class _Relinking:
    def __init__(self, simulator: Simulator, budget_bytes: int) -> None:
        self._simulator = simulator
        self._budget_bytes = budget_bytes
        self._replays_left = simulator.num_replays(_MOST_REPLAYS)

    def take(self, choice: Choice, parts: Sequence[_Part]) -> Choice:
        """A choice with as many of some parts as bisection finds to fit."""
        if not parts or not self._replays_left:
            return choice
        changed = dict(choice)
        for part in parts:
            for unit in part.units:
                changed.pop(unit, None)
            changed |= part.policies
        if self._fits(changed):
            return changed
        if len(parts) == 1:
            return choice
        middle = len(parts) // 2
        return self.take(self.take(choice, parts[:middle]), parts[middle:])

    def _fits(self, choice: Choice) -> bool:
        if self._simulator.peak_bytes(choice) > self._budget_bytes:
            return False
        self._replays_left -= 1
        return self._simulator.fits(choice, self._budget_bytes)


def _families(one: Choice, other: Choice) -> Iterator[list[Unit]]:
    """Units of two choices that lie in or around one another, where these differ."""
    # No set: its order, and so that of the choice, is another in every run.
    units = sorted(
        {**one, **other}, key=lambda unit: (unit.call.enter, -unit.call.exit)
    )
    family: list[Unit] = []
    end = -1
    for unit in units:
        if unit.call.enter > end and family:
            yield from _unless_equal(family, one, other)
            family = []
        family.append(unit)
        end = max(end, unit.call.exit)
    if family:
        yield from _unless_equal(family, one, other)


def _unless_equal(
    family: list[Unit], one: Choice, other: Choice
) -> Iterator[list[Unit]]:
    if any(one.get(unit) != other.get(unit) for unit in family):
        yield family
