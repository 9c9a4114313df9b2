"""Calls of blocks of chains and nests, and how they get arguments that nobody kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autosac import _compat
from autosac.applying.rerunning import OnwardMode, Run
from autosac.pytrees import tensors_in
from autosac.tracing.attributes import Attributes


class RunsOnward(Protocol):
    """Knows the nest that runs onward now, if one does."""

    onward: Nest | None


@dataclass(frozen=True, slots=True)
class _Relayed:
    """Stands in for an argument that an earlier block of the chain made.

    Attributes:
        position: Place of that block in the chain.
        leaf: Which tensor of its output it is.
    """

    position: int
    leaf: int


@dataclass(frozen=True, slots=True)
class _Held:
    """An argument from outside the chain, and how often it had been changed."""

    tensor: torch.Tensor
    version: int


class RelayedCall:
    """One forward call of a block; it knows its arguments, but does not keep all.

    What earlier blocks of the chain made is let go and made again when the first of
    the later blocks goes backward. A call refers to the one before it, so that all
    live as long as backward can need them.

    Args:
        forward: The block's forward function.
        run: Its forward pass.
        before: The call of the block before it, None for the first.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        run: Run,
        before: RelayedCall | None,
        args: Any,
        kwargs: Any,
    ) -> None:
        self.forward = forward
        self.run = run
        self.before = before
        self.position: int = 0 if before is None else before.position + 1
        self.made: list[tuple[weakref.ref[torch.Tensor], _Relayed]] = []
        self.given: dict[_Relayed, torch.Tensor] | None = None
        known = {} if before is None else _by_identity(before.made)
        self.template = _map((args, kwargs), lambda tensor: _slot(tensor, known))
        self.now: Any = (args, kwargs)

    @property
    def is_relayed(self) -> bool:
        """Whether it has an argument that it does not keep."""
        return next(_leaves(self.template, _Relayed), None) is not None

    def finish(self, output: Any) -> None:
        """Note what the forward call returned, without keeping it."""
        held = {id(slot.tensor) for slot in _leaves(self.template, _Held)}
        earlier = [] if self.before is None else self.before.made
        self.made = [entry for entry in earlier if entry[0]() is not None]
        for leaf, tensor in enumerate(tensors_in(output)):
            if id(tensor) not in held:
                place = _Relayed(self.position, leaf)
                self.made.append((weakref.ref(tensor), place))

    def arguments(self) -> tuple[Any, Any]:
        """Arguments of the call in forward, and again in its rerun."""
        now, self.now = self.now, None
        if now is not None:
            args, kwargs = now
            return args, kwargs
        if self.given is None and self.is_relayed:
            self._relay()
        given, self.given = self.given or {}, None
        args, kwargs = _filled(self.template, given, self.run.policy.fqn)
        return args, kwargs

    def _relay(self) -> None:
        """Run the chain onward up to this call; every call gets what it needs."""
        calls = [self]
        while calls[-1].before is not None:
            calls.append(calls[-1].before)
        calls.reverse()
        needed = [list(_leaves(call.template, _Relayed)) for call in calls]
        made: dict[_Relayed, torch.Tensor] = {}
        self.run.paused = True
        try:
            for call in calls[:-1]:
                wanted = {r for rs in needed for r in rs if r.position == call.position}
                made.update(call._onward(made, wanted))
        finally:
            self.run.paused = False
        for call, places in zip(calls, needed, strict=True):
            call.given = {place: made[place] for place in places}

    def _onward(
        self, made: dict[_Relayed, torch.Tensor], wanted: set[_Relayed]
    ) -> dict[_Relayed, torch.Tensor]:
        """What this call returned, made again; autograd keeps nothing of it."""
        args, kwargs = _filled(self.template, made, self.run.policy.fqn)
        with (
            torch.autograd.graph.saved_tensors_hooks(_drop, _refuse),
            OnwardMode(self.run),
        ):
            leaves = list(tensors_in(self.forward(*args, **kwargs)))
        return {place: _cut_off(leaves[place.leaf]) for place in wanted}


class _Reached(BaseException):
    """A nest has run as far as it has to."""


class _GlueMode(_compat.TorchDispatchMode):
    """Watches what a nest runs onward between its parts: it must be safe to repeat.

    The plan saw no random op and no change of an outer tensor there. A real run that
    has one would get other values or change the tensor twice: an error, not silence.
    """

    def __init__(self, nest: Nest) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nest = nest
        self.made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = list(tensors_in(_compat.written_arguments(func, args, kwargs)))
        if not self.nest.in_part:
            outer = any(t.untyped_storage()._cdata not in self.made for t in written)
            if outer or _compat.is_random(func):
                raise RuntimeError(
                    f"`{self.nest.fqn}` runs {func} between its parts, which its plan"
                    " does not expect and a rerun must not repeat. Plan again, or"
                    " exclude it from the plan with `exclude`."
                )
        out = func(*args, **kwargs)
        if not written and not _compat.is_view(func):
            self.made |= {t.untyped_storage()._cdata for t in tensors_in((out,))}
        return out


class Nest:
    """One forward call of the module of a nest; it keeps its arguments.

    Args:
        fqn: Name of the module.
        forward: Its forward function.
        attributes: Those of the module before the call.
        fqns: Names of the parts in the order of their calls.
        args: Positional arguments of the call.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self,
        fqn: str,
        forward: Callable[..., Any],
        attributes: Attributes,
        fqns: tuple[str, ...],
        args: Any,
        kwargs: Any,
    ) -> None:
        self.fqn = fqn
        self.forward = forward
        self.attributes = attributes
        self.fqns = fqns
        self.template = _map((args, kwargs), lambda tensor: _slot(tensor, {}))
        self.calls: list[weakref.ref[NestedCall]] = []
        self.reached = 0
        self.in_part = False
        self.asking: NestedCall | None = None

    def relay(self, asking: NestedCall) -> None:
        """Run onward up to a part; all parts on the way get their arguments."""
        args, kwargs = _filled(self.template, {}, self.fqn)
        self.reached, self.asking = 0, asking
        asking.run.paused = True
        present = self.attributes.resume()
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(_drop, _refuse),
                _GlueMode(self),
            ):
                self.forward(*args, **kwargs)
        except _Reached:
            pass
        finally:
            present.restore()
            self.asking = None
            asking.run.paused = False

    def meet(
        self, fqn: str, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A module is called while the nest runs onward."""
        if self.reached == len(self.fqns) or self.fqns[self.reached] != fqn:
            return forward(*args, **kwargs)
        call = self.calls[self.reached]()
        self.reached += 1
        if call is None:
            raise RuntimeError(
                f"Parts of `{self.fqn}` do not go backward in the reverse order of"
                " their calls. Exclude it from the plan with `exclude`."
            )
        given: dict[int, torch.Tensor] = {}  # one for each: modules ask `key is value`

        def give(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in given:
                given[id(tensor)] = _cut_off(tensor)
            return given[id(tensor)]

        call.given = _map((args, kwargs), give)
        if call is self.asking:
            raise _Reached
        self.in_part = True
        try:
            with OnwardMode(call.run):
                return forward(*args, **kwargs)
        finally:
            self.in_part = False


class NestedCall:
    """One forward call of a part of a nest; it keeps no arguments.

    Args:
        nest: The call of the module around it.
        run: Its forward pass.
        step: What is told which nest runs onward.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self, nest: Nest, run: Run, step: RunsOnward, args: Any, kwargs: Any
    ) -> None:
        self.nest = nest
        self.run = run
        self.step = step
        self.given: Any = (args, kwargs)
        nest.calls.append(weakref.ref(self))

    def arguments(self) -> tuple[Any, Any]:
        """Arguments of the call in forward, and again in its rerun."""
        if self.given is None:
            self.step.onward = self.nest
            try:
                self.nest.relay(self)
            finally:
                self.step.onward = None
        (args, kwargs), self.given = self.given, None
        return args, kwargs


def _cut_off(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the graph behind it, which autocast still takes for a result.

    Autocast caches what it casts of leaves, but not what it casts of results.
    """
    if tensor.is_leaf:
        return tensor
    leaf = tensor.detach().requires_grad_()
    return leaf.view_as(leaf)


def _drop(tensor: torch.Tensor) -> None:
    return None


def _refuse(nothing: None) -> torch.Tensor:
    raise RuntimeError("A block of a chain goes backward while it runs onward.")


def _by_identity(
    made: list[tuple[weakref.ref[torch.Tensor], _Relayed]],
) -> dict[int, _Relayed]:
    """Tensors that a chain made and that are alive; the first to make one counts."""
    known: dict[int, _Relayed] = {}
    for made_ref, place in made:
        tensor = made_ref()
        if tensor is not None:
            known.setdefault(id(tensor), place)
    return known


def _slot(tensor: torch.Tensor, known: dict[int, _Relayed]) -> _Relayed | _Held:
    place = known.get(id(tensor))
    if place is not None:
        return place
    return _Held(tensor, 0 if tensor.is_inference() else tensor._version)


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Nested arguments with their tensors changed; containers are copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, tuple):  # a named one
        return type(value)(*(_map(item, change) for item in value))
    if type(value) is dict:
        return {key: _map(item, change) for key, item in value.items()}
    return value


def _leaves(value: Any, kind: type) -> Iterator[Any]:
    """Items of a kind in nested arguments."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, kind)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item, kind)


def _filled(template: Any, given: dict[_Relayed, torch.Tensor], fqn: str) -> Any:
    """A template with tensors in all places."""
    if isinstance(template, _Relayed):
        return given[template]
    if isinstance(template, _Held):
        tensor = template.tensor
        if not tensor.is_inference() and tensor._version != template.version:
            raise RuntimeError(
                f"An argument of AC unit `{fqn}` was changed in place after its"
                " forward pass. Exclude the unit from the plan with `exclude`."
            )
        return tensor
    if type(template) in (list, tuple):
        return type(template)(_filled(item, given, fqn) for item in template)
    if isinstance(template, tuple):
        return type(template)(*(_filled(item, given, fqn) for item in template))
    if type(template) is dict:
        return {key: _filled(item, given, fqn) for key, item in template.items()}
    return template
