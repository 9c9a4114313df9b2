"""Really running ranks of FSDP2: do they peak as predicted and train as one process?

    python -m benchmarks.fsdp_ranks [--ranks 2] [--models GPT,ViT] [--output DIR]

Every rank is a process on the CPU that gloo connects; each has a batch of its own. The
measured peak is what PyTorch's allocator reports on all threads of the process in three
steps, if threads of gloo drop in time what they have reduced, which leaves no event.
Exits with 1 if a peak is understated or off by over 1 %, if slow threads might hold
more than is said, or if losses or gradients differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from autosac.parallel.fsdp_memory import RankSimulator
from autosac.parallel.sharding import Sharding, fsdp_units
from autosac.planning.spelling import spell_out
from autosac.profiles.profile import Profile, calibrate
from autosac.solvers.curves import knapsack
from autosac.units.curves import policy_of, save_problem
from autosac.units.policies import Policy
from autosac.units.unit import Unit
from benchmarks.environment import MIB, environment
from benchmarks.ranks import RankResult, Recipe, reference, run_gloo_ranks
from benchmarks.sharded_models import RECIPES

LARGEST_ERROR = 0.01  # of the measured peak
LARGEST_DIFFERENCE = 1e-5  # of the largest element of a gradient


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One choice for one model.

    Attributes:
        model: Name of the model.
        choice: What is chosen, in words.
        sharding: Its FSDP units.
        chosen: Its AC units.
        predicted_bytes: Peak of each rank,
        late_bytes: and what slow threads of gloo may add.
    """

    model: str
    choice: str
    sharding: Sharding
    chosen: Mapping[Unit, Policy]
    predicted_bytes: tuple[int, ...]
    late_bytes: int


def main() -> int:
    """Run all cells and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", default=",".join(RECIPES))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--timeout", type=float, default=1800)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells, jobs = [], []
    for name in options.models.split(","):
        recipe = RECIPES[name]
        profile = calibrate(recipe.profile())
        for cell in _cells(name, recipe, profile, options.ranks):
            cells.append(cell)
            settings = {"want_gradients": True, "num_measured": 3}
            policies = spell_out(profile, cell.chosen)
            jobs.append((recipe, cell.sharding, policies, settings))
    results = run_gloo_ranks(options.ranks, jobs, timeout_s=options.timeout)
    lines, is_kept = _table(cells, results, options.ranks)
    path = options.output / f"fsdp_ranks_{options.ranks}.md"
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0 if is_kept else 1


def _cells(name: str, recipe: Recipe, profile: Profile, ranks: int) -> list[Cell]:
    blocks = fsdp_units(recipe.blocks)
    kept = fsdp_units(recipe.blocks, reshard_after_forward=False)
    choices = [
        ("blocks", blocks, None),
        ("blocks, all recomputed", blocks, 1.0),
        ("blocks kept, half recomputed", kept, 0.5),
    ]
    simulator = RankSimulator(profile)
    cells = []
    for words, units, share in choices:
        sharding = Sharding(units=units, shard_degree=ranks)
        chosen = {} if share is None else _recompute(profile, recipe, share)
        peaks = [
            simulator.timeline(sharding, chosen, rank=rank).peak_bytes
            for rank in range(ranks)
        ]
        cells.append(
            Cell(
                model=name,
                choice=words,
                sharding=sharding,
                chosen=chosen,
                predicted_bytes=tuple(peaks),
                late_bytes=simulator.late_bytes(sharding),
            )
        )
    return cells


def _recompute(profile: Profile, recipe: Recipe, share: float) -> dict[Unit, Policy]:
    """Every block an AC unit, this far along its Pareto points."""
    chosen = {}
    for unit in profile.units.candidates:
        if unit.fqn in recipe.blocks:
            front = knapsack.front(save_problem(unit))
            chosen[unit] = policy_of(front, round(share * (len(front) - 1)))
    return chosen


def _table(
    cells: list[Cell], measured: list[list[RankResult]], num_ranks: int
) -> tuple[list[str], bool]:
    lines = [
        f"# FSDP2 on {num_ranks} gloo ranks: predicted and measured peaks",
        "",
        "```",
        *(f"{key}: {value}" for key, value in environment().items()),
        "```",
        "",
        "Peaks in MiB: of the rank that is furthest off, the most in three steps."
        " *late*: what slow threads of gloo might have held beyond the prediction, and"
        " what the model says that they may. Losses and gradients are compared with"
        " those of one unsharded process on the same batches; the difference is"
        " relative to the largest element of any gradient.",
        "",
        "| model | FSDP and AC units | predicted | measured | error | late | losses |"
        " gradients |",
        "|---|---|---|---|---|---|---|---|",
    ]
    references = {
        name: reference(RECIPES[name], num_ranks) for name in {c.model for c in cells}
    }
    is_kept = True
    for cell, results in zip(cells, measured, strict=True):
        pairs = list(zip(cell.predicted_bytes, results, strict=True))
        worst = max(pairs, key=lambda pair: abs(_error(*pair)))
        late = max(0, *(r.highest_peak_bytes - p for p, r in pairs))
        losses, gradients = references[cell.model]
        equal = [result.loss for result in results] == losses
        difference = largest_difference(results, gradients)
        lines.append(
            f"| {cell.model} | {cell.choice} | {worst[0] / MIB:.3f}"
            f" | {worst[1].peak_bytes / MIB:.3f} | {_error(*worst):+.4%}"
            f" | {late / MIB:.2f} of {cell.late_bytes / MIB:.2f}"
            f" | {'identical' if equal else 'DIFFER'} | {difference:.1e} |"
        )
        errors = [_error(*pair) for pair in pairs]
        is_kept &= all(0 <= error <= LARGEST_ERROR for error in errors)
        is_kept &= equal and difference <= LARGEST_DIFFERENCE
        is_kept &= late <= cell.late_bytes
    return lines, is_kept


def _error(predicted_bytes: int, result: RankResult) -> float:
    return predicted_bytes / result.peak_bytes - 1


def largest_difference(
    results: list[RankResult], expected: Mapping[str, torch.Tensor]
) -> float:
    """Largest difference of any gradient, relative to the largest element of all."""
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    off = 0.0
    for result in results:
        if set(result.gradients) != set(expected):
            return float("inf")
        for name, gradient in expected.items():
            off = max(off, float((result.gradients[name] - gradient).abs().max()))
    return off / scale


if __name__ == "__main__":
    sys.exit(main())
