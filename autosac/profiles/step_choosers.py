"""Who chooses what a step recomputes: with the choices that are known before."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Literal, Protocol

from autosac.simulation.simulator import Simulator
from autosac.solving.choosing import Chooser
from autosac.solving.curve_points import formulate_in_usual_blocks
from autosac.solving.formulation import Formulation
from autosac.solving.incumbents import Incumbents, most_rules
from autosac.solving.moved_blocks import MovedBlocks
from autosac.solving.rules_of_thumb import Rules
from autosac.step.tape import Tape
from autosac.tracing.collecting import no_collections

Kind = Literal["chooser", "roomy_chooser"]  # of a step


class Step(Protocol):
    """What choosers ask of their step: see `TracedStep`."""

    @property
    def tape(self) -> Tape: ...
    @property
    def plain(self) -> Step | None: ...
    @property
    def host_bytes(self) -> int | None: ...
    @property
    def simulator(self) -> Simulator: ...
    @property
    def rules(self) -> Rules: ...
    @property
    def formulation(self) -> Formulation: ...
    @property
    def moved_blocks(self) -> MovedBlocks: ...
    @property
    def with_offload(self) -> Mapping[int | None, Step]: ...


def chooser_of(step: Step, simulator: Simulator, kind: Kind) -> Chooser:
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


def _with_less_far_memory(ref: weakref.ref[Step], kind: Kind) -> Iterator[Chooser]:
    """Choosers of the same step with less far memory that were asked before."""
    step = ref()
    if step is None or step.plain is None:
        return
    most_bytes = math.inf if step.host_bytes is None else step.host_bytes
    for host_bytes, other in step.plain.with_offload.items():
        if host_bytes is not None and host_bytes < most_bytes and kind in vars(other):
            yield vars(other)[kind]
