"""State of optimizers that lies in far memory, in a trace.

It counts only while it is on the device. What the program waits for is an op of the
tape, whose time the link decides.
"""

from __future__ import annotations

from functools import partial

import torch

from autosac.step.offloaded_optimizer import OffloadedOptimizer, offloaded_parts
from autosac.step.op_signatures import FAR_COPIES, Copies
from autosac.step.tape import Op
from autosac.step.training_step import AnyOptimizer
from autosac.tracing.recorder import Recorder


def watch(recorder: Recorder, optimizer: AnyOptimizer | None) -> None:
    """Write down the copies of an optimizer from now on."""
    for part in offloaded_parts(optimizer):
        part.noted = partial(_note, recorder)


def put_away(recorder: Recorder, optimizer: AnyOptimizer) -> None:
    """Count nothing of the state that lies in far memory between steps."""
    for part in offloaded_parts(optimizer):
        part.put_away()
        recorder.exempt(part.far_tensors())


def updating(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that makes the state."""
    return optimizer.base if isinstance(optimizer, OffloadedOptimizer) else optimizer


def _note(
    recorder: Recorder, leaving: list[torch.Tensor], coming: list[torch.Tensor]
) -> None:
    """Write down that the program has waited for copies."""
    if recorder.muted:
        return
    start, made = recorder.tick(), recorder.tick()
    for tensor in coming:
        recorder.rename(tensor, "optimizer")
    copies = Copies(_sizes(leaving), _sizes(coming))
    if recorder.only_storages:
        return
    recorder.ops.append(
        Op(
            name=FAR_COPIES,
            phase=recorder.phase,
            module=recorder.modules.stack[-1],
            start=start,
            made=made,
            end=recorder.tick(),
            reads=recorder.storages_of(leaving),
            writes=recorder.storages_of(coming),
            creates=(),
            random=False,
            flops=0,
            moved_bytes=copies.out_bytes + copies.back_bytes,
            workspace_bytes=0,
            wrapped_numbers=0,
            dtype="",
            shapes=(),
            signature=copies,
        )
    )


def _sizes(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.nbytes for tensor in tensors)
