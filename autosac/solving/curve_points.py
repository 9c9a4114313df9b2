"""Points of the candidates' trade-off curves that the MILP has, and its numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from autosac.simulation.simulator import Simulator
from autosac.solvers.curves import knapsack
from autosac.solving.formulation import Formulation, formulate
from autosac.units import curves
from autosac.units.chains import Chain
from autosac.units.unit import Unit

_MOST_POINTS = 1600  # of all units; curves of large models are thinned out


def formulate_candidates(
    simulator: Simulator,
    candidates: Sequence[Unit],
    single: Sequence[Unit],
    chains: Sequence[Chain],
    fronts: Mapping[Hashable, knapsack.Front],
) -> Formulation:
    """The MILP's numbers for the candidates that free memory.

    Args:
        simulator: Of the step.
        candidates: All of them in forward order, those around others first.
        single: Those that are no chain.
        chains: The others.
        fronts: Pareto points of single units, by key.
    """
    sizes = [len(fronts[unit.key]) for unit in single]
    num_points = curves.affordable_points(sizes, _MOST_POINTS)
    by_key = {
        key: curves.trade_off(unit, fronts[key], num_points=num_points)
        for key, unit in {unit.key: unit for unit in single}.items()
    }
    for chain in chains:
        if chain.key not in by_key:
            of_blocks = [by_key[block.unit.key] for block in chain.blocks]
            by_key[chain.key] = curves.chain_trade_off(chain, of_blocks)
    useful = [
        (unit, curve) for unit in candidates if (curve := by_key[unit.key]) is not None
    ]
    return formulate(
        simulator.in_blocks(),
        [unit for unit, _ in useful],
        [curve for _, curve in useful],
    )
