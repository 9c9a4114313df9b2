"""AC units at work: what autograd gets in place of the tensors that a unit saves.

Non-reentrant checkpointing, as `torch.utils.checkpoint` does it (torch 2.15):
    - in forward autograd keeps a `Holder` for each tensor that it would save;
    - at the first of them that backward reads, the unit runs again up to its last saved
      tensor, and all holders that are alive get theirs;
    - each gives it away when it is read; the next backward makes all of them again.
It differs in how the unit runs again: op by op from its record, if it did what its plan
expects (`applying/records.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autosac import _compat_dispatch
from autosac.applying.handing import Handed, Source, leaves, put_together
from autosac.applying.parts import BACKWARD, Part
from autosac.applying.records import Record
from autosac.applying.rerunning import ForwardMode, RerunMode
from autosac.applying.surroundings import Present


class Holder:
    """Stands in for a tensor that autograd saved in a unit.

    Attributes:
        frame: The call of the unit.
        part: What the tensor is part of, if that is known.
        tensor: The tensor, while backward has not read it.
    """

    __slots__ = ("__weakref__", "frame", "part", "tensor")

    def __init__(self, frame: Frame, part: Part | None) -> None:
        self.frame = frame
        self.part = part
        self.tensor: torch.Tensor | None = None


class _Done(Exception):
    """Every tensor that autograd saved was made again."""


class Frame:
    """One call of a unit.

    Args:
        forward: Its forward function.
        record: What its forward pass does.
        source: Knows its arguments.
        surroundings: What is around it.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        record: Record,
        source: Source,
        surroundings: Present,
    ) -> None:
        self.forward = forward
        self.record = record
        self.source = source
        self.surroundings = surroundings
        self.holders: list[weakref.ref[Holder]] = []
        self.is_over = False

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run forward."""
        record = self.record
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
            with hooks, ForwardMode(record):
                output = self.forward(*args, **kwargs)
            record.finish(output)
        finally:
            record.close()
        self.is_over = True
        return output

    def _pack(self, tensor: torch.Tensor) -> Holder:
        record = self.record
        part = record.part_of(tensor, BACKWARD, kept=BACKWARD)
        record.stop = len(record.funcs)
        holder = Holder(self, part if record.is_exact else None)
        self.holders.append(weakref.ref(holder))
        return holder

    def run_again(self) -> None:
        """Give all holders that are alive their tensors."""
        template = self.source.again()
        self.record.paused = True
        try:
            if self.record.is_exact:
                self._repeat([handed.tensor for handed in leaves(template, Handed)])
            else:
                self._rerun(template)
        finally:
            self.record.paused = False
        if self.is_over and not _compat_dispatch.keeps_graph():
            self.record.clear()
            for ref in self.holders:
                if (holder := ref()) is not None:
                    holder.part = None

    def _repeat(self, given: Sequence[torch.Tensor]) -> None:
        """Run again op by op."""
        record = self.record
        try:
            record.run_again(given, BACKWARD)
            with _compat_dispatch.below_autograd():
                for ref in self.holders:
                    holder = ref()
                    if holder is not None and holder.tensor is None:
                        assert holder.part is not None
                        holder.tensor = holder.part.tensor(given, record.policy.fqn)
        finally:
            record.lose()

    def _rerun(self, template: Any) -> None:
        """Run again as Python code."""
        given = [handed.tensor for handed in leaves(template, Handed)]
        args, kwargs = put_together(template)
        packed = _Packed(self.holders)
        hooks = torch.autograd.graph.saved_tensors_hooks(packed.pack, _same)
        mode = RerunMode(self.record, given)
        try:
            with torch.enable_grad(), self.surroundings.again(), hooks, mode:
                self.forward(*args, **kwargs)
        except _Done:
            return
        if packed.number < len(self.holders):
            raise RuntimeError(
                f"AC unit `{self.record.policy.fqn}` saved {len(self.holders)} tensors"
                f" in forward and {packed.number} when it was rerun in backward: it"
                " depends on state that changed in between. Exclude it from the plan"
                " with `exclude`."
            )


def _unpack(holder: Holder) -> torch.Tensor:
    if holder.tensor is None:
        holder.frame.run_again()
    tensor, holder.tensor = holder.tensor, None
    assert tensor is not None
    return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Packed:
    """Hands tensors that a rerun saves to the holders of its forward pass."""

    def __init__(self, holders: Sequence[weakref.ref[Holder]]) -> None:
        self.holders = holders
        self.number = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        holder = self.holders[self.number]()
        if holder is not None and holder.tensor is None:
            holder.tensor = tensor.detach() if tensor.requires_grad else tensor
        self.number += 1
        if self.number == len(self.holders):
            raise _Done
        return tensor  # for a backward pass inside the unit's forward
