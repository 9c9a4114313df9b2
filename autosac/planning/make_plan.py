"""From a profile and a budget to a plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Literal, TypeVar

import torch

from autosac.devices.allocator_settings import Cap, check_cap
from autosac.errors import ArgumentError, InfeasibleBudgetError, SolverError
from autosac.kinds import read_directory
from autosac.planning.choices import (
    choose_fastest,
    exact_lowest,
    least_budget,
    lowest,
    policy_ratios,
    warn_if_all_refused,
)
from autosac.planning.dry_running import confirm, leave_out, wants_dry_run
from autosac.planning.eager_steps import times_of
from autosac.planning.headroom import headroom_bytes
from autosac.planning.plans import Plan
from autosac.planning.spelling import spell_out
from autosac.profiles.given import refuse_plan
from autosac.profiles.mistakes import warn_of_other_formulas
from autosac.profiles.profile import Profile
from autosac.profiles.restricting import restricted
from autosac.profiles.step_facts import step_facts
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes, read_host_budget
from autosac.solvers import sac
from autosac.solving.incumbents import far_bytes
from autosac.solving.rules_of_thumb import Choice
from autosac.tracing.collecting import no_collections
from autosac.units.policies import OpPolicy

_Step = TypeVar("_Step", bound=TracedStep)
Offload = bool | Literal["auto"]

_MOST_LEFT_OUT = 8  # rounds in which units are left out


def read_offload(offload: object, offload_dir: object) -> str | None:
    """Where files of far memory shall lie; refuses what `plan` cannot take for either.

    Raises:
        ArgumentError: It is none of the choices, or there is no such directory.
    """
    if offload not in (True, False, "auto"):
        raise ArgumentError(
            f"`offload` must be True, False or 'auto', got {offload!r}."
        )
    return read_directory(offload_dir)


@no_collections()
def floor(
    profile: TracedStep, *, cap: Cap | None = None, offload: bool | None = None
) -> int:
    """Least feasible budget of a profile in bytes.

    On the CPU kernels' workspaces are known once `calibrate` has measured them: the
    floor may rise by them then, and with that of `plan(model, ...)`, which does.

    Args:
        profile: The profile.
        cap: What the budget caps on a GPU, as in `plan`; None for what the budgets of
            the profile cap.
        offload: Whether what AC units keep may lie in far memory; None for only if the
            profile is of a plan that may offload.

    Raises:
        ArgumentError: Nothing of that name can be capped, or the device has no known
            link to far memory.
    """
    if not isinstance(profile, TracedStep):
        refuse_plan(profile, name="profile")
        raise ArgumentError(
            "`profile` must be what `autosac.profile(model, inputs, ...)` returns, got"
            f" {type(profile).__name__}."
        )
    if cap is not None:
        check_cap(cap)
        profile = restricted(profile, cap=cap)
    profile = restricted(profile, cap=profile.cap, offload=offload)
    least_bytes = least_budget(profile)
    warn_if_all_refused(profile)
    return least_bytes


@no_collections()
def make_plan(
    profile: TracedStep,
    budget_bytes: int,
    *,
    offload: Offload = False,
    host_bytes: int | None = None,
    offload_dir: str | None = None,
    **options: Any,
) -> Plan:
    """Choose what to recompute, and confirm it by a dry run.

    Args:
        profile: The profile.
        budget_bytes: Cap on the peak.
        offload: As in `plan`.
        host_bytes: Most bytes in far memory; None for as many as one likes.
        offload_dir: As in `plan`.
        options: ``dry_run`` as in `plan`; ``start``, what smaller budgets of a sweep
            found; and fields of `SolveOptions`.

    Raises:
        ArgumentError: The device has no known link to far memory, or more of the
            optimizer's state lies there than may.
        InfeasibleBudgetError: No plan fits.
        SolverError: The applied model's dry run does not confirm the plan.
    """
    far_state_bytes = profile.far_state_bytes
    read_host_budget(host_bytes, offload=offload or far_state_bytes)
    if host_bytes is not None and far_state_bytes > host_bytes:
        raise ArgumentError(
            f"`host_budget`={host_bytes} ({format_bytes(host_bytes)}) is less than the"
            f" {far_state_bytes} bytes ({format_bytes(far_state_bytes)}) of optimizer"
            " state that lie in far memory: raise it to that, or keep the state on the"
            " device."
        )
    if offload == "auto":
        try:
            plan = _make_plan(profile, budget_bytes, **options)
            return replace(plan, offload_dir=offload_dir)
        except InfeasibleBudgetError:
            if not profile.may_offload:
                raise
        options.pop("start", None)  # it is of the step without
    if offload:
        profile = may_offload(profile, host_bytes)
    plan = _make_plan(profile, budget_bytes, **options)
    return replace(plan, offload_dir=offload_dir)


def may_offload(profile: _Step, host_bytes: int | None = None) -> _Step:
    """The step whose units may have in far memory what they keep.

    Args:
        profile: The step.
        host_bytes: Most bytes there; None for as many as one likes.

    Raises:
        ArgumentError: The device has no known link to far memory.
    """
    return restricted(profile, cap=profile.cap, offload=True, host_bytes=host_bytes)


def _make_plan(
    profile: TracedStep,
    budget_bytes: int,
    *,
    dry_run: bool | None = None,
    start: sac.Start | None = None,
    **solving: Any,
) -> Plan:
    if not profile.calibrated:
        warn_of_other_formulas(profile.tape)
    least: Choice | None = None  # confirmed, of units of which some are none any more
    for _ in range(_MOST_LEFT_OUT):
        try:
            chosen, bound_ms = choose_fastest(
                profile, budget_bytes, start=start, **solving
            )
        except InfeasibleBudgetError:
            if least is None:
                raise
            chosen, bound_ms = least, 0.0
        policies = spell_out(profile, chosen)
        if not (wants_dry_run(profile, chosen) if dry_run is None else dry_run):
            break
        if not isinstance(profile, Profile):
            raise ArgumentError(
                "`dry_run`=True needs the model: pass the `Profile`, not the step that"
                " a plan keeps of it."
            )
        if chosen is least:
            profile.dry_runs.add(frozenset(chosen.items()))
            break
        difference = confirm(profile, chosen)
        if not difference:
            break
        least = least or exact_lowest(profile, budget_bytes)
        leave_out(profile, chosen, difference)
        start = None  # it knows of units that are none any more
    else:
        raise SolverError(difference)
    return _as_plan(profile, budget_bytes, chosen, policies, bound_ms)


def lowest_plan(profile: TracedStep, budget_bytes: int) -> Plan:
    """The plan of least peak, whether it fits a budget or not."""
    chosen = lowest(profile)
    return _as_plan(profile, budget_bytes, chosen, spell_out(profile, chosen), 0.0)


def _as_plan(
    profile: TracedStep,
    budget_bytes: int,
    chosen: Choice,
    policies: tuple[OpPolicy, ...],
    bound_ms: float,
) -> Plan:
    times = times_of(profile, chosen, bound_ms)
    room = headroom_bytes(profile, profile.simulator.timeline(chosen))
    return Plan(
        policy=policy_ratios(profile, chosen),
        op_policies=policies,
        budget_bytes=budget_bytes,
        peak_bytes=profile.peak_bytes(chosen),
        baseline_peak_bytes=profile.baseline_peak_bytes,
        recompute_ms=times.added_ms,
        step_ms=times.step_ms,
        bound_ms=times.bound_ms,
        composition=profile.composition(chosen),
        device=profile.device.name,
        calibrated=profile.calibrated,
        model=profile.model,
        torch_version=torch.__version__,
        measured_fraction=profile.calibration.measured_fraction,
        reserved_bytes=_reserved_bytes(profile, chosen),
        dry_run=frozenset(chosen.items()) in profile.dry_runs,
        signatures=(profile.signature,),
        cap=profile.cap,
        traced=profile.traced(),
        offloaded_bytes=far_bytes(chosen),
        far_state_bytes=profile.far_state_bytes,
        **asdict(step_facts(profile, room)),
        exposed_ms=sum(unit.waits_ms(policy) for unit, policy in chosen.items()),
    )


def _reserved_bytes(profile: TracedStep, chosen: Choice) -> int | None:
    if profile.device.type != "cuda":
        return None
    return profile.simulator.allocator_peak_bytes(chosen, "reserved")
