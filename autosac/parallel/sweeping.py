"""Parallel plans of one step for many numbers of GPUs and caps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from autosac.errors import InfeasibleBudgetError
from autosac.optional import needed
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.planning import (
    chooser_of,
    cluster_of,
    make_parallel_plan,
)
from autosac.parallel.plans import ParallelPlan
from autosac.profiles.profile import Profile
from autosac.quantities import parse_bytes
from autosac.solving.choosing import RELATIVE_GAP, SolveOptions

_FIGURES = (
    "peak_bytes", "recompute_ms", "step_ms", "batches_per_s", "mesh_shape",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSweepRow:
    """What some GPUs take under a cap.

    Attributes:
        num_gpus: How many GPUs.
        budget_bytes: Cap on the peak of a rank.
        plan: The plan, None if nothing fits.
        reason: Why nothing fits, None if a plan does.
    """

    num_gpus: int
    budget_bytes: int
    plan: ParallelPlan | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSweep(Sequence[ParallelSweepRow]):
    """Plans for many numbers of GPUs and caps: a sequence of rows.

    Attributes:
        rows: All caps of the first number of GPUs first.
    """

    rows: tuple[ParallelSweepRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ParallelSweepRow: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ParallelSweepRow, ...]: ...

    def __getitem__(
        self, index: int | slice
    ) -> ParallelSweepRow | tuple[ParallelSweepRow, ...]:
        return self.rows[index]

    def to_dataframe(self) -> Any:
        """The rows as a pandas table, with the plans' figures instead of the plans.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = needed("pandas", "`ParallelSweep.to_dataframe`")
        records = [
            {
                "num_gpus": row.num_gpus,
                "budget_bytes": row.budget_bytes,
                "feasible": row.plan is not None,
                **{name: getattr(row.plan, name, None) for name in _FIGURES},
                "reason": row.reason,
            }
            for row in self.rows
        ]
        table = pandas.DataFrame(records)
        return table.astype({"peak_bytes": "Int64"})  # None would make it a float


def sweep_parallel(
    model: torch.nn.Module | Profile,
    inputs: Any = None,
    *,
    cluster: str | ClusterSpec,
    num_gpus: Sequence[int],
    memory_budgets: Sequence[int | str],
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    relative_gap: float = RELATIVE_GAP,
    time_limit_s: float | None = None,
    **options: Any,
) -> ParallelSweep:
    """Plan for every number of GPUs and every cap; the step is traced once.

    Another batch or sequence length is another step: call this once for each.

    Args:
        model: As in `plan_parallel`, like all that is not named here.
        inputs: Of one rank.
        cluster: Says what nodes are like.
        num_gpus: Numbers of GPUs to plan for.
        memory_budgets: Caps on the peak of a rank.
        param_dtype: Type in which parameters are gathered.
        reduce_dtype: Type in which gradients are reduced.
        relative_gap: Of each solve.
        time_limit_s: Of each solve.
        options: As in `profile`, but `device`.

    Returns:
        A row for each pair, all caps of the first number of GPUs first.

    Raises:
        ValueError: As `plan_parallel`.
        UnsupportedError: As `plan_parallel`.
    """
    specs = [cluster_of(cluster, count) for count in num_gpus]
    any_size = cluster_of(cluster, None)
    memory_bytes = any_size.device.memory_bytes
    budgets = [parse_bytes(cap, total_bytes=memory_bytes) for cap in memory_budgets]
    chooser = chooser_of(model, inputs, any_size, param_dtype, reduce_dtype, options)
    how = SolveOptions(relative_gap=relative_gap, time_limit_s=time_limit_s)
    rows = []
    for spec in specs:
        for budget_bytes in budgets:
            plan, reason = None, None
            try:
                plan = make_parallel_plan(chooser, spec, budget_bytes, options=how)
            except InfeasibleBudgetError as error:
                reason = str(error)
            rows.append(
                ParallelSweepRow(
                    num_gpus=spec.num_gpus,
                    budget_bytes=budget_bytes,
                    plan=plan,
                    reason=reason,
                )
            )
    return ParallelSweep(rows=tuple(rows))
