"""The cheapest mesh of FSDP2 with tensor or context parallelism: each is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autosac.errors import (
    ArgumentError,
    AutosacError,
    InfeasibleBudgetError,
    UnsupportedError,
)
from autosac.parallel import cp_tracing
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.context_parallel import ContextParallel, Method
from autosac.parallel.formulating import Setting
from autosac.parallel.mesh_racing import (
    Division,
    Lost,
    MeshRace,
    TpPlan,
    check_no_group,
    read_degrees,
    read_dimensions,
)
from autosac.parallel.plans import Alternative, ParallelPlan
from autosac.parallel.racing import LATE, shard_degrees
from autosac.parallel.tp_styles import TensorParallel
from autosac.parallel.tp_tracing import draws, exchange_ms, late_bytes, rank_profile
from autosac.profiles.profile import Profile
from autosac.quantities import format_bytes, format_parts

# Profile, cluster of one rank of each group, budget, number that sharding degrees are
# multiples of -> the best plan.
MakePlan = Callable[[Profile, ClusterSpec, int, int], ParallelPlan]


def read_mesh(
    mesh: Mapping[str, int | None] | None,
    tp_plan: Any,
    loss_parallel: bool,
    spec: ClusterSpec,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Degrees of tensor and of context parallelism to look at, least first.

    Args:
        mesh: Degrees by dimension, as in `plan_parallel`.
        tp_plan: Styles, which need a degree,
        loss_parallel: and so do divided logits.
        spec: The cluster.

    Raises:
        ArgumentError: A dimension is not known, or a degree does not fit the cluster.
        UnsupportedError: Stages of pipelines are asked for, or slices of tensors and
            parts of a sequence at once.
    """
    degrees = read_dimensions(mesh, {"pp": 1, "cp": 1, "tp": 1})
    pipeline, degree = degrees["pp"], degrees["tp"]
    if pipeline not in (1, None):
        raise UnsupportedError(
            f"`mesh` asks for {pipeline} stages, which `plan_parallel` does not plan:"
            " use `autosac.plan_pipeline(model, inputs, target=...,"
            f" loss_fn=..., num_ranks={pipeline}, num_micro_batches=...,"
            " memory_budget=..., cluster=..., mesh={'fsdp': ...,"
            f" 'tp': {degree}}})`."
        )
    tensors = read_degrees(degree, tp_plan, loss_parallel, spec)
    parts = _read_parts(degrees["cp"], spec)
    if parts != (1,) and tensors != (1,):
        raise UnsupportedError(
            "`mesh` asks for 'cp' and for 'tp', which are not planned together: ask"
            " for one of them."
        )
    return tensors, parts


def _read_parts(degree: Any, spec: ClusterSpec) -> tuple[int, ...]:
    """Degrees of context parallelism to look at, least first."""
    fitting = tuple(reversed(shard_degrees(spec)))
    if degree is None:
        return fitting
    if degree not in fitting:
        raise ArgumentError(
            f"`mesh` has cp={degree!r}, which must be one of"
            f" {', '.join(map(str, fitting))} on {spec.num_gpus} GPUs in nodes of"
            f" {spec.gpus_per_node}; None tries all of these."
        )
    return (int(degree),)


def multiples(
    degrees: Sequence[int] | None, number: int, spec: ClusterSpec
) -> Sequence[int] | None:
    """Sharding degrees of ranks that have a part of a sequence: whole groups of them.

    Args:
        degrees: Those asked for, None for all that fit the cluster.
        number: Ranks of a group.
        spec: The cluster.

    Raises:
        ArgumentError: None of those asked for is whole groups.
    """
    if number == 1:
        return degrees
    asked = shard_degrees(spec) if degrees is None else degrees
    own = [degree for degree in asked if degree % number == 0]
    if not own:
        raise ArgumentError(
            f"`degrees`={list(asked)} has no multiple of cp={number}: FSDP2 shards over"
            " whole groups of ranks that have one batch together."
        )
    return own


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
        return _with_lost(race)
    if race.least is not None:
        raise _infeasible(race.least, budget_bytes, spec, "tp", degrees)
    raise race.refused[0][1]


def cheapest_parts(
    profile: Profile,
    spec: ClusterSpec,
    budget_bytes: int,
    degrees: tuple[int, ...],
    method: Method,
    setting: Setting,
    make_plan: MakePlan,
) -> ParallelPlan:
    """The same where ranks have parts of a sequence.

    Args:
        profile: The step of the whole sequence.
        spec: The cluster.
        budget_bytes: Cap on the peak of a rank.
        degrees: Of context parallelism.
        method: How attention sees the whole sequence.
        setting: What is decided already.
        make_plan: Plans FSDP2 and recomputation.

    Raises:
        AutosacError: The step cannot be done in parts; says why.
        InfeasibleBudgetError: No mesh fits.
    """
    check_no_group(degrees)

    def planned(context: ContextParallel) -> ParallelPlan:
        return _planned_part(profile, spec, budget_bytes, context, setting, make_plan)

    def least_ms(context: ContextParallel) -> float:
        if context.degree == 1:
            return 0.0
        rank = cp_tracing.rank_profile(profile, context, spec, setting)
        return _batch_ms(rank, context.degree)

    race = MeshRace(planned, least_ms)
    for degree in degrees:
        try:
            race.add(cp_tracing.context_of(profile, degree, method))
        except AutosacError as error:
            race.refused.append((ContextParallel(degree=degree), error))
    race.finish()
    if race.best is not None:
        return _with_lost(race)
    if race.least is not None:
        raise _infeasible(race.least, budget_bytes, spec, "cp", degrees)
    raise race.refused[0][1]


def _with_lost(race: MeshRace[ParallelPlan]) -> ParallelPlan:
    """The best plan, with what lost."""
    assert race.best is not None
    lost = map(_alternative, race.lost())
    return replace(race.best, alternatives=(*race.best.alternatives, *lost))


def _planned_part(
    profile: Profile,
    spec: ClusterSpec,
    budget_bytes: int,
    context: ContextParallel,
    setting: Setting,
    make_plan: MakePlan,
) -> ParallelPlan:
    """The plan of ranks that have parts of a sequence."""
    degree = context.degree
    if degree == 1:
        return make_plan(profile, spec, budget_bytes, 1)
    rank = cp_tracing.rank_profile(profile, context, spec, setting)
    late = cp_tracing.late_bytes(rank)
    try:
        plan = make_plan(rank, spec, budget_bytes - late, degree)
    except InfeasibleBudgetError as error:
        raise _with_late(error, late) from error
    return replace(
        plan,
        context=context,
        exchange_ms=cp_tracing.exchange_ms(rank),
        budget_bytes=budget_bytes,
        late_bytes=plan.late_bytes + late,
        model=profile.model,
        alternatives=tuple(
            replace(other, cp_degree=degree) for other in plan.alternatives
        ),
    )


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
    return _batch_ms(rank, tensor.degree)


def _batch_ms(rank: Profile, degree: int) -> float:
    """What the ops of a rank but the optimizer's take, times the ranks of a group."""
    pairs = zip(rank.tape.ops, rank.op_ms, strict=True)
    return degree * sum(ms for op, ms in pairs if op.phase != "optimizer")


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
        return make_plan(profile, spec, budget_bytes, 1)
    tensor = replace(tensor, draws=draws(profile))
    others = replace(spec, gpus_per_node=spec.gpus_per_node // tensor.degree)
    rank = rank_profile(profile, tensor, spec, setting)
    late = late_bytes(rank, tensor.degree)
    try:
        plan = make_plan(rank, others, budget_bytes - late, 1)
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
                expert_parallel=tensor.has_whole_experts,
            )
            for other in plan.alternatives
        ),
    )


def _alternative(lost: Lost[ParallelPlan]) -> Alternative:
    plan, division = lost.plan, lost.division
    if isinstance(division, TensorParallel):
        dimension: dict[str, Any] = {
            "tp_degree": division.degree,
            "sequence_parallel": division.cuts_sequences,
            "expert_parallel": division.has_whole_experts,
        }
    else:
        dimension = {"cp_degree": division.degree}
    return Alternative(
        shard_degree=0 if plan is None else plan.sharding.shard_degree,
        replicate_degree=0 if plan is None else plan.sharding.replicate_degree,
        **dimension,
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
    least: tuple[InfeasibleBudgetError, Division],
    budget_bytes: int,
    spec: ClusterSpec,
    name: str,
    degrees: tuple[int, ...],
) -> InfeasibleBudgetError:
    error, division = least
    lowest = error.lowest_peak_bytes
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}) on"
        f" {spec.num_gpus} GPUs with {name} of {', '.join(map(str, degrees))}: the"
        f" lowest peak of a rank is {lowest} bytes ({format_bytes(lowest)}) with"
        f" {name}={division.degree}, made of {format_parts(error.composition)}. Raise"
        " the budget to that, or use more GPUs.",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest,
        composition=error.composition,
    )
