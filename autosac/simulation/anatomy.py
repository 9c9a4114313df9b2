"""Where the memory of a step is, instant by instant, with and without a plan.

Nothing is simulated here: the allocations are those of `simulation/simulating.py`.
What is added is whose they are, how far the step's clock has come, and what runs at
the peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autosac.candidates.groups import Group
from autosac.candidates.policies import RERUN, Policy, block_policies, onward
from autosac.candidates.units import Unit
from autosac.planning.profiling import TracedStep
from autosac.tracing.tape import CATEGORIES, IntArray

RECOMPUTATION = "recomputation"  # a phase of its own, inside of backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What runs at one instant of a step.

    Attributes:
        fqn: The module it belongs to; '' for the model itself.
        phase: forward, loss, backward, recomputation or optimizer.
        op: Overload name of the op; '' if none runs.
    """

    fqn: str
    phase: str
    op: str

    def __str__(self) -> str:
        module = f"`{self.fqn}`" if self.fqn else "the model itself"
        return f"{self.phase} of {module}"


@dataclass(frozen=True, kw_only=True)
class History:
    """Live memory of a step over time.

    Attributes:
        times_ms: When each stretch of constant memory begins, ascending,
        live_bytes: and what is alive in it: shape (categories, times).
        categories: Names of the rows.
        end_ms: Time of the whole step, recomputation included.
        phases_ms: Phase -> when it begins.
        peak_index: The stretch of the peak,
        place: and what runs there.
    """

    times_ms: npt.NDArray[np.float64]
    live_bytes: IntArray
    categories: tuple[str, ...]
    end_ms: float
    phases_ms: dict[str, float]
    peak_index: int
    place: Place

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at one instant, as they are asked of the allocator."""
        return int(self.live_bytes[:, self.peak_index].sum())


@dataclass(frozen=True, slots=True)
class _Rerun:
    """A stretch of the forward pass that runs again, `begin` keys later."""

    begin: int
    unit: Unit
    groups: Sequence[Group]
    choices: str


def history(made: TracedStep, chosen: Mapping[Unit, Policy]) -> History:
    """Live memory per category of a step in which units run under policies."""
    simulator = made.simulator
    pieces, codes = simulator.allocations(chosen), simulator.categories(chosen)
    keys, position = np.unique(
        np.concatenate([pieces.born, pieces.died]), return_inverse=True
    )
    change = np.zeros((len(CATEGORIES), len(keys)), dtype=np.int64)
    half = len(pieces.born)
    np.add.at(change, (codes, position[:half]), pieces.nbytes)
    np.subtract.at(change, (codes, position[half:]), pieces.nbytes)
    live = np.cumsum(change, axis=1)
    live[CATEGORIES.index("temporary")] += simulator.number_bytes
    clock_keys, clock_ms = _clock(made, chosen)
    passed = np.searchsorted(clock_keys, keys, side="right")
    peak_index = int(live.sum(axis=0).argmax())
    return History(
        times_ms=clock_ms[passed],
        live_bytes=live,
        categories=CATEGORIES,
        end_ms=float(clock_ms[-1]),
        phases_ms={
            phase: float(clock_ms[np.searchsorted(clock_keys, tick * simulator.span)])
            for phase, tick in made.tape.phases.items()
        },
        peak_index=peak_index,
        place=_place(made, chosen, int(keys[peak_index])),
    )


def peak_place(made: TracedStep, chosen: Mapping[Unit, Policy]) -> Place:
    """What runs when most memory is alive."""
    return _place(made, chosen, made.simulator.timeline(chosen).peak_key)


def _clock(
    made: TracedStep, chosen: Mapping[Unit, Policy]
) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Keys at which ops end, and the time before the first and after each of them."""
    span, ops = made.simulator.span, made.tape.ops
    ends = [op.end * span for op in ops]
    spent = list(made.op_ms)
    for rerun in _all_reruns(made, chosen):
        for group, choice in zip(rerun.groups, rerun.choices, strict=True):
            if choice == RERUN:
                last = max(ops[rerun.unit.ops[i]].end for i in group.ops)
                ends.append(rerun.begin + last)
                spent.append(group.runtime_ms)
    order = np.argsort(np.array(ends, dtype=np.int64), kind="stable")
    times = np.concatenate([[0.0], np.cumsum(np.array(spent)[order])])
    return np.array(ends, dtype=np.int64)[order], times


def _all_reruns(made: TracedStep, chosen: Mapping[Unit, Policy]) -> list[_Rerun]:
    """All that runs again; the rules are those of `Simulator`."""
    span = made.simulator.span
    found = []
    for unit, policy in chosen.items():
        start = (unit.trigger - 1) * span + 1 - unit.call.enter
        parts = block_policies(unit, policy)
        if not parts:
            found.append(_Rerun(start, unit, unit.groups, policy.choices))
        for block, part in parts[:-1]:
            groups = (*block.unit.groups, *block.tail)
            found.append(_Rerun(start, block.unit, groups, onward(block, part)))
        if unit.glue:
            found.append(_Rerun(start, unit, unit.glue, RERUN * len(unit.glue)))
        for block, part in parts:
            begin = start
            if block.unit.trigger != unit.trigger:
                begin = (block.unit.trigger - 1) * span + 1 - block.unit.call.enter
            found.append(_Rerun(begin, block.unit, block.unit.groups, part.choices))
    return found


def _place(made: TracedStep, chosen: Mapping[Unit, Policy], key: int) -> Place:
    span, tape = made.simulator.span, made.tape
    if key % span == 0:
        for op in tape.ops:
            if op.start * span <= key <= op.end * span:
                fqn = tape.modules[op.module].fqn
                return Place(fqn=fqn, phase=op.phase, op=op.name)
        begun = [name for name, tick in tape.phases.items() if tick * span <= key]
        return Place(fqn="", phase=begun[-1] if begun else "forward", op="")
    for rerun in _all_reruns(made, chosen):
        for group, choice in zip(rerun.groups, rerun.choices, strict=True):
            for op in (tape.ops[rerun.unit.ops[i]] for i in group.ops):
                ran = rerun.begin + op.start <= key <= rerun.begin + op.end
                if choice == RERUN and ran:
                    fqn = tape.modules[op.module].fqn
                    return Place(fqn=fqn, phase=RECOMPUTATION, op=op.name)
    return Place(fqn="", phase=RECOMPUTATION, op="")
