"""Step time of a two-stage pipeline with recomputation that precedes the gradient.

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline [--runs 10] [--micro-batches 1,2,4]

Two processes on one core each, over gloo: `examples/pipeline_two_stages.py`. Without
checkpointing, with `torch.utils.checkpoint` and with preceding recomputation of stage
0, in turns; every step's gradients are compared. One step is profiled in both
processes: the recomputation must lie in the time before the gradient is sent. Exits
with 1 if it does not, if gradients differ, or if a step is not faster for it. Needs two
idle cores and three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from autosac.checkpointing.checkpointed_call import RECOMPUTATION
from autosac.devices.allocator_events import recorded_events
from autosac.verification.measuring import differences
from benchmarks.environment import environment
from examples.pipeline_two_stages import (
    LAST_STAGE,
    MODES,
    RECEIVE,
    SEND,
    Setting,
    Stage,
    launch,
    run_step,
)

RESULTS = Path(__file__).parent / "results"
PLAIN, CHECKPOINT, PRECEDING = MODES
LEAST_HIDDEN = 0.95  # of the last recomputation, before its gradient is sent
_LEGEND = """\
Saved: median over rounds of the step with `torch.utils.checkpoint` less the step with
preceding recomputation. Hidden (from a profile of both processes): time of a
recomputation before stage 1 sends the gradient. What a step can save is the
recomputation of its last micro-batch: when stage 1 has sent that gradient it is done,
and the step ends when stage 0 is. Earlier ones are hidden in both kinds of checkpoint
as long as stage 1 is the busier one."""
Ranges = dict[str, list[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """One recomputation of stage 0 and the gradient that it precedes.

    Attributes:
        recompute_ms: Its time.
        hidden_ms: How much of it lies between the beginning of the wait for the
            gradient and the moment when stage 1 sends that.
        busy_ms: How much of it lies in forward or backward of stage 1.
    """

    recompute_ms: float
    hidden_ms: float
    busy_ms: float


def overlaps(first: Ranges, last: Ranges) -> list[Overlap]:
    """Hold the ranges of both processes' traces, of one clock, against each other."""
    entries = []
    rows = zip(first[RECOMPUTATION], first[RECEIVE], last[SEND], strict=True)
    for recomputed, waiting, sending in rows:
        busy = sum(_common_ms(recomputed, one) for one in last[LAST_STAGE])
        entries.append(
            Overlap(
                recompute_ms=_common_ms(recomputed, recomputed),
                hidden_ms=_common_ms(recomputed, (waiting[0], sending[0])),
                busy_ms=busy,
            )
        )
    return entries


def _common_ms(one: tuple[int, int], other: tuple[int, int]) -> float:
    return max(0, min(one[1], other[1]) - max(one[0], other[0])) / 1e6


def trace(stage: Stage) -> Ranges:
    """Run a step with preceding recomputation; begin and end of ranges, in ns."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read at the first profile
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recording:
        run_step(stage, PRECEDING)
    results: Ranges = {name: [] for name in (RECOMPUTATION, RECEIVE, SEND, LAST_STAGE)}
    for event in recorded_events(recording):
        if event.name in results:
            results[event.name].append((event.start_time_ns, event.end_time_ns))
    return {name: sorted(ranges) for name, ranges in results.items()}


def measure(rank: int, setting: Setting, runs: int, output: str) -> None:
    """Time all modes in turns; stage 0 writes what was found to a file."""
    stage = Stage(rank, setting)
    expected = {n: g.clone() for n, g in run_step(stage, PLAIN).items()}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    unequal: list[str] = []
    for run in range(-1, runs):  # the first round warms up
        for mode in MODES:
            stage.module.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            gradients = run_step(stage, mode)
            dist.barrier()
            if run >= 0:
                times[mode].append(1e3 * (time.perf_counter() - begin))
            unequal += [f"{mode}: {d}" for d in differences(expected, gradients)]
    everything: list[Any] = [None, None]
    dist.all_gather_object(everything, (trace(stage), unequal))
    if rank == 0:
        (first, of_first), (last, of_last) = everything
        figures = {
            "times_ms": times,
            "unequal": of_first + of_last,
            "overlaps": [vars(one) for one in overlaps(first, last)],
        }
        Path(output).write_text(json.dumps(figures))


def row(micro_batches: int, record: dict[str, Any]) -> str:
    """One line of the table."""
    times = record["times_ms"]
    spent = {mode: median(times[mode]) for mode in MODES}
    saved = median(
        a - b for a, b in zip(times[CHECKPOINT], times[PRECEDING], strict=True)
    )
    each = record["overlaps"]
    recompute_ms = median(one["recompute_ms"] for one in each)
    last = each[-1]
    cells = [
        f"{micro_batches}",
        *(f"{spent[m]:.0f} ({min(times[m]):.0f}-{max(times[m]):.0f})" for m in MODES),
        f"{saved:.0f}",
        f"{recompute_ms:.0f}",
        f"{last['hidden_ms']:.0f} of {last['recompute_ms']:.0f}",
        " ".join(f"{one['hidden_ms'] / one['recompute_ms']:.0%}" for one in each),
        "no" if record["unequal"] else "yes",
    ]
    return "| " + " | ".join(cells) + " |"


def broken(record: dict[str, Any]) -> list[str]:
    """What does not hold of one setting."""
    times, last = record["times_ms"], record["overlaps"][-1]
    problems = list(record["unequal"])
    if last["hidden_ms"] < LEAST_HIDDEN * last["recompute_ms"]:
        problems.append("the last recomputation ends after its gradient was sent")
    if not any(one["busy_ms"] for one in record["overlaps"]):
        problems.append("no recomputation overlaps the work of stage 1")
    if median(times[PRECEDING]) >= median(times[CHECKPOINT]):
        problems.append("a step is not faster than with torch.utils.checkpoint")
    return problems


def page(setting: Setting, runs: int, rows: Iterable[str]) -> str:
    """The result as Markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in environment().items())
    return "\n".join(
        [
            "# A pipeline of two stages, with recomputation before the gradient",
            "",
            f"GPT of 2 x {setting.num_layers} blocks of width {setting.width}, micro-"
            f"batches of {setting.batch} x {setting.length} tokens, dropout 0.1; two"
            " processes over gloo, one thread each. Medians (least-most) of"
            f" {runs} steps in turns, in ms. {facts}.",
            "",
            f"| micro-batches | {' | '.join(MODES)} | saved | recompute once | hidden,"
            " last micro-batch | hidden, each | gradients equal |",
            "|" + " --- |" * 9,
            *rows,
            "",
            _LEGEND,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--micro-batches", default="1,2,4")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows, problems = [], []
    for number in map(int, arguments.micro_batches.split(",")):
        setting = Setting(micro_batches=number)
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "found.json")
            launch(measure, setting, arguments.runs, str(output))
            record = json.loads(output.read_text())
        rows.append(row(number, record))
        problems += [f"{number} micro-batches: {p}" for p in broken(record)]
        print(rows[-1], flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = page(Setting(), arguments.runs, rows)
    (arguments.output / "pipeline.md").write_text(text)
    print(text, *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
