"""AC units that run again as Python code, as they departed from their plan.

A unit that does what its plan expects runs again op by op, from its record. One that
departs from it runs again as under plain checkpointing, but under a mode that keeps it
from doing harm: random ops draw what they drew, memory from outside is not changed
twice, and it must run the same ops on the same tensors as in forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autosac import _compat, _compat_dispatch
from autosac._compat_dispatch import Traits
from autosac.applying.handing import Handed, leaves, put_together
from autosac.applying.parts import (
    Layout,
    Part,
    Result,
    alias_of,
    copy_of,
    equal_bytes,
    key_of,
    layout_of,
    version_of,
)
from autosac.applying.random_states import RandomState
from autosac.applying.recording import History
from autosac.applying.records import Call, Record
from autosac.applying.surroundings import Present
from autosac.candidates.policies import DETACHED, SAVE, VIEW
from autosac.pytrees import mapped, tensors_in
from autosac.tracing.attributes import Attributes


class _Rerunning(threading.local):
    """Whether this thread reruns a unit: modules in it run plainly then."""

    now = False


rerunning = _Rerunning()


class Code:
    """One call of a unit that departed from its plan, as Python code to be run again.

    Args:
        forward: Its forward function.
        history: What it did.
        attributes: Those of its modules before it began.
        surroundings: What was around it.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        history: History,
        attributes: Attributes,
        surroundings: Present,
    ) -> None:
        self.forward = forward
        self.history = history
        self.attributes = attributes
        self.surroundings = surroundings

    def run(
        self, record: Record, template: Any, pack: Callable[[torch.Tensor], Any]
    ) -> Any:
        """Run it again.

        Args:
            record: Its forward pass.
            template: Its arguments, with `Handed` in place of tensors.
            pack: Gets the tensors that autograd saves.

        Returns:
            What the unit returns.
        """
        given = [handed.tensor for handed in leaves(template, Handed)]
        args, kwargs = put_together(template)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _same)
        rerun = RerunMode(record, self, given)
        with torch.enable_grad(), self.surroundings.again(), hooks, rerun:
            return self.forward(*args, **kwargs)


def _same(packed: Any) -> Any:
    return packed


class RerunMode(_compat.PlainDispatchMode):
    """Keeps a unit that runs again as Python code to what it did in forward.

    Args:
        record: Its forward pass,
        code: and what else is known of it.
        given: The tensors among its arguments, as they are now.
    """

    def __init__(
        self, record: Record, code: Code, given: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.history = code.history
        self.attributes = code.attributes
        self.given = given
        self.place = 0
        self.calls = {call.place: call for call in self.record.calls}
        self.versions: dict[int, tuple[torch.Tensor, int]] = {}
        self.copies: dict[int, torch.Tensor] = {}
        self.results: dict[int, tuple[int, Layout]] = {}
        for source, copy in self.history.copies:
            whole = given[source] if isinstance(source, int) else source
            self.copies[key_of(whole)] = copy_of(copy)
        for part in self.record.foreign or ():
            whole = self._whole(part)
            if key_of(whole) not in self.copies:
                part.check(whole, self.record.policy.fqn)

    def __enter__(self) -> RerunMode:
        self.rerunning = rerunning.now
        rerunning.now = True
        self.present = self.attributes.resume()
        # If backward runs under autocast, casts of the forward pass are still cached.
        torch.clear_autocast_cache()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        rerunning.now = self.rerunning
        self.present.restore()
        torch.clear_autocast_cache()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for tensor, version in self.versions.values():
            _compat_dispatch.set_version(tensor, version)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if id(func) in _compat.IGNORED_IDS:
            if func is _compat.DEVICE:
                return args[0].device
            return func(*args, **kwargs)
        traits = _compat_dispatch.traits(func)
        place = self._next(func)
        action = self.history.actions[place]
        if action == VIEW:
            return func(*args, **kwargs)
        if action in (SAVE, DETACHED):
            if place in self.record.saved:
                return mapped(self._handed_out, self.record.saved[place])
            self._note_versions(traits, args, kwargs)
            return _compat.pick_arguments(func, traits.returned, args, kwargs)
        call = self.calls[place]
        args = _compat.without_running_statistics(func, args)
        if traits.is_literal:
            out = call.args[0].tensor()  # of the numbers that it was made of
        else:
            self._check(call, traits, args, kwargs)
            out = self._run(call, traits, args, kwargs)
        for result, tensor in zip(call.results, tensors_in((out,)), strict=True):
            self._note_result(result, tensor)
        return out

    def _run(self, call: Call, traits: Traits, args: Any, kwargs: Any) -> Any:
        """Run an op, on copies of what the forward pass has changed."""
        func = call.func
        own_args, own_kwargs = args, kwargs
        if self.copies:
            if traits.written:
                self._note_versions(traits, args, kwargs)
            args, kwargs = mapped(self._copied, args), mapped(self._copied, kwargs)
        if call.state is None:
            out = func(*args, **kwargs)
        else:
            with RandomState(call.state, args, kwargs):
                out = func(*args, **kwargs)
        if self.copies and traits.returned:
            return _compat.pick_arguments(func, traits.returned, own_args, own_kwargs)
        return out

    def _next(self, func: Any) -> int:
        funcs, place = self.history.funcs, self.place
        if place >= len(funcs) or funcs[place] is not func:
            raise self._error(f"runs {func}", "did not in forward at that place")
        self.place += 1
        return place

    def _error(self, does: str, but: str) -> RuntimeError:
        return RuntimeError(
            f"AC unit `{self.record.policy.fqn}` {does} when it is rerun in"
            f" backward, but {but}: it depends on state that changed in between."
            " Exclude it from the plan with `exclude`."
        )

    def _whole(self, part: Part) -> torch.Tensor:
        """A tensor that does not come from the unit, or one in the same storage."""
        source = part.source
        if isinstance(source, int):
            return self.given[source]
        assert isinstance(source, torch.Tensor)
        return source

    def _handed_out(self, result: Any) -> Any:
        """What the forward pass kept, in place of what an op would make."""
        if not isinstance(result, Result):
            return result
        kept = result.tensor
        assert kept is not None
        tensor = copy_of(kept) if result.is_copy else kept.detach()
        self._note_result(result, tensor)
        return tensor

    def _note_result(self, result: Result | None, tensor: torch.Tensor) -> None:
        """Remember where a result lies this time."""
        if result is not None:
            self.results[id(result)] = (key_of(tensor), layout_of(tensor))

    def _check(self, call: Call, traits: Traits, args: Any, kwargs: Any) -> None:
        """Refuse to read other tensors or values than in forward."""
        now = [*args, *map(kwargs.get, call.kwargs)]
        before = [*call.args, *call.kwargs.values()]
        if not self._are_same(before, now, may_copy=not traits.written):
            raise self._error(f"runs {call.func} on other values", "did not in forward")

    def _are_same(self, before: Any, now: Any, *, may_copy: bool) -> bool:
        if isinstance(before, Part):
            return self._is_same_tensor(before, now, may_copy)
        if isinstance(before, list):
            return len(before) == len(now) and all(
                self._are_same(*pair, may_copy=may_copy)
                for pair in zip(before, now, strict=True)
            )
        is_nan = before != before and now != now
        return before is now or bool(before == now) or bool(is_nan)

    def _is_same_tensor(self, part: Part, tensor: Any, may_copy: bool) -> bool:
        """Whether an op reads what it read, or a copy of that."""
        if not isinstance(tensor, torch.Tensor):
            return False
        if not _compat_dispatch.is_plain(type(tensor)):
            return True
        if isinstance(part.source, Result):
            key, layout = self.results.get(id(part.source), (0, ()))
        else:
            whole = self._whole(part)
            key, layout = key_of(whole), layout_of(whole)
        layout = layout if part.layout is None else part.layout
        is_there = key == key_of(tensor)
        if is_there and layout_of(tensor)[: len(layout)] == layout:
            return True
        if is_there or not may_copy or isinstance(part.source, Result):
            return False
        whole = self._whole(part)
        before = whole if part.layout is None else alias_of(whole, part.layout)
        return equal_bytes(before, tensor)

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not _compat_dispatch.is_plain(type(value)):
            return value
        copy = self.copies.get(key_of(value))
        return value if copy is None else alias_of(copy, layout_of(value))

    def _note_versions(self, traits: Traits, args: Any, kwargs: Any) -> None:
        """Remember how often tensors were changed that are only said to change now."""
        for tensor in tensors_in(traits.targets(args, kwargs)):
            if not tensor.is_inference():
                entry = (_compat_dispatch.detached(tensor), version_of(tensor))
                self.versions.setdefault(key_of(tensor), entry)
