"""Plans for a GPU that is here, whose host may be slower than its kernels.

An eager step takes as long as the kernels or as the host that issues them, whichever is
longer, and a host follows the units of a plan op by op (`costs.host`). The least of the
longer of two sums is that of a weighted one, for the weight at which both are equally
long (Lagrangian duality), and each weighted sum is a lower bound. So the step is
planned for weights between the kernels' alone and the host's alone, by halving, and the
plan is the choice that is fastest by the longer sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autosac.costs.host import host_ms, host_program
from autosac.planning.spelling import spell_out
from autosac.profiles.traced_step import TracedStep
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice
from autosac.units.matching import chosen_by

_WEIGHTS = 3  # that are planned for besides the kernels' alone: a limit of work

Choose = Callable[[TracedStep], tuple[Choice, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What an eager step takes under a plan, in ms.

    Attributes:
        step_ms: Time of the step,
        added_ms: and what of it the plan adds,
        bound_ms: of which so much is proven to be needed.
    """

    step_ms: float
    added_ms: float
    bound_ms: float


def times_of(profile: TracedStep, chosen: Choice, bound_ms: float) -> Times:
    """The times of a choice.

    Args:
        profile: The step.
        chosen: Units and their policies.
        bound_ms: Lower bound on what a choice adds to the step.
    """
    if not counts_host(profile):
        added_ms = recompute_ms(chosen)
        step_ms = profile.baseline_ms + added_ms
    else:
        step_ms = _step_ms(profile, chosen)
        added_ms = max(0.0, step_ms - _plain_ms(profile))
    return Times(step_ms=step_ms, added_ms=added_ms, bound_ms=min(bound_ms, added_ms))


def counts_host(profile: TracedStep) -> bool:
    """Whether the speed of the host is known: it was measured with the kernels'."""
    is_gpu = profile.device.type == "cuda"
    return is_gpu and profile.calibrated and profile.device.host_op_ms > 0


def fastest(
    profile: TracedStep,
    chosen: Choice,
    bound_ms: float,
    budget_bytes: int,
    choose: Choose,
) -> tuple[Choice, float]:
    """The fastest choice by kernels and host, and the bound on what it adds.

    Args:
        profile: The step.
        chosen: The fastest choice by kernels alone,
        bound_ms: and the bound on what it adds to their time.
        budget_bytes: Cap on the peak.
        choose: Such a choice and bound for a step of other times.
    """
    if not counts_host(profile):
        return chosen, bound_ms
    plain_ms = _plain_ms(profile)
    least_ms = profile.baseline_ms + bound_ms
    found = [chosen]
    if _host_decides(profile, chosen) and _is_simple(profile):
        for weight, other, other_ms in _weighed(profile, choose):
            found.append(other)
            both = (1 - weight) * profile.baseline_ms + weight * profile.host_ms
            least_ms = max(least_ms, both + other_ms)
        within = profile.within(budget_bytes)
        known = profile.known_eager
        found += [one for peak_bytes, one in known if peak_bytes <= within]
        known += [(profile.peak_bytes(one), one) for one in found]
    best = min(found, key=lambda one: (_step_ms(profile, one), recompute_ms(one)))
    return best, max(0.0, least_ms - plain_ms)


def _weighed(
    profile: TracedStep, choose: Choose
) -> Iterator[tuple[float, Choice, float]]:
    """Weights of the host's time, what is chosen by each sum, and its bound."""
    low, high, weight = 0.0, 1.0, 1.0
    for _ in range(_WEIGHTS):
        step = _weighted(profile, weight)
        other, bound_ms = choose(step)
        spelled = spell_out(step, other)
        chosen = chosen_by(profile.tape, profile.candidates, spelled)
        yield weight, chosen, bound_ms
        if _host_decides(profile, chosen):
            low = weight
        else:
            high = weight
        if low == high:
            return
        weight = (low + high) / 2


def _weighted(profile: TracedStep, weight: float) -> TracedStep:
    """The step whose ops take a weighted sum of the kernels' time and the host's."""
    if weight not in profile.with_host:
        op_ms = tuple((1 - weight) * ms for ms in profile.op_ms)
        device = replace(
            profile.device, program=host_program(profile.device).scaled(weight)
        )
        costs = replace(profile.costs, op_ms=op_ms)
        step = replace(profile.traced(), costs=costs, device=device)
        vars(step).update(left_out=profile.left_out, simulator=profile.simulator)
        profile.with_host[weight] = step
    return profile.with_host[weight]


def _is_simple(profile: TracedStep) -> bool:
    """Whether sizes are the same in every step and nothing is in far memory."""
    return profile.plain is None and not profile.redrawn


def _host_decides(profile: TracedStep, chosen: Choice) -> bool:
    return _host_ms(profile, chosen) > profile.baseline_ms + recompute_ms(chosen)


def _host_ms(profile: TracedStep, chosen: Choice) -> float:
    return host_ms(profile.tape, profile.device, spell_out(profile, chosen))


def _step_ms(profile: TracedStep, chosen: Choice) -> float:
    kernels_ms = profile.baseline_ms + recompute_ms(chosen)
    return max(kernels_ms, _host_ms(profile, chosen))


def _plain_ms(profile: TracedStep) -> float:
    return max(profile.baseline_ms, profile.host_ms)
