"""What the forward pass of an AC unit did, so that backward can do it again.

Every op whose result is made again is written down with the very tensors that it read:
parts of what the unit made, arguments of the unit, or tensors from elsewhere. Run again
from this record, it sees what it saw, whatever became of modules and attributes since.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from autosac import _compat, _compat_dispatch
from autosac._compat_dispatch import Traits
from autosac.applying.handing import is_simple, leaves, map_nested
from autosac.applying.parts import (
    BACKWARD,
    ONWARD,
    Layout,
    Literal,
    Part,
    Result,
    copy_of,
    key_of,
    layout_of,
    version_of,
)
from autosac.applying.random_states import RandomState, random_state
from autosac.candidates.policies import DETACHED, RERUN, SAVE, VIEW, OpPolicy
from autosac.pytrees import mapped, tensors_in
from autosac.tracing.attributes import Attributes

_LITERAL = torch.ops.aten.lift_fresh.default


_UNKNOWN = Part(-1, None, None)


class Outward:
    """A tensor that a unit returned.

    Attributes:
        part: What it is part of.
        is_result: It requires a gradient and is no leaf.
    """

    __slots__ = ("is_result", "part")

    def __init__(self, part: Part, is_result: bool) -> None:
        self.part = part
        self.is_result = is_result


class Call:
    """An op that is run again.

    Attributes:
        place: Its place among the unit's ops.
        func: The op.
        args: Its arguments, with `Part` and `Literal` in place of tensors,
        kwargs: by name.
        runs: When it runs again: `BACKWARD`, `ONWARD`, both or neither.
        state: Random state that it found, if it draws random numbers.
        results: Results that it made, one for each tensor; None for others.
        ended: Results that nobody held any more when the next op ran.
    """

    __slots__ = (
        *("args", "ended", "func", "kwargs", "place", "results", "runs", "state"),
    )

    def __init__(self, place: int, func: Any, runs: int) -> None:
        self.place = place
        self.func = func
        self.runs = runs
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.state: bytes | None = None
        self.results: list[Result | None] = []
        self.ended: list[Result] = []

    def run(self, given: Sequence[torch.Tensor], fqn: str) -> None:
        """Make its results again."""
        args = [_filled(value, given, fqn) for value in self.args]
        kwargs = {n: _filled(value, given, fqn) for n, value in self.kwargs.items()}
        if self.state is None:
            out = self.func(*args, **kwargs)
        else:
            with RandomState(self.state, args, kwargs):
                out = self.func(*args, **kwargs)
        outputs = (out,) if isinstance(out, torch.Tensor) else tensors_in(out)
        for result, tensor in zip(self.results, outputs, strict=True):
            if result is not None:
                result.tensor = tensor


def _filled(value: Any, given: Sequence[torch.Tensor], fqn: str) -> Any:
    """An argument with tensors in place of their parts."""
    if type(value) is Part:
        return value.tensor(given, fqn)
    if type(value) is Literal:
        return value.tensor()
    return [_filled(v, given, fqn) for v in value] if type(value) is list else value


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """Tells when nobody holds the storage of a result any more."""

    __slots__ = ("key", "result")

    def __init__(
        self, storage: Any, callback: Callable[[Any], None], key: int, result: Result
    ) -> None:
        super().__init__(storage, callback)
        self.key = key
        self.result = result

    def __new__(cls, storage: Any, callback: Any, key: int, result: Result) -> _Watch:
        return super().__new__(cls, storage, callback)


class Record:
    """One forward pass of a unit.

    Args:
        policy: What to do with its ops.
        attributes: Those of its modules before it began.

    Attributes:
        funcs: Its ops so far,
        actions: what becomes of each,
        saved: and the results of those that are saved, by place, nested as returned.
        calls: Those of them that run again.
        departed: It did something else than the plan expects: nothing is taken for
            granted any more, all of it runs again as Python code.
        is_foreign: Tensors of a kind of their own take part, whose memory is not
            known: it runs again as Python code as well.
        foreign: Tensors from elsewhere, and arguments, that ops read.
        copies: Arguments (by number) and tensors from elsewhere that it changed after
            it departed, each with a copy of what it was before.
        stop: How many of its ops ran before autograd saved the last tensor.
        outward: What it returned, if other blocks may want that made again: nested,
            with `Outward` in place of tensors.
        paused: What runs now does not belong to it.
    """

    def __init__(self, policy: OpPolicy, attributes: Attributes) -> None:
        self.policy = policy
        self.attributes = attributes
        self.funcs: list[Any] = []
        self.actions: list[str] = []
        self.saved: dict[int, Any] = {}
        self.calls: list[Call] = []
        self.departed = False
        self.is_foreign = False
        self.foreign: list[Part] = []
        self.copies: list[tuple[int | torch.Tensor, torch.Tensor]] = []
        self.stop = 0
        self.outward: Any = None
        self.paused = False
        self._results: dict[int, Result] = {}
        self._watched: dict[int, _Watch] = {}
        self._given: dict[int, tuple[int, Layout]] = {}
        self._copied: set[int] = set()
        # Ops that read what is not there again, and in which reruns it is not.
        self._missed: list[tuple[int, int]] = []
        self._relayed: Collection[int] = ()

    @property
    def is_exact(self) -> bool:
        """Whether it can run again op by op."""
        return not self.departed and not self.is_foreign

    # --- forward ----------------------------------------------------------------

    def begin(self, given: Sequence[torch.Tensor], relayed: Collection[int]) -> None:
        """Note the tensors among the arguments, and which ones are made again."""
        self._relayed = relayed
        for number, tensor in enumerate(given):
            if _compat_dispatch.is_plain(type(tensor)):
                self._given.setdefault(key_of(tensor), (number, layout_of(tensor)))

    def finish(self, output: Any) -> None:
        """Note what the forward pass returned, and let go of what is not needed."""
        if self.policy.chain and self.is_exact:
            if is_simple(output):
                self.outward = map_nested(output, torch.Tensor, self._outward)
            else:
                self.is_foreign = True
        if any(missing & ONWARD or place < self.stop for place, missing in self._missed):
            self.depart("reads a result that its plan does not make again")
        if self.is_exact:
            self.foreign = []
            self._drop_calls()
        else:
            self.attributes.keep()

    def _outward(self, tensor: torch.Tensor) -> Outward:
        part = self.part_of(tensor, ONWARD, kept=ONWARD)
        return Outward(part, tensor.requires_grad and not tensor.is_leaf)

    def close(self) -> None:
        """Watch nothing any more."""
        self._watched.clear()
        self._results.clear()
        self._given.clear()

    def _drop_calls(self) -> None:
        """Forget ops that do not run again."""
        calls: list[Call] = []
        for call in self.calls:
            if call.runs & ONWARD or (call.runs and call.place < self.stop):
                calls.append(call)
            elif calls:
                calls[-1].ended += call.ended
        self.calls = calls

    def depart(self, what: str) -> None:
        """Note that the unit does not do what its plan expects."""
        if not self.departed:
            self.departed = True
            warnings.warn(
                f"AC unit `{self.policy.fqn}` {what}. All of it is recomputed in"
                " backward, as by plain checkpointing: that takes up to one more"
                " forward pass of it, and the planned peak no longer holds. Plan again"
                " with inputs like these.",
                stacklevel=2,
            )

    def action(self, traits: Traits, args: Any, kwargs: Any) -> str:
        """What becomes of the next op."""
        place = len(self.funcs)
        names = self.policy.names
        if not self.departed and (place >= len(names) or names[place] != traits.name):
            expected = names[place] if place < len(names) else "its end"
            self.depart(f"ran {traits.name} where its plan expects {expected}")
        if self.departed:
            action = VIEW if traits.is_view else RERUN
        else:
            action = self.policy.actions[place]
        if traits.written:
            action = self._action_of_write(traits, args, kwargs, action)
        self.funcs.append(traits.func)
        self.actions.append(action)
        return action

    def _action_of_write(
        self, traits: Traits, args: Any, kwargs: Any, action: str
    ) -> str:
        """A write is treated like the memory that it changes."""
        targets = list(tensors_in(traits.targets(args, kwargs)))
        plain = [t for t in targets if _compat_dispatch.is_plain(type(t))]
        if not self.departed:
            owners = [self._results.get(key_of(tensor)) for tensor in plain]
            kinds = {SAVE if owner is None else owner.action for owner in owners}
            if len(kinds) == 1 and kinds != {SAVE}:
                return kinds.pop()
            if len(kinds) < 2 and (not kinds or action in (SAVE, DETACHED)):
                return action
            if kinds == {SAVE}:  # it has been changed for good
                return DETACHED if traits.returned else SAVE
            self.depart(f"changes with {traits.name} what its plan treats differently")
        for tensor in plain:
            self._protect(tensor)
        return RERUN

    def _protect(self, tensor: torch.Tensor) -> None:
        """Copy what is changed now, but a rerun must find as it is."""
        key = key_of(tensor)
        result = self._results.get(key)
        if result is not None:
            if result.action == SAVE and not result.is_copy:
                assert result.tensor is not None
                result.tensor = copy_of(result.tensor)
                result.is_copy = True
        elif key not in self._copied:
            self._copied.add(key)
            number = self._given.get(key)
            whole = _compat_dispatch.detached(tensor) if number is None else number[0]
            self.copies.append((whole, copy_of(tensor.detach())))

    def write_down(
        self, traits: Traits, action: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        """An op that is about to run and may run again."""
        place = len(self.funcs) - 1
        runs = BACKWARD if action == RERUN else 0
        if self.policy.onward and not self.departed:
            is_planned = action == self.policy.actions[place]
            action = self.policy.onward[place] if is_planned else action
            runs |= ONWARD if action == RERUN else 0
        call = Call(place, traits.func, runs)
        if traits.is_random:
            call.state = random_state(args, kwargs)
        if traits.statistics:
            args = _compat.without_running_statistics(traits.func, args)
        if traits.func is _LITERAL:
            call.args = (Literal(args[0]),)
        else:
            call.args = tuple([self._reference(value, runs) for value in args])
            if kwargs:
                call.kwargs = {n: self._reference(v, runs) for n, v in kwargs.items()}
        self.calls.append(call)
        return call

    def _reference(self, value: Any, runs: int) -> Any:
        if isinstance(value, torch.Tensor):
            return self.part_of(value, runs)
        if isinstance(value, (list, tuple)):
            return [self._reference(item, runs) for item in value]
        return value

    def part_of(self, tensor: torch.Tensor, runs: int, *, kept: int = 0) -> Part:
        """A tensor that is read when the unit runs again.

        Args:
            tensor: The tensor.
            runs: For which reruns it is read: `BACKWARD`, `ONWARD`, both or neither.
            kept: For which of them somebody reads it when they are done.
        """
        if not _compat_dispatch.is_plain(type(tensor)):
            self.is_foreign = True
            return _UNKNOWN
        key = key_of(tensor)
        result = self._results.get(key)
        if result is not None:
            if missing := runs & ~result.available:
                self._missed.append((len(self.funcs) - 1, missing))
            result.kept |= kept
            layout, kept_tensor = layout_of(tensor), result.tensor
            # Not the version of `tensor`: factory functions give theirs a new counter.
            version = None if kept_tensor is None else version_of(kept_tensor)
            return Part(result, None if layout == result.layout else layout, version)
        if key in self._given:
            number, whole = self._given[key]
            layout = layout_of(tensor)
            version = None if number in self._relayed else version_of(tensor)
            part = Part(number, None if layout == whole else layout, version)
        else:
            is_result = tensor.grad_fn is not None  # part of a graph, which may be ours
            version = version_of(tensor)
            tensor = _compat_dispatch.detached(tensor) if is_result else tensor
            part = Part(tensor, None, version)
        self.foreign.append(part)
        return part

    def add_results(self, call: Call, traits: Traits, action: str, out: Any) -> None:
        """Note what an op made that may run again."""
        outputs = (out,) if isinstance(out, torch.Tensor) else tensors_in(out)
        available = call.runs
        for tensor in outputs:
            result = None
            if traits.only_makes or self._is_new(call, tensor):
                result = self._add(tensor, Result(action, available, layout_of(tensor)))
            call.results.append(result)

    def _is_new(self, call: Call, tensor: torch.Tensor) -> bool:
        """Whether an op made a tensor, rather than handing on what it got."""
        key = key_of(tensor)
        if call.func is _LITERAL:
            return key not in self._results
        parts = (p for p in leaves(call.args, Part) if isinstance(p.source, torch.Tensor))
        got = {key_of(part.source) for part in parts}
        return not (key in self._results or key in self._given or key in got)

    def _add(self, tensor: torch.Tensor, result: Result) -> Result | None:
        if not _compat_dispatch.is_plain(type(tensor)):
            self.is_foreign = True
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._results[key] = result
        self._watched[key] = _Watch(storage, self._end, key, result)
        return result

    def _end(self, watch: _Watch) -> None:
        """Nobody holds a result any more."""
        del self._results[watch.key], self._watched[watch.key]
        self.calls[-1].ended.append(watch.result)

    def save(self, traits: Traits, out: Any) -> None:
        """Keep what an op made."""

        def keep(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            result = Result(SAVE, BACKWARD | ONWARD, layout_of(tensor))
            result.tensor = _compat_dispatch.detached(tensor)
            if _compat_dispatch.is_plain(type(tensor)):
                self._results.setdefault(key_of(tensor), result)
            return result

        if not traits.returned:
            self.saved[len(self.funcs) - 1] = mapped(keep, out)

    # --- backward ---------------------------------------------------------------

    def run_again(self, given: Sequence[torch.Tensor], runs: int) -> None:
        """Make results again, op by op.

        Args:
            given: The tensors among the arguments.
            runs: What for: `BACKWARD` or `ONWARD`.
        """
        stop = self.stop if runs == BACKWARD else len(self.funcs)
        with _compat_dispatch.below_autograd(), torch.enable_grad():
            for call in self.calls:
                if call.place >= stop:
                    break
                if call.runs & runs:
                    call.run(given, self.policy.fqn)
                for result in call.ended:
                    if not result.kept & runs:
                        result.tensor = None

    def lose(self) -> None:
        """Let go of what was made again."""
        for call in self.calls:
            for result in call.results:
                if result is not None:
                    result.tensor = None

    def clear(self) -> None:
        """Let go of everything: it does not run again."""
        self.calls, self.saved, self.foreign = [], {}, []
        self.copies, self.outward = [], None
