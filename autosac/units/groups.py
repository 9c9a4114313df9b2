"""Groups: ops of a module call that are saved or rerun together.

An op belongs with all its outputs, and with every op that later mutates one of them
in place.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from autosac.step.tape import ModuleCall, Op, Tape

# Their statistics arguments do not enter their result in training mode, so a rerun
# leaves those arguments alone (aten/src/ATen/native/Normalization.cpp).
BATCH_NORM_OPS = frozenset(
    {
        "aten.native_batch_norm.default",
        "aten.cudnn_batch_norm.default",
        "aten.miopen_batch_norm.default",
    }
)

# Ops that choose among near-equal values: never made twice, nor are those that decide a
# shape (`Op.decides`) or run under settings of their own. Names of overload packets.
NEVER_RERUN = frozenset(
    {
        "aten.topk",
        "aten.sort",
        "aten.argsort",
        "aten.kthvalue",
        "aten.mode",
        "aten.multinomial",
        "aten.median",
        "aten.nanmedian",
        "aten.nonzero",
        "aten.nonzero_static",
        "aten.unique_dim",
        "aten._unique",
        "aten._unique2",
        "aten.unique_consecutive",
        "aten.unique_dim_consecutive",
        "aten.masked_select",
        "aten.bincount",
        "torchvision.nms",
    }
)

# Ops that leave memory as they find it: some op writes it next, or a kernel does past
# all ops, as `ctc_loss` writes lengths that it is given as numbers (``at::tensor`` in
# aten/src/ATen/native/LossCTC.cpp).
_EMPTY = frozenset(
    {
        "aten.empty",
        "aten.empty_like",
        "aten.empty_permuted",
        "aten.empty_strided",
        "aten.new_empty",
        "aten.new_empty_strided",
    }
)


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


class TapeIndex:
    """Look-ups on a tape by tick and by storage.

    Attributes:
        opaque: Modules that must not be run again, with all inside them.
        fixed: Ops that must not be run again.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.starts = [op.start for op in tape.ops]
        self.packs = [saved.packed for saved in tape.saved]
        self.until: list[int] = tape.saved_until.tolist()
        self.died: list[int] = tape.died.tolist()
        self.writes: dict[int, list[int]] = defaultdict(list)
        self.saves: dict[int, list[int]] = defaultdict(list)
        for op in tape.ops:
            for storage in op.writes:
                self.writes[storage].append(op.start)
        for i, saved in enumerate(tape.saved):
            self.saves[saved.storage].append(i)
        self.opaque: set[int] = set()
        for i, node in enumerate(tape.modules.nodes):
            if node.fqn in tape.opaque or node.parent in self.opaque:
                self.opaque.add(i)
        self.fixed = self._fixed()

    def _fixed(self) -> set[int]:
        tape = self.tape
        decisions = {s for op in tape.ops for s in op.decides}
        fixed = {
            i
            for i, op in enumerate(tape.ops)
            if op.varies
            or op.name.rpartition(".")[0] in NEVER_RERUN
            or self._is_foreign_literal(op)
            or self._has_type_of_statistics(op)
            or not decisions.isdisjoint((*op.creates, *op.writes))
        }
        for call in tape.calls if self.opaque else ():
            if call.module in self.opaque:
                fixed.update(self.ops_in(call.enter, call.exit))
        return fixed | self._filled_unseen()

    def _is_foreign_literal(self, op: Op) -> bool:
        """Whether Python made a tensor in memory of others, such as an array of NumPy.

        A rerun makes its numbers anew, in memory that counts.
        """
        has_bytes = any(self.tape.storages[s].nbytes for s in op.creates)
        return op.name == "aten.lift_fresh.default" and not has_bytes

    def _has_type_of_statistics(self, op: Op) -> bool:
        """Whether only the statistics of a batch norm say that it computes in float32.

        On the CPU one without a weight does so for their sake (`aten/src/ATen/native/
        cpu/mixed_data_type.h`), and its rerun has none, which it would update.
        """
        is_lower = op.dtype in ("bfloat16", "float16") and len(op.reads) == 3
        return is_lower and op.name in BATCH_NORM_OPS and self.tape.device_type == "cpu"

    def _filled_unseen(self) -> set[int]:
        """Ops that make empty memory which the next op that computes reads."""
        makers: dict[int, int] = {}  # by storage: of what no op has touched yet
        found = set()
        for i, op in enumerate(self.tape.ops):
            if not (op.creates or op.writes):
                continue  # a view
            for storage in (*op.writes, *op.reads) if makers else ():
                maker = makers.pop(storage, None)
                if maker is not None and storage not in op.writes:
                    found.add(maker)
            if op.name.rpartition(".")[0] in _EMPTY:
                sizes = self.tape.storages
                makers.update((s, i) for s in op.creates if sizes[s].nbytes)
        return found

    def is_fixed(self, i: int, call: ModuleCall) -> bool:
        """Whether an op must not run twice, in a rerun of a call.

        That runs ops under the settings that the call began with.
        """
        return i in self.fixed or self.tape.ops[i].settings != call.settings

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
        others = [self.until[i] for i in self.saves[storage] if i not in own]
        return max([self.died[storage], *others])


def make_groups(
    index: TapeIndex,
    call: ModuleCall,
    ops: range,
    saved: range,
    trigger: int,
    op_ms: Sequence[float],
) -> tuple[Group, ...] | str:
    """Group the ops of a module call, or say why it cannot be rerun.

    Args:
        index: Look-ups on the tape.
        call: The module call.
        ops: Its ops.
        saved: The tensors that autograd saves in it.
        trigger: Tick of the first read of one of these in backward.
        op_ms: Forward time of every op of the tape.
    """
    tape = index.tape
    last_pack = tape.saved[saved[-1]].packed
    rerun = [i for i in ops if tape.ops[i].start < last_pack]
    own = {s for i in ops for s in tape.ops[i].creates}
    once = {i for i in rerun if _changes_foreign(tape.ops[i], own)}
    for op in (tape.ops[i] for i in once):
        if not own.isdisjoint(op.writes):  # which must be written again, that not
            return f"its op {op.name} changes a tensor from outside the module"
    members = _partition(index, rerun, own, last_pack)
    ops_of = _in_order(tape, rerun, own, members)
    storages: dict[int, list[int]] = defaultdict(list)
    for i in rerun:
        for s in tape.ops[i].creates:
            storages[members.find(s)].append(s)
    place = {root: g for g, root in enumerate(ops_of)}
    needed = _needed(tape, rerun, lasting(tape, saved, call.exit))
    needed.update(s for i in once for s in tape.ops[i].creates)  # for any rerun
    fixed = once | _reads_changing(index, rerun, own, trigger)
    groups = []
    for root, its_ops in ops_of.items():
        results = storages[root]
        inputs = {place[r] for r in _read_by(tape, root, its_ops, own, members)}
        kept = [s for s in results if index.held_elsewhere_until(s, saved) < trigger]
        groups.append(
            Group(
                ops=tuple(i - ops.start for i in its_ops),
                storages=tuple(results),
                inputs=tuple(sorted(inputs)),
                saved_bytes=sum(tape.storages[s].nbytes for s in kept),
                runtime_ms=sum(op_ms[i] for i in its_ops),
                needed=not needed.isdisjoint(results),
                pinned=any(i in fixed or index.is_fixed(i, call) for i in its_ops),
                unsavable=any(
                    index.written_between(s, last_pack, tape.num_ticks) for s in results
                ),
            )
        )
    if any(group.needed and group.pinned and group.unsavable for group in groups):
        return "a tensor that it must save is changed in place later"
    return tuple(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What a module call does after its last saved tensor, where a rerun stops.

    Attributes:
        groups: One for each op that makes or mutates tensors of the call; numbered on
            from the call's groups.
        outward: Groups of the call and of the tail that its output, and the values
            that the model's code reads, come from at once.
    """

    groups: tuple[Group, ...]
    outward: tuple[int, ...]


def make_tail(
    index: TapeIndex,
    call: ModuleCall,
    ops: range,
    groups: Sequence[Group],
    last_pack: int,
    trigger: int,
    op_ms: Sequence[float],
) -> Tail | str:
    """What it takes to run a module call to its end, or why that must not be.

    Args:
        index: Look-ups on the tape.
        call: The module call.
        ops: Its ops.
        groups: Its groups.
        last_pack: Tick of its last saved tensor, where its groups end.
        trigger: Tick before which it runs again.
        op_ms: Forward time of every op of the tape.
    """
    tape = index.tape
    own = {s for i in ops for s in tape.ops[i].creates}
    makers: dict[int, set[int]] = defaultdict(set)
    for g, group in enumerate(groups):
        for storage in group.storages:
            makers[storage].add(g)
    rest = [
        i for i in ops if tape.ops[i].start >= last_pack and _makes(tape.ops[i], own)
    ]
    changing = _reads_changing(index, rest, own, trigger)
    tail: list[Group] = []
    for i in rest:
        op = tape.ops[i]
        if _changes_foreign(op, own):
            return f"its op {op.name} changes a tensor from outside the module"
        if i in changing or index.is_fixed(i, call):
            return f"its op {op.name} must not run twice"
        read = {g for s in (*op.reads, *op.writes) for g in makers[s]}
        for storage in _makes(op, own):
            makers[storage].add(len(groups) + len(tail))
        tail.append(
            Group(
                ops=(i - ops.start,),
                storages=op.creates,
                inputs=tuple(sorted(read)),
                saved_bytes=0,
                runtime_ms=op_ms[i],
                needed=False,
                pinned=False,
                unsavable=True,
            )
        )
    looked_at = {s for i in ops if not tape.ops[i].shapes for s in tape.ops[i].reads}
    wanted = (looked_at | set(call.outputs)) & own
    outward = {g for storage in wanted for g in makers[storage]}
    return Tail(groups=tuple(tail), outward=tuple(sorted(outward)))


def may_run_again(
    index: TapeIndex, call: ModuleCall, ops: Sequence[int], trigger: int
) -> bool:
    """Whether ops of a call do the same again, and nothing else, before a tick."""
    tape = index.tape
    inside = index.ops_in(call.enter, call.exit)
    own = {s for i in inside for s in tape.ops[i].creates}
    pure = all(
        own.issuperset(op.writes) and not op.may_draw
        for op in (tape.ops[i] for i in ops)
    )
    pure = pure and not any(index.is_fixed(i, call) for i in ops)
    return pure and not _reads_changing(index, list(ops), own, trigger)


def _makes(op: Op, own: set[int]) -> list[int]:
    """Storages of the unit that an op allocates or mutates."""
    return [*op.creates, *(s for s in op.writes if s in own)]


def _changes_foreign(op: Op, own: set[int]) -> bool:
    """Whether an op makes something while it mutates what is not the unit's."""
    foreign = set(op.writes) - own
    return bool(foreign and _makes(op, own)) and op.name not in BATCH_NORM_OPS


def _partition(
    index: TapeIndex, rerun: list[int], own: set[int], last_pack: int
) -> _Partition:
    """Storages that have to be saved or rerun together."""
    members = _Partition()
    for op in (index.tape.ops[i] for i in rerun):
        results = _makes(op, own)
        if results:
            # Whoever reads a value that is overwritten later moves with the writer.
            stale = [
                s
                for s in op.reads
                if s in own and index.written_between(s, op.start, last_pack)
            ]
            members.join(results + stale)
    return members


def _in_order(
    tape: Tape, rerun: list[int], own: set[int], members: _Partition
) -> dict[int, list[int]]:
    """Ops of each group, by one of its storages; groups that others read come first.

    Groups that read each other, as may be where one is overwritten late, become one.
    """
    while True:
        ops_of: dict[int, list[int]] = defaultdict(list)
        for i in rerun:
            for s in _makes(tape.ops[i], own)[:1]:
                ops_of[members.find(s)].append(i)
        sorter = TopologicalSorter(
            {
                root: _read_by(tape, root, its_ops, own, members) & ops_of.keys()
                for root, its_ops in ops_of.items()
            }
        )
        try:
            sorter.prepare()
        except CycleError as error:
            members.join(error.args[1])
            continue
        order: list[int] = []
        ready: list[tuple[int, int]] = []
        while sorter.is_active():
            for root in sorter.get_ready():
                heapq.heappush(ready, (ops_of[root][-1], root))
            order.append(heapq.heappop(ready)[1])
            sorter.done(order[-1])
        return {root: ops_of[root] for root in order}


def _read_by(
    tape: Tape, root: int, its_ops: list[int], own: set[int], members: _Partition
) -> set[int]:
    """Groups that the ops of another one read, by one of their storages."""
    reads = {s for i in its_ops for s in tape.ops[i].reads if s in own}
    return {members.find(s) for s in reads} - {root}


def lasting(tape: Tape, saved: Iterable[int], leave: int) -> list[int]:
    """Tensors that autograd saved in a call and still has when it is left.

    What a call computes and drops takes its graph along, which no backward pass reads.
    """
    return [i for i in saved if tape.saved[i].released >= leave]


def _needed(tape: Tape, rerun: list[int], saved: Iterable[int]) -> set[int]:
    """Storages that backward reads, or whose values the model's code reads."""
    needed = {tape.saved[i].storage for i in saved}
    for op in (tape.ops[i] for i in rerun):
        if not op.shapes:
            needed.update(op.reads)
    return needed


def _reads_changing(
    index: TapeIndex, rerun: list[int], own: set[int], trigger: int
) -> set[int]:
    """Ops that read something from outside which changes before the rerun.

    Where other forward passes run before that, they may write whatever this one does.
    """
    tape = index.tape
    written = None  # between an op and its rerun
    if tape.overlapped:
        written = -1, tape.phases["backward"]
    return {
        i
        for i in rerun
        if tape.ops[i].name not in BATCH_NORM_OPS
        and any(
            index.written_between(s, *(written or (tape.ops[i].start, trigger)))
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
