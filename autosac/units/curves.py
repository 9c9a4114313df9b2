"""Trade-off curves: what it costs in time to keep less of an AC unit."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autosac.solvers.curves import curve, fitting, knapsack
from autosac.solvers.curves.save_problem import SaveProblem
from autosac.units.chains import Block, Chain
from autosac.units.policies import (
    RERUN,
    SAVE,
    SKIP,
    Policy,
)
from autosac.units.unit import Unit

_NUM_POINTS = (24, 32, 48, 64, 128, 256, 512, 1024)  # of a curve
_NUM_SHARES = 4  # of a chain that are looked at, 1 among them


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCurve:
    """Points of a unit's trade-off curve, and the policies behind them.

    Attributes:
        points: Pareto points; least freed (and least recomputed) first. Of a curve of
            many points these are the vertices of its lower convex hull, and points
            evenly spaced between them.
        policies: Policy of each point.
        ratios: Share of the unit's activation memory that each point recomputes.
        front: Every Pareto point that is known, the most saved bytes first; None if
            these are all.
        is_selection: There are more Pareto points than `points`.
        complete_below_ms: No faster Pareto point is missing in `front`.
    """

    points: curve.TradeoffCurve
    policies: tuple[Policy, ...]
    ratios: tuple[float, ...]
    front: knapsack.Front | None = None
    is_selection: bool = False
    complete_below_ms: float = math.inf

    @property
    def most_bytes(self) -> int:
        """What freed bytes are counted from: a point frees these less what it saves."""
        least = 0 if self.front is None else int(self.front.saved_bytes[-1])
        return self.points.freed_bytes[-1] + least

    @property
    def known_points(self) -> curve.TradeoffCurve:
        """Every Pareto point that is known."""
        if self.front is None:
            return self.points
        freed = (self.most_bytes - self.front.saved_bytes).tolist()
        known = dict(zip(freed, self.front.recompute_ms.tolist(), strict=True))
        points = zip(self.points.freed_bytes, self.points.recompute_ms, strict=True)
        return curve.pareto({**known, **dict(points)}.items())

    def fit(self, num_segments: int) -> curve.FittedCurve:
        """The curve in few linear segments, whose breakpoints are of `points`.

        Equal curves are fitted once; no known point is understated.
        """
        above = self.known_points if self.is_selection else None
        return fitting.fit(self.points, num_segments=num_segments, above=above)

    def at_breakpoints(self, num_segments: int) -> UnitCurve:
        """Only the points at breakpoints of fits of 1, 2, ... segments.

        Those of fewer segments are among those of more.
        """
        fits = (self.fit(number) for number in range(1, num_segments + 1))
        freed = {nbytes for fitted in fits for nbytes in fitted.freed_bytes}
        kept = [
            k for k, nbytes in enumerate(self.points.freed_bytes) if nbytes in freed
        ]
        return replace(
            self,
            points=curve.TradeoffCurve(
                freed_bytes=tuple(self.points.freed_bytes[k] for k in kept),
                recompute_ms=tuple(self.points.recompute_ms[k] for k in kept),
            ),
            policies=tuple(self.policies[k] for k in kept),
            ratios=tuple(self.ratios[k] for k in kept),
            is_selection=self.is_selection or len(kept) < len(self.ratios),
        )

    def between(self, shares: Sequence[float]) -> Policy:
        """The fastest known point that frees what a mixture of points frees.

        Args:
            shares: Of each point; they add up to 1.
        """
        freed = self.points.freed_bytes
        wanted = sum(map(operator.mul, shares, freed)) - 1.0  # rounding
        if self.front is None:
            return self.policies[min(bisect_left(freed, wanted), len(freed) - 1)]
        most = freed[-1] + int(self.front.saved_bytes[-1])
        return policy_of(self.front, first_within(self.front, most - wanted))


def save_problem(unit: Unit) -> SaveProblem:
    """The choice of what to save in a unit, for the solver."""
    groups = unit.groups

    def where(flag: str) -> frozenset[int]:
        return frozenset(i for i, group in enumerate(groups) if getattr(group, flag))

    return SaveProblem(
        saved_bytes=tuple(group.saved_bytes for group in groups),
        runtime_ms=tuple(group.runtime_ms for group in groups),
        inputs=tuple(group.inputs for group in groups),
        needed=where("needed"),
        pinned=where("pinned"),
        unsavable=where("unsavable"),
        fixed_ms=unit.followed_ms,
    )


def affordable_points(sizes: Sequence[int], most_in_all: int) -> int:
    """How many points of each unit the MILP can have.

    All of them in a small model; where layers are many, few points of each are enough
    for a plan close to the bound.

    Args:
        sizes: Number of Pareto points of every candidate unit.
        most_in_all: How many points all units may have.
    """
    return max(
        (
            most
            for most in _NUM_POINTS
            if sum(min(size, most) for size in sizes) <= most_in_all
        ),
        default=_NUM_POINTS[0],
    )


def trade_off(
    unit: Unit, front: knapsack.Front | None = None, *, num_points: int = 16
) -> UnitCurve | None:
    """Points of a unit's curve; None if it frees nothing.

    Args:
        unit: The unit; no chain or nest.
        front: Its Pareto points, or those of a unit that behaves alike; None to solve
            for them.
        num_points: See `knapsack.Front.select`.
    """
    if front is None:
        front = knapsack.front(save_problem(unit))
    most = max(unit.activation_bytes, unit.sole_bytes, 1)
    front = front.within(most)
    if not len(front) or int(front.saved_bytes[-1]) == most:
        return None
    # Of all that are within, so that they have the hull's vertices of their own.
    chosen = front.select(num_points)
    freed = {most - int(front.saved_bytes[i]): i for i in chosen}
    exact = curve.pareto(
        (nbytes, knapsack.recompute_ms(front.problem, front.rerun[i]))
        for nbytes, i in freed.items()
    )
    return UnitCurve(
        points=exact,
        policies=tuple(policy_of(front, freed[n]) for n in exact.freed_bytes),
        ratios=tuple(min(1.0, nbytes / most) for nbytes in exact.freed_bytes),
        front=front,
        is_selection=not front.is_complete or len(front) > len(chosen),
        complete_below_ms=front.complete_below_ms,
    )


def policy_of(front: knapsack.Front, i: int) -> Policy:
    """The policy of a point of a front."""
    choices = np.where(front.saved[i], SAVE, np.where(front.rerun[i], RERUN, SKIP))
    return Policy("".join(choices.tolist()))


def first_within(front: knapsack.Front, most_bytes: float) -> int:
    """The fastest point of a front that saves so many bytes; else that of fewest."""
    first = int(np.searchsorted(-front.saved_bytes, -most_bytes))
    return min(first, len(front) - 1)


def chain_trade_off(
    chain: Chain, of_blocks: Sequence[UnitCurve | None]
) -> UnitCurve | None:
    """Points at which all blocks of a chain recompute about the same share.

    Args:
        chain: The chain.
        of_blocks: Curve of each block.

    Returns:
        The points that no other one beats; None if a block frees nothing by itself or
        cannot be run twice.
    """
    freed: dict[int, tuple[float, Policy]] = {}
    for k in range(_NUM_SHARES):
        parts = []
        for block, block_curve in zip(chain.blocks, of_blocks, strict=True):
            if block_curve is None:
                return None
            place = (len(block_curve.policies) - 1) * (k + 1) // _NUM_SHARES
            part = made_onward(block, block_curve.policies[place])
            if part is None:
                return None
            parts.append(part.choices)
        policy = Policy("".join(parts))
        nbytes = max(chain.sole_bytes - kept(chain, policy), 0)
        freed[nbytes] = (recompute_ms(chain, policy), policy)
    exact = curve.pareto((nbytes, ms) for nbytes, (ms, _) in freed.items())
    most = max(chain.sole_bytes, 1)
    return UnitCurve(
        points=exact,
        policies=tuple(freed[nbytes][1] for nbytes in exact.freed_bytes),
        ratios=tuple(min(1.0, nbytes / most) for nbytes in exact.freed_bytes),
    )


def made_onward(block: Block, policy: Policy) -> Policy | None:
    """A policy that also saves what must not run twice to make the block's output."""
    choices = list(policy.choices)
    for g, choice in enumerate(block.onward(policy)[: len(choices)]):
        if choice == RERUN and block.unit.groups[g].pinned:
            if block.unit.groups[g].unsavable:
                return None
            choices[g] = SAVE
    return Policy("".join(choices))


def kept(unit: Unit, policy: Policy) -> int:
    """Bytes that a unit keeps for backward under a policy, less what lives anyway."""
    return sum(
        group.saved_bytes
        for group, choice in zip(unit.groups, policy.choices, strict=True)
        if choice == SAVE
    )


def recompute_ms(unit: Unit, policy: Policy) -> float:
    """Time to follow and rerun a unit under a policy, and to wait for copies."""
    known_ms = unit.known_ms.get(policy)
    if known_ms is None:
        rerun = (
            group.runtime_ms
            for piece in unit.schedule(policy)
            for group, choice in zip(piece.groups, piece.choices, strict=True)
            if choice == RERUN
        )
        fixed_ms = unit.waits_ms(policy), unit.followed_ms
        known_ms = unit.known_ms[policy] = math.fsum([*fixed_ms, *rerun])
    return known_ms


def spell(saved: tuple[bool, ...], rerun: tuple[bool, ...]) -> str:
    """Choices of a policy from the flags of a solution."""
    flags = zip(saved, rerun, strict=True)
    return "".join(SAVE if kept else RERUN if again else SKIP for kept, again in flags)
