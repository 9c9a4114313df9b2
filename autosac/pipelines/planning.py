"""From a model and a number of ranks to a plan of a pipeline.

Meshes, schedules and numbers of micro-batches are enumerated; `cutting` finds the cuts
of each, and a MILP for each stage that comes into question what it recomputes there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosac.errors import ArgumentError, InfeasibleBudgetError, UnsupportedError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.mesh_racing import (
    Lost,
    MeshRace,
    TpPlan,
    read_degrees,
    read_dimensions,
)
from autosac.parallel.preparing import cluster_of
from autosac.parallel.tp_styles import WHOLE, TensorParallel
from autosac.parallel.tp_tracing import fake_ranks
from autosac.pipelines.blocks import check_cuts
from autosac.pipelines.mesh_choosing import MeshSearch
from autosac.pipelines.micro_batches import MicroBatch, rows_of
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.schedule_racing import Race, fastest
from autosac.pipelines.schedules import GPIPE, ONE_F_ONE_B, Schedule
from autosac.pipelines.sharded_stages import ALONE, DataParallel
from autosac.pipelines.stage_choosing import FarBytes
from autosac.pipelines.stage_steps import PipelineLoss
from autosac.planning.make_plan import Offload, check_offload
from autosac.quantities import parse_bytes
from autosac.solving.solve_options import RELATIVE_GAP

_CHOSEN = ("replicate", "fsdp")  # dimensions that, left open, make up all GPUs
_NOT_IN_PIPELINES = (
    *("accumulate", "autocast", "clip_grad_norm"),
    *("gradients_in_forward", "keeps_gradients"),
)


def plan_pipeline(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    *,
    target: Any,
    loss_fn: PipelineLoss,
    num_ranks: int | None = None,
    num_micro_batches: int | Sequence[int] | None = None,
    global_batch: int | None = None,
    memory_budget: int | str,
    schedules: Sequence[str] = (ONE_F_ONE_B, GPIPE),
    cluster: str | ClusterSpec | None = None,
    num_gpus: int | None = None,
    mesh: Mapping[str, int | None] | None = None,
    tp_plan: TpPlan = None,
    loss_parallel: bool = False,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    relative_gap: float = RELATIVE_GAP,
    offload: Offload = False,
    host_budget: int | str | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> PipelinePlan:
    """Find stages, schedule and recomputation for the least step time under a budget.

    Args:
        model: A chain of blocks; see `blocks`.
        inputs: A whole batch: it is cut into micro-batches along its first dimension.
            With `global_batch` some rows, which stand for all. With replicas or shards
            it is what one of these gets: each trains on a batch of its own.
        target: Likewise, of the batch.
        loss_fn: Output and target of a micro-batch -> their mean loss.
        num_ranks: Ranks of the pipeline, one for each stage; with `mesh` groups. None
            for ``"pp"`` of `mesh`.
        num_micro_batches: Of a step; several numbers to choose the best. None for all
            that divide `global_batch`.
        global_batch: Rows of a step, those of all micro-batches of all replicas and
            shards together; None for as many as `inputs` has for each of these.
        memory_budget: Cap on the peak of a rank: bytes, or text such as "72GiB".
        schedules: Of ``"1F1B"`` and ``"GPipe"``.
        cluster: A `ClusterSpec`, or the name of a known one, whose GPUs the ranks are:
            stages fill one node after the other. None for `device`, with sending taken
            to cost nothing.
        num_gpus: GPUs of the cluster, if not as many as it says.
        mesh: ``{"tp": n}``: each stage lies on n ranks of a node, which share slices
            of tensors and see one batch together; ``{"tp": None}`` tries all that
            divide a node. ``"fsdp"``: over how many ranks FSDP2 shards each stage;
            ``"replicate"``: how many such groups a stage has. None for none. With None
            for one of these, or for ``"pp"``, all degrees with which all GPUs of the
            cluster, or some of them, share `global_batch` come into question; then
            ``"tp"``, too, is chosen with them.
        tp_plan: Which slices, as in `plan_parallel`.
        loss_parallel: Logits stay divided, likewise.
        param_dtype: Type that FSDP2 gathers parameters in, such as ``"bfloat16"``,
        reduce_dtype: and in which gradients add up and are reduced; both or none.
        relative_gap: A solve stops when it is proven this close to the least; where
            estimates guide the search, other cuts must be faster by more.
        offload: Whether AC units of stages may have in far memory what they keep
            between forward and backward of a micro-batch, as in `plan`. Each rank has
            of its device's link what `cluster` says that it shares. Not with slices
            of tensors: ``{"tp": None}`` is 1 then.
        host_budget: Cap on what one rank has there of all micro-batches in flight, in
            bytes or as text; None for none.
        offload_dir: Where files of the CPU's far memory lie, as in `plan`.
        options: As in `profile`, such as `optimizer`.

    Raises:
        InfeasibleBudgetError: No plan fits; says the least peak.
        UnsupportedError: The model is no chain, or its blocks share parameters that no
            stages can hold together; or `offload` with slices of tensors.
        ArgumentError: An argument cannot be read, the batch cannot be cut so, tensors
            cannot be divided so, or the device has no known link to far memory.
        SolverError: A stage's dry run does not confirm its plan.
    """
    if cluster is None and num_gpus is not None:
        raise ArgumentError("`num_gpus` is given without the `cluster` that has them.")
    spec = None if cluster is None else cluster_of(cluster, num_gpus)
    directory = None if offload_dir is None else os.fspath(offload_dir)
    check_offload(offload, directory)
    far = FarBytes()
    if host_budget is not None:
        far = FarBytes(parse_bytes(host_budget, name="host_budget"))
    given = _given(model, inputs, target, loss_fn, spec, options)
    asked = _AskedMesh(
        mesh=mesh,
        num_ranks=_stages_of(mesh) if num_ranks is None else num_ranks,
        num_micro_batches=num_micro_batches,
        global_batch=global_batch,
        memory_budget=memory_budget,
        schedules=schedules,
        tp_plan=tp_plan,
        loss_parallel=loss_parallel,
        dtypes=(param_dtype, reduce_dtype),
        relative_gap=relative_gap,
    )
    if offload is True:
        return replace(asked.without_slices().plan(given, far), offload_dir=directory)
    try:
        return asked.plan(given)
    except InfeasibleBudgetError:
        if offload is False or asked.has_slices:
            raise
    return replace(asked.without_slices().plan(given, far), offload_dir=directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AskedMesh:
    """What is asked for of meshes and schedules: see `plan_pipeline`.

    Attributes:
        dtypes: In which FSDP2 gathers and reduces.
    """

    mesh: Mapping[str, int | None] | None
    num_ranks: int | None
    num_micro_batches: int | Sequence[int] | None
    global_batch: int | None
    memory_budget: int | str
    schedules: Sequence[str]
    tp_plan: TpPlan
    loss_parallel: bool
    dtypes: tuple[str | None, str | None]
    relative_gap: float

    @property
    def has_slices(self) -> bool:
        """Whether tensors must be divided."""
        degree = (self.mesh or {}).get("tp", 1)
        return degree not in (1, None) or self.tp_plan is not None or self.loss_parallel

    def without_slices(self) -> _AskedMesh:
        """The same with tensors that are whole, as collectives may hold what is moved.

        Raises:
            UnsupportedError: They must be divided.
        """
        if self.has_slices:
            raise UnsupportedError(
                "`offload` is not planned in pipelines with tensor parallelism, whose"
                " collectives may hold what is moved: leave it, or 'tp' of `mesh`,"
                " `tp_plan` and `loss_parallel`, out."
            )
        if self.mesh is None:
            return self
        return replace(self, mesh={**self.mesh, "tp": 1})

    def plan(self, given: MicroBatch, far: FarBytes | None = None) -> PipelinePlan:
        """The plan.

        Args:
            given: The model and all rows.
            far: What a rank may have in far memory; None for nothing.
        """
        given = replace(given, far=far)
        if self.num_ranks is None or _is_open(self.mesh):
            return self.search(given).run()
        spec, num_ranks = given.cluster, self.num_ranks
        degrees, parallel = _read_mesh(
            self.mesh, self.tp_plan, self.loss_parallel, num_ranks, spec
        )
        if self.dtypes != (None, None):
            parallel = _in_types(parallel, *self.dtypes)
        num_rows = _num_rows(given.inputs, self.global_batch, parallel)
        candidates = _schedules(
            self.num_micro_batches,
            self.global_batch and num_rows,
            num_ranks,
            self.schedules,
        )
        _check_cut(num_rows, candidates)
        asked = _Asked(
            micro_batches=_cut(replace(given, parallel=parallel), num_rows, candidates),
            schedules=candidates,
            memory_budget=self.memory_budget,
            relative_gap=self.relative_gap,
        )
        if degrees == (1,):
            return asked.planned(WHOLE)
        race = MeshRace(asked.planned)
        race.run(given.model, degrees, self.tp_plan, self.loss_parallel)
        if race.best is None:
            raise race.least[0] if race.least else race.refused[0][1]
        lost = map(_lost, race.lost())
        return replace(race.best, alternatives=(*race.best.alternatives, *lost))

    def search(self, given: MicroBatch) -> MeshSearch:
        """The search for degrees that are left open."""
        return _search(
            given,
            self.mesh,
            self.num_ranks,
            self.dtypes,
            self.num_micro_batches,
            self.global_batch,
            memory_budget=self.memory_budget,
            tp_plan=self.tp_plan,
            loss_parallel=self.loss_parallel,
            schedules=self.schedules,
            relative_gap=self.relative_gap,
        )


def search_for(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    *,
    target: Any = None,
    loss_fn: PipelineLoss,
    num_ranks: int | None = None,
    num_micro_batches: int | Sequence[int] | None = None,
    global_batch: int | None = None,
    memory_budget: int | str,
    schedules: Sequence[str] = (ONE_F_ONE_B, GPIPE),
    cluster: ClusterSpec,
    mesh: Mapping[str, int | None],
    tp_plan: TpPlan = None,
    loss_parallel: bool = False,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    relative_gap: float = RELATIVE_GAP,
    **options: Any,
) -> MeshSearch:
    """The search for a mesh without offload; arguments are `plan_pipeline`'s."""
    given = _given(model, inputs, target, loss_fn, cluster, options)
    asked = _AskedMesh(
        mesh=mesh,
        num_ranks=_stages_of(mesh) if num_ranks is None else num_ranks,
        num_micro_batches=num_micro_batches,
        global_batch=global_batch,
        memory_budget=memory_budget,
        schedules=schedules,
        tp_plan=tp_plan,
        loss_parallel=loss_parallel,
        dtypes=(param_dtype, reduce_dtype),
        relative_gap=relative_gap,
    )
    return asked.search(given)


def _given(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    target: Any,
    loss_fn: PipelineLoss,
    cluster: ClusterSpec | None,
    options: dict[str, Any],
) -> MicroBatch:
    """The model and all rows that are given."""
    if cluster is not None:
        options = {**options, "device": replace(cluster.device, link=cluster.link)}
    _check_options(options)
    _check_tensors(inputs, target)
    return MicroBatch(
        model=model,
        inputs=inputs,
        target=target,
        loss_fn=loss_fn,
        options=options,
        cluster=cluster,
    )


def _cut(
    given: MicroBatch, num_rows: int, schedules: Sequence[Schedule]
) -> dict[int, MicroBatch]:
    """The micro-batches of so many rows by their numbers, the smallest ones first."""
    numbers = sorted({one.num_micro_batches for one in schedules}, reverse=True)
    sizes = {number: num_rows // number for number in numbers}
    micro_batches: dict[int, MicroBatch] = {}
    for number, size in sizes.items():
        micro_batches[number] = replace(
            given,
            inputs=rows_of(given.inputs, size),
            target=rows_of(given.target, size),
            undivided=micro_batches.get(numbers[0]),
        )
    return micro_batches


def _is_open(mesh: Mapping[str, int | None] | None) -> bool:
    """Whether degrees are to be chosen that make up all GPUs."""
    asked = mesh or {}
    return any(name in asked and asked[name] is None for name in _CHOSEN)


def _stages_of(mesh: Mapping[str, int | None] | None) -> int | None:
    """Stages that a mesh asks for; None if they are to be chosen."""
    if mesh is None or "pp" not in mesh:
        raise ArgumentError(
            "`num_ranks` is missing: pass the number of stages, or mesh={'pp': None,"
            " 'fsdp': None, 'tp': None} to choose it and the rest for all GPUs."
        )
    return mesh["pp"]


def _search(
    given: MicroBatch,
    mesh: Mapping[str, int | None] | None,
    num_ranks: int | None,
    dtypes: tuple[str | None, str | None],
    num_micro_batches: int | Sequence[int] | None,
    global_batch: int | None,
    *,
    memory_budget: int | str,
    schedules: Sequence[str],
    **asked_for: Any,
) -> MeshSearch:
    """The search for degrees that are left open."""
    for name in schedules:
        Schedule(name=name, num_ranks=1, num_micro_batches=1)  # checks it
    if given.cluster is None or global_batch is None:
        raise ArgumentError(
            "`mesh` leaves degrees open, which are chosen for all GPUs of a cluster"
            " that share a batch: pass `cluster` (with `num_gpus`) and `global_batch`."
        )
    asked = read_dimensions(mesh, {"pp": None, "replicate": 1, "fsdp": 1, "tp": 1})
    if num_ranks is not None:
        if asked["pp"] not in (None, num_ranks):
            raise _other_stages(asked["pp"], num_ranks)
        asked["pp"] = num_ranks
    for name, number in asked.items():
        if number is not None:
            _number(asked, name)
    # Of any stage that is sharded: over how many ranks, the search says.
    sharded = DataParallel(shard_degree=2)
    if dtypes != (None, None):
        sharded = _in_types(sharded, *dtypes)
    numbers = None
    if num_micro_batches is not None:
        numbers = _numbers(num_micro_batches, None)
    _num_rows(given.inputs, global_batch, ALONE)
    inputs, target = rows_of(given.inputs, 1), rows_of(given.target, 1)
    base = replace(given, inputs=inputs, target=target, parallel=sharded)
    return MeshSearch(
        base=base,
        inputs=given.inputs,
        target=given.target,
        cluster=given.cluster,
        mesh=asked,
        num_micro_batches=numbers,
        global_batch=global_batch,
        schedules=schedules,
        budget_bytes=parse_bytes(memory_budget, total_bytes=base.memory_bytes),
        **asked_for,
    )


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
    """

    micro_batches: dict[int, MicroBatch]
    schedules: tuple[Schedule, ...]
    memory_budget: int | str
    relative_gap: float

    def planned(self, tensor: TensorParallel) -> PipelinePlan:
        """The plan of one division of tensors."""
        with _ranks(tensor):
            own = self._divided(tensor)
            for micro_batch in own.values():
                micro_batch.check_mesh()
                fqns, num_ranks = list(micro_batch.chain), self.schedules[0].num_ranks
                check_cuts(micro_batch.model, fqns, micro_batch.cuts, num_ranks)
            return fastest([self._race(own, schedule) for schedule in self.schedules])

    def _divided(self, tensor: TensorParallel) -> dict[int, MicroBatch]:
        """The micro-batches on the first rank of the group that is there."""
        if tensor.degree == 1:
            return self.micro_batches
        smallest = next(iter(self.micro_batches.values()))
        return {
            number: micro_batch.on_rank(tensor, smallest)
            for number, micro_batch in self.micro_batches.items()
        }

    def _race(self, own: Mapping[int, MicroBatch], schedule: Schedule) -> Race:
        micro_batch = own[schedule.num_micro_batches]
        total_bytes = micro_batch.memory_bytes
        budget_bytes = parse_bytes(self.memory_budget, total_bytes=total_bytes)
        return Race(micro_batch, schedule, budget_bytes, self.relative_gap)


def _ranks(tensor: TensorParallel) -> AbstractContextManager[None]:
    if tensor.degree == 1:
        return nullcontext()
    return fake_ranks(tensor.degree, divides_loss=tensor.divides_loss)


def _lost(lost: Lost[PipelinePlan]) -> str:
    """A mesh that was not taken, and why."""
    if lost.tensor.degree == 1:
        return f"tp=1: {lost.reason}"
    kind = "sequence" if lost.tensor.cuts_sequences else "tensor"
    return f"tp={lost.tensor.degree}, {kind}: {lost.reason}"


def _read_mesh(
    mesh: Mapping[str, int | None] | None,
    tp_plan: TpPlan,
    loss_parallel: bool,
    num_ranks: int,
    spec: ClusterSpec | None,
) -> tuple[tuple[int, ...], DataParallel]:
    """Degrees of tensor parallelism to look at, and replicas and shards."""
    known = {"pp": num_ranks, "replicate": 1, "fsdp": 1, "tp": 1}
    asked = read_dimensions(mesh, known)
    if asked["pp"] not in (num_ranks, None):
        raise _other_stages(asked["pp"], num_ranks)
    shards, replicas = (_number(asked, name) for name in ("fsdp", "replicate"))
    parallel = DataParallel(shard_degree=shards, replicate_degree=replicas)
    is_whole = asked["tp"] == 1 and tp_plan is None and not loss_parallel
    if is_whole and parallel.degree == 1:
        return (1,), parallel
    if spec is None:
        raise ArgumentError(
            "`mesh` or `tp_plan` asks for several ranks a stage, and `cluster` is"
            " missing, whose links time what these exchange: pass a known name or a"
            " `ClusterSpec`."
        )
    if is_whole:
        return (1,), parallel
    return read_degrees(asked["tp"], tp_plan, loss_parallel, spec), parallel


def _in_types(
    parallel: DataParallel, param_dtype: str | None, reduce_dtype: str | None
) -> DataParallel:
    """These replicas and shards under a mixed-precision policy."""
    if parallel.degree == 1:
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


def _check_options(options: dict[str, Any]) -> None:
    """Refuse what a pipeline's step does otherwise than a step of one process."""
    for name in _NOT_IN_PIPELINES:
        if name in options:
            raise UnsupportedError(
                f"`{name}` is not planned in pipelines: leave it out, and out of the"
                " training loop."
            )


def _schedules(
    num_micro_batches: int | Sequence[int] | None,
    global_batch: int | None,
    num_ranks: int,
    names: Sequence[str],
) -> tuple[Schedule, ...]:
    """Schedules to choose from, those of few micro-batches first."""
    numbers = _numbers(num_micro_batches, global_batch)
    return tuple(
        Schedule(name=name, num_ranks=num_ranks, num_micro_batches=number)
        for number in numbers
        for name in names
        # Of all numbers that there are, those that the schedule can have.
        if num_micro_batches is not None or name == GPIPE or number >= num_ranks
    )


def _numbers(
    num_micro_batches: int | Sequence[int] | None, global_batch: int | None
) -> list[int]:
    if num_micro_batches is None:
        if global_batch is None:
            raise ArgumentError(
                "`num_micro_batches` is missing: pass a number, or some; or pass"
                " `global_batch`, the rows of a step, to try all that divide it."
            )
        return [n for n in range(1, global_batch + 1) if global_batch % n == 0]
    numbers = (
        [num_micro_batches]
        if isinstance(num_micro_batches, int)
        else list(num_micro_batches)
    )
    if not numbers or not all(isinstance(n, int) and n >= 1 for n in numbers):
        raise ArgumentError(
            "`num_micro_batches` must be a whole number of at least 1, or some, got"
            f" {num_micro_batches!r}."
        )
    return numbers


def _check_tensors(inputs: Any, target: Any) -> None:
    for name, value in (("inputs", inputs), ("target", target)):
        if not isinstance(value, torch.Tensor) or not value.ndim:
            raise ArgumentError(
                f"`{name}` must be a tensor with a batch dimension, got"
                f" {type(value).__name__}: a pipeline cuts it into micro-batches."
            )
    if len(inputs) != len(target) or not len(inputs):
        raise ArgumentError(
            f"`inputs` has {len(inputs)} rows and `target` {len(target)}: a batch has"
            " as many of both, and at least one."
        )


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


def _check_cut(num_rows: int, schedules: Sequence[Schedule]) -> None:
    if not schedules:
        raise ArgumentError(
            f"No schedule has so few micro-batches as {num_rows} rows can be cut into:"
            " raise `global_batch`, or name 'GPipe' in `schedules`."
        )
    for schedule in schedules:
        if num_rows % schedule.num_micro_batches:
            raise ArgumentError(
                f"A batch of {num_rows} rows is not shared evenly by"
                f" {schedule.num_micro_batches} micro-batches; use another number."
            )
