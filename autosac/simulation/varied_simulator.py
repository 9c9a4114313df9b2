"""Steps of drawn or learned sizes: a plan for one of them must hold for others, too.

Noise in a router moves rows from one expert to another, and so does its training. The
plain step takes about as much memory whatever the rows are, but a plan works on one
expert at a time, and its peak is that of a larger or a smaller one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import Protocol

from autosac.simulation.simulator import Simulator
from autosac.step.ledger import Timeline
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_TIMES_APART = 3
_MOST_KNOWN, _NEAREST = 64, 9  # choices whose margins are those of others, too


class Variant(Protocol):
    """The step with other random numbers, or after some training."""

    @property
    def simulator(self) -> Simulator:
        """The simulator of the variant."""

    @property
    def units_by_name(self) -> Mapping[Hashable, Unit]:
        """The units of the variant, by `name_of`."""


class VariedSimulator(Simulator):
    """A simulator whose true peaks count what the steps that come may take.

    The best of many choices is likely to be one whose few variants happen to be close.
    So its margin is no less than what choices of about the same peak that nobody has
    picked take in the median.

    Args:
        own: The simulator of the step; what it knows is shared.
        variants: The step as it may be.
        choices: Some that nobody has picked, of all peaks.
        is_largest: The step does all that others do, with other draws, or more.
    """

    def __init__(
        self,
        own: Simulator,
        variants: Sequence[Variant],
        choices: Iterable[Mapping[Unit, Policy]],
        *,
        is_largest: bool = False,
    ) -> None:
        vars(self).update(vars(own))
        self._variants = variants
        self._times_apart = 0 if is_largest else _TIMES_APART
        self._margins: dict[frozenset[tuple[Unit, Policy]], int] = {}
        by_peak = sorted(
            ((self.peak_bytes(choice), choice) for choice in choices if choice),
            key=lambda pair: pair[0],
        )
        known = by_peak[:: -(-len(by_peak) // _MOST_KNOWN) or 1]
        self._known_peaks = [peak_bytes for peak_bytes, _ in known]
        self._known_margins = [self._margin_bytes(choice) for _, choice in known]

    def margin_bytes(self, chosen: Mapping[Unit, Policy]) -> int:
        """How far below a budget a plan's peak must stay for the steps that come.

        0 of the plain step.
        """
        key = frozenset(chosen.items())
        if key not in self._margins:
            self._margins[key] = 0
            if chosen:
                self.num_replayed += 1
                usual_bytes = self._usual_bytes(self.peak_bytes(chosen))
                self._margins[key] = max(usual_bytes, self._margin_bytes(chosen))
        return self._margins[key]

    def _usual_bytes(self, peak_bytes: int) -> int:
        """Median of the margins of known choices of about the same peak."""
        place = bisect_left(self._known_peaks, peak_bytes) - _NEAREST // 2
        first = max(0, min(place, len(self._known_peaks) - _NEAREST))
        nearest = self._known_margins[first : first + _NEAREST]
        return median_low(nearest) if nearest else 0

    def _margin_bytes(self, chosen: Mapping[Unit, Policy]) -> int:
        """Margin of a choice by its variants.

        Above the highest peak of the few that were traced, three times as much as these
        are apart: a heuristic. Nothing where the step does all that others do.
        """
        own_bytes = self.peak_bytes(chosen, workspaces=False)
        peaks = peaks_of_variants(self._variants, chosen)
        above = [0, *(peak_bytes - own_bytes for peak_bytes in peaks)]
        return max(above) + self._times_apart * (max(above) - min(above))

    def takes_replay(self, chosen: Mapping[Unit, Policy]) -> bool:
        """Whether nobody has asked for a true peak before, which takes a while."""
        is_known = frozenset(chosen.items()) in self._margins
        return not is_known or super().takes_replay(chosen)

    def true_peak_bytes(self, chosen: Mapping[Unit, Policy]) -> int:
        """Peak of the step as the device counts it, and the margin."""
        return super().true_peak_bytes(chosen) + self.margin_bytes(chosen)

    def fits(self, chosen: Mapping[Unit, Policy], budget_bytes: int) -> bool:
        """Whether the peak of the step and the margin are at most a budget."""
        may_fit = super().fits(chosen, budget_bytes)
        return may_fit and super().fits(
            chosen, budget_bytes - self.margin_bytes(chosen)
        )

    def true_timeline(self, chosen: Mapping[Unit, Policy]) -> Timeline:
        """Memory as the device counts it, and the margin at each instant alike."""
        timeline = super().true_timeline(chosen)
        left_bytes = self.true_peak_bytes(chosen) - timeline.peak_bytes
        return replace(timeline, live_bytes=timeline.live_bytes + left_bytes)


def peaks_of_variants(
    variants: Iterable[Variant], chosen: Mapping[Unit, Policy]
) -> list[int]:
    """Peaks of a choice in variants of its step, without what kernels hold.

    Those that lack a unit of it take another branch, and are left out.
    """
    peaks = []
    for variant in variants:
        choice = {
            variant.units_by_name[name]: policy
            for unit, policy in chosen.items()
            if (name := name_of(unit)) in variant.units_by_name
        }
        if len(choice) == len(chosen):
            peaks.append(variant.simulator.peak_bytes(choice, workspaces=False))
    return peaks


def name_of(unit: Unit) -> Hashable:
    """Key by which a unit of one trace is found in another trace of the same step."""
    sizes = (len(unit.groups), len(unit.calls))
    return unit.label, unit.call_index, unit.around, unit.far_kind, sizes
