"""AC units, their curves and what they do to memory: the numbers of the main MILP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakpoint:
    """One point of a unit's trade-off curve.

    Attributes:
        ratio: Share of the unit's activation memory that is recomputed.
        freed_bytes: What that frees between the unit's forward and its backward.
        recompute_ms: What that takes,
        waits_ms: and what of it is no compute, but waiting for copies.
        far_bytes: What the unit then has in far memory.
    """

    ratio: float
    freed_bytes: int
    recompute_ms: float
    waits_ms: float = 0.0
    far_bytes: int = 0

    @property
    def rerun_ms(self) -> float:
        """What of it is compute."""
        return max(0.0, self.recompute_ms - self.waits_ms)


class Between(NamedTuple):
    """A point that lies between two neighbours of a curve's selected points.

    What it does to memory is taken to lie between what these two do.

    Attributes:
        point: Index of the neighbour that frees less.
        share: Place between them: 0 at that one, 1 at the next one.
        recompute_ms: What the point takes.
    """

    point: int
    share: float
    recompute_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A candidate for an AC unit.

    Attributes:
        fqn: The module.
        parent: Index of the nearest candidate around it, if there is one.
        points: Its trade-off curve, in the order of the curve.
        freed_from: First position at which memory is freed.
        freed_until: First position at which it is not freed any more.
        working: Pairs of a position and the bytes that each point adds there to the
            live memory (negative ones take away): the working set of the rerun.
        between: Further points of the curve, for bounds only.
        mixed_from_ms: No point that takes less time is missing; slower ones may be,
            and then lie above the lower convex hull of `points`.
    """

    fqn: str
    parent: int | None
    points: tuple[Breakpoint, ...]
    freed_from: int
    freed_until: int
    working: tuple[tuple[int, tuple[int, ...]], ...]
    between: tuple[Between, ...] = ()
    mixed_from_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError(f"`points` of {self.fqn!r} must not be empty.")
        for point in self.points:
            if not math.isfinite(point.recompute_ms) or point.recompute_ms < 0.0:
                raise ValueError(
                    f"`recompute_ms` of {self.fqn!r} must be finite and not negative,"
                    f" got {point.recompute_ms}."
                )
        for between in self.between:
            if not 0 <= between.point < len(self.points) - 1:
                raise ValueError(
                    f"`between` of {self.fqn!r} must have indices below"
                    f" {len(self.points) - 1}, got {between.point}."
                )
        if {*map(len, map(itemgetter(1), self.working))} <= {len(self.points)}:
            return
        for position, extras in self.working:
            if len(extras) != len(self.points):
                raise ValueError(
                    f"`working` of {self.fqn!r} at position {position} must have one"
                    f" number for each of {len(self.points)} points, got {len(extras)}."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Memory that stays alive while any of a few units holds it: a shared argument.

    Attributes:
        nbytes: Its size.
        held_from: First position at which it is alive only if a unit holds it.
        holders: Pairs of a unit and the first position at which that one, under AC,
            holds it no more.
        freed_by: Units in one another whose points count the memory as freed, each
            with the first position at which each of its points does. The hold then
            makes up for that, and counts only from where one of them is chosen too.
            Empty if nobody counts it.
        kept_by: Units in one another whose points keep the memory themselves, each
            with the first position at which each of its points does so no more. Such
            a point counts the memory, and so does every holder: where one of both is
            chosen, the hold takes it off once. Empty, or `freed_by` is.
    """

    nbytes: int
    held_from: int
    holders: tuple[tuple[int, int], ...]
    freed_by: tuple[tuple[int, tuple[int, ...]], ...] = ()
    kept_by: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def added_bytes(self) -> int:
        """Bytes that the hold adds to the live memory."""
        return -self.nbytes if self.kept_by else self.nbytes

    def stretches(self) -> list[tuple[int, int]]:
        """Stretches of positions, as (start, stop), in which the hold is constant."""
        bounds = {end for _, end in self.holders}
        last = max(bounds, default=self.held_from)
        if self.kept_by:
            untils = {q for _, ends in self.kept_by for q in ends}
            last = min(last, max(untils))
            bounds = {q for q in {self.held_from} | bounds | untils if q <= last}
            return list(pairwise(sorted(bounds)))
        starts = {q for _, froms in self.freed_by for q in froms}
        bounds |= {q for q in starts or {self.held_from} if q < last}
        return list(pairwise(sorted(bounds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SacProblem:
    """Which units to put under AC, and how much each of them recomputes.

    Attributes:
        units: The candidates, in any order.
        base_bytes: Live memory at each position if nothing is recomputed. Positions
            are instants of the step in order: forward, backward, optimizer.
        budget_bytes: Cap on the live memory at every position.
        holds: What several units hold together.
    """

    units: tuple[Unit, ...]
    base_bytes: tuple[int, ...]
    budget_bytes: int
    holds: tuple[Hold, ...] = ()

    def __post_init__(self) -> None:
        if not self.base_bytes:
            raise ValueError("`base_bytes` must name at least one position.")
        num_positions = len(self.base_bytes)
        for unit in self.units:
            if not 0 <= unit.freed_from <= unit.freed_until <= num_positions:
                raise ValueError(
                    f"`freed_from` and `freed_until` of {unit.fqn!r} must be in order"
                    f" and at most {num_positions}, got {unit.freed_from} and"
                    f" {unit.freed_until}."
                )
            positions = [q for q, _ in unit.working] or [0]
            if min(positions) < 0 or max(positions) >= num_positions:
                raise ValueError(
                    f"`working` of {unit.fqn!r} must name positions below"
                    f" {num_positions}."
                )
        for hold in self.holds:
            for u, held_until in hold.holders:
                if not 0 <= u < len(self.units):
                    raise ValueError(
                        f"`holders` must name units below {len(self.units)}, got {u}."
                    )
                if not 0 <= hold.held_from <= held_until <= num_positions:
                    raise ValueError(
                        "`held_from` and the ends of `holders` must be in order and at"
                        f" most {num_positions}, got {hold.held_from} and {held_until}."
                    )
        _check_tree(self.units)
        for hold in self.holds:
            if hold.freed_by and hold.kept_by:
                raise ValueError("A hold has `freed_by` or `kept_by`, not both.")
            _check_points(self, hold, "freed_by", hold.freed_by)
            _check_points(self, hold, "kept_by", hold.kept_by)

    def ancestry(self, index: int) -> list[int]:
        """A unit and the candidates around it, innermost first."""
        return _ancestry(self.units, index)

    def paths(self) -> list[tuple[int, ...]]:
        """Units from each innermost candidate outwards; on each, one may be chosen."""
        parents = {unit.parent for unit in self.units}
        return [
            tuple(_ancestry(self.units, u))
            for u in range(len(self.units))
            if u not in parents
        ]


def live_bytes(
    problem: SacProblem, weights: Sequence[Sequence[float]]
) -> tuple[float, ...]:
    """Live memory at each position; exact integers if the weights are integers.

    Args:
        problem: The units and the memory without them.
        weights: Of each point of each unit; all 0 for a unit that is not chosen.
    """
    change: list[float] = [0] * (len(problem.base_bytes) + 1)
    extra: list[float] = [0] * len(problem.base_bytes)
    for unit, shares in zip(problem.units, weights, strict=True):
        if not any(shares):
            continue
        freed = _mix([point.freed_bytes for point in unit.points], shares)
        change[unit.freed_from] -= freed
        change[unit.freed_until] += freed
        for position, extras in unit.working:
            extra[position] += _mix(extras, shares)
    for hold in problem.holds:
        if hold.freed_by:
            _hold_freed(hold, weights, change)
            continue
        if hold.kept_by:
            _take_off_once(hold, weights, change)
            continue
        held: float = 0
        for u, held_until in sorted(hold.holders, key=lambda h: -h[1]):
            share = sum(weights[u])
            if share > held:  # all positions before are held to that share
                change[hold.held_from] += hold.nbytes * (share - held)
                change[held_until] -= hold.nbytes * (share - held)
                held = share
    columns = zip(problem.base_bytes, accumulate(change[:-1]), extra, strict=True)
    return tuple(base + moved + added for base, moved, added in columns)


def _hold_freed(
    hold: Hold, weights: Sequence[Sequence[float]], change: list[float]
) -> None:
    """Add what is held although it was counted as freed."""
    for start, stop in hold.stretches():
        freed = sum(
            share
            for u, froms in hold.freed_by
            for share, first in zip(weights[u], froms, strict=True)
            if first <= start
        )
        held = max(sum(weights[u]) for u, end in hold.holders if end > start)
        both = max(0, freed + held - 1)  # mixed points overlap as little as they can
        change[start] += hold.nbytes * both
        change[stop] -= hold.nbytes * both


def _take_off_once(
    hold: Hold, weights: Sequence[Sequence[float]], change: list[float]
) -> None:
    """Take off what is both held and kept, and so counted twice."""
    for start, stop in hold.stretches():
        kept = sum(
            share
            for u, untils in hold.kept_by
            for share, until in zip(weights[u], untils, strict=True)
            if until > start
        )
        held = sum(sum(weights[u]) for u, end in hold.holders if end > start)
        both = min(kept, held, 1)  # mixed points overlap as much as they can
        change[start] -= hold.nbytes * both
        change[stop] += hold.nbytes * both


def total_ms(problem: SacProblem, weights: Sequence[Sequence[float]]) -> float:
    """Recompute time of all units."""
    return math.fsum(
        share * point.recompute_ms
        for unit, shares in zip(problem.units, weights, strict=True)
        for point, share in zip(unit.points, shares, strict=True)
    )


def _mix(values: Sequence[int], shares: Sequence[float]) -> float:
    return sum(v * share for v, share in zip(values, shares, strict=True) if share)


def _ancestry(units: Sequence[Unit], index: int) -> list[int]:
    path: list[int] = []
    ancestor: int | None = index
    while ancestor is not None:
        path.append(ancestor)
        ancestor = units[ancestor].parent
    return path


def _check_points(
    problem: SacProblem,
    hold: Hold,
    name: str,
    units: tuple[tuple[int, tuple[int, ...]], ...],
) -> None:
    num_positions = len(problem.base_bytes)
    for u, positions in units:
        if not 0 <= u < len(problem.units):
            raise ValueError(
                f"`{name}` must name units below {len(problem.units)}, got {u}."
            )
        unit = problem.units[u]
        if len(positions) != len(unit.points):
            raise ValueError(
                f"`{name}` must have one position for each of {len(unit.points)}"
                f" points of {unit.fqn!r}, got {len(positions)}."
            )
        if not all(hold.held_from <= q <= num_positions for q in positions):
            raise ValueError(
                f"The positions of `{name}` must lie in {hold.held_from} to"
                f" {num_positions}, got {positions} for {unit.fqn!r}."
            )
    inside = {u for u, _ in units}
    if inside and not any(inside <= set(problem.ancestry(u)) for u in inside):
        names = sorted(problem.units[u].fqn for u in inside)
        raise ValueError(f"Units of `{name}` must lie in one another, got {names}.")


def _check_tree(units: Sequence[Unit]) -> None:
    settled: set[int] = set()
    for index, unit in enumerate(units):
        path: list[int] = []
        ancestor: int | None = index
        while ancestor is not None and ancestor not in settled:
            if not 0 <= ancestor < len(units):
                raise ValueError(
                    f"`parent` of {units[path[-1]].fqn!r} must be an index below"
                    f" {len(units)}, got {ancestor}."
                )
            if ancestor in path:
                raise ValueError(f"{unit.fqn!r} lies inside itself: check `parent`.")
            path.append(ancestor)
            ancestor = units[ancestor].parent
        settled.update(path)
