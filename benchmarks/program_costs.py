"""What units take of the program on the CPU: `python -m benchmarks.program_costs`.

Real forward and backward passes of the zoo take turns: plain, with every block rerun,
and under plans for five budgets that were made as if units took nothing of the program.
What a step takes beyond the plain one and the ops that run again is held against
`devices.programs.CPU_PROGRAM`, whose figures are from eight of the models; they are
fitted again to these, and to these without each of them. CPU time counts, as the
machine may be busy.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls

import autosac
from autosac.devices.links import DISK
from autosac.devices.programs import CPU_PROGRAM, NO_PROGRAM
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice
from autosac.solving.solve_options import SolveOptions
from autosac.step.tape import Tape
from autosac.units.policies import RERUN
from benchmarks.environment import environment
from benchmarks.models import Workload, zoo
from benchmarks.timed_steps import Run, install, medians, profiled, steps

RESULT = Path(__file__).parent / "results" / "program_costs.md"
FITTED = ("densenet", "swin", "albert", "t5", "llama", "unet", "mixtral", "convnext")
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)  # of the way from the floor to the baseline
_OWN = astuple(CPU_PROGRAM)[:-1]  # without what only a GPU's host takes
_NAMES = ("unit", "saved tensor", "op", "op that runs again")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """One step.

    Attributes:
        model: Of the zoo.
        step: Which budget or rule.
        plain_ms: What the plain step takes,
        ops_ms: what the ops take that run again,
        more_ms: and what the step takes beyond both.
        counts: Of units, saved tensors, ops in units, and ops that run again.
    """

    model: str
    step: str
    plain_ms: float
    ops_ms: float
    more_ms: float
    counts: tuple[int, ...]

    @property
    def predicted_ms(self) -> float:
        """What the units take of the program, as plans count it."""
        return float(np.dot(self.counts, _OWN))


def counts_of(tape: Tape, choice: Choice) -> tuple[int, ...]:
    """Units, tensors that autograd saves in them, their ops, and those run again."""
    calls = [call for unit in choice for call in unit.calls]
    rerun = [
        piece.unit.ops[i]
        for unit, policy in choice.items()
        for piece in unit.schedule(policy)
        for group, how in zip(piece.groups, piece.choices, strict=True)
        if how == RERUN
        for i in group.ops
    ]
    num_ops, num_rerun = (
        sum(not tape.ops[i].is_view for i in ops)
        for ops in ([i for call in calls for i in call.ops], rerun)
    )
    return len(calls), sum(len(call.saved) for call in calls), num_ops, num_rerun


def rows_of(name: str, work: Workload, num_rounds: int) -> Iterator[Row]:
    """Measured steps of a model."""
    profile = profiled(work, DISK)
    device = replace(profile.device, program=NO_PROGRAM)
    profile = replace(profile, device=device)
    floor_bytes = autosac.floor(profile)
    room_bytes = profile.baseline_peak_bytes - floor_bytes
    choices = {"every block": profile.rules.every_kth_block(1)}
    for share in _SHARES:
        budget_bytes = floor_bytes + int(share * room_bytes)
        choice = profile.chooser.choose(budget_bytes, SolveOptions())[0]
        if choice is not None:
            choices[f"{share:.0%}"] = choice
    runs: dict[str, Run] = {"plain": steps(work, lambda model: None)}
    for step, choice in choices.items():
        runs[step] = steps(work, partial(install, profile, choice))
    taken_ms = medians(runs, num_rounds)
    for step, choice in choices.items():
        ops_ms = recompute_ms(choice)
        more_ms = taken_ms[step] - taken_ms["plain"] - ops_ms
        counts = counts_of(profile.tape, choice)
        yield Row(name, step, taken_ms["plain"], ops_ms, more_ms, counts)


def fitted(rows: Sequence[Row]) -> Floats:
    """Times of least squared error, none below 0, in ms."""
    counts = np.array([row.counts for row in rows], dtype=np.float64)
    times: Floats = nnls(counts, np.array([row.more_ms for row in rows]))[0]
    return times


def off_ms(rows: Sequence[Row], times_ms: Sequence[float] | Floats) -> float:
    """Root mean square of what some times leave unexplained."""
    left = [float(np.dot(row.counts, times_ms)) - row.more_ms for row in rows]
    return float(np.sqrt(np.mean(np.square(left))))


def page(rows: Sequence[Row], num_rounds: int) -> Iterator[str]:
    """The table as text."""
    yield "# What units take of the program on the CPU"
    yield ""
    yield f"Medians of {num_rounds} rounds, CPU ms. *ops*: those that run again;"
    yield "*more*: what the step takes beyond these and the plain one; *predicted*: of"
    yield "that, by `CPU_PROGRAM`. Steps by budget: share of the way from the floor to"
    yield "the baseline."
    yield ""
    yield f"| {' | '.join(('', *_NAMES))} | off, root mean square |"
    yield "| --- |" + " ---: |" * (len(_NAMES) + 1)
    own = [row for row in rows if row.model in FITTED]
    others = [row for row in rows if row.model not in FITTED]
    yield _line("`CPU_PROGRAM`, eight models", _OWN, own)
    if others:
        yield _line("`CPU_PROGRAM`, all others", astuple(CPU_PROGRAM), others)
    yield _line("fitted to the eight", fitted(own), own)
    for name in FITTED:
        rest = [row for row in own if row.model != name]
        held_out = [row for row in own if row.model == name]
        if rest and held_out:
            yield _line(f"without {name}, and that one", fitted(rest), held_out)
    yield ""
    yield "| model | step | plain | ops | more | predicted |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for row in rows:
        figures = (row.plain_ms, row.ops_ms, row.more_ms, row.predicted_ms)
        words = " | ".join(f"{ms:.2f}" for ms in figures)
        yield f"| {row.model} | {row.step} | {words} |"
    yield ""
    for key, value in environment().items():
        yield f"- {key}: {value}"


def _line(name: str, times_ms: Sequence[float] | Floats, rows: Sequence[Row]) -> str:
    times = " | ".join(f"{ms:.3f}" for ms in times_ms)
    return f"| {name} | {times} | {off_ms(rows, times_ms):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=17)
    parser.add_argument("--models", nargs="*", default=list(zoo()))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for name in options.models:
        rows += rows_of(name, zoo()[name], options.rounds)
        print(name, flush=True)
    text = "\n".join(page(rows, options.rounds)) + "\n"
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
