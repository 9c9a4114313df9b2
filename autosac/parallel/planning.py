"""From a model and a cluster to a parallel plan.

Sharding degrees are enumerated; one MILP each decides on FSDP units, resharding and
recomputation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autosac.errors import InfeasibleBudgetError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.context_parallel import Method, check_method
from autosac.parallel.formulating import Setting
from autosac.parallel.mesh_racing import Division, TpPlan, parts_of
from autosac.parallel.meshes import cheapest_mesh, multiples, read_mesh
from autosac.parallel.plans import ParallelPlan
from autosac.parallel.preparing import (
    chooser_of,
    cluster_of,
    profile_for,
    with_given_units,
)
from autosac.parallel.racing import make_parallel_plan
from autosac.parallel.tp_styles import WHOLE
from autosac.planning.make_plan import Offload, read_offload
from autosac.profiles.profile import Profile
from autosac.profiles.restricting import check_far_memory
from autosac.quantities import parse_bytes, read_host_budget
from autosac.solvers.milp.solution import Backend
from autosac.solving.solve_options import RELATIVE_GAP, SolveOptions, read_segments
from autosac.step.arguments import read_fsdp_dtypes
from autosac.step.marks import Marks


def plan_parallel(
    model: torch.nn.Module | Profile,
    inputs: Any = None,
    *,
    cluster: str | ClusterSpec,
    memory_budget: int | str,
    num_gpus: int | None = None,
    degrees: Sequence[int] | None = None,
    mesh: Mapping[str, int | None] | None = None,
    tp_plan: TpPlan = None,
    loss_parallel: bool = False,
    cp_method: Method = "ulysses",
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    param_dtype: torch.dtype | str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    segments: int | None = None,
    backend: Backend = "highs",
    relative_gap: float = RELATIVE_GAP,
    time_limit_s: float | None = None,
    offload: Offload = False,
    host_budget: int | str | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ParallelPlan:
    """Find how to shard and recompute for the least step time under a memory budget.

    Neither a GPU nor a cluster is needed. Equal arguments give equal plans, however
    busy the machine is, unless there is a time limit; to have one plan on all ranks
    make it once and load the saved file on each. Plans that were made from a `Profile`
    before are known: none is slower than one of them that fits.

    Args:
        model: The model, on the CPU or the meta device, or a `Profile` of its step on
            a GPU of the cluster (then no other option is taken).
        inputs: Of one rank, as in `profile`.
        cluster: A `ClusterSpec`, or the name of a known one such as "hgx-h100".
        memory_budget: Cap on the peak of a rank: bytes, or text such as "72GiB".
        num_gpus: GPUs to use: part of a node, or whole nodes; None for all of them.
        degrees: Sharding degrees to look at; None for all that fit the cluster.
        mesh: ``{"tp": n}``: besides, n ranks of a node share slices of tensors and see
            one batch together; ``{"tp": None}`` tries all that divide a node. None for
            none. ``{"cp": n}``: n ranks have a part each of the sequence of one batch,
            the second dimension of `inputs`; None tries all that fit the cluster. With
            both, groups that share slices share a sequence.
        tp_plan: Which: styles of modules by FQN or pattern (`tp_styles`); "tensor" or
            "sequence" (each rank has a part of the sequence between blocks) to find
            them, from the model's own plan if it is one of Transformers, else by
            names; "expert" for whole experts of a mixture on each rank, with or
            without parts of the sequence; None to try all.
        loss_parallel: The head's logits stay divided over the vocabulary among ranks
            that share slices, and the loss is computed on these: train under
            `torch.distributed.tensor.parallel.loss_parallel`.
        cp_method: How attention sees the whole sequence: "ulysses", by all-to-alls of
            heads, or "ring", which is predicted and cannot be applied.
        ac_units: The only modules that may be AC units: names, patterns such as
            ``"blocks.*"``, or classes; None for all that can be.
        fsdp_units: The modules that are FSDP units besides the model itself, likewise;
            None to choose the best. Which of them reshard is chosen in any case.
        param_dtype: Type in which parameters are gathered and used, such as
            ``torch.bfloat16``, "bfloat16" or "bf16"; None for their own.
        reduce_dtype: Type in which gradients are reduced, likewise; given with
            `param_dtype`.
        segments: None to choose among many exact points of every trade-off curve; a
            number to choose among the breakpoints of fits of up to so many linear
            segments (pwlf), which are points as well. Each number up to it is planned
            with, and the fastest plan is kept.
        backend: MILP solver, "highs" or "cbc".
        relative_gap: A solve stops when the step time is proven this close to the
            least; another degree must be faster by more to be worked out.
        time_limit_s: A solve stops after this long with the best plan so far, or else
            with that of least peak, which no limit shortens the search for; None to
            count work only, which is the same in every run.
        offload: Whether what AC units keep may lie in far memory, as in `plan`. Each
            rank then has of its device's link what `cluster` says that it shares.
        host_budget: Cap on what one rank has there, in bytes or as text; None for none.
        offload_dir: Where files of the CPU's far memory lie, as in `plan`.
        options: As in `profile`, but `device`.

    Raises:
        InfeasibleBudgetError: No plan fits; says the least peak of a rank and how many
            GPUs would be enough.
        ValueError: An argument does not fit the cluster, or cannot be read; or FSDP2
            does not take `fsdp_units`.
        UnsupportedError: The memory of such a step under FSDP2 is not modelled.
        ArgumentError: Tensors or sequences cannot be divided so; names the module.
    """
    spec = cluster_of(cluster, num_gpus)
    numbers: list[int | None] = [None]
    if segments is not None:
        numbers = list(range(1, read_segments(segments) + 1))
    mesh_degrees = read_mesh(mesh, tp_plan, loss_parallel, spec)
    check_method(cp_method, is_shared=mesh_degrees[1] != (1,))
    profile = profile_for(spec, model, inputs, options, plan_parallel)
    budget_bytes = parse_bytes(memory_budget, total_bytes=spec.device.memory_bytes)
    how = SolveOptions(
        backend=backend, relative_gap=relative_gap, time_limit_s=time_limit_s
    )
    setting = Setting(**read_fsdp_dtypes(param_dtype, reduce_dtype))
    directory = read_offload(offload, offload_dir)
    host_bytes = read_host_budget(host_budget, offload=offload)

    def fastest(
        profile: Profile, spec: ClusterSpec, budget_bytes: int, division: Division
    ) -> ParallelPlan:
        tensor, context = parts_of(division)
        shards = multiples(degrees, context.degree, spec)
        own = replace(setting, num_slices=tensor.degree)
        profile, own = with_given_units(profile, own, ac_units, fsdp_units)
        if offload == "auto":
            try:
                return fastest_of(profile, own, spec, budget_bytes, shards)
            except InfeasibleBudgetError:
                if not profile.may_offload:
                    raise
        if offload:
            check_far_memory(profile)
            own = replace(own, link=spec.link, host_bytes=host_bytes)
        plan = fastest_of(profile, own, spec, budget_bytes, shards)
        return replace(plan, offload_dir=directory)

    def fastest_of(
        profile: Profile,
        own: Setting,
        spec: ClusterSpec,
        budget_bytes: int,
        shards: Sequence[int] | None,
    ) -> ParallelPlan:
        plans: list[ParallelPlan] = []
        for number in numbers:
            chooser = chooser_of(profile, replace(own, segments=number))
            try:
                plans.append(
                    make_parallel_plan(
                        chooser, spec, budget_bytes, degrees=shards, options=how
                    )
                )
            except InfeasibleBudgetError:
                if number == numbers[-1] and not plans:
                    raise
        return min(plans, key=lambda plan: plan.step_ms)

    if mesh_degrees == ((1,), (1,)):
        return fastest(profile, spec, budget_bytes, WHOLE)
    return cheapest_mesh(
        profile,
        spec,
        budget_bytes,
        mesh_degrees,
        tp_plan,
        loss_parallel,
        cp_method,
        setting,
        fastest,
    )
