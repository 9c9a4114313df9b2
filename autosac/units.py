"""Candidate AC units of a tape: which modules can be rerun, and what that takes.

The ops of a unit are put into *groups* that are saved or rerun together: an op
with all its outputs, and every op that later mutates one of them in place.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from autosac.tape import ModuleCall, Op, Tape

# Their statistics arguments do not enter their result in training mode, so a rerun
# leaves those arguments alone (aten/src/ATen/native/Normalization.cpp).
BATCH_NORM_OPS = frozenset(
    {
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._batch_norm_with_update.default",
        "aten.cudnn_batch_norm.default",
        "aten.miopen_batch_norm.default",
    }
)

# Ops that choose among near-equal values: rerunning them must never choose again.
NEVER_RERUN_OPS = frozenset(
    f"aten.{name}.default"
    for name in ("topk", "sort", "argsort", "kthvalue", "mode", "multinomial")
) | frozenset({"aten.sort.stable", "aten.mode.default", "aten.kthvalue.default"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ops of one unit whose results are saved or rerun together.

    Attributes:
        ops: Positions of its ops in `Unit.ops`.
        storages: Storages it makes.
        inputs: Groups of the same unit it reads.
        saved_bytes: Bytes that saving it keeps alive between forward and backward.
        runtime_ms: Time to rerun it.
        needed: Backward reads one of its storages.
        pinned: Must not be rerun.
        unsavable: Must not be saved: something mutates it after the unit is done.
    """

    ops: tuple[int, ...]
    storages: tuple[int, ...]
    inputs: tuple[int, ...]
    saved_bytes: int
    runtime_ms: float
    needed: bool
    pinned: bool
    unsavable: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """A module call that can run under activation checkpointing.

    Attributes:
        fqn: Name of the module.
        module: Index of the module in the tree.
        call: The module call.
        ops: Indices (in the tape) of all ops of the call.
        saved: Range of the tensors (in the tape) that autograd saves in it.
        last_pack: Tick of the last saved tensor, where a rerun stops.
        trigger: Tick at which backward first reads one of them.
        released: Tick at which the last of them is dropped; its inputs live so long.
        last_use: Tick after which it no longer matters, at least `released`.
        groups: Its groups, each after those it reads.
        key: Equal for units that behave alike, tick by tick.
        activation_bytes: What it keeps for backward when nothing is recomputed,
            without its input and output.
    """

    fqn: str
    module: int
    call: ModuleCall
    ops: range
    saved: range
    last_pack: int
    trigger: int
    released: int
    last_use: int
    groups: tuple[Group, ...]
    key: Hashable
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Candidates of a tape in forward order, and why other modules are none."""

    candidates: tuple[Unit, ...]
    refused: dict[str, str]


def find_units(
    tape: Tape, op_ms: Sequence[float], *, exclude: Iterable[str] = ()
) -> Units:
    """Find the modules of a tape that can be AC units.

    Args:
        tape: The traced step.
        op_ms: Forward time of every op of the tape.
        exclude: FQNs that must not be units.
    """
    excluded = frozenset(exclude)
    calls = Counter(call.module for call in tape.calls)
    index = _TapeIndex(tape)
    candidates: list[Unit] = []
    refused: dict[str, str] = {}
    for call in tape.calls:
        fqn = tape.modules[call.module].fqn
        if calls[call.module] > 1:
            refused[fqn] = f"it is called {calls[call.module]} times in a step"
        elif fqn in excluded:
            refused[fqn] = "it was excluded"
        elif fqn and call.phase == "forward":
            unit = _make_unit(index, call, op_ms)
            if isinstance(unit, Unit):
                candidates.append(unit)
            elif unit:
                refused[fqn] = unit
    return Units(candidates=tuple(candidates), refused=refused)


class _TapeIndex:
    """Look-ups on a tape by tick and by storage."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.starts = [op.start for op in tape.ops]
        self.packs = [saved.packed for saved in tape.saved]
        self.writes: dict[int, list[int]] = defaultdict(list)
        self.saves: dict[int, list[int]] = defaultdict(list)
        for op in tape.ops:
            for storage in op.writes:
                self.writes[storage].append(op.start)
        for i, saved in enumerate(tape.saved):
            self.saves[saved.storage].append(i)

    def ops_in(self, enter: int, leave: int) -> range:
        return range(bisect_left(self.starts, enter), bisect_left(self.starts, leave))

    def saved_in(self, enter: int, leave: int) -> range:
        return range(bisect_left(self.packs, enter), bisect_left(self.packs, leave))

    def written_between(self, storage: int, after: int, before: int) -> bool:
        """Whether an op that starts in (after, before) mutates a storage."""
        ticks = self.writes.get(storage, ())
        return bisect_right(ticks, after) < bisect_left(ticks, before)

    def held_elsewhere_until(self, storage: int, own: range) -> int:
        """Tick until which a storage lives without the saved tensors ``own``."""
        others = (
            int(self.tape.saved_until[i]) for i in self.saves[storage] if i not in own
        )
        return max(self.tape.storages[storage].died, max(others, default=0))


def _make_unit(
    index: _TapeIndex, call: ModuleCall, op_ms: Sequence[float]
) -> Unit | str:
    """The unit of a module call, or why it cannot be one ('' if it saves nothing)."""
    tape = index.tape
    saved = index.saved_in(call.enter, call.exit)
    unpacked = [t for i in saved if (t := tape.saved[i].unpacked) is not None]
    if not unpacked:
        return ""
    trigger = min(unpacked)
    ops = index.ops_in(call.enter, call.exit)
    own = {s for i in ops for s in tape.ops[i].creates}
    if not any(tape.saved[i].storage in own for i in saved):
        return ""
    if call.opaque_input is not None:
        return f"its input holds a {call.opaque_input}, so it may not be called twice"
    outside = _unreachable_reads(tape, call, ops, own, trigger)
    if outside is not None:
        return outside
    last_pack = tape.saved[saved[-1]].packed
    groups = _make_groups(index, call, ops, own, saved, trigger, last_pack, op_ms)
    if isinstance(groups, str):
        return groups
    outputs = frozenset(call.outputs)
    return Unit(
        fqn=tape.modules[call.module].fqn,
        module=call.module,
        call=call,
        ops=ops,
        saved=saved,
        last_pack=last_pack,
        trigger=trigger,
        released=max(tape.saved[i].released for i in saved),
        last_use=max(int(tape.saved_until[i]) for i in saved),
        groups=groups,
        key=_key(tape, call, ops, saved, trigger, groups),
        activation_bytes=sum(
            tape.storages[s].nbytes
            for s in {tape.saved[i].storage for i in saved} & own - outputs
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
            if storage not in reachable and record.born and record.died < trigger:
                return (
                    f"its op {tape.ops[i].name} reads a tensor that is neither an"
                    " argument nor kept by the model until backward"
                )
    return None


def _make_groups(
    index: _TapeIndex,
    call: ModuleCall,
    ops: range,
    own: set[int],
    saved: range,
    trigger: int,
    last_pack: int,
    op_ms: Sequence[float],
) -> tuple[Group, ...] | str:
    tape = index.tape
    rerun = [i for i in ops if tape.ops[i].start < last_pack]
    members = _Partition()
    targets: dict[int, list[int]] = {}
    for i in rerun:
        op = tape.ops[i]
        made = [*op.creates, *(s for s in op.writes if s in own)]
        # Whoever reads a value that is overwritten later moves with the writer.
        stale = [
            s
            for s in op.reads
            if s in own and index.written_between(s, op.start, last_pack)
        ]
        if made:
            targets[i] = made
            members.join(made + stale)
        if set(op.writes) - own and made and op.name not in BATCH_NORM_OPS:
            return f"its op {op.name} changes a tensor from outside the module"
    ops_of: dict[int, list[int]] = defaultdict(list)
    for i, made in targets.items():
        ops_of[members.find(made[0])].append(i)
    roots = sorted(ops_of, key=lambda root: ops_of[root][-1])
    order = {root: g for g, root in enumerate(roots)}
    storages: dict[int, list[int]] = defaultdict(list)
    for i in rerun:
        for s in tape.ops[i].creates:
            storages[members.find(s)].append(s)
    needed = {tape.saved[i].storage for i in saved}
    for i in rerun:  # numbers that the model reads, to branch on them for instance
        if not tape.ops[i].shapes:
            needed.update(tape.ops[i].reads)
    changed = _changed_outside(index, call, rerun, own, trigger)
    groups = []
    for root in roots:
        inputs = {
            order[members.find(s)]
            for i in ops_of[root]
            for s in tape.ops[i].reads
            if s in own
        }
        made = storages[root]
        kept = [s for s in made if index.held_elsewhere_until(s, saved) < trigger]
        groups.append(
            Group(
                ops=tuple(i - ops.start for i in ops_of[root]),
                storages=tuple(made),
                inputs=tuple(sorted(inputs - {order[root]})),
                saved_bytes=sum(tape.storages[s].nbytes for s in kept),
                runtime_ms=sum(op_ms[i] for i in ops_of[root]),
                needed=not needed.isdisjoint(made),
                pinned=any(
                    i in changed or tape.ops[i].name in NEVER_RERUN_OPS
                    for i in ops_of[root]
                ),
                unsavable=any(
                    index.written_between(s, last_pack, tape.num_ticks) for s in made
                ),
            )
        )
    if any(g.needed and g.pinned and g.unsavable for g in groups):
        return "a tensor that it must save is changed in place later"
    return tuple(groups)


def _changed_outside(
    index: _TapeIndex, call: ModuleCall, rerun: list[int], own: set[int], trigger: int
) -> set[int]:
    """Ops that read something from outside which changes before the rerun."""
    tape = index.tape
    return {
        i
        for i in rerun
        if tape.ops[i].name not in BATCH_NORM_OPS
        and any(
            index.written_between(s, call.enter, trigger)
            for s in tape.ops[i].reads
            if s not in own
        )
    }


class _Partition:
    """Disjoint sets of storages."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def find(self, item: int) -> int:
        root = item
        while (parent := self.parent.setdefault(root, root)) != root:
            root = parent
        self.parent[item] = root
        return root

    def join(self, items: list[int]) -> None:
        root = self.find(items[0])
        for item in items[1:]:
            self.parent[self.find(item)] = root


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
