"""Who chooses what a step recomputes: with the choices that are known before."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal

from autosac.simulation.simulator import Simulator
from autosac.solving.choosing import Chooser
from autosac.solving.curve_points import formulate_in_usual_blocks
from autosac.solving.incumbents import Incumbents, most_rules
from autosac.tracing.collecting import no_collections

if TYPE_CHECKING:  # steps have their choosers
    from autosac.profiles.traced_step import TracedStep

Kind = Literal["chooser", "roomy_chooser"]  # of a step


def chooser_of(step: TracedStep, simulator: Simulator, kind: Kind) -> Chooser:
    """A chooser of a step.

    Args:
        step: The step.
        simulator: Says what fits.
        kind: Which of the step's choosers it is.
    """
    with no_collections():
        if step.plain is not None:  # which knows the rules of thumb
            return Chooser(
                simulator,
                step.formulation,
                Incumbents(simulator, ()),
                getattr(step.plain, kind),
                step.moved_blocks,
                tighter=partial(_with_less_far_memory, weakref.ref(step), kind),
            )
        incumbents = Incumbents(simulator, step.rules.some(most_rules(simulator)))
        usual = None
        if step.tape.device_type == "cuda":
            own = step.simulator, step.rules, step.formulation
            usual = partial(formulate_in_usual_blocks, *own)
        return Chooser(simulator, step.formulation, incumbents, usual=usual)


def _with_less_far_memory(
    ref: weakref.ref[TracedStep], kind: Kind
) -> Iterator[Chooser]:
    """Choosers of the same step with less far memory that were asked before."""
    step = ref()
    if step is None or step.plain is None:
        return
    most_bytes = math.inf if step.host_bytes is None else step.host_bytes
    for host_bytes, other in step.plain.with_offload.items():
        if host_bytes is not None and host_bytes < most_bytes and kind in vars(other):
            yield vars(other)[kind]
