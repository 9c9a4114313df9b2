"""Where the memory of a step is, instant by instant, with and without a plan.

Nothing is simulated here: the allocations are those of `simulation/simulator.py`.
What is added is whose they are, how far the step's clock has come, and what runs at
the peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autosac.profiles.traced_step import TracedStep
from autosac.step.tape import CATEGORIES, IntArray
from autosac.units.policies import RERUN, Policy
from autosac.units.unit import Piece, Unit

RECOMPUTATION = "recomputation"  # a phase of its own, inside of backward


@dataclass(frozen=True, slots=True)
class Place:
    """What runs at one instant of a step.

    Attributes:
        fqn: The module it belongs to; '' for the model itself.
        phase: forward, loss, backward, recomputation or optimizer.
        op: Overload name of the op; '' if none runs.
        is_loss: In backward: it belongs to the loss.
    """

    fqn: str
    phase: str
    op: str
    is_loss: bool = False

    def __str__(self) -> str:
        if self.phase in ("loss", "optimizer"):
            return f"the {self.phase}"
        own = "the loss" if self.is_loss else "the model itself"
        return f"{self.phase} of {f'`{self.fqn}`' if self.fqn else own}"


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


def history(profile: TracedStep, chosen: Mapping[Unit, Policy]) -> History:
    """Live memory per category of a step in which units run under policies."""
    simulator = profile.simulator
    ledger = simulator.ledger(chosen)
    keys, live = ledger.by_row(simulator.categories(chosen), len(CATEGORIES))
    live[CATEGORIES.index("temporary")] += ledger.constant_bytes
    clock_keys, clock_ms = _clock(profile, chosen)
    passed = np.searchsorted(clock_keys, keys, side="right")
    peak_index = int(live.sum(axis=0).argmax())
    return History(
        times_ms=clock_ms[passed],
        live_bytes=live,
        categories=CATEGORIES,
        end_ms=float(clock_ms[-1]),
        phases_ms={
            phase: float(clock_ms[np.searchsorted(clock_keys, tick * simulator.span)])
            for phase, tick in profile.tape.phases.items()
        },
        peak_index=peak_index,
        place=_place(profile, chosen, int(keys[peak_index])),
    )


def peak_place(profile: TracedStep, chosen: Mapping[Unit, Policy]) -> Place:
    """What runs when most memory is alive."""
    return _place(profile, chosen, profile.simulator.timeline(chosen).peak_key)


def _clock(
    profile: TracedStep, chosen: Mapping[Unit, Policy]
) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Keys at which ops end, and the time before the first and after each of them."""
    span, ops = profile.simulator.span, profile.tape.ops
    ends = [op.end * span for op in ops]
    spent = list(profile.op_ms)
    for piece in _pieces(chosen):
        for group, choice in zip(piece.groups, piece.choices, strict=True):
            if choice == RERUN:
                last = max(ops[piece.unit.ops[i]].end for i in group.ops)
                ends.append(piece.begin(span) + last)
                spent.append(group.runtime_ms)
    for call in (call for unit in chosen for call in unit.calls):
        ends.append(call.call.exit * span)
        spent.append(call.followed_ms)
    order = np.argsort(np.array(ends, dtype=np.int64), kind="stable")
    times = np.concatenate([[0.0], np.cumsum(np.array(spent)[order])])
    return np.array(ends, dtype=np.int64)[order], times


def _pieces(chosen: Mapping[Unit, Policy]) -> Iterator[Piece]:
    """All that runs again."""
    for unit, policy in chosen.items():
        yield from unit.schedule(policy)


def _place(profile: TracedStep, chosen: Mapping[Unit, Policy], key: int) -> Place:
    span, tape = profile.simulator.span, profile.tape
    if key % span == 0:
        for op in tape.ops:
            if op.start * span <= key <= op.end * span:
                fqn = tape.modules[op.module].fqn
                begins = tape.phases.get("model backward", 0)
                is_loss = op.phase == "backward" and op.end < begins
                return Place(fqn=fqn, phase=op.phase, op=op.name, is_loss=is_loss)
        begun = [name for name, tick in tape.phases.items() if tick * span <= key]
        return Place(fqn="", phase=begun[-1] if begun else "forward", op="")
    for piece in _pieces(chosen):
        for group, choice in zip(piece.groups, piece.choices, strict=True):
            for op in (tape.ops[piece.unit.ops[i]] for i in group.ops):
                begin = piece.begin(span)
                ran = begin + op.start <= key <= begin + op.end
                if choice == RERUN and ran:
                    fqn = tape.modules[op.module].fqn
                    return Place(fqn=fqn, phase=RECOMPUTATION, op=op.name)
    return Place(fqn="", phase=RECOMPUTATION, op="")
