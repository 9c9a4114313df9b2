"""The cheapest mesh of FSDP2, tensor and context parallelism: each is planned."""

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
from autosac.parallel.fsdp_checks import check_optimizer
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
from autosac.parallel.plans import Alternative, ParallelPlan
from autosac.parallel.racing import LATE, read_shard_degrees, shard_degrees
from autosac.parallel.tp_tracing import draws, exchange_ms, late_bytes, rank_profile
from autosac.profiles.profile import Profile
from autosac.quantities import format_bytes, format_parts

# Profile, cluster of one rank of each group that shares slices, budget, how ranks see
# one batch together -> the best plan.
MakePlan = Callable[[Profile, ClusterSpec, int, Division], ParallelPlan]


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
        UnsupportedError: Stages of pipelines are asked for.
    """
    degrees = read_dimensions(mesh, {"pp": 1, "cp": 1, "tp": 1})
    pipeline, degree = degrees["pp"], degrees["tp"]
    if pipeline not in (1, None):
        raise UnsupportedError(
            f"`mesh` asks for {pipeline} stages, which `plan_parallel` does not plan:"
            " use `autosac.plan_pipeline(model, inputs, target=...,"
            f" loss_fn=..., num_ranks={pipeline}, num_micro_batches=...,"
            " memory_budget=..., cluster=..., mesh={'fsdp': ...,"
            f" 'cp': {degrees['cp']}, 'tp': {degree}}})`."
        )
    tensors = read_degrees(degree, tp_plan, loss_parallel, spec)
    parts = read_parts(degrees["cp"], spec)
    if not any(_fit(spec, tp, cp) for tp in tensors for cp in parts):
        raise ArgumentError(
            f"`mesh` has cp={degrees['cp']} and tp={degree}, and groups of so many"
            f" ranks do not fit {spec.num_gpus} GPUs in nodes of {spec.gpus_per_node}:"
            " their product must be a number that 'cp' alone may be, or None tries all"
            " that fit."
        )
    return tensors, parts


def read_parts(degree: Any, spec: ClusterSpec) -> tuple[int, ...]:
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
    if degrees is None:
        asked = shard_degrees(spec)
    else:
        asked = read_shard_degrees(degrees, spec)
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
    degrees: tuple[tuple[int, ...], tuple[int, ...]],
    tp_plan: TpPlan,
    loss_parallel: bool,
    method: Method,
    setting: Setting,
    make_plan: MakePlan,
) -> ParallelPlan:
    """The plan whose batches take least time on a GPU.

    Args:
        profile: The step of the whole model on a whole sequence.
        spec: The cluster.
        budget_bytes: Cap on the peak of a rank.
        degrees: Of tensor and of context parallelism, as `read_mesh` gives them.
        tp_plan: Styles; or which to find, None for both kinds.
        loss_parallel: Logits stay divided.
        method: How attention sees the whole sequence.
        setting: What is decided already.
        make_plan: Plans FSDP2 and recomputation.

    Raises:
        AutosacError: No degree divides the step; says why the first one does not.
        InfeasibleBudgetError: No mesh fits.
    """
    tensors, parts = degrees
    check_no_group(parts)

    def planned(division: Division) -> ParallelPlan:
        return _planned(profile, spec, budget_bytes, division, setting, make_plan)

    def least_ms(division: Division) -> float:
        return _least_ms(profile, spec, division, setting)

    race = MeshRace(planned, least_ms)
    contexts = []
    for number in parts:
        try:
            contexts.append(cp_tracing.context_of(profile, number, method))
        except AutosacError as error:
            race.refused.append((ContextParallel(degree=number), error))

    def beside(degree: int) -> list[ContextParallel]:
        return [own for own in contexts if _fit(spec, degree, own.degree)]

    race.run(profile.step.model, tensors, tp_plan, loss_parallel, beside)
    if race.best is not None:
        return _with_lost(race)
    if race.least is not None:
        raise _infeasible(race.least, budget_bytes, spec, degrees)
    raise race.refused[0][1]


def _with_lost(race: MeshRace[ParallelPlan]) -> ParallelPlan:
    """The best plan, with what lost."""
    assert race.best is not None
    lost = map(_alternative, race.lost())
    return replace(race.best, alternatives=(*race.best.alternatives, *lost))


def _least_ms(
    profile: Profile, spec: ClusterSpec, division: Division, setting: Setting
) -> float:
    """No batch takes less on a GPU: the ops of a rank, but for the optimizer's.

    The whole model is planned in any case.
    """
    if division.degree == 1:
        return 0.0
    rank = _rank_profile(profile, spec, division, setting)
    return _batch_ms(rank, division.degree)


def _rank_profile(
    profile: Profile, spec: ClusterSpec, division: Division, setting: Setting
) -> Profile:
    """The step of one of the ranks that see one batch together."""
    tensor, context = parts_of(division)
    if tensor.degree > 1:
        _check_step(profile)
    if context.degree == 1:
        return rank_profile(profile, tensor, spec, setting)
    others = without_slices(spec, tensor.degree)
    return cp_tracing.rank_profile(profile, context, others, setting, tensor)


def without_slices(spec: ClusterSpec, tp_degree: int) -> ClusterSpec:
    """One rank of each group that shares slices, which lies in one node."""
    return replace(spec, gpus_per_node=spec.gpus_per_node // tp_degree)


def _fit(spec: ClusterSpec, tp_degree: int, cp_degree: int) -> bool:
    """Whether groups that share a sequence can be made of groups that share slices."""
    return cp_degree in shard_degrees(without_slices(spec, tp_degree))


def _batch_ms(rank: Profile, degree: int) -> float:
    """What the ops of a rank but the optimizer's take, times the ranks of a group."""
    pairs = zip(rank.tape.ops, rank.op_ms, strict=True)
    return degree * sum(ms for op, ms in pairs if op.phase != "optimizer")


def _planned(
    profile: Profile,
    spec: ClusterSpec,
    budget_bytes: int,
    division: Division,
    setting: Setting,
    make_plan: MakePlan,
) -> ParallelPlan:
    """The plan of one division."""
    if division.degree == 1:
        return make_plan(profile, spec, budget_bytes, division)
    tensor, context = parts_of(division)
    if tensor.degree > 1:
        tensor = replace(tensor, draws=draws(profile))
    others = without_slices(spec, tensor.degree)
    rank = _rank_profile(profile, spec, division, setting)
    late = late_bytes(rank, tensor.degree) + cp_tracing.late_bytes(rank)
    try:
        plan = make_plan(rank, others, budget_bytes - late, division)
    except InfeasibleBudgetError as error:
        raise _with_late(error, late) from error
    waits_ms = exchange_ms(rank, tensor.degree) + cp_tracing.exchange_ms(rank)
    return replace(
        plan,
        tensor=tensor,
        context=context,
        exchange_ms=waits_ms,
        budget_bytes=budget_bytes,
        late_bytes=plan.late_bytes + late,
        model=profile.model,
        alternatives=tuple(
            replace(other, **_dimensions(division)) for other in plan.alternatives
        ),
    )


def _dimensions(division: Division) -> dict[str, Any]:
    """What an alternative says of a division."""
    tensor, context = parts_of(division)
    return {
        "tp_degree": tensor.degree,
        "sequence_parallel": tensor.cuts_sequences,
        "expert_parallel": tensor.has_whole_experts,
        "cp_degree": context.degree,
    }


def _alternative(lost: Lost[ParallelPlan]) -> Alternative:
    plan = lost.plan
    return Alternative(
        shard_degree=0 if plan is None else plan.sharding.shard_degree,
        replicate_degree=0 if plan is None else plan.sharding.replicate_degree,
        **_dimensions(lost.division),
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
    """Refuse a step that ranks with slices do not run, or not as it is known."""
    check_optimizer(profile.tape)  # first: the step of a rank fails otherwise
    if profile.step.clip_grad_norm is not None:
        raise UnsupportedError(
            "`clip_grad_norm` with tensor parallelism is not modelled, as PyTorch takes"
            " no norm of gradients on different meshes; leave one of them out."
        )


def _infeasible(
    least: tuple[InfeasibleBudgetError, Division],
    budget_bytes: int,
    spec: ClusterSpec,
    degrees: tuple[tuple[int, ...], tuple[int, ...]],
) -> InfeasibleBudgetError:
    error, division = least
    lowest = error.lowest_peak_bytes
    own = (part.degree for part in parts_of(division))
    asked = [
        (name, tried, degree)
        for name, tried, degree in zip(("tp", "cp"), degrees, own, strict=True)
        if tried != (1,)
    ]
    tries = " and ".join(f"{name} of {', '.join(map(str, t))}" for name, t, _ in asked)
    taken = " and ".join(f"{name}={degree}" for name, _, degree in asked)
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}) on"
        f" {spec.num_gpus} GPUs with {tries}: the"
        f" lowest peak of a rank is {lowest} bytes ({format_bytes(lowest)}) with"
        f" {taken}, made of {format_parts(error.composition)}. Raise"
        " the budget to that, or use more GPUs.",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest,
        composition=error.composition,
    )
