"""Does a real step take the memory that its trace shows?

A fake kernel may be wrong about its result, and PyTorch goes backward through some ops
by other formulas while a step is traced (`areAnyTensorSubclassLike` in
torch/csrc/autograd/FunctionsManual.cpp). So one plain step runs for real, and function
by function of its backward pass the allocator's own events are held against the tape.
What a function takes besides is counted as a workspace from then on. What differs in
another way is said.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from autosac import _compat_autograd, _compat_dispatch
from autosac._compat_profiler import a_profiler_is_active
from autosac.devices.allocator_events import cpu_events, recorded_events
from autosac.errors import AutosacError, TraceError
from autosac.quantities import format_bytes
from autosac.simulation.simulator import Simulator
from autosac.step import copies_on_write
from autosac.step.arguments import warn
from autosac.step.random_streams import seeded_streams
from autosac.step.tape import Op, Tape
from autosac.step.training_step import OptimizerInBackward, micro_step
from autosac.tracing.beside import give_gradients
from autosac.tracing.collecting import no_collections
from autosac.tracing.copying import copied
from autosac.tracing.failures import explanation
from autosac.tracing.step import Step

_MOST_OPS = 50_000  # of a step whose events are read: about a second
_NEAR, _NEAR_BYTES = 0.005, 4096  # of the peak; what is nearer is not said
_MUCH = 0.05  # of the peak: so much less is said wherever it is
_WHY = "PyTorch does something else while a step is traced"
_LEAST_BYTES = 512  # that a workspace is raised by
_FUNCTION = "autograd::engine::evaluate_function: "
_BEGIN, _MARK = "autosac::real_step", "autosac::backward"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Memory of a stretch of a step, in bytes above the step's beginning.

    Attributes:
        begin_bytes: Alive as it begins.
        peak_bytes: Most that is alive in it.
    """

    begin_bytes: int
    peak_bytes: int

    @property
    def added_bytes(self) -> int:
        """What it takes besides."""
        return self.peak_bytes - self.begin_bytes


def as_measured(step: Step, tape: Tape) -> Tape:
    """A tape with what a real step takes besides; warns of what differs otherwise.

    Args:
        step: A step that can be measured, for whose memory there is room.
        tape: Its trace, with workspaces.

    Raises:
        TraceError: The real step fails, though its trace did not.
    """
    try:
        real = measured(step)
    except torch.OutOfMemoryError:  # that a plan may mend
        return tape
    planned = _with_workspaces(replace(tape, earlier=()), real)
    warn_of_difference(planned, real)
    return replace(planned, earlier=tape.earlier)


def _with_workspaces(tape: Tape, real: Mapping[str, Stretch]) -> Tape:
    """What real functions take besides, as workspaces where they take most.

    Equal ops of equal functions get equal workspaces: equal layers stay equal.
    """
    timeline, span = Simulator(tape).baseline, tape.num_ticks + 2
    expected = traced(tape)
    of_function: dict[str, list[Op]] = defaultdict(list)
    for op in tape.ops:
        of_function[op.function].append(op)
    besides: dict[Hashable, int] = {}
    for function, ops in of_function.items():
        excess_bytes = _excess_bytes(expected, real, function)
        if not function or excess_bytes <= _LEAST_BYTES:
            continue
        starts = np.array([op.start for op in ops]) * span
        kind = _kind(ops[int(timeline.most_from(starts).argmax())])
        besides[kind] = max(besides.get(kind, 0), excess_bytes)
    if not besides:
        return tape
    return replace(
        tape,
        ops=tuple(
            replace(op, workspace_bytes=op.workspace_bytes + besides[_kind(op)])
            if op.function and _kind(op) in besides
            else op
            for op in tape.ops
        ),
    )


def _kind(op: Op) -> Hashable:
    """Equal for equal ops of equal functions."""
    return op.function.partition(" ")[0], op.name, op.signature


def _excess_bytes(
    expected: Mapping[str, Stretch], real: Mapping[str, Stretch], name: str
) -> int:
    """What a real stretch takes besides what is expected; negative for less.

    A trace may have made a tensor just before a stretch that a real step makes in it,
    and may keep another amount for good: the smaller difference is the stretch's own.
    """
    if name not in real or name not in expected:
        return 0
    one, other = real[name], expected[name]
    added_bytes = one.added_bytes - other.added_bytes
    return min(added_bytes, one.peak_bytes - other.peak_bytes, key=abs)


def warn_of_difference(tape: Tape, real: Mapping[str, Stretch]) -> None:
    """Warn if a real step takes another peak than its tape.

    And if it takes more in some stretch, which may be the peak under a plan, or much
    less.
    """
    expected = traced(tape)
    peak_bytes = Simulator(tape).baseline.peak_bytes
    near_bytes = max(_NEAR * peak_bytes, _NEAR_BYTES)
    excesses = {name: _excess_bytes(expected, real, name) for name in expected}
    kept = [name for name in expected if name and name in real]
    if kept:  # the first function of backward finds what forward keeps
        difference = real[kept[0]].begin_bytes - expected[kept[0]].begin_bytes
        excesses[""] = max(excesses[""], difference, key=abs)
    most = max(excesses, key=excesses.__getitem__)
    least = min(excesses, key=excesses.__getitem__)
    seen = expected.keys() & real.keys()  # some functions leave no event
    lower_bytes = max(expected[name].peak_bytes for name in seen)
    lower_bytes -= max(real[name].peak_bytes for name in seen)
    if excesses[most] > near_bytes:
        much, place = format_bytes(excesses[most]), _place(tape, real, most)
        warn(
            f"A real step takes {much} more than its trace in {place}: leave that much"
            f" of the budget free, as {_WHY}."
        )
    elif lower_bytes > near_bytes or -excesses[least] > _MUCH * peak_bytes:
        much, place = format_bytes(-excesses[least]), _place(tape, real, least)
        warn(
            f"A real step takes {much} less than its trace in {place}: the peak may be"
            f" lower than predicted, as {_WHY}."
        )


def _place(tape: Tape, real: Mapping[str, Stretch], stretch: str) -> str:
    """Where a stretch is, in words; of forward the first op that no real step runs."""
    if stretch:
        return f"{stretch.partition(' ')[0]}{_module_of(tape, stretch)}"
    unknown = {op.function for op in tape.ops if op.function and op.creates}
    first = min(
        unknown.difference(real), key=lambda name: int(name.split()[-1]), default=""
    )
    if not first:
        return "forward"
    function = first.partition(" ")[0].partition("Backward")[0]
    return f"forward, at {function}{_module_of(tape, first)}"


def _module_of(tape: Tape, function: str) -> str:
    """Where a function of backward belongs to, in words."""
    index = next(op.module for op in tape.ops if op.function == function)
    fqn = tape.modules[index].fqn
    return f" of `{fqn}`" if fqn else ""


def can_be_measured(step: Step, tape: Tape) -> bool:
    """Whether a real step may run, and its events can be read."""
    return (
        step.device_type == "cpu"
        and step.lens is None
        and step.is_present
        and not step.learned.num_updates
        and len(tape.ops) <= _MOST_OPS
        and not a_profiler_is_active()
    )


def traced(tape: Tape) -> dict[str, Stretch]:
    """Memory of a tape's stretches: forward with loss, and functions of backward.

    As if gradients that are dropped between them were never there.
    """
    timeline = Simulator(tape).baseline
    span = tape.num_ticks + 2
    at_start = int(timeline.live_bytes[timeline.keys.searchsorted(0, "right") - 1])
    ends: dict[str, tuple[int, int]] = {"": (0, tape.phases["backward"])}
    for op in tape.ops:
        if op.function:
            first, _ = ends.get(op.function, (op.start, 0))
            ends[op.function] = (first, op.end)
    begun = tape.phases["backward"]
    last = max((op.end for op in tape.ops if op.start < begun), default=0)
    dropped_bytes = sum(
        storage.nbytes
        for storage in tape.storages
        if storage.category == "gradient"
        and storage.born == 0
        and last <= storage.died <= begun
    )
    stretches = {}
    for name, (first, last) in ends.items():
        begin = max(0, timeline.keys.searchsorted(first * span, "right") - 1)
        end = timeline.keys.searchsorted(last * span, "right")
        live = timeline.live_bytes[begin : max(end, begin + 1)]
        live = live + dropped_bytes if name else live
        stretches[name] = Stretch(int(live[0]) - at_start, int(live.max()) - at_start)
    return stretches


def measured(step: Step) -> dict[str, Stretch]:
    """Memory of the stretches of a real step, in copies of all that it may change."""
    modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    stretches = _measured(step, modules)
    if modules:  # in cycles, with their gradients
        gc.collect()
    return stretches


def _measured(
    step: Step, modules: weakref.WeakSet[torch.nn.Module]
) -> dict[str, Stretch]:
    """The same; adds the copies of the modules to a set."""
    in_backward = isinstance(step.optimizer, OptimizerInBackward)
    with (
        seeded_streams(step.learned.seed),
        no_collections(),
        _compat_dispatch.as_a_step_begins(),
        cpu_events() as recording,  # of the copies, too: some are freed in the step
        copied(step if in_backward else replace(step, optimizer=None), None) as copies,
    ):
        model, _, args, kwargs, loss_fn, _ = copies
        modules.update(model.modules())
        copies_on_write.copy_all(step.learned.largest_write)

        def run(mark: Any) -> None:
            micro_step(
                model,
                args,
                kwargs,
                loss_fn=loss_fn,
                autocast=step.autocast,
                accumulate=step.accumulate,
                mark=mark,
            )

        # An optimizer in backward makes its state in the first step.
        for _ in range(max(step.learned.earlier, int(in_backward))):
            run(lambda *_: None)
            model.zero_grad(set_to_none=True)
        give_gradients(model, step.learned)
        if step.accumulate > 1 and not step.sharded:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        try:
            _note(_BEGIN)
            first_node = _compat_autograd.next_sequence_nr()
            run(_mark)
        except (AutosacError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the user's code raises
            raise TraceError(
                f"{explanation(error, 'a real step')} Its trace does not fail: that"
                " looks at no data. Without a plan training fails there, too."
            ) from error
    return _stretches(recording, first_node)


def _mark(phase: str, loss: torch.Tensor | None = None) -> None:
    if phase == "backward":
        _note(_MARK)


def _note(name: str) -> None:
    with record_function(name):
        pass


def _stretches(recording: Any, first_node: int) -> dict[str, Stretch]:
    """Stretches of a recorded step, from where it began."""
    times: list[tuple[int, int, int]] = []  # time, address, bytes
    ranges: dict[str, tuple[int, int]] = {}
    begin_ns = 0
    for event in recorded_events(recording):
        kind, fields = event.typed
        if kind.name == "Allocation":
            if fields.device.type == "cpu":
                times.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == _BEGIN:
            begin_ns = event.start_time_ns
        elif event.name == _MARK:
            ranges[""] = (begin_ns, event.start_time_ns)
        elif event.name.startswith(_FUNCTION) and fields.sequence_number >= 0:
            name, node = event.name.removeprefix(_FUNCTION), fields.sequence_number
            if node >= first_node:  # of the step, not of the one before it
                ranges[f"{name} {node - first_node}"] = (
                    event.start_time_ns,
                    event.end_time_ns,
                )
    times.sort(key=lambda event: event[0])  # stable: ties stay in recorded order
    clock = np.array([time for time, _, _ in times], dtype=np.int64)
    live = np.concatenate([[0], np.cumsum(list(_changes(times)), dtype=np.int64)])
    live -= live[clock.searchsorted(begin_ns, "left")]
    stretches = {}
    for name, (start, end) in ranges.items():
        begin = int(clock.searchsorted(start, "left"))
        stop = int(clock.searchsorted(end, "right"))
        of_range = live[begin : stop + 1]
        stretches[name] = Stretch(int(of_range[0]), int(of_range.max()))
    return stretches


def _changes(events: list[tuple[int, int, int]]) -> Iterator[int]:
    """What each event adds; frees of what is older than the recording add nothing."""
    sizes: dict[int, int] = {}
    for _, address, num_bytes in events:
        if num_bytes > 0:
            sizes[address] = num_bytes
            yield num_bytes
        else:
            yield -sizes.pop(address, 0)
