"""How units under policies change what is alive, in blocks of any size."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from autosac.simulation.reruns import Lifetimes, Reruns, Span, rows
from autosac.step.tape import IntArray, Tape
from autosac.units.policies import RERUN, SAVE, Policy
from autosac.units.unit import Piece, Unit


@dataclass(frozen=True, kw_only=True)
class Effect:
    """How running one unit under one policy changes lifetimes.

    Attributes:
        held: Storages that are kept alive,
        held_until: and the keys until when.
        copies: Spans of what rerun ops allocate, shape (., 3), not in bytes: see
            `autosac.simulation.reruns`.
        works: What their kernels hold for themselves, likewise.
    """

    held: IntArray
    held_until: IntArray
    copies: IntArray
    works: IntArray


@dataclass(slots=True)
class _Onward:
    """A block that runs onward, in ticks of its forward pass.

    Attributes:
        saved: Storages that its policy has saved.
        remade: Spans of what is made on the way to a later block.
        works: Spans of what its kernels hold for themselves.
    """

    saved: list[int] = field(default_factory=list)
    remade: list[Span] = field(default_factory=list)
    works: list[Span] = field(default_factory=list)


class Effects:
    """What is known of the units of a tape, worked out once for each policy.

    Args:
        tape: The traced step.
        span: Keys per tick.
    """

    def __init__(self, tape: Tape, span: int) -> None:
        self._tape = tape
        self._span = span
        self._reruns = Reruns(tape, span)
        self._saved_until = tape.saved_until * span
        self._known: dict[tuple[Unit, Policy], Effect] = {}
        self._later: dict[Hashable, Lifetimes] = {}
        self._onwards: dict[Hashable, _Onward] = {}

    def of(self, unit: Unit, policy: Policy) -> Effect:
        """How one unit under one policy changes lifetimes."""
        key = (unit, policy)
        if key not in self._known:
            self._known[key] = self._work_out(unit, policy)
        return self._known[key]

    def _work_out(self, unit: Unit, policy: Policy) -> Effect:
        lifetimes, needed_until = Lifetimes(), dict[int, int]()
        pieces = unit.schedule(policy)
        for piece in pieces:
            if piece.leave is None:
                lifetimes.add(self._rerun(piece, is_one_of=len(pieces)))
                self._note_needs(piece, needed_until)
        copies: list[Span] = []
        works: list[Span] = []
        for piece in pieces:
            if piece.leave is not None:
                passed, start = self._onward(piece), piece.begin(self._span)
                for storage in passed.saved:
                    if storage in needed_until:
                        lifetimes.hold(storage, needed_until[storage])
                copies += [
                    (start + born, needed_until.get(storage, start + end), storage)
                    for born, end, storage in passed.remade
                ]
                works += [(start + a, start + b, n) for a, b, n in passed.works]
        for storage in unit.call.inputs:
            lifetimes.hold(storage, unit.held_until(storage) * self._span)
        if unit.is_streamed:
            copies += self._streamed(unit, policy, lifetimes)
        return Effect(
            held=np.array(list(lifetimes.held), dtype=np.int64),
            held_until=np.array(list(lifetimes.held.values()), dtype=np.int64),
            copies=np.concatenate([*lifetimes.copies, rows(copies, 3)]),
            works=np.concatenate([*lifetimes.works, rows(works, 3)]),
        )

    def _streamed(
        self, unit: Unit, policy: Policy, lifetimes: Lifetimes
    ) -> Iterator[Span]:
        """What a unit keeps that reruns nothing, and what it allocates again."""
        moves = unit.moves(policy)
        moved = {move.storage for move in moves}
        for i in unit.saved:
            storage = self._tape.saved[i].storage
            if storage not in moved:
                lifetimes.hold(storage, int(self._saved_until[i]))
        for move in moves:
            lifetimes.hold(move.storage, move.let_go * self._span)
            yield move.fetched * self._span, move.until * self._span, move.storage

    def _note_needs(self, piece: Piece, needed_until: dict[int, int]) -> None:
        """Until when a piece needs what earlier pieces make for it."""
        if piece.relayed:
            until = self._reruns.saved_until(piece.unit)
            for storage in piece.relayed:
                saved_until = until.get(storage, 0) * self._span
                end = max(piece.trigger * self._span - 1, saved_until)
                needed_until[storage] = max(needed_until.get(storage, 0), end)

    def _rerun(self, piece: Piece, *, is_one_of: int) -> Lifetimes:
        """A piece that autograd records; blocks of several chains are cached."""
        policy = Policy(piece.choices)
        if is_one_of == 1:
            return self._reruns.lifetimes(piece.unit, policy, piece)
        key = (piece.unit, policy, piece.relayed, piece.begin(self._span))
        if key not in self._later:
            self._later[key] = self._reruns.lifetimes(piece.unit, policy, piece)
        return self._later[key]

    def _onward(self, piece: Piece) -> _Onward:
        """A piece that only makes what later pieces get (cached)."""
        assert piece.leave is not None
        key = (piece.unit, piece.choices, piece.leave, piece.outputs_until)
        if key not in self._onwards:
            self._onwards[key] = self._work_onward(piece, piece.leave)
        return self._onwards[key]

    def _work_onward(self, piece: Piece, leave: int) -> _Onward:
        onward, outputs = _Onward(), piece.unit.call.outputs
        for group, choice in zip(piece.groups, piece.choices, strict=True):
            if choice == SAVE:
                onward.saved += group.storages
            elif choice == RERUN:
                for storage in group.storages:
                    record = self._tape.storages[storage]
                    until = piece.outputs_until if storage in outputs else leave
                    end = min(record.died, max(leave, until))
                    onward.remade.append((record.born, end, storage))
                ops = (piece.unit.ops[i] for i in group.ops)
                onward.works += self._reruns.workspaces(ops, 0)
        return onward
