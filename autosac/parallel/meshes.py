"""The cheapest mesh of FSDP2 and tensor parallelism: each degree is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autosac.errors import InfeasibleBudgetError, UnsupportedError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.formulating import Setting
from autosac.parallel.mesh_racing import (
    Lost,
    MeshRace,
    TpPlan,
    read_degrees,
    read_dimensions,
)
from autosac.parallel.plans import Alternative, ParallelPlan
from autosac.parallel.racing import LATE
from autosac.parallel.tp_styles import TensorParallel
from autosac.parallel.tp_tracing import draws, exchange_ms, late_bytes, rank_profile
from autosac.profiles.profile import Profile
from autosac.quantities import format_bytes, format_parts

# Profile, cluster of one rank of each group, budget -> the best plan.
MakePlan = Callable[[Profile, ClusterSpec, int], ParallelPlan]


def read_mesh(
    mesh: Mapping[str, int | None] | None,
    tp_plan: Any,
    loss_parallel: bool,
    spec: ClusterSpec,
) -> tuple[int, ...]:
    """Degrees of tensor parallelism to look at, least first.

    Args:
        mesh: Degrees by dimension, as in `plan_parallel`.
        tp_plan: Styles, which need a degree,
        loss_parallel: and so do divided logits.
        spec: The cluster.

    Raises:
        ArgumentError: A dimension is not known, or a degree does not fit a node.
        UnsupportedError: Stages of pipelines are asked for.
    """
    degrees = read_dimensions(mesh, {"pp": 1, "tp": 1})
    pipeline, degree = degrees["pp"], degrees["tp"]
    if pipeline not in (1, None):
        raise UnsupportedError(
            f"`mesh` asks for {pipeline} stages, which `plan_parallel` does not plan:"
            " use `autosac.plan_pipeline(model, inputs, target=...,"
            f" loss_fn=..., num_ranks={pipeline}, num_micro_batches=...,"
            " memory_budget=..., cluster=..., mesh={'fsdp': ...,"
            f" 'tp': {degree}}})`."
        )
    return read_degrees(degree, tp_plan, loss_parallel, spec)


def cheapest_mesh(
    profile: Profile,
    spec: ClusterSpec,
    budget_bytes: int,
    degrees: tuple[int, ...],
    tp_plan: TpPlan,
    loss_parallel: bool,
    setting: Setting,
    make_plan: MakePlan,
) -> ParallelPlan:
    """The plan whose batches take least time on a GPU.

    Args:
        profile: The step of the whole model.
        spec: The cluster.
        budget_bytes: Cap on the peak of a rank.
        degrees: Of tensor parallelism.
        tp_plan: Styles; or which to find, None for both kinds.
        loss_parallel: Logits stay divided.
        setting: What is decided already.
        make_plan: Plans FSDP2 and recomputation.

    Raises:
        AutosacError: No degree divides the model; says why the first one does not.
        InfeasibleBudgetError: No mesh fits.
    """

    def planned(tensor: TensorParallel) -> ParallelPlan:
        return _planned(profile, spec, budget_bytes, tensor, setting, make_plan)

    def least_ms(tensor: TensorParallel) -> float:
        return _least_ms(profile, spec, tensor, setting)

    race = MeshRace(planned, least_ms)
    race.run(profile.step.model, degrees, tp_plan, loss_parallel)
    if race.best is not None:
        lost = map(_alternative, race.lost())
        return replace(race.best, alternatives=(*race.best.alternatives, *lost))
    if race.least is not None:
        raise _infeasible(race.least, budget_bytes, spec, degrees)
    raise race.refused[0][1]


def _least_ms(
    profile: Profile, spec: ClusterSpec, tensor: TensorParallel, setting: Setting
) -> float:
    """No batch takes less on a GPU: the ops of a rank, but for the optimizer's.

    The whole model is planned in any case.
    """
    if tensor.degree == 1:
        return 0.0
    _check_step(profile)
    rank = rank_profile(profile, tensor, spec, setting)
    pairs = zip(rank.tape.ops, rank.op_ms, strict=True)
    return tensor.degree * sum(ms for op, ms in pairs if op.phase != "optimizer")


def _planned(
    profile: Profile,
    spec: ClusterSpec,
    budget_bytes: int,
    tensor: TensorParallel,
    setting: Setting,
    make_plan: MakePlan,
) -> ParallelPlan:
    """The plan of one division."""
    if tensor.degree == 1:
        return make_plan(profile, spec, budget_bytes)
    tensor = replace(tensor, draws=draws(profile))
    others = replace(spec, gpus_per_node=spec.gpus_per_node // tensor.degree)
    rank = rank_profile(profile, tensor, spec, setting)
    late = late_bytes(rank, tensor.degree)
    try:
        plan = make_plan(rank, others, budget_bytes - late)
    except InfeasibleBudgetError as error:
        raise _with_late(error, late) from error
    return replace(
        plan,
        tensor=tensor,
        exchange_ms=exchange_ms(rank, tensor.degree),
        budget_bytes=budget_bytes,
        late_bytes=plan.late_bytes + late,
        model=profile.model,
        alternatives=tuple(
            replace(
                other,
                tp_degree=tensor.degree,
                sequence_parallel=tensor.cuts_sequences,
            )
            for other in plan.alternatives
        ),
    )


def _alternative(lost: Lost[ParallelPlan]) -> Alternative:
    plan = lost.plan
    return Alternative(
        shard_degree=0 if plan is None else plan.sharding.shard_degree,
        replicate_degree=0 if plan is None else plan.sharding.replicate_degree,
        tp_degree=lost.tensor.degree,
        sequence_parallel=lost.tensor.cuts_sequences,
        reason=lost.reason,
        step_ms=None if plan is None else plan.step_ms,
        peak_bytes=None if plan is None else plan.peak_bytes,
    )


def _with_late(error: InfeasibleBudgetError, late: int) -> InfeasibleBudgetError:
    """The same, with what threads of gloo may hold of what ranks exchanged."""
    held = error.composition.get(LATE, 0) + late
    return InfeasibleBudgetError(
        str(error),
        budget_bytes=error.budget_bytes + late,
        lowest_peak_bytes=error.lowest_peak_bytes + late,
        composition={**error.composition, **({LATE: held} if held else {})},
    )


def _check_step(profile: Profile) -> None:
    if profile.step.clip_grad_norm is not None:
        raise UnsupportedError(
            "`clip_grad_norm` with tensor parallelism is not modelled, as PyTorch takes"
            " no norm of gradients on different meshes; leave one of them out."
        )


def _infeasible(
    least: tuple[InfeasibleBudgetError, TensorParallel],
    budget_bytes: int,
    spec: ClusterSpec,
    degrees: tuple[int, ...],
) -> InfeasibleBudgetError:
    error, tensor = least
    lowest = error.lowest_peak_bytes
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}) on"
        f" {spec.num_gpus} GPUs with tp of {', '.join(map(str, degrees))}: the lowest"
        f" peak of a rank is {lowest} bytes ({format_bytes(lowest)}) with"
        f" tp={tensor.degree}, made of {format_parts(error.composition)}. Raise the"
        " budget to that, or use more GPUs.",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest,
        composition=error.composition,
    )
