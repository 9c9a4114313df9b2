"""Calls of the blocks of chains, which get arguments that nobody kept."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from autosac import _compat_dispatch
from autosac._compat_distributed import local
from autosac.checkpointing.call_arguments import (
    Handed,
    leaves,
    map_nested,
    take_apart,
)
from autosac.checkpointing.op_records import ONWARD, Outward, Record


@dataclass(frozen=True, slots=True)
class _Relayed:
    """Stands in for an argument that an earlier block of the chain made.

    Attributes:
        position: Place of that block in the chain.
        leaf: Which tensor of its output it is.
    """

    position: int
    leaf: int


class RelayedCall:
    """One forward call of a block; it knows its arguments, but does not keep all.

    What earlier blocks of the chain made is let go and made again when the first of
    the later blocks goes backward. A call refers to the one before it, so that all
    live as long as backward can need them.

    Args:
        before: The call of the block before it, None for the first, and where that
            is not the one that is planned.
        arguments: Its positional and keyword arguments.
        position: Its place in the chain.

    Attributes:
        record: Its forward pass.
    """

    record: Record

    def __init__(
        self, before: RelayedCall | None, arguments: Any, position: int
    ) -> None:
        self.before = before
        self.position = position
        self.handed_on: list[tuple[weakref.ref[torch.Tensor], _Relayed]] = []
        self.given: dict[_Relayed, Handed] | None = None
        relayed = {} if before is None else before._by_identity()

        def slot(handed: Handed) -> _Relayed | Handed:
            return relayed.get(id(handed.tensor), handed)

        self.template = map_nested(take_apart(arguments), Handed, slot)

    def begin(self, record: Record) -> None:
        """Note what the call does."""
        self.record = record

    def relayed(self) -> Collection[int]:
        """As `Source.relayed`."""
        slots = leaves(self.template, (Handed, _Relayed))
        return tuple(i for i, slot in enumerate(slots) if isinstance(slot, _Relayed))

    def keep_tensors_alone(self) -> None:
        """As `Source.keep_tensors_alone`."""
        self.template = tuple(leaves(self.template, (Handed, _Relayed)))

    def finish(self, output: Any) -> None:
        """Note what the forward call returned, without keeping it."""
        held = {id(handed.tensor) for handed in leaves(self.template, Handed)}
        earlier = [] if self.before is None else self.before.handed_on
        self.handed_on = [entry for entry in earlier if entry[0]() is not None]
        for leaf, tensor in enumerate(leaves(output, torch.Tensor)):
            if id(tensor) not in held:
                place = _Relayed(self.position, leaf)
                self.handed_on.append((weakref.ref(tensor), place))

    def _by_identity(self) -> dict[int, _Relayed]:
        """Tensors of the chain that are alive; the first block to return one counts."""
        places: dict[int, _Relayed] = {}
        for ref, place in self.handed_on:
            tensor = ref()
            if tensor is not None:
                places.setdefault(id(tensor), place)
        return places

    def again(self) -> Any:
        """As `Source.again`."""
        if self.given is None and self.relayed():
            self._relay()
        given, self.given = self.given or {}, None
        return map_nested(self.template, _Relayed, given.__getitem__)

    def _relay(self) -> None:
        """Run the chain onward up to this call; every call gets what it needs."""
        calls = [self]
        while calls[-1].before is not None:
            calls.append(calls[-1].before)
        calls.reverse()
        needed = [list(leaves(call.template, _Relayed)) for call in calls]
        ready: dict[_Relayed, Handed] = {}
        for call in calls[:-1]:
            wanted = {r for rs in needed for r in rs if r.position == call.position}
            ready.update(call._onward(ready, wanted))
        for call, places in zip(calls, needed, strict=True):
            call.given = {place: ready[place] for place in places}

    def _onward(
        self, ready: dict[_Relayed, Handed], wanted: set[_Relayed]
    ) -> dict[_Relayed, Handed]:
        """What this call returned, made again; autograd keeps nothing of it."""
        template = map_nested(self.template, _Relayed, ready.__getitem__)
        record = self.record
        if record.is_exact:
            handed = list(leaves(run_onward(record, template), Handed))
        else:
            assert record.code is not None
            output = record.code.run(record, template, drop)
            handed = [alone(tensor) for tensor in leaves(output, torch.Tensor)]
        return {place: handed[place.leaf] for place in wanted}


def run_onward(record: Record, template: Any) -> Any:
    """What a block returned, made again op by op, with `Handed` in place of tensors."""
    given = [local(handed.tensor) for handed in leaves(template, Handed)]
    fqn = record.policy.fqn
    if record.outward is None:
        raise RuntimeError(
            f"AC unit `{fqn}` is needed to make arguments of later blocks again, but"
            " has gone backward for good. Pass `retain_graph=True` to all but the last"
            " backward pass."
        )

    def hand_on(outward: Outward) -> Handed:
        return Handed(outward.again(given, fqn), is_result=outward.is_result)

    try:
        with _compat_dispatch.BelowAutograd():
            record.run_again(given, ONWARD)
            return map_nested(record.outward, Outward, hand_on)
    finally:
        record.lose()


def alone(tensor: torch.Tensor) -> Handed:
    """A tensor without its graph."""
    handed: Handed = take_apart(tensor)
    handed.cut_off()
    return handed


def drop(tensor: torch.Tensor) -> None:
    return None
