"""Real training under eight budgets per model: are the promises of autosac kept?

    python -m benchmarks.budgets [--models gpt,bert] [--budgets 8] [--output DIR]

On a machine that others use as well, `--threads 1` is steadier and often faster.
Budgets are evenly spaced from the least feasible one (the floor) to the peak of the
plain step (the baseline). Exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from autosac.planning import make_plan
from autosac.profiles.profile import Profile, calibrate, profile
from autosac.units import curves
from autosac.verification import verifying
from benchmarks.environment import MIB, environment
from benchmarks.models import Workload, workloads

LARGEST_ERROR = 0.01  # of the predicted peak
LEAST_USE = 0.97  # of the budget above the floor, where the budget binds


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Every block checkpointed, each at the last point of its curve.

    Attributes:
        num_blocks: How many blocks are units.
        peak_bytes: Simulated peak on the same tape.
        recompute_ms: Predicted recompute time.
    """

    num_blocks: int
    peak_bytes: int
    recompute_ms: float


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model and what was found out before any budget.

    Attributes:
        model: Its name.
        floor_bytes: Least feasible budget.
        baseline_bytes: Predicted peak of the plain step.
        rival: Every block checkpointed.
        seconds: Time of each preparation.
    """

    model: str
    floor_bytes: int
    baseline_bytes: int
    rival: Rival
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One budget of one model.

    Attributes:
        budget_bytes: The cap.
        predicted_bytes: Peak that the plan predicts.
        measured_bytes: Peak of a real step with the plan.
        plain_bytes: Peak of a real step without it.
        error: Predicted over measured peak, less one.
        use: Share of the budget above the floor that the real step used; None at
            the floor.
        predicted_use: The same for the predicted peak.
        differences: Entries of the training state that are not bit-identical.
        recompute_ms: Predicted recompute time.
        time_ratio: Measured step time over the plain one's.
        planning_s: Time to make the plan.
        gap: Optimality gap of the plan.
        num_units: AC units of the plan.
    """

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    plain_bytes: int
    error: float
    use: float | None
    predicted_use: float | None
    differences: tuple[str, ...]
    recompute_ms: float
    time_ratio: float
    planning_s: float
    gap: float
    num_units: int


def within_budget(subject: Subject, cell: Cell) -> bool | None:
    """The real peak keeps the budget."""
    return cell.measured_bytes <= cell.budget_bytes


def exactly_predicted(subject: Subject, cell: Cell) -> bool | None:
    """The predicted peak is near the real one."""
    return abs(cell.error) <= LARGEST_ERROR


def identical(subject: Subject, cell: Cell) -> bool | None:
    """Loss, gradients, parameters, buffers and random states agree in every bit."""
    return not cell.differences


def used(subject: Subject, cell: Cell) -> bool | None:
    """A budget that binds is used; None where it does not bind."""
    if cell.use is None or cell.budget_bytes >= subject.baseline_bytes:
        return None
    return cell.use >= LEAST_USE


def beats_rival(subject: Subject, cell: Cell) -> bool | None:
    """No slower than the rival; None where the rival's peak is larger."""
    if cell.predicted_bytes < subject.rival.peak_bytes:
        return None
    return cell.recompute_ms <= subject.rival.recompute_ms


def at_the_floor(subject: Subject, cell: Cell) -> bool | None:
    """The floor is not above what the rival reaches; None above the floor."""
    if cell.budget_bytes > subject.floor_bytes:
        return None
    return subject.floor_bytes <= subject.rival.peak_bytes


PROMISES: Mapping[str, Callable[[Subject, Cell], bool | None]] = {
    "real peak within budget": within_budget,
    f"prediction within {LARGEST_ERROR:.0%}": exactly_predicted,
    "bit-identical": identical,
    f"at least {LEAST_USE:.0%} of a binding budget used": used,
    "no slower than every block checkpointed": beats_rival,
    "floor not above every block checkpointed": at_the_floor,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit code tells whether every promise was kept."""
    options = _options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    known = workloads()
    results: list[tuple[Subject, list[Cell]]] = []
    for name in options.models.split(","):
        subject, cells = run(known[name], options.budgets, options.rounds)
        results.append((subject, cells))
        _write(results, options.output)
    print("\n".join(_summary(results)))
    return 0 if all(_kept(*item) for item in results) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets")
    parser.add_argument("--models", default=",".join(workloads()))
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of a kind")
    parser.add_argument("--threads", type=int, help="of PyTorch; default: its own")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    unknown = set(options.models.split(",")) - set(workloads())
    if unknown:
        parser.error(f"`--models`: unknown {sorted(unknown)}, of {list(workloads())}")
    if options.budgets < 2:
        parser.error("`--budgets` must be at least 2: the floor and the baseline")
    return options


def run(work: Workload, num_budgets: int, rounds: int) -> tuple[Subject, list[Cell]]:
    """Profile a model once; plan and really train it under every budget."""
    traced, subject = prepare(work)
    print("\n".join(_heading(subject)), flush=True)
    low, high = subject.floor_bytes, subject.baseline_bytes
    cells = []
    for k in range(num_budgets):
        budget = low + (high - low) * k // (num_budgets - 1)
        cells.append(measure(work, traced, subject, budget, rounds))
        print(_row(subject, cells[-1]), flush=True)
    return subject, cells


def prepare(work: Workload) -> tuple[Profile, Subject]:
    """All that is done once per model."""
    seconds: dict[str, float] = {}
    torch.manual_seed(0)
    model = work.make_model()
    with _timed(seconds, "profile"):
        traced = profile(
            model,
            work.make_inputs(),
            loss_fn=work.loss_fn,
            optimizer=work.make_optimizer(model),
        )
    with _timed(seconds, "calibrate"):
        traced = calibrate(traced)
    with _timed(seconds, "curves"):
        _ = traced.formulation
    with _timed(seconds, "floor"):
        floor_bytes = make_plan.floor(traced)
    return traced, Subject(
        model=work.name,
        floor_bytes=floor_bytes,
        baseline_bytes=traced.baseline_peak_bytes,
        rival=every_block(traced, work.blocks),
        seconds=seconds,
    )


class _timed:
    """Notes how long a block of code took."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = time.perf_counter() - self.started


def every_block(traced: Profile, blocks: tuple[str, ...]) -> Rival:
    """Simulate the plan that people write by hand, at its best.

    Its blocks skip the ops that nobody needs again, which
    `torch.utils.checkpoint` would rerun.
    """
    formulation = traced.formulation
    chosen = {
        unit: curve.policies[-1]
        for unit, curve in zip(formulation.units, formulation.curves, strict=True)
        if unit.fqn in blocks
    }
    return Rival(
        num_blocks=len(chosen),
        peak_bytes=traced.simulator.peak_bytes(chosen),
        recompute_ms=sum(curves.recompute_ms(*item) for item in chosen.items()),
    )


def measure(
    work: Workload,
    traced: Profile,
    subject: Subject,
    budget_bytes: int,
    rounds: int,
) -> Cell:
    """Plan one budget and train under it."""
    started = time.perf_counter()
    plan = make_plan.make_plan(traced, budget_bytes)
    planning_s = time.perf_counter() - started
    gc.collect()
    verification = verifying.verify(
        plan,
        work.make_model,
        work.make_inputs,
        make_optimizer=work.make_optimizer,
        loss_fn=work.loss_fn,
        timing_rounds=rounds,
        extra_bytes=work.loss_bytes,
    )
    room = budget_bytes - subject.floor_bytes

    def use(peak_bytes: int) -> float | None:
        return (peak_bytes - subject.floor_bytes) / room if room else None

    return Cell(
        budget_bytes=budget_bytes,
        predicted_bytes=plan.peak_bytes,
        measured_bytes=verification.measured_peak_bytes,
        plain_bytes=verification.baseline_peak_bytes,
        error=verification.prediction_error,
        use=use(verification.measured_peak_bytes),
        predicted_use=use(plan.peak_bytes),
        differences=verification.differences,
        recompute_ms=plan.recompute_ms,
        time_ratio=verification.step_ms / verification.baseline_step_ms,
        planning_s=planning_s,
        gap=plan.optimality_gap,
        num_units=len(plan.policy),
    )


# --- tables -------------------------------------------------------------------

_COLUMNS = (
    "budget MiB",
    "predicted MiB",
    "measured MiB",
    "error",
    "within",
    "use",
    "identical",
    "recompute ms",
    "step time",
    "planning s",
    "gap",
    "units",
    "vs every block",
)


def _heading(subject: Subject) -> Iterator[str]:
    rival = subject.rival
    spent = ", ".join(f"{name} {s:.1f} s" for name, s in subject.seconds.items())
    yield f"\n## {subject.model}\n"
    yield (
        f"Floor {subject.floor_bytes / MIB:.2f} MiB, baseline"
        f" {subject.baseline_bytes / MIB:.2f} MiB ({spent}). Every block"
        f" ({rival.num_blocks}) checkpointed: {rival.peak_bytes / MIB:.2f} MiB,"
        f" {rival.recompute_ms:.1f} ms of recomputation.\n"
    )
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{' ---: |' * len(_COLUMNS)}"


def _row(subject: Subject, cell: Cell) -> str:
    fields = (
        f"{cell.budget_bytes / MIB:.2f}",
        f"{cell.predicted_bytes / MIB:.2f}",
        f"{cell.measured_bytes / MIB:.2f}",
        f"{cell.error:+.3%}",
        _word(within_budget(subject, cell), "yes", "**NO**"),
        "" if cell.use is None else f"{cell.use:.2%}",
        _word(identical(subject, cell), "yes", "**NO**"),
        f"{cell.recompute_ms:.1f}",
        f"x{cell.time_ratio:.2f}",
        f"{cell.planning_s:.1f}",
        f"{cell.gap:.1%}",
        f"{cell.num_units}",
        _word(beats_rival(subject, cell), "no slower", "**SLOWER**"),
    )
    return f"| {' | '.join(fields)} |"


def _word(verdict: bool | None, yes: str, no: str) -> str:
    return "" if verdict is None else yes if verdict else no


def _kept(subject: Subject, cells: list[Cell]) -> bool:
    verdicts = (check(subject, c) for check in PROMISES.values() for c in cells)
    return all(verdict is not False for verdict in verdicts)


def _summary(results: list[tuple[Subject, list[Cell]]]) -> Iterator[str]:
    yield "\n## Promises\n"
    yield f"| promise | {' | '.join(subject.model for subject, _ in results)} |"
    yield f"| --- |{' --- |' * len(results)}"
    for promise, check in PROMISES.items():
        verdicts = [[check(s, cell) for cell in cells] for s, cells in results]
        words = " | ".join(_verdict(each) for each in verdicts)
        yield f"| {promise} | {words} |"


def _verdict(verdicts: list[bool | None]) -> str:
    checked = [verdict for verdict in verdicts if verdict is not None]
    if not checked:
        return "no such cell"
    word = "PASS" if all(checked) else "**FAIL**"
    return f"{word} {sum(checked)}/{len(checked)}"


# --- files --------------------------------------------------------------------


def _write(results: list[tuple[Subject, list[Cell]]], folder: Path) -> None:
    where = environment()
    lines = ["# Real training under budgets\n"]
    lines.append(", ".join(f"{name} {value}" for name, value in where.items()))
    for subject, cells in results:
        lines += [*_heading(subject), *(_row(subject, cell) for cell in cells)]
    lines += _summary(results)
    record = {
        "environment": where,
        "models": [
            {**asdict(subject), "cells": [asdict(cell) for cell in cells]}
            for subject, cells in results
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "budgets.md").write_text("\n".join(lines) + "\n")
    (folder / "budgets.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
