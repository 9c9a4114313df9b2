"""Plans for a GPU against every choice there is, of steps drawn by chance.

    python -m benchmarks.exhaustive_choices [--draws 40] [--output DIR]

Small steps, each from a seed, whose activations take 1 to 10 MiB: what requests leave
of the allocator's blocks decides there what fits. Every choice of units that are not
inside each other, with every save set of each unit's curve, is replayed once; at twelve
budgets from the floor on the cheapest that fits is held against the plan, and against
its bound. Exits with 1 if a plan is dearer by over 0.5 %, or a bound is above the
cheapest.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import autosac
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice
from benchmarks.environment import cpu_s, environment

NUM_BUDGETS = 12
MOST_DEARER = 5e-3  # what a plan is asked to be proven within
_ROUNDING = 1e-9
_WIDTHS = (300, 350, 420, 520, 640, 700, 900)
_ROWS = (1024, 1500, 2048, 3000)
_CHANNELS = (8, 12, 16, 24, 32)


def dense(seed: int, optimizer: Any = None, *, norms: bool = False) -> autosac.Profile:
    """Four linear layers, each with an activation; with a norm after each if asked."""
    drawn = random.Random(seed)
    widths = [64, *(drawn.choice(_WIDTHS) for _ in range(4))]
    with torch.device("meta"):
        layers = [
            nn.Sequential(
                nn.Linear(a, b), *([nn.LayerNorm(b)] if norms else []), nn.GELU()
            )
            for a, b in itertools.pairwise(widths)
        ]
        batch = torch.randn(drawn.choice(_ROWS), 64)
    return _profile(layers, batch, optimizer)


def convolutional(seed: int) -> autosac.Profile:
    """Four convolutions, each with an activation."""
    drawn = random.Random(seed)
    channels = [3, *(drawn.choice(_CHANNELS) for _ in range(4))]
    size = drawn.choice((24, 32, 40))
    with torch.device("meta"):
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU())
            for a, b in itertools.pairwise(channels)
        ]
        batch = torch.randn(drawn.choice((24, 48, 64)), 3, size, size)
    return _profile(layers, batch, None)


def _profile(
    layers: list[nn.Sequential], batch: torch.Tensor, optimizer: Any
) -> autosac.Profile:
    return autosac.profile(
        nn.Sequential(*layers),
        batch,
        loss_fn=torch.sum,
        optimizer=optimizer,
        device="h100",
    )


STEPS: dict[str, Callable[[int], autosac.Profile]] = {
    "linear layers": dense,
    "linear layers, AdamW": lambda seed: dense(seed, torch.optim.AdamW),
    "linear layers and norms": lambda seed: dense(seed, norms=True),
    "convolutions": convolutional,
}


def choices_of(profile: autosac.Profile) -> Iterator[Choice]:
    """Every choice of units that are not inside each other."""
    numbers = profile.formulation
    policies = [(None, *curve.policies) for curve in numbers.curves]
    for picked in itertools.product(*policies):
        choice = {
            unit: policy
            for unit, policy in zip(numbers.units, picked, strict=True)
            if policy is not None
        }
        ends = sorted((unit.call.enter, unit.call.exit) for unit in choice)
        if all(a[1] < b[0] for a, b in itertools.pairwise(ends)):
            yield choice


class Cell(NamedTuple):
    """One plan.

    Attributes:
        ms: What it takes.
        bound_ms: What is proven.
        least_ms: What the cheapest choice takes that fits.
        seconds: CPU time of planning.
    """

    ms: float
    bound_ms: float
    least_ms: float
    seconds: float

    @property
    def dearer(self) -> float:
        """Share that the plan takes above the cheapest choice."""
        return self.ms / self.least_ms - 1.0 if self.least_ms else float(self.ms > 0.0)

    @property
    def is_false(self) -> bool:
        """Whether the bound is above the cheapest choice."""
        return self.bound_ms > self.least_ms * (1.0 + _ROUNDING)

    @property
    def gap(self) -> float:
        """Share of the plan's time that the bound leaves open."""
        return 1.0 - self.bound_ms / self.ms if self.ms else 0.0


def cells_of(profile: autosac.Profile) -> Iterator[Cell]:
    """A plan at each budget, against all choices."""
    replay = profile.simulator.true_peak_bytes
    known = [(recompute_ms(choice), replay(choice)) for choice in choices_of(profile)]
    floor_bytes, plain_bytes = autosac.floor(profile), replay({})
    for number in range(NUM_BUDGETS):
        budget = floor_bytes + (plain_bytes - floor_bytes) * number // NUM_BUDGETS
        started = cpu_s()
        plan = autosac.plan(profile, memory_budget=budget, dry_run=False)
        seconds = cpu_s() - started
        yield Cell(
            ms=plan.recompute_ms,
            bound_ms=plan.bound_ms,
            least_ms=min(ms for ms, peak_bytes in known if peak_bytes <= budget),
            seconds=seconds,
        )


def main() -> int:
    """Try all, and write the table as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells: dict[str, list[Cell]] = {}
    for name, make in STEPS.items():
        own = cells.setdefault(name, [])
        for seed in range(options.draws):
            own += cells_of(make(seed))
        print(_row(name, own), flush=True)
        text = "\n".join(_page(cells, options.draws)) + "\n"
        (options.output / "exhaustive_choices.md").write_text(text)
    every = [cell for own in cells.values() for cell in own]
    return int(any(cell.is_false or cell.dearer > MOST_DEARER for cell in every))


def _row(name: str, cells: list[Cell]) -> str:
    gaps = sorted(cell.gap for cell in cells)
    figures = [
        str(len(cells)),
        str(sum(cell.dearer > MOST_DEARER for cell in cells)),
        f"{max(cell.dearer for cell in cells):.2%}",
        str(sum(cell.is_false for cell in cells)),
        f"{statistics.median(gaps):.2%}",
        f"{gaps[int(0.95 * (len(gaps) - 1))]:.1%}",
        f"{gaps[-1]:.1%}",
        f"{statistics.median(cell.seconds for cell in cells):.2f}",
        f"{max(cell.seconds for cell in cells):.1f}",
    ]
    return f"| {' | '.join([name, *figures])} |"


def _page(cells: dict[str, list[Cell]], num_draws: int) -> Iterator[str]:
    where = ", ".join(f"{key} {value}" for key, value in environment().items())
    yield from ("# Plans for a GPU against every choice", "", where, "")
    yield from (f"    python -m benchmarks.exhaustive_choices --draws {num_draws}", "")
    yield (
        f"{num_draws} steps of each kind, {NUM_BUDGETS} budgets each from the floor to"
        " the plain step's peak, for an H100, without autocast (a step in bf16 has too"
        " many choices to replay all). *dearer*: plans that take over"
        f" {MOST_DEARER:.1%} more than the cheapest choice that fits; *by*: the most"
        " that any takes. *false*: bounds above that choice. The gap is what the bound"
        " leaves open of the plan's time, s the CPU time of a plan."
    )
    heads = "steps | plans | dearer | by | false | gap median | 95 % | worst"
    yield from ("", f"| {heads} | s median | most |", f"|{' --- |' * 10}")
    yield from (_row(name, own) for name, own in cells.items())


if __name__ == "__main__":
    sys.exit(main())
