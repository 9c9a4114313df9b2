"""How much another loss than the planned one may take before the peak is higher."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autosac.profiles.traced_step import TracedStep
from autosac.units.policies import Policy
from autosac.units.unit import Unit


def loss_room(
    profile: TracedStep, chosen: Mapping[Unit, Policy]
) -> dict[str, int] | None:
    """What a loss may take by its graph, in bytes, for the planned peak to hold.

    Returns:
        *peak*, while backward goes through it, and *handed*, its gradients as backward
        comes to the model: those of `LossMemory`, with what lies between memory then
        and the planned peak. None if not known, or if it varies from step to step.
    """
    tape = profile.tape
    first = tape.phases.get("model backward")
    varies = profile.redrawn or any(op.decides for op in tape.ops)
    if tape.loss is None or first is None or varies or profile.has_collectives:
        return None
    in_backward = [op.start for op in tape.ops if op.phase == "backward"]
    begin = max((start for start in in_backward if start < first), default=first)
    timeline = profile.simulator.timeline(chosen)
    ticks = np.array([tape.phases["loss"], begin, first + 1])
    live = timeline.most_from(ticks * profile.simulator.span)
    room = [timeline.peak_bytes - int(live_bytes) for live_bytes in live[:2]]
    return {
        "peak": tape.loss.peak_bytes + room[0],
        "handed": tape.loss.handed_bytes + room[1],
    }
