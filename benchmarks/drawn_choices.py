"""Choices drawn by chance, of models drawn by chance, against dry runs of them.

    python -m benchmarks.drawn_choices [--num 60] [--seed 0] [--autocast]

A plan's peak is exact if the simulation is, whatever is chosen. Plans are the best
choices only, and each is dry-run before anybody gets it: what a simulation gets wrong
elsewhere makes them dearer, and shows in no plan. So here modules, chains and nests
that are not inside each other save what chance says and rerun the rest, and the
simulated peak is held against that of the applied model under fake tensors, to the
byte. Exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

import autosac
from autosac.errors import AutosacError
from autosac.planning.dry_running import difference_in_dry_run
from autosac.solving.rules_of_thumb import Choice, policy_saving
from autosac.units.policies import RERUN
from autosac.units.unit import Unit
from benchmarks.environment import environment
from benchmarks.models.drawn import build_small, every
from benchmarks.models.drawn.errors import NotBuiltError

RESULTS = Path(__file__).parent / "results"
NUM_CHOICES, MOST_OPS = 12, 6_000
_SOURCES = ("transformers", "timm", "torchvision")
_MEMORY_BYTES = 12 * 2**30
_SHARES_SAVED = (0.0, 0.2, 0.5, 0.85)
_MOST_UNITS = (1, 3, 30)


class Row(NamedTuple):
    """A model, and how its choices differed."""

    name: str
    num_ops: int
    num_choices: int
    differences: tuple[str, ...]
    left_out: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num", type=int, default=60, help="models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--autocast", action="store_true", help="in bfloat16")
    parser.add_argument("--output", type=Path, default=RESULTS / "drawn_choices.md")
    options = parser.parse_args()
    names = [name for source in _SOURCES for name in every(source)]
    random.Random(options.seed).shuffle(names)
    rows = []
    for name in names[: options.num]:
        row = _in_a_process(name, options.autocast)
        print(_line(row), *row.differences, sep="\n", flush=True)
        rows.append(row)
    options.output.write_text("\n".join(_page(rows, options.autocast)))
    sys.exit(any(row.differences for row in rows))


def _in_a_process(name: str, autocast: bool) -> Row:
    """A model of its own process, whose memory is limited."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(row_of, name, autocast).result()
        except Exception as error:  # such as a process that was ended
            return Row(name, 0, 0, (), f"{type(error).__name__}")


def row_of(name: str, autocast: bool) -> Row:
    """Draw choices of a model, and dry-run each."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        profile = _profiled(name, autocast)
    except (NotBuiltError, AutosacError) as error:
        return Row(name, 0, 0, (), type(error).__name__)
    num_ops = len(profile.tape.ops)
    if num_ops > MOST_OPS:
        return Row(name, num_ops, 0, (), f"more than {MOST_OPS:,} ops")
    chance = random.Random(name)
    choices = [drawn_choice(profile.choosable, chance) for _ in range(NUM_CHOICES)]
    choices = [choice for choice in choices if choice]
    differences = (_difference(profile, choice) for choice in choices)
    return Row(name, num_ops, len(choices), tuple(filter(None, differences)))


def _profiled(name: str, autocast: bool) -> autosac.Profile:
    work = build_small(name)
    model = work.make_model()
    return autosac.profile(
        *(model, work.make_inputs()),
        loss_fn=work.loss_fn,
        optimizer=torch.optim.AdamW(model.parameters()),
        autocast=torch.bfloat16 if autocast else None,
    )


def drawn_choice(units: tuple[Unit, ...], chance: random.Random) -> Choice:
    """Units that are not inside each other, each with a policy."""
    chosen: Choice = {}
    share = chance.choice(_SHARES_SAVED)
    for unit in chance.sample(units, min(len(units), chance.choice(_MOST_UNITS))):
        if any(_overlap(unit, other) for other in chosen):
            continue
        saved = [g for g in range(len(unit.groups)) if chance.random() < share]
        needed = [g for g in saved if unit.groups[g].needed]
        policy = policy_saving(unit, needed)
        if RERUN in policy.choices:
            chosen[unit] = policy
    return chosen


def _overlap(one: Unit, other: Unit) -> bool:
    return one.call.enter <= other.call.exit and other.call.enter <= one.call.exit


def _difference(profile: autosac.Profile, choice: Choice) -> str:
    try:
        difference = difference_in_dry_run(profile, choice)
    except Exception as error:  # such as of a rerun that reads other values
        difference = f"{type(error).__name__}: {error}"
    units = ", ".join(f"{u.fqn} {policy.choices}" for u, policy in choice.items())
    return difference and f"  {difference} {units}"


def _line(row: Row) -> str:
    counts = row.num_ops or "", row.num_choices or "", len(row.differences) or ""
    return f"| {' | '.join(map(str, (row.name, *counts, row.left_out)))} |"


def _page(rows: list[Row], autocast: bool) -> list[str]:
    judged = [row for row in rows if row.num_choices]
    num_choices = sum(row.num_choices for row in judged)
    num_different = sum(len(row.differences) for row in judged)
    return [
        "# Choices drawn by chance against dry runs of them",
        "",
        ", ".join(f"{name} {value}" for name, value in environment().items()),
        "",
        f"    {' '.join(['python -m benchmarks.drawn_choices', *sys.argv[1:]])}",
        "",
        f"{num_choices} choices of {len(judged)} of {len(rows)} models, each with"
        f" AdamW{', in bfloat16 under autocast' if autocast else ''}:"
        f" {num_different} take other memory than was simulated.",
        "",
        "| model | ops | choices | different | left out |",
        "| --- | ---: | ---: | ---: | --- |",
        *map(_line, rows),
        "",
    ]


if __name__ == "__main__":
    main()
