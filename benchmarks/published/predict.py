"""What autosac predicts for one series of published figures."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import autosac
from autosac.devices.specs import DeviceSpec, device_spec
from benchmarks.environment import package_version
from benchmarks.published.models import SUBJECTS, Subject

Record = dict[str, Any]
FIGURES = Path(__file__).with_name("figures.json")


def figures() -> Record:
    """The published figures."""
    record: Record = json.loads(FIGURES.read_text())
    return record


def key(series: Record) -> str:
    """Name of a series, which is that of its file as well."""
    return f"{series['model']}-{series['gpu']}"


def predict(series: Record, path: Path) -> None:
    """Write the series with what is predicted for each of its points."""
    torch.set_num_threads(1)
    points = [
        _predicted(SUBJECTS[series["model"]](point["batch"]), series["gpu"], point)
        for point in series["points"]
    ]
    of_models = package_version("transformers")
    record = {**series, "transformers": of_models, "points": points}
    path.write_text(json.dumps(record) + "\n")


def _predicted(subject: Subject, gpu: str, point: Record) -> Record:
    traced = autosac.profile(
        subject.model,
        subject.inputs,
        device=in_use(device_spec(gpu), subject),
        **subject.options,
    )
    allocated = traced.simulator.allocator_peak_bytes({}, "allocated")
    reserved = traced.simulator.allocator_peak_bytes({}, "reserved")
    kinds = Counter(
        (op.name, op.dtype, op.flops, op.moved_bytes)
        for op in traced.tape.ops
        if not op.is_view
    )
    return {
        **point,
        "predicted_allocated_bytes": allocated,
        "predicted_reserved_bytes": reserved,
        "samples": subject.samples,
        "ops": [[*kind, count] for kind, count in kinds.items()],
    }


def in_use(spec: DeviceSpec, subject: Subject) -> DeviceSpec:
    """The device as the script sets it up."""
    if not subject.tf32 or "tfloat32" not in spec.peak_flops:
        return spec
    rates = {**spec.peak_flops, "float32": spec.peak_flops["tfloat32"]}
    shares = {**spec.matmul_efficiency}
    shares["float32"] = shares.get("tfloat32", 1.0)
    return dataclasses.replace(spec, peak_flops=rates, matmul_efficiency=shares)
