"""Several stages on one rank: the step that the MILP of interleaved 1F1B plans.

While one stage computes, the others hold what their micro-batches in flight do. So the
step is a *window* for each stage, one behind the other: one of its micro-batches
beside others of its own, as in `in_flight`, and beside those of the other stages. What
these hold is linear in the choice of points as well: each of their units frees it all
along the window. A schedule has the stages' micro-batches in flight in several numbers
while a stage computes; the MILP has those that hold most where nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from autosac.pipelines.in_flight import (
    InFlightSimulator,
    change_at,
    once_more,
    with_others,
)
from autosac.simulation.simulator import Simulator
from autosac.solvers import sac
from autosac.solving.formulation import Formulation
from autosac.step.ledger import Ledger, Timeline
from autosac.step.tape import IntArray
from autosac.units.policies import Policy
from autosac.units.unit import Unit


@dataclass(frozen=True, eq=False)
class Window:
    """One stage at work.

    Attributes:
        simulator: Of one of its micro-batches beside the others that it has in flight.
        beside: Of each stage of the rank how many it has in flight then, but 0 of
            itself.
        always_bytes: What is on the rank besides all the time.
    """

    simulator: InFlightSimulator
    beside: tuple[int, ...]
    always_bytes: int = 0


class SharedRankSimulator(Simulator):
    """Replays the windows of a rank's stages one behind the other.

    Args:
        windows: Of each stage.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows
        super().__init__(windows[0].simulator.tape)
        self._simulators = [window.simulator for window in windows]
        self.span = max(one.span for one in self._simulators)
        # Of each window the first tick, and the end of all.
        lengths = (one.tape.num_ticks + 1 for one in self._simulators)
        self.ticks = [*accumulate(lengths, initial=0)]

    def ledger(
        self, chosen: Mapping[Unit, Policy], *, workspaces: bool = True
    ) -> Ledger:
        """All that is allocated in the windows, and what other stages hold in each."""
        parts = self.split(chosen)
        ledgers, held = zip(
            *(
                one.with_held(part, workspaces=workspaces)
                for one, part in zip(self._simulators, parts, strict=True)
            ),
            strict=True,
        )
        columns = []
        for w, (window, one) in enumerate(zip(self.windows, ledgers, strict=True)):
            columns.append(self._moved(one, w))
            begin, end = self.ticks[w], self.ticks[w + 1]
            stop = begin + window.simulator.tape.phases["optimizer"]
            beside = sum(n * own for n, own in zip(window.beside, held, strict=True))
            always = one.constant_bytes + window.always_bytes
            keys = np.array([[begin, stop], [begin, end]]) * self.span
            sizes = np.array([[beside], [always]])
            columns.append(np.concatenate([keys, sizes], axis=1))
        born, died, nbytes = np.concatenate(columns).T
        return Ledger(
            born=born, died=died, nbytes=nbytes, end=self.ticks[-1] * self.span
        )

    def split(self, chosen: Mapping[Unit, Policy]) -> list[dict[Unit, Policy]]:
        """A choice of units of all stages, by stage."""
        parts: list[dict[Unit, Policy]] = [{} for _ in self.windows]
        for unit, policy in chosen.items():
            parts[self._places[unit]][unit] = policy
        return parts

    @property
    def num_storages(self) -> int:
        """Of all windows."""
        return sum(one.num_storages for one in self._simulators)

    @cached_property
    def _places(self) -> dict[Unit, int]:
        return {
            unit: place
            for place, one in enumerate(self._simulators)
            for unit in one.profile.candidates
        }

    def _moved(self, one: Ledger, w: int) -> IntArray:
        """Entries of a window at its place; shape (n, 3): from, to, bytes."""
        span, begin, end = self._simulators[w].span, self.ticks[w], self.ticks[w + 1]
        columns = []
        for keys in (one.born, one.died):
            moved = (begin + keys // span) * self.span + keys % span
            columns.append(np.clip(moved, begin * self.span, end * self.span))
        return np.stack([*columns, one.nbytes], axis=1)

    def true_peak_bytes(self, chosen: Mapping[Unit, Policy]) -> int:
        """What is asked of the allocator; see `RankReplay`, which counts so too."""
        return self.peak_bytes(chosen)

    def true_timeline(self, chosen: Mapping[Unit, Policy]) -> Timeline:
        """Likewise."""
        return self.timeline(chosen)


def of_windows(
    simulator: SharedRankSimulator,
    host_bytes: int | None = None,
    num_there: Sequence[int] = (),
) -> Formulation:
    """The MILP's numbers of a rank's windows.

    Args:
        simulator: Of the rank.
        host_bytes: Most bytes in far memory; None for as many as one likes.
        num_there: Most micro-batches of each stage that have theirs there at once.
    """
    windows, ticks = simulator.windows, simulator.ticks
    apart = [with_others(window.simulator) for window in windows]
    positions = [*accumulate((len(own.edges) for own in apart), initial=0)]
    firsts = [*accumulate((len(own.units) for own in apart), initial=0)]
    edges = np.concatenate(
        [own.edges + t for own, t in zip(apart, ticks, strict=False)]
    )
    live = simulator.ledger({}).after_ticks(ticks[-1], simulator.span)
    units: list[sac.Unit] = []
    holds: list[sac.Hold] = []
    for s, (window, own) in enumerate(zip(windows, apart, strict=True)):
        moment, _ = window.simulator.moments
        elsewhere = [
            (other.beside[s], range(positions[w], positions[w] + stop))
            for w, other in enumerate(windows)
            if other.beside[s]
            for _, stop in [other.simulator.moments]
        ]
        alone = window.simulator.profile.formulation
        for unit, one in zip(own.solver_units, alone.solver_units, strict=True):
            change = change_at(one, moment)
            working = [(q + positions[s], extras) for q, extras in unit.working]
            for count, places in elsewhere:
                held = tuple((count * change).tolist())
                working += [(q, held) for q in places]
            units.append(
                replace(
                    unit,
                    parent=None if unit.parent is None else unit.parent + firsts[s],
                    freed_from=unit.freed_from + positions[s],
                    freed_until=unit.freed_until + positions[s],
                    working=tuple(working),
                )
            )
        holds += (_moved(hold, firsts[s], positions[s]) for hold in own.holds)
        for count, places in elsewhere:
            again = (once_more(hold, moment, places, count) for hold in alone.holds)
            holds += (_moved(hold, firsts[s], 0) for hold in again if hold is not None)
    formulation = Formulation(
        units=tuple(unit for own in apart for unit in own.units),
        curves=tuple(curve for own in apart for curve in own.curves),
        solver_units=tuple(units),
        base_bytes=tuple(np.maximum.reduceat(live[:-1], edges).tolist()),
        holds=tuple(holds),
        edges=edges,
    )
    if host_bytes is None:
        return formulation
    pairs = zip(num_there, apart, strict=True)
    times = {unit: n for n, own in pairs for unit in own.units}
    return formulation.under_host(host_bytes, times)


def _moved(hold: sac.Hold, units: int, positions: int) -> sac.Hold:
    """A hold of units that come later, at later positions."""

    def later(
        by_point: tuple[tuple[int, tuple[int, ...]], ...],
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple(
            (u + units, tuple(q + positions for q in places)) for u, places in by_point
        )

    return replace(
        hold,
        held_from=hold.held_from + positions,
        holders=tuple((u + units, end + positions) for u, end in hold.holders),
        freed_by=later(hold.freed_by),
        kept_by=later(hold.kept_by),
    )
