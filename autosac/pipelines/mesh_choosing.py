"""Which mesh: stages, replicas, shards, parts and slices of all GPUs of a cluster.

All that `mesh` leaves open is enumerated, with every size of micro-batches that the
global batch has. What its blocks take at least, or what a rank keeps all the time,
rules most of them out; the others are guessed at (`estimating`), and those that may be
the fastest are planned.

Some GPUs may be left idle, so that no more of them are ever slower: where links are
slow, or the batch is small, fewer may be faster. Numbers that are looked at besides all
do not depend on how many there are, so that a larger cluster can do what a smaller one
does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

import torch

from autosac.errors import ArgumentError, AutosacError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.context_parallel import ContextParallel, Method
from autosac.parallel.mesh_racing import (
    Division,
    TpPlan,
    check_no_group,
    division_of,
    divisions,
    parts_of,
    read_degrees,
)
from autosac.parallel.racing import shard_degrees
from autosac.parallel.tp_styles import TensorParallel
from autosac.parallel.tp_tracing import fake_ranks
from autosac.pipelines.fastest import Runners
from autosac.pipelines.interleaved_racing import race_of
from autosac.pipelines.micro_batches import MicroBatch, rows_of
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.rank_memory import MOST_GATHERED
from autosac.pipelines.schedule_racing import Race
from autosac.pipelines.schedules import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    Schedule,
    can_have,
)
from autosac.pipelines.sharded_stages import DataParallel
from autosac.pipelines.shared_sequences import check_parts, context_of
from autosac.pipelines.stage_choosing import FarBytes
from autosac.quantities import format_bytes, format_ms

_FEW = 2  # meshes whose least peak is asked for if none can fit
_MOST_LOOPED = 6  # meshes under interleaved 1F1B that race, those likely to be fastest
# Nodes that may be used besides all of them: so few, or a power of two.
_FEW_NODES = 8


class _Cell(NamedTuple):
    """One mesh with one schedule."""

    cluster: ClusterSpec
    tensor: TensorParallel
    context: ContextParallel
    parallel: DataParallel
    schedule: Schedule
    rows: int

    @property
    def division(self) -> Division:
        """How ranks see one batch together."""
        return division_of(self.tensor, self.context)

    @property
    def mesh(self) -> str:
        """The mesh in words."""
        sizes = {"pp": self.schedule.num_ranks, **self.parallel.sizes}
        if self.tensor.degree > 1:
            sizes["tp"] = self.tensor.degree
        own = " x ".join(f"{name}={size}" for name, size in sizes.items())
        return own + _kind(self.tensor)


def _name_of(division: Division) -> str:
    """How ranks see one batch together, in words."""
    tensor, context = parts_of(division)
    words = [f"cp={context.degree}"] * (context.degree > 1)
    words += [f"tp={tensor.degree}"] * (tensor.degree > 1 or not words)
    return " x ".join(words) + _kind(tensor)


def _kind(tensor: TensorParallel) -> str:
    """What ranks that share slices have besides, in words."""
    words = ", parts of sequences" * tensor.cuts_sequences
    return words + ", whole experts" * tensor.has_whole_experts


@dataclass(kw_only=True)
class MeshSearch:
    """The search for the fastest mesh.

    Attributes:
        base: The whole model and one row.
        inputs: Rows that stand for all,
        target: likewise.
        cluster: Whose GPUs are used, or some of them.
        mesh: Degrees by dimension, None for those to choose.
        tp_plan: As in `plan_pipeline`,
        loss_parallel: likewise,
        cp_method: likewise.
        num_micro_batches: Those to choose from, None for all.
        global_batch: Rows of a step.
        schedules: Names to choose from; GPipe where 1F1B has too few micro-batches.
        stages_per_rank: Under interleaved 1F1B, those to choose from.
        relative_gap: As in `plan_pipeline`.
        budget_bytes: Cap on the peak of a rank.
        far: What a rank may have in far memory; None for nothing.
    """

    base: MicroBatch
    inputs: torch.Tensor
    target: torch.Tensor
    cluster: ClusterSpec
    mesh: Mapping[str, int | None]
    tp_plan: TpPlan
    num_micro_batches: Sequence[int] | None
    global_batch: int
    schedules: Sequence[str]
    stages_per_rank: Sequence[int]
    relative_gap: float
    loss_parallel: bool
    cp_method: Method
    budget_bytes: int
    far: FarBytes | None = None
    _known: dict[Hashable, MicroBatch] = field(default_factory=dict)
    _lost: dict[str, str] = field(default_factory=dict, init=False)
    _tensors: list[TensorParallel] = field(default_factory=list, init=False)
    _contexts: list[ContextParallel] = field(default_factory=list, init=False)
    _refused: dict[str, AutosacError] = field(default_factory=dict, init=False)
    _runners: Runners = field(default_factory=Runners, init=False)
    # What meshes keep that cannot fit, with one of the schedules.
    _least: dict[str, tuple[int, _Cell]] = field(default_factory=dict, init=False)
    _looped_left: int = field(default_factory=lambda: _MOST_LOOPED, init=False)

    def degrees(self) -> tuple[int, ...]:
        """Degrees of tensor parallelism to look at."""
        degree, is_asked = self.mesh["tp"], self.tp_plan is not None
        if degree == 1 and not is_asked and not self.loss_parallel:
            return (1,)
        return read_degrees(degree, self.tp_plan, self.loss_parallel, self.cluster)

    def part_degrees(self) -> tuple[int, ...]:
        """Degrees of context parallelism to look at."""
        degree = self.mesh["cp"]
        if degree is not None:
            return (degree,)
        sizes = parts(self.cluster)
        degrees = {degree for own in sizes for degree in shard_degrees(own)}
        length = self.base.inputs.shape[1:2]
        return tuple(n for n in sorted(degrees) if length and length[0] % n == 0)

    def run(self) -> PipelinePlan:
        """The fastest plan.

        Raises:
            ArgumentError: The GPUs and the batch make no such mesh.
            InfeasibleBudgetError: Nothing fits.
            AutosacError: As `plan_pipeline`.
        """
        degrees = self.degrees()
        contexts = self._possible_contexts()
        with self._ranks(degrees, contexts):
            return self._chosen(degrees, contexts)

    def can_fit(self) -> bool:
        """Whether what a rank keeps all the time lets a mesh of all GPUs fit."""
        if self.cluster.gpus_per_node % (self.mesh["tp"] or 1):
            return False  # there are too few
        degrees, contexts = self.degrees(), self._possible_contexts()
        with self._ranks(degrees, contexts):
            self._divide(degrees)
            self._share(contexts)
            cells = (c for t in self._tensors for c in self._cells(self.cluster, t))
            return any(self._kept_bytes(cell) <= self.budget_bytes for cell in cells)

    def _ranks(
        self, degrees: Sequence[int], contexts: Sequence[ContextParallel]
    ) -> AbstractContextManager[None]:
        """A group that stands for the ranks that see one batch together."""
        most = max(degrees) * max(context.degree for context in contexts)
        check_no_group([most])
        if most == 1:
            return nullcontext()
        return fake_ranks(most, divides_loss=self.loss_parallel)

    def _chosen(
        self, degrees: Sequence[int], contexts: Sequence[ContextParallel]
    ) -> PipelinePlan:
        self._divide(degrees)
        self._share(contexts)
        is_any = False
        for cluster in parts(self.cluster):
            if is_any and self._least_on(cluster) >= self._runners.best_ms:
                break  # nor is anything faster on fewer
            cells = [
                c for tensor in self._tensors for c in self._cells(cluster, tensor)
            ]
            is_any = is_any or bool(cells)
            self._enter(cells)
        if not self._runners.has_any:  # say what the least ones would need
            kept = sorted(self._least.values(), key=lambda pair: pair[0])
            able = (cell for _, cell in kept if self._is_possible(cell.division))
            for cell in islice(able, _FEW):
                self._runners.enter(self._race(cell))
        if not self._runners.has_any and self._refused:
            raise next(iter(self._refused.values()))
        if not self._runners.has_any:
            raise ArgumentError(
                f"No mesh of {self.cluster.num_gpus} GPUs with the degrees of `mesh`"
                f" shares a `global_batch` of {self.global_batch} rows evenly between"
                " stages, replicas and shards: change one of these, or leave degrees"
                " open with None."
            )
        lost = [f"{mesh}: {why}" for mesh, why in self._lost.items()]
        plan = self._runners.plan(lost, self.far)
        return replace(plan, num_gpus=self.cluster.num_gpus)

    def _enter(self, cells: Sequence[_Cell]) -> None:
        """Let those of one number of GPUs race that may be fastest."""
        runners = self._runners
        likely = sorted(
            ((self._order(cell), cell) for cell in cells), key=itemgetter(0)
        )
        for (is_looped, *_), cell in likely:
            bound_ms = self._least_ms(cell, self._row_ms(cell))
            if bound_ms >= runners.best_ms:
                self._note(cell, f"takes {format_ms(bound_ms)} a step at least")
                continue
            kept_bytes = self._kept_bytes(cell)
            if kept_bytes > self.budget_bytes:
                self._least.setdefault(cell.mesh, (kept_bytes, cell))
                self._note(cell, f"keeps {format_bytes(kept_bytes)} all the time")
                continue
            if is_looped and not self._looped_left:
                runners.bound_ms = min(runners.bound_ms, bound_ms)
                self._note(cell, "was not looked at under interleaved 1F1B")
                continue
            if not self._is_possible(cell.division):
                continue
            bound_ms = self._least_ms(cell, self._own_row_ms(cell))
            if bound_ms >= runners.best_ms:
                self._note(cell, f"takes {format_ms(bound_ms)} a step at least")
                continue
            race = self._race(cell)
            if race.bound_ms >= runners.best_ms:
                self._note(cell, f"takes {format_ms(race.bound_ms)} a step at least")
            elif race.plain_ms >= runners.best_ms:
                runners.bound_ms = min(runners.bound_ms, race.bound_ms)
                self._note(cell, f"takes about {format_ms(race.plain_ms)} a step")
            else:
                self._looped_left -= is_looped
                runners.enter(race)

    def _divide(self, degrees: Sequence[int]) -> None:
        """Find the ways to divide tensors.

        Raises:
            AutosacError: All are refused.
        """
        self._tensors.clear()
        for degree in degrees:
            try:
                found = divisions(
                    self.base.model, degree, self.tp_plan, self.loss_parallel
                )
            except AutosacError as error:
                self._refuse(TensorParallel(degree=degree), error)
                continue
            self._tensors += filter(self._is_possible, found)
        if not self._tensors:
            raise next(iter(self._refused.values()))

    def _possible_contexts(self) -> list[ContextParallel]:
        """Ways to share a sequence, as far as the whole step says.

        Raises:
            AutosacError: All are refused.
        """
        contexts = []
        for degree in self.part_degrees():
            try:
                contexts.append(context_of(self.base, degree, self.cp_method))
            except AutosacError as error:
                self._refuse(ContextParallel(degree=degree), error)
        if not contexts:
            raise next(iter(self._refused.values()))
        return contexts

    def _share(self, contexts: Sequence[ContextParallel]) -> None:
        """Find out which of the ways to share a sequence there are.

        Raises:
            AutosacError: All are refused.
        """
        self._contexts.clear()
        for context in contexts:
            try:
                if context.degree > 1:
                    check_parts(self._micro_batch(context, 1))
            except AutosacError as error:
                self._refuse(context, error)
            else:
                self._contexts.append(context)
        if not self._contexts:
            raise next(iter(self._refused.values()))

    def _is_possible(self, division: Division) -> bool:
        """Whether a rank can run what it has."""
        if _name_of(division) in self._refused:
            return False
        try:
            _ = self._micro_batch(division, 1).whole
        except AutosacError as error:
            self._refuse(division, error)
            return False
        return True

    def _refuse(self, division: Division, error: AutosacError) -> None:
        name = _name_of(division)
        self._refused[name], self._lost[name] = error, str(error)

    def _cells(self, cluster: ClusterSpec, tensor: TensorParallel) -> Iterator[_Cell]:
        """All meshes and schedules of all GPUs, with one division of tensors."""
        num_groups, left = divmod(cluster.num_gpus, tensor.degree)
        most = len(self.base.cuts) + 1
        for stages in _divisors(0 if left else num_groups):
            if not 1 < stages <= most or self.mesh["pp"] not in (None, stages):
                continue
            for context, parallel in self._parallels(num_groups // stages):
                rows, left = divmod(self.global_batch, parallel.num_batches)
                if not left and parallel.fits(cluster, tensor.degree):
                    for schedule in self._schedules(stages, rows):
                        per_rank = schedule.stages_per_rank
                        is_sharded = parallel.degree > 1
                        if schedule.num_stages > most or (
                            is_sharded and per_rank > MOST_GATHERED
                        ):
                            continue
                        own = rows // schedule.num_micro_batches
                        yield _Cell(cluster, tensor, context, parallel, schedule, own)

    def _parallels(self, size: int) -> Iterator[tuple[ContextParallel, DataParallel]]:
        """Replicas, shards and parts of so many groups."""
        typed = self.base.parallel
        wanted = (self.mesh["fsdp"], self.mesh["replicate"])
        for context in self._contexts:
            groups, left = divmod(size, context.degree)
            for shards in _divisors(0 if left else groups):
                replicas = groups // shards
                pairs = zip(wanted, (shards, replicas), strict=True)
                if any(asked not in (None, own) for asked, own in pairs):
                    continue
                parallel = replace(
                    typed, shard_degree=shards, replicate_degree=replicas
                ).in_parts(context.degree)
                if parallel.degree == 1 and typed.param_dtype is not None:
                    continue  # nobody gathers parameters in another type
                yield context, parallel

    def _schedules(self, stages: int, rows: int) -> Iterator[Schedule]:
        """Schedules of stages, for each number of micro-batches."""
        for number in _divisors(rows):
            if self.num_micro_batches and number not in self.num_micro_batches:
                continue
            able = [
                name
                for name in (ONE_F_ONE_B, GPIPE)
                if name in self.schedules and can_have(name, stages, number)
            ]
            for name in able[:1]:
                yield Schedule(name=name, num_ranks=stages, num_micro_batches=number)
            if INTERLEAVED in self.schedules and can_have(INTERLEAVED, stages, number):
                for per_rank in self.stages_per_rank:
                    yield Schedule(
                        name=INTERLEAVED,
                        num_ranks=stages,
                        num_micro_batches=number,
                        stages_per_rank=per_rank,
                    )

    def _order(self, cell: _Cell) -> tuple[bool, float, int]:
        """Those likely to be fastest come first; the same FLOPs, in few parts."""
        return cell.schedule.is_looped, self._likely_ms(cell), cell.context.degree

    def _least_ms(self, cell: _Cell, row_ms: float) -> float:
        """No step of a cell is faster: by what its rows take, spread evenly.

        Args:
            cell: The cell.
            row_ms: What each takes at least.
        """
        stages, number = cell.schedule.num_ranks, cell.schedule.num_micro_batches
        waits = 0 if cell.schedule.is_looped else stages - 1
        return row_ms * cell.rows * (number + waits) / stages

    def _likely_ms(self, cell: _Cell) -> float:
        """Likewise if stages are even, of which a rank with several waits less."""
        schedule = cell.schedule
        own_ms = self._row_ms(cell) * cell.rows
        waits = (schedule.num_ranks - 1) / schedule.stages_per_rank
        return own_ms * (schedule.num_micro_batches + waits) / schedule.num_ranks

    def _row_ms(self, cell: _Cell) -> float:
        """No row takes less in all stages, of which ranks with parts share all."""
        return self._micro_batch(cell.tensor, 1).least_ms / cell.context.degree

    def _own_row_ms(self, cell: _Cell) -> float:
        """Likewise, of what a rank of the cell does."""
        return self._micro_batch(cell.division, 1).least_ms

    def _least_on(self, cluster: ClusterSpec) -> float:
        """No step on so many GPUs is faster, likewise."""
        times = (t.degree * self._micro_batch(t, 1).least_ms for t in self._tensors)
        return min(times) * self.global_batch / cluster.num_gpus

    def _kept_bytes(self, cell: _Cell) -> int:
        """What the fullest rank keeps at least, of parameters and the optimizer."""
        one_row = self._micro_batch(cell.tensor, 1).among(cell.parallel, cell.cluster)
        return one_row.least_bytes // cell.schedule.num_ranks

    def _micro_batch(self, division: Division, rows: int) -> MicroBatch:
        """So many rows of a model divided so, sharded in whatever way."""
        key = _name_of(division), rows
        if key not in self._known:
            if division.degree == rows == 1:
                return self.base
            some = replace(
                self.base,
                inputs=rows_of(self.inputs, rows),
                target=rows_of(self.target, rows),
            )
            self._known[key] = some.on_rank(division, self.base)
        return self._known[key]

    def _race(self, cell: _Cell) -> Race:
        micro_batch = self._micro_batch(cell.division, cell.rows)
        return race_of(
            micro_batch.among(cell.parallel, cell.cluster),
            cell.schedule,
            self.budget_bytes,
            self.relative_gap,
            cell.mesh,
        )

    def _note(self, cell: _Cell, why: str) -> None:
        """Note why a mesh lost: of its schedules the first, which is the fastest.

        Those that leave GPUs idle are not worth a word.
        """
        if cell.cluster is not self.cluster:
            return
        number = cell.schedule.num_micro_batches
        self._lost.setdefault(cell.mesh, f"with {number} micro-batches {why}")


def parts(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """All GPUs of a cluster, and then less and less of them: nodes, and parts of one.

    But for all, these numbers do not depend on how many nodes there are.
    """
    yield cluster
    for nodes in range(cluster.num_nodes - 1, 0, -1):
        if nodes <= _FEW_NODES or nodes.bit_count() == 1:
            yield replace(cluster, num_nodes=nodes)
    for num_gpus in reversed(_divisors(cluster.gpus_per_node)[:-1]):
        yield cluster.resized(num_gpus)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
