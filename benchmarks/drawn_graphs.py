"""Graph plans of steps drawn by chance: how close to the bound, and how soon?

    python -m benchmarks.drawn_graphs [--recurrent 6] [--nets 4] [--timm 1]
        [--most-nodes 1600] [--output DIR]

Recurrent layers, nets of convolutions that branch and join, and models of timm (by
number, of less than 8 million parameters, at 64 pixels), each from a seed. A budget of
1 KiB is asked for first, to learn the floor; then the floor, and shares of the peak of
the joint graph that are above it, smaller ones first. CPU seconds are those of
planning. Every plan is run. Exits with 1 if a peak is not the predicted one or above
its budget, if results differ in a bit, if a larger budget is dearer, or if the floor
that a refusal names does not fit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import autosac
from autosac.graphs.joint_graphs import JointGraph, joint_graph
from autosac.graphs.plans import GraphPlanner
from benchmarks.environment import MIB, environment
from benchmarks.graph_plans import Cell, graph_cell, results_of

_SHARES = (0.6, 0.7, 0.76, 0.84, 0.92)
_PIXELS, _MOST_PARAMETERS = 64, 8_000_000

Draw = tuple[str, Callable[[], nn.Module], torch.Tensor]


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


def recurrent(seed: int) -> Draw:
    """An RNN, GRU or LSTM."""
    draw = random.Random(seed)
    kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])
    width, layers = draw.choice([32, 48, 64, 96]), draw.choice([1, 2, 3])
    both_ways, length = draw.random() < 0.5, draw.choice([6, 8, 12, 16, 24])
    batch = draw.choice([8, 16, 32, 64])
    ways = ", both ways" if both_ways else ""
    return (
        f"{kind.__name__} {seed}: {layers} x {width}{ways}, {length} steps of {batch}",
        lambda: Recurrent(kind, width, layers, both_ways=both_ways),
        torch.randn(batch, length, width),
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


def net(seed: int) -> Draw:
    """Convolutions that branch and join."""
    draw = random.Random(seed)
    batch, pixels = draw.choice([4, 8]), draw.choice([16, 32])
    return f"net {seed}", lambda: Net(seed), torch.randn(batch, 3, pixels, pixels)


def of_timm() -> Iterator[Draw]:
    """Small models of timm, shuffled."""
    import timm  # the other draws do without it

    names = timm.list_models()
    random.Random(0).shuffle(names)
    for name in names:
        with torch.device("meta"):
            count = sum(p.numel() for p in timm.create_model(name).parameters())
        if count < _MOST_PARAMETERS:
            images = torch.randn(32, 3, _PIXELS, _PIXELS)
            yield name, lambda name=name: timm.create_model(name), images


def square(out: torch.Tensor) -> torch.Tensor:
    """A loss of any output."""
    return out.float().square().mean()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit code tells whether every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drawn_graphs")
    parser.add_argument("--recurrent", type=int, default=6)
    parser.add_argument("--nets", type=int, default=4)
    parser.add_argument("--timm", type=int, default=1)
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
        (options.timm, of_timm() if options.timm else iter(())),
    )
    kept = True
    for count, draws in kinds:
        for graph_name, graph in _graphs(draws, count, options.most_nodes):
            section, is_kept = run(graph_name, graph)
            kept = kept and is_kept
            lines += section
            print("\n".join(section), flush=True)
            (options.output / "drawn_graphs.md").write_text("\n".join(lines) + "\n")
    return 0 if kept else 1


def _graphs(
    draws: Iterator[Draw], count: int, most_nodes: int
) -> Iterator[tuple[str, JointGraph]]:
    """The first graphs that can be captured and are small enough."""
    while count:
        torch.compiler.reset()
        torch.manual_seed(0)
        name, make_model, inputs = next(draws)
        try:
            graph = joint_graph(make_model(), inputs, loss_fn=square)
        except autosac.AutosacError as error:
            warnings.warn(f"{name}: {str(error)[:100]}", stacklevel=2)
            continue
        if len(graph.module.graph.nodes) <= most_nodes:
            count -= 1
            yield name, graph


def run(name: str, graph: JointGraph) -> tuple[list[str], bool]:
    """One graph under all budgets: its part of the table, and whether all was kept."""
    planner, expected = GraphPlanner(graph), results_of(graph)
    started = time.process_time()
    try:
        planner.plan(1024)
        raise AssertionError("A plan of 1 KiB.")
    except autosac.InfeasibleBudgetError as error:
        floor_bytes = error.lowest_peak_bytes
    refused_s = time.process_time() - started
    peak_bytes = planner.baseline_peak_bytes
    budgets = [floor_bytes, *(int(share * peak_bytes) for share in _SHARES)]
    cells = [
        graph_cell(planner, "milp", budget, None, None, expected)
        for budget in budgets
        if budget >= floor_bytes
    ]
    lines = [
        f"\n## {name}\n",
        f"{len(graph.module.graph.nodes)} nodes, {len(planner.problem.kept_plainly)}"
        f" values, peak {peak_bytes / MIB:.2f} MiB. Floor {floor_bytes / MIB:.4f} MiB,"
        f" proven to be above {planner.floor_bound_bytes / MIB:.4f} MiB; refused after"
        f" {refused_s:.1f} CPU s.\n",
        "| budget MiB | share | ms | bound ms | gap | CPU s | kept, identical |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(_line(cell, peak_bytes) for cell in cells),
    ]
    times = [cell.recompute_ms or 0.0 for cell in cells]
    never_dearer = times == sorted(times, reverse=True)
    return lines, never_dearer and all(cell.is_kept for cell in cells)


def _line(cell: Cell, peak_bytes: int) -> str:
    cost_ms, bound_ms = cell.recompute_ms or 0.0, cell.bound_ms or 0.0
    gap = (cost_ms - bound_ms) / cost_ms if cost_ms else 0.0
    return (
        f"| {cell.budget_bytes / MIB:.4f} | {cell.budget_bytes / peak_bytes:.0%} |"
        f" {cost_ms:.3f} | {bound_ms:.3f} | {gap:.1%} | {cell.solve_s:.1f} |"
        f" {'yes' if cell.is_kept else '**NO**'} |"
    )


if __name__ == "__main__":
    sys.exit(main())
