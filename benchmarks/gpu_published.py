"""Steps that others published, run on the GPU that is here.

    python -m benchmarks.gpu_published [--steps bert-fp32:64,resnet50:248]

Of each: what PyTorch hands out and reserves, what the driver shows as in use, the time
of a step, that of its kernels by op and shape (PyTorch's profiler), and what each op
allocates and frees inside itself. ``--render``, which needs no GPU, predicts the same
steps as if there were none, and writes the page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autosac.step.training_step import training_step
from benchmarks import gpu_published_page
from benchmarks.gpu_cells import told
from benchmarks.gpu_runs import clean
from benchmarks.gpu_tables import environment
from benchmarks.published.models import SUBJECTS, Subject

Record = dict[str, Any]
STEPS = (
    *("bert-fp32:64", "bert-tf32:64", "bert-fp16:48", "bert-fp16:104", "bert-fp16:1"),
    *("t5-small:8", "whisper-tiny:56", "whisper-tiny:80", "resnet50:248"),
    *("convnext-large-fp32:64", "convnext-large-tf32:64", "convnext-large-fp16:64"),
    *("convnext-large-fp16:256", "regnet-y-128gf:80", "regnet-y-128gf:136"),
    *("focalnet-base:64", "focalnet-base:240", "llama-3.2-1b:8", "llama-3.2-3b:2"),
)
_WARM, _TIMED = 3, 4
_LEAST_MS, _LEAST_BYTES = 0.01, 2**16  # of an op that is noted


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_published")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--render", action="store_true", help="only write the page")
    options = parser.parse_args()
    path = options.output / "gpu_published.json"
    if options.render:
        gpu_published_page.write(json.loads(path.read_text()), options.output)
        return 0
    ends = time.monotonic() + options.limit_s
    record: Record = {"environment": environment("cuda"), "steps": {}}
    options.output.mkdir(parents=True, exist_ok=True)
    for step in options.steps.split(","):
        if time.monotonic() > ends:
            print(f"{step}: no time left", flush=True)
            continue
        record["steps"][step] = figures = _measured(step)
        path.write_text(json.dumps(record) + "\n")
        kept = {k: v for k, v in figures.items() if k not in ("ops", "kernels")}
        print(step, json.dumps(kept), flush=True)
    return 0


def _measured(step: str) -> Record:
    name, _, batch = step.partition(":")
    clean("cuda")
    try:
        return measure(name, int(batch))
    # What one step dies of is a result, and the others must still be tried.
    except Exception as error:
        return {"error": told(error)}


def measure(name: str, batch: int) -> Record:
    """One step: memory, times and workspaces."""
    begun = time.monotonic()
    torch.manual_seed(0)
    subject = SUBJECTS[name](batch, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = subject.tf32
    step = _step_of(subject)
    built_s = time.monotonic() - begun
    for _ in range(_WARM):
        step()
    torch.cuda.synchronize()
    figures: Record = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "samples": subject.samples,
    }
    free, total = torch.cuda.mem_get_info()
    figures["device_bytes"] = total - free
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(_TIMED):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    figures["steady_allocated_bytes"] = torch.cuda.max_memory_allocated()
    figures["step_ms"] = statistics.median(times)
    figures["kernels"] = kernels = _kernels(step)
    figures["kernels_ms"] = round(sum(row[-1] for row in kernels), 4)
    watched = Watched()
    with watched:
        step()
    figures["ops"] = watched.rows()
    figures["seconds"] = [round(built_s, 1), round(time.monotonic() - begun, 1)]
    return figures


def _step_of(subject: Subject) -> Any:
    def real(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            values = torch.randn(tensor.shape, dtype=tensor.dtype, device="cuda")
            return torch.empty_like(tensor, device="cuda").copy_(values)
        # Classes of the labels of sounds are two.
        high = 2 if tensor.ndim == 1 and "input_features" in subject.inputs else 1000
        return torch.randint(0, high, tensor.shape, device="cuda")

    inputs = tree_map_only(torch.Tensor, real, subject.inputs)
    optimizer = subject.options["optimizer"](subject.model.parameters())
    keeps = subject.options.get("keeps_gradients", False)

    def step() -> None:
        training_step(
            subject.model,
            (),
            inputs,
            loss_fn=None,
            optimizer=optimizer,
            autocast=subject.options.get("autocast"),
        )
        if not keeps:
            optimizer.zero_grad(set_to_none=True)

    return step


def _kernels(step: Any) -> list[list[Any]]:
    """Distinct ops: name, shapes, calls and ms of their kernels in all."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[kinds.CPU, kinds.CUDA], record_shapes=True
    ) as profiler:
        step()
        torch.cuda.synchronize()
    rows = []
    for row in profiler.key_averages(group_by_input_shape=True):
        spent_ms = row.self_device_time_total / 1e3
        if spent_ms >= _LEAST_MS and row.device_type == DeviceType.CPU:
            shapes = str(row.input_shapes).replace(" ", "")
            rows.append([row.key, shapes, row.count, round(spent_ms, 4)])
    return rows


class Watched(TorchDispatchMode):
    """Notes what each op allocates: inside itself, and for good."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0, 0])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = func(*args, **kwargs)
        after = torch.cuda.memory_allocated()
        inside = torch.cuda.max_memory_allocated() - max(before, after)
        shapes = ";".join(
            f"{str(t.dtype)[6:]}{list(t.shape)}{'' if t.is_contiguous() else '*'}"
            for t in tree_leaves((args, kwargs))[:12]
            if isinstance(t, torch.Tensor)
        )
        row = self.sizes[str(func), shapes]
        row[0] += 1
        row[1] = max(row[1], inside)
        row[2] = max(row[2], after - before)
        return out

    def rows(self) -> list[list[Any]]:
        """Name, arguments, calls, most bytes inside, most bytes that stay."""
        rows = [[*key, *row] for key, row in self.sizes.items()]
        return [row for row in rows if row[3] >= _LEAST_BYTES]


if __name__ == "__main__":
    sys.exit(main())
