"""Calls of the parts of nests: a module keeps its arguments, its parts keep none.

When backward comes to a part, the module runs onward once more, up to that part, and
leaves their arguments to all parts on the way. What it does between its parts (its
glue) runs as Python code then, so it must do the same again and nothing else. A plan
takes care of that for what it has seen. If a step draws random numbers there, or
changes a tensor from outside, the nest departs: the parts behind keep their arguments,
as by plain checkpointing, so that nothing of the kind ever runs again.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from autosac import _compat, _compat_dispatch, _compat_fakes
from autosac._compat_distributed import (
    are_distributed,
    key_on_rank,
    local,
    unwrapped,
)
from autosac.checkpointing.ambient_state import Present
from autosac.checkpointing.call_arguments import (
    Handed,
    leaves,
    map_nested,
    put_together,
    take_apart,
)
from autosac.checkpointing.chained_calls import alone, drop, run_onward
from autosac.checkpointing.module_attributes import Snapshots
from autosac.checkpointing.op_records import Record
from autosac.checkpointing.tensor_parts import (
    Literal,
    alias_of,
    copy_of,
    equal_bytes,
    key_of,
    layout_of,
    version_of,
)
from autosac.pytrees import mapped, tensors_in


class RunsOnward(Protocol):
    """A step that is told which nest runs onward."""

    def running_onward(self, nest: Nest) -> AbstractContextManager[None]:
        """Inside, modules that run belong to a nest that runs onward."""


class _Reached(BaseException):
    """Raised to stop a nest that has run onward as far as it has to."""


class _ForwardGlue(_compat.PlainDispatchMode):
    """Watches in forward what a nest does between its parts, up to the last of them.

    Args:
        nest: The nest; departs if that must not run again.
    """

    def __init__(self, nest: Nest) -> None:
        super().__init__()
        self.nest = nest
        self.own: set[int] = set()  # storages made since the nest began
        self._depth = 0
        self._is_on = self._is_paused = False

    def begin(self) -> None:
        """Called as the nest begins, or goes on behind a part."""
        self._is_paused = False
        if not self._is_on and not self.nest.is_complete:
            self._depth = _compat_dispatch.num_modes()
            self._is_on = True
            self.__enter__()

    def end(self) -> None:
        """Called as the nest ends, or comes to a part."""
        if self._is_on and _compat_dispatch.num_modes() == self._depth + 1:
            self._is_on = False
            self.__exit__(None, None, None)
        self._is_paused = True  # if a mode of the model's own is in the way

    def run_part(self, run: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
        """Run a part of the nest; what it returns is the nest's own from now on."""
        self.end()
        try:
            output = run()
        finally:
            self.begin()
        outer = {key_of(t) for t in given if key_of(t) not in self.own}
        for tensor in leaves(output, torch.Tensor):
            key = key_on_rank(tensor)
            if id(tensor) not in self.nest.outer and key not in outer:
                self.own.add(key)
        return output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and are_distributed(types):
            return NotImplemented
        kwargs = kwargs or {}
        if id(func) in _compat.IGNORED_IDS:
            return _compat.run_ignored(func, args, kwargs)
        if self._is_paused:
            return func(*args, **kwargs)
        traits = _compat_dispatch.traits(func)
        if traits.is_wait:  # whoever reads a result first does, now or in a part
            return func(*args, **kwargs)
        if traits.may_draw:
            self.nest.depart(f"draws random numbers, or may ({traits.name})")
        is_write = bool(traits.written or traits.statistics)
        if is_write:
            for tensor in tensors_in(_compat.written_arguments(func, args, kwargs)):
                if key_of(tensor) not in self.own and self.nest.is_outer(tensor):
                    self.nest.depart(f"changes a tensor from outside ({traits.name})")
                    self.nest.protect(tensor)
        if not self.nest.departed:
            is_made = traits.is_literal  # of numbers, which need not stay in its memory
            read = [Literal(args[0])] if is_made else self._read(args, kwargs)
            self.nest.ops.append((func, read))
        out = func(*args, **kwargs)
        if not is_write and (traits.is_literal or not traits.is_view):
            self.own.update(map(key_of, tensors_in((out,))))
        return out

    def _read(self, args: Any, kwargs: Any) -> list[Any]:
        """What an op reads; layouts in place of tensors that the nest made."""
        return [
            _Own(value.shape, value.dtype)
            if isinstance(value, torch.Tensor) and key_of(value) in self.own
            else value
            for value in _values_in(args, kwargs)
        ]


class _Own(NamedTuple):
    """A tensor that the nest made, which is another one in a rerun."""

    shape: torch.Size
    dtype: torch.dtype


def _values_in(args: Any, kwargs: Any) -> Iterator[Any]:
    """Tensors and plain values among the arguments of an op."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _is_same(before: Any, now: Any) -> bool:
    """Whether a rerun reads what forward read."""
    if isinstance(before, _Own):
        is_tensor = isinstance(now, torch.Tensor)
        return is_tensor and before == (now.shape, now.dtype)
    if isinstance(before, Literal):
        return isinstance(now, torch.Tensor) and equal_bytes(before.tensor(), now)
    if isinstance(before, torch.Tensor):
        if not isinstance(now, torch.Tensor):
            return False
        if key_of(before) == key_of(now) or _compat_fakes.is_fake(now):
            return layout_of(before) == layout_of(now)
        return equal_bytes(before, now)
    return before is now or bool(before == now) or bool(before != before)


class _RerunGlue(_compat.DispatchMode):
    """Watches what a nest runs onward between its parts: it must be safe to repeat.

    Args:
        nest: The nest, which did nothing of the kind in forward.
    """

    def __init__(self, nest: Nest) -> None:
        super().__init__()
        self.nest = nest
        self.changed = nest.changed()
        self.own: set[int] = set()
        self.place = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and are_distributed(types):
            return NotImplemented
        kwargs = kwargs or {}
        if id(func) in _compat.IGNORED_IDS or _compat_dispatch.traits(func).is_wait:
            return func(*args, **kwargs)
        written = list(tensors_in(_compat.written_arguments(func, args, kwargs)))
        is_view = _compat.is_view(func)
        if not self.nest.in_part:
            outer = any(key_of(t) not in self.own for t in written)
            if outer or not self._is_next(func, args, kwargs):
                raise RuntimeError(
                    f"`{self.nest.fqn}` runs {func} between its parts when it is rerun"
                    " in backward, but something else in forward: it depends on state"
                    " that changed in between. Exclude it from the plan with `exclude`."
                )
            if self.changed and not is_view:
                self._refuse_changed(func, (args, kwargs))
            if self.nest.copies and not is_view:
                as_before = self.nest.as_before
                args, kwargs = mapped(as_before, args), mapped(as_before, kwargs)
        out = func(*args, **kwargs)
        if not written and not is_view:
            self.own |= {key_of(t) for t in tensors_in((out,))}
        return out

    def _is_next(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether forward ran this op at this place, on the same tensors and values."""
        if self.place == len(self.nest.ops):
            return False
        expected, read = self.nest.ops[self.place]
        self.place += 1
        values = list(_values_in(args, kwargs))
        is_alike = expected is func and len(read) == len(values)
        return is_alike and all(map(_is_same, read, values))

    def _refuse_changed(self, func: Any, arguments: Any) -> None:
        read = {key_of(tensor) for tensor in tensors_in(arguments)}
        if not read.isdisjoint(self.changed - self.own):
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
        snapshots: Take the attributes of the module.
        fqns: Names of the parts in the order of their calls.
        arguments: Positional and keyword arguments of the call.

    Attributes:
        glue: Watches what it does between its parts while it runs forward.
        ops: What it did between its parts until it departed, and what that read.
        calls: Calls of its parts, as long as backward can come to them,
        records: and what they did.
        copies: Tensors from outside that it changed, by storage: an alias, and a copy
            of what the tensor was before.
        departed: Parts keep their arguments from now on.
        in_part: What runs onward now belongs to a part.
    """

    def __init__(
        self,
        fqn: str,
        forward: Callable[..., Any],
        snapshots: Snapshots,
        fqns: tuple[str, ...],
        arguments: Any,
    ) -> None:
        self.fqn = fqn
        self.forward = forward
        self.attributes = snapshots.take()
        self.snapshots = snapshots
        self.fqns = fqns
        self.template = take_apart(arguments)
        self.surroundings = Present()
        outer = [*self.attributes.tensors(), *leaves(arguments, torch.Tensor)]
        self.outer = {id(t): (weakref.ref(t), version_of(t)) for t in outer}
        self.glue: _ForwardGlue | None = None
        self.ops: list[tuple[Any, list[Any]]] = []
        self.calls: list[weakref.ref[NestedCall]] = []
        self.records: list[Record] = []
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.departed = False
        self.reached = 0
        self.in_part = False
        self.asking: NestedCall | None = None

    # --- forward ----------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether all parts were called: what follows does not run again."""
        return len(self.calls) == len(self.fqns)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the module's forward pass."""
        self.glue = glue = _ForwardGlue(self)
        glue.begin()
        try:
            return self.forward(*args, **kwargs)
        finally:
            glue.end()
            self.glue = None
            self._let_go_of_graphs()

    def _let_go_of_graphs(self) -> None:
        """Let go of the graphs that the arguments belong to."""
        for handed in leaves(self.template, Handed):
            entry = self.outer.pop(id(handed.tensor), None)
            handed.cut_off()
            if entry is not None:
                tensor = handed.tensor
                self.outer[id(tensor)] = (weakref.ref(tensor), entry[1])

    def is_outer(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, which is not known to be the nest's own, was there before.

        What a part has made may lie in attributes of the module since.
        """
        key = key_of(tensor)
        if key in self._outer_versions():
            return True
        return key not in map(key_on_rank, self.snapshots.take().tensors())

    def depart(self, what: str) -> None:
        """Let parts keep their arguments from now on."""
        if self.departed:
            return
        self.departed = True
        warnings.warn(
            f"`{self.fqn}` {what} between its parts, which its plan does not expect."
            " Its parts keep their arguments from there on, as by plain checkpointing:"
            " the planned peak no longer holds. Plan again with inputs like these.",
            stacklevel=2,
        )

    def protect(self, tensor: torch.Tensor) -> None:
        """Copy what is changed now, but must be found as it is by earlier parts."""
        if not self.calls or key_of(tensor) in self.copies:
            return
        with _compat.no_dispatch():
            alias = _compat_dispatch.detached(tensor)
            copy = copy_of(alias)
        _compat_dispatch.set_version(copy, version_of(tensor))
        self.copies[key_of(tensor)] = alias, copy

    # --- backward ---------------------------------------------------------------

    def as_before(self, value: Any) -> Any:
        """A tensor as it was before the nest changed it."""
        if not isinstance(value, torch.Tensor) or key_of(value) not in self.copies:
            return value
        return alias_of(self.copies[key_of(value)][1], layout_of(value))

    def _outer_versions(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Arguments, parameters and buffers with their versions, by storage."""
        tensors = ((ref(), version) for ref, version in self.outer.values())
        return {key_on_rank(t): (t, version) for t, version in tensors if t is not None}

    def changed(self) -> set[int]:
        """Storages of tensors from outside that have changed, and are not copied."""
        changed = set()
        for key, (tensor, version) in self._outer_versions().items():
            now = self.copies[key][1] if key in self.copies else tensor
            if version_of(now) != version:
                changed.add(key)
        return changed

    def relay(self, asking: NestedCall) -> None:
        """Run onward up to a part; all parts on the way get their arguments."""
        args, kwargs = put_together(self.template)
        self.reached, self.asking = 0, asking
        hooks = torch.autograd.graph.saved_tensors_hooks(drop, _refuse)
        present = self.attributes.resume()
        try:
            with (
                torch.enable_grad(),
                self.surroundings.again(),
                hooks,
                _RerunGlue(self),
            ):
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
        if self.reached == len(self.calls) or self.fqns[self.reached] != fqn:
            return forward(*args, **kwargs)
        record, call = self.records[self.reached], self.calls[self.reached]()
        self.reached += 1
        self.in_part = True
        try:
            given = self._given((args, kwargs))
            if call is not None:  # else autograd has dropped it
                call.given = given
            if call is self.asking:
                raise _Reached
            if record.is_exact:
                return put_together(run_onward(record, given))
            assert record.code is not None
            return record.code.run(record, given, drop)
        finally:
            self.in_part = False

    def _given(self, arguments: Any) -> Any:
        """A part's arguments, with `Handed` in place of tensors, without their graphs.

        Those from outside are these themselves, which count how often they change.
        """
        outer = self._outer_versions()
        cut: dict[int, Handed] = {}

        def give(handed: Handed) -> Handed:
            if id(handed) not in cut:
                cut[id(handed)] = self._cut_off(handed.tensor, outer)
            return cut[id(handed)]

        return map_nested(take_apart(arguments), Handed, give)

    def _cut_off(
        self, tensor: torch.Tensor, outer: dict[int, tuple[torch.Tensor, int]]
    ) -> Handed:
        handed = alone(tensor)
        needs_gradient = handed.tensor.requires_grad  # a leaf that does
        held, wrap = unwrapped(handed.tensor)
        key = key_of(held)
        if key in self.copies or key in outer:
            if key in self.copies:
                held = self.as_before(held)
            else:
                whole = local(outer[key][0])
                with torch.no_grad():
                    held = alias_of(whole.detach(), layout_of(held))
            handed.tensor = held if wrap is None else wrap(held)
        handed.tensor.requires_grad_(needs_gradient)
        return handed


class NestedCall:
    """One forward call of a part of a nest; it keeps no arguments.

    Args:
        nest: The call of the module around it.
        step: What is told which nest runs onward.
        arguments: Its positional and keyword arguments.
    """

    template = ()  # none is kept

    def __init__(self, nest: Nest, step: RunsOnward, arguments: Any) -> None:
        tensors = list(leaves(arguments, torch.Tensor))
        keys = [key_on_rank(tensor) for tensor in tensors]
        outer = {key_on_rank(given.tensor) for given in leaves(nest.template, Handed)}
        self._relayed = [
            number
            for number, (key, tensor) in enumerate(zip(keys, tensors, strict=True))
            if key not in outer and id(tensor) not in nest.outer
        ]
        self.nest = nest
        self.step = step
        self.given: Any = None
        nest.calls.append(weakref.ref(self))

    def begin(self, record: Record) -> None:
        """As `RelayedCall.begin`."""
        self.nest.records.append(record)

    def run(self, run: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
        """Run the part's forward pass.

        Args:
            run: Does it.
            given: The tensors among its arguments.
        """
        assert self.nest.glue is not None
        return self.nest.glue.run_part(run, given)

    def again(self) -> Any:
        """As `Source.again`."""
        if self.given is None:
            with self.step.running_onward(self.nest):
                self.nest.relay(self)
        template, self.given = self.given, None
        return template

    def relayed(self) -> Collection[int]:
        """As `Source.relayed`."""
        return self._relayed

    def keep_tensors_alone(self) -> None:
        """As `Source.keep_tensors_alone`; nothing is kept."""


def _refuse(nothing: None) -> torch.Tensor:
    raise RuntimeError("A part of a nest goes backward while it runs onward.")
