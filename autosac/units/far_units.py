"""Units whose arguments lie in far memory between their forward and their rerun.

Each is the twin of a module that can be an AC unit. When its forward pass is over, its
arguments are copied out; at the end of a later module call the program waits for that
and lets go of them; its rerun begins by copying them back. Both places are fixed by the
traced step, so that memory does not depend on how fast copies are.

What a step waits for a copy out is what is left of it after the ops up to that later
call. It is that of the first module call, among those that can have a twin, that begins
after this one and ends: of units that are chosen together no two have the same ops to
hide behind, and times add up. Nothing hides a copy back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        waits_ms: Time that a step waits for their copies.
    """

    far: tuple[int, ...]
    far_places: tuple[int, ...]
    moved_bytes: int
    let_go: int
    until: str
    waits_ms: float

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
        return tuple(replace(piece, far=self.far) for piece in super().schedule(policy))

    def held_until(self, storage: int) -> int:
        return self.let_go if storage in self.far else self.released

    def op_policies(
        self, tape: Tape, policy: Policy, *, training: bool
    ) -> tuple[OpPolicy, ...]:
        far = {"far": self.far_places, "far_until": self.until}
        return (self.spelled(tape, policy, training, after=DETACHED, **far),)


def find_far_units(
    tape: Tape,
    candidates: Sequence[Unit],
    op_ms: Sequence[float],
    link: Link,
    host_bytes: int | None = None,
) -> tuple[FarUnit, ...]:
    """Twins of the candidates whose arguments are worth moving, in forward order.

    Those of modules without children have none: they have little to rerun.

    Args:
        tape: The traced step.
        candidates: Module calls that can be AC units.
        op_ms: Forward time of every op of the tape.
        link: To far memory.
        host_bytes: Most bytes that may lie there. A heuristic: twins come in, those
            first that wait least for a byte, while all of them together keep that.
    """
    index = TapeIndex(tape)
    parents = {node.parent for node in tape.modules.nodes}
    whole = [unit for unit in candidates if unit.module in parents]
    marks = sorted(
        (unit.call.exit, unit.call.enter, unit.fqn)
        for unit in whole
        if unit.num_calls == 1
    )
    least_bytes = _LEAST_SHARE * sum(tape.nbytes.tolist())
    takers: dict[int, list[ModuleCall]] = defaultdict(list)
    for unit in candidates:
        for storage in unit.call.inputs:
            takers[storage].append(unit.call)
    twins = []
    for unit in whole:
        far = tuple(
            storage
            for storage in unit.call.inputs
            if tape.storages[storage].nbytes >= least_bytes
            and _is_movable(tape, storage, unit, takers[storage])
        )
        if not far:
            continue
        nbytes = sum(tape.storages[s].nbytes for s in far)
        let_go, until = _mark_after(marks, unit)
        hidden_ms = sum(op_ms[i] for i in index.ops_in(unit.call.exit, let_go))
        waits_ms = link.out_ms(nbytes, len(far), hidden_ms) + link.back_ms(
            nbytes, len(far)
        )
        places = tuple(unit.call.inputs.index(s) for s in far)
        twins.append(
            unit.as_kind(
                FarUnit,
                key=("far", unit.key, places, let_go - unit.call.exit, waits_ms),
                far=far,
                far_places=places,
                moved_bytes=nbytes,
                let_go=let_go,
                until=until,
                waits_ms=waits_ms,
            )
        )
    return tuple(twins) if host_bytes is None else _within(twins, host_bytes)


def _within(twins: Sequence[FarUnit], host_bytes: int) -> tuple[FarUnit, ...]:
    """Twins of which no choice has more than so many bytes in far memory."""
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


def _mark_after(marks: Sequence[tuple[int, int, str]], unit: Unit) -> tuple[int, str]:
    """Tick and module of the first end of a call that begins after a unit is done.

    Where there is none, of the unit's own.
    """
    call: ModuleCall = unit.call
    for leave, enter, fqn in marks[bisect_left(marks, (call.exit + 1,)) :]:
        if enter > call.exit and leave < unit.trigger:
            return leave, fqn
    return call.exit, unit.fqn
