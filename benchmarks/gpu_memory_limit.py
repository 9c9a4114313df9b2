"""Does a plan save a step from dying of too little memory? One process, one answer.

    python -m benchmarks.gpu_memory_limit --model gpt-bf16 --cap BYTES [--plan FILE]

PyTorch's allocator may reserve no more than the cap. Trains three steps and prints one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from autosac import Plan
from benchmarks.gpu_models import subject
from benchmarks.gpu_runs import train

ROOT = Path(__file__).parents[1]
_TRAINED, _DIED = "trained", "out of memory"
_ROOM = 1.02  # over what is predicted to be reserved: it is predicted within 2 %
_LEAST_WON = 0.95  # the cap is at most this share of the plain step's peak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_memory_limit")
    parser.add_argument("--model", required=True)
    parser.add_argument("--cap", type=int, required=True)
    parser.add_argument("--plan", type=Path)
    options = parser.parse_args()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap / total_bytes))
    plan = None if options.plan is None else Plan.load(options.plan)
    work = subject(options.model, tiny=False)
    outcome, message = _TRAINED, ""
    try:
        with work.context():
            train(work, "cuda", plan, timed_steps=0)
    except torch.OutOfMemoryError as error:
        outcome, message = _DIED, str(error).partition("\n")[0]
    statistics = torch.cuda.memory_stats()
    found = {
        "outcome": outcome,
        "message": message,
        "reserved_bytes": statistics["reserved_bytes.all.peak"],
        "allocated_bytes": statistics["allocated_bytes.all.peak"],
        "retries": statistics["num_alloc_retries"],
    }
    print(json.dumps(found))
    return 0


def compare(
    name: str, plans: list[Plan], folder: Path, timeout_s: float
) -> dict[str, Any]:
    """Train under a cap with a plan and without, each in a process of its own.

    Args:
        name: Of the model.
        plans: Of this model; the first whose reserved memory leaves enough to win is
            taken.
        folder: Where the plan is written.
        timeout_s: After which a process is ended.
    """
    fitting = [
        (plan, cap)
        for plan in plans
        if plan.reserved_bytes is not None
        and (cap := int(_ROOM * plan.reserved_bytes))
        <= _LEAST_WON * plan.baseline_peak_bytes
    ]
    if not fitting:
        return {"model": name, "error": "no plan reserves less than the plain step"}
    plan, cap = fitting[0]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu_plan_{name}.json"
    plan.save(path)
    planned = _start(name, cap, ["--plan", str(path.resolve())])
    plain = _start(name, cap, [])
    outcomes = [_outcome(process, timeout_s) for process in (planned, plain)]
    path.unlink()
    return {
        "model": name,
        "cap_bytes": cap,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_reserved_bytes": plan.reserved_bytes,
        "predicted_plain_bytes": plan.baseline_peak_bytes,
        "planned": outcomes[0],
        "plain": outcomes[1],
        "passed": outcomes[0].get("outcome") == _TRAINED
        and outcomes[1].get("outcome") == _DIED,
    }


def _start(name: str, cap: int, more: list[str]) -> subprocess.Popen[str]:
    command = ["-m", "benchmarks.gpu_memory_limit", "--model", name, "--cap", str(cap)]
    return subprocess.Popen(
        [sys.executable, *command, *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _outcome(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"outcome": f"no answer in {timeout_s:.0f} s"}
    lines = out.strip().splitlines()
    if process.returncode or not lines:
        said = " | ".join(errors.strip().splitlines()[-3:])
        return {"outcome": f"ended with {process.returncode}: {said}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
