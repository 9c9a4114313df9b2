"""One micro-batch beside others in flight: the step that a stage's MILP plans.

Others hold exactly what the stage keeps between its forward and its backward, under the
same policies. So at every position until the optimizer begins

    live(q) = live_one(q) + count * (live_one(m) - live_one(0))

with m the moment when backward begins. Both terms are linear in the choice of points:
each unit frees `count` times what it frees at m, all along, and holds of several units
come once more likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from autosac.pipelines.rank_memory import part_of
from autosac.pipelines.sharded_stages import ShardedStage
from autosac.profiles.profile import Profile
from autosac.simulation.simulator import Simulator
from autosac.solvers import sac
from autosac.solving.formulation import Formulation
from autosac.step.ledger import Ledger, Timeline
from autosac.step.tape import IntArray
from autosac.units.policies import Policy
from autosac.units.unit import Unit


class InFlightSimulator(Simulator):
    """Replays the step of one micro-batch while others are in flight.

    Args:
        profile: Of the stage.
        count: How many others there are.
        is_last: Whether the stage has the loss.
        sharded: What FSDP2 does to the stage, None without.
    """

    def __init__(
        self,
        profile: Profile,
        count: int,
        *,
        is_last: bool,
        sharded: ShardedStage | None = None,
    ) -> None:
        self.profile, self.count, self._is_last = profile, count, is_last
        self.sharded = sharded
        super().__init__(self.profile.tape, self.profile.allocator)

    def ledger(
        self, chosen: Mapping[Unit, Policy], *, workspaces: bool = True
    ) -> Ledger:
        """All that the step allocates, and what the others hold."""
        return self.with_held(chosen, workspaces=workspaces)[0]

    def with_held(
        self, chosen: Mapping[Unit, Policy], *, workspaces: bool = True
    ) -> tuple[Ledger, int]:
        """Likewise, and the bytes that each of the others holds."""
        one = self.profile.simulator.ledger(chosen, workspaces=workspaces)
        part = part_of(self.profile, one, is_last=self._is_last)
        held = one.nbytes[part.is_held]
        held_bytes = int(held.sum())
        if self.sharded is not None:
            # No choice changes what of these there is, and a rank has less of it.
            left_out = one.born >= part.optimizer_key
            if self.sharded.parallel.sums_apart:
                left_out |= part.gradients
            one = replace(one, nbytes=np.where(left_out, 0, one.nbytes))
        if not workspaces or not self.count:
            return one, held_bytes
        until = np.full_like(held, part.optimizer_key)
        beside = replace(
            one,
            born=np.concatenate([one.born, np.ones_like(held)]),
            died=np.concatenate([one.died, until]),
            nbytes=np.concatenate([one.nbytes, self.count * held]),
        )
        return beside, held_bytes

    @cached_property
    def moments(self) -> tuple[int, int]:
        """Positions at which backward begins and the optimizer does."""
        phases, edges = self.tape.phases, self.profile.formulation.edges
        moment = int(np.searchsorted(edges, phases["backward"], side="right")) - 1
        return moment, int(np.searchsorted(edges, phases["optimizer"]))

    def true_peak_bytes(self, chosen: Mapping[Unit, Policy]) -> int:
        """What is asked of the allocator; see `RankReplay`, which counts so too."""
        return self.peak_bytes(chosen)

    def true_timeline(self, chosen: Mapping[Unit, Policy]) -> Timeline:
        """Likewise."""
        return self.timeline(chosen)


def with_others(simulator: InFlightSimulator) -> Formulation:
    """The MILP's numbers of a stage with others in flight."""
    formulation, count = simulator.profile.formulation, simulator.count
    if not count and simulator.sharded is None:
        return formulation
    edges = formulation.edges
    live = simulator.ledger({}).after_ticks(simulator.tape.num_ticks, simulator.span)
    base_bytes = tuple(np.maximum.reduceat(live, edges).tolist())
    base_bytes += formulation.base_bytes[len(edges) :]  # of far memory
    if not count:
        return replace(formulation, base_bytes=base_bytes)
    moment, stop = simulator.moments
    units = (_beside(u, moment, stop, count) for u in formulation.solver_units)
    again = (once_more(h, moment, range(stop), count) for h in formulation.holds)
    return replace(
        formulation,
        solver_units=tuple(units),
        base_bytes=base_bytes,
        holds=(*formulation.holds, *(hold for hold in again if hold is not None)),
    )


def _beside(unit: sac.Unit, moment: int, stop: int, count: int) -> sac.Unit:
    """A unit that frees what it frees at a moment so many times more, all along."""
    own = np.array([point.freed_bytes for point in unit.points], dtype=np.int64)
    working: dict[int, IntArray] = {}
    for position, extras in unit.working:
        added = np.array(extras, dtype=np.int64)
        working[position] = working.get(position, np.zeros_like(own)) + added
    change = change_at(unit, moment)
    for position in range(unit.freed_from, unit.freed_until):
        working[position] = working.get(position, 0) - own
    points = zip(unit.points, (-count * change).tolist(), strict=True)
    return replace(
        unit,
        points=tuple(replace(point, freed_bytes=freed) for point, freed in points),
        freed_from=0,
        freed_until=stop,
        working=tuple((q, tuple(added.tolist())) for q, added in working.items()),
    )


def change_at(unit: sac.Unit, moment: int) -> IntArray:
    """What each point of a unit adds to the memory at a position."""
    change = np.zeros(len(unit.points), dtype=np.int64)
    if unit.freed_from <= moment < unit.freed_until:
        change -= np.array([point.freed_bytes for point in unit.points])
    for position, extras in unit.working:
        if position == moment:
            change += np.array(extras)
    return change


def once_more(
    hold: sac.Hold, moment: int, positions: range, count: int
) -> sac.Hold | None:
    """What others hold of a hold, at some positions all along.

    Args:
        hold: The hold.
        moment: When they hold what they do.
        positions: Where they are in flight.
        count: How many there are.

    Returns:
        That; None if it is not there between passes.
    """
    start, stop = positions.start, positions.stop
    if hold.held_from > moment:
        return None
    holders = tuple((u, stop) for u, end in hold.holders if end > moment)
    if not holders:
        return None
    return sac.Hold(
        nbytes=count * hold.nbytes,
        held_from=start,
        holders=holders,
        freed_by=tuple(
            (u, tuple(start if first <= moment else stop for first in froms))
            for u, froms in hold.freed_by
        ),
        kept_by=tuple(
            (u, tuple(stop if until > moment else start for until in untils))
            for u, untils in hold.kept_by
        ),
    )
