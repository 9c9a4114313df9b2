"""The blocks of a model, and policies that save given results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import lru_cache

from autosac.candidates import curves
from autosac.candidates.curves import UnitCurve
from autosac.candidates.policies import Policy
from autosac.candidates.units import Unit
from autosac.planning.profiling import Profile
from solvers import knapsack

_SHARE = 0.7  # of what the modules of any one class keep


@lru_cache(maxsize=1)
def find_blocks(profile: Profile) -> tuple[Unit, ...]:
    """All calls of the model's blocks, in forward order.

    A heuristic: blocks are the modules of the class that is there most often among
    the classes whose modules keep nearly all activation memory; of classes that are
    there equally often the outermost one, which keeps most. Modules that repeat
    inside larger ones of their class do not count, nor, where others keep half of
    the most, do modules that are there once.
    """
    by_class: dict[str, list[Unit]] = defaultdict(list)
    for unit in profile.units.candidates:
        by_class[profile.tape.modules[unit.module].class_name].append(unit)
    outer = [_outermost(units) for units in by_class.values()]
    repeated = [units for units in outer if len(units) > 1]
    if 2 * max(map(_kept, repeated), default=0) >= max(map(_kept, outer), default=0):
        outer = repeated
    most = max(map(_kept, outer), default=0)
    large = [units for units in outer if _kept(units) >= _SHARE * most]
    return tuple(max(large, key=lambda units: (len(units), _kept(units)), default=()))


def _kept(units: Sequence[Unit]) -> int:
    return sum(unit.activation_bytes for unit in units)


def overlap(one: Unit, other: Unit) -> bool:
    """Whether a unit is the other one, lies in it or around it."""
    return one.call.enter < other.call.exit and other.call.enter < one.call.exit


def _outermost(units: list[Unit]) -> list[Unit]:
    """Units that lie in no other one; calls are in the order of entering."""
    found: list[Unit] = []
    for unit in units:
        if not found or unit.call.enter >= found[-1].call.exit:
            found.append(unit)
    return found


def policy_saving(unit: Unit, saved: Collection[int]) -> Policy:
    """The policy that saves these groups of a unit and reruns what backward needs.

    Groups that cannot be saved are rerun; those that must not be rerun are saved.
    """
    problem = curves.save_problem(unit)
    fixed = set(problem.pinned)
    for g in range(problem.num_groups):  # what reads a result that cannot come back
        if any(h in fixed and h in problem.unsavable for h in problem.inputs[g]):
            fixed.add(g)
    keep = [
        g in saved and g not in problem.unsavable for g in range(problem.num_groups)
    ]
    while True:
        rerun = knapsack.rerun_closure(problem, keep)
        broken = [g for g in fixed if rerun[g] and g not in problem.unsavable]
        if not broken:
            return Policy(curves.spell(tuple(keep), rerun))
        for g in broken:
            keep[g] = True


@lru_cache(maxsize=1)
def unit_curves(profile: Profile) -> dict[Unit, UnitCurve]:
    """Trade-off curves of the candidates that free memory."""
    by_key = {
        unit.key: curves.trade_off(unit)
        for unit in {u.key: u for u in profile.units.candidates}.values()
    }
    found = ((unit, by_key[unit.key]) for unit in profile.units.candidates)
    return {unit: curve for unit, curve in found if curve is not None}
