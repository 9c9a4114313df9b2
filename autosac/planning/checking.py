"""Does a plan hold for a step? Its model, its ops one by one, its budget."""

from __future__ import annotations

import contextlib

from autosac.errors import PlanMismatchError
from autosac.kinds import check_kind, check_profile
from autosac.planning.plan_data import PlanData
from autosac.profiles.fingerprints import first_difference
from autosac.profiles.restricting import restricted
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes
from autosac.units.matching import chosen_by
from autosac.units.policies import OpPolicy, Policy
from autosac.units.unit import Unit


def check(plan: PlanData, profile: TracedStep) -> int:
    """Check a plan against a traced step, such as one of another machine or PyTorch.

    A plan for several batches is checked by what it has for the batch of the step.

    Args:
        plan: The plan, from a file or not.
        profile: The step that shall run under it.

    Returns:
        Predicted peak of this step under the plan, in bytes.

    Raises:
        PlanMismatchError: The step is of another model, device or mode, does other
            ops, or does not fit the plan's budget; names the first difference.
    """
    check_kind(plan, PlanData, name="plan", wanted="what `autosac.plan` returns")
    check_profile(profile, TracedStep)
    *others, last = plan.of(profile.signature)
    for one in others:  # for other branches, perhaps
        with contextlib.suppress(PlanMismatchError):
            return _checked(one, profile)
    return _checked(last, profile)


def _checked(plan: PlanData, profile: TracedStep) -> int:
    capped = restricted(profile, cap=plan.cap, offload=plan.offloads)
    peak_bytes = capped.peak_bytes(chosen(plan, capped))
    if peak_bytes > plan.budget_bytes:
        raise PlanMismatchError(
            f"The plan does not fit its budget here: this step peaks at {peak_bytes}"
            f" bytes ({format_bytes(peak_bytes)}) under it, above"
            f" {plan.budget_bytes} ({format_bytes(plan.budget_bytes)}). Plan again."
        )
    return peak_bytes


def chosen(plan: PlanData, profile: TracedStep) -> dict[Unit, Policy]:
    """The units of a step that a plan is for, and their policies.

    Raises:
        PlanMismatchError: As `check`, but for the budget.
    """
    difference = first_difference(plan.model, profile.model)
    if difference is not None:
        raise PlanMismatchError(f"The plan is for another model: {difference}.")
    if plan.device != profile.device.name:
        raise PlanMismatchError(
            f"The plan is for the device {plan.device}, the profile for"
            f" {profile.device.name}. Profile with `device`={plan.device!r}."
        )
    single = (*profile.units.candidates, *profile.slices)
    single += () if profile.streamed is None else (profile.streamed,)
    calls = {(unit.label, unit.call_index): unit for unit in single}
    for one in plan.op_policies:
        difference = _difference(one, calls.get((one.label, one.call_index)), profile)
        if difference is not None:
            raise PlanMismatchError(
                f"The plan is for another step: {difference}. Plan again."
            )
    try:
        return chosen_by(profile.tape, profile.choosable, plan.op_policies)
    except ValueError as error:
        raise PlanMismatchError(f"The plan is for another step: {error}") from error


def _difference(one: OpPolicy, unit: Unit | None, profile: TracedStep) -> str | None:
    """Where a call of a module departs from its op policy."""
    if one.training != profile.training:
        modes = {True: "training", False: "evaluation"}
        return f"it is for {modes[one.training]} mode, the profile for the other one"
    if unit is None:
        why = profile.units.refused.get(one.fqn, "it saves nothing for backward")
        return f"`{one.label}` cannot be an AC unit here: {why}"
    if unit.num_calls != one.num_calls:
        return (
            f"it expects {one.num_calls} calls of `{one.label}`, not {unit.num_calls}"
        )
    names = unit.op_names(profile.tape)
    if names == one.names:
        return None
    for place, (expected, name) in enumerate(zip(one.names, names, strict=False)):
        if name != expected:
            return f"op {place} of `{one.label}` is {name} here, and {expected} there"
    return f"`{one.label}` runs {len(names)} ops here, and {len(one.names)} there"
