"""How long parallel planning takes, on an idle machine and beside two busy loops.

    python -m benchmarks.parallel_speed [--cases 8B/8,405B/512] [--again] [--output DIR]

Each plan is made in a process of its own that knows nothing from before: Llama 3 on the
meta device, the trace included, the model's construction and imports not. CPU seconds
are the process's own, so that other processes count only by what they take of caches
and shared cores. Cases that are in the file already are not run again without
`--again`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import autosac
from autosac.quantities import format_ms
from benchmarks.environment import cpu_s, environment
from benchmarks.parallel_plans import LENGTH, SIZES, llama

CASES = ("8B/8", "70B/64", "405B/512", "405B/2048")
BUDGET = "75GiB"
NUM_LOOPS = 2
SETTINGS = ("idle", "busy")

Record = dict[str, Any]


def main() -> None:
    """Plan all that is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--job", help="plan this case here, and print its record")
    options = parser.parse_args()
    if options.job:
        print(json.dumps(planned(options.job)))
        return
    path = options.output / "parallel_speed.json"
    records: dict[str, Record] = {}
    if path.exists():
        records = json.loads(path.read_text())
    for case in options.cases.split(","):
        for setting in SETTINGS:
            key = f"{case} {setting}"
            if key in records and not options.again:
                continue
            with busy_loops(NUM_LOOPS if setting == "busy" else 0):
                records[key] = _in_own_process(case)
            path.write_text(json.dumps(records, indent=1) + "\n")
            print(key, records[key], flush=True)
    path.with_suffix(".md").write_text("\n".join(page(records)) + "\n")


def planned(case: str) -> Record:
    """Plan a case in this process."""
    name, num_gpus = case.split("/")
    torch.set_num_threads(1)
    model = llama(SIZES[name])
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    began = cpu_s()
    plan = autosac.plan_parallel(
        model,
        {"input_ids": tokens, "labels": tokens},
        optimizer=torch.optim.AdamW,
        cluster="hgx-h100",
        num_gpus=int(num_gpus),
        memory_budget=BUDGET,
    )
    took_s = cpu_s() - began
    text = json.dumps(asdict(plan), sort_keys=True)
    return {
        "cpu_s": took_s,
        "plan": hashlib.sha256(text.encode()).hexdigest(),
        "mesh": list(plan.mesh_shape),
        "step_ms": plan.step_ms,
        "peak_bytes": plan.peak_bytes,
        "gap": plan.optimality_gap,
        "environment": environment(),
    }


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Some processes that only count."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _in_own_process(case: str) -> Record:
    command = [sys.executable, "-m", "benchmarks.parallel_speed", "--job", case]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    record: Record = json.loads(done.stdout.splitlines()[-1])
    return record


def page(records: dict[str, Record]) -> list[str]:
    """The table in Markdown."""
    latest = max(records.values(), key=lambda record: record["environment"]["date"])
    lines = [
        "# How long parallel planning takes",
        "",
        "```",
        *(f"{key}: {value}" for key, value in latest["environment"].items()),
        "```",
        "",
        f"Llama 3 in bfloat16, one sequence of {LENGTH} tokens a GPU, AdamW,"
        f" `hgx-h100`, {BUDGET} a rank; `plan_parallel` with default settings in a"
        " process of its own, trace included, imports and the making of the model not."
        f" *busy*: beside {NUM_LOOPS} loops that only count, on top of the load that"
        " the machine has anyway. CPU seconds are the process's own. *same plan*: every"
        " digit of it, bounds and reasons included.",
        "",
        "| model / GPUs | idle, CPU s | busy, CPU s | ratio | same plan | mesh | step |"
        " peak, GiB | gap |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(key.split()[0] for key in records):
        idle, busy = (records.get(f"{case} {setting}") for setting in SETTINGS)
        if idle is not None and busy is not None:
            lines.append(_row(case, idle, busy))
    return lines


def _row(case: str, idle: Record, busy: Record) -> str:
    same = "yes" if idle["plan"] == busy["plan"] else "**no**"
    mesh = " x ".join(map(str, idle["mesh"]))
    return (
        f"| {case} | {idle['cpu_s']:.1f} | {busy['cpu_s']:.1f}"
        f" | {busy['cpu_s'] / idle['cpu_s']:.2f} | {same} | {mesh}"
        f" | {format_ms(idle['step_ms'])} | {idle['peak_bytes'] / 2**30:.1f}"
        f" | {idle['gap']:.2%} |"
    )


if __name__ == "__main__":
    main()
