"""Chains: consecutive blocks whose inputs are not kept but made again, block by block.

With every block of a model under AC, what is kept are the blocks' inputs, one for
each. A chain keeps the first of them only. At the first read in backward its blocks
run forward once more, up to the last one, and leave their inputs behind; then each
block is rerun when backward comes to it. So a chain of k blocks frees k - 1 inputs
between forward and backward, at the price of nearly one more forward pass of it: the
square-root rule of Chen et al. (Training Deep Nets with Sublinear Memory Cost, 2016)
with blocks inside its segments, and with op policies inside the blocks.

Of a run of n linked blocks those chains are candidates that span 2, 4, 8, ... blocks
from every second, fourth, eighth, ... one: they nest, so that there are fewer than n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosac.step.tape import ModuleCall, Tape
from autosac.units.groups import Group, Tail, TapeIndex, make_tail
from autosac.units.policies import (
    DETACHED,
    RERUN,
    SKIP,
    VIEW,
    OpPolicy,
    Policy,
    is_listed,
)
from autosac.units.unit import Piece, Unit


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """One module call of a chain, and what it takes to run it to its end.

    Attributes:
        unit: The call as a unit of its own.
        tail: Groups of what it does after its last saved tensor, numbered on from the
            unit's.
        outward: Groups of unit and tail that its output comes from at once.
        relayed: Storages among its arguments that earlier blocks of the chain make.
    """

    unit: Unit
    tail: tuple[Group, ...]
    outward: tuple[int, ...]
    relayed: tuple[int, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of the unit and of its tail."""
        return (*self.unit.groups, *self.tail)

    def onward(self, policy: Policy) -> str:
        """Choice for each of the groups to make the block's output again.

        Nothing that was saved is made twice. What its own rerun needs is made with it.
        """
        own = policy.choices + RERUN * len(self.tail)
        needed = set(self.outward)
        choices = []
        for g in reversed(range(len(self.groups))):
            choice = RERUN if own[g] == SKIP and g in needed else own[g]
            if choice == RERUN:
                needed.update(self.groups[g].inputs)
            choices.append(choice)
        return "".join(reversed(choices))


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain(Unit):
    """Blocks that run onward when the last one is due; then each is rerun in turn.

    Attributes:
        blocks: The calls; the groups are those of the blocks one after the other.
    """

    blocks: tuple[Block, ...]

    @property
    def title(self) -> str:
        return f"{self.blocks[0].unit.fqn} … {self.blocks[-1].unit.fqn}"

    @property
    def calls(self) -> tuple[Unit, ...]:
        return tuple(block.unit for block in self.blocks)

    @property
    def _glue(self) -> tuple[Group, ...]:
        """What runs between the blocks."""
        return ()

    def parts(self, policy: Policy) -> list[tuple[Block, Policy]]:
        """The blocks, each with its part of a policy."""
        parts = []
        first = 0
        for block in self.blocks:
            last = first + len(block.unit.groups)
            parts.append((block, Policy(policy.choices[first:last])))
            first = last
        return parts

    def by_call(self, policy: Policy) -> list[tuple[Unit, Policy]]:
        return [(block.unit, part) for block, part in self.parts(policy)]

    def schedule(self, policy: Policy) -> tuple[Piece, ...]:
        parts = self.parts(policy)
        last_enter = self.blocks[-1].unit.call.enter
        pieces = [
            Piece(
                unit=block.unit,
                groups=block.groups,
                choices=block.onward(part),
                trigger=self.trigger,
                enter=self.call.enter,
                leave=block.unit.call.exit,
                outputs_until=last_enter if self._glue else 0,
            )
            for block, part in parts[:-1]
        ]
        if self._glue:
            pieces.append(
                Piece(
                    unit=self,
                    groups=self._glue,
                    choices=RERUN * len(self._glue),
                    trigger=self.trigger,
                    enter=self.call.enter,
                    leave=last_enter,
                )
            )
        for block, part in parts:
            unit = block.unit
            is_first = unit.trigger == self.trigger  # right behind what runs onward
            pieces.append(
                Piece(
                    unit=unit,
                    groups=unit.groups,
                    choices=part.choices,
                    trigger=unit.trigger,
                    enter=self.call.enter if is_first else unit.call.enter,
                    relayed=block.relayed,
                )
            )
        return tuple(pieces)

    def held_until(self, storage: int) -> int:
        takers = (unit for unit in self.calls if storage in unit.call.inputs)
        return max((unit.released for unit in takers), default=self.released)

    def op_policies(
        self, tape: Tape, policy: Policy, *, training: bool
    ) -> tuple[OpPolicy, ...]:
        policies = []
        for position, (block, part) in enumerate(self.parts(policy)):
            ops = [tape.ops[i] for i in block.unit.ops]
            actions = [VIEW if op.is_view else DETACHED for op in ops]
            for group, choice in zip(block.groups, block.onward(part), strict=True):
                for i in group.ops:
                    actions[i] = choice
            listed = [a for a, op in zip(actions, ops, strict=True) if is_listed(op)]
            policies.append(
                block.unit.spelled(
                    tape,
                    part,
                    training,
                    after=RERUN,
                    chain=f"{self.fqn} {self.call_index}",
                    position=position,
                    onward="".join(listed),
                    around=self.around,
                )
            )
        return tuple(policies)


def find_chains(
    tape: Tape, candidates: Sequence[Unit], op_ms: Sequence[float]
) -> tuple[Chain, ...]:
    """Chains of a tape.

    Args:
        tape: The traced step.
        candidates: The units that are one module call each, in forward order.
        op_ms: Time to run every op of the tape again.
    """
    index = TapeIndex(tape)
    chains = []
    for run in _runs(index, candidates):
        blocks = [make_block(index, unit, op_ms) for unit in run]
        for first, last in spans(len(run)):
            chain = _chain(index, blocks[first:last])
            if chain is not None:
                chains.append(chain)
    return tuple(chains)


def _runs(index: TapeIndex, candidates: Sequence[Unit]) -> list[list[Unit]]:
    """Units that follow each other with nothing in between, two or more at a time."""
    tape = index.tape
    around = _enclosing_calls(tape.calls)
    open_runs: dict[int, list[Unit]] = {}
    runs: list[list[Unit]] = []
    for unit in candidates:
        if tape.modules[unit.module].is_leaf:
            continue
        place = around[unit.call.enter]
        run = open_runs.get(place)
        if run is not None and _follows(index, run[-1], unit):
            run.append(unit)
        else:
            open_runs[place] = run = [unit]
            runs.append(run)
    return [run for run in runs if len(run) > 1]


def _enclosing_calls(calls: Sequence[ModuleCall]) -> dict[int, int]:
    """Enter tick of each call -> that of the call around it, -1 if there is none."""
    enclosing: dict[int, int] = {}
    stack: list[ModuleCall] = []
    for call in calls:
        while stack and stack[-1].exit < call.enter:
            stack.pop()
        enclosing[call.enter] = stack[-1].enter if stack else -1
        stack.append(call)
    return enclosing


def _follows(index: TapeIndex, before: Unit, after: Unit) -> bool:
    """Whether a unit takes over from another one at once."""
    return (
        not index.ops_in(before.call.exit, after.call.enter)
        and after.trigger < before.trigger
        and not set(before.call.outputs).isdisjoint(after.call.inputs)
    )


def spans(length: int) -> list[tuple[int, int]]:
    """Where chains of so many linked blocks begin and end; they nest."""
    spans: dict[tuple[int, int], None] = {}
    size = 2
    while size < 2 * length:
        for first in range(0, length - 1, size):
            last = min(first + size, length)
            if last - first > 1:
                spans[first, last] = None
        size *= 2
    return list(spans)


def make_block(index: TapeIndex, unit: Unit, op_ms: Sequence[float]) -> Block | None:
    """A unit and what it takes to run it to its end; None if that must not be."""
    tail = make_tail(
        index, unit.call, unit.ops, unit.groups, unit.last_pack, unit.trigger, op_ms
    )
    if not isinstance(tail, Tail):
        return None
    return Block(unit=unit, tail=tail.groups, outward=tail.outward, relayed=())


def _chain(index: TapeIndex, blocks: Sequence[Block | None]) -> Chain | None:
    """Linked blocks as one unit, if all that they hand on is known."""
    linked: list[Block] = []
    passed: set[int] = set()
    for block in blocks:
        if block is None:
            return None
        call = block.unit.call
        relayed = _relayed(index, call, linked)
        if not passed.issuperset(relayed):
            return None
        linked.append(replace(block, relayed=relayed))
        passed |= set(call.outputs)
    units = [block.unit for block in linked]
    first, last = units[0], units[-1]
    inputs = {
        s: None
        for block in linked
        for s in block.unit.call.inputs
        if s not in block.relayed
    }
    call = ModuleCall(
        module=first.module,
        phase=first.call.phase,
        enter=first.call.enter,
        exit=last.call.exit,
        inputs=tuple(inputs),
        outputs=last.call.outputs,
        once=None,
    )
    saved = range(first.saved.start, last.saved.stop)
    groups = joined_groups(index, units, first.ops.start, saved, last.trigger)
    return Chain(
        fqn=f"{first.fqn}-{last.fqn}",
        module=first.module,
        call=call,
        call_index=first.call_index,
        num_calls=first.num_calls,
        ops=range(first.ops.start, last.ops.stop),
        saved=saved,
        last_pack=last.last_pack,
        trigger=last.trigger,
        released=max(unit.released for unit in units),
        last_use=max(unit.last_use for unit in units),
        groups=groups,
        key=(placed(linked), tuple(group.saved_bytes for group in groups)),
        activation_bytes=sum(unit.activation_bytes for unit in units),
        sole_bytes=sum(group.saved_bytes for group in groups if group.needed),
        followed_ms=sum(unit.followed_ms for unit in units),
        blocks=tuple(linked),
    )


def _relayed(
    index: TapeIndex, call: ModuleCall, before: Sequence[Block]
) -> tuple[int, ...]:
    """Arguments that earlier blocks of the chain made."""
    if not before:
        return ()
    enter = before[0].unit.call.enter
    return tuple(s for s in call.inputs if index.tape.storages[s].born > enter)


def joined_groups(
    index: TapeIndex, units: Sequence[Unit], start: int, saved: range, trigger: int
) -> tuple[Group, ...]:
    """The groups of all blocks; saving one costs what nobody outside keeps."""
    groups: list[Group] = []
    for unit in units:
        shift, offset = unit.ops.start - start, len(groups)
        for group in unit.groups:
            kept = [
                index.tape.storages[s].nbytes
                for s in group.storages
                if index.held_elsewhere_until(s, saved) < trigger
            ]
            groups.append(
                Group(  # `replace` takes twice as long
                    ops=tuple([i + shift for i in group.ops]),
                    storages=group.storages,
                    inputs=tuple([g + offset for g in group.inputs]),
                    saved_bytes=sum(kept),
                    runtime_ms=group.runtime_ms,
                    needed=group.needed,
                    pinned=group.pinned,
                    unsavable=group.unsavable,
                )
            )
    return tuple(groups)


def placed(blocks: Sequence[Block]) -> tuple[object, ...]:
    """A key, equal for blocks that behave alike and are placed alike."""
    first = blocks[0].unit
    return tuple(
        (
            block.unit.key,
            block.unit.call.enter - first.call.enter,
            first.trigger - block.unit.trigger,
            tuple((group.ops, group.inputs) for group in block.tail),
            block.outward,
            len(block.relayed),
        )
        for block in blocks
    )
