"""What a step takes on a batch that is larger than the one that it was traced on."""

from __future__ import annotations

from autosac.profiles.memory_history import history
from autosac.profiles.traced_step import TracedStep
from autosac.solving.rules_of_thumb import Choice
from autosac.step.tape import CATEGORIES

LASTING = ("parameter", "buffer", "optimizer", "gradient")  # whatever the batch
_RULES = 16  # so many choices of the greedy path are compared, besides the others
_IS_LASTING = [category in LASTING for category in CATEGORIES]


def grown_peak(traced: TracedStep, choice: Choice, growth: float) -> int:
    """Peak in bytes where all that does not last is so many times as large."""
    live = history(traced, choice).live_bytes
    lasting = live[_IS_LASTING].sum(axis=0)
    return int((lasting + growth * (live.sum(axis=0) - lasting)).max())


def most_frugal_choice(traced: TracedStep, growth: float) -> Choice:
    """The known choice of least peak for a batch that takes so many times as much.

    That of least peak for the batch itself may recompute next to nothing: its peak may
    be that of gradients and optimizer.
    """
    usable = set(traced.choosable)
    rules = traced.rules.some(_RULES)
    choices = [choice for choice in rules if choice.keys() <= usable]
    return min(
        (traced.chooser.lowest(), *choices),
        key=lambda choice: grown_peak(traced, choice, growth),
    )
