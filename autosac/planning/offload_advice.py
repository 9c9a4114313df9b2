"""What turning offload on would buy: simulated, without solving for it."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from autosac.profiles.restricting import restricted
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes, format_ms
from autosac.solving.incumbents import far_bytes, recompute_ms
from autosac.solving.rules_of_thumb import Choice

_DEAR = 0.05  # of a step's time
_WORTH = 0.97  # of the time without


def lines(
    step: TracedStep, budget_bytes: int, plain_ms: float, step_ms: float
) -> Iterator[str]:
    """Of a plan for a GPU that recomputes much: what the same budget takes with it.

    A choice is found and simulated; planning with offload may find a better one.

    Args:
        step: The step that was planned.
        budget_bytes: Cap on the peak.
        plain_ms: What the plan spends on recomputation,
        step_ms: and on the whole step.
    """
    offloading = _offloading(step)
    is_dear = step.device.type == "cuda" and plain_ms >= _DEAR * step_ms
    if offloading is None or not is_dear:
        return
    choice = _cheapest(offloading, budget_bytes)
    if choice is not None and recompute_ms(choice) <= _WORTH * plain_ms:
        yield (
            f"`offload`=True takes {_described(choice)} at most under this budget,"
            f" instead of {format_ms(plain_ms)}"
        )


def of_infeasible(step: TracedStep, lowest: Choice, budget_bytes: int) -> str:
    """Whether offload makes a budget feasible, as a sentence; '' if it lowers nothing.

    Args:
        step: The step, which may not offload.
        lowest: Its choice of least peak.
        budget_bytes: Cap on the peak, below that.
    """
    if not (offloading := _offloading(step)):
        return ""
    choice = offloading.moved_blocks.lowest(lowest)
    if offloading.streaming is not None:
        choice = min(choice, offloading.streaming.lowest(), key=step.peak_bytes)
    peak_bytes = step.peak_bytes(choice)
    if peak_bytes >= step.peak_bytes(lowest):
        return ""
    if peak_bytes > budget_bytes:
        return (
            f" `offload`=True lowers that to {peak_bytes} bytes"
            f" ({format_bytes(peak_bytes)}) or less."
        )
    choices = [choice, *filter(None, [_cheapest(offloading, budget_bytes)])]
    best = min(choices, key=recompute_ms)
    return f" `offload`=True fits: it takes {_described(best)} at most."


def _cheapest(offloading: TracedStep, budget_bytes: int) -> Choice | None:
    """A fast choice with offload within a budget; None if none is known."""
    chosen = offloading.moved_blocks.cheapest(budget_bytes)
    if offloading.streaming is None:
        return chosen
    most_ms = inf if chosen is None else recompute_ms(chosen)
    return offloading.streaming.cheapest(budget_bytes, most_ms) or chosen


def _offloading(step: TracedStep) -> TracedStep | None:
    if not step.may_offload:
        return None
    return restricted(step, cap=step.cap, offload=True)


def _described(choice: Choice) -> str:
    waits_ms = sum(unit.waits_ms(policy) for unit, policy in choice.items())
    return (
        f"{format_ms(recompute_ms(choice))} of recomputation and waiting"
        f" ({format_ms(waits_ms)} of it for {format_bytes(far_bytes(choice))} in far"
        " memory)"
    )
