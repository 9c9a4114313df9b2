"""Make a choice fit that breaks its budget by a little: save less in some units.

What a GPU's allocator adds to a choice depends on the order and the sizes of all that
is allocated. A neighbouring choice takes about as long, and may take a few blocks less.
The same policy in another unit that is alike takes exactly as long.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from autosac.simulation.simulator import Simulator
from autosac.solving.formulation import Formulation
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice
from autosac.step.tape import IntArray
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
_NEIGHBOURS = 8  # of a unit's point on its curve, ever farther
_MOST_UNLIKELY = 8  # moves that are replayed although they will hardly do
_MOST_TOPS = 128  # instants of a step that are above a budget


class _Move(NamedTuple):
    """A slower point of a chosen unit; what it costs and frees beside its own."""

    cost_ms: float
    freed_bytes: int
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
    """Move units to slower points, until the true peak fits.

    A single move that is likely to be enough, the cheapest first; else several, by a
    greedy heuristic: next is the one that lowers what is above the budget at the least
    time per byte.

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
    replays = simulator.num_replays(_MOST_REPLAYS)
    if is_last:
        replays = _MOST_BLOCKS // simulator.num_storages
    excess = simulator.true_peak_bytes(choice) - budget_bytes
    if excess <= 0:
        return dict(choice)
    if simulator.peak_bytes(choice) <= budget_bytes and excess <= _ONE_BLOCK:
        for changed in islice(swapped(curve_of, choice), replays):
            may_fit = simulator.peak_bytes(changed) <= budget_bytes
            if may_fit and simulator.fits(changed, budget_bytes):
                return changed
    left = max(_FEWEST, _MOST_PIECES // simulator.num_storages)
    most_ms += recompute_ms(choice)
    while replays > 0:
        room_ms = most_ms - recompute_ms(choice)
        moves = _moves(curve_of, choice, room_ms, excess)[:left]
        left -= len(moves)
        forecast = _forecast(simulator, choice, moves, budget_bytes)
        several = forecast.several(room_ms)
        alone = islice(forecast.alone(_MOST_UNLIKELY), replays)
        for changed in alone if several is None else (*alone, several):
            replays -= 1
            if simulator.fits(changed, budget_bytes):
                return changed
        if several is None:
            break
        choice, before = several, excess
        excess = simulator.true_peak_bytes(choice) - budget_bytes
        if excess >= before:
            break
    return None


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What moves are likely to do where a choice is above a budget.

    Attributes:
        choice: The choice.
        over: Its true memory above the budget at some instants, shape (k,).
        moves: Moves, n of them.
        added: What each adds there in the simulation, shape (n, k).
    """

    choice: Choice
    over: IntArray
    moves: Sequence[_Move]
    added: IntArray

    def alone(self, most_unlikely: int) -> Iterator[Choice]:
        """The choice after each move that is likely to do, the cheapest first.

        Some that lower the memory there, but are not likely to do, are among them: an
        allocator may come to hand out less than that.
        """
        over = self.over + self.added
        highest = over.max(axis=1, initial=0)
        is_enough: list[bool] = (highest <= 0).tolist()
        is_lower = highest < self.over.max(initial=0)
        able = np.flatnonzero(is_lower).tolist()
        for m in sorted(able, key=lambda m: self.moves[m].cost_ms):
            if not is_enough[m]:
                most_unlikely -= 1
            if is_enough[m] or most_unlikely >= 0:
                move = self.moves[m]
                yield {**self.choice, move.unit: move.policy}

    def several(self, most_ms: float) -> Choice | None:
        """The choice after moves that are likely to be enough together, if any are.

        Args:
            most_ms: What they may add to its time.
        """
        over, added = self.over, self.added.copy()
        costs = np.array([move.cost_ms for move in self.moves])
        names = np.array([id(move.unit) for move in self.moves])
        moved = dict(self.choice)
        while (over > 0).any():
            left = np.maximum(over + added, 0).sum(axis=1)
            lowered = np.maximum(over, 0).sum() - left
            able = (lowered > 0) & np.isfinite(costs) & (costs <= most_ms)
            if not able.any():
                return None
            best = int(np.where(able, costs / np.maximum(lowered, 1), np.inf).argmin())
            moved[self.moves[best].unit] = self.moves[best].policy
            over, most_ms = over + added[best], most_ms - costs[best]
            # What else the unit may do is beside its new point.
            own = names == names[best]
            added[own] -= added[best].copy()
            costs[own] -= costs[best]
            costs[own & (costs <= 0.0)] = np.inf
        return moved


def _forecast(
    simulator: Simulator, choice: Choice, moves: Sequence[_Move], budget_bytes: int
) -> _Forecast:
    """What moves are likely to do: see `_Forecast`.

    An allocator mostly hands out as many bytes less as the simulation has less alive.
    Instants are the highest local maxima. Moves that raise the simulated peak count for
    nothing.
    """
    true, simulated = simulator.true_timeline(choice), simulator.timeline(choice)
    live = np.concatenate([[0], true.live_bytes, [0]])
    is_top = (live[1:-1] >= live[:-2]) & (live[1:-1] > live[2:])
    tops = np.flatnonzero(is_top & (true.live_bytes > budget_bytes))
    order = np.argsort(-true.live_bytes[tops], kind="stable")
    tops = tops[order[:_MOST_TOPS]]
    keys, most_bytes = true.keys[tops], max(budget_bytes, simulated.peak_bytes)
    able, added = [], []
    for move in moves if len(keys) else ():
        changed = simulator.timeline({**choice, move.unit: move.policy})
        if changed.peak_bytes <= most_bytes:
            able.append(move)
            added.append(changed.at(keys) - simulated.at(keys))
    shape = len(able), len(keys)
    return _Forecast(
        choice=choice,
        over=true.live_bytes[tops] - budget_bytes,
        moves=able,
        added=np.array(added, dtype=np.int64).reshape(shape),
    )


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
    enough_bytes: int,
) -> list[_Move]:
    """Slower points of units that are chosen, those first that free bytes cheaply."""
    moves = [
        move
        for unit, policy in choice.items()
        for move in _slower(curve_of[unit], unit, policy)
        if move.cost_ms < most_ms
    ]
    return sorted(
        moves, key=lambda move: move.cost_ms / min(move.freed_bytes, enough_bytes)
    )


def _slower(curve: curves.UnitCurve, unit: Unit, policy: Policy) -> Iterator[_Move]:
    """The next points of a curve, ever farther from a unit's own."""
    front = curve.front
    if front is None:
        return
    own_ms, own_bytes = curves.recompute_ms(unit, policy), curves.kept(unit, policy)
    first = int(np.searchsorted(front.recompute_ms, own_ms * _MORE, side="right"))
    for k in range(_NEIGHBOURS):
        i = first + 2**k - 1
        if i >= len(front):
            break
        freed_bytes = own_bytes - int(front.saved_bytes[i])
        if freed_bytes > 0:
            cost_ms = float(front.recompute_ms[i]) - own_ms
            yield _Move(cost_ms, freed_bytes, unit, curves.policy_of(front, i))
