"""Real steps side by side: peak, every bit, and CPU time relative to the plain step."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autosac.step.training_step import normalize_inputs, training_step
from autosac.verification.verifying import (
    AppliesToModel,
    Recipe,
    Verification,
    verify_each,
)


def measure(
    plans: Sequence[AppliesToModel], recipe: Recipe, rounds: int
) -> list[tuple[Verification, float]]:
    """What real steps showed about each plan, and its time over the plain step's.

    Args:
        plans: Anything that applies to the model.
        recipe: How to train; without an optimizer or with one.
        rounds: Timed steps of each plan and of the plain model, taken in turn.
    """
    verifications = verify_each(plans, replace(recipe, timing_rounds=1))
    gc.collect()
    return list(zip(verifications, cpu_ratios(plans, recipe, rounds), strict=True))


def cpu_ratios(
    plans: Sequence[AppliesToModel], recipe: Recipe, rounds: int
) -> list[float]:
    """CPU time of a step under each plan over that of the plain one.

    Medians of rounds in which all take their turn; CPU time, because others may use
    the machine. One model at a time computes, all are alive.
    """
    steps = [_Stepper(recipe, plan) for plan in (None, *plans)]
    for step in steps:
        step.run()  # creates optimizer state, warms caches
    times = [[step.timed_s() for step in steps] for _ in range(rounds)]
    medians = [statistics.median(row) for row in zip(*times, strict=True)]
    return [median / medians[0] for median in medians[1:]]


class _Stepper:
    """A model in training, with or without a plan."""

    def __init__(self, recipe: Recipe, plan: AppliesToModel | None) -> None:
        torch.manual_seed(recipe.seed)
        self.model = recipe.make_model()
        if plan is not None:
            plan.apply(self.model)
        make = recipe.make_optimizer
        self.optimizer = make(self.model) if make else None
        self.inputs: Any = normalize_inputs(recipe.make_inputs())
        self.recipe = recipe

    def run(self) -> None:
        training_step(
            self.model,
            *self.inputs,
            loss_fn=self.recipe.loss_fn,
            optimizer=self.optimizer,
            autocast=self.recipe.autocast,
            accumulate=self.recipe.accumulate,
            clip_grad_norm=self.recipe.clip_grad_norm,
        )
        self.model.zero_grad(set_to_none=True)

    def timed_s(self) -> float:
        started = time.process_time()
        self.run()
        return time.process_time() - started
