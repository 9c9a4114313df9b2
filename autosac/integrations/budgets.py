"""What the callbacks share: plan the step of a training loop, and say so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from autosac.errors import InfeasibleBudgetError, UnsupportedError
from autosac.planning.make_plan import lowest_plan, make_plan
from autosac.planning.plans import Plan
from autosac.planning.unseen_batches import OnMismatch, check_on_mismatch
from autosac.profiles.given import calibrated_if_present
from autosac.profiles.profile import Profile, profile
from autosac.pytrees import tensors_in
from autosac.quantities import format_bytes, format_ms, parse_bytes
from autosac.step.marks import marks_of

# Losses, norms and counts that a loop keeps over a step: some scalars, and a GPU's
# allocator hands out 512 bytes for each.
_SCALARS_BYTES = 16 * 512


class BudgetCallback:
    """What a callback is told, and the plan that it made.

    Args:
        memory_budget: Cap on the peak of a step: bytes, or text such as "24GiB" or
            "80%" (of the device's memory).
        exclude: FQNs of modules that must not be AC units.
        opaque: Modules that are never run again, nor cut inside, as in `autosac.plan`.
        on_mismatch: As in `autosac.plan`.
        report: Gets a text that says what was planned.

    Attributes:
        plan: The plan of the last training; None before its first batch.
    """

    def __init__(
        self,
        memory_budget: int | str,
        *,
        exclude: tuple[str, ...] = (),
        opaque: Iterable[str | type] = (),
        on_mismatch: OnMismatch = "recompute",
        report: Callable[[str], object] = print,
    ) -> None:
        self.memory_budget = memory_budget
        self.exclude = exclude
        self.opaque = marks_of(opaque)
        self.on_mismatch = on_mismatch
        self.report = report
        self.plan: Plan | None = None
        self._undo: list[Callable[[], object]] = []


def refuse(settings: Mapping[str, object]) -> None:
    """Refuse settings of a trainer that a plan could not keep its word under.

    Args:
        settings: What to say of each -> whether it is set.

    Raises:
        UnsupportedError: With what to change.
    """
    for sentence, applies in settings.items():
        if applies:
            raise UnsupportedError(f"`MemoryBudget` cannot plan this: {sentence}.")


@contextlib.contextmanager
def forward_replaced(model: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Let a model run another ``forward`` for a while."""
    own = model.__dict__.get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def plan_loss(
    model: torch.nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    forward: Callable[[Any], Any],
    memory_budget: int | str,
    num_other_batches: int,
    on_mismatch: OnMismatch,
    **options: Any,
) -> Plan:
    """Plan the step of a training loop.

    Args:
        model: The model.
        inputs: What it is called with.
        forward: Model -> what the loop calls for the loss.
        memory_budget: Of all, in bytes or as text.
        num_other_batches: Batches like this one that the loop holds meanwhile.
        on_mismatch: As in `autosac.plan`.
        options: As in `profile`.

    Raises:
        InfeasibleBudgetError: No plan fits; the figures are those of all.
    """
    check_on_mismatch(on_mismatch)

    def held_bytes(inputs: Any) -> int:
        one_bytes = sum(t.nbytes for t in tensors_in(inputs))
        return num_other_batches * one_bytes + _SCALARS_BYTES

    def traced(model: torch.nn.Module, inputs: Any, *, real_step: bool) -> Profile:
        step_profile = profile(model, inputs, loss_fn=lambda loss: loss, **options)
        return calibrated_if_present(step_profile, real_step=real_step)

    def replan(model: torch.nn.Module, args: Any, kwargs: Any) -> Plan:
        with forward_replaced(model, forward(model)):
            step_profile = traced(model, (args, kwargs), real_step=False)
            left_bytes = budget_bytes - held_bytes((args, kwargs))
            try:
                return make_plan(step_profile, left_bytes)
            except InfeasibleBudgetError:
                return lowest_plan(step_profile, left_bytes)

    others_bytes = held_bytes(inputs)
    try:
        with forward_replaced(model, forward(model)):
            step_profile = traced(model, inputs, real_step=True)
            whole = step_profile.device.memory_bytes
            budget_bytes = parse_bytes(memory_budget, total_bytes=whole)
            plan = make_plan(step_profile, budget_bytes - others_bytes)
    except InfeasibleBudgetError as error:
        error.args = (
            f"Of `memory_budget`={memory_budget!r}, {others_bytes} bytes"
            f" ({format_bytes(others_bytes)}) are for batches and figures that the"
            f" training loop keeps besides. {error}",
        )
        error.budget_bytes += others_bytes
        error.lowest_peak_bytes += others_bytes
        raise
    again = replan if on_mismatch == "replan" else None
    return replace(plan, on_mismatch=on_mismatch, replan=again)


def checkpointing_already(model: torch.nn.Module) -> str:
    """The first module with gradient checkpointing in Transformers' manner, or ''."""
    for fqn, module in model.named_modules():
        if module.__dict__.get("gradient_checkpointing") is True:
            return fqn or type(module).__name__
    return ""


def summary(plan: Plan) -> str:
    """What a plan does, in a few lines."""
    lines = [
        f"autosac: this step needs {format_bytes(plan.peak_bytes)} of"
        f" {format_bytes(plan.budget_bytes)}, and"
        f" {format_bytes(plan.baseline_peak_bytes)} without a plan."
    ]
    if plan.policy:
        lines.append(
            f"{len(plan.policy)} modules recompute activations, which takes"
            f" {format_ms(plan.recompute_ms)} of {format_ms(plan.step_ms)} a step on"
            f" {plan.device}; `.plan` of the callback says which."
        )
    else:
        lines.append("Nothing has to be recomputed.")
    return "\n".join(lines)
