"""What a module call does to lifetimes when it is rerun, under any policy.

Most of it does not depend on the policy: it is worked out once for each unit, as rows
that say which group they belong to. A policy selects among these.

Spans say what they are as large as, not how large that is, so that all of it holds in
blocks of any size: see `sizes_of`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autosac.step.tape import IntArray, Op, Tape
from autosac.units.policies import RERUN, SAVE, SKIP, Policy
from autosac.units.unit import Piece, Unit

# Of `torch.get_rng_state()`: the generator's legacy state of the Mersenne twister
# (aten/src/ATen/CPUGeneratorImpl.cpp).
_RANDOM_STATE_BYTES = 5056

BoolArray = npt.NDArray[np.bool_]
# Memory: key from which, key to which, and the place of its bytes in `sizes_of`.
Span = tuple[int, int, int]


@dataclass(slots=True)
class Lifetimes:
    """An `Effect` that is still being written.

    Attributes:
        held: Storage -> key until when it is kept alive.
        copies: Spans of what is made again, in parts of shape (., 3),
        works: and of what its kernels hold for themselves.
    """

    held: dict[int, int] = field(default_factory=dict)
    copies: list[IntArray] = field(default_factory=list)
    works: list[IntArray] = field(default_factory=list)

    def hold(self, storage: int, until: int) -> None:
        """Keep a storage alive at least until a key."""
        self.held[storage] = max(self.held.get(storage, 0), until)

    def add(self, other: Lifetimes) -> None:
        """Add the lifetimes of another part of the same unit."""
        if not self.held:
            self.held = dict(other.held)
        else:
            for storage, until in other.held.items():
                self.hold(storage, until)
        self.copies += other.copies
        self.works += other.works


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rerun:
    """All that a rerun of a module call may do to lifetimes, whatever the policy.

    Attributes:
        kept: Storages that the call does not make -> key until when it keeps them.
        storages: What its groups make,
        made_by: the group of each,
        pieces: the span of each if it is made again,
        dropped: and key until when autograd has it if nobody needs it in backward, 0
            unless the call drops a graph that it belongs to.
        states: Spans of random states that are copied after the groups.
        works: Those that are copied unless a group is saved, and what kernels hold
            if it is rerun: group, whether a kernel holds it, and its span.
        fetched: Spans of arguments that are copied back.
        moves: Which of the storages are in far memory if they are saved,
        let_go: which the device holds until this key,
        back: and has again from this one on.
    """

    kept: dict[int, int]
    storages: IntArray
    made_by: IntArray
    pieces: IntArray
    dropped: IntArray
    states: IntArray
    works: IntArray
    fetched: IntArray
    moves: BoolArray
    let_go: int
    back: int

    def under(self, policy: Policy) -> Lifetimes:
        """Lifetimes that the rerun leaves under a policy."""
        choices = np.frombuffer(policy.choices.encode(), dtype=np.uint8)
        own = choices[self.made_by]
        saved = own == ord(SAVE)
        moved = saved & self.moves
        storages = self.storages[saved]
        until = np.where(moved, self.let_go, self.pieces[:, 1])[saved]
        kept = zip(storages.tolist(), until.tolist(), strict=True)
        skipped = (own == ord(SKIP)) & (self.dropped > 0)
        storages, until = self.storages[skipped], self.dropped[skipped]
        dropped = zip(storages.tolist(), until.tolist(), strict=True)
        lifetimes = Lifetimes(
            held={**self.kept, **dict(kept), **dict(dropped)},
            copies=[self.pieces[own == ord(RERUN)]],
        )
        if len(self.fetched):
            lifetimes.copies.append(self.fetched)
        if moved.any():
            again = self.pieces[moved].copy()
            again[:, 0] = self.back
            lifetimes.copies.append(again)
        if len(self.states):
            lifetimes.works.append(self.states)
        if len(self.works):
            own, is_kernel = choices[self.works[:, 0]], self.works[:, 1] > 0
            works = np.where(is_kernel, own == ord(RERUN), own != ord(SAVE))
            lifetimes.works.append(self.works[works, 2:])
        return lifetimes


class Reruns:
    """The module calls of a tape, rerun.

    Args:
        tape: The traced step.
        span: Keys per tick.
    """

    def __init__(self, tape: Tape, span: int) -> None:
        self._tape = tape
        self._span = span
        self._copies_states = tape.device_type == "cpu"  # else they lie on the CPU
        self._places = [
            i for i, op in enumerate(tape.ops) if op.may_draw or op.workspace_bytes
        ]
        first_work = len(tape.storages) + len(tape.library_bytes)
        with_work = (i for i, op in enumerate(tape.ops) if op.workspace_bytes)
        self._works_of = {i: first_work + n for n, i in enumerate(with_work)}
        self._state = first_work + len(self._works_of) + len(tape.earlier)
        self._known: dict[tuple[Unit, int, tuple[int, ...] | None], _Rerun] = {}
        self._until: dict[Unit, dict[int, int]] = {}

    def lifetimes(
        self,
        unit: Unit,
        policy: Policy,
        piece: Piece,
    ) -> Lifetimes:
        """One module call, rerun.

        Args:
            unit: The call.
            policy: What it saves.
            piece: When it is rerun, what earlier blocks make for it, and what lies in
                far memory.
        """
        key = (unit, piece.begin(self._span), piece.relayed)
        if key not in self._known:
            self._known[key] = self._rerun(unit, piece)
        return self._known[key].under(policy)

    def saved_until(self, unit: Unit) -> dict[int, int]:
        """Storages that autograd saves in a unit -> tick until when it keeps them."""
        if unit not in self._until:
            until: dict[int, int] = {}
            for saved in (self._tape.saved[i] for i in unit.saved):
                tick = max(until.get(saved.storage, 0), saved.used_until)
                until[saved.storage] = tick
            self._until[unit] = until
        return self._until[unit]

    def workspaces(self, ops: Iterable[int], begin: int) -> list[Span]:
        """What kernels that run again allocate inside themselves, by places of ops."""
        held = []
        for i in ops:
            op = self._tape.ops[i]
            if op.workspace_bytes:
                held.append((begin + op.made, begin + op.end, self._works_of[i]))
            if op.may_draw and self._copies_states:
                held.append((begin + op.made, begin + op.end, self._state))
        return held

    def _rerun(self, unit: Unit, piece: Piece) -> _Rerun:
        tape, span = self._tape, self._span
        begin, relayed, far = piece.begin(span), piece.relayed, piece.far
        back = begin + unit.call.enter
        if piece.fetched is not None:
            back = piece.fetched * span
        # Only a chain runs again what comes after the last saved tensor.
        tail = [] if relayed is None else self._tail(unit)
        until = self.saved_until(unit)
        produced = [s for group in unit.groups for s in group.storages]
        storages = np.array(produced, dtype=np.int64)
        counts = [len(group.storages) for group in unit.groups]
        born, died = tape.born[storages], tape.died[storages]
        stop = unit.trigger * span - 1
        kept_until = np.array([until.get(s, -1) for s in produced], dtype=np.int64)
        is_early = (kept_until < 0) & (died <= unit.last_pack)
        end = np.where(is_early, begin + died, np.maximum(stop, kept_until * span))
        return _Rerun(
            kept={
                s: until[s] * span
                for s in until.keys() - {*produced, *(relayed or ()), *far}
            },
            storages=storages,
            made_by=np.repeat(np.arange(len(counts)), counts),
            pieces=np.array([begin + born, end, storages]).T,
            dropped=np.where(kept_until < unit.call.exit, kept_until * span, 0).clip(0),
            states=rows(self._states(tail), 3),
            works=rows(self._works(unit, begin), 5),
            moves=np.isin(storages, list(piece.results)),
            let_go=piece.let_go * span,
            back=back,
            fetched=rows(
                ((back, max(stop, until.get(s, 0) * span), s) for s in far), 3
            ),
        )

    def _works(self, unit: Unit, begin: int) -> Iterator[tuple[int, ...]]:
        """Rows of `_Rerun.works`, group by group."""
        ops = unit.ops
        first = bisect_left(self._places, ops.start)
        indices = self._places[first : bisect_left(self._places, ops.stop)]
        if not indices:
            return
        group_of = {i: g for g, group in enumerate(unit.groups) for i in group.ops}
        by_group: dict[int, list[int]] = {}
        for i in indices:
            g = group_of.get(i - ops.start)
            if g is not None:
                by_group.setdefault(g, []).append(i)
        for g, own in sorted(by_group.items()):
            drawn = (self._tape.ops[i] for i in own)
            yield from ((g, 0, *piece) for piece in self._states(drawn))
            yield from ((g, 1, *piece) for piece in self.workspaces(own, begin))

    def _tail(self, unit: Unit) -> list[Op]:
        """Ops of a chain's block after its last saved tensor, which no group has."""
        tail = []
        for i in reversed(unit.ops):
            op = self._tape.ops[i]
            if op.start < unit.last_pack:
                break
            tail.append(op)
        return tail[::-1]

    def _states(self, ops: Iterable[Op]) -> list[Span]:
        """Random states that are copied before ops that may draw and are not saved."""
        if not self._copies_states:
            return []
        return [
            (op.start * self._span, op.made * self._span, self._state)
            for op in ops
            if op.may_draw
        ]


def sizes_of(tape: Tape) -> IntArray:
    """Bytes of all that a span may name: see `Span`.

    Of storages, what libraries keep, workspaces of ops, what earlier steps take
    besides, and a random state.
    """
    works = (op.workspace_bytes for op in tape.ops if op.workspace_bytes)
    earlier = (more.nbytes for more in tape.earlier)
    others = [*tape.library_bytes, *works, *earlier, _RANDOM_STATE_BYTES]
    return np.concatenate([tape.nbytes, np.array(others, dtype=np.int64)])


def rows(tuples: Iterable[tuple[int, ...]], width: int) -> IntArray:
    """Tuples of so many numbers as an array, shape (., width)."""
    return np.array(list(tuples), dtype=np.int64).reshape(-1, width)
