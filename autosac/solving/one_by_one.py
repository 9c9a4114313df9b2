"""Choices that the MILP takes to fit, looked at one by one, the fastest first.

A GPU's allocator adds to a choice what the MILP does not know: the cheapest choice that
keeps the budget in its rows may break it. Where few choices lie between the bound and
the best one that fits, each of them is replayed. The first one that fits is the best of
all; up to the one that was replayed last, the bound holds for what the allocator hands
out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autosac.simulation.simulator import Simulator
from autosac.solvers import sac
from autosac.solving.formulation import Formulation
from autosac.solving.rules_of_thumb import Choice

_MOST_LOOKED_AT = 25_000  # choices that keep all rows,
_MOST_PIECES = 8_000_000  # and pieces of memory in all of these: half a second
_MOST_BLOCKS = 650_000  # of an allocator in all replays: likewise
_FEWEST_REPLAYS = 8  # of a long step: where they are dear, few prove nothing
_FIRST_SHARE = 1 / 32  # above the bound, at first
_BISECTIONS = 3  # of a stretch in which there are too many
_SMALL_GAP = 0.02  # to what was proven: for a closer proof
_LITTLE_EFFORT = 1 / 8  # of that, as some choice may be a little cheaper:
PROVEN = 1 / 32  # until the gap is this part of what was asked for


@dataclass(slots=True)
class OneByOne:
    """Looks at choices for one budget.

    Attributes:
        simulator: Of the step.
        formulation: Its units.
        enumeration: Of the choices that keep the budget in the MILP's rows.
        budget_bytes: Cap on the true peak.
        relative_gap: How near to the best known choice none is of interest.
        bound_ms: No choice that fits takes less.
        most_looks: How many choices may be looked at in one go.
    """

    simulator: Simulator
    formulation: Formulation
    enumeration: sac.Enumeration
    budget_bytes: int
    relative_gap: float
    bound_ms: float = 0.0
    most_looks: int = _MOST_LOOKED_AT
    _replays_left: int = 0
    _looks_left: int = 0
    _looked_at: set[tuple[sac.Part, ...]] = field(default_factory=set)
    _too_many_ms: float = math.inf  # that take less

    def cheapest(self, best_ms: float, *, is_quick: bool = False) -> Choice | None:
        """The first choice found that takes less than a time and fits.

        Those are looked at first of which no unit can be left out. They are few, and
        one that fits makes the rest fewer.

        Args:
            best_ms: Time of the best known one.
            is_quick: Take an eighth of the usual effort where the gap is large, too.
        """
        is_quick = is_quick or best_ms - self.bound_ms <= _SMALL_GAP * best_ms
        usual = () if is_quick else (1.0,)
        fitting = None
        for effort in (*usual, _LITTLE_EFFORT):
            for is_minimal in (True, False):
                gap = self.relative_gap if is_minimal else self._small_gap
                if effort < 1.0:
                    gap = self.relative_gap * PROVEN
                found = self._look(best_ms, gap, effort, is_minimal=is_minimal)
                if found is not None:
                    best_ms, fitting = found
        return fitting

    def go_on(self, best_ms: float) -> Choice | None:
        """Likewise, from where `cheapest` ended, with as many replays again."""
        found = self._look(best_ms, self._small_gap, 1.0, is_minimal=False)
        return None if found is None else found[1]

    @property
    def _small_gap(self) -> float:
        return max(self.relative_gap, _SMALL_GAP)

    def _look(
        self, best_ms: float, gap: float, effort: float, *, is_minimal: bool
    ) -> tuple[float, Choice] | None:
        affordable = int(effort * _MOST_BLOCKS) // self.simulator.num_blocks
        is_settled = self.enumeration.most_ms <= self.bound_ms
        if is_settled or affordable < _FEWEST_REPLAYS:
            return None
        self._replays_left = affordable
        most_looks = _MOST_PIECES // self.simulator.num_storages
        self._looks_left = int(effort * min(self.most_looks, most_looks))
        self.enumeration.nodes_left = int(effort * sac.MOST_NODES)
        return self._first_fitting(best_ms, gap, is_minimal=is_minimal)

    def _first_fitting(
        self, best_ms: float, gap: float, *, is_minimal: bool
    ) -> tuple[float, Choice] | None:
        start_ms = self.bound_ms
        for ms, parts in self._ascending(best_ms, gap, is_minimal=is_minimal):
            if not is_minimal:  # then what takes less was looked at
                self.bound_ms = max(start_ms, min(ms, best_ms))
            if not parts or parts in self._looked_at:
                continue
            if not self._looks_left or self._replays_left <= 0:
                break
            self._looks_left -= 1
            self._looked_at.add(parts)
            choice = self._decode(parts)
            num_replayed = self.simulator.num_replayed
            fits = self._fits(choice)
            self._replays_left -= self.simulator.num_replayed - num_replayed
            if fits:
                return ms, choice
        return None

    def _ascending(
        self, best_ms: float, gap: float, *, is_minimal: bool
    ) -> Iterator[tuple[float, tuple[sac.Part, ...]]]:
        """Choices by their time, in stretches; after each no parts with its end."""
        most_ms = min(best_ms * (1.0 - gap), self.enumeration.most_ms)
        share, start_ms, done_ms = _FIRST_SHARE, self.bound_ms, 0.0
        unit_ms, bisections_left = start_ms or most_ms, _BISECTIONS
        while done_ms < most_ms:
            limit_ms = min(most_ms, start_ms + unit_ms * share)
            if limit_ms >= self._too_many_ms:
                if not bisections_left:
                    return
                bisections_left -= 1
                limit_ms = (max(start_ms, done_ms) + self._too_many_ms) / 2
            found = self.enumeration.below(limit_ms, is_minimal=is_minimal)
            if found is None:
                self._too_many_ms = limit_ms
                continue
            yield from ((ms, parts) for ms, parts in found if ms >= done_ms and parts)
            yield limit_ms, ()
            done_ms, share = limit_ms, 2 * share

    def _decode(self, parts: Sequence[sac.Part]) -> Choice:
        """Units and policies; between two points of the MILP the known one there."""
        choice = {}
        for part in parts:
            unit = self.formulation.units[part.unit]
            curve = self.formulation.curves[part.unit]
            if part.share:
                shares = [0.0] * len(curve.policies)
                shares[part.point : part.point + 2] = 1.0 - part.share, part.share
                choice[unit] = curve.between(shares)
            else:
                choice[unit] = curve.policies[part.point]
        return choice

    def _fits(self, choice: Choice) -> bool:
        fits = self.simulator.fits(choice, self.budget_bytes)
        return fits and self.formulation.keeps_host(choice)
