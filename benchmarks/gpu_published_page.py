"""Published steps measured on a GPU, held against predictions without one."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import autosac
from autosac.devices.specs import DeviceSpec, device_of_product
from autosac.step.op_signatures import Layout, Signature
from autosac.step.tape import Op
from benchmarks.environment import MIB
from benchmarks.published.models import SUBJECTS, Subject
from benchmarks.published.predict import figures, in_use

Record = dict[str, Any]
_LEAST_MS = 0.05  # of all calls of an op together, to tell anything
_CALLED = {  # what the profiler calls an op -> what a dispatched one is called
    "cudnn_convolution": "convolution",
    "_cudnn_attention_forward": "_scaled_dot_product_cudnn_attention",
    "_cudnn_attention_backward": "_scaled_dot_product_cudnn_attention_backward",
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_TENSOR_CORE_MULTIPLE = 8  # sizes in multiples of it are read at once, in half types


def write(record: Record, folder: Path) -> None:
    """Predict every step that was measured, and write the page."""
    spec = device_of_product(record["environment"]["gpu"])
    memory, kinds = [], defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for step, measured_step in record["steps"].items():
        if "error" in measured_step:
            continue
        name, _, batch = step.partition(":")
        subject = SUBJECTS[name](int(batch))
        device = in_use(spec, subject)
        traced = autosac.profile(
            subject.model, subject.inputs, device=device, **subject.options
        )
        memory.append(_row(step, measured_step, traced, spec.name))
        print(memory[-1], flush=True)
        _add_kinds(kinds, traced, measured_step, subject, device)
    lines = [*_head(record["environment"]), *memory, "", *_table_of(kinds, spec)]
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
        " without a GPU. *Published* are times by milabench's figures, of torch 2.6.\n"
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
        f"{traced.baseline_ms / measured_step['step_ms'] - 1:+.0%}",
        "" if published is None else f"{published:.1f}",
    )
    return f"| {' | '.join(fields)} |"


def _published_ms(step: str, gpu: str) -> float | None:
    name, _, batch = step.partition(":")
    for series in figures()["series"]:
        if (series["model"], series["gpu"]) != (name, gpu):
            continue
        for point in series["points"]:
            if point["batch"] == int(batch) and "samples_per_s" in point:
                return 1e3 * int(batch) / float(point["samples_per_s"])
    return None


# --- kinds of kernels ----------------------------------------------------------------


def _add_kinds(
    kinds: dict[str, list[float]],
    traced: autosac.Profile,
    measured_step: Record,
    subject: Subject,
    device: DeviceSpec,
) -> None:
    """Add measured ms, predicted ms, FLOPs over the data sheet's rate, and bytes."""
    measured: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for name, shapes, count, ms in measured_step["kernels"]:
        name = name.removeprefix("aten::")
        sums = measured[_CALLED.get(name, name), _first(json.loads(shapes))]
        sums[0] += count
        sums[1] += ms
    alike: dict[tuple[str, str, str], list[Any]] = {}
    for op, ms in zip(traced.tape.ops, traced.op_ms, strict=True):
        if not op.is_view and isinstance(op.signature, Signature):
            key = (*_key(op), op.dtype)
            sums = alike.setdefault(key, [op, 0, 0.0])
            sums[1] += 1
            sums[2] += ms
    for (name, shapes, dtype), (op, count, predicted_ms) in alike.items():
        calls, spent_ms = measured.get((name, shapes), (0, 0.0))
        if spent_ms < _LEAST_MS:
            continue
        spent_ms *= count / max(calls, count)
        single = "tfloat32" if subject.tf32 else dtype
        kind = _kind(op, single if dtype == "float32" else dtype)
        row = kinds[kind]
        row[0] += spent_ms
        row[1] += predicted_ms
        row[2] += count * op.flops / device.flops_per_s(dtype) * 1e3
        row[3] += count * op.moved_bytes / device.bandwidth_bytes_per_s * 1e3


def _key(op: Op) -> tuple[str, str]:
    name = op.name.split(".")[1]
    sizes = [list(layout.size) for layout in _layouts(op.signature)]
    if name in ("_to_copy", "clone"):
        return "copy_", _first([*sizes[:1] * 2])
    return name, _first(sizes)


def _layouts(signature: Signature) -> Iterator[Layout]:
    pending = list(signature.args)
    while pending:
        value = pending.pop(0)
        if isinstance(value, Layout):
            yield value
        elif isinstance(value, tuple):
            pending = [*value, *pending]


def _first(shapes: Iterable[Any]) -> str:
    """The first three shapes of tensors with dimensions, as the profiler has them."""
    sizes = [s for s in shapes if s and all(isinstance(size, int) for size in s)]
    return str(sizes[:3])


def _kind(op: Op, dtype: str) -> str:
    name = op.name.split(".")[1]
    if name in _PRODUCTS:
        *_, left, right = (x.size for x in _layouts(op.signature) if len(x.size) > 1)
        sizes = (*left[-2:], right[-1])
        is_even = all(size % _TENSOR_CORE_MULTIPLE == 0 for size in sizes)
        return f"matmul, {dtype}{'' if is_even else ', sizes not in eights'}"
    if "convolution" in name:
        back = "backward" if "backward" in name else "forward"
        weight = [x.size for x in _layouts(op.signature) if len(x.size) > 2][-1]
        groups = op.signature.args[-1 if back == "forward" else -2]
        of = "depthwise " if weight[1] == 1 else "grouped " if groups != 1 else ""
        return f"{of}convolution {back}, {dtype}"
    if "attention" in name:
        return f"{name.strip('_')}, {dtype}"
    return re.sub("^_to_copy$|^clone$", "copy_", name)


def _table_of(kinds: dict[str, list[float]], spec: DeviceSpec) -> Iterator[str]:
    yield "## What kernels reach of the data sheet's rates\n"
    yield (
        f"Of all steps together, those ops whose shapes the profiler and the trace have"
        f" in common. *Predicted* is with the shares that `autosac.devices` has for"
        f" {spec.name}.\n"
    )
    yield "| kernels | measured ms | predicted | of its FLOP/s | of its bytes/s |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    ordered = sorted(kinds.items(), key=lambda item: -item[1][0])
    for kind, (spent, predicted, compute, memory) in ordered:
        share = f"{compute / spent:.0%}" if compute else ""
        yield (
            f"| {kind} | {spent:.1f} | {predicted / spent - 1:+.0%} | {share} |"
            f" {memory / spent:.0%} |"
        )
