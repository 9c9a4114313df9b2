"""One model in one setting, in a process of its own: every budget and every rival.

    python -m benchmarks.comparing.settings_job --model zoo/gpt2 --setting "h100 bf16"
        --budgets 32 --output job.json

The file is written anew after every budget, so that what was done in time counts.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import autosac
from autosac.errors import AutosacError
from benchmarks.environment import cpu_s
from benchmarks.models import Workload, zoo
from benchmarks.models.drawn import NotBuiltError, build
from benchmarks.models.full_size import full_size
from benchmarks.rivals import Rival, rivals

Record = dict[str, Any]
_T = TypeVar("_T")
# What autosac raises on purpose, each with one sentence.
_INSTALLED = re.compile(r"\S*/(site-packages|lib/python3\.\d+)/")
_IMAGES = 64  # in a batch of models of their own size: nothing is allocated


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and in which precision a step is planned to run.

    Attributes:
        device: As `autosac.profile` takes it.
        autocast: As `autosac.profile` takes it.
        expandable: Whether the allocator's segments are.
    """

    device: str
    autocast: torch.dtype | None
    expandable: bool = False


SETTINGS = {
    "cpu fp32": Setting(device="cpu", autocast=None),
    "cpu bf16": Setting(device="cpu", autocast=torch.bfloat16),
    "h100 fp32": Setting(device="h100", autocast=None),
    "h100 bf16": Setting(device="h100", autocast=torch.bfloat16),
    "h100 fp32 expandable": Setting(device="h100", autocast=None, expandable=True),
    "h100 bf16 expandable": Setting(
        device="h100", autocast=torch.bfloat16, expandable=True
    ),
}


def workload(name: str) -> Workload:
    """A model by its name: of the zoo, of full size, or drawn.

    Raises:
        NotBuiltError: It cannot be built here.
    """
    if name.startswith("zoo/"):
        return zoo()[name.removeprefix("zoo/")]
    if name.startswith("full/"):
        return full_size()[name]()
    return build(name, num_images=_IMAGES)


def profiled(work: Workload, setting: Setting, *, calibrate: bool) -> autosac.Profile:
    """The traced step; on the meta device, unless its times are to be measured.

    A model whose constructor or trace needs numbers lies on the CPU instead.
    """
    if calibrate and setting.device == "cpu":
        return autosac.calibrate(_profiled(work, setting, "cpu"), progress=False)
    try:
        return _profiled(work, setting, "meta")
    except Exception:  # the libraries raise all sorts there; the CPU's error counts
        return _profiled(work, setting, "cpu")


def _profiled(work: Workload, setting: Setting, where: str) -> autosac.Profile:
    torch.manual_seed(0)
    with torch.device(where):
        model = work.make_model()
    return autosac.profile(
        model,
        work.make_inputs(),
        loss_fn=work.loss_fn,
        optimizer=work.make_optimizer(model),
        device=setting.device,
        autocast=setting.autocast,
        allocator=autosac.AllocatorSettings(expandable_segments=setting.expandable),
    )


def run(
    name: str, setting_name: str, num_budgets: int, *, calibrate: bool
) -> Iterator[Record]:
    """The record of a job, again and again as it grows."""
    record: Record = {
        "model": name,
        "setting": setting_name,
        "num_budgets": num_budgets,
        "calibrated": calibrate,
        "status": "unfinished",
        "cells": [],
    }
    yield record
    with _errors_in(record):
        work = workload(name)
        record["title"] = work.name
        setting = SETTINGS[setting_name]
        traced, record["profile_s"] = _timed(
            lambda: profiled(work, setting, calibrate=calibrate)
        )
        floor_bytes, record["floor_s"] = _timed(lambda: autosac.floor(traced))
        on_meta = any(p.is_meta for p in traced.step.model.parameters())
        record |= {
            "where": "meta" if on_meta else "cpu",
            "num_ops": len(traced.tape.ops),
            "num_candidates": len(traced.candidates),
            "baseline_bytes": traced.baseline_peak_bytes,
            "baseline_ms": traced.baseline_ms,
            "floor_bytes": floor_bytes,
        }
        yield record
        systems, record["rivals_s"] = _timed(lambda: rivals(traced))
        fractions = [k / (num_budgets - 1) for k in range(num_budgets)]
        for fraction in reversed(fractions):  # no plan may lean on a smaller budget's
            record["cells"].insert(0, _cell(traced, floor_bytes, fraction, systems))
            yield record
        record["status"] = "done"
    yield record


@contextmanager
def _errors_in(record: Record) -> Iterator[None]:
    """What is raised inside becomes the job's status and its reason."""
    try:
        yield
    except NotBuiltError as error:
        record |= {"status": "not built", "reason": _sentence(error)}
    except AutosacError as error:
        record |= {"status": "refused", "reason": _sentence(error)}
    except Exception as error:  # that is the finding
        record |= {"status": "raw error", "reason": _sentence(error)}


def _sentence(error: Exception) -> str:
    """An error in one line; files by their place in their package."""
    text = _INSTALLED.sub("", " ".join(str(error).split()))
    if isinstance(error, (AutosacError, NotBuiltError)):
        return text
    return f"{type(error).__name__}: {text}"


def _timed(do: Callable[[], _T]) -> tuple[_T, dict[str, float]]:
    """What something gives, and how long it took."""
    cpu, wall = cpu_s(), time.perf_counter()
    result = do()
    return result, {
        "cpu": cpu_s() - cpu,
        "wall": time.perf_counter() - wall,
    }


def budget_at(profile: autosac.Profile, floor_bytes: int, fraction: float) -> int:
    """Bytes a fraction of the way from the floor to the plain step's peak."""
    return floor_bytes + int(fraction * (profile.baseline_peak_bytes - floor_bytes))


def _cell(
    profile: autosac.Profile,
    floor_bytes: int,
    fraction: float,
    systems: tuple[Rival, ...],
) -> Record:
    """Our plan at a budget and the cheapest setting of every rival that fits."""
    budget_bytes = budget_at(profile, floor_bytes, fraction)
    fitting = {rival.name: rival.at(budget_bytes) for rival in systems}
    cell: Record = {
        "fraction": fraction,
        "budget_bytes": budget_bytes,
        "rivals": {
            name: {"setting": setting.label, "recompute_ms": setting.recompute_ms}
            for name, setting in fitting.items()
            if setting is not None
        },
    }
    try:
        plan, seconds = _timed(
            lambda: autosac.plan(profile, memory_budget=budget_bytes, dry_run=False)
        )
    except Exception as error:  # a budget that fails is a finding, others go on
        return cell | {"error": _sentence(error)}
    return cell | {
        "peak_bytes": plan.peak_bytes,
        "recompute_ms": plan.recompute_ms,
        "bound_ms": plan.bound_ms,
        "gap": plan.optimality_gap,
        "seconds": seconds,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run one job."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparing.settings_job")
    parser.add_argument("--model", required=True)
    parser.add_argument("--setting", choices=list(SETTINGS), required=True)
    parser.add_argument("--budgets", type=int, required=True)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of models, about themselves
    logging.disable(logging.ERROR)
    for record in run(
        options.model, options.setting, options.budgets, calibrate=options.calibrate
    ):
        part = options.output.with_suffix(".part")
        part.write_text(json.dumps(record) + "\n")
        part.replace(options.output)  # whoever reads it finds all of it


if __name__ == "__main__":
    main()
