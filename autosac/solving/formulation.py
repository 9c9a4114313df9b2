"""From a tape and its candidate units to the MILP's numbers.

The step is cut at every tick where a candidate begins or ends to matter. Between
two cuts lies a *position*; its base is the most bytes alive there when nothing is
recomputed. What a unit does under one point of its curve is simulated on its own,
and split into a constant (what it frees between its forward and its backward) and
what it changes at the positions of its own forward, rerun and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autosac.simulation.simulator import Simulator
from autosac.solvers import sac
from autosac.solvers.curves.curve import FittedCurve
from autosac.solving.rules_of_thumb import Choice
from autosac.solving.shared_storages import Holders
from autosac.solving.unit_changes import Changes, changes_of
from autosac.step.tape import IntArray
from autosac.units.curves import UnitCurve
from autosac.units.unit import Unit

_MOST_TICKS = 1_000_000  # that a unit's policies are looked at together
_ALIKE = 2**-12  # of a time: points that differ by less count as one
_LEAST_MS = 1e-9


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
        edges: First tick of every position, but for that of far memory.
        holders: Who keeps which storage; None if that is not known.
        host_bytes: Most bytes in far memory. It is a last position, at which what lies
            there counts and the budget is added to less than nothing; None for none.
        num_there: How many times what a unit has in far memory lies there; 1 for those
            that are not named.
    """

    units: tuple[Unit, ...]
    curves: tuple[UnitCurve, ...]
    solver_units: tuple[sac.Unit, ...]
    base_bytes: tuple[int, ...]
    holds: tuple[sac.Hold, ...]
    edges: IntArray
    holders: Holders | None = None
    host_bytes: int | None = None
    num_there: Mapping[Unit, int] = field(default_factory=dict)

    def encoded(self, choice: Choice) -> tuple[int | None, ...] | None:
        """The point of each unit, None for none; None if any has another policy."""
        points: list[int | None] = []
        for unit, curve in zip(self.units, self.curves, strict=True):
            policy = choice.get(unit)
            if policy is not None and policy not in curve.policies:
                return None
            points.append(None if policy is None else curve.policies.index(policy))
        is_whole = sum(point is not None for point in points) == len(choice)
        return tuple(points) if is_whole else None

    def keeps_host(self, choice: Choice) -> bool:
        """Whether units have no more in far memory than they may."""
        if self.host_bytes is None:
            return True
        return self._far_bytes(choice) <= self.host_bytes

    def _far_bytes(self, choice: Choice) -> int:
        """What lies in far memory, all times."""
        units = choice.items()
        return sum(self.num_there.get(u, 1) * u.far_bytes(p) for u, p in units)

    def under_host(
        self, host_bytes: int, num_there: Mapping[Unit, int] | None = None
    ) -> Formulation:
        """The same with a cap on far memory, which has none yet."""
        times, records = num_there or {}, []
        triples = zip(self.solver_units, self.units, self.curves, strict=True)
        for record, unit, curve in triples:
            number = times.get(unit, 1)
            far = tuple(number * unit.far_bytes(policy) for policy in curve.policies)
            working = ((len(self.edges), far),) if any(far) else ()
            records.append(replace(record, working=(*record.working, *working)))
        return replace(
            self,
            solver_units=tuple(records),
            base_bytes=(*self.base_bytes, -host_bytes),
            host_bytes=host_bytes,
            num_there=times,
        )

    def with_host(self, raised: IntArray, budget_bytes: int) -> IntArray:
        """How far rows are raised, such that the last one caps far memory if it may."""
        if self.host_bytes is None:
            return raised
        raised = raised.copy()
        raised[-1] = budget_bytes
        return raised

    def at_positions(self, live: IntArray, choice: Choice) -> IntArray:
        """What is alive from each edge on, and at the position of far memory."""
        if self.host_bytes is None:
            return live
        return np.append(live, self._far_bytes(choice) - self.host_bytes)

    def in_blocks(self, simulator: Simulator) -> Formulation:
        """The MILP of the same units in blocks of other sizes, without far memory."""
        return formulate(simulator, self.units, self.curves, holders=self.holders)

    def fitted(self, num_segments: int) -> Fitted:
        """The MILP's numbers over the breakpoints of few linear segments (pwlf).

        These are points of the exact curve, lifted in time so that the fit never
        understates a point in between.
        """
        fits = {id(c): c.fit(num_segments) for c in self.curves}
        pairs = [(c.points, fits[id(c)]) for c in self.curves]
        kept = [
            tuple(map(exact.freed_bytes.index, fit.freed_bytes)) for exact, fit in pairs
        ]
        units = zip(self.solver_units, kept, pairs, strict=True)
        return Fitted(
            problem=sac.SacProblem(
                units=tuple(_thinned(unit, own, fit) for unit, own, (_, fit) in units),
                base_bytes=self.base_bytes,
                budget_bytes=0,
                holds=tuple(
                    replace(
                        hold,
                        freed_by=_of_points(hold.freed_by, kept),
                        kept_by=_of_points(hold.kept_by, kept),
                    )
                    for hold in self.holds
                ),
            ),
            kept=tuple(kept),
        )

    def problem(self, budget_bytes: int) -> sac.SacProblem:
        """The MILP over exact points for one budget."""
        return sac.SacProblem(
            units=self.solver_units,
            base_bytes=self.base_bytes,
            budget_bytes=budget_bytes,
            holds=self.holds,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """Candidate units on fitted curves.

    Attributes:
        problem: The MILP; its budget is not set.
        kept: Of each unit the points of its exact curve that are breakpoints.
    """

    problem: sac.SacProblem
    kept: tuple[tuple[int, ...], ...]


def formulate(
    simulator: Simulator,
    units: Sequence[Unit],
    curves: Sequence[UnitCurve],
    *,
    live: IntArray | None = None,
    cuts: Iterable[int] = (),
    host_bytes: int | None = None,
    holders: Holders | None = None,
) -> Formulation:
    """Work out the MILP's coefficients for all candidates.

    Args:
        simulator: Of the tape.
        units: The candidates in forward order, those around others first.
        curves: Their curves.
        live: Bytes alive after every tick without recomputation; None for those of
            the tape.
        cuts: Ticks at which positions must begin besides those of the candidates.
        host_bytes: Most bytes in far memory; None for as many as one likes.
        holders: Who keeps which storage, if it is known.
    """
    if live is None:
        live = simulator.ledger({}).after_ticks(
            simulator.tape.num_ticks, simulator.span
        )
    cuts = {0, *cuts}
    for unit in units:
        cuts |= {
            unit.call.enter,
            unit.call.exit + 1,
            unit.resumes,
            unit.trigger - 1,
            unit.last_use + 1,
        }
    holders = holders or Holders(simulator, units, curves)
    cuts |= holders.cuts()
    ends = [
        changes_of(simulator, holders, unit, (curve.policies[0], curve.policies[-1]))
        for unit, curve in zip(units, curves, strict=True)
    ]
    for unit, changes in zip(units, ends, strict=True):
        cuts |= _cuts_elsewhere(unit, changes.keys, simulator.span)
    edges = np.array(sorted(cut for cut in cuts if cut < len(live)), dtype=np.int64)
    base = np.maximum.reduceat(live, edges)
    stops = np.append(edges, len(live))
    step = _Step(simulator, holders, live, edges, stops, base)
    twins: dict[_ShiftKey, sac.Unit] = {}
    num_alike = Counter(unit.key for unit in units)
    records = []
    parents = _parents(units)
    for unit, unit_curve, parent, changes in zip(
        units, curves, parents, ends, strict=True
    ):
        if num_alike[unit.key] == 1:
            record = _solver_unit(step, unit, unit_curve)
        else:
            record = _moved_or_new(step, unit, unit_curve, changes, twins)
        records.append(replace(record, fqn=unit.fqn, parent=parent))
    formulation = Formulation(
        units=tuple(units),
        curves=tuple(curves),
        solver_units=tuple(records),
        base_bytes=tuple(base.tolist()),
        holds=holders.holds(edges, simulator.sizes),
        edges=edges,
        holders=holders,
    )
    return formulation if host_bytes is None else formulation.under_host(host_bytes)


def _of_points(
    by_point: tuple[tuple[int, tuple[int, ...]], ...], kept: Sequence[Sequence[int]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Values of a hold for the points that each unit is left with."""
    return tuple((u, tuple(values[k] for k in kept[u])) for u, values in by_point)


def _thinned(unit: sac.Unit, kept: Sequence[int], fit: FittedCurve) -> sac.Unit:
    """A unit with the breakpoints of its fitted curve only."""
    working = [(q, tuple(extras[k] for k in kept)) for q, extras in unit.working]
    return replace(
        unit,
        points=tuple(
            replace(unit.points[k], recompute_ms=ms)
            for k, ms in zip(kept, fit.recompute_ms, strict=True)
        ),
        working=tuple(working),
        between=(),
    )


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


def _cuts_elsewhere(unit: Unit, keys: IntArray, span: int) -> set[int]:
    """Ticks at which a unit begins or ends to free something while it does not run.

    Such as where autocast drops its copies of weights. What units change in a position
    can be added up where it is the same all along.
    """
    ticks = -(-keys // span)
    runs = (unit.call.enter <= ticks) & (ticks <= unit.call.exit + 1)
    runs |= (unit.resumes <= ticks) & (ticks <= unit.last_use + 1)
    return set(ticks[~runs].tolist())


@dataclass(frozen=True, slots=True)
class _Step:
    """What the formulations of all units have in common.

    Attributes:
        simulator: Of the tape.
        holders: Who keeps which storage.
        live: Bytes alive after every tick when nothing is recomputed.
        edges: First tick of every position,
        stops: and the number of ticks besides.
        base: Most of these bytes at every position.
    """

    simulator: Simulator
    holders: Holders
    live: IntArray
    edges: IntArray
    stops: IntArray
    base: IntArray

    def places(self, unit: Unit) -> list[int]:
        """Positions at which a unit begins, has run, is about to be rerun, is done."""
        ticks = [unit.call.enter, unit.call.exit + 1, unit.resumes]
        positions = np.searchsorted(self.edges, [*ticks, unit.last_use + 1]).tolist()
        return [
            positions[0],
            positions[1],
            max(positions[1], positions[2]),
            positions[3],
        ]


@dataclass(frozen=True, slots=True)
class _ShiftKey:
    """Equal for units of which one can be formulated by shifting the other in time.

    They behave alike, memory rises and falls alike around them, and so does what the
    first and the last point of their curves change.

    Attributes:
        unit: The unit's own key.
        early: Positions after its forward at which these still change anything,
        late: and those before its rerun.
        memory: What the plain step and the unit's own changes do to memory there.
    """

    unit: Hashable
    early: int
    late: int
    memory: tuple[bytes, ...]


def _shift_key(step: _Step, unit: Unit, ends: Changes) -> _ShiftKey:
    first, freed_from, freed_until, last = step.places(unit)
    span = step.simulator.span
    settled, unsettled = freed_from, freed_until
    memory: list[bytes] = []
    for keys, deltas in ends.by_policy():
        late = keys >= unit.resumes * span
        moved = keys - np.where(late, unit.trigger, unit.call.enter) * span
        memory += [moved.tobytes(), deltas.tobytes()]
        in_order = int(late.argmax()) if late.any() else len(keys)
        if in_order:
            tick = -(-int(keys[in_order - 1]) // span)
            settled = max(settled, int(np.searchsorted(step.edges, tick)))
        if in_order < len(keys):
            tick = int(keys[in_order]) // span
            before = int(np.searchsorted(step.edges, tick, side="right")) - 1
            unsettled = min(unsettled, before)
    settled = min(settled, freed_until)
    unsettled = max(unsettled, settled)
    stops = step.stops
    for low, high, origin in (
        (first, settled, unit.call.enter),
        (unsettled, last, unit.trigger),
    ):
        around = step.live[stops[low] : stops[high]]
        memory.append((stops[low : high + 1] - origin).tobytes())
        memory.append((around - (around[0] if len(around) else 0)).tobytes())
    return _ShiftKey(
        unit.key, settled - freed_from, freed_until - unsettled, tuple(memory)
    )


def _moved_or_new(
    step: _Step,
    unit: Unit,
    curve: UnitCurve,
    ends: Changes,
    twins: dict[_ShiftKey, sac.Unit],
) -> sac.Unit:
    """The record of a unit, by moving that of one like it if it is known."""
    key = _shift_key(step, unit, ends)
    twin = twins.get(key)
    record = twin and _moved(step, unit, twin, key)
    if record is None:
        record = twins[key] = _solver_unit(step, unit, curve)
    return record


def _moved(step: _Step, unit: Unit, twin: sac.Unit, key: _ShiftKey) -> sac.Unit | None:
    """The record of a unit that looks like its twin; None if it is not only moved."""
    first, freed_from, freed_until, last = step.places(unit)
    if freed_until - freed_from <= key.early + key.late:
        return None  # the key does not tell what it frees in between
    working = []
    for position, extras in twin.working:
        if position < twin.freed_from + key.early:
            moved = position - twin.freed_from + freed_from
        elif position >= twin.freed_until - key.late:
            moved = position - twin.freed_until + freed_until
        else:
            return None
        if not first <= moved < last:
            return None
        working.append((moved, extras))
    return replace(
        twin, freed_from=freed_from, freed_until=freed_until, working=tuple(working)
    )


def _solver_unit(step: _Step, unit: Unit, curve: UnitCurve) -> sac.Unit:
    first, freed_from, freed_until, last = step.places(unit)
    changes = _by_position(step, unit, curve, range(first, last))
    # What a unit frees is what it frees at most positions between its forward and
    # its backward; it works at those where it changes anything else.
    between = changes[freed_from - first : freed_until - first]
    freed = np.array([-_most_frequent(column) for column in between.T])
    between += freed
    working = np.flatnonzero(changes.any(axis=1))
    extras = _rows_once_each(changes[working])
    return sac.Unit(
        fqn=unit.fqn,
        parent=None,
        points=tuple(
            sac.Breakpoint(
                ratio=ratio,
                freed_bytes=nbytes,
                recompute_ms=ms,
                waits_ms=unit.waits_ms(policy),
                far_bytes=unit.far_bytes(policy),
            )
            for ratio, nbytes, ms, policy in zip(
                curve.ratios,
                freed.tolist(),
                curve.points.recompute_ms,
                curve.policies,
                strict=True,
            )
        ),
        freed_from=freed_from,
        freed_until=freed_until,
        working=tuple(zip((first + working).tolist(), extras, strict=True)),
        between=beside_points(curve) if curve.is_selection else (),
        mixed_from_ms=curve.complete_below_ms if curve.is_selection else 0.0,
    )


def _rows_once_each(table: IntArray) -> list[tuple[int, ...]]:
    """Rows as tuples: one of all that follow each other and are equal."""
    is_new = (np.diff(table, axis=0, prepend=0) != 0).any(axis=1)
    is_new[:1] = True
    rows = [tuple(row) for row in table[is_new].tolist()]
    return [rows[i] for i in (np.cumsum(is_new) - 1).tolist()]


def _by_position(
    step: _Step, unit: Unit, curve: UnitCurve, positions: range
) -> IntArray:
    """What a unit changes at each position, by point."""
    num_ticks = int(step.stops[positions.stop] - step.stops[positions.start])
    at_once = max(1, _MOST_TICKS // max(1, num_ticks))
    parts = []
    for start in range(0, len(curve.policies), at_once):
        policies = curve.policies[start : start + at_once]
        changes = changes_of(step.simulator, step.holders, unit, policies)
        parts.append(changes.at(positions, step.live, step.stops, step.base))
    by_point: IntArray = np.concatenate(parts).T
    return by_point


def beside_points(curve: UnitCurve) -> tuple[sac.Between, ...]:
    """Known points of a curve that are not among those of the MILP.

    Of points that take about as long the one that frees most stands for all, as fast as
    the fastest: bounds hold for each of them.
    """
    if curve.front is None:
        return ()
    freed = np.array(curve.points.freed_bytes)
    freeing = freed[-1] + curve.front.saved_bytes[-1] - curve.front.saved_bytes
    index = np.searchsorted(freed, freeing, side="right") - 1
    is_new = freed[index] != freeing
    index, freeing = index[is_new], freeing[is_new]
    shares = (freeing - freed[index]) / (freed[index + 1] - freed[index])
    times = curve.front.recompute_ms[is_new]
    alike = np.floor(np.log(np.maximum(times, _LEAST_MS)) / _ALIKE)
    is_last = np.diff(alike, append=np.inf) != 0.0
    index, shares = index[is_last], shares[is_last]
    times = times[np.diff(alike, prepend=-np.inf) != 0.0]
    values = zip(index.tolist(), shares.tolist(), times.tolist(), strict=True)
    return tuple(map(sac.Between._make, values))


def _most_frequent(values: IntArray) -> int:
    if not len(values):
        return 0
    distinct, counts = np.unique(values, return_counts=True)
    return int(distinct[counts.argmax()])
