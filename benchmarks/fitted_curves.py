"""Exact trade-off curves against pwlf fits: `python -m benchmarks.fitted_curves`.

Three models on the meta device, planned under three budgets with exact points and on
fits of up to 1, 2, 3 and 4 segments: recompute time, its bound and CPU seconds of a
plan. Nothing that one plan finds is known to the next. Fits are made once for all
budgets, and their time stands by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torchvision

from autosac.cli.demo import GPT, next_token_loss
from autosac.planning.make_plan import floor, make_plan
from autosac.profiles.profile import Profile, profile
from autosac.solvers.curves import fitting
from benchmarks.environment import cpu_s, environment

RESULT = Path(__file__).parent / "results" / "fitted_curves.md"
SEGMENTS = (None, 1, 2, 3, 4)


def gpt() -> Profile:
    """A GPT of 24 layers."""
    tokens = torch.randint(2048, (1, 1024))
    with torch.device("meta"):
        model = GPT(num_layers=24, width=1024, num_heads=16, length=1024)
    return _profiled(model, tokens, loss_fn=next_token_loss(tokens))


def vision(make_model: Callable[[], torch.nn.Module]) -> Profile:
    """A model of torchvision; its large units have curves of many points."""
    with torch.device("meta"):
        model = make_model()
        images = torch.zeros(16, 3, 224, 224)
    return _profiled(model, images, loss_fn=torch.sum)


def _profiled(model: torch.nn.Module, inputs: Any, **options: Any) -> Profile:
    return profile(model, inputs, device="h100", **options)


MODELS: dict[str, Callable[[], Profile]] = {
    "GPT, 24 layers of width 1024": gpt,
    "ResNet-50": lambda: vision(torchvision.models.resnet50),
    "DenseNet-121": lambda: vision(torchvision.models.densenet121),
}


def fresh(step: Profile) -> Profile:
    """The step without what plans of it have found; points and simulator are kept."""
    copy = replace(step)
    kept = ("simulator", "units", "chains", "slices", "candidates", "fronts")
    for name in (*kept, "formulation", "rules"):
        vars(copy)[name] = getattr(step, name)
    _ = copy.chooser
    return copy


def table(name: str, step: Profile) -> list[str]:
    """Rows of a model."""
    lowest, baseline = floor(step), step.baseline_peak_bytes
    sizes = [len(curve.points.freed_bytes) for curve in step.formulation.curves]
    fitting.fit.cache_clear()
    begin = cpu_s()
    for number in SEGMENTS[1:]:
        step.formulation.fitted(number)
    fits_s = cpu_s() - begin
    rows = [
        f"\n## {name}\n",
        f"{len(sizes)} candidates, {len({id(c) for c in step.formulation.curves})}"
        f" distinct curves of up to {max(sizes)} points; all fits"
        f" {fits_s:.1f} CPU s.\n",
        "| budget | segments | recompute ms | bound ms | CPU s |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for share in (0.1, 0.5, 0.9):
        budget = int(lowest + share * (baseline - lowest))
        for segments in SEGMENTS:
            copy = fresh(step)
            begin = cpu_s()
            plan = make_plan(copy, budget, segments=segments, dry_run=False)
            seconds = cpu_s() - begin
            rows.append(
                f"| {share:.0%} | {segments or 'exact'} | {plan.recompute_ms:.3f}"
                f" | {plan.bound_ms:.3f} | {seconds:.2f} |"
            )
    return rows


def main() -> None:
    """Plan all models and write the table."""
    told = ", ".join(f"{key} {value}" for key, value in environment().items())
    lines = [
        "# Exact and fitted curves\n",
        told + "\n",
        "Budget: share of the way from the floor to the baseline. Times are modelled"
        " for an H100.",
    ]
    for name, make in MODELS.items():
        lines += table(name, make())
        print("\n".join(lines[-18:]), flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
