"""Measured peaks, and training states compared bit by bit.

On the CPU the truth is the allocator's own events: see `allocator_events`. A free of
memory allocated before the recording may leave none: hence `warm_up`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.profiler import profile, record_function
from torch.utils._pytree import keystr, tree_flatten_with_path

from autosac.devices.allocator_events import cpu_events, recorded_events
from autosac.errors import UnsupportedError
from autosac.step.random_streams import stream_states
from autosac.step.training_step import AnyOptimizer
from autosac.storages import dense_parts, storages_of

T = TypeVar("T")
State = dict[str, torch.Tensor]
_MARK = "autosac::measured_run"


def measure_peak(
    run: Callable[[], T],
    *,
    device: torch.device | str,
    persistent_bytes: int = 0,
    held: Callable[[], Iterable[torch.Tensor]] | None = None,
    warm_up: Callable[[], object] | None = None,
    counts_warm_up: bool = False,
) -> tuple[T, int]:
    """Call ``run`` and return its result and the peak device memory meanwhile.

    On the CPU that is ``persistent_bytes``, what ``held`` names, whatever else
    ``warm_up`` has left alive on this thread (such as what a graph saved), and what
    ``run`` adds there; a free of memory older than ``warm_up`` does not lower it, so
    it never understates. On a GPU it is all that the process holds there, and
    ``persistent_bytes`` and ``held`` are not used.

    Args:
        run: What is measured.
        device: Where.
        persistent_bytes: Bytes alive when ``run`` begins, besides those.
        held: Gives tensors that are alive then; called between ``warm_up`` and ``run``.
        warm_up: Called first; ``run`` may free what it leaves alive.
        counts_warm_up: Its peak counts as well. On the CPU without what of ``held``
            it has replaced, as nobody knows when that was freed.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _measure_cuda(run, device, warm_up, counts_warm_up)
    if device.type == "cpu":
        result, peak_bytes = _measure_cpu(run, held, warm_up, counts_warm_up)
        return result, persistent_bytes + peak_bytes
    raise UnsupportedError(
        f"Peaks are measured on 'cpu' and 'cuda', not on {device.type!r}: no"
        " allocator statistics are known there."
    )


def _measure_cuda(
    run: Callable[[], T],
    device: torch.device,
    warm_up: Callable[[], object] | None,
    counts_warm_up: bool,
) -> tuple[T, int]:
    earlier_bytes = 0
    if warm_up is not None:
        torch.cuda.reset_peak_memory_stats(device)
        warm_up()
        torch.cuda.synchronize(device)
        earlier_bytes = counts_warm_up * torch.cuda.max_memory_allocated(device)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    return result, max(earlier_bytes, torch.cuda.max_memory_allocated(device))


def _measure_cpu(
    run: Callable[[], T],
    held: Callable[[], Iterable[torch.Tensor]] | None,
    warm_up: Callable[[], object] | None,
    counts_warm_up: bool,
) -> tuple[T, int]:
    first = _sizes(held() if held is not None and counts_warm_up else ())
    with cpu_events() as recording:
        if warm_up is not None:
            warm_up()
        gc.collect()  # not in the middle of the run
        before = _sizes(held() if held is not None else ())
        with record_function(_MARK):
            result = run()
    changes = _changes(recording)
    peak_bytes = _peak_bytes(changes, before)
    if counts_warm_up:
        peak_bytes = max(peak_bytes, _earlier_peak_bytes(changes, first, before))
    return result, peak_bytes


@dataclass(frozen=True, slots=True)
class _Changes:
    """Begin and end of the marked range; time, address and bytes of each change."""

    start_ns: int
    end_ns: int
    events: list[tuple[int, int, int]]


def _earlier_peak_bytes(
    changes: _Changes, first: Mapping[int, int], last: Mapping[int, int]
) -> int:
    """Most bytes alive before the marked range, without what is gone by then.

    Args:
        changes: In the range, and before it.
        first: Address -> bytes of memory that is alive as the recording begins,
        last: and as the range does.
    """
    older = dict(first)
    made: dict[int, int] = {}
    live = peak = sum(first.values())
    for time_ns, address, num_bytes in changes.events:
        if time_ns >= changes.start_ns:
            break
        if num_bytes > 0:
            made[address] = num_bytes
        else:
            num_bytes = -(made if address in made else older).pop(address, 0)
        live += num_bytes
        peak = max(peak, live)
    gone = (size for a, size in older.items() if a in made or a not in last)
    return peak - sum(gone)


def _peak_bytes(changes: _Changes, before: Mapping[int, int]) -> int:
    """Most bytes alive in the marked range.

    Args:
        changes: In the range, and before it.
        before: Address -> bytes of memory that is alive at its beginning.
    """
    start_ns, end_ns, events = changes.start_ns, changes.end_ns, changes.events
    live_bytes: dict[int, int] = {}  # of each address allocated while recording
    live = peak = 0
    has_begun = False
    for time_ns, address, num_bytes in [*events, (end_ns, 0, 0)]:
        if not has_begun and time_ns >= start_ns:
            has_begun = True
            older = (size for key, size in before.items() if key not in live_bytes)
            live = peak = sum(live_bytes.values()) + sum(older)
        if num_bytes > 0:
            live_bytes[address] = num_bytes
        else:  # an address from before the recording may carry a stale size
            num_bytes = -live_bytes.pop(address, 0)
        if start_ns <= time_ns <= end_ns:
            live += num_bytes
            peak = max(peak, live)
    return peak


def _changes(recording: profile) -> _Changes:
    """What was recorded; it can be read once."""
    start_ns = end_ns = 0
    events: list[tuple[int, int, int]] = []
    for event in recorded_events(recording):
        kind, fields = event.typed
        if kind.name == "Allocation" and fields.device.type == "cpu":
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == _MARK:
            start_ns, end_ns = event.start_time_ns, event.end_time_ns
    events.sort(key=lambda event: event[0])  # stable: ties stay in recorded order
    return _Changes(start_ns, end_ns, events)


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Addresses of memory on the CPU -> bytes there; keeps none of it alive."""
    return {s.data_ptr(): s.nbytes() for s in storages_of(tensors, "cpu")}


def capture_state(
    model: torch.nn.Module,
    optimizer: AnyOptimizer | None,
    loss: torch.Tensor,
) -> State:
    """Copy to the CPU all that a training step may change, by readable name.

    That is the loss, gradients, parameters, buffers, optimizer state and the random
    number generators of Python, NumPy, the CPU and, once CUDA is in use, of each GPU.
    """
    entries = [("loss", loss)]
    for name, parameter in model.named_parameters():
        entries.append((f"parameter {name}", parameter))
        if parameter.grad is not None:
            entries.append((f"gradient of {name}", parameter.grad))
    entries += [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
    if optimizer is not None:
        entries += _optimizer_entries(model, optimizer)
    states = stream_states()
    entries += [(f"random state of {name}", state) for name, state in states.items()]
    return {
        name if index == 0 else f"{name} (part {index})": part.detach().to(
            "cpu", copy=True
        )
        for name, tensor in entries
        for index, part in enumerate(dense_parts(tensor))
    }


def _state_leaves(optimizer: AnyOptimizer) -> list[tuple[Any, str, Any]]:
    """Leaves of its state, by parameter; MADGRAD has a tensor there by a name."""
    return [
        (parameter, keystr(path), leaf)
        for parameter, state in optimizer.state.items()
        for path, leaf in tree_flatten_with_path(_plain(state))[0]
    ]


def _plain(state: Any) -> Any:
    return dict(state) if isinstance(state, Mapping) else state


def _optimizer_entries(
    model: torch.nn.Module, optimizer: AnyOptimizer
) -> list[tuple[str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    entries = []
    for parameter, path, leaf in _state_leaves(optimizer):
        is_name = isinstance(parameter, str)
        owner = parameter if is_name else names.get(id(parameter), "another parameter")
        if isinstance(leaf, (bool, int, float)):
            leaf = torch.tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            place = f"optimizer state {path}".rstrip()
            entries.append((f"{place} of {owner}", leaf))
    return entries


def differences(
    expected: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    *,
    limit: int = 8,
) -> tuple[str, ...]:
    """Name the first ``limit`` entries of two states that differ in any bit.

    Equal NaNs are equal, 0.0 and -0.0 are not.
    """
    messages: list[str] = []
    for name in dict.fromkeys([*expected, *actual]):
        if name not in actual:
            messages.append(f"{name}: only in the expected state")
        elif name not in expected:
            messages.append(f"{name}: only in the actual state")
        elif difference := _difference(expected[name], actual[name]):
            messages.append(f"{name}: {difference}")
        if len(messages) == limit:
            break
    return tuple(messages)


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (expected, actual)]
        return f"{kinds[1]} instead of {kinds[0]}"
    if torch.equal(_bits(expected), _bits(actual)):
        return None
    unequal = (_bits(expected) != _bits(actual)).any(dim=-1)
    text = f"{int(unequal.sum())} of {unequal.numel()} elements differ"
    if expected.is_floating_point():
        error = (expected.double() - actual.double()).abs().max().item()
        text += f", by at most {error:.3g}"
    return text


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, one row an element."""
    flat = tensor.detach().contiguous().reshape(-1)
    if tensor.is_conj() or tensor.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    # Not by `reshape`: a dimension of one element may have any stride.
    return flat.as_strided((flat.numel(), 1), (1, 1)).view(torch.uint8)
