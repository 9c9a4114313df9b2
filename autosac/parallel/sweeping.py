"""Parallel plans of one step for many numbers of GPUs and caps."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch

from autosac.errors import ArgumentError, InfeasibleBudgetError, Interrupted
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.formulating import Setting
from autosac.parallel.preparing import (
    chooser_of,
    cluster_of,
    profile_for,
    with_given_units,
)
from autosac.parallel.racing import make_parallel_plan
from autosac.parallel.solving import ParallelChooser
from autosac.profiles.profile import Profile
from autosac.progress import progress_bar
from autosac.quantities import parse_bytes, read_budgets
from autosac.results.rows import Row, figures_of, reason_of
from autosac.results.sweeps import Sweep
from autosac.solving.solve_options import RELATIVE_GAP, SolveOptions
from autosac.step.arguments import read_fsdp_dtypes
from autosac.step.marks import Marks


def sweep_parallel(
    model: torch.nn.Module | Profile,
    inputs: Any = None,
    *,
    cluster: str | ClusterSpec,
    num_gpus: Sequence[int],
    memory_budgets: Sequence[int | str],
    param_dtype: torch.dtype | str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    relative_gap: float = RELATIVE_GAP,
    time_limit_s: float | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Sweep:
    """Plan for every number of GPUs and every cap; the step is traced once.

    Another batch or sequence length is another step: call this once for each.

    Args:
        model: As in `plan_parallel`, like all that is not named here.
        inputs: Of one rank.
        cluster: Says what nodes are like.
        num_gpus: Numbers of GPUs to plan for.
        memory_budgets: Caps on the peak of a rank.
        param_dtype: Type in which parameters are gathered, such as ``torch.bfloat16``
            or ``"bf16"``.
        reduce_dtype: Type in which gradients are reduced, likewise.
        ac_units: The only modules that may be AC units, as in `plan_parallel`.
        fsdp_units: The FSDP units besides the model itself, likewise.
        relative_gap: Of each solve.
        time_limit_s: Of each solve.
        progress: Show a bar on the standard error stream; None for only on a terminal.
        options: As in `profile`, but `device`.

    Returns:
        A row for each pair, all caps of the first number of GPUs first; the axis is
        ``num_gpus``.

    Raises:
        ValueError: As `plan_parallel`.
        UnsupportedError: As `plan_parallel`.
        Interrupted: Ctrl-C was pressed; its ``done`` has the rows planned by then.
    """
    if not isinstance(num_gpus, Collection) or not num_gpus:
        raise ArgumentError(
            f"`num_gpus` must be a list of at least one number, got {num_gpus!r}."
        )
    specs = [cluster_of(cluster, count) for count in num_gpus]
    any_size = cluster_of(cluster, None)
    memory_bytes = any_size.device.memory_bytes
    caps = read_budgets(memory_budgets, None) or ()
    budgets = [parse_bytes(cap, total_bytes=memory_bytes) for cap in caps]
    profile = profile_for(any_size, model, inputs, options, sweep_parallel)
    setting = Setting(**read_fsdp_dtypes(param_dtype, reduce_dtype))
    chooser = chooser_of(*with_given_units(profile, setting, ac_units, fsdp_units))
    how = SolveOptions(relative_gap=relative_gap, time_limit_s=time_limit_s)
    rows: list[Row] = []
    total = len(specs) * len(budgets)
    try:
        with progress_bar("Planning for clusters", total, show=progress) as advance:
            for spec, budget_bytes in itertools.product(specs, budgets):
                rows.append(_row(chooser, spec, budget_bytes, how))
                advance()
    except KeyboardInterrupt as stop:
        done = Sweep(axes=("num_gpus",), rows=tuple(rows))
        raise Interrupted(done, f"{len(rows)} of {total} rows are there") from stop
    return Sweep(axes=("num_gpus",), rows=tuple(rows))


def _row(
    chooser: ParallelChooser,
    spec: ClusterSpec,
    budget_bytes: int,
    options: SolveOptions,
) -> Row:
    """The row of one cluster under one cap."""
    cell = {"num_gpus": spec.num_gpus}
    try:
        plan = make_parallel_plan(chooser, spec, budget_bytes, options=options)
    except InfeasibleBudgetError as error:
        return Row(
            cell=cell,
            status="infeasible",
            budget_bytes=budget_bytes,
            reason=reason_of(error),
        )
    return Row(
        cell=cell,
        **figures_of(plan),
        batches_per_s=plan.batches_per_s,
        mesh_shape=" x ".join(map(str, plan.mesh_shape)),
        planned_for=plan.device,
        calibrated=plan.calibrated,
        plan=plan,
    )
