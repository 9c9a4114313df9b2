"""Capuchin, the graph's MILP and the modules' MILP under the same budgets.

    python -m benchmarks.graph_plans [--models gpt2,unet] [--budgets 8] [--output DIR]

The greedy and the MILP on graphs share one joint graph of forward, loss and backward;
the modules' MILP is `autosac.plan`. Budgets are caps on the peak of forward and
backward, gradients included, evenly spaced from the peak of the joint graph down to the
highest of the three floors. Every plan is run, and its peak measured. Exits with 1 if a
peak is above its budget, or if gradients of a graph differ in a bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autosac
from autosac.graphs import plans as graph_plans
from autosac.graphs.joint_graphs import JointGraph, joint_graph
from autosac.planning import make_plan
from autosac.verification import verifying
from autosac.verification.measuring import measure_peak
from benchmarks.environment import MIB, environment
from benchmarks.models import Workload, diffusion, language, vision

STRATEGIES = ("capuchin", "milp")

MODELS: dict[str, Callable[[], Workload]] = {
    "gpt2": lambda: language.gpt2(
        layers=4, width=96, heads=3, vocabulary=512, batch=4, length=64
    ),
    "llama": lambda: language.llama(
        layers=4, width=96, heads=3, vocabulary=512, batch=4, length=64
    ),
    "resnet50": lambda: vision.resnet50(batch=16, pixels=64),
    "unet": diffusion.unet,
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to plan, under one budget.

    Attributes:
        planner: Its name.
        budget_bytes: The cap.
        measured_bytes: Peak of the real step; None without a plan.
        predicted_bytes: What the plan says, likewise.
        recompute_ms: Sum of the measured times of all ops that run again.
        bound_ms: Proven by the planner.
        identical: Loss and gradients are bit-identical to the unplanned ones.
    """

    planner: str
    budget_bytes: int
    measured_bytes: int | None = None
    predicted_bytes: int | None = None
    recompute_ms: float | None = None
    bound_ms: float | None = None
    identical: bool = True

    @property
    def is_kept(self) -> bool:
        """The promises hold."""
        measured = self.measured_bytes
        return self.identical and (measured is None or measured <= self.budget_bytes)


def make_model(work: Workload) -> nn.Module:
    """The model as Dynamo can capture it, with fixed weights.

    Transformers log a warning where the kind of loss is not named, and Dynamo breaks
    the graph there.
    """
    torch.manual_seed(0)
    model: Any = work.make_model()
    if hasattr(model, "loss_function"):
        model.loss_type = "ForCausalLM"
    return model


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit code tells whether every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph_plans")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--time-limit", type=float, default=60.0, help="of a MILP, s")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    lines = ["# Graphs under budgets: greedy, MILP, and the modules' MILP\n"]
    where = environment()
    lines.append(", ".join(f"{name} {value}" for name, value in where.items()))
    lines.append(__doc__.partition("\n\n")[2].partition("\n\n")[2].rstrip() + "\n")
    kept = True
    for name in options.models.split(","):
        torch.compiler.reset()
        heading, cells = run(MODELS[name](), options.budgets, options.time_limit)
        lines += [*heading, *_table(cells)]
        print("\n".join([*heading, *_table(cells)]), flush=True)
        kept = kept and all(cell.is_kept for cell in cells)
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / "graph_plans.md"
        path.write_text("\n".join(lines) + "\n")
    return 0 if kept else 1


def run(
    work: Workload, num_budgets: int, time_limit_s: float
) -> tuple[list[str], list[Cell]]:
    """All planners under all budgets of one model."""
    graph = joint_graph(make_model(work), work.make_inputs(), loss_fn=work.loss_fn)
    planner = graph_plans.GraphPlanner(graph)
    expected = _results(graph)
    profile = autosac.profile(
        make_model(work), work.make_inputs(), loss_fn=work.loss_fn
    )
    profile = autosac.calibrate(profile, progress=False)
    floors = {
        "capuchin": _floor_of_greedy(planner),
        "milp": planner.lowest[0],
        "modules": autosac.floor(profile),
    }
    low, high = max(floors.values()), planner.baseline_peak_bytes
    heading = [
        f"\n## {work.name}\n",
        f"Joint graph: {high / MIB:.2f} MiB; step with modules:"
        f" {profile.baseline_peak_bytes / MIB:.2f} MiB. Floors: "
        + ", ".join(f"{name} {size / MIB:.2f} MiB" for name, size in floors.items())
        + ".\n",
    ]
    cells = []
    for k in range(num_budgets):
        budget = high - (high - low) * (k + 1) // num_budgets
        for strategy in STRATEGIES:
            cells.append(_graph_cell(planner, strategy, budget, time_limit_s, expected))
        cells.append(_module_cell(work, profile, budget))
    return heading, cells


def _floor_of_greedy(planner: graph_plans.GraphPlanner) -> int:
    try:
        return planner.plan(1, strategy="capuchin").peak_bytes
    except autosac.InfeasibleBudgetError as error:
        return error.lowest_peak_bytes


def _results(graph: JointGraph) -> list[Any]:
    """Results of a run from fixed inputs and random numbers, which are put back."""
    before = [tensor.detach().clone() for tensor in graph.inputs]
    torch.manual_seed(1)
    results = list(graph.run())
    with torch.no_grad():
        for tensor, value in zip(graph.inputs, before, strict=True):
            tensor.copy_(value)
    return results


def _equal(one: Any, other: Any) -> bool:
    return one is other is None or torch.equal(one, other)


def _graph_cell(
    planner: graph_plans.GraphPlanner,
    strategy: Any,
    budget: int,
    time_limit_s: float,
    expected: list[Any],
) -> Cell:
    plan = planner.plan(budget, strategy=strategy, time_limit_s=time_limit_s)
    pairs = zip(expected, _results(plan.joint), strict=True)
    identical = all(_equal(one, other) for one, other in pairs)
    _, measured = measure_peak(
        plan.joint.run,
        device="cpu",
        persistent_bytes=plan.joint.persistent_bytes,
        warm_up=plan.joint.run,
    )
    return Cell(
        planner=strategy,
        budget_bytes=budget,
        measured_bytes=measured,
        predicted_bytes=plan.peak_bytes,
        recompute_ms=plan.recompute_ms,
        bound_ms=plan.bound_ms,
        identical=identical,
    )


def _module_cell(work: Workload, profile: autosac.Profile, budget: int) -> Cell:
    plan = make_plan.make_plan(profile, budget)
    found = verifying.verify(
        plan,
        lambda: make_model(work),
        work.make_inputs,
        loss_fn=work.loss_fn,
        timing_rounds=1,
        extra_bytes=work.loss_bytes,
    )
    return Cell(
        planner="modules",
        budget_bytes=budget,
        measured_bytes=found.measured_peak_bytes,
        predicted_bytes=plan.peak_bytes,
        recompute_ms=plan.recompute_ms,
        bound_ms=plan.bound_ms,
        identical=not found.differences,
    )


_PLANNERS = (*STRATEGIES, "modules")


def _table(cells: list[Cell]) -> Iterator[str]:
    columns = [f"{name} {what}" for what in ("MiB", "ms") for name in _PLANNERS]
    yield f"| budget MiB | {' | '.join(columns)} | bound ms | gap | kept, identical |"
    yield f"|{' ---: |' * (len(columns) + 4)}"
    for start in range(0, len(cells), len(_PLANNERS)):
        row = cells[start : start + len(_PLANNERS)]
        best = row[_PLANNERS.index("milp")]
        fields = [f"{best.budget_bytes / MIB:.2f}"]
        fields += [f"{(cell.measured_bytes or 0) / MIB:.2f}" for cell in row]
        fields += [f"{cell.recompute_ms or 0.0:.2f}" for cell in row]
        cost_ms, bound_ms = best.recompute_ms or 0.0, best.bound_ms or 0.0
        fields.append(f"{bound_ms:.2f}")
        fields.append(f"{(cost_ms - bound_ms) / cost_ms if cost_ms else 0.0:.1%}")
        fields.append("yes" if all(cell.is_kept for cell in row) else "**NO**")
        yield f"| {' | '.join(fields)} |"


if __name__ == "__main__":
    sys.exit(main())
