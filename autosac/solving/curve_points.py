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
        return self._formulated(self._num_points(_FEW))

    def many(self) -> Formulation | None:
        """The same with more points; None if there are no more."""
        few, many = self._num_points(_FEW), self._num_points(_MANY)
        return None if many == few else self._formulated(many)

    def _num_points(self, most_in_all: int) -> int:
        sizes = [len(self.fronts[unit.key]) for unit in self.single]
        return min(curves.affordable_points(sizes, most_in_all), max(sizes, default=0))

    def _formulated(self, num_points: int) -> Formulation:
        by_key = {
            unit.key: curves.trade_off(
                unit, self.fronts[unit.key], num_points=num_points
            )
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
