"""What autosac predicts for one series of published figures."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import autosac
from autosac.costs.kernels import computed_flops, kernel_of, touched_bytes
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
    with precision_of(subject):
        traced = autosac.profile(
            subject.model, subject.inputs, device=gpu, **subject.options
        )
        kinds = Counter(
            (
                *kernel_of(op.name, op.signature, op.dtype),
                computed_flops(op.name, op.signature, op.flops),
                touched_bytes(op.name, op.signature, op.moved_bytes),
            )
            for op in traced.tape.ops
            if not op.is_view
        )
    allocated = traced.simulator.allocator_peak_bytes({}, "allocated")
    reserved = traced.simulator.allocator_peak_bytes({}, "reserved")
    return {
        **point,
        "predicted_allocated_bytes": allocated,
        "predicted_reserved_bytes": reserved,
        "samples": subject.samples,
        "ops": [[*kind, count] for kind, count in kinds.items()],
    }


@contextlib.contextmanager
def precision_of(subject: Subject) -> Iterator[None]:
    """PyTorch's precision of float32 matmuls set as the script sets it."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if subject.tf32 else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
