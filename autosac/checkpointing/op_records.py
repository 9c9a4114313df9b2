"""What the forward pass of an AC unit did, so that backward can do it again.

Every op whose result is made again is written down with the very tensors that it read:
parts of what the unit made, arguments of the unit, or tensors from elsewhere. Run again
from this record, it sees what it saw, whatever became of modules and attributes since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch

from autosac import _compat, _compat_autocast, _compat_dispatch
from autosac._compat_dispatch import Traits
from autosac._compat_distributed import finished, local, unwrapped
from autosac._compat_settings import with_settings
from autosac.checkpointing.call_arguments import is_simple, leaves, map_nested
from autosac.checkpointing.random_states import RandomStates, random_states
from autosac.checkpointing.tensor_parts import (
    Literal,
    Part,
    Result,
    copy_of,
    key_of,
    layout_in,
    layout_of,
    version_of,
)
from autosac.pytrees import mapped, tensors_in
from autosac.units.policies import SAVE, OpPolicy

# Reruns, as flags: one for backward, and one to make the output for the next block.
BACKWARD, ONWARD = 1, 2

_is_plain, _PLAIN_TYPES = _compat_dispatch.is_plain, _compat_dispatch.plain_types


class Call:
    """An op that is run again.

    Attributes:
        place: Its place among the unit's ops.
        func: The op,
        kernel: and what runs it again, under the autocast that it was called in.
        args: Its arguments, with `Part` and `Literal` in place of tensors,
        kwargs: by name.
        runs: For which reruns it runs.
        states: Random states that it found, if it may draw random numbers.
        results: Results that it made, one for each tensor; None for others.
        ended: Results that nobody but the record held any more when the next one ran.
    """

    __slots__ = (
        *("args", "ended", "func", "kernel", "kwargs", "place", "results", "runs"),
        "states",
    )

    def __init__(self, place: int, func: Any, runs: int) -> None:
        self.place = place
        self.func = func
        self.kernel = _compat_autocast.as_called(func)
        self.runs = runs
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.states: RandomStates | None = None
        self.results: list[Result | None] = []
        self.ended: list[Result] = []

    def run(self, given: Sequence[torch.Tensor], fqn: str) -> None:
        """Run the op again for its results."""
        args = [
            value.tensor_of(given, fqn)
            if type(value) is Part
            else _filled(value, given, fqn)
            for value in self.args
        ]
        kwargs = {n: _filled(value, given, fqn) for n, value in self.kwargs.items()}
        if self.states is None:
            out = self.kernel(*args, **kwargs)
        else:
            out = self.states.again(self.kernel, args, kwargs)
        out = finished(self.func, out)
        outputs = (out,) if isinstance(out, torch.Tensor) else tensors_in(out)
        for result, tensor in zip(self.results, outputs, strict=True):
            if result is not None:
                result.tensor = tensor


def _filled(value: Any, given: Sequence[torch.Tensor], fqn: str) -> Any:
    """An argument with tensors in place of their parts."""
    kind = type(value)
    if kind is Part:
        return value.tensor_of(given, fqn)
    if kind is list:
        return [_filled(item, given, fqn) for item in value]
    return value.tensor() if kind is Literal else value


class History(Protocol):
    """What a unit did in forward."""

    @property
    def departed(self) -> bool:
        """Whether the unit did something else than its plan expects."""


class Code(Protocol):
    """A unit that runs again as Python code."""

    @property
    def history(self) -> History:
        """What the unit did in forward."""

    def keep(self) -> None:
        """Keep what a rerun of the unit needs."""

    def run(
        self, record: Record, template: Any, pack: Callable[[torch.Tensor], Any]
    ) -> Any:
        """Run the unit again."""


class Outward(Part):
    """A tensor that a unit returned.

    Attributes:
        is_result: It requires a gradient and is no leaf.
        wrap: Makes a distributed tensor of what the rank holds of it; None for others.
    """

    __slots__ = ("is_result", "wrap")

    is_result: bool
    wrap: Callable[[torch.Tensor], torch.Tensor] | None

    def again(self, given: Sequence[torch.Tensor], fqn: str) -> torch.Tensor:
        """The tensor made again; arguments as of `Part.tensor_of`."""
        tensor = self.tensor_of(given, fqn)
        return tensor if self.wrap is None else self.wrap(tensor)


class Record:
    """One forward pass of a unit.

    Args:
        policy: What to do with its ops.
        given: The tensors among its arguments.
        relayed: Numbers of those that are made again for a rerun.
        settings: Those that it begins under; None for those of a rerun.

    Attributes:
        calls: Ops that may run again.
        results: What it made and somebody holds, by the address of the storage.
        saved: Results that are kept until backward, by the place of the op.
        ended: Saved results that nobody else held any more when the first call ran.
        stop: How many calls there were when autograd saved the last tensor.
        knows_memory: All tensors so far are such that their storage is their memory.
        missed: Calls that read what is not there again: their number, and for which
            reruns it is missing. And what autograd saves of that: -1, likewise, and
            the part, which is gone if the unit has dropped that part of its graph.
        code: How to run the unit again as Python code; None if it need not be.
        outlived: By ids of results: storages that somebody held behind forward.
        outward: What the unit returned, if other blocks may want that made again:
            nested, with `Outward` in place of tensors.
    """

    def __init__(
        self,
        policy: OpPolicy,
        given: Sequence[torch.Tensor],
        relayed: Collection[int] = (),
        settings: list[Any] | None = None,
    ) -> None:
        self.policy = policy
        self._settings = settings
        self.calls: list[Call] = []
        self.results: dict[int, Result] = {}
        self.saved: dict[int, Any] = {}
        self.ended: list[Result] = []
        self.stop = 0
        self.knows_memory = True
        self.missed: list[tuple[int, int, weakref.ref[Any] | None]] = []
        self.code: Code | None = None
        self.outward: Any = None
        self.outlived: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._given = given
        self._relayed = relayed
        self._numbers: dict[int, int] = {}
        for number, tensor in enumerate(given):
            if _is_plain(type(tensor)):
                self._numbers.setdefault(key_of(tensor), number)
        self._uncounted: set[int] = set()  # what changes without being counted
        self._held: list[Result] = []  # saved ones that somebody else may hold
        self._watched: dict[int, tuple[weakref.ref[Any], int, Result]] = {}
        self._on_end: Callable[[Any], None] | None = self._end

    @property
    def is_exact(self) -> bool:
        """Whether the unit can run again op by op."""
        code = self.code
        return code is None or (self.knows_memory and not code.history.departed)

    # --- forward ----------------------------------------------------------------

    def write_down(
        self,
        call: Call,
        traits: Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Note an op that is about to run and may run again."""
        if self._held:
            self._end_saved()
        call.states = random_states(traits, args, kwargs) if traits.may_draw else None
        if traits.statistics:
            args = _compat.without_running_statistics(traits.func, args)
        runs = call.runs
        if traits.is_literal:
            call.args = [Literal(args[0])]
        else:
            call.args = [self._reference(value, runs) for value in args]
            if kwargs:
                call.kwargs = {n: self._reference(v, runs) for n, v in kwargs.items()}
        if traits.written:
            for tensor in tensors_in(traits.targets(args, kwargs)):
                if (result := self.result_of(tensor)) is not None:
                    result.count_change(tensor)
                if key_of(tensor) in self._uncounted:
                    _compat_dispatch.set_version(tensor, version_of(tensor) + 1)
        self.calls.append(call)

    def leave(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note an op on distributed tensors, which is about to run on what we hold.

        That is below autograd, where nobody counts changes: only the distributed tensor
        knows of them.
        """
        targets = _compat_dispatch.traits(func).targets(args, kwargs or {})
        self._uncounted = {key_of(local(tensor)) for tensor in tensors_in(targets)}

    def _reference(self, value: Any, runs: int) -> Any:
        kind = type(value)
        if kind in _PLAIN_TYPES or isinstance(value, torch.Tensor):
            part = Part()
            self.locate(part, value, runs)
            return part
        if kind is list or kind is tuple:
            return [self._reference(item, runs) for item in value]
        return value

    def locate(
        self, part: Part, tensor: torch.Tensor, runs: int, kept: int = 0
    ) -> None:
        """Find the result, argument or outer tensor that a tensor is part of.

        Args:
            part: Is told.
            tensor: A tensor that somebody reads.
            runs: For which reruns an op reads it,
            kept: and for which somebody reads it when they are done.
        """
        kind = type(tensor)
        if kind not in _PLAIN_TYPES and not _is_plain(kind):
            self.knows_memory = False
            self._locate_outside(part, tensor)
            return
        key = tensor.untyped_storage()._cdata
        result = self.results.get(key)
        if result is not None:
            saved = result.tensor
            is_as_made = saved is not None or (
                result.counted(tensor) == version_of(tensor)
            )
            is_saved = bool(kept & BACKWARD)  # by autograd
            if missing := is_as_made and (runs | kept) & ~result.available:
                reader = -1 if kept else len(self.calls)
                holder = weakref.ref(part) if is_saved else None
                self.missed.append((reader, missing, holder))
            is_kept = missing and (is_saved or self.code is None)
            if is_as_made and not is_kept:
                result.kept |= kept
                part.source = result
                is_whole = saved is None and result.whole() is tensor
                part.layout = None if is_whole else layout_in(tensor, result.dtype)
                # Not the tensor's: factory functions give theirs a new counter.
                part.version = None
                if saved is not None and result.copied is None:
                    part.version = version_of(saved)
                return
        number = self._numbers.get(key)
        if number is None:
            self._locate_outside(part, tensor)
        else:
            part.source = number
            is_whole = tensor is self._given[number]
            part.layout = None if is_whole else layout_of(tensor)
            part.version = None if number in self._relayed else version_of(tensor)

    def _locate_outside(self, part: Part, tensor: torch.Tensor) -> None:
        part.layout, part.version = None, version_of(tensor)
        # One that has a graph may be of the unit's own making: no cycles.
        is_leaf = tensor.is_leaf
        part.source = tensor if is_leaf else _compat_dispatch.detached(tensor)

    def lacks(self) -> list[tuple[int, int]]:
        """Entries of `missed`, without tensors that nobody will ask for any more."""
        return [
            (number, missing)
            for number, missing, holder in self.missed
            if holder is None or holder() is not None
        ]

    def let_go_of_missed(self) -> None:
        """Drop missed tensors that autograd saves: they are made again."""
        for _, _, holder in self.missed:
            if holder is not None and (part := holder()) is not None:
                part.source = None

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Number of the argument in whose memory a tensor lies."""
        return self._numbers.get(key_of(tensor))

    def result_of(self, tensor: torch.Tensor) -> Result | None:
        """The result in whose memory a tensor lies."""
        plain = _is_plain(type(tensor))
        return self.results.get(key_of(tensor)) if plain else None

    def alive(self) -> Iterator[tuple[Result, torch.UntypedStorage]]:
        """Results of calls that somebody holds, and their storages."""
        for watch, _, result in self._watched.values():
            if (storage := watch()) is not None:
                yield result, storage

    def is_changed(self, part: Part) -> bool:
        """Whether the memory of a part that an op read has changed since."""
        return part.version is not None and part.version != version_of(
            part.whole_of(self._given)
        )

    def protect(self, tensor: torch.Tensor) -> None:
        """Copy a tensor from elsewhere for the ops that read it: it changes now."""
        copies: dict[int, torch.Tensor] = {}
        for part in leaves([[call.args, call.kwargs] for call in self.calls], Part):
            if part.version is None or isinstance(part.source, Result):
                continue
            whole = part.whole_of(self._given)
            if key_of(whole) == key_of(tensor) and not self.is_changed(part):
                if id(whole) not in copies:
                    copies[id(whole)] = copy_of(_compat_dispatch.detached(whole))
                    _compat_dispatch.set_version(copies[id(whole)], part.version)
                part.source = copies[id(whole)]

    def note_views(self, out: Any) -> None:
        """Note views that count their changes by themselves."""
        for tensor in tensors_in(out):
            if (result := self.result_of(tensor)) is not None:
                result.count_apart(tensor)

    def add_results(self, call: Call, traits: Traits, action: str, out: Any) -> None:
        """Note the results of an op that may run again."""
        if call.states is not None:
            call.states.settle(out)
        outputs = (out,) if isinstance(out, torch.Tensor) else tensors_in(out)
        for tensor in outputs:
            result = None
            if traits.only_makes or self._is_new(call, tensor):
                result = Result(action, call.runs, tensor)
                storage = tensor.untyped_storage()
                key = storage._cdata
                self.results[key] = result
                watch = weakref.ref(storage, self._on_end)
                self._watched[id(watch)] = (watch, key, result)
            call.results.append(result)

    def _is_new(self, call: Call, tensor: torch.Tensor) -> bool:
        """Whether an op made a tensor, rather than handing on what it got."""
        key = key_of(tensor)
        if key in self.results or key in self._numbers:
            return False
        parts = leaves((call.args, call.kwargs), Part)
        sources = (part.source for part in parts)
        return key not in {key_of(s) for s in sources if isinstance(s, torch.Tensor)}

    def _end(self, watch: Any) -> None:
        """Note that nobody holds a result any more."""
        _, key, result = self._watched.pop(id(watch))
        del self.results[key]
        (self.calls[-1] if self.calls else self).ended.append(result)

    def _end_saved(self) -> None:
        """Find saved results that are there for reruns only from now on."""
        held: list[Result] = []
        ended = self.calls[-1].ended if self.calls else self.ended
        for result in self._held:
            if result.kept & BACKWARD:
                continue  # autograd gets it at the end of the rerun
            assert result.tensor is not None
            is_ended = _compat_dispatch.is_sole(result.tensor)
            (ended if is_ended else held).append(result)
        self._held = held

    def save(self, place: int, out: Any) -> None:
        """Keep the results of an op."""
        if type(out) is torch.Tensor:
            self.saved[place] = self._keep(out)
        else:
            self.saved[place] = mapped(self._keep, out)

    def _keep(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        result = Result(SAVE, BACKWARD | ONWARD, tensor)
        result.tensor = _compat_dispatch.detached(tensor)
        if _is_plain(type(tensor)):
            self.results.setdefault(key_of(tensor), result)
            self._held.append(result)
        return result

    def note_output(self, output: Any) -> bool:
        """Note what the unit returned, so that it can be made again.

        Returns:
            Whether it can.
        """
        if is_simple(output):
            self.outward = map_nested(output, torch.Tensor, self._outward)
        return self.outward is not None

    def _outward(self, tensor: torch.Tensor) -> Outward:
        part = Outward()
        part.is_result = tensor.requires_grad and not tensor.is_leaf
        tensor, part.wrap = unwrapped(tensor)
        self.locate(part, tensor, 0, ONWARD)
        return part

    def drop_calls(self) -> None:
        """Forget ops that do not run again."""
        calls: list[Call] = []
        stop = 0
        for number, call in enumerate(self.calls):
            if number >= self.stop:
                call.runs &= ONWARD
            if call.runs:
                calls.append(call)
                stop += number < self.stop
            else:
                (calls[-1] if calls else self).ended += call.ended
        self.calls, self.stop = calls, stop

    def close(self) -> None:
        """The forward pass is over: watch nothing any more."""
        if not self.is_exact:
            self.outlived = {id(r): weakref.ref(held) for r, held in self.alive()}
        self._watched.clear()
        self._on_end = None  # no cycle: backward may never come
        self._held.clear()
        self.results.clear()
        self._numbers.clear()
        self._given = ()

    # --- backward ---------------------------------------------------------------

    def run_again(
        self, given: Sequence[torch.Tensor], runs: int, *, is_last: bool = False
    ) -> None:
        """Make results again, op by op; to be called within `BelowAutograd`.

        Args:
            given: The tensors among the arguments.
            runs: What for: `BACKWARD` or `ONWARD`.
            is_last: It will not run again: saved results go when made ones would.
        """
        calls = self.calls[: self.stop] if runs == BACKWARD else self.calls
        fqn = self.policy.fqn
        if is_last:
            for result in self.ended:
                result.tensor = None
        with with_settings(self._settings):
            for call in calls:
                if call.runs & runs:
                    call.run(given, fqn)
                for result in call.ended:
                    if not result.kept & runs and (is_last or result.action != SAVE):
                        result.tensor = None

    def lose(self) -> None:
        """Let go of the results that a rerun made."""
        for call in self.calls:
            for result in call.results:
                if result is not None:
                    result.tensor = None

    def clear(self) -> None:
        """Let go of everything: the unit does not run again."""
        self.calls, self.saved, self.ended = [], {}, []
        self.code = self.outward = None
