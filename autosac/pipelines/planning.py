"""From a model and a number of ranks to a plan of a pipeline.

Meshes, schedules and numbers of micro-batches are enumerated (`asked_meshes`);
`cutting` finds the cuts of each, and a MILP for each stage that comes into question
what it recomputes there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autosac.errors import ArgumentError, InfeasibleBudgetError, UnsupportedError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.context_parallel import METHODS, Method
from autosac.parallel.fsdp_checks import OF_FULLY_SHARD
from autosac.parallel.mesh_racing import TpPlan
from autosac.parallel.preparing import cluster_of
from autosac.pipelines.asked_meshes import AskedMesh
from autosac.pipelines.given_stages import check_loss
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.schedules import GPIPE, ONE_F_ONE_B
from autosac.pipelines.stage_choosing import FarBytes
from autosac.pipelines.stage_steps import PipelineLoss
from autosac.planning.make_plan import Offload, read_offload
from autosac.profiles.given import check_names
from autosac.quantities import read_host_budget
from autosac.solving.solve_options import RELATIVE_GAP
from autosac.step.arguments import (
    check_kind,
    check_no_synced_norms,
    read_fsdp_dtypes,
)

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
    stages_per_rank: int | Sequence[int] | None = None,
    cluster: str | ClusterSpec | None = None,
    num_gpus: int | None = None,
    mesh: Mapping[str, int | None] | None = None,
    tp_plan: TpPlan = None,
    loss_parallel: bool = False,
    cp_method: Method = METHODS[0],
    param_dtype: torch.dtype | str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
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
        num_ranks: Ranks of the pipeline, one for each stage, or several under
            interleaved 1F1B; with `mesh` groups. None for ``"pp"`` of `mesh`.
        num_micro_batches: Of a step; several numbers to choose the best. None for all
            that divide `global_batch`.
        global_batch: Rows of a step, those of all micro-batches of all replicas and
            shards together; None for as many as `inputs` has for each of these.
        memory_budget: Cap on the peak of a rank: bytes, or text such as "72GiB".
        schedules: Of ``"1F1B"``, ``"GPipe"`` and ``"Interleaved1F1B"``.
        stages_per_rank: Under interleaved 1F1B, where stage i is on rank i modulo their
            number; several numbers to choose the best, None for 2.
        cluster: A `ClusterSpec`, or the name of a known one, whose GPUs the ranks are:
            stages fill one node after the other. None for `device`, with sending taken
            to cost nothing.
        num_gpus: GPUs of the cluster, if not as many as it says.
        mesh: ``{"tp": n}``: each stage lies on n ranks of a node, which share slices
            of tensors and see one batch together; ``{"tp": None}`` tries all that
            divide a node. ``"fsdp"``: over how many ranks FSDP2 shards each stage;
            ``"replicate"``: how many such groups a stage has. ``"cp"``: in place of
            each rank that has a batch so many have a part each of its sequence, the
            second dimension of `inputs` and `target`; FSDP2 shards over these as well.
            None for none. With None for one of `fsdp` and `replicate`, or for
            ``"pp"``, all degrees with which all GPUs of the cluster, or some of them,
            share `global_batch` come into question; then ``"cp"`` and ``"tp"``, too,
            are chosen with them.
        tp_plan: Which slices, as in `plan_parallel`.
        loss_parallel: Logits stay divided, likewise.
        cp_method: How attention sees the whole sequence, likewise.
        param_dtype: Type that FSDP2 gathers parameters in, such as ``"bfloat16"``,
            ``"bf16"`` or ``torch.bfloat16``,
        reduce_dtype: and in which gradients add up and are reduced; both or none.
        relative_gap: A solve stops when it is proven this close to the least; where
            estimates guide the search, other cuts must be faster by more.
        offload: Whether AC units of stages may have in far memory what they keep
            between forward and backward of a micro-batch, as in `plan`. Each rank has
            of its device's link what `cluster` says that it shares. Not with slices
            of tensors or parts of sequences: of meshes that are chosen these are
            planned without.
        host_budget: Cap on what one rank has there of all micro-batches in flight, in
            bytes or as text; None for none.
        offload_dir: Where files of the CPU's far memory lie, as in `plan`.
        options: As in `profile`, such as `optimizer`: its class, or a function of the
            parameters of a stage.

    Raises:
        InfeasibleBudgetError: No plan fits; says the least peak.
        UnsupportedError: The model is no chain, or its blocks share parameters that no
            stages can hold together; `offload` with slices of tensors or parts of
            sequences; tokens meet elsewhere than in attention; or more than three
            stages a rank that FSDP2 shards.
        ArgumentError: An argument cannot be read, the batch cannot be cut so, tensors
            cannot be divided so, or the device has no known link to far memory.
        SolverError: A stage's dry run does not confirm its plan.
    """
    if cluster is None and num_gpus is not None:
        raise ArgumentError("`num_gpus` is given without the `cluster` that has them.")
    spec = None if cluster is None else cluster_of(cluster, num_gpus)
    check_names(options, plan_pipeline, advice=OF_FULLY_SHARD)
    check_kind(model)
    directory = read_offload(offload, offload_dir)
    far = FarBytes(read_host_budget(host_budget, offload=offload))
    given = given_batch(model, inputs, target, loss_fn, spec, options)
    asked = AskedMesh(
        mesh=mesh,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        global_batch=global_batch,
        memory_budget=memory_budget,
        schedules=schedules,
        stages_per_rank=stages_per_rank,
        tp_plan=tp_plan,
        loss_parallel=loss_parallel,
        cp_method=cp_method,
        **read_fsdp_dtypes(param_dtype, reduce_dtype),
        relative_gap=relative_gap,
    )
    refusal = asked.refuses_offload() if offload else None
    if offload is True and refusal is not None:
        raise refusal
    if offload is not True:
        try:
            return asked.plan(given)
        except InfeasibleBudgetError:
            if offload is False or refusal is not None:
                raise
    return replace(asked.plan(given, far), offload_dir=directory)


def given_batch(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    target: Any,
    loss_fn: PipelineLoss,
    cluster: ClusterSpec | None,
    options: dict[str, Any],
) -> MicroBatch:
    """The model and all rows that are given."""
    if cluster is not None:
        if "device" in options:
            raise ArgumentError("`device` is that of `cluster`; leave it out.")
        options = {**options, "device": replace(cluster.device, link=cluster.link)}
    _check_options(options)
    check_loss(loss_fn)
    _check_tensors(inputs, target)
    check_no_synced_norms(model)
    if target.is_meta:  # the loss holds it, as it does a real one
        target = torch.zeros_like(target, device="cpu")
    return MicroBatch(
        model=model,
        inputs=inputs,
        target=target,
        loss_fn=loss_fn,
        options=options,
        cluster=cluster,
    )


def _check_options(options: dict[str, Any]) -> None:
    """Refuse what a pipeline's step does otherwise than a step of one process.

    Raises:
        UnsupportedError: An option is not planned.
        ArgumentError: The optimizer is made already.
    """
    for name in _NOT_IN_PIPELINES:
        if name in options:
            raise UnsupportedError(
                f"`{name}` is not planned in pipelines: leave it out, and out of the"
                " training loop."
            )
    made = options.get("optimizer")
    if isinstance(made, torch.optim.Optimizer):
        raise ArgumentError(
            f"`optimizer` is made already ({type(made).__name__}), and each stage of a"
            " pipeline makes one of its own parameters: pass its class, or"
            " `lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)`."
        )


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
