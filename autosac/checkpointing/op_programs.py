"""What a unit does from step to step, so that only few of its ops are looked at.

A dispatch mode costs as much as a small kernel. Most ops of most units need none: what
autograd saves of them is kept or made again whatever they are. Once a call has gone as
planned twice in a row, later ones have a mode from a little before the first op that
runs again until a little behind the last one. What it does not see is kept as autograd
keeps it, so that gradients never depend on what an earlier call did: only memory does.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from autosac import _compat, _compat_autocast, _compat_autograd, _compat_dispatch
from autosac._compat_distributed import are_distributed
from autosac.checkpointing.op_records import BACKWARD, Call, Record
from autosac.checkpointing.recording_mode import RecordingMode
from autosac.checkpointing.tensor_parts import Result
from autosac.pytrees import tensors_in
from autosac.units.policies import RERUN, SAVE

# An op to be left alone; one whose result is kept; a view that is noted.
_PASS, _KEEP, _NOTE = 0, -1, -2


class Program:
    """Which ops of a unit the dispatch mode has to see.

    Args:
        mode: What was recorded of a call that went as planned.

    Attributes:
        funcs: All ops, and None at the end.
        kinds: For each: `_PASS`, `_KEEP`, `_NOTE`, or for which reruns it runs.
        first: Place of the first op that has to be seen, -1 if none has to be,
        last: and of the last one.
        start: How many tensors autograd saves before a mode must begin, -1 if none has
            to,
        place: and the place of the first op that it sees.
        switches: After how many it begins or may end,
        may_end: and whether it may before the unit does;
        num_packed: how many it saves in all.
        unseen: Ops that are only run, by their places; None for others.
    """

    __slots__ = (
        *("first", "funcs", "kinds", "last", "may_end", "num_packed", "place", "start"),
        *("switches", "unseen"),
    )

    def __init__(self, mode: RecordingMode) -> None:
        record = mode.record
        self.funcs = [*mode.history.funcs, None]
        self.kinds = [_PASS] * len(self.funcs)
        for place, saved in record.saved.items():
            results = _results_in(saved)
            is_far = place in record.policy.far_ops
            if is_far or not all(result.kept & BACKWARD for result in results):
                self.kinds[place] = _KEEP  # autograd does not keep all of it
        for call in record.calls:
            self.kinds[call.place] = call.runs
        seen = [place for place, kind in enumerate(self.kinds) if kind != _PASS]
        self.first, self.last = (seen[0], seen[-1]) if seen else (-1, -1)
        for place, func in enumerate(mode.history.funcs):
            if self.kinds[place] == _PASS and _compat_dispatch.traits(func).is_hidden:
                self.kinds[place] = _NOTE
        self.unseen = [
            func
            if kind == _PASS and not (func is None or _compat_autocast.is_runner(func))
            else None
            for func, kind in zip(self.funcs, self.kinds, strict=True)
        ]
        self.start = 0 if seen else -1
        self.place = 0
        self.num_packed = len(mode.packs)
        packs = list(enumerate(mode.packs, start=1))
        for number, place in packs:
            if 0 <= place <= self.first:
                self.start, self.place = number, place
        self.switches = {n for n, place in packs if place > self.last}
        self.may_end = bool(self.switches)
        self.switches.add(self.start)


def _results_in(value: Any) -> list[Result]:
    if isinstance(value, Result):
        return [value]
    if isinstance(value, (list, tuple)):
        return [result for item in value for result in _results_in(item)]
    return []


class KnownMode(_compat.PlainDispatchMode, sees_autocast=True):
    """Records what has to be seen of a unit that did the same before.

    Args:
        record: Is filled.
        program: What it did.

    Attributes:
        num_packed: How many tensors autograd has saved.
        lost: It does something else.
        paused: What runs now does not belong to the unit.
    """

    def __init__(self, record: Record, program: Program) -> None:
        super().__init__()
        self.record = record
        self.program = program
        self._funcs, self._kinds = program.funcs, program.kinds
        self._unseen: list[Any] = program.unseen
        self.num_packed = 0
        self.lost = False
        self.paused = False
        self._is_on = False
        self._place = 0
        self._depth = 0
        self._next_node = -1

    def begin(self) -> None:
        """Called as the unit begins."""
        self._depth = _compat_dispatch.num_modes()
        if self.program.start == 0:
            self._enter()

    def end(self) -> None:
        """Called as the unit ends, even by an error."""
        if self._is_on:
            self._leave()

    def finish(self, output: Any) -> None:
        """Called when the unit has returned."""
        program = self.program
        if program.first >= 0 and self._place <= program.last and not self.lost:
            self._lose("its end")
        if self.num_packed > program.num_packed:
            self._lose("autograd saves more")
        if self.record.missed and self.record.lacks():
            self._lose("backward reads what it did not read before")
        if self.record.policy.chain:
            self.record.note_output(output)

    def packed(self, _: torch.Tensor) -> None:
        """Called when autograd has saved a tensor."""
        self.num_packed += 1
        if self.num_packed in self.program.switches:
            self.switch()

    def switch(self) -> None:
        """Begin to see ops, or end it, after as many saved tensors as that takes."""
        program = self.program
        if self.num_packed == program.start:
            self._enter()
        elif self._is_on and self._place > program.last:
            # Behind the kernel of the latest op; before one, it would still be asked.
            is_behind = _compat_autograd.next_sequence_nr() == self._next_node
            if is_behind and _compat_dispatch.num_modes() == self._depth + 1:
                self._leave()

    def _enter(self) -> None:
        if _compat_dispatch.num_modes() == self._depth:  # else ours would not be last
            self._place = self.program.place
            self._is_on = True
            self.__enter__()

    def _leave(self) -> None:
        self._is_on = False
        self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._unseen[self._place] is func and not (types or self.paused):
            self._place += 1
            if self.program.may_end:
                self._next_node = _compat_dispatch.next_node_behind(func)
            return func(*args, **(kwargs or {}))
        return self._see(func, types, args, kwargs)

    @_compat_autocast.runners_under_autocast
    def _see(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that may not be left alone."""
        if types and are_distributed(types):
            self.record.leave(func, args, kwargs)
            return NotImplemented
        kwargs = kwargs or {}
        place = self._place
        if self._funcs[place] is not func or self.paused:
            return self._other(func, args, kwargs)
        self._place = place + 1
        if place >= self.program.last and self.program.may_end:
            self._next_node = _compat_dispatch.next_node_behind(func)
        kind = self._kinds[place]
        if kind == _PASS:
            return func(*args, **kwargs)
        if kind < _PASS:
            out = func(*args, **kwargs)
            if kind == _KEEP:
                self.record.save(place, out)
            else:
                self.record.note_views(out)
            return out
        return self._record(place, kind, func, args, kwargs)

    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op other than the program has next."""
        if func is _compat.DEVICE:
            return args[0].device
        traits = _compat_dispatch.traits(func)
        if not (id(func) in _compat.IGNORED_IDS or traits.is_wait or self.paused):
            self._lose(str(func))
            self._protect(traits.targets(args, kwargs))
        return func(*args, **kwargs)

    def _protect(self, targets: list[Any]) -> None:
        """Copy tensors from elsewhere that are about to change, for what read them."""
        for tensor in tensors_in(targets):
            if self.record.result_of(tensor) is None:
                self.record.protect(tensor)

    def _record(self, place: int, kind: int, func: Any, args: Any, kwargs: Any) -> Any:
        record = self.record
        traits = _compat_dispatch.traits(func)
        if traits.written:
            targets = list(tensors_in(traits.targets(args, kwargs)))
            results = [record.result_of(tensor) for tensor in targets]
            if any(result is None or result.action == SAVE for result in results):
                self._lose(f"{func} on a tensor from elsewhere")
                self._protect(targets)
                return func(*args, **kwargs)
        call = Call(place, func, kind)
        record.write_down(call, traits, args, kwargs)
        out = func(*args, **kwargs)
        record.add_results(call, traits, RERUN, out)
        return out

    def _lose(self, what: str) -> None:
        if not self.lost:
            self.lost = True
            self._funcs = self._unseen = [None]
            self._place = 0
            warnings.warn(
                f"AC unit `{self.record.policy.fqn}` does something else than in the"
                f" steps before ({what}). What it cannot make again for this call is"
                " saved, not recomputed, and the planned peak no longer holds; from its"
                " next call on, all of it is recomputed if it does not do what its plan"
                " expects. Plan again with inputs like these.",
                stacklevel=2,
            )
