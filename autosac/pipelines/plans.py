"""A plan of a pipeline: which blocks each rank has, and what it recomputes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from autosac import _compat_pipelining
from autosac._compat_distributed import sharding_mesh
from autosac.parallel import followed_plans
from autosac.parallel.context_parallel import WHOLE_SEQUENCE, ContextParallel
from autosac.parallel.divided_loss import loss_for
from autosac.parallel.fsdp_applying import (
    check_is_mesh,
    check_mesh,
    make_mesh,
    shard,
)
from autosac.parallel.mesh_racing import Division, division_of
from autosac.parallel.sequence_parts import tensor_part
from autosac.parallel.tp_styles import WHOLE, TensorParallel
from autosac.pipelines.blocks import Stage, Tokens
from autosac.pipelines.given_stages import check_loss, read_stages
from autosac.pipelines.schedules import Schedule
from autosac.pipelines.sharded_stages import ALONE, DataParallel, stage_units
from autosac.pipelines.stage_plans import StagePlan
from autosac.plan_kinds import check_consistent, loaded, plan_record
from autosac.profiles.fingerprints import Fingerprint, check_model
from autosac.profiles.mistakes import check_unplanned
from autosac.quantities import format_bytes, format_ms
from autosac.step import arguments
from autosac.summaries import Summarized, Summary, Table, equal_rows_once
from autosac.units.policy_checks import policies_problem

_FORMAT_VERSION = 3


@dataclass(frozen=True, kw_only=True, repr=False)
class PipelinePlan(Summarized):
    """Stages of a model on the ranks of a pipeline, with what a step then takes.

    Attributes:
        pipeline: The schedule and its numbers.
        stage_plans: The stages in order; stage i is on rank i of the mesh's ``"pp"``,
            modulo the size of that.
        budget_bytes: The cap on the peak of a rank, with what slow threads may hold.
        step_ms: Predicted time of a step, played action by action.
        alternatives: Other schedules, numbers of micro-batches and meshes, and why they
            lost.
        device: Of the ranks.
        calibrated: Times of ops were measured, not modelled.
        model: Fingerprint of the model the plan is for.
        torch_version: PyTorch that the model was traced with.
        tensor: How tensors of a stage are divided among ranks that see one batch,
        context: and how groups of these share its sequence.
        parallel: Replicas and shards of each stage, which see batches of their own, or
            parts of some.
        bound_ms: No step is faster, by the times of blocks that recompute nothing: of
            all schedules, numbers of micro-batches and, if degrees were open, meshes.
        offload_dir: Where files of the CPU's far memory lie; None for the system's
            directory of temporary files.
        num_gpus: If degrees were open, the GPUs that there are: those besides
            `num_ranks` are left idle, as no mesh with them was found to be faster.
        step_kwargs: Arguments that `step` of the schedule needs: without them the last
            rank keeps the outputs of all micro-batches, which the plan does not count.
    """

    pipeline: Schedule
    stage_plans: tuple[StagePlan, ...]
    budget_bytes: int
    step_ms: float
    alternatives: tuple[str, ...]
    device: str
    calibrated: bool
    model: Fingerprint
    torch_version: str
    tensor: TensorParallel = WHOLE
    context: ContextParallel = WHOLE_SEQUENCE
    parallel: DataParallel = ALONE
    bound_ms: float = 0.0
    offload_dir: str | None = None
    num_gpus: int | None = None
    step_kwargs: ClassVar[dict[str, bool]] = {"return_outputs": False}

    @property
    def division(self) -> Division:
        """How ranks see one batch together, as `MeshRace` compares plans."""
        return division_of(self.tensor, self.context)

    @property
    def num_ranks(self) -> int:
        """Ranks that take part."""
        return math.prod(self.mesh_shape)

    @property
    def global_batch(self) -> int:
        """Rows of a step: of all micro-batches of all replicas and shards together."""
        rows = self.stage_plans[0].received.shape[0]
        return rows * self.pipeline.num_micro_batches * self.parallel.num_batches

    @property
    def _mesh(self) -> dict[str, int]:
        tp = self.tensor.degree
        inner = {**self.parallel.sizes, **({"tp": tp} if tp > 1 else {})}
        return {"pp": self.pipeline.num_ranks, **inner}

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks by dimension: stages, replicas, shards, parts of sequences, slices."""
        return tuple(self._mesh.values())

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Of ``"pp"``, ``"replicate"``, ``"fsdp"``, ``"cp"`` and ``"tp"`` those."""
        return tuple(self._mesh)

    @property
    def rank_peaks(self) -> tuple[int, ...]:
        """Predicted peak of the ranks of each place in the mesh's ``"pp"``."""
        first_of_each = self.stage_plans[: self.pipeline.num_ranks]
        return tuple(stage.peak_bytes for stage in first_of_each)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the rank whose peak is highest."""
        return max(self.rank_peaks)

    @property
    def highest_peak_bytes(self) -> int:
        """Predicted peak with all that slow threads of gloo may hold."""
        return max(stage.peak_bytes + stage.late_bytes for stage in self.stage_plans)

    @property
    def far_bytes(self) -> int:
        """Most bytes that a rank has in far memory."""
        ranks = map(self.pipeline.stages_of, range(self.pipeline.num_ranks))
        return max(sum(self.stage_plans[s].far_bytes for s in own) for own in ranks)

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which the busiest rank waits."""
        each_ms = [s.forward_ms + s.backward_ms for s in self.stage_plans]
        busy_ms = max(
            sum(each_ms[stage] for stage in self.pipeline.stages_of(rank))
            for rank in range(self.pipeline.num_ranks)
        )
        return max(0.0, 1 - self.pipeline.num_micro_batches * busy_ms / self.step_ms)

    def make_mesh(self, device_type: str | torch.device) -> DeviceMesh:
        """The mesh of the pipeline, of `mesh_shape`; every rank calls it.

        Neighbouring ranks share slices (``"tp"``), or the sequence (``"cp"``), and must
        get the same batch, of the latter `part_of`; those with another `batch_index`
        get batches of their own.

        Args:
            device_type: Of the ranks' devices, such as ``"cuda"``, or one of these.

        Raises:
            ArgumentError: There is no process group, or it has more or fewer ranks than
                `num_ranks`; or there is no such type.
        """
        ranks_per_stage = self.num_ranks // self.pipeline.num_ranks
        return make_mesh(
            device_type,
            self.mesh_shape,
            self.mesh_dim_names,
            lambda num_ranks: f"num_ranks={max(num_ranks // ranks_per_stage, 1)}",
        )

    def batch_index(self, mesh: DeviceMesh) -> int:
        """Which of the batches of a step, one for each replica and shard, a rank gets.

        Args:
            mesh: As `make_mesh` makes it.
        """
        check_is_mesh(mesh)
        index = 0
        for name, size in self.parallel.sizes.items():
            if name != "cp":
                index = index * size + mesh.get_local_rank(name)
        return index

    def part_of(self, batch: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """What this rank is given of the inputs or the target of its batch.

        Parts are copies. Whole inputs count on the first stage, and whole targets on
        the last one, as the loop holds them: one that drops them is below the peak.

        Args:
            batch: Either; its second dimension is the sequence.
            mesh: As `make_mesh` makes it.

        Raises:
            ArgumentError: The sequence cannot be cut evenly.
        """
        check_is_mesh(mesh)
        if self.context.degree == 1:
            return batch
        place = mesh.get_local_rank("cp")
        part: torch.Tensor = tensor_part(batch, self.context.degree, place)
        return part

    def stages(self, model: torch.nn.Module, mesh: DeviceMesh) -> list[PipelineStage]:
        """The stages of this rank: divided, with AC units, then sharded.

        Make the optimizer of ``stage.submod.parameters()`` after that. Parameters keep
        the names that they have in the model.

        Args:
            model: The whole model, with the device's weights or on the meta device;
                blocks of other ranks may be dropped with it.
            mesh: As `make_mesh` makes it.

        Raises:
            PlanMismatchError: The plan was made for another model.
            ArgumentError: A plan is applied already, the mesh has another shape, or
                ranks that must draw the same random numbers have other seeds.
            UnsupportedError: Attention is by a ring.
        """
        arguments.check_kind(model)
        check_unplanned(model)
        check_model(self.model, model)
        check_mesh(self.mesh_shape, self.mesh_dim_names, mesh)
        along = mesh["pp"] if len(self.mesh_shape) > 1 else mesh
        stages: list[PipelineStage] = []
        for index in self.pipeline.stages_of(along.get_local_rank()):
            plan = self.stage_plans[index]
            module = Stage(model, plan.fqns, self._tokens(mesh))
            if self.tensor.degree > 1:
                self.tensor.within(plan.fqns).apply(module, mesh["tp"])
            if self.context.degree > 1:
                self.context.within(plan.fqns).apply(module, mesh["cp"])
            data = plan.data(self._of_all)
            followed_plans.follow(module, data, self.pipeline.num_micro_batches)
            if self.parallel.degree > 1:
                self._shard(module, mesh)
            stage = _compat_pipelining.Stage(
                module,
                index,
                self.pipeline.num_stages,
                _device(mesh),
                input_args=plan.received.example("meta"),
                output_args=plan.sent.example("meta"),
                group=along.get_group(),
                most_in_flight=self.pipeline.most_in_flight(index),
            )
            stages.append(stage)
        return stages

    @property
    def _of_all(self) -> dict[str, Any]:
        """What all stages follow alike."""
        return {
            "budget_bytes": self.budget_bytes,
            "model": self.model,
            "step_ms": self.step_ms,
            "device": self.device,
            "calibrated": self.calibrated,
            "torch_version": self.torch_version,
            "reserved_bytes": None,
            "offload_dir": self.offload_dir,
        }

    def _tokens(self, mesh: DeviceMesh) -> Tokens | None:
        """The part of the sequence that this rank has; None for all of it."""
        if self.context.degree == 1:
            return None
        number = self.stage_plans[0].received.shape[1]
        return Tokens(number * mesh.get_local_rank("cp"), number)

    def _shard(self, module: Stage, mesh: DeviceMesh) -> None:
        names = tuple(self.parallel.sizes)
        if "cp" in names and "fsdp" in names:
            own = sharding_mesh(mesh, "fsdp", "cp")
        else:
            own = mesh[names[0]] if len(names) == 1 else mesh[names]
        shard(module, self.parallel.sharding(stage_units(module)), own)

    def schedule(
        self,
        stages: Sequence[PipelineStage] | PipelineStage,
        loss_fn: Callable[[Any, Any], torch.Tensor],
    ) -> Any:
        """PyTorch's schedule of the stages: ``schedule.step(..., **plan.step_kwargs)``.

        Args:
            stages: As `stages` makes them; if there is one, that itself will do.
            loss_fn: Output and target -> mean over a micro-batch. Gradients are those
                of its mean over all micro-batches.

        Raises:
            ArgumentError: Those are not the stages of a rank, or that is no function.
        """
        check_loss(loss_fn)
        given = read_stages(stages, self.pipeline)
        own = given if self.pipeline.is_looped else given[0]
        schedule_class = get_schedule_class(self.pipeline.name)
        number = self.pipeline.num_micro_batches
        return schedule_class(own, number, loss_fn=loss_for(self.tensor, loss_fn))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        record = {"format": _FORMAT_VERSION, **asdict(self)}
        Path(path).write_text(json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> PipelinePlan:
        """Read a plan that `save` wrote.

        Raises:
            ArgumentError: The file is not such a plan.
        """
        version = _FORMAT_VERSION
        record = plan_record(path, wanted="PipelinePlan", format_version=version)
        plan = loaded(cls, path, record)
        check_consistent(path, _problem(plan))
        return plan

    def report(self) -> str:
        """The plan as text for people."""
        return self.summary().text()

    def summary(self) -> Summary:
        """Schedule, budget, time; the stages, and what each of them recomputes."""
        pipeline, tp = self.pipeline, self.tensor.degree
        ranks = " x ".join(map(str, self.mesh_shape))
        waiting = f"{100 * self.bubble_fraction:.1f} %"
        late = ""
        if self.highest_peak_bytes > self.peak_bytes:
            highest = format_bytes(self.highest_peak_bytes)
            late = f", {highest} if threads of gloo are slow"
        facts = [
            (
                "pipeline",
                f"{pipeline.name}, {pipeline.num_micro_batches} micro-batches of"
                f" {self.stage_plans[0].received.shape[0]} on {ranks} {self.device}"
                + f", {pipeline.stages_per_rank} stages a rank"
                * pipeline.is_looped,
            ),
            ("budget", f"{format_bytes(self.budget_bytes)} a rank"),
            ("peak", f"{format_bytes(self.peak_bytes)} predicted{late}"),
            ("time", f"{format_ms(self.step_ms)} a step, {waiting} of it waiting"),
            ("bound", f"{format_ms(self.bound_ms)}: no step asked for takes less"),
        ]
        if self.num_gpus is not None and self.num_gpus > self.num_ranks:
            idle = f"{self.num_gpus - self.num_ranks} of {self.num_gpus} GPUs"
            facts.append(("idle", f"{idle}: no mesh with them was found to be faster"))
        if tp > 1:
            facts.append(("tensors", self._tensors()))
        if self.context.degree > 1:
            facts.append(("sequence", self._sequence()))
        if self.parallel.degree > 1:
            facts.append(("data", self._data()))
        if self.far_bytes:
            facts.append(("offload", self._offload()))
        facts += [("not", alternative) for alternative in self.alternatives]
        rows = [
            (
                str(index),
                f"{stage.fqns[0]} to {stage.fqns[-1]}",
                format_bytes(stage.peak_bytes),
                format_ms(stage.forward_ms),
                format_ms(stage.backward_ms),
                format_ms(stage.recompute_ms),
                str(pipeline.most_in_flight(index)),
            )
            for index, stage in enumerate(self.stage_plans)
        ]
        stages = Table(
            heads=(
                *("stage", "blocks", "peak", "forward", "backward"),
                *("of it recomputation", "in flight"),
            ),
            rows=tuple(rows),
            left=frozenset({0, 1}),
        )
        ratios = [
            (fqn, f"{ratio:.1%}")
            for stage in self.stage_plans
            for fqn, ratio in stage.policy.items()
        ]
        units = Table(heads=("AC unit", "recomputed"), rows=equal_rows_once(ratios))
        tables = (stages, units)
        return Summary(title="Pipeline plan", facts=tuple(facts), tables=tables)

    def _tensors(self) -> str:
        """How tensors are divided, and what that exchanges."""
        if self.context.degree > 1:
            return str(self.tensor)
        exchange_ms = max(stage.exchange_ms for stage in self.stage_plans)
        return (
            f"{self.tensor}; their collectives take up to {format_ms(exchange_ms)} of a"
            " micro-batch in a stage"
        )

    def _sequence(self) -> str:
        """How the sequence is shared, and what is waited for that."""
        exchange_ms = max(stage.exchange_ms for stage in self.stage_plans)
        return (
            f"{self.context}; in a stage they wait for each other"
            f"{', for tensors too,' * (self.tensor.degree > 1)} up to"
            f" {format_ms(exchange_ms)} of a micro-batch"
        )

    def _offload(self) -> str:
        """What lies in far memory, and what that takes."""
        waits_ms = max(stage.waits_ms for stage in self.stage_plans)
        return (
            f"up to {format_bytes(self.far_bytes)} of a rank in"
            f" {'a file' if self.device == 'cpu' else 'its host'}; a stage waits for it"
            f" up to {format_ms(waits_ms)} of a micro-batch"
        )

    def _data(self) -> str:
        """Replicas and shards, and what these exchange in a step."""
        gather_ms = max(stage.gather_ms for stage in self.stage_plans)
        reduce_ms = max(stage.reduce_ms for stage in self.stage_plans)
        return (
            f"{self.parallel}; a stage gathers its parameters in up to"
            f" {format_ms(gather_ms)} of a step and reduces gradients in up to"
            f" {format_ms(reduce_ms)}"
        )


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _problem(plan: PipelinePlan) -> str | None:
    """Why the fields of a plan cannot be true together, in words; None if they can."""
    stages, number = plan.stage_plans, plan.pipeline.num_stages
    if len(stages) != number:
        return f"it has {len(stages)} stages, and its schedule {number}"
    if not all(stage.fqns and stage.received.shape for stage in stages):
        return "a stage of it has no block, or gets no batch"
    if not plan.step_ms:
        return "its step takes no time"
    for stage in stages:
        wrong = policies_problem(stage.op_policies, stage.policy, plan.model)
        if wrong is not None:
            return wrong
    return None
