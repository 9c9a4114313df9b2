"""Published steps measured on a GPU, held against predictions without one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import autosac
from autosac.costs.kernels import (
    HALF_TYPES,
    MATMUL,
    POINTWISE,
    REACHED,
    compute_ms,
    computed_flops,
    kernel_of,
    touched_bytes,
)
from autosac.costs.roofline import op_ms
from autosac.devices.specs import DeviceSpec, device_of_product
from autosac.step.op_signatures import Signature, layouts
from autosac.step.tape import Op, Tape
from benchmarks.environment import MIB
from benchmarks.gpu_cells import profile_of
from benchmarks.gpu_models import subject
from benchmarks.published.models import SUBJECTS
from benchmarks.published.predict import figures, precision_of

Record = dict[str, Any]
_LEAST_MS = 0.05  # of all calls of an op together, to tell anything
_CALLED = {  # what the profiler calls an op -> what a dispatched one is called
    "cudnn_convolution": "convolution",
    "clamp_min_": "relu_",
}
# What runs inside others, where the trace has no such op by itself.
_INSIDE = {"mul": "_softmax_backward_data", "fill_": "nll_loss_backward"}


def write(record: Record, folder: Path) -> None:
    """Predict every step that was measured, and write the page."""
    spec = device_of_product(record["environment"]["gpu"])
    memory, reached = [], defaultdict(Sums)
    for step, measured_step in record["steps"].items():
        if "error" in measured_step:
            continue
        name, _, batch = step.partition(":")
        published = SUBJECTS[name](int(batch))
        with precision_of(published):
            traced = autosac.profile(
                published.model, published.inputs, device=spec, **published.options
            )
            _add_kernels(reached, traced.tape, measured_step, as_measured(spec))
        memory.append(_row(step, measured_step, traced, spec.name))
        print(memory[-1], flush=True)
    validation = json.loads((folder / "gpu_validation.json").read_text())
    lines = [*_head(record["environment"]), *memory, "", *_held_out(validation, spec)]
    lines += ["", *_table_of(reached)]
    (folder / "gpu_published.md").write_text("\n".join(lines) + "\n")


def _head(environment: Record) -> Iterator[str]:
    where = ", ".join(
        f"{name} {environment[name]}"
        for name in ("date", "gpu", "driver", "torch", "cuda", "cudnn", "transformers")
    )
    yield "# Published steps, measured here and predicted without a GPU\n"
    yield f"{where}.\n"
    yield (
        "The steps of [published figures](published.md), run for real: what PyTorch"
        " handed out and reserved in the first seven steps, and the median time of four"
        " more. *Predicted* is of the meta device and the data sheet, on a machine"
        " without a GPU; of times, that of the kernels. *Published* are times by"
        " milabench's figures, of torch 2.6.\n"
    )
    yield (
        "| step | allocated MiB | predicted | reserved MiB | predicted | step ms |"
        " kernels ms | predicted | published ms |"
    )
    yield f"| --- |{' ---: |' * 8}"


def _row(step: str, measured_step: Record, traced: autosac.Profile, gpu: str) -> str:
    allocated, reserved = (
        traced.simulator.allocator_peak_bytes({}, cap) / measured_step[f"{cap}_bytes"]
        - 1
        for cap in ("allocated", "reserved")
    )
    published = _published_ms(step, gpu)
    fields = (
        step,
        f"{measured_step['allocated_bytes'] / MIB:,.0f}",
        f"{allocated:+.2%}",
        f"{measured_step['reserved_bytes'] / MIB:,.0f}",
        f"{reserved:+.2%}",
        f"{measured_step['step_ms']:.1f}",
        f"{measured_step['kernels_ms']:.1f}",
        f"{traced.baseline_ms / _kernels_ms(measured_step) - 1:+.0%}",
        "" if published is None else f"{published:.1f}",
    )
    return f"| {' | '.join(fields)} |"


def _kernels_ms(measured_step: Record) -> float:
    """Some profiled steps were slower than others: none takes less than its kernels."""
    return float(min(measured_step["kernels_ms"], measured_step["step_ms"]))


def _published_ms(step: str, gpu: str) -> float | None:
    name, _, batch = step.partition(":")
    for series in figures()["series"]:
        if (series["model"], series["gpu"]) != (name, gpu):
            continue
        for point in series["points"]:
            if point["batch"] == int(batch) and "samples_per_s" in point:
                return 1e3 * int(batch) / float(point["samples_per_s"])
    return None


def _held_out(validation: Record, spec: DeviceSpec) -> Iterator[str]:
    """Steps that no share is from, of models that were calibrated on the same GPU."""
    yield "## Steps that nothing was fitted to\n"
    yield (
        "Plain steps of [`gpu_validation`](gpu_validation.md): the sum of their"
        " kernels, timed there one by one, and what is predicted of it on a machine"
        " without a GPU.\n"
    )
    yield "| model | kernels ms | predicted ms | error |"
    yield "| --- | ---: | ---: | ---: |"
    for name, measured in validation["models"].items():
        if "baseline_ms" in measured:
            traced = profile_of(subject(name, tiny=False), "meta", spec)
            ms, predicted = measured["baseline_ms"], traced.baseline_ms
            yield f"| {name} | {ms:.1f} | {predicted:.1f} | {predicted / ms - 1:+.0%} |"


# --- kinds of kernels ----------------------------------------------------------------


@dataclass
class Sums:
    """Of all calls of one kind of kernel.

    Attributes:
        measured_ms: What they took,
        predicted_ms: and were predicted to take.
        by_flops_ms: Measured, of those that FLOPs decide the time of,
        flops_ms: and how long these took at the data sheet's rate.
        by_bytes_ms: Likewise of those that bytes decide,
        bytes_ms: likewise.
    """

    measured_ms: float = 0.0
    predicted_ms: float = 0.0
    by_flops_ms: float = 0.0
    flops_ms: float = 0.0
    by_bytes_ms: float = 0.0
    bytes_ms: float = 0.0


def as_measured(spec: DeviceSpec) -> DeviceSpec:
    """A device whose kernels reach what `kernels.REACHED` says, of every kind."""
    matmul = REACHED[MATMUL]
    half = dict.fromkeys(HALF_TYPES, matmul.half)
    shares = {**half, "tfloat32": matmul.tfloat32, "float32": matmul.float32}
    return replace(
        spec,
        matmul_efficiency=shares,
        bandwidth_efficiency=REACHED[POINTWISE].memory,
    )


def _add_kernels(
    reached: dict[tuple[str, str], Sums],
    tape: Tape,
    measured_step: Record,
    device: DeviceSpec,
) -> None:
    """Add what the kernels of a step took, in proportion where several look alike."""
    share = _kernels_ms(measured_step) / measured_step["kernels_ms"]
    measured: dict[tuple[str, str], float] = defaultdict(float)
    for name, shapes, _, ms in measured_step["kernels"]:
        key = _key(name.removeprefix("aten::"), json.loads(shapes))
        measured[key] += share * ms
    alike = defaultdict(list)
    for op in tape.ops:
        if not op.is_view and isinstance(op.signature, Signature):
            sizes = [list(layout.size) for layout in layouts(op.signature)]
            name = op.name.split(".")[1]
            if name in ("_to_copy", "clone"):
                name, sizes = "copy_", [*sizes[:1] * 2]
            alike[_key(name, sizes)].append((op, op_ms(op, device)))
    for (name, shapes), ms in list(measured.items()):
        outer = next(
            (
                key
                for key in alike
                if key[0] == _INSIDE.get(name) and shapes[:-1] in key[1]
            ),
            None,
        )
        if (name, shapes) not in alike and outer is not None:
            measured[outer] += ms
    for key, pairs in alike.items():
        if measured[key] >= _LEAST_MS:
            factor = measured[key] / sum(ms for _, ms in pairs)
            for op, ms in pairs:
                _add(reached, op, factor * ms, ms, device)


def _add(
    reached: dict[tuple[str, str], Sums],
    op: Op,
    measured_ms: float,
    predicted_ms: float,
    device: DeviceSpec,
) -> None:
    kernel = kernel_of(op.name, op.signature, op.dtype)
    touched = touched_bytes(op.name, op.signature, op.moved_bytes)
    rate = "half" if kernel.rate in HALF_TYPES else kernel.rate
    sums = reached[kernel.kind, rate if op.flops else ""]
    sums.measured_ms += measured_ms
    sums.predicted_ms += predicted_ms
    flops = computed_flops(op.name, op.signature, op.flops)
    flops_ms = compute_ms(kernel, flops, device)
    own_ms = measured_ms - device.launch_overhead_ms
    if flops_ms + device.launch_overhead_ms >= predicted_ms:
        sums.by_flops_ms += own_ms
        sums.flops_ms += 1e3 * flops / device.flops_per_s(kernel.rate)
    else:
        sums.by_bytes_ms += own_ms
        sums.bytes_ms += 1e3 * touched / device.bandwidth_bytes_per_s


def _key(name: str, shapes: list[Any]) -> tuple[str, str]:
    """An op's name and its first shapes, as profiler and trace both have them."""
    if "attention" in name:  # whichever of the kernels runs it
        return f"attention{' backward' if 'backward' in name else ''}", ""
    name = _CALLED.get(name, name)
    sizes = [s for s in shapes if s and all(isinstance(size, int) for size in s)]
    return name, str(sizes[: 2 if name == "convolution" else 3])


def _table_of(reached: dict[tuple[str, str], Sums]) -> Iterator[str]:
    yield "## What kernels reach\n"
    yield (
        "Of all steps together, those ops whose shapes the profiler and the trace have"
        " in common: their times, and those predicted by the shares of"
        " `autosac/costs/kernels.py`, which are from here; then the share of the data"
        " sheet's FLOP/s that they reached where FLOPs decide their time by the"
        " prediction, and of its bytes/s where bytes do.\n"
    )
    yield "| kernels | FLOPs in | measured ms | predicted | of FLOP/s | of bytes/s |"
    yield f"| --- | --- |{' ---: |' * 4}"
    for kind, rate in sorted(reached):
        sums = reached[kind, rate]
        compute = _share(sums.flops_ms, sums.by_flops_ms)
        memory = _share(sums.bytes_ms, sums.by_bytes_ms)
        error = f"{sums.predicted_ms / sums.measured_ms - 1:+.0%}"
        yield (
            f"| {kind} | {rate} | {sums.measured_ms:.1f} | {error} | {compute} |"
            f" {memory} |"
        )


def _share(at_peak_ms: float, spent_ms: float) -> str:
    return f"{at_peak_ms / spent_ms:.3f}" if spent_ms >= 1.0 else ""
