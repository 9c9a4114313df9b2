"""Units whose arguments lie in far memory between their forward and their rerun.

Of some their saved results do as well.

Each is the twin of a module that can be an AC unit. When its forward pass is over, its
arguments are copied out; at the end of a later module call the program waits for that
and lets go of them. They come back as its rerun begins, or, *prefetched*, from the
moment on at which backward comes to that later call: memory for them is allocated
there, and the rerun begins by waiting for the copy. All these places are fixed by the
traced step, so that memory does not depend on how fast copies are.

The later call is the first one, among those that can have a twin, that begins after
this one and ends. So of units that are chosen together no two have the same ops to hide
their copies behind: those out have the ops up to the next end of a call that may be a
twin, those back the ones of backward after the last trigger of such a call. Each waits
for what is left, and these times add up to no less than what a step waits whose copies
follow one another, as a test plays it. Reruns hide more: they are not counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import fsum

import numpy as np

from autosac.devices.links import Link
from autosac.step.tape import ModuleCall, Tape
from autosac.units.groups import TapeIndex
from autosac.units.policies import DETACHED, SAVE, OpPolicy, Policy, is_listed
from autosac.units.unit import Piece, Unit

_LEAST_SHARE = 2**-18  # of all that the step's storages add up to


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A link, and for how long a unit's copies out and back have it to themselves."""

    link: Link
    out_ms: float
    back_ms: float

    def waits_ms(self, sizes: Sequence[int]) -> float:
        """Time that a step waits for copies out and back, and is busy with them.

        Args:
            sizes: Bytes of each tensor that is moved.
        """
        moved = sum(sizes), len(sizes)
        back_ms = self.link.back_ms(*moved, self.back_ms)
        out_ms = self.link.out_ms(*moved, self.out_ms)
        return out_ms + back_ms + 2 * self.link.issued_ms(sizes)


@dataclass(frozen=True, kw_only=True, eq=False)
class FarUnit(Unit):
    """A module call with arguments in far memory, perhaps saved results as well.

    Attributes:
        far: Storages of these arguments,
        far_places: their places among those of all arguments,
        sizes: Bytes of all storages that may be moved.
        results: Groups whose results lie there as well if they are saved.
        let_go: Tick at which the program lets go of all that,
        until: and FQN of the module whose call ends then.
        fetched: Tick at which backward comes to that call and they are prefetched; None
            if they come back as the rerun begins.
        hidden: How long copies may take without a wait.
    """

    far: tuple[int, ...]
    far_places: tuple[int, ...]
    sizes: Mapping[int, int]
    results: tuple[int, ...] = ()
    let_go: int
    until: str
    fetched: int | None
    hidden: _Hidden

    @property
    def resumes(self) -> int:
        return super().resumes if self.fetched is None else self.fetched

    @property
    def far_kind(self) -> tuple[tuple[int, ...], bool, bool]:
        return self.far_places, self.fetched is not None, bool(self.results)

    def waits_ms(self, policy: Policy) -> float:
        results = [s for g in self._moved(policy) for s in self.groups[g].storages]
        return self.hidden.waits_ms([self.sizes[s] for s in (*self.far, *results)])

    @property
    def arguments_bytes(self) -> int:
        """Bytes of the arguments that are moved."""
        return sum(self.sizes[s] for s in self.far)

    def far_bytes(self, policy: Policy) -> int:
        return self.arguments_bytes + self.results_bytes(policy)

    def results_bytes(self, policy: Policy) -> int:
        """Bytes of results in far memory."""
        return sum(self.groups[g].saved_bytes for g in self._moved(policy))

    def schedule(self, policy: Policy) -> tuple[Piece, ...]:
        results = tuple(s for g in self.results for s in self.groups[g].storages)
        return tuple(
            replace(
                piece,
                far=self.far,
                results=results,
                let_go=self.let_go,
                fetched=self.fetched,
            )
            for piece in super().schedule(policy)
        )

    def held_until(self, storage: int) -> int:
        return self.let_go if storage in self.far else self.released

    def op_policies(
        self, tape: Tape, policy: Policy, *, training: bool
    ) -> tuple[OpPolicy, ...]:
        listed = [i for i, op in enumerate(self.ops) if is_listed(tape.ops[op])]
        ops = [self.groups[g].ops[0] for g in self._moved(policy)]
        far = {
            "far": self.far_places,
            "far_until": self.until,
            "prefetched": self.fetched is not None,
            "far_ops": tuple(listed.index(i) for i in ops),
        }
        return (self.spelled(tape, policy, training, after=DETACHED, **far),)

    def _moved(self, policy: Policy) -> list[int]:
        """Groups whose results are moved."""
        return [g for g in self.results if policy.choices[g] == SAVE]


def find_far_units(
    tape: Tape,
    candidates: Sequence[Unit],
    op_ms: Sequence[float],
    link: Link,
) -> tuple[FarUnit, ...]:
    """Twins of the candidates whose arguments are worth moving, in forward order.

    A second one is prefetched, where that hides anything. Those of modules without
    children have none: they have little to rerun.

    Args:
        tape: The traced step.
        candidates: Module calls that can be AC units.
        op_ms: Forward time of every op of the tape.
        link: To far memory.
    """
    parents = {node.parent for node in tape.modules.nodes}
    whole = [unit for unit in candidates if unit.module in parents]
    marks = _Marks(tape, whole, op_ms)
    least_bytes = _LEAST_SHARE * sum(tape.nbytes.tolist())
    takers: dict[int, list[ModuleCall]] = defaultdict(list)
    for unit in candidates:
        for storage in unit.call.inputs:
            takers[storage].append(unit.call)
    twins: list[FarUnit] = []
    for unit in whole:
        far = tuple(
            storage
            for storage in unit.call.inputs
            if tape.storages[storage].nbytes >= least_bytes
            and _is_movable(tape, storage, unit, takers[storage])
        )
        if far:
            twins += _twins(tape, unit, far, marks, link, least_bytes)
    return tuple(twins)


def _twins(
    tape: Tape,
    unit: Unit,
    far: tuple[int, ...],
    marks: _Marks,
    link: Link,
    least_bytes: float,
) -> Iterator[FarUnit]:
    """The twin of a unit; where that hides anything one that is prefetched.

    And one of which saved results are moved as well.
    """
    mark = marks.after(unit)
    until = unit if mark is None else mark
    out_ms = marks.hides_out_ms(unit, mark)
    kinds: list[tuple[int | None, float, tuple[int, ...]]] = [(None, 0.0, ())]
    if mark is not None and (hidden_ms := marks.hides_back_ms(unit, mark)) > 0.0:
        kinds.append((mark.call.backward, hidden_ms, ()))
        if results := marks.movable_groups(unit, least_bytes):
            kinds.append((mark.call.backward, hidden_ms, results))
    places = tuple(unit.call.inputs.index(s) for s in far)
    let_go = until.call.exit
    for fetched, back_ms, results in kinds:
        ticks = let_go - unit.call.exit, fetched and unit.trigger - fetched
        hidden = _Hidden(link, out_ms, back_ms)
        moved = (*far, *(s for g in results for s in unit.groups[g].storages))
        yield unit.as_kind(
            FarUnit,
            key=("far", unit.key, places, results, ticks, hidden),
            far=far,
            far_places=places,
            sizes={s: tape.storages[s].nbytes for s in moved},
            results=results,
            let_go=let_go,
            until=until.fqn,
            fetched=fetched,
            hidden=hidden,
        )


class _Marks:
    """Ends of module calls at which a program may let go of what others sent.

    Args:
        tape: The traced step.
        units: Module calls that may have a twin, in forward order.
        op_ms: Time of every op of the tape.
    """

    def __init__(
        self, tape: Tape, units: Sequence[Unit], op_ms: Sequence[float]
    ) -> None:
        self._index = TapeIndex(tape)
        self._op_ms = op_ms
        self._taken: dict[int, int] = {}  # storage -> when the last call gets it
        for call in tape.calls:
            self._taken |= dict.fromkeys(call.inputs, call.enter)
        self._by_exit = sorted(units, key=lambda u: (u.call.exit, u.call.enter, u.fqn))
        self._exits = [unit.call.exit for unit in self._by_exit]
        self._enters = np.array([u.call.enter for u in units], dtype=np.int64)
        self._triggers = np.array([u.trigger for u in units], dtype=np.int64)

    def after(self, unit: Unit) -> Unit | None:
        """That whose call is the first to end of those that begin after a unit is done.

        Of modules that are called once in a step.
        """
        later = (other for other in self._later(unit) if other.num_calls == 1)
        first = next(later, None)
        is_early = first is not None and first.call.exit < unit.trigger
        return first if is_early else None

    def hides_out_ms(self, unit: Unit, mark: Unit | None) -> float:
        """Time of the ops behind which a copy out hides, and no other one can."""
        if mark is None:
            return 0.0
        end = next(self._later(unit)).call.exit
        return self._ms(unit.call.exit, min(end, mark.call.exit))

    def hides_back_ms(self, unit: Unit, mark: Unit) -> float:
        """Time of the ops behind which a prefetch hides, and no other one can."""
        begin = mark.call.backward
        if begin is None or begin >= unit.trigger:
            return 0.0
        earlier = self._triggers < unit.trigger
        others = self._triggers[earlier & (self._enters > unit.call.exit)]
        return self._ms(max(begin, int(others.max(initial=0))), unit.trigger)

    def movable_groups(self, unit: Unit, least_bytes: float) -> tuple[int, ...]:
        """Groups of one op whose results nobody but the unit keeps until its rerun."""
        outputs, leave = set(unit.call.outputs), unit.call.exit

        def is_free(storage: int) -> bool:
            is_own = storage not in outputs and self._taken.get(storage, 0) < leave
            held_until = self._index.held_elsewhere_until(storage, unit.saved)
            return is_own and held_until < unit.trigger

        return tuple(
            g
            for g, group in enumerate(unit.groups)
            if len(group.ops) == 1
            and not group.unsavable
            and group.saved_bytes >= least_bytes
            and all(map(is_free, group.storages))
        )

    def _later(self, unit: Unit) -> Iterator[Unit]:
        """Those that begin after a unit is done, by their ends."""
        first = bisect_left(self._exits, unit.call.exit + 1)
        for other in islice(self._by_exit, first, None):
            if other.call.enter > unit.call.exit:
                yield other

    def _ms(self, start: int, stop: int) -> float:
        ops = self._index.ops_in(start, stop)
        return fsum(self._op_ms[ops.start : ops.stop])  # exact: units alike are equal


def within(twins: Sequence[FarUnit], host_bytes: int | None) -> tuple[FarUnit, ...]:
    """Twins of which no choice has more than so many bytes in far memory.

    A heuristic: they come in, those first that wait least for a byte, while they do.
    """
    if host_bytes is None:
        return tuple(twins)
    kept: list[FarUnit] = []
    for twin in sorted(twins, key=_dearness):
        more = sorted([*kept, twin], key=lambda u: (u.call.enter, -u.call.exit))
        if _most_bytes(more) > host_bytes:
            break
        kept = more
    return tuple(kept)


def _most_bytes(units: Sequence[FarUnit]) -> int:
    """Most bytes of units of which none lies in another one; all in forward order."""
    total, place = 0, 0
    while place < len(units):
        outer, first = units[place], place + 1
        place = first
        while place < len(units) and units[place].call.exit <= outer.call.exit:
            place += 1
        total += max(_bytes_of(outer), _most_bytes(units[first:place]))
    return total


def _bytes_of(twin: FarUnit) -> int:
    """Most bytes of a unit that may lie in far memory."""
    results = sum(twin.groups[g].saved_bytes for g in twin.results)
    return twin.arguments_bytes + results


def _dearness(twin: FarUnit) -> float:
    """What a step waits for a byte of its arguments."""
    sizes = [twin.sizes[s] for s in twin.far]
    return twin.hidden.waits_ms(sizes) / sum(sizes)


def _is_movable(
    tape: Tape, storage: int, unit: Unit, takers: Sequence[ModuleCall]
) -> bool:
    """Whether the step makes an argument, the model lets go of it, and none shares it.

    Args:
        tape: The traced step.
        storage: The argument.
        unit: The unit.
        takers: Calls that may be units and get it.
    """
    record, own = tape.storages[storage], unit.call
    is_shared = any(call.exit < own.enter or own.exit < call.enter for call in takers)
    return record.born > 0 and record.died < unit.trigger and not is_shared
