"""What is left under a plan's peak where training may do otherwise than its step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autosac.profiles.traced_step import TracedStep
from autosac.units.policies import Policy
from autosac.units.unit import Unit


def room_bytes(
    profile: TracedStep, chosen: Mapping[Unit, Policy]
) -> dict[str, int] | None:
    """Bytes that may be taken at some places of a step for the planned peak to hold.

    Returns:
        *forward*: besides what is planned, until forward has returned. *loss*: of a
        loss by its graph (`LossMemory`), while backward goes through it: what lies
        between memory as forward ends and the peak; or what the planned loss takes by
        its graph and what is left then, if that is more. *handed*: of its gradients as
        backward comes to the model, likewise. None if not known, or if it varies from
        step to step.
    """
    tape = profile.tape
    first = tape.phases.get("model backward")
    varies = profile.redrawn or any(op.decides for op in tape.ops)
    if tape.loss is None or first is None or varies or profile.has_collectives:
        return None
    in_backward = [op.start for op in tape.ops if op.phase == "backward"]
    begin = max((start for start in in_backward if start < first), default=first)
    timeline = profile.simulator.timeline(chosen)
    loss = tape.phases["loss"]
    keys = np.array([0, loss, loss + 1, begin, first + 1]) * profile.simulator.span
    live = timeline.most_from(keys)
    forward, before, of_loss, of_model = (timeline.peak_bytes - live[:4]).tolist()
    return {
        "forward": forward,
        "loss": max(before, of_loss + tape.loss.peak_bytes),
        "handed": of_model + tape.loss.handed_bytes,
    }
