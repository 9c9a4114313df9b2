"""Candidate AC units of a tape: which modules can be rerun, and what that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autosac.devices.programs import ProgramCosts
from autosac.step.tape import OTHER_HOOKS, ModuleCall, Op, Tape
from autosac.units.groups import Group, TapeIndex, lasting, make_groups
from autosac.units.policies import is_listed
from autosac.units.unit import Unit

_MOST_GROUPS = 2000  # of a unit with candidates inside: a whole model of many layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Candidates of a tape in forward order, and why other modules are none."""

    candidates: tuple[Unit, ...]
    refused: dict[str, str]


def find_units(
    tape: Tape,
    op_ms: Sequence[float],
    program: ProgramCosts,
    *,
    exclude: Mapping[str, str] | None = None,
) -> Units:
    """Find the modules of a tape that can be AC units.

    Args:
        tape: The traced step.
        op_ms: Time to run every op of the tape again.
        program: What units take of it besides.
        exclude: FQNs that must not be units -> why.
    """
    excluded = exclude or {}
    counts = Counter(call.module for call in tape.calls)
    in_backward = {call.module for call in tape.calls if call.phase == "backward"}
    index = TapeIndex(tape)
    candidates: list[Unit] = []
    refused: dict[str, str] = {}
    keys: dict[Hashable, int] = {}
    seen: Counter[int] = Counter()
    for call in tape.calls:
        fqn = tape.modules[call.module].fqn
        place = (seen[call.module], counts[call.module])
        seen[call.module] += 1
        if fqn in excluded:
            refused[fqn] = excluded[fqn]
        elif call.module in in_backward:
            refused[fqn] = (
                "it runs in backward as well: it has its own checkpointing (switch that"
                " off, in Transformers by `model.gradient_checkpointing_disable()`, and"
                " the plan decides)"
            )
        elif fqn and call.phase == "forward":
            unit = make_unit(index, call, place, op_ms, program)
            if isinstance(unit, Unit):
                number = keys.setdefault(unit.key, len(keys))
                candidates.append(replace(unit, key=number))
            elif unit:
                refused[fqn] = unit
    for i in reversed(range(len(candidates))):
        if len(candidates[i].groups) > _MOST_GROUPS and inner(candidates, i):
            refused[candidates[i].fqn] = "it is very large; its parts can be units"
            del candidates[i]
    return Units(candidates=tuple(candidates), refused=refused)


def inner(candidates: Sequence[Unit], place: int) -> list[Unit]:
    """The outermost candidates inside a candidate; all are in forward order."""
    around = candidates[place]
    outermost: list[Unit] = []
    for unit in candidates[place + 1 :]:
        if unit.call.enter > around.call.exit:
            break
        if not outermost or unit.call.enter > outermost[-1].call.exit:
            outermost.append(unit)
    return outermost


def make_unit(
    index: TapeIndex,
    call: ModuleCall,
    place: tuple[int, int],
    op_ms: Sequence[float],
    program: ProgramCosts,
) -> Unit | str:
    """The unit of a module call, or why it cannot be one ('' if it saves nothing)."""
    tape = index.tape
    saved = index.saved_in(call.enter, call.exit)
    unpacked = [t for i in saved if (t := tape.saved[i].unpacked) is not None]
    if call.once == OTHER_HOOKS:  # what it saves is not seen
        return OTHER_HOOKS
    if not unpacked:
        return ""
    trigger = min(unpacked)
    ops = index.ops_in(call.enter, call.exit)
    own = {s for i in ops for s in tape.ops[i].creates}
    if not any(tape.saved[i].storage in own for i in saved):
        return ""
    if call.once is not None:
        return call.once
    if call.module in index.opaque:
        return "it is opaque"
    if any(tape.saved[i].used_again for i in saved):
        return (
            "backward goes through it more than once in a step, as that of a gradient"
            " penalty does"
        )
    if any(index.written_between(s, call.enter, trigger) for s in call.inputs):
        return "one of its arguments is changed in place before backward"
    last_pack = tape.saved[saved[-1]].packed
    written = [
        i
        for i in saved
        if tape.saved[i].storage in own
        and tape.saved[i].unpacked is not None
        and index.written_between(tape.saved[i].storage, last_pack, trigger)
    ]
    if written:  # a rerun ends before that
        return (
            "its last op writes to a tensor that it has handed to autograd before, as"
            " `rrelu` does: a module around it can be one"
        )
    outside = _unreachable_reads(tape, call, ops, own, trigger)
    if outside is not None:
        return outside
    groups = make_groups(index, call, ops, saved, trigger, op_ms)
    if isinstance(groups, str):
        return groups
    outputs = frozenset(call.outputs)
    kept = {tape.saved[i].storage for i in lasting(tape, saved, call.exit)} & own
    return Unit(
        fqn=tape.modules[call.module].fqn,
        module=call.module,
        call=call,
        call_index=place[0],
        num_calls=place[1],
        ops=ops,
        saved=saved,
        last_pack=last_pack,
        trigger=trigger,
        released=max(tape.saved[i].released for i in saved),
        last_use=max(int(tape.saved_until[i]) for i in saved),
        groups=groups,
        key=_key(tape, call, ops, saved, trigger, groups),
        activation_bytes=sum(tape.storages[s].nbytes for s in kept - outputs),
        sole_bytes=sum(
            tape.storages[s].nbytes
            for s in kept
            if index.held_elsewhere_until(s, saved) < trigger
        ),
        followed_ms=program.followed_ms(
            len(saved),
            num_ops=sum(not tape.ops[i].is_view for i in ops),
            num_calls=sum(is_listed(tape.ops[i]) for i in ops),
        ),
    )


def _unreachable_reads(
    tape: Tape, call: ModuleCall, ops: range, own: set[int], trigger: int
) -> str | None:
    """Refuse a call that reads a tensor which is gone when it would be rerun."""
    reachable = own | set(call.inputs)
    for i in ops:
        for storage in tape.ops[i].reads:
            record = tape.storages[storage]
            if storage not in reachable and record.died < trigger:
                return (
                    f"its op {tape.ops[i].name} reads a tensor that is neither an"
                    " argument nor kept by the model until backward"
                )
    return None


def _key(
    tape: Tape,
    call: ModuleCall,
    ops: range,
    saved: range,
    trigger: int,
    groups: tuple[Group, ...],
) -> Hashable:
    """Everything that decides how a unit behaves, relative to where it begins."""
    names: dict[int, int] = {}

    def relative(storages: Iterable[int]) -> tuple[int, ...]:
        return tuple(names.setdefault(s, len(names)) for s in storages)

    def describe(op: Op) -> Hashable:
        lives = tuple(
            (
                tape.storages[s].nbytes,
                min(tape.storages[s].died, call.exit) - call.enter,
            )
            for s in op.creates
        )
        moved = (relative(op.reads), relative(op.writes), relative(op.creates))
        return (op.name, op.start - call.enter, op.flops, op.moved_bytes, moved, lives)

    body = tuple(describe(tape.ops[i]) for i in ops)
    backward = tuple(
        (
            names.get(record.storage, -1),
            record.packed - call.enter,
            -1 if record.unpacked is None else record.unpacked - trigger,
            record.released - trigger,
            record.used_until - trigger,
        )
        for record in (tape.saved[i] for i in saved)
    )
    choices = tuple(
        (g.ops, g.inputs, g.saved_bytes, g.runtime_ms, g.needed, g.pinned, g.unsavable)
        for g in groups
    )
    return (body, backward, choices)
