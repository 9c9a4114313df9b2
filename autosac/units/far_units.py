"""Units whose arguments lie in far memory between their forward and their rerun.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import numpy as np

from autosac.devices.links import Link
from autosac.step.tape import ModuleCall, Tape
from autosac.units.groups import TapeIndex
from autosac.units.policies import DETACHED, OpPolicy, Policy
from autosac.units.unit import Piece, Unit

_LEAST_SHARE = 2**-18  # of all that the step's storages add up to


@dataclass(frozen=True, kw_only=True, eq=False)
class FarUnit(Unit):
    """A module call with arguments in far memory.

    Attributes:
        far: Storages of these arguments,
        far_places: their places among those of all arguments,
        moved_bytes: and their size.
        let_go: Tick at which the program lets go of them,
        until: and FQN of the module whose call ends then.
        fetched: Tick at which backward comes to that call and they are prefetched; None
            if they come back as the rerun begins.
        waits_ms: Time that a step waits for their copies.
    """

    far: tuple[int, ...]
    far_places: tuple[int, ...]
    moved_bytes: int
    let_go: int
    until: str
    fetched: int | None
    waits_ms: float

    @property
    def is_prefetched(self) -> bool:
        return self.fetched is not None

    @property
    def resumes(self) -> int:
        return super().resumes if self.fetched is None else self.fetched

    @property
    def places(self) -> tuple[int, ...]:
        return self.far_places

    @property
    def exposed_ms(self) -> float:
        return self.waits_ms

    @property
    def far_bytes(self) -> int:
        return self.moved_bytes

    def schedule(self, policy: Policy) -> tuple[Piece, ...]:
        return tuple(
            replace(piece, far=self.far, fetched=self.fetched)
            for piece in super().schedule(policy)
        )

    def held_until(self, storage: int) -> int:
        return self.let_go if storage in self.far else self.released

    def op_policies(
        self, tape: Tape, policy: Policy, *, training: bool
    ) -> tuple[OpPolicy, ...]:
        far = {
            "far": self.far_places,
            "far_until": self.until,
            "prefetched": self.is_prefetched,
        }
        return (self.spelled(tape, policy, training, after=DETACHED, **far),)


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
            twins += _twins(tape, unit, far, marks, link)
    return tuple(twins)


def _twins(
    tape: Tape, unit: Unit, far: tuple[int, ...], marks: _Marks, link: Link
) -> Iterator[FarUnit]:
    """The twin of a unit, and the one that is prefetched if that hides anything."""
    nbytes = sum(tape.storages[s].nbytes for s in far)
    places = tuple(unit.call.inputs.index(s) for s in far)
    mark = marks.after(unit)
    out_ms = link.out_ms(nbytes, len(far), marks.hides_out_ms(unit, mark))
    hidden_ms: dict[int | None, float] = {None: 0.0}
    if mark is not None and mark.call.backward is not None:
        hidden_ms[mark.call.backward] = marks.hides_back_ms(unit, mark)
    for fetched, ms in hidden_ms.items():
        if fetched is None or ms > 0.0:
            until = unit if mark is None else mark
            let_go = until.call.exit
            waits_ms = out_ms + link.back_ms(nbytes, len(far), ms)
            ticks = let_go - unit.call.exit, fetched and unit.trigger - fetched
            yield unit.as_kind(
                FarUnit,
                key=("far", unit.key, places, ticks, waits_ms),
                far=far,
                far_places=places,
                moved_bytes=nbytes,
                let_go=let_go,
                until=until.fqn,
                fetched=fetched,
                waits_ms=waits_ms,
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
        self._until_ms = [0.0, *accumulate(op_ms)]
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

    def _later(self, unit: Unit) -> Iterator[Unit]:
        """Those that begin after a unit is done, by their ends."""
        first = bisect_left(self._exits, unit.call.exit + 1)
        for other in islice(self._by_exit, first, None):
            if other.call.enter > unit.call.exit:
                yield other

    def _ms(self, start: int, stop: int) -> float:
        ops = self._index.ops_in(start, stop)
        return self._until_ms[ops.stop] - self._until_ms[ops.start]


def within(twins: Sequence[FarUnit], host_bytes: int | None) -> tuple[FarUnit, ...]:
    """Twins of which no choice has more than so many bytes in far memory.

    A heuristic: they come in, those first that wait least for a byte, while they do.
    """
    if host_bytes is None:
        return tuple(twins)
    kept: list[FarUnit] = []
    for twin in sorted(twins, key=lambda unit: unit.waits_ms / unit.moved_bytes):
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
        total += max(outer.moved_bytes, _most_bytes(units[first:place]))
    return total


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
