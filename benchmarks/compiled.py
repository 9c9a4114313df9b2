"""`autosac.compile` beside the `activation_memory_budget` of torch.compile.

    python -m benchmarks.compiled [--cases gpt2:aot_eager,unet:inductor]

Eight budgets in bytes, evenly spaced from the peak without recomputation down to the
least feasible one, and eight fractions, each of a freshly compiled model that returns
its loss. Peaks of forward and backward are real, by the allocator's events, with
parameters, buffers, inputs and gradients. Exits with 1 if a peak of `autosac.compile`
is above its budget, or rises where the budget falls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import nn

import autosac
from autosac.storages import storage_bytes
from autosac.verification.measuring import (
    State,
    capture_state,
    differences,
    measure_peak,
)
from benchmarks.environment import MIB, environment
from benchmarks.graph_plans import MODELS, make_model
from benchmarks.models import Workload

# With TorchInductor the U-Net takes minutes for every budget.
_CASES = "gpt2:aot_eager,unet:aot_eager,gpt2:inductor"


class WithLoss(nn.Module):
    """A model and its loss: one graph."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.model = make_model(work)
        self.loss_fn = work.loss_fn

    def forward(self, inputs: Any) -> torch.Tensor:
        """The loss."""
        if isinstance(inputs, dict):
            output = self.model(**inputs)
        else:
            output = self.model(inputs)
        loss: torch.Tensor = (
            output.loss if self.loss_fn is None else self.loss_fn(output)
        )
        return loss


class Trained(NamedTuple):
    """State after three steps, real peak of the last one, and its compiled model."""

    state: State
    peak_bytes: int
    compiled: Any


def train(work: Workload, compile_model: Callable[[nn.Module], Any]) -> Trained:
    """Compile a fresh model and run forward and backward three times."""
    torch.compiler.reset()
    model, inputs = WithLoss(work), work.make_inputs()
    compiled = compile_model(model)

    def step() -> torch.Tensor:
        model.zero_grad()
        torch.manual_seed(1)
        loss = compiled(inputs)
        loss.backward()
        return loss.detach()

    def warm_up() -> None:
        step()
        model.zero_grad()

    step()
    given = inputs.values() if isinstance(inputs, dict) else [inputs]
    held = storage_bytes([*model.parameters(), *model.buffers(), *given])
    loss, peak_bytes = measure_peak(
        step,
        device="cpu",
        persistent_bytes=held + work.loss_bytes,
        warm_up=warm_up,
    )
    return Trained(capture_state(model, None, loss), peak_bytes, compiled)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit code tells whether every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled")
    parser.add_argument("--cases", default=_CASES, help="model:backend, ...")
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    lines = ["# Compiled models: budgets in bytes and fractions\n"]
    where = environment()
    lines.append(", ".join(f"{name} {value}" for name, value in where.items()))
    lines.append(__doc__.partition("\n\n")[2].partition("\n\n")[2].rstrip())
    kept = True
    for case in options.cases.split(","):
        name, _, backend = case.partition(":")
        table, is_kept = compare(MODELS[name](), backend, options.budgets)
        lines += table
        kept = kept and is_kept
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "compiled.md").write_text("\n".join(lines) + "\n")
    return 0 if kept else 1


def compare(work: Workload, backend: Any, count: int) -> tuple[list[str], bool]:
    """Both ways to ask for memory, side by side."""
    plain = train(work, lambda model: torch.compile(model, backend=backend))

    def compile_model(model: nn.Module, budget: int) -> Any:
        return autosac.compile(model, memory_budget=budget, backend=backend)

    try:
        train(work, lambda model: compile_model(model, 1000))
        raise AssertionError("A budget of 1000 bytes was met.")
    except autosac.InfeasibleBudgetError as error:
        low = error.lowest_peak_bytes
    ample = train(work, lambda model: compile_model(model, 2**40))
    high = autosac.compiled_plans(ample.compiled)[-1].peak_bytes
    table = [
        f"\n## {work.name}, {backend}\n",
        f"Plain torch.compile: {plain.peak_bytes / MIB:.2f} MiB.\n",
        "| budget MiB | real MiB | within | like plain | recompute ms |"
        " fraction | real MiB | like plain |",
        "|" + " ---: |" * 8,
    ]
    print("\n".join(table), flush=True)
    peaks, kept = [], True
    for k in range(count):
        budget = high - (high - low) * k // (count - 1)
        ours = train(work, lambda model, b=budget: compile_model(model, b))
        peaks.append(ours.peak_bytes)
        fraction = 1 - k / (count - 1)
        with torch._functorch.config.patch(activation_memory_budget=fraction):
            theirs = train(work, lambda model: torch.compile(model, backend=backend))
        is_within = ours.peak_bytes <= budget and peaks == sorted(peaks, reverse=True)
        kept = kept and is_within
        plan = autosac.compiled_plans(ours.compiled)[-1]
        fields = (
            f"{budget / MIB:.2f}",
            f"{ours.peak_bytes / MIB:.2f}",
            "yes" if is_within else "**NO**",
            _likeness(plain.state, ours.state),
            f"{plan.graph.recompute_ms:.2f}",
            f"{fraction:.2f}",
            f"{theirs.peak_bytes / MIB:.2f}",
            _likeness(plain.state, theirs.state),
        )
        table.append(f"| {' | '.join(fields)} |")
        print(table[-1], flush=True)
    return table, kept


def _likeness(expected: State, actual: State) -> str:
    """Bit-identical, or the largest difference of a gradient relative to its norm."""
    if not differences(expected, actual):
        return "bits"
    worst = 0.0
    for name, value in expected.items():
        if name.startswith("gradient"):
            norm = max(value.norm().item(), 1e-12)
            worst = max(worst, (actual[name] - value).norm().item() / norm)
    return f"{worst:.0e}"


if __name__ == "__main__":
    sys.exit(main())
