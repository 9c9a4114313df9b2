"""Make a choice fit that breaks its budget by a little: save less in some units.

What a GPU's allocator adds to a choice depends on the order and the sizes of all that
is allocated. A neighbouring choice takes about as long, and may take a few blocks less.
The same policy in another unit that is alike takes exactly as long.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np

from autosac.simulation.simulator import Simulator
from autosac.solving.formulation import Formulation
from autosac.solving.rules_of_thumb import Choice
from autosac.units import curves
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_MORE = 1.0 + 1e-12  # of a time: not rounding
_MOST_PIECES = 2_000_000  # of memory in all simulations
_FEWEST = 16  # simulations of a long step
_MOST_REPLAYS = 24  # of the allocator, some 10 ms each
_MOST_BLOCKS = 400_000  # of an allocator in the last ones: a second
_MOST_LOWERED = 64  # of these for a lower peak
_ONE_BLOCK = 2**20  # what a block may have left over
_NEIGHBOURS = 8  # of a unit's point on its curve


class _Move(NamedTuple):
    cost_ms: float
    unit: Unit
    policy: Policy


def mend(
    simulator: Simulator,
    formulation: Formulation,
    choice: Mapping[Unit, Policy],
    budget_bytes: int,
    most_ms: float,
    *,
    is_last: bool = False,
) -> Choice | None:
    """Move one unit after the other to a slower point, until the true peak fits.

    A greedy heuristic: next is the move that lowers the peak at the least time per
    byte, among the cheapest ones. That is the true peak where the simulated one fits
    already, which may be elsewhere.

    Args:
        simulator: Says the peaks.
        formulation: The curves of the units.
        choice: One that breaks the budget.
        budget_bytes: Cap on the true peak.
        most_ms: What may be added to its time.
        is_last: Nothing better is to come: worth more replays.

    Returns:
        A choice that fits; None if none was found.
    """
    curve_of = dict(zip(formulation.units, formulation.curves, strict=True))
    left = max(_FEWEST, _MOST_PIECES // simulator.num_storages)
    replays = simulator.num_replays(_MOST_REPLAYS)
    if is_last:
        replays = _MOST_BLOCKS // simulator.num_storages
    peak_bytes = simulator.peak_bytes(choice)
    excess = simulator.true_peak_bytes(choice) - budget_bytes
    if peak_bytes <= budget_bytes and 0 < excess <= _ONE_BLOCK:
        for changed in islice(swapped(curve_of, choice), replays):
            may_fit = simulator.peak_bytes(changed) <= budget_bytes
            if may_fit and simulator.fits(changed, budget_bytes):
                return changed
    while (excess := simulator.true_peak_bytes(choice) - budget_bytes) > 0:
        best: tuple[float, _Move, int] | None = None
        for move in _moves(curve_of, choice, most_ms):
            if left <= 0:
                break
            left -= 1
            changed = {**choice, move.unit: move.policy}
            changed_bytes = simulator.peak_bytes(changed)
            lowered = peak_bytes - changed_bytes
            if changed_bytes <= budget_bytes and replays > 0:
                replays -= 1
                if not simulator.fits(changed, budget_bytes + excess - 1):
                    continue
                over = simulator.true_peak_bytes(changed) - budget_bytes
                if over <= 0:
                    return changed
                lowered = excess - over
            if lowered > 0:
                price = move.cost_ms / min(lowered, excess)
                if best is None or price < best[0]:
                    best = price, move, changed_bytes
        if best is None:
            return None
        _, move, peak_bytes = best
        choice = {**choice, move.unit: move.policy}
        most_ms -= move.cost_ms
    return choice


def lowered(
    simulator: Simulator, formulation: Formulation, choice: Choice
) -> Choice | None:
    """The choice with another point of one unit, whose true peak is lower.

    Of all such choices those are replayed of which least is asked.

    Returns:
        The lowest of them; None if none is lower.
    """
    curve_of = dict(zip(formulation.units, formulation.curves, strict=True))
    best_bytes = simulator.true_peak_bytes(choice)
    left = max(_FEWEST, _MOST_PIECES // simulator.num_storages)
    others = (
        {**choice, unit: policy}
        for unit, own in choice.items()
        if unit in curve_of
        for policy in curve_of[unit].policies
        if policy != own
    )
    asked = [(simulator.peak_bytes(other), other) for other in islice(others, left)]
    able = [pair for pair in asked if pair[0] < best_bytes]
    able.sort(key=lambda pair: pair[0])
    best: Choice | None = None
    for _, other in able[: simulator.num_replays(_MOST_LOWERED)]:
        if simulator.fits(other, best_bytes - 1) and formulation.keeps_host(other):
            best, best_bytes = other, simulator.true_peak_bytes(other)
    return best


def swapped(
    curve_of: Mapping[Unit, curves.UnitCurve], choice: Mapping[Unit, Policy]
) -> Iterator[Choice]:
    """The choice with another unit of the same curve instead of one of its units."""
    beside = chosen_beside(curve_of, choice)
    for unit, twin in swaps(curve_of, choice, beside):
        others = {u: own for u, own in choice.items() if u is not unit}
        yield {**others, twin: choice[unit]}


def chosen_beside(
    units: Iterable[Unit], choice: Iterable[Unit]
) -> dict[Unit, list[Unit]]:
    """For each of some units the chosen ones that are it, or lie in or around it.

    Args:
        units: Some.
        choice: None of them in another one.
    """
    chosen = sorted(choice, key=lambda unit: unit.call.enter)
    enters = [unit.call.enter for unit in chosen]
    exits = [unit.call.exit for unit in chosen]
    beside = {}
    for unit in units:
        first = bisect_left(exits, unit.call.enter)
        beside[unit] = chosen[first : bisect_right(enters, unit.call.exit)]
    return beside


def swaps(
    curve_of: Mapping[Unit, curves.UnitCurve],
    choice: Iterable[Unit],
    beside: Mapping[Unit, list[Unit]],
) -> Iterator[tuple[Unit, Unit]]:
    """Chosen units, each with one of the same curve that may take its place."""
    alike = defaultdict[int, list[Unit]](list)
    for twin, chosen in beside.items():
        if len(chosen) < 2:
            alike[id(curve_of[twin])].append(twin)
    for unit in choice:
        for twin in alike[id(curve_of[unit])]:
            if twin is not unit and beside[twin] in ([], [unit]):
                yield unit, twin


def _moves(
    curve_of: Mapping[Unit, curves.UnitCurve],
    choice: Mapping[Unit, Policy],
    most_ms: float,
) -> list[_Move]:
    """Slower points of units that are chosen, the cheapest first."""
    moves = [
        _Move(cost_ms, unit, slower)
        for unit, policy in choice.items()
        for cost_ms, slower in _slower(curve_of[unit], unit, policy)
        if cost_ms < most_ms
    ]
    return sorted(moves, key=lambda move: move.cost_ms)


def _slower(
    curve: curves.UnitCurve, unit: Unit, policy: Policy
) -> Iterator[tuple[float, Policy]]:
    """What the next points of a curve cost beyond a unit's own, and their policies."""
    front = curve.front
    if front is None:
        return
    own_ms = curves.recompute_ms(unit, policy)
    first = int(np.searchsorted(front.recompute_ms, own_ms * _MORE, side="right"))
    for i in range(first, min(first + _NEIGHBOURS, len(front))):
        yield float(front.recompute_ms[i]) - own_ms, curves.policy_of(front, i)
