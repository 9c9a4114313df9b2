"""How long planning takes, now and at an earlier commit.

    python -m benchmarks.planning_time [--before COMMIT] [--models gpt2] [--rounds 5]

Models of the zoo are traced, their curves worked out and three budgets planned, in a
process of its own for each tree and round. The trees take turns, and take turns in who
begins; CPU time counts, so that other work on the machine hardly does. A tiny model is
planned first: imports do not count. The earlier tree is checked out for as long as that
takes; budgets are those of today's floors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autosac
from benchmarks.environment import cpu_s, environment
from benchmarks.models import Workload, zoo

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "planning_time.md"
BEFORE = "77954c6"  # the last commit before folders became layers
MODELS = ("gpt2", "llama", "mixtral", "t5", "swin", "densenet", "unet", "dit")
SHARES = (0.2, 0.5, 0.8)  # of the way from the floor to the plain step's peak
COLUMNS = ("trace", "curves", "plans", "in all")

Record = dict[str, Any]  # CPU seconds of each column, and what came of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--job", help="plan this model here, and print the record")
    parser.add_argument("--budgets", type=json.loads, help="of the job, in bytes")
    options = parser.parse_args()
    if options.job:
        print(json.dumps(planned(zoo()[options.job], options.budgets)))
        return
    pairs: dict[str, list[tuple[Record, Record]]] = {}
    with checked_out(options.before) as before:
        trees = (before, ROOT)
        for name in options.models.split(","):
            budgets = _budgets(zoo()[name])
            pairs[name] = [
                _in_turn(trees, name, budgets, turn) for turn in range(options.rounds)
            ]
            print(name, *pairs[name], sep="\n", flush=True)
            text = "\n".join(page(pairs, options.before, options.rounds)) + "\n"
            options.output.write_text(text)


def planned(work: Workload, budgets: list[int]) -> Record:
    """Trace and plan a model in this process, with the tree that it imports."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tiny = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    tiny_profile = autosac.profile(tiny, torch.ones(1024, 256))
    autosac.plan(tiny_profile, memory_budget=autosac.floor(tiny_profile))
    clock = [cpu_s()]
    profile = profiled(work)
    clock.append(cpu_s())
    assert profile.formulation is not None  # worked out by now
    clock.append(cpu_s())
    plans = [autosac.plan(profile, memory_budget=budget) for budget in budgets]
    clock.append(cpu_s())
    seconds = [end - begin for begin, end in pairwise(clock)]
    return {
        **dict(zip(COLUMNS, (*seconds, sum(seconds)), strict=True)),
        "recompute_ms": sum(plan.recompute_ms for plan in plans),
        "points": sum(len(curve.policies) for curve in profile.formulation.curves),
    }


def profiled(work: Workload) -> autosac.Profile:
    """The step of a model of the zoo."""
    torch.manual_seed(0)
    model = work.make_model()
    return autosac.profile(
        model,
        work.make_inputs(),
        loss_fn=work.loss_fn,
        optimizer=work.make_optimizer(model),
    )


def _budgets(work: Workload) -> list[int]:
    profile = profiled(work)
    lowest = autosac.floor(profile)
    way = profile.baseline_peak_bytes - lowest
    return [lowest + int(share * way) for share in SHARES]


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A work tree of the commit, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run((*git, "add", "--detach", tree, commit), check=True)
        try:
            yield tree
        finally:
            subprocess.run((*git, "remove", "--force", tree), check=True)


def _in_turn(
    trees: tuple[Path, Path], name: str, budgets: list[int], turn: int
) -> tuple[Record, Record]:
    """The job in both trees; every other turn, the second one begins."""
    order = trees if turn % 2 == 0 else trees[::-1]
    records = {tree: _in_own_process(tree, name, budgets) for tree in order}
    return records[trees[0]], records[trees[1]]


def _in_own_process(tree: Path, name: str, budgets: list[int]) -> Record:
    job = ("--job", name, "--budgets", json.dumps(budgets))
    done = subprocess.run(
        [sys.executable, Path(__file__).resolve(), *job],
        check=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},  # both packages are that tree's
        capture_output=True,
        text=True,
    )
    record: Record = json.loads(done.stdout.splitlines()[-1])
    return record


# --- the page -----------------------------------------------------------------


def page(
    pairs: dict[str, list[tuple[Record, Record]]], before: str, num_rounds: int
) -> Iterator[str]:
    """The table in Markdown."""
    yield "# Planning time, before and now\n"
    yield ", ".join(f"{name} {value}" for name, value in environment().items())
    yield (
        f"\nCPU seconds of planning a model of the zoo at {len(SHARES)} budgets"
        f" ({', '.join(f'{share:.0%}' for share in SHARES)} of the way from its floor"
        f" to its plain peak) at commit {before} → now, in processes of their own that"
        f" took turns: medians of {num_rounds} rounds; ratios are medians of those of"
        " each round, now to before. *trace*: `autosac.profile`; *curves*: units,"
        " Pareto points and the MILP's numbers; *plans*: all budgets, dry runs"
        " included; *points*: of all curves, which the MILP chooses from;"
        " *recomputation*: of all plans together, now to before.\n"
    )
    heads = (*COLUMNS, "ratio in all", "points", "recomputation")
    yield f"| model | {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * len(heads)}"
    for name, records in pairs.items():
        cells = [
            *(_before_and_now(records, column) for column in COLUMNS),
            f"{_ratio(records, 'in all'):.2f}",
            " → ".join(f"{record['points']:,}" for record in records[0]),
            f"{_ratio(records, 'recompute_ms'):.3f}",
        ]
        yield f"| {name} | {' | '.join(cells)} |"
    means = [
        statistics.geometric_mean(_ratio(records, column) for records in pairs.values())
        for column in (*COLUMNS, "in all", "points", "recompute_ms")
    ]
    cells = [f"{mean:.2f}" for mean in means]
    yield f"| ratio, geometric mean | {' | '.join(cells)} |"


def _before_and_now(records: list[tuple[Record, Record]], column: str) -> str:
    return " → ".join(
        f"{statistics.median(record[column] for record in of_tree):.2f}"
        for of_tree in zip(*records, strict=True)
    )


def _ratio(records: list[tuple[Record, Record]], column: str) -> float:
    return statistics.median(now[column] / before[column] for before, now in records)


if __name__ == "__main__":
    main()
