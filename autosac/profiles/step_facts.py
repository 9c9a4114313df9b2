"""What a plan knows of its step, against which training is held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autosac.profiles.traced_step import TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a plan knows of its step; by default nothing, as files of older plans do.

    Attributes:
        finds_gradients: Those of earlier steps are there as it begins, or may be.
        autocast: Type that forward and loss autocast to, '' for none.
        forward_bytes: What the ops of the model's forward make, added up.
        headroom_bytes: What its peak leaves to another loss: see `headroom.py`.
        keeps_graph: Some backward pass of it keeps its graph,
        calls_again: or it calls the model several times,
        trains_inputs: or inputs require gradients.
        backends: Settings of ``torch.backends`` that its kernels depend on.
    """

    finds_gradients: bool = True
    autocast: str | None = None
    forward_bytes: int | None = None
    headroom_bytes: Mapping[str, int] | None = None
    keeps_graph: bool | None = None
    calls_again: bool | None = None
    trains_inputs: bool | None = None
    backends: Mapping[str, bool] | None = None


def step_facts(
    profile: TracedStep, headroom_bytes: Mapping[str, int] | None
) -> StepFacts:
    """What is known of a traced step, and of the room that a plan leaves in it."""
    tape = profile.tape
    return StepFacts(
        finds_gradients=any(
            s.born == 0 and s.category == "gradient" for s in tape.storages
        ),
        autocast=profile.autocast,
        forward_bytes=profile.forward_bytes,
        headroom_bytes=headroom_bytes,
        keeps_graph=any(one.used_again for one in tape.saved),
        calls_again=sum(call.module == 0 for call in tape.calls) > 1,
        trains_inputs=profile.trains_inputs,
        backends=profile.backends,
    )
