"""Graphs and modules under the same budgets: two greedy orders, and two MILPs.

    python -m benchmarks.graph_plans [--models gpt2,unet] [--budgets 8] [--output DIR]
        [--work DIR]

The greedy ones and the MILP on graphs share one joint graph of forward, loss and
backward; the modules' MILP is `autosac.plan`. *Seed* is Capuchin's own, additive order,
*capuchin* ours, *milp* what `GraphPlanner.plan` gives, with the modules' plan as one of
its starts. *Translated* is what this modules' plan recomputes, in the graph and by the
graph's times; a dash where its peak in the graph is above the budget. Budgets are caps
on the peak of forward and backward, gradients included, evenly spaced from the peak of
the joint graph down to the highest of the floors. Every plan but the seed's and the
translated one is run, and its peak measured. Exits with 1 if a peak is above its
budget, or on a graph not the predicted one, if results of a graph differ in a bit, if a
larger budget is dearer on a graph, or if a graph's plan is dearer than what its
modules' plan recomputes there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autosac
from autosac.graphs import plans as graph_plans
from autosac.graphs.joint_graphs import JointGraph, joint_graph
from autosac.planning import make_plan
from autosac.solvers.graph import capuchin, recomputation
from autosac.verification import verifying
from autosac.verification.measuring import measure_peak
from benchmarks.environment import MIB, cpu_s, environment
from benchmarks.models import Workload, diffusion, language, vision

STRATEGIES = ("capuchin", "milp")

MODELS: dict[str, Callable[[], Workload]] = {
    "gpt2": lambda: language.gpt2(
        layers=4, width=96, heads=3, vocabulary=512, batch=4, length=64
    ),
    "llama": lambda: language.llama(
        layers=4, width=96, heads=3, vocabulary=512, batch=4, length=64
    ),
    "gru": language.gru_cells,
    "lstm": language.lstm_cells,
    "resnet18": vision.resnet18,
    "resnet50": lambda: vision.resnet50(batch=16, pixels=64),
    "mobilenet": vision.mobilenet,
    "densenet": vision.densenet,
    "convnext": vision.convnext,
    "swin": vision.swin,
    "unet": diffusion.unet,
    "dit": diffusion.dit,
    "bert": language.bert,
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
        solve_s: CPU seconds of planning.
        must_agree: The peak must be the predicted one to the byte.
        identical: Loss and gradients are bit-identical to the unplanned ones.
    """

    planner: str
    budget_bytes: int
    measured_bytes: int | None = None
    predicted_bytes: int | None = None
    recompute_ms: float | None = None
    bound_ms: float | None = None
    solve_s: float = 0.0
    must_agree: bool = False
    identical: bool = True

    @property
    def is_kept(self) -> bool:
        """The promises hold."""
        measured = self.measured_bytes
        if measured is None:
            return self.identical
        agrees = measured == self.predicted_bytes or not self.must_agree
        return self.identical and agrees and measured <= self.budget_bytes


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
    parser.add_argument("--time-limit", type=float, help="of a MILP, s")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--work", type=Path, help="keeps what is done, to go on")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    lines = ["# Graphs under budgets: greedy orders, MILP, and the modules' MILP\n"]
    where = environment()
    lines.append(", ".join(f"{name} {value}" for name, value in where.items()))
    lines.append(__doc__.partition("\n\n")[2].partition("\n\n")[2].rstrip() + "\n")
    kept = True
    for name in options.models.split(","):
        torch.compiler.reset()
        heading, cells = _kept_or_run(name, options)
        lines += [*heading, *_table(cells)]
        print("\n".join([*heading, *_table(cells)]), flush=True)
        kept = kept and all(cell.is_kept for cell in cells)
        kept = kept and _never_dearer(cells) and _never_dearer_than_modules(cells)
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / "graph_plans.md"
        path.write_text("\n".join(lines) + "\n")
    return 0 if kept else 1


def _kept_or_run(
    name: str, options: argparse.Namespace
) -> tuple[list[str], list[Cell]]:
    """What an earlier call left in the working folder of a model, or `run`."""
    file = options.work / f"{name}-{options.budgets}.json" if options.work else None
    if file is not None and file.exists():
        kept = json.loads(file.read_text())
        return kept["heading"], [Cell(**cell) for cell in kept["cells"]]
    heading, cells = run(MODELS[name](), options.budgets, options.time_limit)
    if file is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        rows = {"heading": heading, "cells": [asdict(cell) for cell in cells]}
        file.write_text(json.dumps(rows))
    return heading, cells


def run(
    work: Workload, num_budgets: int, time_limit_s: float | None
) -> tuple[list[str], list[Cell]]:
    """All planners under all budgets of one model."""
    graph = joint_graph(make_model(work), work.make_inputs(), loss_fn=work.loss_fn)
    planner = graph_plans.GraphPlanner(graph)
    expected = results_of(graph)
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
    cells: list[Cell] = []
    for k in reversed(range(num_budgets)):  # smaller ones first: their plans hold
        budget = high - (high - low) * (k + 1) // num_budgets
        plan = make_plan.make_plan(profile, budget)
        modules = _module_cell(work, plan, budget)
        plans = [
            graph_cell(planner, strategy, budget, time_limit_s, plan, expected)
            for strategy in STRATEGIES
        ]
        translated = translated_cell(planner, plan, budget)
        cells = [_seed_cell(planner, budget), *plans, modules, translated, *cells]
    return heading, cells


def _never_dearer(cells: list[Cell]) -> bool:
    """Whether no larger budget of a graph is dearer; cells come by falling budget."""
    times = [cell.recompute_ms or 0.0 for cell in cells if cell.planner == "milp"]
    return times == sorted(times)


def _never_dearer_than_modules(cells: list[Cell]) -> bool:
    """Whether no graph's plan is dearer than its modules' plan is in the graph."""
    plans = [cell.recompute_ms or 0.0 for cell in cells if cell.planner == "milp"]
    others = [cell.recompute_ms for cell in cells if cell.planner == "translated"]
    pairs = zip(plans, others, strict=True)
    return all(other is None or plan <= other for plan, other in pairs)


def translated_cell(
    planner: graph_plans.GraphPlanner, plan: autosac.Plan, budget: int
) -> Cell:
    """What a plan of modules recomputes, in the graph; nothing if it does not fit."""
    kept = planner.kept_by(plan)
    cost_ms = None
    if recomputation.peak_bytes(planner.problem, kept) <= budget:
        cost_ms = recomputation.recompute_ms(planner.problem, kept)
    return Cell(planner="translated", budget_bytes=budget, recompute_ms=cost_ms)


def _seed_cell(planner: graph_plans.GraphPlanner, budget: int) -> Cell:
    solution = capuchin.solve(
        planner.problem,
        budget_bytes=budget,
        bookkeeping=capuchin.AdditiveBookkeeping,
    )
    return Cell(planner="seed", budget_bytes=budget, recompute_ms=solution.objective_ms)


def _floor_of_greedy(planner: graph_plans.GraphPlanner) -> int:
    try:
        return planner.plan(1, strategy="capuchin").peak_bytes
    except autosac.InfeasibleBudgetError as error:
        return error.lowest_peak_bytes


def results_of(graph: JointGraph) -> list[Any]:
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


def graph_cell(
    planner: graph_plans.GraphPlanner,
    strategy: Any,
    budget: int,
    time_limit_s: float | None,
    modules: autosac.Plan | None,
    expected: list[Any],
) -> Cell:
    """One plan of a graph, run and measured; the others are as of `plan`."""
    started = cpu_s()
    plan = planner.plan(
        budget, strategy=strategy, time_limit_s=time_limit_s, modules=modules
    )
    solve_s = cpu_s() - started
    pairs = zip(expected, results_of(plan.joint), strict=True)
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
        solve_s=solve_s,
        must_agree=True,
        identical=identical,
    )


def _module_cell(work: Workload, plan: autosac.Plan, budget: int) -> Cell:
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


_MEASURED = (*STRATEGIES, "modules")
_PLANNERS = ("seed", *_MEASURED, "translated")


def _table(cells: list[Cell]) -> Iterator[str]:
    columns = [f"{name} MiB" for name in _MEASURED]
    columns += [f"{name} ms" for name in _PLANNERS]
    columns += ["bound ms", "gap", "milp CPU s", "kept, identical"]
    yield f"| budget MiB | {' | '.join(columns)} |"
    yield f"|{' ---: |' * (len(columns) + 1)}"
    for start in range(0, len(cells), len(_PLANNERS)):
        row = cells[start : start + len(_PLANNERS)]
        best = row[_PLANNERS.index("milp")]
        fields = [f"{best.budget_bytes / MIB:.2f}"]
        measured = [cell for cell in row if cell.planner in _MEASURED]
        fields += [f"{(cell.measured_bytes or 0) / MIB:.2f}" for cell in measured]
        fields += [in_ms(cell.recompute_ms) for cell in row]
        cost_ms, bound_ms = best.recompute_ms or 0.0, best.bound_ms or 0.0
        fields.append(in_ms(bound_ms))
        fields.append(f"{(cost_ms - bound_ms) / cost_ms if cost_ms else 0.0:.1%}")
        fields.append(f"{best.solve_s:.1f}")
        fields.append("yes" if all(cell.is_kept for cell in row) else "**NO**")
        yield f"| {' | '.join(fields)} |"


def in_ms(time_ms: float | None) -> str:
    """Milliseconds; a dash where no plan fits."""
    return "-" if time_ms is None else f"{time_ms:.3f}"


if __name__ == "__main__":
    sys.exit(main())
