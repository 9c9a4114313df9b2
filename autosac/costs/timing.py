"""Run ops alone on made-up data: their time and their workspace.

The *workspace* of an op is what its kernel allocates and frees inside itself, which
fake tensors cannot see.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from autosac import _compat, _compat_dispatch
from autosac._compat_profiler import a_profiler_is_active
from autosac.costs import synthetic_inputs
from autosac.devices.allocator_events import cpu_events, recorded_events
from autosac.devices.free_memory import available_bytes
from autosac.progress import progress_bar
from autosac.pytrees import tensors_in
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.step.op_signatures import Signature

_FEWEST = 2  # runs: the first one may find a machine that does something else, too
_REPEATS = 6  # noise only adds: the least of so many times is taken,
_ENOUGH_MS = 200.0  # or of as many as fit into this time;
_MOST, _MOST_MS = 18, 600.0  # if they disagree, so many more
STEADY = 0.5  # how much longer the second least time may be: a heuristic
_IN_A_ROW = 20  # runs of a short op on a GPU, where waiting takes longer than it does
_SHORT_MS = 1.0  # an op so short is slowed down by being recorded
_MEMORY_SHARE = 0.8  # of what is free, that one op may take: a heuristic
_MARK = "autosac::calibrated_op "
PROFILED = "a profiler is active"
# What ops say of arguments they do not like; the last three are Python kernels'.
_REFUSALS = (
    RuntimeError,
    ValueError,
    IndexError,
    TypeError,
    AssertionError,
    AttributeError,
    KeyError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSizes:
    """Memory of one op call that its tape counts.

    Attributes:
        moved_bytes: Of its tensor arguments and results.
        made_bytes: Of the storages that it makes for its results. A kernel may return
            more than its fake one says: oneDNN's backward of a convolution returns the
            gradient of a weight that only wants its bias's.
    """

    moved_bytes: int
    made_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMeasurement:
    """What one op call costs.

    Attributes:
        runtime_ms: Least of a few times: noise only adds.
        workspace_bytes: Most bytes alive while it ran, less what its tape counts.
        kept_bytes: What its library allocated on a GPU and keeps for good for the
            thread that ran it: workspaces of cuBLAS.
        spread: How much longer the second least time was, as a share of the least.
    """

    runtime_ms: float
    workspace_bytes: int
    kept_bytes: int = 0
    spread: float = 0.0

    @property
    def is_steady(self) -> bool:
        """Whether two runs agree; else the machine did something else meanwhile."""
        return self.spread <= STEADY

    def or_earlier(self, other: OpMeasurement) -> OpMeasurement:
        """The less noisy one of this measurement and an earlier one."""
        least, more = sorted((self, other), key=lambda one: one.runtime_ms)
        gap = spread_of((least.runtime_ms, more.runtime_ms))
        return replace(least, spread=min(least.spread, gap))


@dataclass(frozen=True, slots=True)
class Measurements:
    """What running some ops showed.

    Attributes:
        costs: Of each op that ran.
        failures: Why each of the others did not.
        is_cut: The user interrupted it: others are missing.
    """

    costs: dict[Signature, OpMeasurement]
    failures: dict[Signature, str]
    is_cut: bool = False


def measure_ops(
    sizes: Mapping[Signature, OpSizes],
    *,
    device: torch.device,
    progress: bool | None = None,
) -> Measurements:
    """Run ops on made-up data; none, with a warning, while a profiler is active.

    On the CPU the two would spoil each other, and anywhere the profiler would slow the
    ops down and be shown what the user never ran.

    Args:
        sizes: The ops, and what their tape says of each.
        device: Where.
        progress: Show a bar on the standard error stream; None for only if that is
            a terminal.
    """
    if not sizes:
        return Measurements({}, {})
    if a_profiler_is_active():
        warn(
            "A profiler is active, beside which ops cannot be measured: times and"
            " workspaces of those that are not known from before are modelled, and the"
            " real peak may be a little above the predicted one. Calibrate or plan"
            " outside of the profiler."
        )
        return Measurements({}, dict.fromkeys(sizes, PROFILED))
    allowed: dict[Signature, OpSizes] = {}
    failures: dict[Signature, str] = {}
    for signature, size in sizes.items():
        reason = synthetic_inputs.refusal(signature) or _too_large(
            size.moved_bytes, device
        )
        if reason is None:
            allowed[signature] = size
        else:
            failures[signature] = reason
    first_runs = _first_runs_on_gpu if device.type == "cuda" else _first_runs_on_cpu
    used = [_index_of(device)] if device.type == "cuda" else []
    random = torch.random.fork_rng(devices=used)
    begin = _compat_dispatch.as_a_step_begins()
    with random, begin, _compat.no_modes(), torch.no_grad():
        costs, failed, is_cut = first_runs(allowed, device, progress)
        short = [s for s, cost in costs.items() if cost.runtime_ms < _SHORT_MS]
        rough = dict.fromkeys(short)  # timed beside the profiler only
        with suppress(KeyboardInterrupt):
            for signature in _watched([] if is_cut else short, "times", progress):
                cost = _without_recording(signature, costs[signature], device)
                costs[signature] = cost
                del rough[signature]
    if device.type == "cuda":
        # The step that is planned shall not be laid between what was measured.
        torch.cuda.empty_cache()
    steady = {s: cost for s, cost in costs.items() if s not in rough}
    return Measurements(steady, failures | failed, is_cut=is_cut or bool(rough))


_Timing = tuple[float, float]  # ms, and the spread of a few runs
_FirstRuns = tuple[dict[Signature, OpMeasurement], dict[Signature, str], bool]


def _first_runs_on_cpu(
    sizes: Mapping[Signature, OpSizes], device: torch.device, progress: bool | None
) -> _FirstRuns:
    """Workspaces and times, rough ones of short ops; why other ops do not run; whether
    the user interrupted it."""
    ran: dict[str, tuple[_Timing, int]] = {}
    failures = {}
    is_cut = True
    names = {f"{_MARK}{i}": signature for i, signature in enumerate(sizes)}
    with cpu_events() as recording, suppress(KeyboardInterrupt):
        for name, signature in _watched(names.items(), "workspaces", progress):
            try:
                ran[name] = _first_run_on_cpu(name, signature, device)
            except _REFUSALS as error:
                failures[signature] = _summary(error)
        is_cut = False
    costs = {}
    for event in recorded_events(recording):
        if event.name in ran:
            signature = names[event.name]
            (runtime_ms, spread), found_bytes = ran[event.name]
            made_bytes = max(sizes[signature].made_bytes, found_bytes)
            costs[signature] = OpMeasurement(
                runtime_ms=runtime_ms,
                workspace_bytes=max(0, _peak_bytes(event) - made_bytes),
                spread=spread,
            )
    return costs, failures, is_cut


def _first_run_on_cpu(
    name: str, signature: Signature, device: torch.device
) -> tuple[_Timing, int]:
    """Time of an op that is recorded under a name.

    And the bytes of its results if their shapes depend on values: with made-up ones
    they may be larger than in the step.
    """
    args, kwargs = synthetic_inputs.arguments(signature, device)
    call = partial(signature.func, *args, **kwargs)
    clock = _clock(device)
    begin = clock()
    # Forward kernels run with gradients enabled, and oneDNN's LSTM looks.
    is_forward = "backward" not in str(signature.func)
    with torch.set_grad_enabled(is_forward), record_function(name):
        out = call()
    elapsed_ms = (clock() - begin) * 1e3
    found_bytes = 0
    if torch.Tag.dynamic_output_shape in signature.func.tags:
        found_bytes = sum(t.untyped_storage().nbytes() for t in tensors_in((out,)))
    del out  # before it runs again
    timing = (elapsed_ms, 0.0)
    if elapsed_ms >= _SHORT_MS:
        timing = _timing(call, device, elapsed_ms)
    return timing, found_bytes


def _first_runs_on_gpu(
    sizes: Mapping[Signature, OpSizes], device: torch.device, progress: bool | None
) -> _FirstRuns:
    """Workspaces and times, rough ones of short ops; why other ops do not run.

    There, what an op returns counts, not what its tape says: blocks are rounded up.
    """
    costs, failures, is_cut = {}, {}, True
    with suppress(KeyboardInterrupt):
        for signature in _watched(sizes, "workspaces", progress):
            try:
                costs[signature] = _first_run_on_gpu(signature, device)
            except _REFUSALS as error:
                failures[signature] = _summary(error)
        is_cut = False
    return costs, failures, is_cut


def _first_run_on_gpu(signature: Signature, device: torch.device) -> OpMeasurement:
    args, kwargs = synthetic_inputs.arguments(signature, device)
    call = partial(signature.func, *args, **kwargs)
    _compat.clear_blas_workspaces()
    before = torch.cuda.memory_allocated(device)
    call()  # libraries are loaded and allocate at their first call
    torch.cuda.synchronize(device)
    kept_bytes = max(0, torch.cuda.memory_allocated(device) - before)
    elapsed_ms = _run_ms(call, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = call()
    torch.cuda.synchronize(device)
    held = max(before, torch.cuda.memory_allocated(device))
    workspace_bytes = max(0, torch.cuda.max_memory_allocated(device) - held)
    del out  # before it runs again
    timing = (elapsed_ms, 0.0)
    if elapsed_ms >= _SHORT_MS:
        timing = _timing(call, device, elapsed_ms)
    return OpMeasurement(
        runtime_ms=timing[0],
        workspace_bytes=workspace_bytes,
        kept_bytes=kept_bytes,
        spread=timing[1],
    )


def _without_recording(
    signature: Signature, first: OpMeasurement, device: torch.device
) -> OpMeasurement:
    """A first measurement with a better time, taken without the profiler."""
    args, kwargs = synthetic_inputs.arguments(signature, device)
    call = partial(signature.func, *args, **kwargs)
    in_a_row = _IN_A_ROW if device.type == "cuda" else 1
    try:
        least_ms, spread = _timing(call, device, first.runtime_ms, in_a_row)
    except _REFUSALS:  # it ran before; memory may have run short since
        return first
    return replace(first, runtime_ms=least_ms, spread=spread)


def _timing(
    call: Callable[[], Any], device: torch.device, first_ms: float, in_a_row: int = 1
) -> _Timing:
    """Time of an op that took ``first_ms`` and runs a few times more."""
    times, spent_ms = [first_ms], 0.0
    while len(times) < _MOST:
        is_steady = spread_of(times) <= STEADY
        if len(times) >= _FEWEST and spent_ms > (_ENOUGH_MS if is_steady else _MOST_MS):
            break
        if len(times) >= _REPEATS and is_steady:
            break
        elapsed_ms = _run_ms(call, device, in_a_row)
        spent_ms += elapsed_ms * in_a_row
        times.append(elapsed_ms)
    return min(times), spread_of(times)


def spread_of(times: Sequence[float]) -> float:
    """How much longer the second least of some times is, as a share of the least."""
    least, second, *_ = [*sorted(times), math.inf]
    return second / least - 1 if least > 0 else 0.0


def _run_ms(call: Callable[[], Any], device: torch.device, in_a_row: int = 1) -> float:
    """Time of a call; a GPU is waited for once after so many of them."""
    clock = _clock(device)
    begin = clock()
    for _ in range(in_a_row):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock() - begin) * 1e3 / in_a_row


def _clock(device: torch.device) -> Callable[[], float]:
    """Clock in seconds: this thread's own one if ops run on this thread alone."""
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if is_alone else time.perf_counter


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _summary(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return f"it fails on made-up data: {type(error).__name__}: {line[:100]}"


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


def blas_bytes(device: torch.device) -> int:
    """What cuBLAS allocates on a GPU for each thread that uses it, and keeps."""
    torch.cuda.synchronize(device)
    _compat.clear_blas_workspaces()
    matrix = torch.ones(64, 64, device=device)
    before = torch.cuda.memory_allocated(device)
    torch.addmm(matrix[0], matrix, matrix)
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


# --- memory that is free ------------------------------------------------------


def _too_large(num_bytes: int, device: torch.device) -> str | None:
    """Why an op of so many bytes must not run here."""
    free_bytes = available_bytes(device)
    if free_bytes is None or num_bytes <= _MEMORY_SHARE * free_bytes:
        return None
    return f"it needs {format_bytes(num_bytes)}, {format_bytes(free_bytes)} are free"


# --- progress -----------------------------------------------------------------


def _watched(items: Collection[Any], what: str, progress: bool | None) -> Iterator[Any]:
    """The items, with a progress bar on the standard error stream."""
    text = f"Measuring {what} of {len(items)} ops"
    with progress_bar(text, len(items), show=progress) as advance:
        for item in items:
            yield item
            advance()
