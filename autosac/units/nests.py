"""Nests: modules that are rerun in parts, each part when backward comes to it.

A module that is rerun as a whole keeps all that backward needs of it at once. As a nest
it keeps its arguments only, as before; but at the first read in backward it runs
forward once more without keeping anything but the arguments of its parts, and then each
part is rerun by itself. Its working set is that of its largest part, at the price of
nearly one more forward pass: what `torch.utils.checkpoint` does when it is nested.

The parts are the outermost candidates inside the module, and must save all that the
module saves. What else it does (its glue) is made again as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosac.step.tape import Tape
from autosac.units.candidates import inner
from autosac.units.chains import Block, Chain, joined_groups, make_block, placed
from autosac.units.groups import Group, TapeIndex, may_run_again
from autosac.units.unit import Unit


@dataclass(frozen=True, kw_only=True, eq=False)
class Nest(Chain):
    """A module that is rerun in parts, with what it does between them.

    Attributes:
        glue: Groups of what its module does between its parts.
    """

    glue: tuple[Group, ...]

    @property
    def title(self) -> str:
        return f"{self.fqn} (part by part)"

    @property
    def around(self) -> str:
        return self.fqn

    @property
    def _glue(self) -> tuple[Group, ...]:
        return self.glue

    def held_until(self, storage: int) -> int:
        return self.released


def find_nests(
    tape: Tape, candidates: Sequence[Unit], op_ms: Sequence[float]
) -> tuple[Nest, ...]:
    """Nests of a tape.

    Args:
        tape: The traced step.
        candidates: The units that are one module call each, in forward order.
        op_ms: Time to run every op of the tape again.
    """
    index = TapeIndex(tape)
    nests = []
    for place, unit in enumerate(candidates):
        if unit.num_calls == 1:
            parts = _parts(candidates, place)
            nest = _nest(index, unit, parts, op_ms) if len(parts) > 1 else None
            if nest is not None:
                nests.append(nest)
    return tuple(nests)


def _parts(candidates: Sequence[Unit], place: int) -> list[Unit]:
    """The outermost candidates inside a candidate, if they save all that it saves."""
    parts = inner(candidates, place)
    if sum(len(part.saved) for part in parts) != len(candidates[place].saved):
        return []
    return parts


def _nest(
    index: TapeIndex, around: Unit, parts: Sequence[Unit], op_ms: Sequence[float]
) -> Nest | None:
    tape = index.tape
    triggers = [part.trigger for part in parts]
    if any(b >= a for a, b in itertools.pairwise(triggers)):
        return None
    glue = _glue(index, around, parts, op_ms)
    if not glue:  # without glue the parts are a chain
        return None
    if _collects(tape, around, parts):
        return None
    blocks: list[Block] = []
    for part in parts:
        block = make_block(index, part, op_ms)
        if block is None:
            return None
        relayed = tuple(
            s for s in part.call.inputs if tape.storages[s].born > around.call.enter
        )
        blocks.append(replace(block, relayed=relayed))
    groups = joined_groups(index, parts, around.ops.start, around.saved, around.trigger)
    last_enter = parts[-1].call.enter
    outputs = [tape.storages[s] for part in parts for s in part.call.outputs]
    key = (
        placed(blocks),
        tuple(min(s.died, last_enter) - around.call.enter for s in outputs),
        tuple(group.saved_bytes for group in groups),
        tuple((group.ops, group.runtime_ms) for group in glue),
        len(around.call.inputs),
    )
    return around.as_kind(
        Nest,
        groups=groups,
        key=key,
        sole_bytes=sum(group.saved_bytes for group in groups if group.needed),
        followed_ms=sum(part.followed_ms for part in parts),
        blocks=tuple(blocks),
        glue=glue,
    )


def _collects(tape: Tape, around: Unit, parts: Sequence[Unit]) -> bool:
    """Whether a module keeps what its parts return, as lists of attention weights.

    It would when it runs forward once more, beyond the arguments of its parts.
    """
    inside = {i for part in parts for i in part.ops}
    read = {s for i in around.ops if i not in inside for s in tape.ops[i].reads}
    read.update(s for part in parts for s in part.call.inputs)
    return any(
        tape.storages[s].died > following.call.enter
        for part, following in itertools.pairwise(parts)
        for s in part.call.outputs
        if s not in read
    )


def _glue(
    index: TapeIndex, around: Unit, parts: Sequence[Unit], op_ms: Sequence[float]
) -> tuple[Group, ...]:
    """Groups of ops before the last part and in none; () if they must not rerun."""
    tape = index.tape
    inside = {i for part in parts for i in part.ops}
    last_enter = parts[-1].call.enter
    rest = [i for i in around.ops if i not in inside and tape.ops[i].start < last_enter]
    if not may_run_again(index, around.call, rest, around.trigger):
        return ()
    return tuple(
        Group(
            ops=(i - around.ops.start,),
            storages=tape.ops[i].creates,
            inputs=(),
            saved_bytes=0,
            runtime_ms=op_ms[i],
            needed=False,
            pinned=False,
            unsavable=True,
        )
        for i in rest
        if tape.ops[i].creates or tape.ops[i].writes
    )
