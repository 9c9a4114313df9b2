"""Predictions against a real GPU: `python -m benchmarks.gpu_validation`.

Models of several GiB, each at three budgets from the floor to the peak of the plain
step. Planned on the GPU (calibrated) and as if there were none (through the lens);
trained three steps without and with the plan. Compared: predicted peak with
``max_memory_allocated`` and ``max_memory_reserved``, predicted with real step time,
every bit of the training state. Last, training under a cap on which the plain step
dies. Results are written after every model; exits with 1 if a promise is broken.

    python -m benchmarks.gpu_validation [--models gpt-bf16,unet] [--time-limit-s 450]

`--device cpu` runs the same code on tiny models without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_cells, gpu_memory_limit, gpu_tables
from benchmarks.gpu_models import NAMES, subject
from benchmarks.gpu_runs import clean

ROOT = Path(__file__).parents[1]
_LEAST_S = 30.0  # no model is begun with less time left
_GRACE_S = 60.0  # what a model in progress may take longer than the limit
_LIMIT_TEST_S = 90.0  # most that each process of the memory limit's test may take
_BROKEN = 3  # exit code of a process whose GPU context is of no more use


def main(arguments: list[str] | None = None) -> int:
    """Validate all models; the exit code tells whether every promise was kept."""
    options = _options(arguments)
    if options.device == "cuda":
        # cuBLAS reads it when first used; deterministic kernels ask for it. It is the
        # size that it has anyway on compute capability 9.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if not torch.cuda.is_available():
            print("No GPU is present: pass `--device cpu` for tiny models.")
            return 2
    else:
        torch.set_num_threads(1)  # models so small are faster then
    if options.in_process:
        return work(options)
    return _supervise(options)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_validation")
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budgets", type=int, default=3)
    parser.add_argument("--time-limit-s", type=float, default=450.0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument(
        "--in-process", action="store_true", help="no process of its own for the models"
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave models alone that have results"
    )
    options = parser.parse_args(arguments)
    options.models = options.models.split(",")
    if options.budgets < 2:
        parser.error("`--budgets` must be at least 2: the floor and the plain peak")
    unknown = set(options.models) - set(NAMES)
    if unknown:
        parser.error(f"`--models`: unknown {sorted(unknown)}, of {list(NAMES)}")
    return options


# --- supervising: a kernel that breaks the process ends one model only ------------


def _supervise(options: argparse.Namespace) -> int:
    """Run the models in another process, and again without one that ends it."""
    ends = time.monotonic() + options.time_limit_s
    record = {} if not options.resume else _read(options.output)
    _write(options.output, record)
    while True:
        left_s = max(0.0, ends - time.monotonic())
        code = _run_worker(options, left_s)
        if code in (0, 1):
            return code
        record = _read(options.output)
        missing = [n for n in options.models if n not in record.get("models", {})]
        if code != _BROKEN and missing:
            entry = {"status": "failed", "error": _said_of(code)}
            record.setdefault("models", {})[missing[0]] = entry
            _write(options.output, record)
            missing = missing[1:]
        if not missing:
            return 1


def _said_of(code: int | None) -> str:
    if code is None:
        return "ended by the time limit"
    return f"its process ended with {code}"


def _run_worker(options: argparse.Namespace, left_s: float) -> int | None:
    """Exit code of a process that runs the models left; None if it ran too long."""
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu_validation"]
    command += ["--in-process", "--resume", "--models", ",".join(options.models)]
    command += ["--budgets", str(options.budgets)]
    command += ["--device", options.device, "--time-limit-s", str(left_s)]
    command += ["--output", str(options.output.resolve())]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=left_s + _GRACE_S).returncode
    except subprocess.TimeoutExpired:
        return None


# --- work -------------------------------------------------------------------------


def work(options: argparse.Namespace) -> int:
    """Validate the models in this process."""
    ends = time.monotonic() + options.time_limit_s
    record = _read(options.output) if options.resume else {}
    record["environment"] = gpu_tables.environment(options.device)
    models = record.setdefault("models", {})
    for name in options.models:
        if name in models:
            continue
        print(f"{name} ...", flush=True)
        models[name], plans = _one(name, options, ends)
        _write(options.output, record)
        print("\n".join(gpu_tables.short(name, models[name])), flush=True)
        if models[name]["status"] == "failed" and not _device_works(options.device):
            return _BROKEN
        if options.device == "cuda" and plans and "memory_limit" not in record:
            record["memory_limit"] = _memory_limit(name, plans, options, ends)
            _write(options.output, record)
            print(record["memory_limit"], flush=True)
    print("\n".join(gpu_tables.summary(record)), flush=True)
    return 0 if gpu_tables.all_kept(record) else 1


def _one(
    name: str, options: argparse.Namespace, ends: float
) -> tuple[dict[str, Any], list[Any]]:
    """Result of one model, whatever happens, and its plans."""
    if ends - time.monotonic() < _LEAST_S:
        return {"status": "skipped", "error": "no time left"}, []
    try:
        found = subject(name, tiny=options.device == "cpu")
    except ModuleNotFoundError as error:
        return {"status": "skipped", "error": str(error)}, []
    shares = tuple(i / (options.budgets - 1) for i in range(options.budgets))
    begin = time.monotonic()
    plans: list[Any] = []
    record: dict[str, Any] = {"status": "ok", "cells": []}
    try:
        with found.context():
            gpu_cells.validate(
                found, options.device, record, plans, shares=shares, ends=ends
            )
    # A benchmark that can be run but rarely: one model's failure, of whatever kind, is
    # a result, and the other models must still be tried.
    except Exception as error:
        record |= {"status": "failed", "error": gpu_cells.told(error)}
    record["total_s"] = round(time.monotonic() - begin, 1)
    return record, plans


def _device_works(device: str) -> bool:
    """Whether the device still answers: some errors break a process for good."""
    try:
        clean(device)
        return float(torch.ones(2, device=device).sum()) == 2.0
    except RuntimeError:
        return False


def _memory_limit(
    name: str, plans: list[Any], options: argparse.Namespace, ends: float
) -> dict[str, Any]:
    clean(options.device)
    timeout_s = min(_LIMIT_TEST_S, max(0.0, ends - time.monotonic()) + _GRACE_S / 2)
    # Half of the way up first: the floor's plan is the next best.
    candidates = [*plans[1:2], *plans[:1]]
    try:
        return gpu_memory_limit.compare(name, candidates, options.output, timeout_s)
    except (OSError, ValueError) as error:
        return {"model": name, "error": "".join(traceback.format_exception_only(error))}


# --- files ------------------------------------------------------------------------


def _read(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "gpu_validation.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def _write(folder: Path, record: dict[str, Any]) -> None:
    """Replace both files in one step each, so that none is ever half written."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"json": json.dumps(record, indent=1) + "\n"}
    if record:
        texts["md"] = "\n".join(gpu_tables.page(record)) + "\n"
    for ending, text in texts.items():
        path = folder / f"gpu_validation.{ending}"
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text)
        os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
