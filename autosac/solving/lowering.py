"""Lower the true peak of a choice that takes hardly more time than it does.

Iterated local search (Lourenço, Martin and Stützle, Iterated local search, 2003). Near
the least peak, what a GPU's allocator adds to a choice decides: some MiB more or less,
for any change anywhere. Choices beside one that is fast take about as long, and
are many; of each whose simulated peak is low enough the allocator is replayed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autosac.simulation.simulator import Simulator
from autosac.solving.formulation import Formulation
from autosac.solving.incumbents import recompute_ms
from autosac.solving.repair import chosen_beside, swaps
from autosac.solving.rules_of_thumb import Choice
from autosac.units import curves
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_MOST_BLOCKS = 1_000_000  # of an allocator in all replays: some seconds
_MOST_REPLAYS = 500
_MOST_IN_VAIN = 40  # replays in a row that find nothing lower,
_MOST_AIMED_IN_VAIN = 96  # or nothing low enough;
_KNOWN = 4  # choices to each of them, as most are known where there are few
_MOST_PIECES = 8_000_000  # of memory in all simulations
_MOST_BESIDE = 600  # choices beside one
_MOST_LEVEL = 24  # of these replayed before it goes on from one of them
_WANDERS = 0.7  # how often it goes on from another choice that is not lower


def lower_peak(
    simulator: Simulator,
    formulation: Formulation,
    choice: Choice,
    most_ms: float,
    enough_bytes: int = 0,
    effort: int = 1,
) -> Choice:
    """A choice near one whose true peak is lower, or itself; the same every time.

    Args:
        simulator: Says the peaks.
        formulation: The curves of the units.
        choice: Where to begin.
        most_ms: What it may take in all.
        enough_bytes: A true peak at which the search ends.
        effort: How many times as many replays as usual it may take, and find nothing.
    """
    curve_of = dict(zip(formulation.units, formulation.curves, strict=True))
    if not choice.keys() <= curve_of.keys():
        return choice
    draws = random.Random(0)
    best = now = choice
    best_bytes = now_bytes = simulator.true_peak_bytes(choice)
    most_replays = effort * _MOST_REPLAYS
    replays = min(most_replays, _MOST_BLOCKS // simulator.num_blocks)
    looks = _MOST_PIECES // simulator.num_storages
    last = replays  # how many were left when the best was found,
    in_vain = 0  # and the choices of low enough a simulated peak since then
    usual = _MOST_AIMED_IN_VAIN if enough_bytes else _MOST_IN_VAIN
    most_in_vain = effort * usual
    most_choices = most_in_vain + (_KNOWN - 1) * usual
    while replays > max(0, last - most_in_vain) and looks > 0:
        if best_bytes <= enough_bytes or in_vain > most_choices:
            break
        moves = list(_moves(curve_of, now, most_ms))
        draws.shuffle(moves)
        level, lower = [], None
        for move in moves[: min(looks, _MOST_BESIDE)]:
            looks -= 1
            other = move.of(now)
            if simulator.peak_bytes(other) > best_bytes:
                continue
            level.append(other)
            in_vain += 1
            if replays <= 0 or len(level) > _MOST_LEVEL:
                break
            num_replayed = simulator.num_replayed
            fits = simulator.fits(other, now_bytes - 1)
            replays -= simulator.num_replayed - num_replayed
            if fits:
                lower = other
                break
        if lower is None:
            if not level:
                break
            lower = draws.choice(level) if draws.random() < _WANDERS else best
        now, now_bytes = lower, simulator.true_peak_bytes(lower)
        if now_bytes < best_bytes and formulation.keeps_host(now):
            best, best_bytes, last, in_vain = now, now_bytes, replays, 0
    return best


class _Move(NamedTuple):
    """A unit to leave out, or none, and one to run under a policy."""

    without: Unit | None
    unit: Unit
    policy: Policy

    def of(self, choice: Choice) -> Choice:
        """The choice after the move."""
        others = {u: own for u, own in choice.items() if u is not self.without}
        return {**others, self.unit: self.policy}


def _moves(
    curve_of: Mapping[Unit, curves.UnitCurve], choice: Choice, most_ms: float
) -> Iterator[_Move]:
    """To another point of a unit, to another unit, or to one unit more."""
    room_ms = most_ms - recompute_ms(choice)
    beside = chosen_beside(curve_of, choice)
    for unit, own in choice.items():
        own_ms = curves.recompute_ms(unit, own) + room_ms
        for policy in curve_of[unit].policies:
            if policy != own and curves.recompute_ms(unit, policy) <= own_ms:
                yield _Move(None, unit, policy)
    for unit, twin in swaps(curve_of, choice, beside):
        yield _Move(unit, twin, choice[unit])
    for unit, curve in curve_of.items():
        if not beside[unit]:
            for policy in curve.policies:
                if curves.recompute_ms(unit, policy) <= room_ms:
                    yield _Move(None, unit, policy)
