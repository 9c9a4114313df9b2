"""Every model of the zoo in every training setting: `python -m benchmarks.zoo`.

For each of them four plans, between the least feasible budget and the plain step's
peak. Simulation and dry run must agree byte for byte (`autosac.plan` raises if they
do not); then three real steps with and without the plan: measured peak, prediction
with and without calibration, every bit of the training state. Exits with 1 if a
promise is broken.

    python -m benchmarks.zoo [--models gpt2,llama] [--settings adamw] [--jobs 2]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autosac import OptimizerInBackward, calibrate, floor
from autosac.planning.make_plan import make_plan
from autosac.units.matching import chosen_by
from autosac.verification.recipes import Recipe
from autosac.verification.verifying import verify_each
from benchmarks.environment import environment
from benchmarks.models import Workload, zoo
from benchmarks.models.workload import profile_of

RESULTS = Path(__file__).parent / "results"
SHARES = (0.0, 0.3, 0.6, 0.9)  # of the way from the floor to the plain step's peak
STEPS = 3
CALIBRATED_ERROR, MODELLED_ERROR = 0.002, 0.02  # largest of a predicted peak


# --- settings -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained.

    Attributes:
        make_optimizer: Parameters -> optimizer; None for the workload's own.
        change: Done to the model before training.
        options: Options of `autosac.profile` and `autosac.verify`.
    """

    make_optimizer: Callable[[Iterable[nn.Parameter]], Any] | None = None
    change: Callable[[nn.Module], object] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)


class Adapter(nn.Module):
    """A linear layer, frozen, with a trained low-rank update (Hu et al., 2021)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.weight = linear.weight  # some models ask a layer for its type
        self.bias = linear.bias
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.down = nn.Linear(linear.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, linear.out_features, bias=False, **like)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) + self.up(self.down(self.dropout(x)))
        return out


def add_adapters(model: nn.Module) -> None:
    """Freeze a model; give its linear layers low-rank updates."""
    model.requires_grad_(False)
    num_adapters = 0
    for module in list(model.modules()):
        if isinstance(module, (nn.MultiheadAttention, Adapter)):
            continue  # reads the weights of its layer itself
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Adapter(child, 4))
                num_adapters += 1
    if not num_adapters:  # a model of convolutions only: train the biases
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))


def freeze_first_half(model: nn.Module) -> None:
    """Train only the later half of the parameters."""
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)


def settings() -> dict[str, Setting]:
    """All settings, by the name that the command line takes."""
    optim = torch.optim
    return {
        "adamw": Setting(make_optimizer=optim.AdamW),
        "sgd, clipped": Setting(
            make_optimizer=lambda p: optim.SGD(p, lr=0.01),
            options={"clip_grad_norm": 1.0},
        ),
        "momentum foreach, accumulated": Setting(
            make_optimizer=lambda p: optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
            options={"accumulate": 2},
        ),
        "adam fused, half frozen": Setting(
            make_optimizer=lambda p: optim.Adam(p, fused=True),
            change=freeze_first_half,
        ),
        "adafactor, bf16": Setting(
            make_optimizer=optim.Adafactor, options={"autocast": torch.bfloat16}
        ),
        "adamw in backward": Setting(
            make_optimizer=lambda p: OptimizerInBackward(p, optim.AdamW)
        ),
        "adapters, adamw": Setting(change=add_adapters, make_optimizer=optim.AdamW),
    }


def with_setting(work: Workload, setting: Setting) -> Workload:
    """The workload, trained that way."""

    def make_model() -> nn.Module:
        model = work.make_model()
        setting.change(model)
        return model

    def make_optimizer(model: nn.Module) -> Any:
        if setting.make_optimizer is None:
            return work.make_optimizer(model)
        return setting.make_optimizer(list(model.parameters()))

    return Workload(
        name=work.name,
        make_model=make_model,
        make_inputs=work.make_inputs,
        loss_fn=work.loss_fn,
        make_optimizer=make_optimizer,
        blocks=work.blocks,
        loss_bytes=work.loss_bytes,
    )


# --- cells --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One budget of one model in one setting.

    Attributes:
        model: Name of the model.
        setting: Name of the setting.
        budget_bytes: The cap.
        baseline_bytes: Predicted peak of the plain step.
        predicted_bytes: Predicted peak with the plan; simulation and dry run agree.
        modelled_bytes: The same without calibration.
        measured_bytes: Peak of the third real step.
        differences: Entries of the training state that are not bit-identical.
        recompute_share: Predicted recompute time over the step's time.
        num_units: AC units of the plan.
        gap: Optimality gap of the plan.
    """

    model: str
    setting: str
    budget_bytes: int
    baseline_bytes: int
    predicted_bytes: int
    modelled_bytes: int
    measured_bytes: int
    differences: tuple[str, ...]
    recompute_share: float
    num_units: int
    gap: float

    @property
    def error(self) -> float:
        """Predicted over measured peak, less one."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def modelled_error(self) -> float:
        """The same without calibration."""
        return self.modelled_bytes / self.measured_bytes - 1


PROMISES: dict[str, Callable[[Cell], bool]] = {
    "real peak <= budget": lambda c: c.measured_bytes <= c.budget_bytes,
    f"calibrated prediction within {CALIBRATED_ERROR:.1%}": (
        lambda c: abs(c.error) <= CALIBRATED_ERROR
    ),
    f"uncalibrated prediction within {MODELLED_ERROR:.0%}": (
        lambda c: abs(c.modelled_error) <= MODELLED_ERROR
    ),
    "bit-identical after three steps": lambda c: not c.differences,
}


def run(job: tuple[str, str]) -> list[Cell]:
    """All budgets of one model in one setting."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*functorch.*")
    name, setting_name = job
    setting = settings()[setting_name]
    work = with_setting(zoo()[name], setting)
    modelled = profile_of(work, **setting.options)
    traced = calibrate(modelled)
    lowest, baseline = floor(traced), traced.baseline_peak_bytes
    budgets = [int(lowest + share * (baseline - lowest)) for share in SHARES]
    plans = [make_plan(traced, budget_bytes) for budget_bytes in budgets]
    gc.collect()
    recipe = Recipe(
        make_model=work.make_model,
        make_inputs=work.make_inputs,
        make_optimizer=work.make_optimizer,
        loss_fn=work.loss_fn,
        steps=STEPS,
        timing_rounds=1,
        extra_bytes=work.loss_bytes,
        **setting.options,
    )
    return [
        Cell(
            model=name,
            setting=setting_name,
            budget_bytes=plan.budget_bytes,
            baseline_bytes=baseline,
            predicted_bytes=plan.peak_bytes,
            modelled_bytes=modelled.simulator.peak_bytes(
                chosen_by(modelled.tape, modelled.candidates, plan.op_policies)
            ),
            measured_bytes=verification.measured_peak_bytes,
            differences=verification.differences,
            recompute_share=plan.recompute_ms / plan.step_ms,
            num_units=len(plan.policy),
            gap=plan.optimality_gap,
        )
        for plan, verification in zip(plans, verify_each(plans, recipe), strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(zoo()))
    parser.add_argument("--settings", nargs="+", default=list(settings()))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--update", action="store_true", help="keep what is not run from the last table"
    )
    chosen = parser.parse_args()
    jobs = [
        (model, setting)
        for model in chosen.models.split(",")
        for setting in chosen.settings
    ]
    started = time.perf_counter()
    cells: list[Cell] = []
    earlier = _read(chosen.output / "zoo.json") if chosen.update else []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.jobs, mp_context=context) as pool:
        for job, of_job in zip(jobs, pool.map(run, jobs), strict=True):
            print(*job, *(_short(cell) for cell in of_job), flush=True)
            cells += of_job
            # After every job: an interruption loses little.
            every = _merged(earlier, cells)
            minutes = (time.perf_counter() - started) / 60
            part = f", {len(cells)} of them" if len(cells) < len(every) else ""
            summary = f"{len(every)} plans{part} in a run of {minutes:.0f} minutes"
            _write(every, chosen.output, summary)
    return 0 if all(kept(cell) for cell in cells for kept in PROMISES.values()) else 1


# --- tables -------------------------------------------------------------------


def _read(path: Path) -> list[Cell]:
    """The cells of an earlier table."""
    record = json.loads(path.read_text())
    return [
        Cell(**{**cell, "differences": tuple(cell["differences"])})
        for cell in record["cells"]
    ]


def _merged(earlier: list[Cell], cells: list[Cell]) -> list[Cell]:
    """Cells that were run, and earlier ones of other models and settings."""
    again = {(cell.model, cell.setting) for cell in cells}
    kept = [cell for cell in earlier if (cell.model, cell.setting) not in again]
    models, kinds = list(zoo()), list(settings())

    def place(cell: Cell) -> tuple[int, int, int]:
        return models.index(cell.model), kinds.index(cell.setting), cell.budget_bytes

    return sorted(kept + cells, key=place)


def _short(cell: Cell) -> str:
    broken = [name for name, kept in PROMISES.items() if not kept(cell)]
    return f"{cell.error:+.3%}/{cell.modelled_error:+.2%}" + "".join(
        f" BROKEN: {name} {cell.differences}" for name in broken
    )


def _write(cells: list[Cell], folder: Path, summary: str) -> None:
    where = environment()
    lines = [
        "# Every model in every training setting\n",
        ", ".join(f"{name} {value}" for name, value in where.items()),
        f"\n{summary}. Simulated and dry-run"
        " peak agree byte for byte in all of them: another plan is never returned.\n",
        *_summary(cells),
        "\nBy model: promises kept over plans made, largest errors of the predicted"
        " peak.\n",
        *_table(cells, "model"),
        "\nBy setting.\n",
        *_table(cells, "setting"),
    ]
    record = {"environment": where, "cells": [asdict(cell) for cell in cells]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "zoo.md").write_text("\n".join(lines) + "\n")
    (folder / "zoo.json").write_text(json.dumps(record) + "\n")


def _summary(cells: list[Cell]) -> Iterator[str]:
    yield "| promise | kept |"
    yield "| --- | --- |"
    for name, kept in PROMISES.items():
        count = sum(map(kept, cells))
        verdict = "PASS" if count == len(cells) else "**FAIL**"
        yield f"| {name} | {verdict} {count}/{len(cells)} |"


def _table(cells: list[Cell], key: str) -> Iterator[str]:
    titles = (*PROMISES, "calibrated error", "uncalibrated error", "peak saved")
    yield f"| {key} | {' | '.join(titles)} |"
    yield f"| --- |{' --- |' * len(titles)}"
    for name in Counter(getattr(cell, key) for cell in cells):
        own = [cell for cell in cells if getattr(cell, key) == name]
        counts = [f"{sum(map(kept, own))}/{len(own)}" for kept in PROMISES.values()]
        saved = max(1 - cell.measured_bytes / cell.baseline_bytes for cell in own)
        fields = (
            *counts,
            f"{max((c.error for c in own), key=abs):+.3%}",
            f"{max((c.modelled_error for c in own), key=abs):+.2%}",
            f"{saved:.0%}",
        )
        yield f"| {name} | {' | '.join(fields)} |"


if __name__ == "__main__":
    sys.exit(main())
