"""From a step and a budget to the units of a plan and their policies."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from math import inf
from typing import Any

from autosac.errors import InfeasibleBudgetError
from autosac.planning import offload_advice
from autosac.planning.dry_running import confirm, is_quick, leave_out, wants_dry_run
from autosac.planning.eager_steps import fastest
from autosac.profiles.profile import Profile
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes, format_parts
from autosac.solvers import sac
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice
from autosac.solving.solve_options import SolveOptions
from autosac.step.arguments import warn
from autosac.units import curves

_WORTH_IT = 0.1  # share of the peak that a module keeps which one would rerun
SWEEP_GAP = 1.5e-2  # of a solve: 64 of them should not outlast a few plans


def evenly(first_bytes: int, last_bytes: int, n: int) -> list[int]:
    """So many budgets from one to another, evenly spaced."""
    return [first_bytes + (last_bytes - first_bytes) * i // (n - 1) for i in range(n)]


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
    enough, or none that is as fast, it is one of least peak, which leaves most.

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
    if not profile.redrawn or chosen == {}:
        return chosen, bound_ms
    low = lowest(profile)
    least_bytes = profile.peak_bytes(low)
    if chosen is None:
        fits = least_bytes <= budget_bytes
        return _roomiest(profile, low, budget_bytes, options) if fits else (None, 0.0)
    time_ms = recompute_ms(chosen)
    if time_ms - bound_ms > options.relative_gap * time_ms:
        of_floor, _ = _roomiest(profile, low, least_bytes, options)
        chosen = min(chosen, of_floor, key=recompute_ms)
    return chosen, bound_ms


def _roomiest(
    profile: TracedStep, low: Choice, budget_bytes: int, options: SolveOptions
) -> tuple[Choice, float]:
    """As `_choose`, where none leaves enough: the fastest of those that leave most.

    Args:
        profile: A step whose sizes vary.
        low: The choice of least peak.
        budget_bytes: Cap on the peak.
        options: For the MILP.
    """
    least_bytes = profile.peak_bytes(low)
    chosen, bound_ms = profile.chooser.choose(least_bytes, options)
    if budget_bytes > least_bytes:
        bound_ms = profile.chooser.choose(budget_bytes, options)[1]
    if chosen is None or recompute_ms(low) <= recompute_ms(chosen):
        return low, bound_ms
    leaves_less = profile.room_bytes(chosen) > profile.room_bytes(low)
    return low if leaves_less else chosen, bound_ms


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


def least_budget(profile: TracedStep) -> int:
    """The least budget that some plan keeps, in bytes."""
    return profile.budget_for(profile.peak_bytes(_confirmed_lowest(profile)))


def exact_lowest(profile: Profile, budget_bytes: int) -> Choice | None:
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
    parts, hint = format_parts(composition), refusal(profile)
    of_offload = offload_advice.of_infeasible(profile, chosen, budget_bytes)
    to_least = "that"
    if least_bytes > peak_bytes:
        to_least = f"{least_bytes} bytes, which leaves some to the GPU's allocator"
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}):"
        f" the lowest peak is {peak_bytes} bytes ({format_bytes(peak_bytes)}), made of"
        f" {parts}. Raise the budget to {to_least}, or use a smaller batch.{hint}"
        f"{of_offload}",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=least_bytes,
        composition=composition,
        advice=hint.strip(),
    )


def warn_if_all_refused(profile: TracedStep) -> None:
    """Warn if much could be recomputed, but no module can be an AC unit."""
    is_said = bool(profile.left_out)  # or the user's wish
    if not (profile.choosable or is_said) and (why := refusal(profile, _WORTH_IT)):
        warn(f"The floor is the peak without a plan, for nothing can be rerun:{why}")


def refusal(profile: TracedStep, least_share: float = 0.0) -> str:
    """Why the module cannot be an AC unit that keeps most of those that cannot.

    Args:
        profile: Whose modules.
        least_share: '' if that is a smaller share of the peak.
    """
    refused = profile.units.refused
    kept = {m.fqn: m.activation_bytes or 0 for m in profile.figures.modules}
    fqn = max(refused, key=lambda fqn: kept.get(fqn, 0), default=None)
    if fqn is None or kept.get(fqn, 0) < least_share * profile.baseline_peak_bytes:
        return ""
    return f" `{fqn}` cannot be an AC unit: {refused[fqn]}."


def price_ms_per_byte(profile: TracedStep, budget_bytes: int) -> float | None:
    """What one more byte of budget saves at the margin, in milliseconds per step.

    The dual price of memory in the LP relaxation of the MILP; None below its floor.
    """
    return profile.chooser.price_ms_per_byte(profile.within(budget_bytes))


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
