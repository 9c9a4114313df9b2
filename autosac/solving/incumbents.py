"""Choices that are known for a step, each with its time and its peak.

No plan costs more than any of these that fits its budget: the rules of thumb, and every
plan that was made for the same step before. Of rules that it takes a replay of a
GPU's allocator to know, only as many are looked at for a budget as take little time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from autosac.simulation.simulator import Simulator
from autosac.solving.rules_of_thumb import Choice
from autosac.units import curves

_MOST_PIECES = 10_000_000  # of memory in all simulations of the rules of one step
_MOST_REPLAYS = 32  # of an allocator for one budget, but for choices replayed before


def recompute_ms(choice: Choice) -> float:
    """Time that a step spends on recomputation under a choice."""
    return math.fsum(curves.recompute_ms(*item) for item in choice.items())


def far_bytes(choice: Choice) -> int:
    """Bytes that a choice has in far memory."""
    return sum(unit.far_bytes(policy) for unit, policy in choice.items())


def most_rules(simulator: Simulator) -> int:
    """How many choices may be simulated: fewer of a long step."""
    return max(16, _MOST_PIECES // simulator.num_storages)


@dataclass(slots=True, eq=False)
class _Incumbent:
    time_ms: float
    choice: Choice
    simulated_peak_bytes: int


class Incumbents:
    """The incumbents of one step: choices with their times and peaks.

    Args:
        simulator: Of the step.
        choices: The first of them, in any order.
    """

    def __init__(self, simulator: Simulator, choices: Iterable[Choice]) -> None:
        self._simulator = simulator
        self._by_time: list[_Incumbent] = []
        for choice in choices:
            self.add(choice)

    def add(self, choice: Choice) -> None:
        """Add a choice to the incumbents."""
        peak_bytes = self._simulator.peak_bytes(choice)
        entry = _Incumbent(recompute_ms(choice), choice, peak_bytes)
        insort(self._by_time, entry, key=lambda other: other.time_ms)

    def cheapest(self, budget_bytes: int) -> Choice | None:
        """The choice of least time whose true peak is within a budget.

        Of those that it takes a replay of the allocator to know some may be passed by.
        """
        # The allocator hands out no less than is asked of it.
        able = (e for e in self._by_time if e.simulated_peak_bytes <= budget_bytes)
        for choice in self._affordable(able):
            if self._simulator.fits(choice, budget_bytes):
                return choice
        return None

    def _affordable(self, entries: Iterable[_Incumbent]) -> Iterator[Choice]:
        """Choices whose true peaks are known, and of the others as many as pay."""
        replays_left = self._simulator.num_replays(_MOST_REPLAYS)
        for entry in entries:
            if self._simulator.takes_replay(entry.choice):
                if not replays_left:
                    continue
                replays_left -= 1
            yield entry.choice

    def lowest(self, best: Choice | None = None) -> Choice:
        """The choice of least true peak.

        Args:
            best: What to return unless one is lower; None for nothing recomputed. The
                lower it is, the fewer replays of the allocator this takes.
        """
        best = {} if best is None else best
        best_bytes = self._simulator.true_peak_bytes(best)
        ascending = sorted(self._by_time, key=lambda e: e.simulated_peak_bytes)
        able = takewhile(lambda e: e.simulated_peak_bytes < best_bytes, ascending)
        for choice in self._affordable(able):
            if self._simulator.fits(choice, best_bytes - 1):
                best = choice
                best_bytes = self._simulator.true_peak_bytes(best)
        return best
