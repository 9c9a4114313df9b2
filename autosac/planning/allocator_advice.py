"""What else a program could do for PyTorch's allocator to reserve less, simulated."""

from __future__ import annotations

from dataclasses import replace

from autosac.planning.checking import chosen
from autosac.planning.plan_data import PlanData
from autosac.quantities import format_bytes

_LEAST_SHARE = 0.01  # of what is reserved; less is not worth a change
_WAYS = {
    "state_is_loaded": "make the optimizer's state before the first backward pass",
    "expandable_segments": "set PYTORCH_ALLOC_CONF=expandable_segments:True",
}


def savings(plan: PlanData) -> dict[str, int]:
    """What each way reserves less than the plan does, in bytes; only what pays.

    Args:
        plan: For a GPU, with the step that it was made for.
    """
    traced, reserved_bytes = plan.traced, plan.reserved_bytes
    if traced is None or reserved_bytes is None:
        return {}
    choice = chosen(plan, traced)
    saved = {}
    for name, way in _WAYS.items():
        if getattr(traced.allocator, name):
            continue
        settings = replace(traced.allocator, **{name: True})
        after = traced.simulator.replay(choice, settings)
        saved_bytes = reserved_bytes - after.peak_reserved_bytes
        if saved_bytes >= _LEAST_SHARE * reserved_bytes:
            saved[way] = saved_bytes
    return saved


def lines(plan: PlanData) -> list[str]:
    """The same for people."""
    return [
        f"{way}: {format_bytes(saved_bytes)} less reserved"
        for way, saved_bytes in savings(plan).items()
    ]
