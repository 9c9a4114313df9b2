"""What is left under a plan's peak where training may do otherwise than its step."""

from __future__ import annotations

import numpy as np

from autosac.profiles.traced_step import TracedStep
from autosac.step.ledger import Timeline


def headroom_bytes(
    profile: TracedStep, timeline: Timeline, places: int = 1
) -> dict[str, int] | None:
    """Bytes that may be taken at some places of a step for the planned peak to hold.

    Args:
        profile: The step.
        timeline: Its memory under a plan,
        places: so many keys of which are one of its simulator's.

    Returns:
        *kept*: of an output that a loop keeps until the next one is there: besides what
        is planned in the optimizer's step and until forward has returned. *loss*: of a
        loss by its graph (`LossMemory`), while backward goes through it: what lies
        between memory as forward ends and the peak; or what the planned loss takes by
        its graph and what is left then, if that is more. *handed*: of its gradients as
        backward comes to the model, likewise. None if nothing is known; where steps
        vary, an output has all room, and nothing is said of a loss.
    """
    tape = profile.tape
    first = tape.phases.get("model backward")
    if tape.loss is None or first is None or profile.has_collectives:
        return None
    if profile.redrawn or any(op.decides for op in tape.ops):
        return {"kept": timeline.peak_bytes}
    in_backward = [op.start for op in tape.ops if op.phase == "backward"]
    begin = max((start for start in in_backward if start < first), default=first)
    loss, end = tape.phases["loss"], tape.phases.get("optimizer", tape.num_ticks)
    ticks = np.array([0, loss, loss + 1, begin, first + 1, end])
    keys = ticks * (profile.simulator.span * places)
    room = (timeline.peak_bytes - timeline.most_from(keys)).tolist()
    forward, before, of_loss, of_model, _, optimizer = room
    return {
        "kept": min(forward, optimizer),
        "loss": max(before, of_loss + tape.loss.peak_bytes),
        "handed": of_model + tape.loss.handed_bytes,
    }
