"""What offload would buy, found fast: every block by itself, cheapest bytes first.

A heuristic beside the MILP: each block may be no unit, be rerun, or be rerun with its
arguments in far memory. Of these options the lower convex hull of freed bytes and time
is left. All blocks begin at its end that frees most, and take the steps back that save
most time for a byte, as many as the simulated peak allows. Plans with offload are never
dearer than that: it may be told before they are made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from autosac.simulation.simulator import Simulator
from autosac.solving.curve_points import far_curve
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice, Rules
from autosac.step.tape import ModuleCall
from autosac.units import curves
from autosac.units.far_units import FarUnit
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_MOST_REPLAYS = 4  # of the allocator, where it adds more than at first


class _Option(NamedTuple):
    """What may be done with a block: what it frees, its time, and unit and policy."""

    freed_bytes: int
    ms: float
    chosen: tuple[Unit, Policy] | None


class MovedBlocks:
    """Choices of blocks with arguments in far memory, for one step.

    Args:
        simulator: Of the step.
        rules: Know its blocks, and their curves.
        twins: Units with arguments in far memory.
    """

    def __init__(
        self, simulator: Simulator, rules: Rules, twins: Sequence[FarUnit]
    ) -> None:
        self._simulator = simulator
        self._rules = rules
        self._late = {twin.call: twin for twin in twins if twin.fetched is None}
        by_call: dict[ModuleCall, list[FarUnit]] = defaultdict(list)
        for twin in twins:
            by_call[twin.call].append(twin)
        self._blocks = [(block, by_call[block.call]) for block in rules.blocks]
        self._cheapest: dict[int, Choice | None] = {}  # by budget
        # What comes back early takes less time, and memory: fewest bytes come last.
        self._paths = [
            self._path(lambda twin: True),
            self._path(lambda twin: not twin.results),
            self._path(lambda twin: twin.fetched is None),
        ]

    def _path(self, is_kind: Callable[[FarUnit], bool]) -> _Path:
        """Choices of plain blocks and of some of their twins."""
        hulls = [
            _hull(_options(self._rules, block, list(filter(is_kind, twins))))
            for block, twins in self._blocks
        ]
        return _Path(self._simulator, hulls)

    @cached_property
    def alike(self) -> tuple[Choice, ...]:
        """All blocks at one point of one kind of twin, the fastest first.

        Whether that fits or not: parts of it may.
        """
        choices: dict[tuple[bool, bool, int], dict[Unit, Policy]] = {}
        for block, twins in self._blocks:
            for twin in twins:
                kind = twin.fetched is None, bool(twin.results)
                curve = _far_curve(self._rules, block, twin)
                for k, policy in enumerate(curve.policies if curve else ()):
                    choices.setdefault((*kind, k), {})[twin] = policy
        return tuple(sorted(choices.values(), key=recompute_ms))

    def cheapest(self, budget_bytes: int) -> Choice | None:
        """The fastest of these choices whose true peak is within a budget, or None."""
        if budget_bytes not in self._cheapest:
            choices = (path.cheapest(budget_bytes) for path in self._paths)
            fitting = [choice for choice in choices if choice is not None]
            cheapest = min(fitting, key=recompute_ms, default=None)
            self._cheapest[budget_bytes] = cheapest
        return self._cheapest[budget_bytes]

    def lowest(self, plain: Choice) -> Choice:
        """Of least true peak: all blocks as small as can be, or one with twins.

        Args:
            plain: A choice without offload; its units go to far memory where they can,
                those of chains one by one.
        """
        moved = {
            self._late.get(call.call, call): part
            for unit, policy in plain.items()
            for call, part in unit.by_call(policy)
        }
        choices = (self._paths[-1].after(0), moved)
        return min(choices, key=self._simulator.true_peak_bytes)


class _Path:
    """Choices from the smallest one on, each one move faster.

    Args:
        simulator: Of the step.
        hulls: Options of each block, that which frees most first.
    """

    def __init__(
        self, simulator: Simulator, hulls: Sequence[Sequence[_Option]]
    ) -> None:
        self._simulator = simulator
        self._hulls = hulls
        by_gain = sorted(
            (-_gain(*hull[k : k + 2]), b, k + 1)
            for b, hull in enumerate(hulls)
            for k in range(len(hull) - 1)
        )
        self._moves = [(b, k) for _, b, k in by_gain]

    def after(self, number: int) -> Choice:
        """The choice after so many moves."""
        places = [0] * len(self._hulls)
        for block, place in self._moves[:number]:
            places[block] = place
        options = (hull[k] for hull, k in zip(self._hulls, places, strict=True))
        return dict(o.chosen for o in options if o.chosen is not None)

    def cheapest(self, budget_bytes: int) -> Choice | None:
        """The last choice found whose true peak is within a budget; None if none is."""
        first = self.after(0)
        peak_bytes = self._simulator.true_peak_bytes(first)
        if peak_bytes > budget_bytes:
            return None
        added_bytes = peak_bytes - self._simulator.peak_bytes(first)
        fits, fails = 0, len(self._moves) + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            simulated_bytes = self._simulator.peak_bytes(self.after(middle))
            if simulated_bytes + added_bytes <= budget_bytes:
                fits = middle
            else:
                fails = middle
        for number in range(fits, max(fits - _MOST_REPLAYS, 0), -1):
            choice = self.after(number)
            if self._simulator.true_peak_bytes(choice) <= budget_bytes:
                return choice
        return first


def _options(rules: Rules, block: Unit, twins: Sequence[FarUnit]) -> Iterator[_Option]:
    plain = rules.curves.get(block)
    yield _Option(0, 0.0, None)
    if plain is not None:
        yield from _points(block, plain)
    for twin in twins:
        curve = _far_curve(rules, block, twin)
        for option in () if curve is None else _points(twin, curve):
            assert option.chosen is not None
            results_bytes = twin.results_bytes(option.chosen[1])
            freed_bytes = option.freed_bytes + results_bytes
            yield option._replace(freed_bytes=freed_bytes)


def _far_curve(rules: Rules, block: Unit, twin: FarUnit) -> curves.UnitCurve | None:
    return far_curve(twin, rules.curves.get(block), rules.front_of(block))


def _points(unit: Unit, curve: curves.UnitCurve) -> Iterator[_Option]:
    points = zip(curve.points.freed_bytes, curve.policies, strict=True)
    for freed_bytes, policy in points:
        ms = curves.recompute_ms(unit, policy)
        yield _Option(freed_bytes, ms, (unit, policy))


def _hull(options: Iterator[_Option]) -> list[_Option]:
    """The lower convex hull, that which frees most first."""
    hull: list[_Option] = []
    for option in sorted(options, key=lambda o: (-o.freed_bytes, o.ms)):
        if hull and option.ms >= hull[-1].ms:
            continue
        while len(hull) > 1 and _gain(*hull[-2:]) <= _gain(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _gain(one: _Option, other: _Option) -> float:
    """Time saved for each byte that the other option frees less."""
    return (one.ms - other.ms) / max(one.freed_bytes - other.freed_bytes, 1)
