"""Calls of blocks of chains and nests, and how they get arguments that nobody kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autosac import _compat, _compat_dispatch
from autosac.checkpointing.ambient_state import Present
from autosac.checkpointing.call_arguments import (
    Handed,
    leaves,
    map_nested,
    put_together,
    take_apart,
)
from autosac.checkpointing.module_attributes import Attributes
from autosac.checkpointing.op_records import ONWARD, Outward, Record
from autosac.checkpointing.tensor_parts import key_of, version_of
from autosac.pytrees import tensors_in


class RunsOnward(Protocol):
    """A step that is told which nest runs onward."""

    def running_onward(self, nest: Nest) -> AbstractContextManager[None]:
        """Inside, modules that run belong to a nest that runs onward."""


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
        before: The call of the block before it, None for the first.
        arguments: Its positional and keyword arguments.

    Attributes:
        record: Its forward pass.
    """

    record: Record

    def __init__(self, before: RelayedCall | None, arguments: Any) -> None:
        self.before = before
        self.position: int = 0 if before is None else before.position + 1
        self.handed_on: list[tuple[weakref.ref[torch.Tensor], _Relayed]] = []
        self.given: dict[_Relayed, Handed] | None = None
        relayed = {} if before is None else before._by_identity()

        def slot(handed: Handed) -> _Relayed | Handed:
            return relayed.get(id(handed.tensor), handed)

        self.template = map_nested(take_apart(arguments), Handed, slot)

    def relayed(self) -> Collection[int]:
        """As `Source.relayed`."""
        slots = leaves(self.template, (Handed, _Relayed))
        return tuple(i for i, slot in enumerate(slots) if isinstance(slot, _Relayed))

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
            output = record.code.run(record, template, _drop)
            handed = [_cut_off(tensor) for tensor in leaves(output, torch.Tensor)]
        return {place: handed[place.leaf] for place in wanted}


def run_onward(record: Record, template: Any) -> Any:
    """What a block returned, made again op by op, with `Handed` in place of tensors."""
    given = [handed.tensor for handed in leaves(template, Handed)]
    fqn = record.policy.fqn
    if record.outward is None:
        raise RuntimeError(
            f"AC unit `{fqn}` is needed to make arguments of later blocks again, but"
            " has gone backward for good. Pass `retain_graph=True` to all but the last"
            " backward pass."
        )

    def hand_on(outward: Outward) -> Handed:
        tensor = outward.tensor_of(given, fqn)
        return Handed(tensor, is_result=outward.is_result)

    try:
        with torch.enable_grad(), _compat_dispatch.below_autograd():
            record.run_again(given, ONWARD)
            return map_nested(record.outward, Outward, hand_on)
    finally:
        record.lose()


class _Reached(BaseException):
    """Raised to stop a nest that has run onward as far as it has to."""


class _GlueMode(_compat.TorchDispatchMode):
    """Watches what a nest runs onward between its parts: it must be safe to repeat.

    The plan saw no random op and no change of an outer tensor there. A real run that
    has one would get other values or change the tensor twice: an error, not silence.
    """

    def __init__(self, nest: Nest) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nest = nest
        self.changed = nest.changed()
        self.own: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = list(tensors_in(_compat.written_arguments(func, args, kwargs)))
        if not self.nest.in_part:
            outer = any(key_of(t) not in self.own for t in written)
            if outer or _compat.is_random(func):
                raise RuntimeError(
                    f"`{self.nest.fqn}` runs {func} between its parts, which its plan"
                    " does not expect and a rerun must not repeat. Plan again, or"
                    " exclude it from the plan with `exclude`."
                )
            if self.changed:
                self._refuse_changed(func, (args, kwargs))
        out = func(*args, **kwargs)
        if not written and not _compat.is_view(func):
            self.own |= {key_of(t) for t in tensors_in((out,))}
        return out

    def _refuse_changed(self, func: Any, arguments: Any) -> None:
        read = {key_of(tensor) for tensor in tensors_in(arguments)}
        if not _compat.is_view(func) and not read.isdisjoint(self.changed - self.own):
            raise RuntimeError(
                f"`{self.nest.fqn}` runs {func} between its parts on a tensor that has"
                " been changed in place since its forward pass. Change it after"
                " backward, or exclude the module from the plan with `exclude`."
            )


class Nest:
    """One forward call of the module of a nest; it keeps its arguments.

    Args:
        fqn: Name of the module.
        forward: Its forward function.
        attributes: Those of the module before the call.
        fqns: Names of the parts in the order of their calls.
        arguments: Positional and keyword arguments of the call.
    """

    def __init__(
        self,
        fqn: str,
        forward: Callable[..., Any],
        attributes: Attributes,
        fqns: tuple[str, ...],
        arguments: Any,
    ) -> None:
        self.fqn = fqn
        self.forward = forward
        self.attributes = attributes
        self.fqns = fqns
        self.template = take_apart(arguments)
        self.surroundings = Present()
        tensors = [*attributes.tensors(), *leaves(arguments, torch.Tensor)]
        self.versions = [(weakref.ref(t), version_of(t)) for t in tensors]
        self.calls: list[weakref.ref[NestedCall]] = []
        self.reached = 0
        self.in_part = False
        self.asking: NestedCall | None = None

    def changed(self) -> set[int]:
        """Storages of arguments, parameters and buffers changed since forward."""
        pairs = ((ref(), version) for ref, version in self.versions)
        return {key_of(t) for t, v in pairs if t is not None and version_of(t) != v}

    def relay(self, asking: NestedCall) -> None:
        """Run onward up to a part; all parts on the way get their arguments."""
        args, kwargs = put_together(self.template)
        self.reached, self.asking = 0, asking
        hooks = torch.autograd.graph.saved_tensors_hooks(_drop, _refuse)
        present = self.attributes.resume()
        try:
            with torch.enable_grad(), self.surroundings.again(), hooks, _GlueMode(self):
                self.forward(*args, **kwargs)
        except _Reached:
            pass
        finally:
            present.restore()
            self.asking = None

    def meet(
        self, fqn: str, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Handle a module that is called while the nest runs onward."""
        if self.reached == len(self.fqns) or self.fqns[self.reached] != fqn:
            return forward(*args, **kwargs)
        call = self.calls[self.reached]()
        self.reached += 1
        if call is None:
            raise RuntimeError(
                f"Parts of `{self.fqn}` do not go backward in the reverse order of"
                " their calls. Exclude it from the plan with `exclude`."
            )
        call.given = _cut_off_all((args, kwargs))
        if call is self.asking:
            raise _Reached
        self.in_part = True
        try:
            return self._onward(call)
        finally:
            self.in_part = False

    def _onward(self, call: NestedCall) -> Any:
        record = call.record
        if record.is_exact:
            return put_together(run_onward(record, call.given))
        assert record.code is not None
        return record.code.run(record, call.given, _drop)


class NestedCall:
    """One forward call of a part of a nest; it keeps no arguments.

    Args:
        nest: The call of the module around it.
        step: What is told which nest runs onward.
        arguments: Its positional and keyword arguments.

    Attributes:
        record: Its forward pass.
    """

    record: Record

    def __init__(self, nest: Nest, step: RunsOnward, arguments: Any) -> None:
        self._number = sum(1 for _ in leaves(arguments, torch.Tensor))
        self.nest = nest
        self.step = step
        self.given: Any = None
        nest.calls.append(weakref.ref(self))

    def again(self) -> Any:
        """As `Source.again`."""
        if self.given is None:
            with self.step.running_onward(self.nest):
                self.nest.relay(self)
        template, self.given = self.given, None
        return template

    def relayed(self) -> Collection[int]:
        """As `Source.relayed`."""
        return range(self._number)


def _cut_off(tensor: torch.Tensor) -> Handed:
    is_result = tensor.requires_grad and not tensor.is_leaf
    return Handed(tensor.detach() if is_result else tensor, is_result=is_result)


def _cut_off_all(arguments: Any) -> Any:
    """Arguments with `Handed` in place of tensors, without the graphs behind these."""
    cut: dict[int, Handed] = {}

    def give(handed: Handed) -> Handed:
        if id(handed) not in cut:
            cut[id(handed)] = _cut_off(handed.tensor)
        return cut[id(handed)]

    return map_nested(take_apart(arguments), Handed, give)


def _drop(tensor: torch.Tensor) -> None:
    return None


def _refuse(nothing: None) -> torch.Tensor:
    raise RuntimeError("A block of a chain goes backward while it runs onward.")
