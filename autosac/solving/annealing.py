"""Look for a cheaper choice around one that fits, where an allocator decides.

Simulated annealing (Kirkpatrick, Gelatt and Vecchi 1983). A GPU's allocator adds more
or less to a choice than the MILP's rows say, as the order of all allocations has it.
Near the least peak, few choices fit at all, perhaps none that is cheap in the MILP.
Each move is replayed, and what breaks the budget by a little costs time
for every byte, so that choices on the way from one that fits to another may break it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from autosac.simulation.simulator import Simulator
from autosac.solving.formulation import Formulation
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice
from autosac.units import curves
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_MOST_PIECES = 2_000_000  # of memory in all simulations
_MOST_BLOCKS = 250_000  # of an allocator in all replays: half a second
_TRIES = 20  # moves for each one that is simulated
_MOST_POINTS = 24  # of a unit
_DOUBLE_BYTES = 2**21  # above the budget cost as much as the choice takes
_WARMTH = 0.04  # of its time: what moves may cost at first
_STEPS = (-3, -2, -1, 1, 2, 3)  # on a unit's curve
_LESS = 1.0 - 1e-9


def anneal(
    simulator: Simulator,
    formulation: Formulation,
    choice: Choice,
    start: Choice,
    budget_bytes: int,
) -> Choice:
    """A choice that fits and takes no longer than one that does; the same every time.

    Args:
        simulator: Says the peaks.
        formulation: The curves of the units.
        choice: One that fits.
        start: Where to begin: there, or at a cheaper one that breaks the budget.
        budget_bytes: Cap on the true peak.
    """
    points = [
        _points(unit, curve)
        for unit, curve in zip(formulation.units, formulation.curves, strict=True)
    ]
    moves = _Moves(dict(zip(formulation.units, points, strict=True)))
    best, best_ms = choice, recompute_ms(choice)
    now, own_ms = start, recompute_ms(start)

    def excess(choice: Choice) -> int:
        return max(0, simulator.true_peak_bytes(choice) - budget_bytes)

    def cost(choice: Choice) -> float:
        over = excess(choice) / _DOUBLE_BYTES
        return recompute_ms(choice) + own_ms * over

    now_cost = cost(now)
    most = _MOST_PIECES // simulator.num_storages
    replays_left = _MOST_BLOCKS // simulator.num_storages
    left = most
    for _ in range(_TRIES * most):
        if left <= 0 or replays_left <= 0:
            break
        changed = moves.changed(now, best_ms)
        time_ms = recompute_ms(changed)
        if time_ms >= best_ms * _LESS or not changed:
            continue
        left -= 1
        over = simulator.peak_bytes(changed) - budget_bytes
        if over > _DOUBLE_BYTES:
            continue
        replays_left -= simulator.takes_replay(changed)
        if not excess(changed) and formulation.keeps_host(changed):
            best, best_ms = changed, time_ms
        rise = cost(changed) - now_cost
        warmth_ms = own_ms * _WARMTH * left / most
        if rise <= 0.0 or moves.takes(rise / (warmth_ms + 1e-12)):
            now, now_cost = changed, now_cost + rise
    return best


_Point = tuple[float, Policy]


class _Moves:
    """Random moves from one choice to another.

    Args:
        points: Of each unit, with their times, the fastest first.
    """

    def __init__(self, points: Mapping[Unit, Sequence[_Point]]) -> None:
        self._points = points
        self._units = list(points)
        self._random = random.Random(0)

    def takes(self, rise: float) -> bool:
        """Whether to move to a choice that is worse by so much."""
        return self._random.random() < math.exp(-rise)

    def changed(self, choice: Choice, most_ms: float) -> Choice:
        """The choice with one or two units changed.

        Args:
            choice: The choice.
            most_ms: No point of a new unit takes longer.
        """
        draw = self._random.random()
        if draw < 0.45 and choice:
            unit = self._random.choice(list(choice))
            return {**choice, unit: self._beside(unit, choice[unit])}
        if draw < 0.6 and choice:
            return self._without_one(choice)
        unit = self._random.choice(self._units)
        able = [policy for ms, policy in self._points[unit] if ms < most_ms]
        if not able:
            return choice
        others = {u: own for u, own in choice.items() if u.is_apart_from(unit)}
        if draw > 0.8 and others:
            others = dict(self._without_one(others))
        return {**others, unit: self._random.choice(able)}

    def _without_one(self, choice: Choice) -> Choice:
        left_out = self._random.choice(list(choice))
        return {unit: own for unit, own in choice.items() if unit is not left_out}

    def _beside(self, unit: Unit, policy: Policy) -> Policy:
        points = self._points[unit]
        own_ms = curves.recompute_ms(unit, policy)
        place = min(range(len(points)), key=lambda k: abs(points[k][0] - own_ms))
        place += self._random.choice(_STEPS)
        return points[min(max(place, 0), len(points) - 1)][1]


def _points(unit: Unit, curve: curves.UnitCurve) -> list[_Point]:
    """Points of a unit with their times, the fastest first; of many some."""
    policies = curve.policies
    if curve.front is not None:
        last = len(curve.front) - 1
        number = min(last, _MOST_POINTS - 1)
        places = [last * k // max(1, number) for k in range(number + 1)]
        policies = tuple(curves.policy_of(curve.front, place) for place in places)
    timed = [(curves.recompute_ms(unit, policy), policy) for policy in policies]
    return sorted(timed, key=lambda point: point[0])
