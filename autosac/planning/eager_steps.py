"""Plans for a GPU that is here, whose host may be slower than its kernels.

Each pass of an eager step takes as long as its kernels or as the host that issues them,
whichever is longer. A host follows the units of a plan op by op in forward and writes
down what runs again in backward (`costs.host`). A sum of the longer of two times is at
least what any weighted mean of each pair is, and for some weights the least of both is
the same (Lagrangian duality). So the step is planned again with the host's times in
the place of the kernels' where the host decides, then with a mean of both where neither
does; the plan is what is fastest by the longer times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autosac.costs.host import HostTimes, host_program, host_times, in_forward
from autosac.errors import InfeasibleBudgetError
from autosac.planning.spelling import followed, spell_out
from autosac.profiles.traced_step import TracedStep
from autosac.solving.incumbents import recompute_ms
from autosac.solving.rules_of_thumb import Choice
from autosac.units.matching import chosen_by

_MORE_PLANS = 3  # for other weights than the kernels' alone: a limit of work

Choose = Callable[[TracedStep], tuple[Choice, float]]
Weights = tuple[float, float]  # of the host's time in forward, and in backward
_KERNELS: Weights = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimes:
    """What a step takes under a plan, in ms.

    Attributes:
        step_ms: Time of the step,
        added_ms: and what of it the plan adds,
        bound_ms: of which so much is proven to be needed.
    """

    step_ms: float
    added_ms: float
    bound_ms: float


def counts_host(profile: TracedStep) -> bool:
    """Whether the speed of the host is known: it was measured with the kernels'."""
    is_gpu = profile.device.type == "cuda"
    return is_gpu and profile.calibrated and profile.device.host_op_ms > 0


def times_of(profile: TracedStep, chosen: Choice, bound_ms: float) -> PlanTimes:
    """The times of a choice.

    Args:
        profile: The step.
        chosen: Units and their policies.
        bound_ms: Lower bound on what a choice adds to the step.
    """
    added_ms = recompute_ms(chosen)
    step_ms = profile.baseline_ms + added_ms
    if counts_host(profile):
        passes = _Passes(profile)
        step_ms = passes.step_ms(chosen)
        added_ms = max(0.0, step_ms - passes.step_ms({}))
    bound_ms = min(bound_ms, added_ms)
    return PlanTimes(step_ms=step_ms, added_ms=added_ms, bound_ms=bound_ms)


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
    passes = _Passes(profile)
    least_ms = passes.mean_ms(_KERNELS) + bound_ms
    found = [chosen]
    for weights, other, other_ms in _weighed(passes, chosen, choose):
        found.append(other)
        least_ms = max(least_ms, passes.mean_ms(weights) + other_ms)
    timed = [(passes.step_ms(one), recompute_ms(one), one) for one in found]
    best = min(timed, key=lambda one: one[:2])
    within = profile.within(budget_bytes)
    known = (one for peak_bytes, one in profile.known_eager if peak_bytes <= within)
    best = min((best, *known), key=lambda one: one[:2])
    profile.known_eager.append((profile.peak_bytes(best[2]), best))
    return best[2], max(0.0, least_ms - passes.step_ms({}))


class _Passes:
    """Kernels and host in the two passes of a step."""

    def __init__(self, profile: TracedStep) -> None:
        self.profile = profile
        pairs = zip(profile.tape.ops, profile.op_ms, strict=True)
        self._forward_ms = sum(ms for op, ms in pairs if in_forward(op))
        self._backward_ms = profile.baseline_ms - self._forward_ms
        self._host = host_times(profile.tape, profile.device)

    def _both(self, chosen: Choice) -> tuple[float, float, HostTimes]:
        units = followed(spell_out(self.profile, chosen))
        host = host_times(self.profile.tape, self.profile.device, units)
        return self._forward_ms, self._backward_ms + recompute_ms(chosen), host

    def step_ms(self, chosen: Choice) -> float:
        """Time of the step under a choice."""
        forward_ms, backward_ms, host = self._both(chosen)
        return max(forward_ms, host.forward_ms) + max(backward_ms, host.backward_ms)

    def host_decides(self, chosen: Choice) -> tuple[bool, bool]:
        """Whether it does, in forward and in backward."""
        forward_ms, backward_ms, host = self._both(chosen)
        return host.forward_ms > forward_ms, host.backward_ms > backward_ms

    def mean_ms(self, weights: Weights) -> float:
        """Weighted mean of kernels and host without a plan."""
        forward, backward = weights
        kernels_ms = (1 - forward) * self._forward_ms
        kernels_ms += (1 - backward) * self._backward_ms
        host_ms = forward * self._host.forward_ms + backward * self._host.backward_ms
        return kernels_ms + host_ms


def _weighed(
    passes: _Passes, chosen: Choice, choose: Choose
) -> Iterator[tuple[Weights, Choice, float]]:
    """Weights, what is chosen for them, and the bound on its weighted mean."""
    profile = passes.profile
    if profile.plain is not None or profile.redrawn:  # far memory, or sizes that vary
        return
    ranges = [[0.0, 1.0], [0.0, 1.0]]  # in which the best weight of each pass lies
    weights, tried = _KERNELS, {_KERNELS}
    for _ in range(_MORE_PLANS):
        decides = passes.host_decides(chosen)
        weights = (
            _next(ranges[0], weights[0], host_decides=decides[0]),
            _next(ranges[1], weights[1], host_decides=decides[1]),
        )
        if weights in tried:
            return
        tried.add(weights)
        step = _weighted(profile, weights)
        try:
            other, bound_ms = choose(step)
        except InfeasibleBudgetError:  # its search did not find what this one did
            return
        chosen = chosen_by(profile.tape, profile.candidates, spell_out(step, other))
        yield weights, chosen, bound_ms


def _next(ends: list[float], weight: float, *, host_decides: bool) -> float:
    """The weight to try next: the host's alone first, then what halves the range.

    A range is closed at an end, and opened again if the other pass changes that.
    """
    if host_decides:
        ends[0] = weight
        ends[1] = ends[1] if ends[1] > weight else 1.0
    else:
        ends[1] = weight
        ends[0] = ends[0] if ends[0] < weight else 0.0
    if host_decides and weight == 0.0:
        return ends[1]
    return (ends[0] + ends[1]) / 2


def _weighted(profile: TracedStep, weights: Weights) -> TracedStep:
    """The step whose units take weighted means: what runs again does in backward."""
    if weights not in profile.with_host:
        forward, backward = weights
        op_ms = tuple((1 - backward) * ms for ms in profile.op_ms)
        whole = host_program(profile.device)
        program = replace(
            whole,
            unit_ms=forward * whole.unit_ms,
            call_ms=forward * whole.call_ms,
            rerun_ms=backward * whole.rerun_ms,
        )
        step = replace(
            profile.traced(),
            costs=replace(profile.costs, op_ms=op_ms),
            device=replace(profile.device, program=program),
        )
        vars(step).update(left_out=profile.left_out, simulator=profile.simulator)
        profile.with_host[weights] = step
    return profile.with_host[weights]
