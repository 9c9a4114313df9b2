"""From a model and a cluster to a parallel plan.

Sharding degrees are enumerated; one MILP each decides on FSDP units, resharding and
recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autosac.candidates import curves
from autosac.errors import InfeasibleBudgetError
from autosac.parallel.clusters import ClusterSpec, cluster_spec
from autosac.parallel.formulating import ParallelFormulation, Types
from autosac.parallel.plans import Alternative, ParallelPlan
from autosac.parallel.sharding import Sharding, fsdp_units
from autosac.parallel.solving import (
    RELATIVE_GAP,
    TIME_LIMIT_S,
    Found,
    Solving,
    best_at,
    fewest_gpus,
    lowest_at,
)
from autosac.planning.planning import policy_ratios, profile_of, spell_out
from autosac.planning.profiling import Profile, calibrate, in_compute_dtype
from autosac.quantities import format_bytes, format_ms, parse_bytes
from solvers._pulp import Backend

_LATE = "held by slow threads of gloo"  # beside the categories of the tape


def plan_parallel(
    model: torch.nn.Module | Profile,
    inputs: Any = None,
    *,
    cluster: str | ClusterSpec,
    memory_budget: int | str,
    num_gpus: int | None = None,
    degrees: Sequence[int] | None = None,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    backend: Backend = "highs",
    relative_gap: float = RELATIVE_GAP,
    time_limit_s: float | None = TIME_LIMIT_S,
    **options: Any,
) -> ParallelPlan:
    """Find how to shard and recompute for the least step time under a memory budget.

    Neither a GPU nor a cluster is needed. Equal arguments give equal plans unless a
    solve runs into its time limit; to have one plan on all ranks make it once and load
    the saved file on each.

    Args:
        model: The model, on the CPU or the meta device, or a `Profile` of its step on
            a GPU of the cluster (then no other option is taken).
        inputs: Of one rank, as in `profile`.
        cluster: A `ClusterSpec`, or the name of a known one such as "hgx-h100".
        memory_budget: Cap on the peak of a rank: bytes, or text such as "72GiB".
        num_gpus: GPUs to use: part of a node, or whole nodes; None for all of them.
        degrees: Sharding degrees to look at; None for all that fit the cluster.
        param_dtype: Type in which parameters are gathered and used, such as
            "bfloat16"; None for their own.
        reduce_dtype: Type in which gradients are reduced; given with `param_dtype`.
        backend: MILP solver, "highs" or "cbc".
        relative_gap: A solve stops when the step time is proven this close to the
            least; another degree must be faster by more to be worked out.
        time_limit_s: A solve stops after this long with the best plan so far.
        options: As in `profile`, but `device`.

    Raises:
        InfeasibleBudgetError: No plan fits; says the least peak of a rank and how many
            GPUs would be enough.
        ValueError: An argument does not fit the cluster, or cannot be read.
        NotImplementedError: The memory of such a step under FSDP2 is not modelled.
    """
    spec = cluster_of(cluster, num_gpus)
    form = formulation_of(model, inputs, spec, param_dtype, reduce_dtype, options)
    budget_bytes = parse_bytes(memory_budget, total_bytes=spec.device.memory_bytes)
    how = Solving(backend=backend, relative_gap=relative_gap, time_limit_s=time_limit_s)
    return make_parallel_plan(form, spec, budget_bytes, degrees=degrees, how=how)


def min_gpus(
    model: torch.nn.Module | Profile,
    inputs: Any = None,
    *,
    cluster: str | ClusterSpec,
    memory_budget: int | str,
    most_gpus: int = 65_536,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    **options: Any,
) -> int | None:
    """Fewest GPUs that share all parameters on which a step fits the budget.

    Sizes are parts of one node, then whole nodes.

    Args:
        model: As in `plan_parallel`, like all that follows.
        inputs: Of one rank.
        cluster: Says what nodes are like; how many it has does not matter.
        memory_budget: Cap on the peak of a rank.
        most_gpus: Where to stop looking.
        param_dtype: Type in which parameters are gathered.
        reduce_dtype: Type in which gradients are reduced.
        options: As in `profile`, but `device`.

    Returns:
        That number, or None if `most_gpus` are not enough.

    Raises:
        ValueError: An argument cannot be read.
        NotImplementedError: The memory of such a step is not modelled.
    """
    spec = cluster_of(cluster, None)
    form = formulation_of(model, inputs, spec, param_dtype, reduce_dtype, options)
    budget_bytes = parse_bytes(memory_budget, total_bytes=spec.device.memory_bytes)
    return fewest_gpus(form, spec, budget_bytes, most_gpus=most_gpus)


# --- its parts ----------------------------------------------------------------


def cluster_of(cluster: str | ClusterSpec, num_gpus: int | None) -> ClusterSpec:
    """The cluster that was passed or named, with so many GPUs."""
    if isinstance(cluster, str):
        return cluster_spec(cluster, num_gpus=num_gpus)
    return cluster if num_gpus is None else cluster.resized(num_gpus)


def formulation_of(
    model: torch.nn.Module | Profile,
    inputs: Any,
    spec: ClusterSpec,
    param_dtype: str | None,
    reduce_dtype: str | None,
    options: dict[str, Any],
) -> ParallelFormulation:
    """Trace the step on a GPU of the cluster and write down its numbers."""
    if "device" in options:
        raise ValueError("`device` is that of `cluster`; leave it out.")
    if isinstance(model, Profile):
        made = profile_of(model, inputs, options)
        if made.device.name != spec.device.name:
            raise ValueError(
                f"The profile is for {made.device.name!r}, and cluster"
                f" {spec.name!r} has {spec.device.name!r}; profile the model with that"
                " device."
            )
    else:
        made = profile_of(model, inputs, {**options, "device": spec.device})
    assert isinstance(made, Profile)
    if param_dtype is not None:
        # Checks the names before the step is traced once more.
        Sharding(
            units=fsdp_units([]),
            shard_degree=1,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
        )
        is_calibrated = made.calibrated
        made = in_compute_dtype(made, getattr(torch, param_dtype))
        made = calibrate(made) if is_calibrated else made
    return ParallelFormulation(
        made, Types(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    )


def shard_degrees(spec: ClusterSpec) -> list[int]:
    """Sharding degrees that fit a cluster, most ranks first."""
    total = spec.num_gpus
    found = []
    for degree in range(1, total + 1):
        if total % degree == 0:
            try:
                spec.shard_group(degree)
            except ValueError:
                continue
            found.append(degree)
    return found[::-1]


def make_parallel_plan(
    form: ParallelFormulation,
    spec: ClusterSpec,
    budget_bytes: int,
    *,
    degrees: Sequence[int] | None = None,
    how: Solving | None = None,
) -> ParallelPlan:
    """The plan of a step that is written down already.

    Raises:
        InfeasibleBudgetError: No plan fits.
        ValueError: A degree does not fit the cluster.
    """
    how = how or Solving()
    if degrees is not None:
        for degree in degrees:
            spec.shard_group(degree)
        if not degrees:
            raise ValueError("`degrees` must name at least one sharding degree.")
    best: Found | None = None
    least: Found | None = None
    others: list[Alternative] = []
    for degree in sorted(set(degrees or shard_degrees(spec)), reverse=True):
        reason = _lost_before(form, spec, degree, budget_bytes, best, how)
        if reason:
            others.append(_unseen(spec, degree, reason))
            continue
        found = best_at(form, spec, degree, budget_bytes, how)
        if least is None or found.highest_peak_bytes < least.highest_peak_bytes:
            least = found
        if found.highest_peak_bytes > budget_bytes:
            peak = format_bytes(found.highest_peak_bytes)
            others.append(_unseen(spec, degree, f"its least peak is {peak}"))
        elif best is None:
            best = found
        else:
            is_faster = found.step.total_ms < best.step.total_ms
            best, slower = (found, best) if is_faster else (best, found)
            others.append(_slower(slower, best))
    if best is None:
        raise _infeasible(form, spec, degrees, budget_bytes, least, how)
    return _as_plan(form, spec, budget_bytes, best, others)


# --- comparing degrees --------------------------------------------------------


def _lost_before(
    form: ParallelFormulation,
    spec: ClusterSpec,
    degree: int,
    budget_bytes: int,
    best: Found | None,
    how: Solving,
) -> str:
    """Why a degree need not be worked out, if so."""
    resident_bytes = form.resident_bytes(degree)
    if resident_bytes > budget_bytes:
        return (
            f"parameters, optimizer state and inputs alone take"
            f" {format_bytes(resident_bytes)} a rank"
        )
    if best is None:
        return ""
    least_ms = max(form.compute_ms(degree), form.collectives_ms(spec, degree))
    if best.step.total_ms <= (1 + how.relative_gap) * least_ms:
        return f"its step takes {format_ms(least_ms)} at least"
    return ""


def _unseen(spec: ClusterSpec, degree: int, reason: str) -> Alternative:
    return Alternative(
        shard_degree=degree, replicate_degree=spec.num_gpus // degree, reason=reason
    )


def _slower(found: Found, best: Found) -> Alternative:
    more_ms = found.step.total_ms - best.step.total_ms
    return Alternative(
        shard_degree=found.sharding.shard_degree,
        replicate_degree=found.sharding.replicate_degree,
        reason=f"its step takes {format_ms(more_ms)} more",
        step_ms=found.step.total_ms,
        peak_bytes=found.peak_bytes,
    )


def _least_of_all(
    form: ParallelFormulation,
    spec: ClusterSpec,
    degrees: Sequence[int] | None,
    budget_bytes: int,
    found: Found | None,
    how: Solving,
) -> Found:
    """The least peak of those found and of degrees that were not worked out.

    A rank has less of the parameters the more of them share, so that these are the
    largest degree and 1, at which nothing is gathered and no buffers are needed.
    """
    wanted = set(degrees or shard_degrees(spec))
    for degree in sorted({max(wanted), *({1} & wanted)}, reverse=True):
        resident_bytes = form.resident_bytes(degree)
        if resident_bytes <= budget_bytes:  # worked out
            continue
        if found is None or resident_bytes < found.highest_peak_bytes:
            problem = form.problem(spec, degree, budget_bytes)
            other = lowest_at(form, problem, spec, degree, how)
            if found is None or other.highest_peak_bytes < found.highest_peak_bytes:
                found = other
    assert found is not None  # at least the largest degree was looked at
    return found


def _infeasible(
    form: ParallelFormulation,
    spec: ClusterSpec,
    degrees: Sequence[int] | None,
    budget_bytes: int,
    found: Found | None,
    how: Solving,
) -> InfeasibleBudgetError:
    """Say what the least peak is, and on how many GPUs a plan would fit."""
    found = _least_of_all(form, spec, degrees, budget_bytes, found, how)
    degree = found.sharding.shard_degree
    composition = form.ranks.timeline(found.sharding, found.chosen).composition
    if found.late_bytes:
        composition = {**composition, _LATE: found.late_bytes}
    parts = ", ".join(
        f"{format_bytes(nbytes)} {category}"
        for category, nbytes in composition.items()
        if nbytes
    )
    lowest_bytes = found.highest_peak_bytes
    enough = fewest_gpus(form, spec, budget_bytes, guess=found, how=how)
    advice = (
        f"{enough} GPUs that share all parameters would be enough"
        if enough is not None and enough > degree
        else "more GPUs would not help; use a smaller batch a rank"
    )
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}) on"
        f" {spec.num_gpus} GPUs: the lowest peak of a rank is {lowest_bytes}"
        f" bytes ({format_bytes(lowest_bytes)}) with parameters sharded"
        f" {degree} times, made of {parts}. Raise the budget to that; {advice}.",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest_bytes,
        composition=composition,
    )


def _as_plan(
    form: ParallelFormulation,
    spec: ClusterSpec,
    budget_bytes: int,
    best: Found,
    others: Sequence[Alternative],
) -> ParallelPlan:
    made = form.profile
    recompute_ms = sum(curves.recompute_ms(*item) for item in best.chosen.items())
    return ParallelPlan(
        sharding=best.sharding,
        policy=policy_ratios(made, best.chosen),
        op_policies=spell_out(made, best.chosen),
        budget_bytes=budget_bytes,
        peak_bytes=best.peak_bytes,
        late_bytes=best.late_bytes,
        composition=form.ranks.timeline(best.sharding, best.chosen).composition,
        compute_ms=best.step.compute_ms - recompute_ms,
        recompute_ms=recompute_ms,
        exposed_forward_ms=best.step.exposed_forward_ms,
        exposed_backward_ms=best.step.exposed_backward_ms,
        milp_ms=best.milp_ms,
        bound_ms=min(best.bound_ms, best.milp_ms),
        alternatives=tuple(others),
        cluster=spec.name,
        device=spec.device.name,
        calibrated=made.calibrated,
        model=made.model,
        torch_version=torch.__version__,
    )
