"""Real steps on the CPU that take turns: only ratios of their medians count."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

import autosac
from autosac.checkpointing import installing
from autosac.checkpointing.running_step import Step
from autosac.devices.links import Link
from autosac.devices.specs import device_spec
from autosac.errors import InfeasibleBudgetError
from autosac.planning.spelling import spell_out
from autosac.solving.rules_of_thumb import Choice
from autosac.step.training_step import normalize_inputs, training_step
from benchmarks.models import Workload

FAST_FILES = "/dev/shm"  # in memory: as fast as files get
_WARM_UP = 3

Run = Callable[[], object]
_Key = TypeVar("_Key", bound=Hashable)


def profiled(work: Workload, link: Link) -> autosac.Profile:
    """The step on the CPU, its ops timed, with some link to far memory."""
    torch.manual_seed(0)
    traced = autosac.profile(
        work.make_model(),
        work.make_inputs(),
        loss_fn=work.loss_fn,
        device=replace(device_spec("cpu"), link=link),
    )
    return autosac.calibrate(traced, progress=False)


def planned(
    profile: autosac.Profile, budget_bytes: int, *, offload: bool
) -> autosac.Plan | None:
    """The plan for a budget, None if nothing fits."""
    far = {"offload": True, "offload_dir": FAST_FILES} if offload else {}
    try:
        return autosac.plan(profile, memory_budget=budget_bytes, **far)
    except InfeasibleBudgetError:
        return None


def install(profile: autosac.Profile, choice: Choice, model: nn.Module) -> None:
    """Let a model recompute what is chosen."""
    step = Step(offload_dir=FAST_FILES)
    installing.install(model, spell_out(profile, choice), step)


def steps(work: Workload, change: Callable[[nn.Module], object]) -> Run:
    """Runs a step of a model that was changed."""
    torch.manual_seed(0)
    model, inputs = work.make_model(), normalize_inputs(work.make_inputs())
    change(model)

    def run() -> None:
        training_step(model, *inputs, loss_fn=work.loss_fn, optimizer=None)
        model.zero_grad()

    return run


def medians(runs: Mapping[_Key, Run], num_rounds: int) -> dict[_Key, float]:
    """Median milliseconds of CPU time of each, all of which take turns."""
    taken: dict[_Key, list[float]] = {key: [] for key in runs}
    gc.collect()
    for number in range(-_WARM_UP, num_rounds):
        for key, run in runs.items():
            begin = time.process_time()
            run()
            if number >= 0:
                taken[key].append(1e3 * (time.process_time() - begin))
    return {key: statistics.median(ms) for key, ms in taken.items()}
