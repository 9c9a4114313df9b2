"""A parallel plan: how ranks share a model, and what each of them recomputes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from autosac._compat_distributed import sharding_mesh
from autosac.errors import ArgumentError
from autosac.parallel import followed_plans, fsdp_applying
from autosac.parallel.context_parallel import WHOLE_SEQUENCE, ContextParallel
from autosac.parallel.mesh_racing import Division, division_of
from autosac.parallel.sequence_parts import Inputs, part_of
from autosac.parallel.sharding import Sharding
from autosac.parallel.tp_styles import WHOLE, TensorParallel
from autosac.plan_kinds import check_consistent, loaded, plan_record
from autosac.planning.plan_data import PlanData
from autosac.planning.plans import LARGE_GAP
from autosac.profiles.fingerprints import Fingerprint, check_model
from autosac.profiles.mistakes import check_unplanned
from autosac.profiles.step_facts import StepFacts
from autosac.quantities import format_bytes, format_ms, share_above
from autosac.step import arguments
from autosac.step.batch_signatures import BatchSignature
from autosac.step.training_step import normalize_inputs
from autosac.summaries import Summarized, Summary, Table, equal_rows_once
from autosac.units.policies import OpPolicy
from autosac.units.policy_checks import policies_problem

_FORMAT_VERSION = 2


# What an H200 showed (docs/gpus.md, "Ranks of many GPUs").


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A sharding degree, or a mesh, that was not taken.

    Attributes:
        shard_degree: Ranks over which parameters are sharded; 0 if none was planned.
        replicate_degree: How many such groups there are.
        reason: Why it lost.
        tp_degree: Ranks that share slices of tensors,
        sequence_parallel: and each have a part of the sequence between blocks,
        expert_parallel: or whole experts of a mixture.
        cp_degree: Ranks that have a part each of the sequence all the time.
        step_ms: Predicted time of its best step, None if it was not worked out.
        peak_bytes: Peak of a rank in that step.
    """

    shard_degree: int
    replicate_degree: int
    reason: str
    tp_degree: int = 1
    sequence_parallel: bool = False
    cp_degree: int = 1
    expert_parallel: bool = False
    step_ms: float | None = None
    peak_bytes: int | None = None

    def __str__(self) -> str:
        words = []
        if self.tp_degree > 1:
            kind = " and sequence" * self.sequence_parallel
            kind += " and expert" * self.expert_parallel
            words.append(f"tensor{kind} parallelism over {self.tp_degree} ranks")
        if self.cp_degree > 1:
            words.append(f"the sequence in parts for {self.cp_degree} ranks")
        if self.shard_degree:
            words.append(sharded_over(self.shard_degree))
            number = self.replicate_degree
            words.append(f"{number} replicas" if number > 1 else "no replicas")
        return ", ".join(words) or "each rank has its own batch"


def sharded_over(degree: int) -> str:
    """How many ranks share parameters, in words."""
    return f"sharded over {degree} ranks" if degree > 1 else "not sharded"


@dataclass(frozen=True, kw_only=True, repr=False)
class ParallelPlan(Summarized):
    """FSDP units and AC units of a model on a cluster, with what a step then takes.

    Attributes:
        sharding: FSDP units and degrees.
        policy: FQN of each AC unit -> share (0 to 1) of its activation memory that is
            recomputed instead of saved.
        op_policies: What happens to every op of each AC unit.
        budget_bytes: The cap on the peak of a rank.
        peak_bytes: Predicted peak of the rank whose peak is highest, simulated; on a
            GPU of what PyTorch's allocator hands out.
        late_bytes: What a rank may take beyond that while slow threads of gloo still
            hold what they have exchanged; 0 on a GPU. The cap holds for both together.
        composition: Bytes alive at that peak per category.
        compute_ms: Predicted compute of a step without recomputation,
        recompute_ms: its recomputation,
        exposed_forward_ms: what forward waits for collectives, played event by event,
        exposed_backward_ms: what backward does, its end included,
        contention_ms: and by how much collectives slow the compute that hides them.
        milp_ms: Time of the step as the MILP sees it, in which collectives overlap
            slightly differently,
        bound_ms: and proven lower bound on that at this sharding degree, over the
            candidate units and the selected points of their curves, with modules that
            look alike made alike, in the MILP's memory model.
        alternatives: Other sharding degrees, and why they lost.
        cluster: Name of the cluster that times are for,
        device: and of its GPUs.
        calibrated: Times of ops were measured, not modelled.
        model: Fingerprint of the model the plan is for.
        torch_version: PyTorch that the model was traced with.
        tensor: How tensors are divided among ranks that see the same batch.
        context: How ranks that see the same batch share its sequence.
        exchange_ms: What of `compute_ms` ranks spend on collectives among those that
            share tensors or sequences.
        offloaded_bytes: What a rank has in far memory, added up over the step,
        exposed_copies_ms: what of `recompute_ms` it waits for copies,
        offload_dir: and directory of the CPU's far memory; None for the system's
            temporary one.
        reserved_bytes: What PyTorch's allocator reserves if nothing stops it, about;
            None on the CPU and where it is not known.
        signatures: Of the batch of a rank that it is for; none in older files,
        facts: and what else is known of its step.
    """

    sharding: Sharding
    policy: dict[str, float]
    op_policies: tuple[OpPolicy, ...]
    budget_bytes: int
    peak_bytes: int
    late_bytes: int
    composition: dict[str, int]
    compute_ms: float
    recompute_ms: float
    exposed_forward_ms: float
    exposed_backward_ms: float
    milp_ms: float
    bound_ms: float
    alternatives: tuple[Alternative, ...]
    cluster: str
    device: str
    calibrated: bool
    model: Fingerprint
    torch_version: str
    tensor: TensorParallel = WHOLE
    context: ContextParallel = WHOLE_SEQUENCE
    exchange_ms: float = 0.0
    offloaded_bytes: int = 0
    exposed_copies_ms: float = 0.0
    offload_dir: str | None = None
    reserved_bytes: int | None = None
    contention_ms: float = 0.0
    signatures: tuple[BatchSignature, ...] = ()
    facts: StepFacts = field(default_factory=StepFacts)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks by dimension of the mesh: replicas if there are, shards, the others.

        Ranks that have parts of a sequence are shards as well: FSDP2 shards over both
        dimensions together.
        """
        *replicas, shards = self.sharding.mesh_shape
        parts, slices = self.context.degree, self.tensor.degree
        inner = (degree for degree in (parts, slices) if degree > 1)
        return (*replicas, shards // parts, *inner)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of these: ``"replicate"``, ``"shard"``, ``"cp"`` and ``"tp"``."""
        names = self.sharding.mesh_dim_names
        names += ("cp",) if self.context.degree > 1 else ()
        return names + (("tp",) if self.tensor.degree > 1 else ())

    @property
    def division(self) -> Division:
        """How ranks see one batch together."""
        return division_of(self.tensor, self.context)

    @property
    def num_gpus(self) -> int:
        """GPUs that take part."""
        return math.prod(self.mesh_shape)

    @property
    def highest_peak_bytes(self) -> int:
        """Predicted peak with all that slow threads of gloo may hold."""
        return self.peak_bytes + self.late_bytes

    @property
    def step_ms(self) -> float:
        """Predicted time of a step."""
        return (
            self.compute_ms
            + self.recompute_ms
            + self.exposed_forward_ms
            + self.exposed_backward_ms
            + self.contention_ms
        )

    @property
    def batches_per_s(self) -> float:
        """Throughput of all GPUs in batches, of which each GPU has one a step.

        GPUs that share slices of tensors, or a sequence, have one together.
        """
        return 1e3 * self.num_gpus / self.division.degree / self.step_ms

    @property
    def optimality_gap(self) -> float:
        """``(milp_ms - bound_ms) / milp_ms``."""
        return share_above(self.milp_ms, self.bound_ms)

    def make_mesh(self, device_type: str | torch.device) -> DeviceMesh:
        """The mesh to apply the plan on; every rank calls it.

        Args:
            device_type: Of the ranks' devices, such as ``"cuda"``, or one of these.

        Returns:
            A mesh of shape `mesh_shape`, its dimensions named as `mesh_dim_names`.

        Raises:
            ValueError: There is no process group, or it has more or fewer ranks than
                `num_gpus`; or there is no such type.
        """
        return fsdp_applying.make_mesh(
            device_type, self.mesh_shape, self.mesh_dim_names, "num_gpus={}".format
        )

    def apply(self, model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        """Divide tensors, install the AC units, then shard the model, in place.

        Make the optimizer after that. Parameters of a model on the meta device are
        made with ``model.to_empty(device=...)`` and initialised or loaded then.

        Args:
            model: On the device of the mesh or on the meta device, in the type that
                the plan was made for.
            mesh: As `make_mesh` makes it; sharding goes over its last dimension.

        Returns:
            The model.

        Raises:
            PlanMismatchError: The plan was made for another model; names the first
                difference.
            ValueError: A plan is applied already, the model is sharded already, or the
                mesh is none, has another shape, or other names where they matter.
        """
        for fqn, module in model.named_modules():
            if isinstance(module, FSDPModule):
                raise ArgumentError(
                    f"`model` is sharded already (`{fqn}` is an FSDP unit); apply the"
                    " plan to a model without."
                )
        arguments.check_kind(model)
        check_unplanned(model)
        check_model(self.model, model)
        fsdp_applying.check_mesh(self.mesh_shape, self.mesh_dim_names, mesh)
        if self.tensor.degree > 1:
            self.tensor.apply(model, mesh["tp"])
        if self.context.degree > 1:
            self.context.apply(model, mesh["cp"])
            mesh = sharding_mesh(mesh, "shard", "cp")
        elif self.tensor.degree > 1:
            mesh = mesh[self.sharding.mesh_dim_names]
        followed_plans.follow(model, self._data())
        fsdp_applying.shard(model, self.sharding, mesh)
        fsdp_applying.keep_as_planned(model)
        return model

    def _data(self) -> PlanData:
        """What a rank follows."""
        return followed_plans.plan_data(
            op_policies=self.op_policies,
            policy=self.policy,
            budget_bytes=self.budget_bytes,
            peak_bytes=self.peak_bytes,
            composition=self.composition,
            model=self.model,
            signatures=self.signatures,
            facts=self.facts,
            recompute_ms=self.recompute_ms,
            step_ms=self.step_ms,
            device=self.device,
            calibrated=self.calibrated,
            torch_version=self.torch_version,
            reserved_bytes=self.reserved_bytes,
            offloaded_bytes=self.offloaded_bytes,
            offload_dir=self.offload_dir,
        )

    def part_of(self, inputs: Any, mesh: DeviceMesh) -> Inputs:
        """What this rank is given of a batch: its part, with positions and labels.

        Parts of a sequence are copies. The whole batch counts as the loop holds it: one
        that lets go of it, or moves only its part to the device, is below the peak.

        Args:
            inputs: The batch of the ranks that see it together, as for planning.
            mesh: As `make_mesh` makes it.

        Returns:
            Arguments of the model, ``(args, kwargs)``.

        Raises:
            ArgumentError: The sequence cannot be cut evenly.
        """
        fsdp_applying.check_is_mesh(mesh)
        given = normalize_inputs(inputs)
        if self.context.degree == 1:
            return given
        return part_of(given, self.context, mesh["cp"].get_local_rank())

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        record = {"format": _FORMAT_VERSION, **asdict(self)}
        Path(path).write_text(json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ParallelPlan:
        """Read a plan that `save` wrote.

        Raises:
            ArgumentError: The file is not such a plan.
        """
        version = _FORMAT_VERSION
        record = plan_record(path, wanted="ParallelPlan", format_version=version)
        plan = loaded(cls, path, record)
        problem = policies_problem(plan.op_policies, plan.policy, plan.model)
        check_consistent(path, problem)
        return plan

    def report(self) -> str:
        """The plan as text for people."""
        return self.summary().text()

    def summary(self) -> Summary:
        """Mesh, budget, peak, time, and the units of both kinds."""
        shape = " x ".join(map(str, self.mesh_shape))
        exposed_ms = self.exposed_forward_ms + self.exposed_backward_ms
        late = contention = together = ""
        if self.division.degree > 1:
            together = f" of one batch for every {self.division.degree} ranks"
        if self.contention_ms:
            contention = f", {format_ms(self.contention_ms)} contention with the rest"
        if self.late_bytes:
            highest = format_bytes(self.highest_peak_bytes)
            late = f", {highest} if threads of gloo are slow"
        facts = [
            ("mesh", f"{shape} {self.device} ({self.cluster})"),
            ("budget", f"{format_bytes(self.budget_bytes)} a rank"),
            ("peak", f"{format_bytes(self.peak_bytes)} predicted{late}"),
            (
                "time",
                f"{format_ms(self.step_ms)} a step{together}:"
                f" {format_ms(self.compute_ms)}"
                f" compute, {format_ms(self.recompute_ms)} recomputation,"
                f" {format_ms(exposed_ms)} exposed communication" + contention,
            ),
            (
                "gap",
                f"{100 * self.optimality_gap:.1f} % to the proven bound at this"
                " sharding degree",
            ),
        ]
        if self.reserved_bytes is not None:
            reserved = format_bytes(self.reserved_bytes)
            facts.append(
                ("reserved", f"about {reserved} where there is room, predicted")
            )
        if self.optimality_gap > LARGE_GAP:
            gap = f"up to {self.optimality_gap:.1%} of the step may be avoidable"
            way_out = "plan with `time_limit_s`=60 to search longer"
            facts.append(("warning", f"{gap}; {way_out}, or with a little more memory"))
        if self.tensor.degree > 1:
            facts.append(("tensors", self._tensors()))
        if self.context.degree > 1:
            facts.append(("sequence", self._sequence()))
        if self.offloaded_bytes:
            facts.append(("offload", self._offload()))
        facts += [("not", f"{other}: {other.reason}") for other in self.alternatives]
        sharded = [
            (
                unit.fqn or "(the model)",
                "reshards" if unit.reshard_after_forward else "stays gathered",
            )
            for unit in self.sharding.units
        ]
        rows = [(fqn, f"{ratio:.1%}") for fqn, ratio in self.policy.items()]
        fsdp_units = Table(
            heads=("FSDP unit", "after forward"),
            rows=equal_rows_once(sharded),
            left=frozenset({0, 1}),
        )
        ac_units = Table(heads=("AC unit", "recomputed"), rows=equal_rows_once(rows))
        return Summary(
            title="Parallel plan", facts=tuple(facts), tables=(fsdp_units, ac_units)
        )

    def _tensors(self) -> str:
        """How tensors are divided, and what that exchanges."""
        if self.context.degree > 1:
            return str(self.tensor)
        return (
            f"{self.tensor}; {format_ms(self.exchange_ms)} of the compute is their"
            " collectives"
        )

    def _sequence(self) -> str:
        """How the sequence is shared, and what is waited for that."""
        return (
            f"{self.context}; {format_ms(self.exchange_ms)} of the compute is waiting"
            f" for each other{', for tensors too' * (self.tensor.degree > 1)}"
        )

    def _offload(self) -> str:
        """What lies in far memory, and what that takes."""
        return (
            f"{format_bytes(self.offloaded_bytes)} a rank to"
            f" {'a file' if self.device == 'cpu' else 'the host'},"
            f" {format_ms(self.exposed_copies_ms)} of the recomputation is waiting for"
            " it"
        )
