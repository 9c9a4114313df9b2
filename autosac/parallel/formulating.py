"""From a profile to the parallel MILP's numbers, for any sharding degree."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autosac._compat_distributed import is_collective
from autosac.devices.links import Link
from autosac.errors import ArgumentError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.fsdp_candidates import Candidate, find_candidates
from autosac.parallel.fsdp_hooks import PLACES
from autosac.parallel.fsdp_memory import RankSimulator
from autosac.parallel.positions import hook_ticks, place
from autosac.parallel.sharding import FsdpUnit, Sharding, chunk_numel
from autosac.profiles.profile import Profile
from autosac.profiles.restricting import restricted
from autosac.solvers import sac
from autosac.solvers.curves import knapsack
from autosac.solvers.fsdp import FsdpChoice, FsdpModule, FsdpProblem
from autosac.solving.curve_points import far_curve
from autosac.solving.formulation import formulate
from autosac.step.tape import IntArray
from autosac.units import curves
from autosac.units.curves import UnitCurve
from autosac.units.far_units import FarUnit, find_far_units
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_MOST_POINTS = 1600  # of all AC units together
_NUM_POINTS = (8, 16, 24, 48, 96)  # of each of them, as many as fit
_MODEL = FsdpUnit(fqn="", reshard_after_forward=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is decided before a parallel plan is looked for.

    Attributes:
        param_dtype: Type in which parameters are gathered, None for their own,
        reduce_dtype: and gradients are reduced.
        fsdp_units: FQNs of the FSDP units besides the model; None if these are open.
        segments: Of curves that are fitted, whose breakpoints are the points of AC
            units; None for as many exact points as are soon solved.
        link: To far memory, as each rank has it; None if no unit may use that.
        host_bytes: Most bytes of a rank there; None for as many as one likes.
        num_slices: Ranks that share slices, which stand in one place of the sharding.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    fsdp_units: frozenset[str] | None = None
    segments: int | None = None
    link: Link | None = None
    host_bytes: int | None = None
    num_slices: int = 1


class ParallelFormulation:
    """A step as the parallel MILP sees it.

    Args:
        profile: The traced step, in the type of gathered parameters.
        setting: What is decided already.
        ranks: Of this step, if they are there.

    Attributes:
        ranks: Simulates what the MILP chooses.
        early: AC units to which anything comes back before they are rerun: without it
            memory is no higher.
        candidates: Modules that may be FSDP units.
        fixed_units: Those that are FSDP units in any case; None if it is open.
        units: Modules that may be AC units.

    Raises:
        ArgumentError: None of the AC units that the user gives can be one here.
        UnsupportedError: As `RankSimulator`, and `find_candidates`.
    """

    def __init__(
        self, profile: Profile, setting: Setting, ranks: RankSimulator | None = None
    ) -> None:
        self.profile, self.setting = profile, setting
        if ranks is None:
            ranks = RankSimulator(profile, num_slices=setting.num_slices)
        self.ranks = ranks
        schedule = self.ranks.schedule
        index = profile.tape.modules.index
        fqns = setting.fsdp_units
        given = None if fqns is None else {index[fqn] for fqn in fqns} - {0}
        self.candidates = find_candidates(schedule, setting.param_dtype, given)
        self.fixed_units = (
            None
            if given is None
            else tuple(i for i, c in enumerate(self.candidates) if c.module in given)
        )
        ac_units = _ac_units(profile, self.candidates, setting)
        if profile.given.ac_units and not ac_units:
            raise ArgumentError(
                "None of the modules in `ac_units` can be an AC unit on many GPUs: that"
                " are blocks and their larger children, such as"
                f" {', '.join(f'`{c.fqn}`' for c in self.candidates[1:4])}."
            )
        ticks = hook_ticks(self.candidates, schedule.final)
        self._cells = formulate(
            self.ranks.simulator,
            [unit for unit, _ in ac_units],
            [curve for _, curve in ac_units],
            live=self.ranks.base_by_tick(1),
            cuts={tick + late for tick in ticks for late in (0, 1)},
        )
        self.units = self._cells.units
        self.early = frozenset(
            u
            for u, unit in enumerate(self.units)
            if isinstance(unit, FarUnit) and unit.fetched is not None
        )
        edges = self._cells.edges
        self._positions = place(self.candidates, edges, schedule.final)
        reruns = np.searchsorted(edges, [unit.trigger - 1 for unit in self.units])
        first = [*self._positions.first.tolist(), len(self._positions.cell_of)]
        rest = [*self._positions.rest.tolist(), len(self._positions.cell_of)]
        self._ac_records = tuple(
            _moved_unit(unit, rerun, first, rest)
            for unit, rerun in zip(
                self._cells.solver_units, reruns.tolist(), strict=True
            )
        )
        self._rerun_at = tuple(
            max(unit.freed_until, rerun)
            for unit, rerun in zip(
                self._ac_records, self._positions.rest[reruns].tolist(), strict=True
            )
        )
        self._holds = tuple(
            replace(
                hold,
                held_from=first[hold.held_from],
                holders=tuple((u, first[until]) for u, until in hold.holders),
                freed_by=_placed(hold.freed_by, first),
                kept_by=_placed(hold.kept_by, first),
            )
            for hold in self._cells.holds
        )
        inside: dict[str, frozenset[int]] = {}
        for prefix in dict.fromkeys(f"{unit.fqn}." for unit in self.units):
            names = enumerate(candidate.fqn for candidate in self.candidates)
            own = frozenset(i for i, name in names if name.startswith(prefix))
            inside[prefix] = own
        self._inside = tuple(inside[f"{unit.fqn}."] for unit in self.units)

    def problem(
        self, cluster: ClusterSpec, degree: int, budget_bytes: int
    ) -> FsdpProblem:
        """The MILP for one sharding degree.

        Args:
            cluster: The GPUs, all of which take part.
            degree: Ranks over which parameters are sharded.
            budget_bytes: Cap on the peak of a rank.
        """
        positions = self._positions
        live = self.ranks.base_by_tick(degree)
        live += self.ranks.mesh_bytes(cluster.num_gpus)
        base = np.maximum.reduceat(live, self._cells.edges)
        modules = tuple(
            self._module(index, degree) for index in range(len(self.candidates))
        )
        costs = cluster.fsdp_costs(degree, _typical_bytes(modules))
        whole = self._sharding([_MODEL], degree, cluster.num_gpus // degree)
        return FsdpProblem(
            modules=modules,
            sac=sac.SacProblem(
                units=self._ac_records,
                base_bytes=tuple(base[positions.cell_of].tolist()),
                budget_bytes=budget_bytes,
                holds=self._holds,
            ),
            inside=self._inside,
            rerun_at=self._rerun_at,
            compute_ms=self._compute_ms(degree),
            gather=costs.gather,
            reduce=costs.reduce,
            all_reduce=costs.all_reduce,
            late_copies=self.ranks.late_copies(whole),
            host_bytes=self.setting.host_bytes,
            contention=cluster.contention,
        )

    def sharding(
        self, choice: FsdpChoice, degree: int, replicate_degree: int
    ) -> Sharding:
        """The FSDP units of a choice."""
        units = [
            FsdpUnit(fqn=candidate.fqn, reshard_after_forward=reshard)
            for candidate, unit, reshard in zip(
                self.candidates, choice.units, choice.reshard, strict=True
            )
            if unit
        ]
        return self._sharding(units, degree, replicate_degree)

    def policies(self, choice: FsdpChoice) -> dict[Unit, Policy]:
        """The AC units of a choice."""
        return {
            unit: curve.policies[point]
            for unit, curve, point in zip(
                self.units, self._cells.curves, choice.points, strict=True
            )
            if point is not None
        }

    def of_plain(self, plain: ParallelFormulation, choice: FsdpChoice) -> FsdpChoice:
        """A choice of the same step without far memory, as one of this step's."""
        points = dict(zip(plain.units, choice.points, strict=True))
        return replace(choice, points=tuple(points.get(unit) for unit in self.units))

    def room_bytes(self, chosen: Mapping[Unit, Policy]) -> int:
        """What the steps that come may take beyond this one, where sizes vary."""
        if not self.profile.redrawn:
            return 0
        may_offload = self.setting.link is not None  # so that variants have twins, too
        step = restricted(self.profile, offload=may_offload)
        return step.room_bytes(chosen)

    def no_bytes(self) -> IntArray:
        """Zero bytes at every position."""
        return np.zeros(len(self._positions.cell_of), dtype=np.int64)

    def understated_bytes(
        self,
        sharding: Sharding,
        chosen: Mapping[Unit, Policy],
        predicted: NDArray[np.float64],
    ) -> IntArray:
        """Simulated memory above the predicted one, at every position.

        Positions of one cell have the same difference: that of the most in it.
        """
        positions, ranks = self._positions, self.ranks
        keys = self._cells.edges * (ranks.simulator.span * PLACES)
        most = ranks.timeline(sharding, chosen).most_from(keys)
        most += ranks.late_bytes(sharding) + self.room_bytes(chosen)
        most -= np.maximum.reduceat(predicted, positions.first).astype(np.int64)
        return most[positions.cell_of]

    def compute_ms(self, degree: int) -> float:
        """Compute of a step without recomputation."""
        return sum(self._compute_ms(degree))

    def collectives_ms(self, cluster: ClusterSpec, degree: int) -> float:
        """Least time of a step's collectives: all parameters as one, gathered once."""
        modules = [self._module(i, degree) for i in range(len(self.candidates))]
        costs = cluster.fsdp_costs(degree, _typical_bytes(modules))
        gathered = sum(module.gather_bytes for module in modules)
        reduced = sum(module.reduce_bytes for module in modules)
        return costs.gather.ms(gathered) + costs.reduce.ms(reduced)

    def resident_bytes(self, degree: int) -> int:
        """Bytes alive before the step: shards, optimizer state, buffers, inputs."""
        return int(self.ranks.base_by_tick(degree)[0])

    def _sharding(
        self, units: Sequence[FsdpUnit], degree: int, replicate_degree: int
    ) -> Sharding:
        return Sharding(
            units=tuple(units),
            shard_degree=degree,
            replicate_degree=replicate_degree,
            param_dtype=self.setting.param_dtype,
            reduce_dtype=self.setting.reduce_dtype,
        )

    def _compute_ms(self, degree: int) -> tuple[float, ...]:
        """Compute at every position; the optimizer works on a shard."""
        cells = np.zeros(len(self._cells.edges))
        ops = self.ranks.tape.ops
        starts = [op.start for op in ops]
        cell_of_op = np.searchsorted(self._cells.edges, starts, side="right") - 1
        times = [
            ms / degree
            if op.phase == "optimizer" and not is_collective(op.name)
            else ms
            for op, ms in zip(ops, self.profile.op_ms, strict=True)
        ]
        np.add.at(cells, cell_of_op, times)
        position_ms = np.zeros(len(self._positions.cell_of))
        position_ms[self._positions.rest] = cells
        return tuple(position_ms.tolist())

    def _module(self, index: int, degree: int) -> FsdpModule:
        candidate, span = self.candidates[index], self._positions.spans[index]
        sharding = self._sharding([_MODEL], degree, 1)
        storages = self.ranks.tape.storages
        chunks = [(p, chunk_numel(p, degree)) for p in candidate.parameters]
        trained = [(p, n) for p, n in chunks if p.gradient is not None]
        born = [storages[p.gradient].born for p, _ in trained if p.gradient is not None]
        dtypes = sorted({p.dtype for p in candidate.parameters if p.trained})
        return FsdpModule(
            fqn=candidate.fqn,
            parent=candidate.parent,
            forward=span.forward,
            backward=span.backward,
            gather_bytes=sum(
                n * degree * sharding.gathered_itemsize(p) for p, n in chunks
            ),
            grad_bytes=sum(
                storages[p.gradient].nbytes
                for p, _ in trained
                if p.gradient is not None
            ),
            reduce_bytes=sum(
                n * degree * sharding.reduced_itemsize(p) for p, n in trained
            ),
            # If they are added to those of earlier micro-steps, these are there always.
            shard_grad_bytes=0
            if self.profile.step.adds_gradients
            else sum(n * p.itemsize for p, n in trained),
            grad_from=self._grad_from(min(born, default=None), span.backward),
            dtype=" and ".join(dtypes) or None,
            can_be_unit=candidate.can_be_unit,
            kind=candidate.kind,
        )

    def _grad_from(self, tick: int | None, backward: tuple[int, int]) -> int | None:
        if tick is None:
            return None
        cell = int(np.searchsorted(self._cells.edges, tick, side="right")) - 1
        return min(int(self._positions.first[cell]), backward[1] - 1)


def _typical_bytes(modules: Sequence[FsdpModule]) -> int:
    """Parameters of the largest module that has others like it, or of the model."""
    inside = [module.gather_bytes for module in modules]
    for index in reversed(range(1, len(modules))):
        inside[modules[index].parent or 0] += inside[index]
    alike = [n for n, m in zip(inside, modules, strict=True) if m.kind is not None]
    return max(alike, default=inside[0])


def _ac_units(
    profile: Profile, candidates: Sequence[Candidate], setting: Setting
) -> list[tuple[Unit, UnitCurve]]:
    """Candidates for FSDP units that can be AC units and free memory, with curves.

    In forward order, with their twins in far memory if there may be any.
    """
    names = {candidate.fqn for candidate in candidates if candidate.fqn}
    units = [unit for unit in profile.units.candidates if unit.fqn in names]
    fronts = {}
    for unit in units:
        if unit.key not in fronts:
            fronts[unit.key] = knapsack.front(curves.save_problem(unit))
    fitting = (n for n in _NUM_POINTS if n * len(units) <= _MOST_POINTS)
    num_points = max(fitting, default=_NUM_POINTS[0])
    by_key = {
        unit.key: curves.trade_off(unit, fronts[unit.key], num_points=num_points)
        for unit in {unit.key: unit for unit in units}.values()
    }
    if setting.segments is not None:
        by_key = {
            key: curve and curve.at_breakpoints(setting.segments)
            for key, curve in by_key.items()
        }
    useful: list[tuple[Unit, UnitCurve | None]] = [(u, by_key[u.key]) for u in units]
    useful += _twins(profile, units, by_key, fronts, setting)
    useful.sort(key=lambda pair: (pair[0].call.enter, -pair[0].call.exit))
    return [(unit, curve) for unit, curve in useful if curve is not None]


def _twins(
    profile: Profile,
    units: Sequence[Unit],
    by_key: Mapping[Hashable, UnitCurve | None],
    fronts: Mapping[Hashable, knapsack.Front],
    setting: Setting,
) -> Iterator[tuple[Unit, UnitCurve | None]]:
    """Twins of units in far memory, with curves; none if they may not use it."""
    if setting.link is None:
        return
    plain = {unit.call: unit.key for unit in units}
    every = profile.units.candidates
    twins = find_far_units(profile.tape, every, profile.op_ms, setting.link)
    twins = tuple(twin for twin in twins if twin.call in plain)
    num_points = _MOST_POINTS // max(1, len(twins))
    far: dict[Hashable, UnitCurve | None] = {}
    for twin in twins:
        if twin.key not in far:
            key = plain[twin.call]
            curve = far_curve(twin, by_key[key], fronts[key])
            if curve is not None and len(curve.policies) > num_points:
                curve = curve.at_breakpoints(max(1, num_points - 1))
            far[twin.key] = curve
        yield twin, far[twin.key]


def _placed(
    by_point: tuple[tuple[int, tuple[int, ...]], ...], first: list[int]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Cells turned into their first positions, for each unit."""
    return tuple((u, tuple(first[cell] for cell in cells)) for u, cells in by_point)


def _moved_unit(
    unit: sac.Unit, rerun: int, first: Sequence[int], rest: Sequence[int]
) -> sac.Unit:
    """The record of an AC unit over positions instead of cells.

    Args:
        unit: The record.
        rerun: Cell in which it reruns.
        first: The first position of each cell,
        rest: and the first one behind its hooks; then the end.
    """
    by_cell = dict(unit.working)
    working = []
    for cell, extras in unit.working:
        begin = first[cell]
        # What is fetched or rerun comes after the hooks of the cell.
        if cell in (unit.freed_until, rerun):
            begin = rest[cell]
            before = by_cell.get(cell - 1) if cell > unit.freed_until else None
            if before is not None:
                working += [(q, before) for q in range(first[cell], begin)]
        working += [(q, extras) for q in range(begin, rest[cell] + 1)]
    return replace(
        unit,
        freed_from=first[unit.freed_from],
        freed_until=rest[unit.freed_until],
        working=tuple(working),
    )
