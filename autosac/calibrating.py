"""Measure time and workspace of every distinct op of a tape on the present device.

An op runs alone on made-up data of the recorded layouts: random numbers, zeros for
integers, so that every index is valid. Its *workspace* is what its kernel allocates
and frees inside itself, which fake tensors cannot see.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autosac.measuring import memory_inside
from autosac.recording import Layout, Signature
from autosac.tape import Tape

_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMeasurement:
    """What one op call costs.

    Attributes:
        runtime_ms: Median time.
        workspace_bytes: Most bytes alive while it ran, less what it returned.
    """

    runtime_ms: float
    workspace_bytes: int


def measure_ops(
    tape: Tape, *, device: torch.device
) -> dict[Signature, OpMeasurement]:
    """Run every distinct op of a tape that does some work.

    Ops that do not run on made-up data are left out of the result.
    """
    signatures = dict.fromkeys(op.signature for op in tape.ops if not op.is_view)
    with torch.random.fork_rng(), torch.no_grad():
        return dict(_measure_each(signatures, device))


def _measure_each(
    signatures: Mapping[Any, None], device: torch.device
) -> Iterator[tuple[Signature, OpMeasurement]]:
    for signature in signatures:
        assert isinstance(signature, Signature)
        try:
            measured = _measure(signature, device)
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue  # this op does not run on made-up data
        yield signature, measured


def _measure(signature: Signature, device: torch.device) -> OpMeasurement:
    args = [_thaw(value, device) for value in signature.args]
    kwargs = {name: _thaw(value, device) for name, value in signature.kwargs}

    def run() -> Any:
        return signature.func(*args, **kwargs)

    run()
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run()
        _synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    peak_bytes, kept_bytes = memory_inside(run, device=device)
    return OpMeasurement(
        runtime_ms=statistics.median(times),
        workspace_bytes=max(0, peak_bytes - kept_bytes),
    )


def _thaw(value: Any, device: torch.device) -> Any:
    """Made-up data for a frozen argument."""
    if isinstance(value, tuple):
        return [_thaw(item, device) for item in value]
    if not isinstance(value, Layout):
        return value
    made = torch.empty_strided(
        value.size, value.stride, dtype=value.dtype, device=device
    )
    return made.uniform_() if value.dtype.is_floating_point else made.zero_()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
