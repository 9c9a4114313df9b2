"""The least peak that any choice of a problem has: rows of a MILP, on demand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ..milp.solution import Termination
from .greedy import round_and_repair
from .rows import (
    LP_ROUNDS,
    MOST_IN_VAIN,
    TOLERANCE_BYTES,
    RowSearch,
)
from .table import Choice, Floats

_EXACT_BYTES = 8  # what a least peak may be above its bound, if rows are kept well
_NEAR_PEAK = 2.0**-9  # of it: no cap is tried that is closer to the best or the bound
_MOST_HALVINGS = 10  # of the distance from a peak to its bound
_SHARES = (0.15, 0.3, 0.45, 0.6, 0.75)  # of a relaxation, mixed with the best choice
_FAR_BELOW = -(2.0**60)  # any peak in bytes


class LeastPeak(RowSearch):
    """Searches the choice of least peak; times are of no account."""

    more_if_wide = 1.5  # less for the first MILPs: they have too few rows
    more_rounds_if_wide = 4.0

    def run(self, known: Iterable[Choice] = ()) -> Termination:
        """Search the choice of least peak; `bound` is in bytes.

        Args:
            known: Choices that may have it.
        """
        self.bound = _FAR_BELOW  # numbers made up may have peaks below 0
        self._offer_peak([None] * len(self._table.parents))
        for choice in known:
            self._offer_peak(choice)
        relaxed: list[Floats] = []
        for whole in (False, True):
            # Relaxations are not timed: without them the peak may be that of no AC.
            left, in_vain = math.inf if whole else LP_ROUNDS, 0
            while not self._is_least(_EXACT_BYTES) and not (whole and self._is_late()):
                model, outcome, weights = self._solve(
                    None, relaxed=not whole, whole=whole
                )
                before = self.bound
                if outcome.bound is not None:
                    self._prove(outcome.bound / model.scale)
                is_higher = self.bound - before > _EXACT_BYTES
                in_vain = 0 if is_higher else in_vain + 1
                if not outcome.termination.has_incumbent:
                    break
                dealt = weights.astype(np.int64) if whole else weights
                if whole:
                    self._offer_peak(self._table.choice(weights))
                else:
                    relaxed.append(weights)
                live = self._table.live(dealt)
                cap = int(self.bound) + _EXACT_BYTES
                left -= 1
                if not left or (not whole and in_vain == MOST_IN_VAIN):
                    break
                if not self._refine(model, weights, live, cap):
                    break
            if not whole:  # the last first: the bound of few rows is not to be met
                any(self._repair_peak(weights) for weights in relaxed[::-1])
        if not self._is_least(TOLERANCE_BYTES):
            self._push_peak(self._own_weights())
            self._crossover(relaxed[::-1])
        is_proven = self._is_least(TOLERANCE_BYTES)
        return Termination.OPTIMAL if is_proven else Termination.FEASIBLE

    def _repair_peak(self, weights: Floats) -> bool:
        """Round weights to whole points, with a peak close to the bound if possible."""
        caps = (
            int(self.bound + share * (self._best - self.bound)) + 1
            for share in (0.0, 0.01, 0.1, 0.3)
        )
        return any(self._repair(weights, cap) for cap in caps)

    def _repair(self, weights: Floats, cap: int) -> bool:
        """Round weights to whole points that keep a cap; whether that can be done."""
        choice = round_and_repair(self._table, cap, self._units, weights)
        if choice is None:
            return False
        self._offer_peak(choice)
        return True

    def _push_peak(self, weights: Floats) -> None:
        """Repair weights to keep a lower cap, half way to the bound at first.

        What a MILP finds before it must stop may be far from the least.
        """
        least = self.bound
        for _ in range(_MOST_HALVINGS):
            if self._best - least <= _NEAR_PEAK * self._best:
                return
            cap = int((self._best + least) / 2)
            if self._repair(weights, cap):
                weights = self._own_weights()
            else:
                least = cap

    def _crossover(self, relaxed: Sequence[Floats]) -> None:
        """Push mixtures of the best choice and each relaxation.

        As in relaxation induced neighbourhood search (Danna, Rothberg and Le Pape 2005)
        what they agree on stays; a repair takes the place of that search's MILP.
        """
        for weights in relaxed:
            for share in _SHARES:
                if self._best - self.bound <= _NEAR_PEAK * self._best:
                    return
                mixed = (1.0 - share) * self._own_weights() + share * weights
                if self._repair(mixed, int(self._best * (1.0 - _NEAR_PEAK))):
                    self._push_peak(mixed)

    def _own_weights(self) -> Floats:
        """The best choice as weights."""
        assert self.choice is not None
        return self._table.weights(self.choice).astype(np.float64)

    def _offer_peak(self, choice: Choice) -> None:
        peak = float(self._table.live(self._table.weights(choice)).max())
        if peak < self._best:
            self._best, self.choice = peak, choice

    def _is_least(self, tolerance_bytes: int) -> bool:
        left = self._best - self.bound
        return left <= max(tolerance_bytes, self._gap * self._best)
