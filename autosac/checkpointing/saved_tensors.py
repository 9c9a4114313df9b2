"""AC units at work: what autograd gets in place of the tensors that a unit saves.

Non-reentrant checkpointing, as `torch.utils.checkpoint` does it (torch 2.15):
    - in forward autograd keeps a `Holder` for each tensor that it would save;
    - at the first of them that backward reads, the unit runs again up to its last saved
      tensor, and all holders that are alive get theirs;
    - each gives it away when it is read; the next backward makes all of them again.
It differs in how the unit runs again: op by op from its record, if it did what its plan
expects (`checkpointing/op_records.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autosac import _compat_dispatch
from autosac._compat_distributed import local, unwrapped
from autosac.checkpointing.ambient_state import thread
from autosac.checkpointing.call_arguments import Handed, Kept, Source, leaves
from autosac.checkpointing.op_programs import KnownMode
from autosac.checkpointing.op_records import BACKWARD, Record
from autosac.checkpointing.recording_mode import RecordingMode
from autosac.checkpointing.tensor_parts import Part, changed, gone, version_of


class Holder(Part):
    """Stands in for a tensor that autograd saved in a unit.

    Attributes:
        frame: The call of the unit.
        tensor: The tensor, from a rerun until backward reads it.
        whole: What counts how often it is changed meanwhile; None if nobody else can.
        wrap: What makes the tensor that autograd saved of it; None for itself.
    """

    __slots__ = ("__weakref__", "frame", "tensor", "whole", "wrap")

    frame: Frame
    tensor: torch.Tensor | None
    whole: torch.Tensor | None
    wrap: Callable[[torch.Tensor], torch.Tensor] | None

    def fill(self, given: Sequence[torch.Tensor], fqn: str) -> None:
        """Take the tensor, which a rerun has made again."""
        self.tensor = self.tensor_of(given, fqn)
        self.whole = None if self.version is None else self.whole_of(given)

    def empty(self) -> torch.Tensor:
        """Give the tensor away, as it was in forward."""
        tensor, whole = self.tensor, self.whole
        assert tensor is not None
        if whole is not None and version_of(whole) != self.version:
            raise changed(tensor, self.version, self.frame.record.policy.fqn)
        self.tensor = self.whole = None
        return tensor if self.wrap is None else self.wrap(tensor)


# What autograd keeps of a unit whatever is made again: the call, which lives as long as
# any of it does, a tensor, None once it is read for the last time, and its version.
_Apart = list[Any]  # not a class: there are many, and they cost the host time
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of such tensors


class Frame:
    """One call of a unit.

    Args:
        source: Knows its arguments.
        mode: Records its forward pass.
    """

    def __init__(self, source: Source, mode: RecordingMode | KnownMode) -> None:
        self.source = source
        self.mode = mode
        self.record: Record = mode.record
        self.holders: list[weakref.ref[Holder]] = []
        self.is_over = False
        self.waits = False  # to run again
        self.is_last = False  # backward pass through it
        self._known = mode if isinstance(mode, KnownMode) else None
        self._keeps_arguments = type(source) is Kept

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the unit's forward pass and record it."""
        mode, record = self.mode, self.record
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                mode.begin()
                thread.is_inside = True
                try:
                    output = forward(*args, **kwargs)
                finally:
                    thread.is_inside = False
                    mode.end()
            mode.finish(output)
            if record.is_exact:
                record.drop_calls()
                record.code = None
                if self._known is None or not self._keeps_arguments:
                    self.source.keep_tensors_alone()
            elif record.code is not None:
                record.code.keep()
        finally:
            record.close()
        self.is_over = True
        self.waits = True
        return output

    def _pack(self, tensor: torch.Tensor) -> Holder | _Apart:
        record = self.record
        known = self._known
        if (
            known is not None
            and type(tensor) in _PLAIN
            and (
                (self._keeps_arguments and not record.results) or self._is_apart(tensor)
            )
        ):
            record.stop = len(record.calls)
            known.num_packed += 1
            if known.num_packed in known.program.switches:
                known.switch()
            if not tensor.is_leaf:  # its graph may lead here
                tensor = _compat_dispatch.detached_unseen(tensor)
            return [self, tensor, tensor._version]
        holder = Holder()
        holder.wrap = None
        if type(tensor) not in _PLAIN:
            tensor, holder.wrap = unwrapped(tensor)
        holder.frame, holder.source = self, None
        holder.tensor = holder.whole = None
        if record.is_exact:  # else what would be kept is made again
            record.locate(holder, tensor, BACKWARD, BACKWARD)
        record.stop = len(record.calls)
        self.holders.append(weakref.ref(holder))
        self.mode.packed(tensor)
        return holder

    def _is_apart(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor is kept whatever becomes of the unit's results."""
        if self.record.result_of(tensor) is not None:
            return False
        return self._keeps_arguments or self.record.number_of(tensor) is None

    def prepare(self) -> None:
        """Backward begins to read: run again, if any tensor waits for it."""
        if any(ref() is not None for ref in self.holders):
            self.run_again()
        else:
            self._begin_backward()

    def _begin_backward(self) -> None:
        self.waits = False
        self.is_last = self.is_over and not _compat_dispatch.keeps_graph()

    def run_again(self) -> None:
        """Give all holders that are alive their tensors."""
        self._begin_backward()
        self.mode.paused = True
        try:
            with _compat_dispatch.untransformed():
                template = self.source.again()
                if self.record.is_exact:
                    handed = leaves(template, Handed)
                    given = [local(argument.tensor) for argument in handed]
                    self._repeat(given, is_last=self.is_last)
                else:
                    self._run_code(template)
        finally:
            self.mode.paused = False
            if self.is_last:
                self._forget()

    def _forget(self) -> None:
        """Let go of all but the holders' tensors: the unit will not run again."""
        self.record.clear()
        for ref in self.holders:
            if (holder := ref()) is not None:
                holder.source = None

    def _repeat(self, given: Sequence[torch.Tensor], *, is_last: bool) -> None:
        """Run the unit again op by op."""
        record, fqn = self.record, self.record.policy.fqn
        try:
            with _compat_dispatch.BelowAutograd():
                record.run_again(given, BACKWARD, is_last=is_last)
                for ref in self.holders:
                    holder = ref()
                    if holder is not None and holder.tensor is None:
                        if holder.source is None:
                            raise gone(fqn)
                        holder.fill(given, fqn)
        finally:
            record.lose()

    def _run_code(self, template: Any) -> None:
        """Run the unit again as Python code."""
        packed = _Packed(self.holders)
        assert self.record.code is not None
        try:
            self.record.code.run(self.record, template, packed.pack)
        except _Done:
            packed.watch()
            return
        if packed.number < len(self.holders):
            raise RuntimeError(
                f"AC unit `{self.record.policy.fqn}` saved {len(self.holders)} tensors"
                f" in forward and {packed.number} when it was rerun in backward: it"
                " depends on state that changed in between. Exclude it from the plan"
                " with `exclude`."
            )


def _unpack(holder: Holder | _Apart) -> torch.Tensor:
    if type(holder) is list:
        frame, tensor, version = holder
        if frame.waits:
            frame.prepare()
        if tensor is None:
            raise gone(frame.record.policy.fqn)
        if tensor._version != version:
            raise changed(tensor, version, frame.record.policy.fqn)
        if frame.is_last:
            holder[1] = None
        return tensor  # type: ignore[no-any-return]
    assert isinstance(holder, Holder)
    if holder.tensor is None:
        holder.frame.run_again()
    return holder.empty()


class _Done(Exception):
    """Raised when every tensor that autograd saved was made again."""


class _Packed:
    """Hands tensors that a rerun saves to the holders of its forward pass."""

    def __init__(self, holders: Sequence[weakref.ref[Holder]]) -> None:
        self.holders = holders
        self.number = 0
        self.filled: list[Holder] = []

    def watch(self) -> None:
        """Note versions at the end of the rerun, to notice changes from then on."""
        for holder in self.filled:
            holder.whole = holder.tensor
            assert holder.tensor is not None
            holder.version = version_of(holder.tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hand a tensor that autograd saves in the rerun to its holder."""
        # Without its graph: a result that its own function saves would never go.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        holder = self.holders[self.number]()
        if holder is not None and holder.tensor is None:
            holder.tensor = local(tensor)
            self.filled.append(holder)
        self.number += 1
        if self.number == len(self.holders):
            raise _Done
        return tensor  # for a backward pass inside the unit's forward
