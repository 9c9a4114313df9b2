"""From a profile and a budget to a plan."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal, TypeVar

import torch

from autosac.devices.allocator_settings import Cap, check_cap
from autosac.errors import ArgumentError, InfeasibleBudgetError, SolverError
from autosac.planning import offload_advice
from autosac.planning.dry_running import confirm, is_quick, leave_out, wants_dry_run
from autosac.planning.eager_steps import fastest, times_of
from autosac.planning.plans import Plan
from autosac.planning.room import room_bytes
from autosac.planning.spelling import spell_out
from autosac.profiles.mistakes import warn_of_other_formulas
from autosac.profiles.profile import Profile
from autosac.profiles.restricting import restricted
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes, format_parts
from autosac.solvers import sac
from autosac.solving.incumbents import far_bytes, recompute_ms
from autosac.solving.rules_of_thumb import Choice
from autosac.solving.solve_options import SolveOptions
from autosac.tracing.collecting import no_collections
from autosac.units import curves
from autosac.units.policies import OpPolicy

_Step = TypeVar("_Step", bound=TracedStep)
Offload = bool | Literal["auto"]

_MOST_LEFT_OUT = 8  # rounds in which units are left out


def price_ms_per_byte(profile: TracedStep, budget_bytes: int) -> float | None:
    """What one more byte of budget saves at the margin, in milliseconds per step.

    The dual price of memory in the LP relaxation of the MILP; None below its floor.
    """
    return profile.chooser.price_ms_per_byte(profile.within(budget_bytes))


def read_offload(offload: object, offload_dir: object) -> str | None:
    """Where files of far memory shall lie; refuses what `plan` cannot take for either.

    Raises:
        ArgumentError: It is none of the choices, or there is no such directory.
    """
    if offload not in (True, False, "auto"):
        raise ArgumentError(
            f"`offload` must be True, False or 'auto', got {offload!r}."
        )
    if offload_dir is None:
        return None
    is_path = isinstance(offload_dir, (str, os.PathLike))
    directory = os.fspath(offload_dir) if is_path else offload_dir  # type: ignore[call-overload]
    if isinstance(directory, str) and os.path.isdir(directory):
        return directory
    raise ArgumentError(
        f"`offload_dir`={directory!r} is no directory: make it, or name another."
    )


@no_collections()
def floor(
    profile: TracedStep, *, cap: Cap | None = None, offload: bool | None = None
) -> int:
    """Least feasible budget of a profile in bytes.

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
        raise ArgumentError(
            "`profile` must be what `autosac.profile(model, inputs, ...)` returns, got"
            f" {type(profile).__name__}."
        )
    if cap is not None:
        check_cap(cap)
        profile = restricted(profile, cap=cap)
    profile = restricted(profile, cap=profile.cap, offload=offload)
    return profile.budget_for(profile.peak_bytes(_confirmed_lowest(profile)))


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
        least = least or _exact_lowest(profile, budget_bytes)
        leave_out(profile, chosen, difference)
        start = None  # it knows of units that are none any more
    else:
        raise SolverError(difference)
    return _as_plan(profile, budget_bytes, chosen, policies, bound_ms)


def choose_fastest(
    profile: TracedStep,
    budget_bytes: int,
    *,
    start: sac.Start | None = None,
    **solving: Any,
) -> tuple[Choice, float]:
    """As `choose`, by the time of an eager step where its host's speed is known."""
    chosen, bound_ms = choose(profile, budget_bytes, start=start, **solving)
    by_sums = partial(choose, budget_bytes=budget_bytes, **solving)
    return fastest(profile, chosen, bound_ms, budget_bytes, by_sums)


def lowest_plan(profile: TracedStep, budget_bytes: int) -> Plan:
    """The plan of least peak, whether it fits a budget or not."""
    chosen = lowest(profile)
    return _as_plan(profile, budget_bytes, chosen, spell_out(profile, chosen), 0.0)


def choose(
    profile: TracedStep,
    budget_bytes: int,
    *,
    start: sac.Start | None = None,
    **solving: Any,
) -> tuple[Choice, float]:
    """The units of a plan with their policies, and the bound on recompute time.

    Of units of the MILP and of the whole model, streamed, it takes what is faster.
    Where sizes vary they leave room for the steps that come. Where no choice leaves
    enough, or none that is as fast, it is that of least peak, which leaves most.

    Raises:
        InfeasibleBudgetError: No plan fits.
    """
    options, within = SolveOptions(**solving), profile.within(budget_bytes)
    chosen, bound_ms = _choose(profile, within, options, start)
    if chosen is None:
        raise _infeasible(profile, _confirmed_lowest(profile), budget_bytes)
    return chosen, bound_ms


def _choose(
    profile: TracedStep,
    budget_bytes: int,
    options: SolveOptions,
    start: sac.Start | None,
) -> tuple[Choice | None, float]:
    """As `choose`, with a cap on the peak; None if no plan fits."""
    streaming = profile.streaming
    if streaming is None or profile.baseline_peak_bytes <= budget_bytes:
        return _choose_units(profile, budget_bytes, options, start)
    chosen, bound_ms = None, inf
    if not _is_low(profile, budget_bytes, options):
        chosen, bound_ms = profile.chooser.choose(budget_bytes, options, start)
    most_ms = inf if chosen is None else recompute_ms(chosen)
    streamed = streaming.cheapest(budget_bytes, most_ms)
    if streamed is not None:
        return streamed, min(bound_ms, streaming.least_ms(budget_bytes))
    if chosen is not None:
        return chosen, bound_ms
    return _choose_units(profile, budget_bytes, options, start)


def _is_low(profile: TracedStep, budget_bytes: int, options: SolveOptions) -> bool:
    """Whether no choice of units is within a budget."""
    if profile.moved_blocks.cheapest(budget_bytes) is not None:
        return False
    floor = profile.chooser.predicted_floor(options.backend)
    return floor.peak_bytes > budget_bytes


def _choose_units(
    profile: TracedStep,
    budget_bytes: int,
    options: SolveOptions,
    start: sac.Start | None,
) -> tuple[Choice | None, float]:
    """As `_choose`, where the model is not streamed."""
    chosen, bound_ms = profile.roomy_chooser.choose(budget_bytes, options, start)
    if profile.redrawn and chosen != {}:
        low = lowest(profile)
        if chosen is None and profile.peak_bytes(low) <= budget_bytes:
            return low, profile.chooser.choose(budget_bytes, options)[1]
        if chosen is not None and recompute_ms(low) < recompute_ms(chosen):
            chosen = low
    return chosen, bound_ms


def _confirmed_lowest(profile: TracedStep) -> Choice:
    """The choice of least peak among those that reruns do take as simulated.

    That of a large step is not confirmed: its one dry run is for a plan.
    """
    chosen = lowest(profile)
    if isinstance(profile, Profile) and is_quick(profile):
        while wants_dry_run(profile, chosen):
            if not (difference := confirm(profile, chosen)):
                break
            leave_out(profile, chosen, difference)
            chosen = lowest(profile)
    return chosen


def _exact_lowest(profile: Profile, budget_bytes: int) -> Choice | None:
    """The choice of least peak, if it fits and is as simulated."""
    chosen = lowest(profile)
    fits = profile.peak_bytes(chosen) <= profile.within(budget_bytes)
    return chosen if fits and not confirm(profile, chosen) else None


def lowest(profile: TracedStep) -> Choice:
    """The choice of least peak."""
    of_units = profile.chooser.lowest()
    if profile.streaming is None:
        return of_units
    return min(of_units, profile.streaming.lowest(), key=profile.peak_bytes)


def _infeasible(profile: TracedStep, chosen: Choice, budget_bytes: int) -> Exception:
    peak_bytes = profile.peak_bytes(chosen)
    least_bytes = profile.budget_for(peak_bytes)
    composition = profile.composition(chosen)
    parts, hint = format_parts(composition), _hint(profile)
    hint += offload_advice.of_infeasible(profile, chosen, budget_bytes)
    to_least = "that"
    if least_bytes > peak_bytes:
        to_least = f"{least_bytes} bytes, which leaves some to the GPU's allocator"
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}):"
        f" the lowest peak is {peak_bytes} bytes ({format_bytes(peak_bytes)}), made of"
        f" {parts}. Raise the budget to {to_least}, or use a smaller batch.{hint}",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=least_bytes,
        composition=composition,
    )


def _hint(profile: TracedStep) -> str:
    """The module that would matter most among those that cannot be AC units."""
    refused = profile.units.refused
    kept = {m.fqn: m.activation_bytes or 0 for m in profile.figures.modules}
    fqn = max(refused, key=lambda fqn: kept.get(fqn, 0), default=None)
    return "" if fqn is None else f" `{fqn}` cannot be an AC unit: {refused[fqn]}."


# --- the plan -----------------------------------------------------------------


def _as_plan(
    profile: TracedStep,
    budget_bytes: int,
    chosen: Choice,
    policies: tuple[OpPolicy, ...],
    bound_ms: float,
) -> Plan:
    times = times_of(profile, chosen, bound_ms)
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
        autocast=profile.autocast,
        forward_bytes=profile.forward_bytes,
        room_bytes=room_bytes(profile, chosen),
        keeps_graph=any(one.used_again for one in profile.tape.saved),
        trains_inputs=profile.trains_inputs,
        backends=profile.backends,
        calls_again=sum(call.module == 0 for call in profile.tape.calls) > 1,
        finds_gradients=any(
            s.born == 0 and s.category == "gradient" for s in profile.tape.storages
        ),
        exposed_ms=sum(unit.waits_ms(policy) for unit, policy in chosen.items()),
    )


def _reserved_bytes(profile: TracedStep, chosen: Choice) -> int | None:
    if profile.device.type != "cuda":
        return None
    return profile.simulator.allocator_peak_bytes(chosen, "reserved")


def policy_ratios(profile: TracedStep, chosen: Choice) -> dict[str, float]:
    """Share of each module's activation memory that is recomputed, over all calls."""
    most: dict[str, int] = defaultdict(int)
    freed: dict[str, int] = defaultdict(int)
    for unit in (*profile.units.candidates, *profile.slices):
        most[unit.label] += unit.activation_bytes
    for unit, policy in chosen.items():
        for call, part in () if unit.is_streamed else unit.by_call(policy):
            left = call.activation_bytes - curves.kept(call, part)
            freed[call.label] += max(left, 0)
    return {fqn: nbytes / max(most[fqn], 1) for fqn, nbytes in freed.items()}
