"""What is asked for of meshes and schedules of a pipeline, read and enumerated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from autosac.errors import (
    ArgumentError,
    AutosacError,
    UnsupportedError,
)
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.context_parallel import (
    METHODS,
    ContextParallel,
    Method,
    check_method,
)
from autosac.parallel.mesh_racing import (
    Division,
    Lost,
    MeshRace,
    TpPlan,
    check_no_group,
    parts_of,
    read_degrees,
    read_dimensions,
)
from autosac.parallel.meshes import read_parts
from autosac.parallel.partial_gradients import check_gradients_whole
from autosac.parallel.tp_checks import divided
from autosac.parallel.tp_styles import WHOLE
from autosac.parallel.tp_tracing import fake_ranks
from autosac.pipelines.asked_schedules import (
    check_cut,
    cut_of,
    numbers_of,
    schedules_of,
    several,
)
from autosac.pipelines.blocks import check_cuts
from autosac.pipelines.fastest import fastest
from autosac.pipelines.interleaved_racing import race_of
from autosac.pipelines.mesh_choosing import MeshSearch
from autosac.pipelines.micro_batches import MicroBatch, rows_of
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.schedule_racing import Race
from autosac.pipelines.schedules import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    SCHEDULES,
    Schedule,
)
from autosac.pipelines.sharded_stages import ALONE, DataParallel
from autosac.pipelines.shared_sequences import check_parts, context_of
from autosac.pipelines.stage_choosing import FarBytes
from autosac.quantities import parse_bytes, whole_number
from autosac.solving.solve_options import RELATIVE_GAP, check_solving

_CHOSEN = ("replicate", "fsdp")  # dimensions that, left open, make up all GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedMesh:
    """What is asked for of meshes and schedules; attributes are as in `plan_pipeline`.

    Raises:
        ArgumentError: Nothing says how many stages there are, or that they are chosen.
    """

    memory_budget: int | str
    mesh: Mapping[str, int | None] | None = None
    num_ranks: int | None = None
    num_micro_batches: int | Sequence[int] | None = None
    global_batch: int | None = None
    schedules: Sequence[str] = (ONE_F_ONE_B, GPIPE)
    stages_per_rank: int | Sequence[int] | None = None
    tp_plan: TpPlan = None
    loss_parallel: bool = False
    cp_method: Method = METHODS[0]
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    relative_gap: float = RELATIVE_GAP

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mapping | None):
            raise ArgumentError(
                "`mesh` must be degrees by dimension, such as {'fsdp': 8}, got"
                f" {self.mesh!r}."
            )
        is_shared = (self.mesh or {}).get("cp", 1) != 1
        check_method(self.cp_method, is_shared=is_shared)
        if self.num_ranks is None and "pp" not in (self.mesh or {}):
            raise ArgumentError(
                "`num_ranks` is missing: pass the number of stages, or mesh={'pp':"
                " None, 'fsdp': None, 'tp': None} to choose it and the rest for all"
                " GPUs."
            )
        if isinstance(self.schedules, str) or not isinstance(self.schedules, Sequence):
            raise ArgumentError(
                f"`schedules` must be a list of names, such as ['1F1B'], got"
                f" {self.schedules!r}."
            )
        if not self.schedules:
            raise ArgumentError(
                f"`schedules`={self.schedules!r} names none to plan with; use some of"
                f" {', '.join(SCHEDULES)}."
            )
        check_solving("highs", self.relative_gap)
        for name in self.schedules:
            if name not in SCHEDULES:
                raise ArgumentError(
                    f"There is no schedule {name!r} to plan with; use one of"
                    f" {', '.join(SCHEDULES)}."
                )

    @property
    def stage_numbers(self) -> list[int]:
        """Numbers of stages that a rank may have under interleaved 1F1B."""
        if self.stages_per_rank is None:
            return [2]
        if INTERLEAVED not in self.schedules:
            raise ArgumentError(
                f"`stages_per_rank` is for {INTERLEAVED}, which `schedules` does not"
                " name: name it there, or leave `stages_per_rank` out."
            )
        numbers = several(self.stages_per_rank)
        if not numbers or min(numbers) < 2:
            raise ArgumentError(
                "`stages_per_rank` must be a whole number of at least 2, or some, got"
                f" {self.stages_per_rank!r}: with 1 name '1F1B' in `schedules`."
            )
        return numbers

    def refuses_offload(self) -> UnsupportedError | None:
        """Why nothing that is asked for can be planned with offload; None if any can.

        Collectives may hold what is moved.
        """
        mesh = self.mesh or {}
        if mesh.get("cp", 1) not in (1, None):
            return UnsupportedError(
                "`offload` is not planned in pipelines with context parallelism, whose"
                " collectives may hold what is moved: leave it, or 'cp' of `mesh`, out."
            )
        degree = mesh.get("tp", 1)
        if degree not in (1, None) or self.tp_plan is not None or self.loss_parallel:
            return UnsupportedError(
                "`offload` is not planned in pipelines with tensor parallelism, whose"
                " collectives may hold what is moved: leave it, or 'tp' of `mesh`,"
                " `tp_plan` and `loss_parallel`, out."
            )
        return None

    def plan(self, given: MicroBatch, far: FarBytes | None = None) -> PipelinePlan:
        """The plan.

        Args:
            given: The model and all rows.
            far: What a rank may have in far memory where that can be planned; None for
                nothing.
        """
        num_ranks = self.num_ranks
        if num_ranks is None:
            num_ranks = (self.mesh or {})["pp"]
        if num_ranks is None or _is_open(self.mesh):
            return replace(self.search(given), far=far).run()
        whole_number(num_ranks, name="num_ranks")
        degrees, parts, parallel = _read_mesh(
            self.mesh, self.tp_plan, self.loss_parallel, num_ranks, given.cluster
        )
        parallel, parts = self._in_types(parallel, parts)
        num_rows = _num_rows(given.inputs, self.global_batch, parallel)
        try:
            candidates = schedules_of(
                self.num_micro_batches,
                self.global_batch and num_rows,
                num_ranks,
                self.schedules,
                self.stage_numbers,
            )
            check_cut(num_rows, candidates)
        except ArgumentError:
            # Too many stages, whatever the schedule, are the first reason.
            check_cuts(given.model, given.chain, given.cuts, num_ranks)
            raise
        cut, failed = cut_of(replace(given, parallel=parallel), num_rows, candidates)
        asked = _Asked(
            micro_batches=cut,
            schedules=tuple(c for c in candidates if c.num_micro_batches in cut),
            memory_budget=self.memory_budget,
            relative_gap=self.relative_gap,
            far=far,
        )
        if degrees == parts == (1,):
            best = asked.planned(WHOLE)
        else:
            best = self._cheapest(asked, given.model, degrees, parts)
        why = (f"{number} micro-batches: {error}" for number, error in failed.items())
        return replace(best, alternatives=(*best.alternatives, *why))

    def _cheapest(
        self,
        asked: _Asked,
        model: torch.nn.Module,
        degrees: tuple[int, ...],
        parts: tuple[int, ...],
    ) -> PipelinePlan:
        """The plan whose batches take least time on a GPU.

        Args:
            asked: Schedules and micro-batches.
            model: Undivided.
            degrees: Of tensor parallelism,
            parts: and of context parallelism.
        """
        check_no_group(parts)
        race = MeshRace(asked.planned)
        contexts = []
        for number in parts:
            try:
                contexts.append(asked.context_of(number, self.cp_method))
            except AutosacError as error:
                race.refused.append((ContextParallel(degree=number), error))
        race.run(model, degrees, self.tp_plan, self.loss_parallel, lambda _: contexts)
        if race.best is None:
            raise race.least[0] if race.least else race.refused[0][1]
        lost = map(_lost, race.lost())
        return replace(race.best, alternatives=(*race.best.alternatives, *lost))

    def search(self, given: MicroBatch) -> MeshSearch:
        """The search for degrees that are left open.

        Raises:
            ArgumentError: What is asked for cannot be searched.
        """
        if given.cluster is None or self.global_batch is None:
            raise ArgumentError(
                "`mesh` leaves degrees open, which are chosen for all GPUs of a cluster"
                " that share a batch: pass `cluster` (with `num_gpus`) and"
                " `global_batch`."
            )
        known = {"pp": None, "replicate": 1, "fsdp": 1, "cp": 1, "tp": 1}
        mesh = read_dimensions(self.mesh, known)
        if self.num_ranks is not None:
            if mesh["pp"] not in (None, self.num_ranks):
                raise _other_stages(mesh["pp"], self.num_ranks)
            mesh["pp"] = self.num_ranks
        for name, number in mesh.items():
            if number is not None:
                _number(mesh, name)
        numbers = None
        if self.num_micro_batches is not None:
            numbers = numbers_of(self.num_micro_batches, None)
        _num_rows(given.inputs, self.global_batch, ALONE)
        base = replace(
            given,
            inputs=rows_of(given.inputs, 1),
            target=rows_of(given.target, 1),
            # Of any stage that is sharded: over how many ranks, the search says.
            parallel=self._in_types(DataParallel(shard_degree=2), (1,))[0],
        )
        return MeshSearch(
            base=base,
            inputs=given.inputs,
            target=given.target,
            cluster=given.cluster,
            mesh=mesh,
            num_micro_batches=numbers,
            global_batch=self.global_batch,
            tp_plan=self.tp_plan,
            loss_parallel=self.loss_parallel,
            cp_method=self.cp_method,
            schedules=self.schedules,
            stages_per_rank=self.stage_numbers,
            budget_bytes=parse_bytes(self.memory_budget, total_bytes=base.memory_bytes),
            relative_gap=self.relative_gap,
        )

    def _in_types(
        self, parallel: DataParallel, parts: tuple[int, ...]
    ) -> tuple[DataParallel, tuple[int, ...]]:
        """Replicas and shards under the mixed-precision policy, if there is one.

        And degrees of context parallelism with which there are any.
        """
        if self.param_dtype is None and self.reduce_dtype is None:
            return parallel, parts
        parts = tuple(n for n in parts if parallel.degree * n > 1)
        return _in_types(parallel, parts, self.param_dtype, self.reduce_dtype), parts


def _is_open(mesh: Mapping[str, int | None] | None) -> bool:
    """Whether degrees are to be chosen that make up all GPUs."""
    asked = mesh or {}
    return any(name in asked and asked[name] is None for name in _CHOSEN)


def _other_stages(stages: int | None, num_ranks: int) -> ArgumentError:
    return ArgumentError(
        f"`mesh` has pp={stages}, and `num_ranks` is {num_ranks}: make them"
        " equal, or leave 'pp' out."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is asked for, whatever the mesh.

    Attributes:
        micro_batches: Of each number, undivided.
        schedules: To choose from.
        memory_budget: Cap on the peak of a rank.
        relative_gap: As in `plan_pipeline`.
        far: What a rank may have in far memory; None for nothing.
        in_parts: What was traced of sequences that ranks share, of whole tensors.
    """

    micro_batches: dict[int, MicroBatch]
    schedules: tuple[Schedule, ...]
    memory_budget: int | str
    relative_gap: float
    far: FarBytes | None
    in_parts: dict[ContextParallel, MicroBatch] = field(default_factory=dict)

    @property
    def undivided(self) -> MicroBatch:
        """The smallest micro-batch."""
        return next(iter(self.micro_batches.values()))

    def planned(self, division: Division) -> PipelinePlan:
        """The plan of one way to see a batch together.

        Raises:
            AutosacError: As `plan_pipeline`.
        """
        tensor, _ = parts_of(division)
        with _ranks(division), divided(tensor.styles, tensor.degree):
            own = self._divided(division)
            least = min(schedule.num_stages for schedule in self.schedules)
            for micro_batch in own.values():
                micro_batch.check_mesh()
                check_cuts(
                    micro_batch.model, micro_batch.chain, micro_batch.cuts, least
                )
            races = [self._race(own, schedule) for schedule in self.schedules]
            return fastest(races, self.far)

    def context_of(self, degree: int, method: Method) -> ContextParallel:
        """How so many ranks share a sequence.

        Raises:
            ArgumentError: It cannot be cut so.
            UnsupportedError: A rank cannot run the model on its part.
        """
        context = context_of(self.undivided, degree, method)
        if degree > 1:
            with _ranks(context):
                own = self.undivided.on_rank(context, self.undivided)
                check_parts(own)
            self.in_parts[context] = own
        return context

    def _divided(self, division: Division) -> dict[int, MicroBatch]:
        """The micro-batches on the first rank of the group that is there."""
        if division.degree == 1:
            return self.micro_batches
        divided = {
            number: micro_batch.on_rank(division, self.undivided)
            for number, micro_batch in self.micro_batches.items()
        }
        tensor, context = parts_of(division)
        if tensor.degree > 1 and context in self.in_parts:
            smallest = next(iter(divided.values())).whole
            check_gradients_whole(
                self.in_parts[context].whole.tape, smallest.tape, tensor
            )
        return divided

    def _race(self, own: Mapping[int, MicroBatch], schedule: Schedule) -> Race:
        micro_batch = own[schedule.num_micro_batches]
        total_bytes = micro_batch.memory_bytes
        budget_bytes = parse_bytes(self.memory_budget, total_bytes=total_bytes)
        return race_of(micro_batch, schedule, budget_bytes, self.relative_gap)


def _ranks(division: Division) -> AbstractContextManager[None]:
    if division.degree == 1:
        return nullcontext()
    tensor, _ = parts_of(division)
    return fake_ranks(division.degree, divides_loss=tensor.divides_loss)


def _lost(lost: Lost[PipelinePlan]) -> str:
    """A mesh that was not taken, and why."""
    tensor, context = parts_of(lost.division)
    words = [f"cp={context.degree}"] * (context.degree > 1)
    if tensor.degree > 1 or not words:
        words.append(f"tp={tensor.degree}")
    if tensor.degree > 1:
        words.append("sequence" if tensor.cuts_sequences else "tensor")
        words += ["expert"] * tensor.has_whole_experts
    return f"{', '.join(words)}: {lost.reason}"


def _read_mesh(
    mesh: Mapping[str, int | None] | None,
    tp_plan: TpPlan,
    loss_parallel: bool,
    num_ranks: int,
    spec: ClusterSpec | None,
) -> tuple[tuple[int, ...], tuple[int, ...], DataParallel]:
    """Degrees of tensor and context parallelism to look at, replicas and shards."""
    known = {"pp": num_ranks, "replicate": 1, "fsdp": 1, "cp": 1, "tp": 1}
    asked = read_dimensions(mesh, known)
    if asked["pp"] not in (num_ranks, None):
        raise _other_stages(asked["pp"], num_ranks)
    shards, replicas = (_number(asked, name) for name in ("fsdp", "replicate"))
    parallel = DataParallel(shard_degree=shards, replicate_degree=replicas)
    is_whole = asked["tp"] == 1 and tp_plan is None and not loss_parallel
    if is_whole and asked["cp"] == 1 and parallel.degree == 1:
        return (1,), (1,), parallel
    if spec is None:
        raise ArgumentError(
            "`mesh` or `tp_plan` asks for several ranks a stage, and `cluster` is"
            " missing, whose links time what these exchange: pass a known name or a"
            " `ClusterSpec`."
        )
    parts = read_parts(asked["cp"], spec)
    if is_whole:
        return (1,), parts, parallel
    return (
        read_degrees(asked["tp"], tp_plan, loss_parallel, spec),
        parts,
        parallel,
    )


def _in_types(
    parallel: DataParallel,
    parts: tuple[int, ...],
    param_dtype: str | None,
    reduce_dtype: str | None,
) -> DataParallel:
    """These replicas and shards under a mixed-precision policy."""
    if not parts:
        raise ArgumentError(
            "`param_dtype` and `reduce_dtype` are types in which FSDP2 gathers and"
            " reduces, and `mesh` asks for none: pass mesh={'fsdp': ...}, or cast the"
            " model."
        )
    typed = replace(parallel, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    typed.sharding([])  # which checks the names
    return typed


def _number(asked: Mapping[str, int | None], name: str) -> int:
    """A degree that must be given."""
    number = asked[name]
    if not isinstance(number, int) or number < 1:
        raise ArgumentError(
            f"`mesh` has {name}={number!r}, and it must be a whole number of at least"
            " 1: pass one, or leave it out for 1."
        )
    return number


def _num_rows(
    inputs: torch.Tensor, global_batch: int | None, parallel: DataParallel
) -> int:
    """Rows of a step that one of the replicas and shards trains on."""
    if global_batch is None:
        return len(inputs)
    if not isinstance(global_batch, int) or global_batch < 1:
        raise ArgumentError(
            "`global_batch` must be a whole number of at least 1, the rows of a step,"
            f" got {global_batch!r}."
        )
    if global_batch % parallel.degree:
        raise ArgumentError(
            f"`global_batch`={global_batch} is not shared evenly by {parallel.degree}"
            " replicas and shards of `mesh`; use a multiple."
        )
    return global_batch // parallel.degree
