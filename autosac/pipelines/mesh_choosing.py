"""Which mesh: stages, replicas, shards and slices of all GPUs of a cluster.

All that `mesh` leaves open is enumerated, with every size of micro-batches that the
global batch has. What its blocks take at least, or what a rank keeps all the time,
rules most of them out; the others are guessed at (`estimating`), and those that may be
the fastest are planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from autosac.errors import ArgumentError, AutosacError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.mesh_racing import (
    TpPlan,
    check_no_group,
    divisions,
    read_degrees,
)
from autosac.parallel.tp_styles import TensorParallel
from autosac.parallel.tp_tracing import fake_ranks
from autosac.pipelines.micro_batches import MicroBatch, rows_of
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.schedule_racing import Race, Runners
from autosac.pipelines.schedules import GPIPE, ONE_F_ONE_B, Schedule
from autosac.pipelines.sharded_stages import DataParallel
from autosac.quantities import format_bytes, format_ms

_FEW = 2  # meshes whose least peak is asked for if none can fit


class _Cell(NamedTuple):
    """One mesh with one schedule."""

    tensor: TensorParallel
    parallel: DataParallel
    schedule: Schedule
    rows: int

    @property
    def mesh(self) -> str:
        """The mesh in words."""
        sizes = {"pp": self.schedule.num_ranks, **self.parallel.sizes}
        if self.tensor.degree > 1:
            sizes["tp"] = self.tensor.degree
        own = " x ".join(f"{name}={size}" for name, size in sizes.items())
        return f"{own}, parts of sequences" * self.tensor.cuts_sequences or own


@dataclass(kw_only=True)
class MeshSearch:
    """The search for the fastest mesh.

    Attributes:
        base: The whole model and one row.
        inputs: Rows that stand for all,
        target: likewise.
        cluster: Whose GPUs are used, all of them.
        mesh: Degrees by dimension, None for those to choose.
        tp_plan: As in `plan_pipeline`,
        loss_parallel: likewise.
        num_micro_batches: Those to choose from, None for all.
        global_batch: Rows of a step.
        schedules: Names to choose from; GPipe where 1F1B has too few micro-batches.
        relative_gap: As in `plan_pipeline`.
        budget_bytes: Cap on the peak of a rank.
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
    relative_gap: float
    loss_parallel: bool
    budget_bytes: int = 0
    _lost: dict[str, str] = field(default_factory=dict)
    _known: dict[tuple[int, int], MicroBatch] = field(default_factory=dict)
    _tensors: list[TensorParallel] = field(default_factory=list)

    def degrees(self) -> tuple[int, ...]:
        """Degrees of tensor parallelism to look at."""
        degree, is_asked = self.mesh["tp"], self.tp_plan is not None
        if degree == 1 and not is_asked and not self.loss_parallel:
            return (1,)
        return read_degrees(degree, self.tp_plan, self.loss_parallel, self.cluster)

    def run(self) -> PipelinePlan:
        """The fastest plan.

        Raises:
            ArgumentError: The GPUs and the batch make no such mesh.
            InfeasibleBudgetError: Nothing fits.
            AutosacError: As `plan_pipeline`.
        """
        degrees = self.degrees()
        check_no_group(degrees)
        most = max(degrees)
        if most == 1:
            return self._chosen(degrees)
        with fake_ranks(most, divides_loss=self.loss_parallel):
            return self._chosen(degrees)

    def _chosen(self, degrees: Sequence[int]) -> PipelinePlan:
        refused = self._divide(degrees)
        cells = [cell for tensor in self._tensors for cell in self._cells(tensor)]
        if not cells and refused:
            raise refused[0]
        if not cells:
            raise ArgumentError(
                f"No mesh of {self.cluster.num_gpus} GPUs with the degrees of `mesh`"
                f" shares a `global_batch` of {self.global_batch} rows evenly between"
                " stages, replicas and shards: change one of these, or leave degrees"
                " open with None."
            )
        runners = Runners()
        least: dict[str, tuple[int, _Cell]] = {}
        for bound_ms, cell in sorted(
            ((self._least_ms(cell), cell) for cell in cells), key=lambda pair: pair[0]
        ):
            if bound_ms >= runners.best_ms:
                self._note(cell, f"takes {format_ms(bound_ms)} a step at least")
                continue
            kept_bytes = self._kept_bytes(cell)
            if kept_bytes > self.budget_bytes:
                least.setdefault(cell.mesh, (kept_bytes, cell))
                self._note(cell, f"keeps {format_bytes(kept_bytes)} all the time")
                continue
            race = self._race(cell)
            if race.bound_ms >= runners.best_ms:
                self._note(cell, f"takes {format_ms(race.bound_ms)} a step at least")
            else:
                runners.enter(race)
        if not runners.has_any:  # say what the least ones would need
            for _, cell in sorted(least.values(), key=lambda pair: pair[0])[:_FEW]:
                runners.enter(self._race(cell))
        lost = [f"{mesh}: {why}" for mesh, why in self._lost.items()]
        return runners.plan(lost)

    def _divide(self, degrees: Sequence[int]) -> list[AutosacError]:
        """Find the ways to divide tensors; what is refused."""
        refused = []
        for degree in degrees:
            try:
                self._tensors += divisions(
                    self.base.model, degree, self.tp_plan, self.loss_parallel
                )
            except AutosacError as error:
                refused.append(error)
                self._lost[f"tp={degree}"] = str(error)
        return refused

    def _cells(self, tensor: TensorParallel) -> Iterator[_Cell]:
        """All meshes and schedules of one division of tensors."""
        num_groups, left = divmod(self.cluster.num_gpus, tensor.degree)
        most = len(self.base.cuts) + 1
        for stages in _divisors(0 if left else num_groups):
            if not 1 < stages <= most or self.mesh["pp"] not in (None, stages):
                continue
            for parallel in self._parallels(tensor, num_groups // stages):
                rows, left = divmod(self.global_batch, parallel.degree)
                if not left:
                    yield from self._of_rows(tensor, parallel, stages, rows)

    def _parallels(self, tensor: TensorParallel, size: int) -> Iterator[DataParallel]:
        """Replicas and shards of so many groups."""
        typed = self.base.parallel
        for shards in _divisors(size):
            replicas = size // shards
            wanted = (self.mesh["fsdp"], self.mesh["replicate"])
            pairs = zip(wanted, (shards, replicas), strict=True)
            if any(asked not in (None, own) for asked, own in pairs):
                continue
            parallel = replace(typed, shard_degree=shards, replicate_degree=replicas)
            if parallel.degree == 1 and typed.param_dtype is not None:
                continue  # nobody gathers parameters in another type
            if parallel.fits(self.cluster, tensor.degree):
                yield parallel

    def _of_rows(
        self, tensor: TensorParallel, parallel: DataParallel, stages: int, rows: int
    ) -> Iterator[_Cell]:
        for number in _divisors(rows):
            if self.num_micro_batches and number not in self.num_micro_batches:
                continue
            able = (ONE_F_ONE_B, GPIPE) if number >= stages else (GPIPE,)
            name = next((name for name in able if name in self.schedules), None)
            if name is not None:
                schedule = Schedule(
                    name=name, num_ranks=stages, num_micro_batches=number
                )
                yield _Cell(tensor, parallel, schedule, rows // number)

    def _least_ms(self, cell: _Cell) -> float:
        """No step of a cell is faster: by the FLOPs of its rows, spread evenly."""
        own_ms = self._micro_batch(cell.tensor, 1).flops_ms * cell.rows
        stages, number = cell.schedule.num_ranks, cell.schedule.num_micro_batches
        return own_ms * (stages + number - 1) / stages

    def _kept_bytes(self, cell: _Cell) -> int:
        """What the fullest rank keeps at least, of parameters and the optimizer."""
        one_row = self._micro_batch(cell.tensor, 1).among(cell.parallel)
        return one_row.least_bytes // cell.schedule.num_ranks

    def _micro_batch(self, tensor: TensorParallel, rows: int) -> MicroBatch:
        """So many rows of a model divided so, sharded in whatever way."""
        place = self._tensors.index(tensor)
        key = place, rows
        if key not in self._known:
            if key == (place, 1) and tensor.degree == 1:
                return self.base
            some = replace(
                self.base,
                inputs=rows_of(self.inputs, rows),
                target=rows_of(self.target, rows),
            )
            self._known[key] = some.on_rank(tensor, self.base)
        return self._known[key]

    def _race(self, cell: _Cell) -> Race:
        micro_batch = self._micro_batch(cell.tensor, cell.rows).among(cell.parallel)
        return Race(
            micro_batch, cell.schedule, self.budget_bytes, self.relative_gap, cell.mesh
        )

    def _note(self, cell: _Cell, why: str) -> None:
        """Note why a mesh lost: of its schedules the first, which is the fastest."""
        number = cell.schedule.num_micro_batches
        self._lost.setdefault(cell.mesh, f"with {number} micro-batches {why}")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
