"""How many points of the units' trade-off curves the MILP has: fewer or more."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from autosac.simulation.simulator import Simulator
from autosac.solvers.curves import knapsack
from autosac.solving.formulation import Formulation, formulate
from autosac.units import curves
from autosac.units.chains import Chain
from autosac.units.unit import Unit

_FEW = 1600  # points of all units: most plans are near the best with these
_MANY = 6400  # for those that are not


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurvePoints:
    """The candidates of a step, to be formulated with fewer or more points.

    Attributes:
        simulator: Of the step.
        candidates: All of them in forward order, those around others first.
        single: Those that are no chain.
        chains: The others.
        fronts: Pareto points of single units, by key.
    """

    simulator: Simulator
    candidates: Sequence[Unit]
    single: Sequence[Unit]
    chains: Sequence[Chain]
    fronts: Mapping[Hashable, knapsack.Front]

    def few(self) -> Formulation:
        """The MILP's numbers with as many points as are soon solved."""
        return self._formulated(self.fronts, self._num_points(self.fronts, _FEW))

    def many(self, most_ms: float) -> Formulation | None:
        """The same with more points; None if there are no more.

        Args:
            most_ms: What all units together take at most: where faster points of a
                unit may be missing, they are sought.
        """
        fronts = {
            key: front
            if front.complete_below_ms > most_ms
            else knapsack.front(front.problem, known=front, most_ms=most_ms)
            for key, front in self.fronts.items()
        }
        num_points = self._num_points(fronts, _MANY)
        is_more = any(len(fronts[key]) > len(self.fronts[key]) for key in fronts)
        if not is_more and num_points == self._num_points(self.fronts, _FEW):
            return None
        return self._formulated(fronts, num_points)

    def _num_points(
        self, fronts: Mapping[Hashable, knapsack.Front], most_in_all: int
    ) -> int:
        sizes = [len(fronts[unit.key]) for unit in self.single]
        return min(curves.affordable_points(sizes, most_in_all), max(sizes, default=0))

    def _formulated(
        self, fronts: Mapping[Hashable, knapsack.Front], num_points: int
    ) -> Formulation:
        by_key = {
            unit.key: curves.trade_off(unit, fronts[unit.key], num_points=num_points)
            for unit in {unit.key: unit for unit in self.single}.values()
        }
        for chain in self.chains:
            if chain.key not in by_key:
                of_blocks = [by_key[block.unit.key] for block in chain.blocks]
                by_key[chain.key] = curves.chain_trade_off(chain, of_blocks)
        useful = [
            (unit, curve)
            for unit in self.candidates
            if (curve := by_key[unit.key]) is not None
        ]
        return formulate(
            self.simulator.in_blocks(),
            [unit for unit, _ in useful],
            [curve for _, curve in useful],
        )
