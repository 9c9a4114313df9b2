"""Graphs with and without offload under the same budgets.

    python -m benchmarks.graph_offload [--models gpt2,unet] [--output DIR] [--work DIR]

Budgets are caps on the peak of forward and backward, gradients included: three below
the floor without offload where it lowers that, the floor itself, and four from there to
the peak of the plain graph. *Without* recomputes only; *with* may offload too, at the
nominal rates of a disk (1 GB/s out, 2 GB/s back, 0.05 ms for each copy); ms are all
that a plan adds to the step, *exposed* of them what it waits for copies. *Everything*
is the rule that moves every value that backward reads and recomputes nothing, with
copies as far apart as the budget allows; a dash where its peak is above the budget.
Plans with offload are run with copies as fast as can be and held to 0.1 GB/s. Exits
with 1 if a peak is above its budget or not the predicted one, if results differ in a
bit, if far memory holds anything afterwards, if a plan with offload is dearer than the
one without or than the rule, or if a larger budget is dearer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from autosac.graphs.joint_graphs import joint_graph
from autosac.graphs.plans import GraphPlan, GraphPlanner
from autosac.solvers.graph.moving import Choice, plan_moves
from autosac.verification.measuring import measure_peak
from benchmarks.environment import MIB, cpu_s, environment
from benchmarks.graph_plans import MODELS, make_model, results_of

_RATES = (None, 1e8)  # bytes per second
_ABOVE, _BELOW = 5, 3  # budgets from the floor without offload up, and below it
_TOLERANCE_MS = 1e-9


@dataclass(frozen=True, kw_only=True)
class Row:
    """One budget of one model.

    Attributes:
        budget_bytes: The cap.
        without_ms: Time of the plan without offload; None below its floor.
        rule_ms: Of moving everything; None where that does not fit.
        with_ms: Of the plan with offload,
        exposed_ms: of that, what it waits for copies,
        bound_ms: and what is proven.
        moved_bytes: Bytes that it moves.
        predicted_bytes: Its peak,
        measured_bytes: real ones, one for each rate.
        plain_s: CPU seconds of planning without offload,
        solve_s: and of what offload takes more.
        is_kept: Bits are equal, and nothing is left in far memory.
    """

    budget_bytes: int
    without_ms: float | None
    rule_ms: float | None
    with_ms: float
    exposed_ms: float
    bound_ms: float
    moved_bytes: int
    predicted_bytes: int
    measured_bytes: tuple[int, ...]
    plain_s: float
    solve_s: float
    is_kept: bool

    @property
    def holds(self) -> bool:
        """The promises hold."""
        peaks = {self.predicted_bytes, *self.measured_bytes}
        others = [ms for ms in (self.without_ms, self.rule_ms) if ms is not None]
        never_dearer = all(self.with_ms <= ms + _TOLERANCE_MS for ms in others)
        fits = self.predicted_bytes <= self.budget_bytes
        return len(peaks) == 1 and fits and never_dearer and self.is_kept


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit code tells whether every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph_offload")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--work", type=Path, help="keeps what is done, to go on")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = ["# Graphs with and without offload\n"]
    lines.append(", ".join(f"{name} {value}" for name, value in environment().items()))
    lines.append(__doc__.partition("\n\n")[2].partition("\n\n")[2].rstrip() + "\n")
    kept = True
    for name in options.models.split(","):
        torch.compiler.reset()
        heading, rows = _kept_or_run(name, options.work)
        table = [heading, *_table(rows)]
        print("\n".join(table), flush=True)
        lines += table
        times = [row.with_ms for row in rows]
        kept = kept and all(row.holds for row in rows)
        kept = kept and times == sorted(times, reverse=True)
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / "graph_offload.md"
        path.write_text("\n".join(lines) + "\n")
    return 0 if kept else 1


def _kept_or_run(name: str, folder: Path | None) -> tuple[str, list[Row]]:
    """What an earlier call left in the working folder of a model, or `run`."""
    file = folder / f"{name}.json" if folder else None
    if file is not None and file.exists():
        found = json.loads(file.read_text())
        return found["heading"], [
            Row(**{**row, "measured_bytes": tuple(row["measured_bytes"])})
            for row in found["rows"]
        ]
    heading, rows = run(name)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            json.dumps({"heading": heading, "rows": [asdict(row) for row in rows]})
        )
    return heading, rows


def run(name: str) -> tuple[str, list[Row]]:
    """All budgets of a model, smaller ones first: their plans hold for larger ones."""
    work = MODELS[name]()
    graph = joint_graph(make_model(work), work.make_inputs(), loss_fn=work.loss_fn)
    planner = GraphPlanner(graph)
    floor = planner.floor("milp")
    low, high = planner.floor("milp", offload=True), planner.baseline_peak_bytes
    below = [low + (floor - low) * k // _BELOW for k in range(_BELOW) if low < floor]
    above = [floor + (high - floor) * k // _ABOVE for k in range(_ABOVE)]
    step_ms = sum(memory.runtime_ms for memory in graph.memory.nodes.values())
    heading = (
        f"\n## {work.name}\n\nPeak {high / MIB:.2f} MiB, step {step_ms:.1f} ms. Floors:"
        f" {floor / MIB:.2f} MiB without offload, {low / MIB:.2f} MiB with it.\n"
    )
    return heading, [_row(planner, budget, floor) for budget in [*below, *above]]


def _row(planner: GraphPlanner, budget: int, floor: int) -> Row:
    started = cpu_s()
    plain = planner.plan(budget) if budget >= floor else None
    plain_s = cpu_s() - started
    plan = planner.plan(budget, offload=True)
    solve_s = cpu_s() - started - 2 * plain_s
    expected = results_of(planner.joint)
    pairs = zip(expected, results_of(plan.joint), strict=True)
    is_identical = all(a is b is None or torch.equal(a, b) for a, b in pairs)
    peaks = tuple(_measured(plan))
    memory = plan.far_memory
    assert plan.bound_ms is not None
    return Row(
        budget_bytes=budget,
        without_ms=None if plain is None else plain.recompute_ms,
        rule_ms=_rule_ms(planner, budget),
        with_ms=plan.recompute_ms,
        exposed_ms=plan.exposed_ms,
        bound_ms=plan.bound_ms,
        moved_bytes=plan.offloaded_bytes,
        predicted_bytes=plan.peak_bytes,
        measured_bytes=peaks,
        plain_s=plain_s,
        solve_s=max(0.0, solve_s),
        is_kept=is_identical and (memory is None or not memory.in_use_bytes),
    )


def _measured(plan: GraphPlan) -> Iterator[int]:
    """Real peaks, one for each rate of copies."""
    for rate in _RATES:
        if plan.far_memory is not None:
            plan.far_memory.bytes_per_s = rate
        _, peak = measure_peak(
            plan.joint.run,
            device="cpu",
            persistent_bytes=plan.joint.persistent_bytes,
            warm_up=plan.joint.run,
        )
        yield peak


def _rule_ms(planner: GraphPlanner, budget: int) -> float | None:
    """What the step waits if every value that backward reads is moved."""
    moves = planner.move_problem()
    choice = Choice(moves.graph.kept_plainly, moves.movable)
    plan = plan_moves(moves, choice, budget)
    return None if plan is None else plan.cost_ms


def _table(rows: list[Row]) -> Iterator[str]:
    columns = ["budget MiB", "without ms", "everything ms", "with ms", "exposed ms"]
    columns += ["bound ms", "moved MiB", "real peak MiB", "CPU s without", "more with"]
    columns.append("kept, identical")
    yield f"| {' | '.join(columns)} |"
    yield f"|{' ---: |' * len(columns)}"
    for row in rows:
        fields = [f"{row.budget_bytes / MIB:.2f}", _ms(row.without_ms)]
        fields += [_ms(row.rule_ms), _ms(row.with_ms), _ms(row.exposed_ms)]
        fields += [_ms(row.bound_ms), f"{row.moved_bytes / MIB:.2f}"]
        fields.append(f"{max(row.measured_bytes) / MIB:.2f}")
        fields += [f"{row.plain_s:.1f}", f"{row.solve_s:.1f}"]
        fields.append("yes" if row.holds else "**NO**")
        yield f"| {' | '.join(fields)} |"


def _ms(time_ms: float | None) -> str:
    """Milliseconds; a dash where no plan fits."""
    return "-" if time_ms is None else f"{time_ms:.3f}"


if __name__ == "__main__":
    sys.exit(main())
