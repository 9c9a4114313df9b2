"""Graph plans of steps drawn by chance: how close to the bound, and how soon?

    python -m benchmarks.drawn_graphs [--recurrent 6] [--nets 4] [--nested 6] [--timm 1]
        [--transformers 3] [--most-nodes 1600] [--output DIR]

Recurrent layers, nets of convolutions that branch and join, nets of recurrent,
convolutional and attention parts inside one another, models of timm (by number,
of less than 8 million parameters, at 64 pixels) and of Transformers (by number,
shrunken as in `benchmarks.breadth`), each from a seed. A budget of 1 KiB is asked for
first, to learn the floor; then the floor, and shares of the peak of the joint graph
that are above it, smaller ones first. CPU seconds are those of planning. *Modules* is
`autosac.plan` of the same step under the same budget, a dash where it has none; its
plan is one of the graph's starts. *Translated* is what this plan recomputes, in the
graph and by the graph's times; a dash where its peak in the graph is above the budget.
Every plan of a graph is run. Exits with 1 if a peak is not the predicted one or above
its budget, if results differ in a bit, if a larger budget is dearer, if the floor that
a refusal names does not fit, or if a graph's plan is dearer than the translated one.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import autosac
from autosac.graphs.joint_graphs import JointGraph, joint_graph
from autosac.graphs.plans import GraphPlanner
from benchmarks.environment import MIB, cpu_s, environment
from benchmarks.graph_plans import (
    Cell,
    graph_cell,
    in_ms,
    make_model,
    results_of,
    translated_cell,
)
from benchmarks.models import drawn
from benchmarks.models.nested import nested
from benchmarks.models.workload import Workload, momentum, normal

_SHARES = (0.5, 0.6, 0.68, 0.76, 0.82, 0.88, 0.94)
_PIXELS, _MOST_PARAMETERS = 64, 8_000_000

_SEED = 0


class Recurrent(nn.Module):
    """Layers of one kind, and a linear one on each step."""

    def __init__(
        self, kind: type[nn.RNNBase], width: int, layers: int, *, both_ways: bool
    ) -> None:
        super().__init__()
        self.layers = kind(
            width, width, layers, batch_first=True, bidirectional=both_ways
        )
        self.head = nn.Linear(width * (1 + both_ways), 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(x)[0])
        return out


def recurrent(seed: int) -> Workload:
    """An RNN, GRU or LSTM."""
    draw = random.Random(seed)
    kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])
    width, layers = draw.choice([32, 48, 64, 96]), draw.choice([1, 2, 3])
    both_ways, length = draw.random() < 0.5, draw.choice([6, 8, 12, 16, 24])
    batch = draw.choice([8, 16, 32, 64])
    ways = ", both ways" if both_ways else ""
    return _step(
        f"{kind.__name__} {seed}: {layers} x {width}{ways}, {length} steps of {batch}",
        lambda: Recurrent(kind, width, layers, both_ways=both_ways),
        (batch, length, width),
    )


def _step(
    name: str, make_model: Callable[[], nn.Module], size: tuple[int, ...]
) -> Workload:
    return Workload(
        name=name,
        make_model=make_model,
        make_inputs=lambda: normal(*size),
        loss_fn=square,
        make_optimizer=momentum,
        blocks=(),
    )


_PARTS: dict[str, Callable[[int], nn.Module]] = {
    "conv": lambda width: nn.Conv2d(width, width, 3, padding=1),
    "deep": lambda width: nn.Conv2d(width, width, 3, padding=1, groups=width),
    "norm": lambda width: nn.Sequential(nn.BatchNorm2d(width), nn.ReLU()),
    "group": lambda width: nn.GroupNorm(4, width),
    "gelu": lambda width: nn.GELU(),
    "add": lambda width: nn.Conv2d(width, width, 1),
    "gate": lambda width: nn.Conv2d(width, width, 1),
    "join": lambda width: nn.Conv2d(2 * width, width, 1),
}


class Net(nn.Module):
    """Parts that each read one or two of the results before."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        width = draw.choice([8, 16, 24])
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.kinds = [draw.choice(list(_PARTS)) for _ in range(draw.randint(10, 40))]
        self.reads = [
            (draw.randint(max(0, i - 3), i), draw.randint(max(0, i - 8), i))
            for i in range(len(self.kinds))
        ]
        self.parts = nn.ModuleList(_PARTS[kind](width) for kind in self.kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = [self.stem(x)]
        for kind, (one, other), part in zip(
            self.kinds, self.reads, self.parts, strict=True
        ):
            x, y = results[one], results[other]
            if kind == "add":
                results.append(x + part(y))
            elif kind == "gate":
                results.append(x * torch.sigmoid(part(y)))
            elif kind == "join":
                results.append(part(torch.cat([x, y], 1)))
            else:
                results.append(part(x))
        return torch.stack([result.mean() for result in results[-4:]])


def net(seed: int) -> Workload:
    """Convolutions that branch and join."""
    draw = random.Random(seed)
    batch, pixels = draw.choice([4, 8]), draw.choice([16, 32])
    return _step(f"net {seed}", lambda: Net(seed), (batch, 3, pixels, pixels))


def nest(seed: int) -> Workload:
    """Recurrent, convolutional and attention parts inside one another."""
    draw = random.Random(seed)
    batch, length = draw.choice([4, 8, 16]), draw.choice([4, 6, 8])
    width = draw.choice([16, 32, 64])

    def make_model() -> nn.Module:
        return nested(random.Random(seed), width)

    return _step(f"nest {seed}", make_model, (batch, length, width))


def of_timm() -> Iterator[Workload]:
    """Small models of timm, shuffled."""
    import timm  # the other draws do without it

    names = timm.list_models()
    random.Random(_SEED).shuffle(names)
    for name in names:
        with torch.device("meta"):
            count = sum(p.numel() for p in timm.create_model(name).parameters())
        if count < _MOST_PARAMETERS:
            images = (32, 3, _PIXELS, _PIXELS)
            yield _step(name, lambda name=name: timm.create_model(name), images)


def of_transformers() -> Iterator[Workload]:
    """Shrunken models of Transformers, shuffled, as far as they can be built."""
    for name in drawn.drawn("transformers", _SEED):
        try:
            yield drawn.build(name)
        except drawn.NotBuiltError as error:
            warnings.warn(f"{name}: {str(error)[:100]}", stacklevel=2)


def square(out: torch.Tensor) -> torch.Tensor:
    """A loss of any output."""
    return out.float().square().mean()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit code tells whether every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drawn_graphs")
    parser.add_argument("--recurrent", type=int, default=6)
    parser.add_argument("--nets", type=int, default=4)
    parser.add_argument("--nested", type=int, default=6)
    parser.add_argument("--timm", type=int, default=1)
    parser.add_argument("--transformers", type=int, default=3)
    parser.add_argument("--most-nodes", type=int, default=1600, help="of a graph")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = ["# Graph plans of steps drawn by chance\n"]
    lines.append(", ".join(f"{name} {value}" for name, value in environment().items()))
    lines.append(__doc__.partition("\n\n")[2].partition("\n\n")[2].rstrip() + "\n")
    kinds = (
        (options.recurrent, map(recurrent, range(1, 1000))),
        (options.nets, map(net, range(1, 1000))),
        (options.nested, map(nest, range(1, 1000))),
        (options.timm, of_timm() if options.timm else iter(())),
        (options.transformers, of_transformers() if options.transformers else iter(())),
    )
    kept = True
    for count, draws in kinds:
        for work, graph in _graphs(draws, count, options.most_nodes):
            section, is_kept = run(work, graph)
            kept = kept and is_kept
            lines += section
            print("\n".join(section), flush=True)
            (options.output / "drawn_graphs.md").write_text("\n".join(lines) + "\n")
    return 0 if kept else 1


def _graphs(
    draws: Iterator[Workload], count: int, most_nodes: int
) -> Iterator[tuple[Workload, JointGraph]]:
    """The first graphs that can be captured and are small enough."""
    while count:
        torch.compiler.reset()
        work = next(draws)
        try:
            graph = joint_graph(
                make_model(work), work.make_inputs(), loss_fn=work.loss_fn
            )
        except autosac.AutosacError as error:
            warnings.warn(f"{work.name}: {str(error)[:100]}", stacklevel=2)
            continue
        if len(graph.module.graph.nodes) <= most_nodes:
            count -= 1
            yield work, graph


class Row(NamedTuple):
    """Plans under one budget.

    Attributes:
        graph: Of the graph.
        modules_ms: What the plan of modules recomputes; None if there is none,
        translated_ms: and the same in the graph; None if it does not fit.
    """

    graph: Cell
    modules_ms: float | None
    translated_ms: float | None


def run(work: Workload, graph: JointGraph) -> tuple[list[str], bool]:
    """One graph under all budgets: its part of the table, and whether all was kept."""
    planner, expected = GraphPlanner(graph), results_of(graph)
    profile = autosac.profile(
        make_model(work), work.make_inputs(), loss_fn=work.loss_fn
    )
    profile = autosac.calibrate(profile, progress=False)
    started = cpu_s()
    try:
        planner.plan(1024)
        raise AssertionError("A plan of 1 KiB.")
    except autosac.InfeasibleBudgetError as error:
        floor_bytes = error.lowest_peak_bytes
    refused_s = cpu_s() - started
    peak_bytes = planner.baseline_peak_bytes
    budgets = [floor_bytes, *(int(share * peak_bytes) for share in _SHARES)]
    rows = [
        _row(planner, profile, budget, expected)
        for budget in budgets
        if budget >= floor_bytes
    ]
    lines = [
        f"\n## {work.name}\n",
        f"{len(graph.module.graph.nodes)} nodes, {len(planner.problem.kept_plainly)}"
        f" values, peak {peak_bytes / MIB:.2f} MiB. Floor {floor_bytes / MIB:.4f} MiB,"
        f" proven to be above {planner.floor_bound_bytes / MIB:.4f} MiB; refused after"
        f" {refused_s:.1f} CPU s.\n",
        "| budget MiB | share | ms | bound ms | gap | CPU s | modules ms |"
        " translated ms | kept, identical |",
        f"|{' ---: |' * 9}",
        *(_line(row, peak_bytes) for row in rows),
    ]
    times = [row.graph.recompute_ms or 0.0 for row in rows]
    never_dearer = times == sorted(times, reverse=True)
    return lines, never_dearer and all(_is_kept(row) for row in rows)


def _row(
    planner: GraphPlanner, profile: autosac.Profile, budget: int, expected: list[Any]
) -> Row:
    try:
        plan = autosac.plan(profile, memory_budget=budget)
    except autosac.InfeasibleBudgetError:
        cell = graph_cell(planner, "milp", budget, None, None, expected)
        return Row(cell, None, None)
    cell = graph_cell(planner, "milp", budget, None, plan, expected)
    translated = translated_cell(planner, plan, budget)
    return Row(cell, plan.recompute_ms, translated.recompute_ms)


def _is_kept(row: Row) -> bool:
    """Whether all promises hold, and the plan is no dearer than the translated one."""
    translated_ms = row.translated_ms
    cost_ms = row.graph.recompute_ms or 0.0
    return row.graph.is_kept and (translated_ms is None or cost_ms <= translated_ms)


def _line(row: Row, peak_bytes: int) -> str:
    cell = row.graph
    cost_ms, bound_ms = cell.recompute_ms or 0.0, cell.bound_ms or 0.0
    gap = (cost_ms - bound_ms) / cost_ms if cost_ms else 0.0
    return (
        f"| {cell.budget_bytes / MIB:.4f} | {cell.budget_bytes / peak_bytes:.0%} |"
        f" {cost_ms:.3f} | {bound_ms:.3f} | {gap:.1%} | {cell.solve_s:.1f} |"
        f" {in_ms(row.modules_ms)} | {in_ms(row.translated_ms)} |"
        f" {'yes' if _is_kept(row) else '**NO**'} |"
    )


if __name__ == "__main__":
    sys.exit(main())
