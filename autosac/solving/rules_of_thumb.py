"""Rules of thumb for what to recompute: every block, every k-th, a ratio, greedy.

A plan never costs more than what one of these gives under the same budget: they are
its first incumbents (`autosac.solving.incumbents`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autosac.solvers.curves import knapsack
from autosac.step.tape import IntArray, Tape
from autosac.units import curves
from autosac.units.curves import UnitCurve
from autosac.units.policies import Policy
from autosac.units.unit import Unit

Choice = Mapping[Unit, Policy]
FloatArray = npt.NDArray[np.float64]

_SHARE = 0.7  # of what the modules of any one class keep
_LEAST_MS = 1e-9  # of a greedy move: free ones come first, by size


class Rules:
    """The rules for one step.

    Args:
        tape: The traced step.
        candidates: Module calls that can be AC units, in forward order.
        fronts: Pareto points by `Unit.key`.
    """

    def __init__(
        self,
        tape: Tape,
        candidates: Sequence[Unit],
        fronts: Mapping[Hashable, knapsack.Front],
    ) -> None:
        self._tape = tape
        self._candidates = candidates
        self._fronts = fronts

    @cached_property
    def blocks(self) -> tuple[Unit, ...]:
        """All calls of the model's blocks, in forward order.

        A heuristic: blocks are the modules of the class that is there most often among
        the classes whose modules keep nearly all activation memory; of classes that are
        there equally often the outermost one, which keeps most. Modules that repeat
        inside larger ones of their class do not count, nor, where others keep half of
        the most, do modules that are there once.
        """
        by_class: dict[str, list[Unit]] = defaultdict(list)
        for unit in self._candidates:
            by_class[self._tape.modules[unit.module].class_name].append(unit)
        outer = [_outermost(units) for units in by_class.values()]
        most = max(map(_kept, outer), default=0)
        repeated = [units for units in outer if len(units) > 1]
        if 2 * max(map(_kept, repeated), default=0) >= most:
            outer = repeated
            most = max(map(_kept, outer), default=0)
        large = [tuple(units) for units in outer if _kept(units) >= _SHARE * most]
        return max(large, key=lambda units: (len(units), _kept(units)), default=())

    @cached_property
    def curves(self) -> dict[Unit, UnitCurve]:
        """Trade-off curves of the candidates that free memory."""
        alike = {unit.key: unit for unit in self._candidates}
        by_key = {
            key: curves.trade_off(unit, self._fronts.get(key))
            for key, unit in alike.items()
        }
        pairs = ((unit, by_key[unit.key]) for unit in self._candidates)
        return {unit: curve for unit, curve in pairs if curve is not None}

    def front_of(self, unit: Unit) -> knapsack.Front:
        """Pareto points of a candidate."""
        return self._fronts[unit.key]

    def every_kth_block(self, k: int) -> Choice:
        """Blocks 0, k, 2k, ... keep their arguments only, the others keep everything.

        Args:
            k: At least 1.
        """
        return {unit: self._full[unit.key] for unit in self.blocks[::k]}

    def uniform_ratio(self, ratio: float) -> Choice:
        """Every block recomputes at least the same ratio, each at its least cost.

        A block whose curve ends before the ratio takes its last point.

        Args:
            ratio: 0 to 1.
        """
        chosen = {}
        for unit in self.blocks:
            if unit in self.curves:
                curve = self.curves[unit]
                enough = (p for p, r in enumerate(curve.ratios) if r >= ratio)
                chosen[unit] = curve.policies[next(enough, len(curve.ratios) - 1)]
        return chosen

    @property
    def uniform_ratios(self) -> list[float]:
        """The ratios at which `uniform_ratio` changes, in ascending order."""
        by_block = (self.curves[u].ratios for u in self.blocks if u in self.curves)
        return sorted({ratio for ratios in by_block for ratio in ratios})

    def greedy_path(self) -> list[Choice]:
        """Choices from no checkpointing on, each one move further.

        A move takes one unit to a point of its curve, in place of all chosen units that
        lie inside or around it. That with the most freed bytes per added millisecond,
        by the curves, is next; the path ends when no move frees anything. Modules
        around blocks are left out: they free most and, rerun as a whole, lower no peak.
        """
        units, points = self._greedy
        return [self._choice(units, row) for row in points]

    def some(self, most: int) -> Iterator[Choice]:
        """At most so many choices of all rules, spread evenly over the greedy path."""
        for k in range(1, min(len(self.blocks), 16) + 1):
            yield self.every_kth_block(k)
        for ratio in self.uniform_ratios:
            yield self.uniform_ratio(ratio)
        units, points = self._greedy
        stride = -(-len(points) // max(1, most))
        for row in points[::-1][::stride]:
            yield self._choice(units, row)

    def _choice(self, units: Sequence[Unit], points: IntArray) -> Choice:
        return {
            units[u]: self.curves[units[u]].policies[points[u]]
            for u in np.flatnonzero(points >= 0).tolist()
        }

    @cached_property
    def _greedy(self) -> tuple[list[Unit], list[IntArray]]:
        """Units of the greedy path, and the point of each after every move, or -1."""
        units = [unit for unit in self.curves if not self._is_around_block(unit)]
        freed, cost_ms = self._tables(units)
        family = _families(units)
        point = np.full(len(units), -1, dtype=np.int16)
        own_freed, own_ms = np.zeros(len(units)), np.zeros(len(units))
        rate = np.where(freed > 0, freed / np.maximum(cost_ms, _LEAST_MS), 0.0)
        best = rate.max(axis=1, initial=0.0)
        path = [point.copy()]
        while len(best) and best.max() > 0:
            u = int(best.argmax())
            p = int(rate[u].argmax())
            changed = {u, *(v for v in family[u] if point[v] >= 0)}
            point[family[u]] = -1
            own_freed[family[u]], own_ms[family[u]] = 0.0, 0.0
            point[u], own_freed[u], own_ms[u] = p, freed[u, p], cost_ms[u, p]
            path.append(point.copy())
            for v in sorted({v for w in changed for v in family[w]}):
                gain = freed[v] - own_freed[family[v]].sum()
                added = np.maximum(cost_ms[v] - own_ms[family[v]].sum(), _LEAST_MS)
                rate[v] = np.where(gain > 0, gain / added, 0.0)
                best[v] = rate[v].max(initial=0.0)
        return units, path

    def _is_around_block(self, unit: Unit) -> bool:
        """Whether a block lies inside a unit that is none itself."""
        return unit not in self._block_set and any(
            unit.call.enter <= block.call.enter and block.call.exit <= unit.call.exit
            for block in self.blocks
        )

    @cached_property
    def _full(self) -> dict[Hashable, Policy]:
        """Policy of every block, by key, that saves nothing."""
        alike = {unit.key: unit for unit in self.blocks}
        return {key: policy_saving(unit, ()) for key, unit in alike.items()}

    @cached_property
    def _block_set(self) -> frozenset[Unit]:
        return frozenset(self.blocks)

    def _tables(self, units: Sequence[Unit]) -> tuple[FloatArray, FloatArray]:
        """Freed bytes and milliseconds of every point, shape (units, most points)."""
        most = max((len(self.curves[unit].policies) for unit in units), default=0)
        freed = np.full((len(units), most), -np.inf)
        cost_ms = np.zeros((len(units), most))
        for u, unit in enumerate(units):
            points = self.curves[unit].points
            freed[u, : len(points.freed_bytes)] = points.freed_bytes
            cost_ms[u, : len(points.recompute_ms)] = points.recompute_ms
        return freed, cost_ms


def policy_saving(unit: Unit, saved: Collection[int]) -> Policy:
    """The policy that saves these groups of a unit and reruns what backward needs.

    Groups that cannot be saved are rerun; those that must not be rerun are saved.
    """
    problem = curves.save_problem(unit)
    fixed = set(problem.pinned)
    for g in range(problem.num_groups):  # what reads a result that cannot come back
        if any(h in fixed and h in problem.unsavable for h in problem.inputs[g]):
            fixed.add(g)
    keep = [
        g in saved and g not in problem.unsavable for g in range(problem.num_groups)
    ]
    while True:
        rerun = knapsack.rerun_closure(problem, keep)
        broken = [g for g in fixed if rerun[g] and g not in problem.unsavable]
        if not broken:
            return Policy(curves.spell(tuple(keep), rerun))
        for g in broken:
            keep[g] = True


def _kept(units: Sequence[Unit]) -> int:
    return sum(unit.activation_bytes for unit in units)


def _outermost(units: list[Unit]) -> list[Unit]:
    """Units that lie in no other one; calls are in the order of entering."""
    outer: list[Unit] = []
    for unit in units:
        if not outer or unit.call.enter >= outer[-1].call.exit:
            outer.append(unit)
    return outer


def _families(units: Sequence[Unit]) -> list[list[int]]:
    """For every unit: itself and the units around and inside it, in forward order."""
    families: list[list[int]] = [[u] for u in range(len(units))]
    open_units: list[int] = []
    for u, unit in enumerate(units):
        while open_units and units[open_units[-1]].call.exit < unit.call.enter:
            open_units.pop()
        for outer in open_units:
            families[u].append(outer)
            families[outer].append(u)
        open_units.append(u)
    return families
