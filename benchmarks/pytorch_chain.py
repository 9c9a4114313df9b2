"""PyTorch's own planner and autosac at the same budgets, against real memory.

    python -m benchmarks.pytorch_chain [--shares 0.9,0.5] [--output DIR]

PyTorch's chain is MemTracker, RuntimeEstimator, SACEstimator and `sac_milp`
(`torch.distributed._tools`, torch 2.15). It has no applier: its op policies are
applied here, op by op, with `create_selective_checkpoint_contexts`. Peaks are those
of forward, loss and backward; neither side has an optimizer. The GPT has no dropout:
policies that save an in-place random op crash in backward.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autosac.cli import demo
from autosac.errors import InfeasibleBudgetError
from autosac.planning import make_plan
from autosac.profiles.profile import Profile, calibrate, profile
from autosac.storages import storage_bytes
from autosac.verification.measuring import measure_peak
from benchmarks.environment import MIB, environment
from benchmarks.rivals import sac_milp

_VOCABULARY, _BATCH, _LENGTH = 4096, 4, 512


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One planner at one budget.

    Attributes:
        system: Which planner.
        share: Budget over the baseline of PyTorch's chain.
        budget_bytes: The cap.
        predicted_bytes: Peak that the planner predicts; None if it finds no plan.
        measured_bytes: Peak of a real forward, loss and backward.
        identical: Gradients agree with the plain step's in every bit.
        time_ratio: Measured time over the plain one's.
        planning_s: Time to plan this budget, statistics not included.
    """

    system: str
    share: float
    budget_bytes: int
    predicted_bytes: int | None
    planning_s: float
    measured_bytes: int | None = None
    identical: bool | None = None
    time_ratio: float | None = None


@dataclass(frozen=True)
class Run:
    """What a real forward, loss and backward showed."""

    peak_bytes: int
    step_ms: float
    gradients: dict[str, torch.Tensor]


class GPTWithLoss(nn.Module):
    """The loss inside the model: PyTorch's statistics are those of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = demo.GPT(
            num_layers=8,
            width=512,
            num_heads=8,
            vocabulary=_VOCABULARY,
            length=_LENGTH,
            dropout=0.0,
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.gpt(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model() -> nn.Module:
    """The GPT, always with the same parameters."""
    torch.manual_seed(0)
    return GPTWithLoss()


def make_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and those that follow, always the same."""
    generator = torch.Generator().manual_seed(0)
    size = (_BATCH, _LENGTH + 1)
    tokens = torch.randint(_VOCABULARY, size, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run(apply: Callable[[nn.Module], object], rounds: int) -> Run:
    """Measure the peak of a step with a plan applied, then time some more."""
    model, inputs = make_model(), make_inputs()
    apply(model)
    _, peak_bytes = measure_peak(
        lambda: model(*inputs).backward(),
        device="cpu",
        persistent_bytes=storage_bytes([*model.parameters(), *inputs]),
    )
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    times_ms = []
    for _ in range(rounds):
        model.zero_grad()
        started = time.perf_counter()
        model(*inputs).backward()
        times_ms.append((time.perf_counter() - started) * 1e3)
    return Run(peak_bytes, statistics.median(times_ms), gradients)


# --- PyTorch's chain ----------------------------------------------------------


def pytorch_statistics() -> sac_milp.Chain:
    """Statistics of the step, as PyTorch's trackers see it."""
    return sac_milp.chain_of_step(make_model(), make_inputs(), lambda loss: loss)


def pytorch_cell(chain: sac_milp.Chain, share: float, plain: Run, rounds: int) -> Cell:
    """Plan, apply and measure one budget with PyTorch's chain."""
    budget_bytes = int(share * chain.baseline_bytes)
    started = time.perf_counter()
    shares = chain.ratios(budget_bytes)
    ratios, predicted_bytes = shares or ({}, None)
    saved = {
        fqn.removeprefix("model."): chain.saved_ops(fqn, ratio)
        for fqn, ratio in ratios.items()
    }
    cell = Cell(
        system="sac_milp",
        share=share,
        budget_bytes=budget_bytes,
        predicted_bytes=predicted_bytes,
        planning_s=time.perf_counter() - started,
    )
    if shares is None:
        return cell

    def apply(model: nn.Module) -> None:
        for fqn, (names, flags) in saved.items():
            _checkpoint(model.get_submodule(fqn), names, flags)

    return _measured(cell, run(apply, rounds), plain)


def _checkpoint(module: nn.Module, names: list[str], flags: list[int]) -> None:
    """Run a module under selective checkpointing, by the index of each op."""
    forward = module.forward

    def policy(
        places: Iterator[int], context: Any, func: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if func in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        place = next(places)
        assert func._overloadpacket.__name__ == names[place], "the trace was another"
        if flags[place]:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        places = iter(range(len(names)))
        return create_selective_checkpoint_contexts(functools.partial(policy, places))

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
        )

    module.forward = checkpointed


# --- autosac ------------------------------------------------------------------


def autosac_profile() -> Profile:
    """The same step, as autosac sees it."""
    traced = profile(make_model(), make_inputs(), loss_fn=lambda loss: loss)
    return calibrate(traced)


def autosac_cell(
    traced: Profile, share: float, budget_bytes: int, plain: Run, rounds: int
) -> Cell:
    """Plan, apply and measure one budget with autosac."""
    started = time.perf_counter()
    try:
        plan = make_plan.make_plan(traced, budget_bytes)
    except InfeasibleBudgetError:
        plan = None
    cell = Cell(
        system="autosac",
        share=share,
        budget_bytes=budget_bytes,
        predicted_bytes=plan and plan.peak_bytes,
        planning_s=time.perf_counter() - started,
    )
    return _measured(cell, run(plan.apply, rounds), plain) if plan else cell


def _measured(cell: Cell, planned: Run, plain: Run) -> Cell:
    identical = planned.gradients.keys() == plain.gradients.keys() and all(
        torch.equal(planned.gradients[name], gradient)
        for name, gradient in plain.gradients.items()
    )
    shown = {
        "measured_bytes": planned.peak_bytes,
        "identical": identical,
        "time_ratio": planned.step_ms / plain.step_ms,
    }
    return Cell(**{**asdict(cell), **shown})


# --- the table ----------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Run both planners at all budgets and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pytorch_chain")
    parser.add_argument("--shares", default="0.9,0.7,0.5,0.4,0.3")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps")
    parser.add_argument("--threads", type=int, help="of PyTorch; default: its own")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    started = time.perf_counter()
    chain = pytorch_statistics()
    middle = time.perf_counter()
    traced = autosac_profile()
    lines = [
        "# PyTorch's sac_milp and autosac on one GPT\n",
        ", ".join(f"{name} {value}" for name, value in environment().items()) + "\n",
        f"Statistics: PyTorch {middle - started:.1f} s, autosac (calibration included)"
        f" {time.perf_counter() - middle:.1f} s.",
    ]
    plain = run(lambda model: None, options.rounds)
    lines += _baselines(plain, chain.baseline_bytes, traced)
    print("\n".join(lines), flush=True)
    cells = []
    for share in map(float, options.shares.split(",")):
        cells.append(pytorch_cell(chain, share, plain, options.rounds))
        budget_bytes = cells[-1].budget_bytes
        cells.append(autosac_cell(traced, share, budget_bytes, plain, options.rounds))
        for cell in cells[-2:]:
            lines.append(_row(cell))
            print(lines[-1], flush=True)
    _write(lines, cells, options.output)


def _baselines(plain: Run, pytorch_bytes: int, traced: Profile) -> Iterator[str]:
    own_bytes, floor_bytes = traced.baseline_peak_bytes, make_plan.floor(traced)
    yield (
        f"\nPlain forward and backward: real peak {plain.peak_bytes / MIB:.2f} MiB;"
        f" PyTorch's chain says {pytorch_bytes / MIB:.2f}, autosac"
        f" {own_bytes / MIB:.2f}. Floor of autosac: {floor_bytes / MIB:.2f} MiB.\n"
    )
    yield (
        "| share | budget MiB | system | predicted MiB | real MiB | error | within |"
        " identical | time | planning s |"
    )
    yield f"|{' ---: |' * 10}"


def _row(cell: Cell) -> str:
    head = f"| {cell.share} | {cell.budget_bytes / MIB:.1f} | {cell.system} |"
    if cell.predicted_bytes is None or cell.measured_bytes is None:
        return f"{head} infeasible | | | | | | {cell.planning_s:.1f} |"
    error = cell.predicted_bytes / cell.measured_bytes - 1
    within = "yes" if cell.measured_bytes <= cell.budget_bytes else "**NO**"
    return (
        f"{head} {cell.predicted_bytes / MIB:.1f} | {cell.measured_bytes / MIB:.1f} |"
        f" {error:+.2%} | {within} | {'yes' if cell.identical else '**NO**'} |"
        f" x{cell.time_ratio:.2f} | {cell.planning_s:.1f} |"
    )


def _write(lines: list[str], cells: list[Cell], folder: Path) -> None:
    record = {"environment": environment(), "cells": [asdict(cell) for cell in cells]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytorch_chain.md").write_text("\n".join(lines) + "\n")
    (folder / "pytorch_chain.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
