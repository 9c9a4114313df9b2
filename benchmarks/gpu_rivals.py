"""Real steps on a GPU beside checkpointing by hand: `python -m benchmarks.gpu_rivals`.

Models of full size train with `torch.utils.checkpoint` around every block, around every
second one, and around every block with PyTorch's selective contexts that keep what
matmuls, convolutions and attention return. The peak that the GPU's allocator shows of
each is the budget of a plan, and the floor is one more. All take turns of
three steps in a row; the plain step
takes part twice: how far its two medians are apart is the noise. Exits with 1 if a plan
is above the peak that was its budget, or slower than whose peak that was by more than
`SLOWER`.

    python -m benchmarks.gpu_rivals [--models full/bert-base] [--rounds 9]
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import autosac
from autosac.step.training_step import normalize_inputs, training_step
from benchmarks import gpu_tables
from benchmarks.environment import MIB
from benchmarks.gpu_runs import clean, synchronize
from benchmarks.models import Workload, zoo
from benchmarks.models.full_size import full_size
from benchmarks.models.workload import on_device

RESULT = Path(__file__).parent / "results" / "gpu_rivals.md"
SLOWER = 0.02  # of a step: beyond the noise
_WARM_UP, _IN_A_ROW = 2, 3
# As torchtitan's selective policy keeps them (torchtitan/distributed/
# activation_checkpoint.py), and convolutions.
_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)

Change = Callable[[nn.Module], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row trains.

    Attributes:
        name: What the table calls it.
        work: The step, on the device.
        autocast: Type that forward and loss autocast to.
    """

    name: str
    work: Workload
    autocast: torch.dtype | None


class Contender:
    """A model in training that takes its turns."""

    def __init__(self, case: Case, model: nn.Module, inputs: Any) -> None:
        self._case, self._inputs, self._model = case, inputs, model
        self._optimizer = case.work.make_optimizer(model)

    def step(self) -> None:
        """One training step that leaves no gradients."""
        training_step(
            self._model,
            *self._inputs,
            loss_fn=self._case.work.loss_fn,
            optimizer=self._optimizer,
            autocast=self._case.autocast,
        )
        self._model.zero_grad(set_to_none=True)

    def timed_ms(self, device: str) -> float:
        """Wall time of a step in a row of them; the device is waited for at its end."""
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(_IN_A_ROW):
            self.step()
        synchronize(device)
        return 1e3 * (time.perf_counter() - begin) / _IN_A_ROW

    def rise_bytes(self) -> int:
        """Most that a step adds to what is allocated when it begins."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        return torch.cuda.max_memory_allocated() - before


# --- rivals -----------------------------------------------------------------------


def _checkpointed(blocks: Iterable[str], **options: Any) -> Change:
    def change(model: nn.Module) -> None:
        for fqn in blocks:
            block = model.get_submodule(fqn)
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, **options
            )

    return change


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = op in _KEPT
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def rivals(blocks: tuple[str, ...]) -> dict[str, Change]:
    """What changes a model, by what tables call it."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep)
    return {
        "every block": _checkpointed(blocks),
        "every second block": _checkpointed(blocks[::2]),
        "every block, selective": _checkpointed(blocks, context_fn=contexts),
    }


# --- one model --------------------------------------------------------------------


def measure(case: Case, device: str, num_rounds: int) -> Iterator[dict[str, Any]]:
    """A row of figures for each rival and for the floor."""
    profile = _profiled(case, device)
    model = case.work.make_model()
    clean(device)
    others = torch.cuda.memory_allocated() if device == "cuda" else 0
    inputs = normalize_inputs(case.work.make_inputs())
    made: dict[str, Contender] = {}

    def add(name: str, change: Change | None) -> Contender:
        torch.manual_seed(0)
        own = copy.deepcopy(model)
        if change is not None:
            change(own)
        made[name] = contender = Contender(case, own, inputs)
        contender.step()
        return contender

    plain = add("plain", None)
    held = torch.cuda.memory_allocated() - others if device == "cuda" else 0
    peaks: dict[str, int] = {"plain": held + _rise(plain, device)}
    plans: dict[str, autosac.Plan] = {}
    for name, change in rivals(case.work.blocks).items():
        peaks[name] = held + _rise(add(name, change), device)
    lowest = autosac.floor(profile)
    for name in (*rivals(()), "floor"):
        budget = lowest if name == "floor" or device == "cpu" else peaks[name]
        try:
            plans[name] = autosac.plan(profile, memory_budget=budget)
        except autosac.InfeasibleBudgetError as error:
            print(case.name, name, error, flush=True)
            continue
        ours = f"plan: {name}"
        peaks[ours] = held + _rise(add(ours, plans[name].apply), device)
    add("plain again", None)
    taken = _medians(made, device, num_rounds)
    for name, plan in plans.items():
        yield {
            "model": case.name,
            "plain_ms": taken["plain"],
            "plain_bytes": peaks["plain"],
            "noise": taken["plain again"] / taken["plain"] - 1,
            "rival": name,
            "rival_bytes": peaks.get(name),
            "rival_ms": taken.get(name),
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.peak_bytes,
            "plan_bytes": peaks[f"plan: {name}"],
            "plan_ms": taken[f"plan: {name}"],
            "predicted_ms": plan.step_ms,
            "host_ms": plan.host_ms,
            "gap": plan.optimality_gap,
        }


def _profiled(case: Case, device: str) -> autosac.Profile:
    model = case.work.make_model()
    traced = autosac.profile(
        model,
        case.work.make_inputs(),
        loss_fn=case.work.loss_fn,
        optimizer=case.work.make_optimizer(model),
        autocast=case.autocast,
    )
    return autosac.calibrate(traced, cache=False, progress=False)


def _rise(contender: Contender, device: str) -> int:
    return contender.rise_bytes() if device == "cuda" else 0


def _medians(
    made: dict[str, Contender], device: str, num_rounds: int
) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in made}
    gc.collect()
    for number in range(-_WARM_UP, num_rounds):
        for name, contender in made.items():
            ms = contender.timed_ms(device)
            if number >= 0:
                taken[name].append(ms)
    return {name: statistics.median(ms) for name, ms in taken.items()}


# --- the page ---------------------------------------------------------------------


def kept(row: dict[str, Any]) -> bool:
    """Whether a plan keeps its budget and is not slower than whose peak that is."""
    within = row["plan_bytes"] <= row["budget_bytes"]
    rival_ms = row["rival_ms"]
    return within and (rival_ms is None or row["plan_ms"] <= (1 + SLOWER) * rival_ms)


def table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Rows as Markdown."""
    yield (
        "| model | plain | noise | peak of | MiB | its step | plan MiB | plan's step"
        " | plan to rival | predicted | of the host | gap | kept |"
    )
    yield f"| --- | ---: | ---: | --- |{' ---: |' * 8} --- |"
    for row in rows:
        rival_ms, plan_ms, plain = row["rival_ms"], row["plan_ms"], row["plain_ms"]
        cells = [
            row["model"],
            f"{plain:.1f} ms, {row['plain_bytes'] / MIB:,.0f} MiB",
            f"{row['noise']:+.1%}",
            row["rival"],
            f"{row['budget_bytes'] / MIB:,.1f}",
            "" if rival_ms is None else f"x{rival_ms / plain:.3f}",
            f"{row['plan_bytes'] / MIB:,.1f}",
            f"x{plan_ms / plain:.3f}",
            "" if rival_ms is None else f"{plan_ms / rival_ms - 1:+.1%}",
            f"x{row['predicted_ms'] / plain:.3f}",
            f"x{row['host_ms'] / plain:.3f}",
            f"{row['gap']:.2%}",
            "yes" if kept(row) else "**no**",
        ]
        yield f"| {' | '.join(cells)} |"


def page(rows: list[dict[str, Any]], device: str) -> str:
    """The result as Markdown."""
    where = ", ".join(f"{k} {v}" for k, v in gpu_tables.environment(device).items())
    good = sum(map(kept, rows))
    lines = [
        "# Real steps on a GPU: plans beside checkpointing by hand",
        "",
        f"`python -m benchmarks.gpu_rivals`: {where}",
        "",
        f"{good} of {len(rows)} plans keep the peak of their rival and are at most"
        f" {SLOWER:.0%} slower. A rival's measured peak is the plan's budget. Steps are"
        " medians over that of the plain step, all in turn; *noise*: of a second plain"
        " step. *predicted*: the plan's step; *of the host*: what it takes to issue the"
        " ops, which decides where that is longer than the kernels.",
        "",
        *table(rows),
    ]
    return "\n".join(lines) + "\n"


def cases(names: Iterable[str], device: str) -> Iterator[Case]:
    """The cases by name, as `full/bert-base:bf16`; `fp32` is no autocast."""
    known = full_size() if device == "cuda" else zoo()
    for name in names:
        model, _, kind = name.partition(":")
        found: Any = known[model]
        work = found() if callable(found) else found
        autocast = torch.bfloat16 if kind == "bf16" else None
        yield Case(name=name, work=on_device(work, device), autocast=autocast)


def main() -> int:
    """Measure all; the exit code tells whether every plan was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    every = "gpt2-small:bf16,bert-base:bf16,resnet50:bf16,resnet50:fp32,vit-b-16:fp32"
    default = ",".join(f"full/{name}" for name in every.split(","))
    parser.add_argument("--models", default=default)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in cases(options.models.split(","), options.device):
        begin = time.monotonic()
        rows += measure(case, options.device, options.rounds)
        options.output.write_text(page(rows, options.device))
        print(f"{case.name}: {time.monotonic() - begin:.0f} s", flush=True)
    print(options.output.read_text())
    return 0 if all(map(kept, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
