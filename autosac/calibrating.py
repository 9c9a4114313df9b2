"""Measure time and workspace of every distinct op of a tape on the present device.

An op runs alone on made-up data of the recorded layouts: random numbers, zeros for
integers, so that every index is valid. Its *workspace* is what its kernel allocates
and frees inside itself, which fake tensors cannot see.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autosac.measuring import recorded_events, storage_bytes
from autosac.pytrees import tensors_in
from autosac.signatures import Layout, Signature
from autosac.tape import Tape

_REPEATS = 5
_MARK = "autosac::calibrated_op"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMeasurement:
    """What one op call costs.

    Attributes:
        runtime_ms: Least of a few times: noise only adds.
        workspace_bytes: Most bytes alive while it ran, less what it returned.
    """

    runtime_ms: float
    workspace_bytes: int


def measure_ops(tape: Tape, *, device: torch.device) -> dict[Signature, OpMeasurement]:
    """Run every distinct op of a tape that does some work.

    Ops that do not run on made-up data are left out of the result.
    """
    signatures = {op.signature for op in tape.ops if not op.is_view}
    calls = [_Call(s, device) for s in signatures if isinstance(s, Signature)]
    with torch.random.fork_rng(), torch.no_grad():
        runtimes = {call.signature: ms for call in calls if (ms := _runtime_ms(call))}
        calls = [call for call in calls if call.signature in runtimes]
        workspaces = _workspaces(calls, device)
    return {
        call.signature: OpMeasurement(
            runtime_ms=runtimes[call.signature], workspace_bytes=workspace_bytes
        )
        for call, workspace_bytes in zip(calls, workspaces, strict=True)
    }


class _Call:
    """An op on made-up data."""

    def __init__(self, signature: Signature, device: torch.device) -> None:
        self.signature = signature
        self.device = device

    def prepare(self) -> tuple[list[Any], dict[str, Any]]:
        args = [_thaw(value, self.device) for value in self.signature.args]
        pairs = self.signature.kwargs
        return args, {name: _thaw(value, self.device) for name, value in pairs}


def _runtime_ms(call: _Call) -> float | None:
    """Least time of an op; None if it does not run on made-up data."""
    func = call.signature.func
    times = []
    try:
        args, kwargs = call.prepare()
        func(*args, **kwargs)
        _synchronize(call.device)
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            func(*args, **kwargs)
            _synchronize(call.device)
            times.append((time.perf_counter() - begin) * 1e3)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return min(times)


def _workspaces(calls: list[_Call], device: torch.device) -> list[int]:
    """Workspace of each op in bytes."""
    if device.type == "cuda":
        return [_cuda_workspace(call) for call in calls]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # as in `measuring`
    kept: list[int] = []
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recording:
        for call in calls:
            args, kwargs = call.prepare()
            with record_function(_MARK):
                out = call.signature.func(*args, **kwargs)
            kept.append(_kept_bytes(out, args, kwargs))
            del out, args, kwargs
    peaks = [_peak_bytes(event) for event in _marks(recording)]
    return [max(0, p - k) for p, k in zip(peaks, kept, strict=True)]


def _cuda_workspace(call: _Call) -> int:
    args, kwargs = call.prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call.signature.func(*args, **kwargs)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    del out
    return max(0, torch.cuda.max_memory_allocated() - max(before, after))


def _kept_bytes(out: Any, args: Any, kwargs: Any) -> int:
    """Bytes that an op returned and did not get."""
    given = list(tensors_in((args, kwargs)))
    return storage_bytes([*given, *tensors_in((out,))]) - storage_bytes(given)


def _marks(recording: profile) -> Iterator[Any]:
    return (event for event in recorded_events(recording) if event.name == _MARK)


def _peak_bytes(mark: Any) -> int:
    """Most bytes allocated inside a marked range."""
    pending, sizes = list(mark.children), []
    while pending:
        event = pending.pop()
        kind, fields = event.typed
        if kind.name == "Allocation" and fields.device.type == "cpu":
            sizes.append((event.start_time_ns, fields.alloc_size))
        pending.extend(event.children)
    live = peak = 0
    for _, size in sorted(sizes, key=lambda item: item[0]):
        live += size
        peak = max(peak, live)
    return peak


def _thaw(value: Any, device: torch.device) -> Any:
    """Made-up data for a frozen argument."""
    if isinstance(value, tuple):
        return [_thaw(item, device) for item in value]
    if not isinstance(value, Layout):
        return value
    reach = 1 + sum(
        (size - 1) * step for size, step in zip(value.size, value.stride, strict=True)
    )
    # The memory first: a layout may visit an element twice (`expand`).
    flat = torch.zeros(max(reach, 0), dtype=value.dtype, device=device)
    if value.dtype.is_floating_point:
        flat.uniform_()
    return flat.as_strided(value.size, value.stride)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
