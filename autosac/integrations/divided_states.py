"""Optimizers of which every process keeps a part of the state (ZeRO).

One plan is for all processes: for the part that takes most, whichever process plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from autosac._compat_distributed import shards
from autosac.errors import InfeasibleBudgetError
from autosac.planning.make_plan import lowest_plan
from autosac.planning.plans import Plan
from autosac.profiles.profile import Profile


def largest_parts(optimizer: Any) -> list[Any]:
    """Those parts of an optimizer of which one takes most of all, in any step.

    Which one that is depends on what a step makes besides: as much as the part has, or
    as its largest parameter.

    Args:
        optimizer: What a process steps, or None.

    Returns:
        Optimizers, that with most parameters first; what was passed if it has no parts.
    """
    parts = shards(optimizer)
    if not parts:
        return [optimizer]
    largest: list[torch.optim.Optimizer] = []
    most_bytes = -1
    for part in sorted(parts, key=lambda part: -sum(_sizes(part))):
        part_bytes = max(_sizes(part), default=0)
        if part_bytes > most_bytes:
            largest.append(part)
            most_bytes = part_bytes
    return largest


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of the parameters that an optimizer trains."""
    return [
        parameter.nbytes
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]


def plan_of_parts(
    profiled: Callable[..., AbstractContextManager[Profile]],
    parts: Sequence[Any],
    plan_step: Callable[[Profile], Plan],
    *,
    real_step: bool,
    planned: Sequence[Plan] = (),
) -> list[Plan]:
    """The plan of one batch for the first part of an optimizer, with all their peaks.

    Processes with other parts keep less all the time, and may take more in the step of
    the optimizer, whose peak no policy lowers.

    Args:
        profiled: Profiles the step with an ``optimizer``, by a ``real_step`` or not.
        parts: Of the optimizer, that with most parameters first.
        plan_step: Plans the step with one part.
        real_step: As in `calibrated_if_present`.
        planned: Plans that there are; none is made for a batch that has one of them.

    Raises:
        InfeasibleBudgetError: `plan_step` raised it; for the part that needs most.
    """
    plans: list[Plan] = []
    errors: list[InfeasibleBudgetError] = []
    for part in parts:
        is_first = part is parts[0]
        how = {"optimizer": part, "real_step": real_step and is_first}
        with profiled(**how) as step:
            if any(step.signature in plan.signatures for plan in planned):
                return []
            try:
                plan = plan_step(step)
            except InfeasibleBudgetError as error:
                errors.append(error)
                continue
            plans.append(plan if is_first else lowest_plan(step, plan.budget_bytes))
    if errors:
        raise max(errors, key=lambda error: error.lowest_peak_bytes)
    return [_with_peak(plans[0], max(plan.peak_bytes for plan in plans))]


def _with_peak(plan: Plan, peak_bytes: int) -> Plan:
    """A plan with a peak of more temporary memory."""
    more_bytes = peak_bytes - plan.peak_bytes
    if not more_bytes:
        return plan
    temporary_bytes = plan.composition.get("temporary", 0) + more_bytes
    composition = {**plan.composition, "temporary": temporary_bytes}
    return replace(plan, peak_bytes=peak_bytes, composition=composition)
