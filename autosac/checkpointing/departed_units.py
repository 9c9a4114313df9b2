"""AC units that run again as Python code, as they departed from their plan.

A unit that does what its plan expects runs again op by op, from its record. One that
departs from it runs again as under plain checkpointing, but under a mode that keeps it
from doing harm: random ops draw what they drew, memory from outside is not changed
twice, and it must run the same ops on the same tensors as in forward.
It need not make again what outlived forward, such as a table in a cache that was empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autosac import _compat, _compat_dispatch
from autosac._compat_dispatch import Traits
from autosac._compat_distributed import are_distributed, local
from autosac.checkpointing.ambient_state import Present, thread
from autosac.checkpointing.call_arguments import (
    Handed,
    leaves,
    put_together,
)
from autosac.checkpointing.kept_results import Memory
from autosac.checkpointing.module_attributes import Attributes
from autosac.checkpointing.op_records import Call, Record
from autosac.checkpointing.recording_mode import History
from autosac.checkpointing.tensor_parts import (
    Layout,
    Part,
    Result,
    alias_of,
    changed,
    copy_of,
    equal_bytes,
    key_of,
    layout_in,
    layout_of,
    version_before,
    version_of,
)
from autosac.pytrees import mapped, tensors_in
from autosac.units.policies import DETACHED, SAVE, VIEW

_CAST = torch.ops.aten._to_copy.default


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

    def keep(self) -> None:
        """Keep the unit's parameters alive, which may be the caller's own."""
        self.attributes.keep()

    def run(
        self, record: Record, template: Any, pack: Callable[[torch.Tensor], Any]
    ) -> Any:
        """Run the unit's Python code again.

        Args:
            record: Its forward pass.
            template: Its arguments, with `Handed` in place of tensors.
            pack: Gets the tensors that autograd saves.

        Returns:
            What the unit returns.
        """
        given = [local(handed.tensor) for handed in leaves(template, Handed)]
        args, kwargs = put_together(template)
        rerun = RerunMode(record, self, given)

        def check_and_pack(tensor: torch.Tensor) -> Any:
            rerun.check_packed(local(tensor))
            return pack(tensor)

        hooks = torch.autograd.graph.saved_tensors_hooks(check_and_pack, _same)
        with torch.enable_grad(), self.surroundings.again(), hooks, rerun:
            output = self.forward(*args, **kwargs)
            for tensor in leaves(output, torch.Tensor):
                rerun.refuse_stale(local(tensor))
            return output


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
        super().__init__()
        self.record = record
        self.history = code.history
        self.attributes = code.attributes
        self.given = given
        self.place = self.num_packed = 0
        self.calls = {call.place: call for call in self.record.calls}
        self.versions: dict[int, tuple[torch.Tensor, int]] = {}
        self.copies: dict[int, torch.Tensor] = {}
        self.results: dict[int, tuple[int, Layout]] = {
            id(record.saved[place]): (key_of(kept), layout_of(kept))
            for place in record.saved
            if (kept := self._kept(place)) is not None
        }
        self._storages: dict[int, object] = {}
        self.memory = Memory()
        self.own: set[int] = set()
        self.skipped: set[int] = set()  # results, by their ids
        self.fresh: set[int] = set()  # of what nobody was expected to need,
        self.twins: dict[int, int] = {}  # by what it is that forward made of it
        copied: dict[int, int] = {}
        for source, copy, version in self.history.copies:
            key = key_of(given[source] if isinstance(source, int) else source)
            self.copies[key], copied[key] = copy_of(copy), version
        parts = leaves([[c.args, c.kwargs] for c in self.record.calls], Part)
        self.changed = {id(part) for part in parts if self._is_changed(part, copied)}
        self.stale: dict[int, Part] = {}

    def _is_changed(self, part: Part, copied: dict[int, int]) -> bool:
        """Whether the memory of a part that an op read was changed since."""
        source = part.source
        if part.version is None:
            return False
        if isinstance(source, Result):
            assert source.tensor is not None
            now = source.copied
            return part.version != (version_of(source.tensor) if now is None else now)
        whole = self._whole(part)
        first = copied.get(key_of(whole))
        now = version_of(whole)
        return part.version != now if first is None else part.version < first

    def __enter__(self) -> RerunMode:
        self.was = thread.is_inside, thread.is_rerun
        thread.is_inside = thread.is_rerun = True
        self.present = self.attributes.resume()
        # If backward runs under autocast, casts of the forward pass are still cached.
        torch.clear_autocast_cache()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        thread.is_inside, thread.is_rerun = self.was
        self.present.restore()
        torch.clear_autocast_cache()
        super().__exit__(*error)
        for tensor, version in self.versions.values():
            _compat_dispatch.set_version(tensor, version)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types and are_distributed(types):
            return NotImplemented
        kwargs = kwargs or {}
        if id(func) in _compat.IGNORED_IDS:
            return _compat.run_ignored(func, args, kwargs)
        traits = _compat_dispatch.traits(func)
        if traits.is_wait:
            return func(*args, **kwargs)
        if self._is_another_cast(func, args, kwargs):
            return func(*args, **kwargs)
        before, place = self.place, self._next(func, args, kwargs)
        out = self._again(place, traits, args, kwargs)
        if before < self.history.departure <= self.place:
            for key in self.memory.put(self.history.kept):
                self.stale.pop(key, None)
        return out

    def _again(
        self, place: int, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what an op did in forward."""
        func = traits.func
        action = self.history.actions[place]
        if place in self.history.numbers:
            return self.history.numbers[place]
        if action == VIEW:
            return func(*args, **kwargs)
        if action in (SAVE, DETACHED):
            if place in self.record.saved:
                return mapped(self._handed_out, self.record.saved[place])
            written = {key_of(t) for t in tensors_in(traits.targets(args, kwargs))}
            if place in self.history.passed and written <= self.fresh:
                return self._pass_again(place, func, args, kwargs)
            self._note_versions(traits, args, kwargs)
            return _compat.pick_arguments(func, traits.returned, args, kwargs)
        call = self.calls[place]
        own, args = args, _compat.without_running_statistics(func, args)
        if traits.is_literal:
            out = call.args[0].tensor()  # of the numbers that it was made of
        else:
            if not self._reads_the_same(
                call, args, kwargs, may_copy=not traits.written
            ):
                raise self._error(f"runs {func} on other values", "did not in forward")
            args = _compat.with_types_of_statistics(func, own, args)
            out = self._run(call, traits, args, kwargs)
        for result, tensor in zip(call.results, tensors_in((out,)), strict=True):
            self._note_result(result, tensor)
        if (part := self._stale_part(call, args, kwargs)) is not None:
            targets = tensors_in((out, traits.targets(args, kwargs)))
            self.stale.update((self._pinned(tensor), part) for tensor in targets)
        return out

    def _pass_again(self, place: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that nobody was expected to need, in memory of this rerun."""
        passed = self.history.passed[place]
        part = self._stale_among(args, kwargs)
        for tensor, version in zip(
            tensors_in((args, kwargs)), passed.versions, strict=True
        ):
            if key_of(tensor) not in self.own and version_of(tensor) != version:
                part = Part()
                part.version = version
        out = passed.again(func, args, kwargs)
        for result, tensor in zip(passed.results, tensors_in((out,)), strict=False):
            self.memory.note(result, tensor)
        for tensor in tensors_in((out,)):
            key = self._pinned(tensor)
            self.fresh.add(key)
            self.own.add(key)
            if part is not None:
                self.stale[key] = part
        return out

    def _stale_part(self, call: Call, args: Any, kwargs: Any) -> Part | None:
        """The changed part that makes an op's results differ from forward, if any."""
        if self.changed:
            for part in leaves([call.args, call.kwargs], Part):
                if id(part) in self.changed:
                    return part  # type: ignore[no-any-return]
        return self._stale_among(args, kwargs)

    def _stale_among(self, args: Any, kwargs: Any) -> Part | None:
        """The changed part that makes an op's arguments differ from forward, if any."""
        if self.stale:
            for tensor in tensors_in((args, kwargs)):
                if key_of(tensor) in self.stale:
                    return self.stale[key_of(tensor)]
        return None

    def check_packed(self, tensor: torch.Tensor) -> None:
        """Refuse that autograd saves another tensor than in forward."""
        expected = self.history.packed[self.num_packed : self.num_packed + 1]
        self.num_packed += 1
        if not expected or expected[0][:2] != (tensor.shape, tensor.dtype):
            raise self._error("lets autograd save another tensor", "did not in forward")
        self.refuse_stale(tensor, expected[0][2])

    def refuse_stale(self, tensor: torch.Tensor, version: int | None = None) -> None:
        """Refuse a tensor that depends on memory changed since forward.

        Args:
            tensor: What the unit hands out.
            version: How often it had been changed in forward, if it is known.
        """
        if not _compat_dispatch.is_plain(type(tensor)):
            return
        key, fqn = key_of(tensor), self.record.policy.fqn
        if (part := self.stale.get(key)) is not None:
            raise changed(tensor, part.version, fqn)
        if version is None or key in self.own:
            return
        if version != version_before(tensor, self.versions.get(key)):
            raise changed(tensor, version, fqn)

    def _run(self, call: Call, traits: Traits, args: Any, kwargs: Any) -> Any:
        """Run an op, on copies of what the forward pass has changed."""
        func = call.func
        own_args, own_kwargs = args, kwargs
        if self.copies:
            if traits.written:
                self._note_versions(traits, args, kwargs)
            args, kwargs = mapped(self._copied, args), mapped(self._copied, kwargs)
        if call.states is None:
            out = func(*args, **kwargs)
        else:
            out = call.states.again(func, args, kwargs)
        if self.copies and traits.returned:
            return _compat.pick_arguments(func, traits.returned, own_args, own_kwargs)
        return out

    def _next(self, func: Any, args: Any, kwargs: Any) -> int:
        """Place in forward of an op that runs now."""
        funcs = self.history.funcs
        for place in range(self.place, len(funcs)):
            if funcs[place] is func and self._may_be(place, args, kwargs):
                self.place = place + 1
                return place
            if not self._skips(place):
                break
        raise self._error(f"runs {func}", "did not in forward at that place")

    def _may_be(self, place: int, args: Any, kwargs: Any) -> bool:
        """Whether an op that runs now did so at some place of forward."""
        is_cast = self.history.funcs[place] is _CAST
        if is_cast and not self._is_cast_at(place, args, kwargs):
            return False
        if place == self.place:
            return True
        if self.history.num_packed[place] != self.num_packed:
            return False  # what autograd saved of others is not made again
        call = self.calls.get(place)
        return call is None or self._reads_the_same(call, args, kwargs)

    def _skips(self, place: int) -> bool:
        """Leave an op out that the code does not run again, if that does no harm.

        Its results must have outlived forward where others read them.
        """
        if self.history.kept:
            return False
        if self.history.actions[place] == VIEW or self._kept(place) is not None:
            return True
        call = self.calls.get(place)
        if call is None:
            return False
        traits = _compat_dispatch.traits(call.func)
        targets = leaves(traits.targets(tuple(call.args), call.kwargs), Part)
        if any(id(part.source) not in self.skipped for part in targets):
            return False
        self.skipped.update(id(result) for result in call.results if result)
        return True

    def _is_another_cast(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether autocast had a tensor at hand in forward that it casts again now."""
        if func is not _CAST:
            return False
        for place in range(self.place, len(self.history.funcs)):
            if self.history.funcs[place] is not func:
                return True
            if self._is_cast_at(place, args, kwargs):
                return False
            if self.history.kept:
                return True  # for none is left out
        return True

    def _is_cast_at(self, place: int, args: Any, kwargs: Any) -> bool:
        """Whether a cast is that of some place in forward."""
        if (call := self.calls.get(place)) is not None:
            return self._reads_the_same(call, args, kwargs)
        if (kept := self._kept(place)) is None:
            return True
        dtype = kwargs.get("dtype", args[0].dtype)
        return bool((kept.shape, kept.dtype) == (args[0].shape, dtype))

    def _kept(self, place: int) -> torch.Tensor | None:
        """The only result of an op, if forward kept it."""
        saved = self.record.saved.get(place)
        return saved.tensor if isinstance(saved, Result) else None

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
        tensor = kept.detach() if result.copied is None else copy_of(kept)
        self._note_result(result, tensor)
        return tensor

    def _note_result(self, result: Result | None, tensor: torch.Tensor) -> None:
        """Remember where a result lies in this rerun."""
        if result is not None:
            key = self._pinned(tensor)
            self.memory.note(result, tensor)
            self.results[id(result)] = (key, layout_of(tensor))
            self.own.add(key)

    def _pinned(self, tensor: torch.Tensor) -> int:
        """Key of a tensor's storage, which no later one has even if this one ends."""
        key = key_of(tensor)
        if key not in self._storages:
            self._storages[key] = _compat_dispatch.weak_storage(tensor)
        return key

    def _reads_the_same(
        self, call: Call, args: Any, kwargs: Any, *, may_copy: bool = True
    ) -> bool:
        """Whether an op reads the tensors and values that it read in forward."""
        now = [*args, *map(kwargs.get, call.kwargs)]
        before = [*call.args, *call.kwargs.values()]
        return self._are_same(before, now, may_copy=may_copy)

    def _are_same(self, before: Any, now: Any, *, may_copy: bool) -> bool:
        if isinstance(before, Part):
            return self._is_same_tensor(before, now, may_copy)
        if isinstance(before, list):
            is_list = isinstance(now, (list, tuple)) and len(now) == len(before)
            return is_list and all(
                self._are_same(*pair, may_copy=may_copy)
                for pair in zip(before, now, strict=True)
            )
        is_nan = before != before and now != now
        return before is now or bool(before == now) or bool(is_nan)

    def _is_same_tensor(self, part: Part, tensor: Any, may_copy: bool) -> bool:
        """Whether an op reads the tensor that it read in forward, or a copy of that."""
        if not isinstance(tensor, torch.Tensor):
            return False
        if not _compat_dispatch.is_plain(type(tensor)):
            return True
        if isinstance(part.source, Result):
            if id(part.source) not in self.results:
                return self._has_outlived(part, part.source, tensor)
            key, layout = self.results[id(part.source)]
        else:
            whole = self._whole(part)
            key, layout = key_of(whole), layout_of(whole)
            key = self.twins.get(key, key)
        layout = layout if part.layout is None else part.layout
        is_there = key == key_of(tensor)
        if is_there and layout_of(tensor)[: len(layout)] == layout:
            return True
        if is_there or isinstance(part.source, Result):
            return False
        is_fresh = key_of(tensor) in self.fresh
        if not (may_copy or is_fresh):
            return False
        if is_fresh:  # forward may have changed what it made since
            whole = self.copies.get(key, whole)
        before = whole if part.layout is None else alias_of(whole, part.layout)
        if not equal_bytes(before, tensor):
            return False
        if is_fresh:
            self.twins[key] = self._pinned(tensor)
        return True

    def _has_outlived(self, part: Part, result: Result, tensor: torch.Tensor) -> bool:
        """Whether a tensor is what forward made and somebody kept, as it was."""
        outlived = self.record.outlived.get(id(result))
        storage = None if outlived is None else outlived()
        if storage is None or storage._cdata != key_of(tensor):
            return False
        if part.layout is None:
            is_same = result.whole() is tensor
        else:
            is_same = part.layout == layout_in(tensor, result.dtype)
        return is_same and result.counted(tensor) == version_of(tensor)

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
