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
        *peak*, while backward goes through it: what lies between memory as forward ends
        and the planned peak, or what the planned loss takes by its graph, and what is
        left then, if that is more; and *handed*, its gradients as backward comes to the
        model, likewise. None if not known, or if it varies from step to step.
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
    keys = np.array([loss, loss + 1, begin, first + 1]) * profile.simulator.span
    before, of_loss, of_model, _ = map(int, timeline.most_from(keys))
    planned_bytes = of_loss - tape.loss.peak_bytes  # without what the graph tells of it
    return {
        "peak": timeline.peak_bytes - min(before, planned_bytes),
        "handed": timeline.peak_bytes - of_model + tape.loss.handed_bytes,
    }
