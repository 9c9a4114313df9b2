"""Path relinking: from a choice that fits towards a cheaper one that does not.

Glover's heuristic (Fundamentals of scatter search and path relinking, 2000). A GPU's
allocator adds a little to every choice that the MILP cannot foresee, and a cheap choice
may break the budget by a few blocks. Parts of it often fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from autosac.simulation.simulator import Simulator
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice
from autosac.units.unit import Unit

_MOST_REPLAYS = 16  # of the allocator, some 10 ms each


def relink(
    simulator: Simulator, fitting: Choice, cheaper: Choice, budget_bytes: int
) -> Choice:
    """Take over parts of a cheaper choice, the dearest first, while the budget holds.

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
        gain_ms = recompute_ms(ours) - recompute_ms(theirs)
        if gain_ms > 0:
            parts.append((gain_ms, units, theirs))
    parts.sort(key=lambda part: -part[0])
    replays = simulator.num_replays(_MOST_REPLAYS)
    for _, units, theirs in parts:
        changed = {u: p for u, p in fitting.items() if u not in units} | theirs
        if simulator.peak_bytes(changed) > budget_bytes:
            continue
        replays -= 1
        if simulator.true_peak_bytes(changed) <= budget_bytes:
            fitting = changed
        if not replays:
            break
    return fitting


def _families(one: Choice, other: Choice) -> Iterator[set[Unit]]:
    """Units of two choices that lie in or around one another, where these differ."""
    units = sorted({*one, *other}, key=lambda unit: (unit.call.enter, -unit.call.exit))
    family: set[Unit] = set()
    end = -1
    for unit in units:
        if unit.call.enter > end and family:
            yield from _unless_equal(family, one, other)
            family = set()
        family.add(unit)
        end = max(end, unit.call.exit)
    if family:
        yield from _unless_equal(family, one, other)


def _unless_equal(family: set[Unit], one: Choice, other: Choice) -> Iterator[set[Unit]]:
    if any(one.get(unit) != other.get(unit) for unit in family):
        yield family
