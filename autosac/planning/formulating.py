"""From a tape and its candidate units to the MILP's numbers.

The step is cut at every tick where a candidate begins or ends to matter. Between
two cuts lies a *position*; its base is the most bytes alive there when nothing is
recomputed. What a unit does under one point of its curve is simulated on its own,
and split into a constant (what it frees between its forward and its backward) and
what it changes at the positions of its own forward, rerun and backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autosac.candidates.curves import UnitCurve
from autosac.candidates.holding import Holders
from autosac.candidates.policies import Policy
from autosac.candidates.units import Unit
from autosac.simulation.simulating import Simulator
from autosac.tracing.tape import IntArray
from solvers import curve, sac


@dataclass(frozen=True, kw_only=True, eq=False)
class Formulation:
    """Candidate units in numbers.

    Attributes:
        units: The candidates, index by index those of the problem.
        curves: Their curves.
        solver_units: The solver's record of each, over the exact points.
        base_bytes: Most bytes alive at each position without recomputation.
        holds: Arguments that several units hold together, and those that one unit
            holds and another one would have freed, or keeps as well.
        edges: First tick of every position.
    """

    units: tuple[Unit, ...]
    curves: tuple[UnitCurve, ...]
    solver_units: tuple[sac.Unit, ...]
    base_bytes: tuple[int, ...]
    holds: tuple[sac.Hold, ...]
    edges: IntArray

    def fitted(self, num_segments: int) -> Formulation:
        """The same with every curve fitted by few linear segments (pwlf).

        The breakpoints are points of the exact curve, lifted in time so that the fit
        never understates a point in between.
        """
        fits = {
            id(made): curve.fit(made.points, num_segments=num_segments)
            for made in self.curves
        }
        found = [(made.points, fits[id(made)]) for made in self.curves]
        kept = [
            [exact.freed_bytes.index(nbytes) for nbytes in fit.freed_bytes]
            for exact, fit in found
        ]
        return replace(
            self,
            solver_units=tuple(
                _thinned(unit, own, fit)
                for unit, own, (_, fit) in zip(
                    self.solver_units, kept, found, strict=True
                )
            ),
            holds=tuple(
                replace(
                    hold,
                    freed_by=_of_points(hold.freed_by, kept),
                    kept_by=_of_points(hold.kept_by, kept),
                )
                for hold in self.holds
            ),
        )

    def problem(self, budget_bytes: int) -> sac.SacProblem:
        """The MILP over exact points for one budget."""
        return sac.SacProblem(
            units=self.solver_units,
            base_bytes=self.base_bytes,
            budget_bytes=budget_bytes,
            holds=self.holds,
        )


def formulate(
    simulator: Simulator,
    units: Sequence[Unit],
    curves: Sequence[UnitCurve],
    *,
    live: IntArray | None = None,
    cuts: Iterable[int] = (),
) -> Formulation:
    """Work out the MILP's coefficients for all candidates.

    Args:
        simulator: Of the tape.
        units: The candidates in forward order, those around others first.
        curves: Their curves.
        live: Bytes alive after every tick without recomputation; None for those of
            the tape.
        cuts: Ticks at which positions must begin besides those of the candidates.
    """
    if live is None:
        live = _live_by_tick(simulator)
    cuts = {0, *cuts}
    for unit in units:
        cuts |= {
            unit.call.enter,
            unit.call.exit + 1,
            unit.trigger - 1,
            unit.last_use + 1,
        }
    holders = Holders(simulator, units, curves)
    cuts |= holders.cuts()
    for unit, made in zip(units, curves, strict=True):
        cuts |= _cuts_elsewhere(simulator, holders, unit, made)
    edges = np.array(sorted(cut for cut in cuts if cut < len(live)), dtype=np.int64)
    base = np.maximum.reduceat(live, edges)
    stops = np.append(edges, len(live))
    last_exit = max((unit.call.exit for unit in units), default=0)
    step = _Step(simulator, holders, live, edges, stops, base, last_exit)
    known: dict[_Sight, _Seen] = {}
    num_alike = Counter(unit.key for unit in units)
    records = []
    for unit, made, parent in zip(units, curves, _parents(units), strict=True):
        if num_alike[unit.key] == 1:
            record = _solver_unit(step, unit, made, _changes_of(step, unit, made))
        else:
            record = _moved_or_new(step, unit, made, known)
        records.append(replace(record, fqn=unit.fqn, parent=parent))
    return Formulation(
        units=tuple(units),
        curves=tuple(curves),
        solver_units=tuple(records),
        base_bytes=tuple(base.tolist()),
        holds=holders.holds(edges),
        edges=edges,
    )


def _of_points(
    by_point: tuple[tuple[int, tuple[int, ...]], ...], kept: Sequence[Sequence[int]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """What a hold says of the points that each unit is left with."""
    return tuple((u, tuple(of[k] for k in kept[u])) for u, of in by_point)


def _thinned(unit: sac.Unit, kept: Sequence[int], fit: curve.FittedCurve) -> sac.Unit:
    """A unit with the breakpoints of its fitted curve only."""
    working = [(q, tuple(extras[k] for k in kept)) for q, extras in unit.working]
    return replace(
        unit,
        points=tuple(
            replace(unit.points[k], recompute_ms=ms)
            for k, ms in zip(kept, fit.recompute_ms, strict=True)
        ),
        working=tuple(working),
    )


def _live_by_tick(simulator: Simulator) -> IntArray:
    """Bytes alive after every tick when nothing is recomputed."""
    timeline = simulator.baseline
    ticks = timeline.keys // simulator.span
    change = np.zeros(simulator.tape.num_ticks + 1, dtype=np.int64)
    np.add.at(change, ticks, np.diff(timeline.live_bytes, prepend=0))
    return np.cumsum(change)


def _parents(units: Sequence[Unit]) -> list[int | None]:
    """Nearest enclosing candidate of each unit; units are in forward order."""
    parents: list[int | None] = []
    open_units: list[int] = []
    for i, unit in enumerate(units):
        while open_units and units[open_units[-1]].call.exit < unit.call.enter:
            open_units.pop()
        parents.append(open_units[-1] if open_units else None)
        open_units.append(i)
    return parents


def _changes(
    simulator: Simulator, holders: Holders, unit: Unit, policy: Policy
) -> tuple[IntArray, IntArray]:
    """Keys and sizes of what changes in memory if only this unit is rerun."""
    span = simulator.span
    effect = simulator.effect(unit, policy)
    held = dict(zip(effect.held.tolist(), effect.held_until.tolist(), strict=True))
    saved = holders.saved_without(unit.saved)
    affected = set(held) | set(saved)
    affected -= holders.shared.keys() & set(unit.call.inputs)
    freed = holders.freed
    storages = np.array(list(affected), dtype=np.int64)
    without = [saved.get(storage, freed[storage]) for storage in affected]
    until = [held.get(storage, 0) for storage in affected]
    before = np.array([freed[storage] for storage in affected], np.int64) * span
    after = np.maximum(np.array(without, np.int64) * span, np.array(until, np.int64))
    changed = before != after
    before, after = before[changed], after[changed]
    nbytes = simulator.tape.nbytes[storages[changed]]
    keys = np.array([before, after]).ravel(order="F")  # both of each storage in turn
    deltas = np.array([nbytes, -nbytes]).ravel(order="F")
    pieces = (effect.copies, effect.works)
    all_keys = np.concatenate([keys, *(of[:, :2].ravel(order="F") for of in pieces)])
    sizes = (np.concatenate([of[:, 2], -of[:, 2]]) for of in pieces)
    all_deltas = np.concatenate([deltas, *sizes])
    order = np.argsort(all_keys, kind="stable")
    return all_keys[order], all_deltas[order]


def _cuts_elsewhere(
    simulator: Simulator, holders: Holders, unit: Unit, made: UnitCurve
) -> set[int]:
    """Ticks at which a unit begins or ends to free something while it does not run.

    Such as where autocast drops its copies of weights. What units change in a position
    can be added up where it is the same all along.
    """
    found: set[int] = set()
    for policy in {made.policies[0]: None, made.policies[-1]: None}:
        keys, _ = _changes(simulator, holders, unit, policy)
        ticks = -(-keys // simulator.span)
        runs = (unit.call.enter <= ticks) & (ticks <= unit.call.exit + 1)
        runs |= (unit.trigger - 1 <= ticks) & (ticks <= unit.last_use + 1)
        found.update(ticks[~runs].tolist())
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    """What all units have in common.

    Attributes:
        simulator: Of the tape.
        holders: Who keeps which storage.
        live: Bytes alive after every tick when nothing is recomputed.
        edges: First tick of every position,
        stops: and the number of ticks besides.
        base: Most of these bytes at every position.
        last_exit: Tick at which the last unit has run.
    """

    simulator: Simulator
    holders: Holders
    live: IntArray
    edges: IntArray
    stops: IntArray
    base: IntArray
    last_exit: int

    def places(self, unit: Unit) -> list[int]:
        """Positions at which a unit begins, has run, is about to be rerun, is done."""
        ticks = [unit.call.enter, unit.call.exit + 1, unit.trigger - 1]
        found = np.searchsorted(self.edges, [*ticks, unit.last_use + 1]).tolist()
        return [found[0], found[1], max(found[1], found[2]), found[3]]


@dataclass(frozen=True, slots=True)
class _Sight:
    """Equal for units of which one can be formulated by moving the other.

    They behave alike, memory rises and falls alike around them, and so does what the
    first and the last point of their curves change. Changes after all units have run
    (autocast lets go of its copies of the weights then) stay where they are.

    Attributes:
        key: The unit's.
        early: Positions after its forward at which these still change anything,
        late: and those before its rerun.
        cuts: Positions in between that begin with another change.
        seen: What is to be seen there.
    """

    key: Hashable
    early: int
    late: int
    cuts: tuple[int, ...]
    seen: tuple[bytes, ...]


class _Seen(NamedTuple):
    """What is known of a unit that others may look like.

    Attributes:
        changes: What it changes from its first position to its last.
        places: See `_Step.places`.
    """

    changes: IntArray
    places: list[int]


def _sight(step: _Step, unit: Unit, made: UnitCurve) -> _Sight:
    first, freed_from, freed_until, last = step.places(unit)
    span = step.simulator.span
    settled, unsettled = freed_from, freed_until
    deaths = _deaths_between(step, unit)
    cuts = {cut for place in deaths for cut in (place, place + 1)}
    seen: list[bytes] = [repr(deaths).encode()]
    for policy in {made.policies[0]: None, made.policies[-1]: None}:
        keys, deltas = _changes(step.simulator, step.holders, unit, policy)
        late = keys >= (unit.trigger - 1) * span
        between = ~late & (keys > step.last_exit * span)
        early = ~late & ~between
        moved = keys - np.where(late, unit.trigger, unit.call.enter) * span
        seen += [moved[~between].tobytes(), deltas[~between].tobytes()]
        if early.any():
            tick = -(-int(keys[early][-1]) // span)
            settled = max(settled, int(np.searchsorted(step.edges, tick)))
        if late.any():
            tick = int(keys[late][0]) // span
            before = int(np.searchsorted(step.edges, tick, side="right")) - 1
            unsettled = min(unsettled, before)
        at = np.searchsorted(step.edges, keys[between] // span, side="right") - 1
        if (deltas[between] <= 0).all() and deaths.keys() >= set(at.tolist()):
            freed = np.bincount(at, deltas[between], len(step.edges))
            seen.append(freed[list(deaths)].tobytes())
        else:
            seen += [keys[between].tobytes(), deltas[between].tobytes()]
            cuts |= {*at.tolist(), *(at + 1).tolist()}
    settled = min(settled, freed_until)
    unsettled = max(unsettled, settled)
    stops = step.stops
    for low, high, origin in (
        (first, settled, unit.call.enter),
        (unsettled, last, unit.trigger),
    ):
        around = step.live[stops[low] : stops[high]]
        seen.append((stops[low : high + 1] - origin).tobytes())
        seen.append((around - (around[0] if len(around) else 0)).tobytes())
    return _Sight(
        key=unit.key,
        early=settled - freed_from,
        late=freed_until - unsettled,
        cuts=tuple(sorted(cuts)),
        seen=tuple(seen),
    )


def _deaths_between(step: _Step, unit: Unit) -> dict[int, tuple[object, ...]]:
    """Positions after all units have run where results of a unit may be freed.

    Returns:
        By position what says, together with the sum of what is freed there, how much
        lower memory is: which results these are; most bytes alive before any of them
        may be freed and after all are, if in between no more than before are, and else
        when each may be freed.
    """
    results = np.array([s for g in unit.groups for s in g.storages], dtype=np.int64)
    died = step.simulator.tape.died[results]
    is_between = (died > step.last_exit) & (died < unit.trigger - 1)
    at = np.searchsorted(step.edges, died, side="right") - 1
    found: dict[int, tuple[object, ...]] = {}
    for place in np.unique(at[is_between]).tolist():
        own = np.flatnonzero(is_between & (at == place))
        first, last = int(died[own].min()), int(died[own].max())
        before = step.live[step.stops[place] : first].max(initial=0)
        if step.live[first:last].max(initial=0) <= before:
            after = step.live[last : step.stops[place + 1]].max()
            found[place] = (own.tobytes(), int(before), int(after))
        else:
            found[place] = (own.tobytes(), died[own].tobytes())
    return found


def _moved_or_new(
    step: _Step, unit: Unit, made: UnitCurve, known: dict[_Sight, _Seen]
) -> sac.Unit:
    """The record of a unit, by moving what one like it changes if that is known."""
    sight, places = _sight(step, unit, made), step.places(unit)
    twin = known.get(sight)
    changes = None if twin is None else _moved(sight, twin, places)
    if changes is None:
        changes = _changes_of(step, unit, made)
        known[sight] = _Seen(changes.copy(), places)
    return _solver_unit(step, unit, made, changes)


def _moved(sight: _Sight, twin: _Seen, places: Sequence[int]) -> IntArray | None:
    """What a unit changes that looks like its twin; None if it is not only moved.

    Between its forward and its rerun it changes the same from one cut to the next.
    """
    own, others = (
        [of[1] + sight.early, *sight.cuts, of[2] - sight.late]
        for of in (places, twin.places)
    )
    parts = [twin.changes[: others[0] - twin.places[0]]]
    stretches = zip(pairwise(own), pairwise(others), strict=True)
    for (start, stop), (other_start, other_stop) in stretches:
        if stop < start or other_stop < other_start:
            return None  # a cut is not in between
        if stop > start and other_stop == other_start:
            return None  # what it frees there is not to be seen
        alike = twin.changes[other_start - twin.places[0] : other_stop - twin.places[0]]
        if (alike != alike[:1]).any():
            return None  # some point changes more than the first and the last one do
        parts.append(np.repeat(alike[:1], stop - start, axis=0))
    parts.append(twin.changes[others[-1] - twin.places[0] :])
    return np.concatenate(parts)


def _changes_of(step: _Step, unit: Unit, made: UnitCurve) -> IntArray:
    """Change of the most bytes alive from a unit's first position on, by point."""
    first, _, _, last = step.places(unit)
    by_point = [
        _by_position(
            step,
            range(first, last),
            *_changes(step.simulator, step.holders, unit, policy),
        )
        for policy in made.policies
    ]
    return np.stack(by_point, axis=1)


def _solver_unit(
    step: _Step, unit: Unit, made: UnitCurve, changes: IntArray
) -> sac.Unit:
    first, freed_from, freed_until, _ = step.places(unit)
    # What a unit frees is what it frees at most positions between its forward and
    # its backward; it works at those where it changes anything else.
    between = changes[freed_from - first : freed_until - first]
    freed = np.array([-_most_frequent(column) for column in between.T])
    between += freed
    working = np.flatnonzero(changes.any(axis=1))
    return sac.Unit(
        fqn=unit.fqn,
        parent=None,
        points=tuple(
            sac.Breakpoint(ratio=ratio, freed_bytes=nbytes, recompute_ms=ms)
            for ratio, nbytes, ms in zip(
                made.ratios, freed.tolist(), made.points.recompute_ms, strict=True
            )
        ),
        freed_from=freed_from,
        freed_until=freed_until,
        working=tuple((first + int(q), tuple(changes[q].tolist())) for q in working),
        between=_between(made) if made.is_selection else (),
        mixed_from_ms=made.complete_below_ms if made.is_selection else 0.0,
    )


def _between(made: UnitCurve) -> tuple[sac.Between, ...]:
    """Points that are known and not among those of the MILP."""
    freed = made.points.freed_bytes
    most = freed[-1] + min(nbytes for nbytes, _, _ in made.finer)
    found = []
    for nbytes, time_ms, _ in made.finer:
        at = bisect_right(freed, most - nbytes) - 1
        if freed[at] != most - nbytes:
            share = (most - nbytes - freed[at]) / (freed[at + 1] - freed[at])
            found.append(sac.Between(index=at, share=share, recompute_ms=time_ms))
    return tuple(found)


def _most_frequent(values: IntArray) -> int:
    if not len(values):
        return 0
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])


def _by_position(
    step: _Step, positions: range, keys: IntArray, deltas: IntArray
) -> IntArray:
    """Change of the most bytes alive at each position, given all changes in time.

    ``level[i]`` is what the changes before ``keys[i]`` come to.
    """
    live, span = step.live, step.simulator.span
    level = np.concatenate([[0], np.cumsum(deltas)])
    stops = step.stops[positions.start : positions.stop + 1]
    before = keys.searchsorted(stops[:-1] * span, side="right")
    after = keys.searchsorted(stops[1:] * span, side="left")
    change: IntArray = level[before]
    changing = np.flatnonzero(before != after)
    if not len(changing):
        return change
    firsts, lengths = stops[changing], stops[changing + 1] - stops[changing]
    starts = np.cumsum(lengths) - lengths
    ticks = np.repeat(firsts - starts, lengths) + np.arange(lengths.sum())
    alive = live[ticks] + level[keys.searchsorted(ticks * span, side="right")]
    most = np.maximum.reduceat(alive, starts)
    # Changes between two ticks (a rerun) come on top of the earlier tick.
    at = keys // span
    place = firsts.searchsorted(at, side="right") - 1
    inside = np.flatnonzero((place >= 0) & (at < (firsts + lengths)[place]))
    np.maximum.at(most, place[inside], live[at[inside]] + level[inside + 1])
    change[changing] = most - step.base[positions.start : positions.stop][changing]
    return change
