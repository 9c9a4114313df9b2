"""A row for each thing that was planned for: a budget, cell, size or cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from autosac.quantities import share_above

Label = bool | int | float | str | None
Status = Literal["planned", "feasible", "infeasible", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One budget of one cell; figures are None where they are not known.

    Attributes:
        cell: Name of each axis -> label of its value.
        status: "planned", "feasible" (a plan fits, none was made), "infeasible" (none
            fits) or "failed" (the step could not be built, traced or planned).
        budget_bytes: Cap on the peak, of a rank if there are several.
        peak_bytes: Predicted peak of the plan.
        recompute_ms: Predicted time that a step spends on recomputation.
        step_ms: Predicted time of a step, recomputation included.
        bound_ms: Proven lower bound on `recompute_ms`.
        optimality_gap: Share of the time that the bound leaves open.
        samples_per_s: Predicted throughput, where the batch size is known.
        batches_per_s: Predicted throughput of a cluster, of which each GPU has one
            batch a step.
        mesh_shape: Of a cluster: ranks of each dimension, as text ("2 x 8").
        num_units: AC units of the plan.
        floor_bytes: Least feasible budget of the cell.
        baseline_peak_bytes: Budget at which nothing is recomputed.
        planned_for: Name of the device that was planned for.
        calibrated: Times and workspaces were measured, not modelled.
        reason: Why there is no plan: type of the exception, and its sentence.
        plan: The plan, if it was kept: a `Plan` or a `ParallelPlan`.
    """

    cell: Mapping[str, Label] = field(default_factory=dict)
    status: Status
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    recompute_ms: float | None = None
    step_ms: float | None = None
    bound_ms: float | None = None
    optimality_gap: float | None = None
    samples_per_s: float | None = None
    batches_per_s: float | None = None
    mesh_shape: str | None = None
    num_units: int | None = None
    floor_bytes: int | None = None
    baseline_peak_bytes: int | None = None
    planned_for: str | None = None
    calibrated: bool | None = None
    reason: str | None = None
    plan: Any = field(default=None, repr=False)

    @property
    def feasible(self) -> bool:
        """Whether a plan fits."""
        return self.status in ("planned", "feasible")

    def record(self) -> dict[str, Any]:
        """The row as plain data: axes first, then figures; no plan."""
        return {**self.cell, **{name: getattr(self, name) for name in FIGURES}}


def reason_of(error: BaseException) -> str:
    """Why there is no plan, in one line: the exception's type and its sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def figures_of(plan: Any) -> dict[str, Any]:
    """The figures of a row that every kind of plan has."""
    names = ("budget_bytes", "peak_bytes", "recompute_ms", "step_ms", "optimality_gap")
    figures = {name: getattr(plan, name) for name in names}
    return {"status": "planned", **figures, "num_units": len(plan.policy)}


FIGURES = tuple(f.name for f in fields(Row) if f.name not in ("cell", "plan"))


def monotone(rows: Sequence[Row]) -> list[Row]:
    """Rows of rising budgets of one step, of which none is dearer than a smaller one's.

    Plans of smaller budgets hold for larger ones, bounds of larger ones for smaller.
    """
    planned: dict[int, Row] = {}  # by place
    best: Row | None = None
    for place, row in enumerate(rows):
        if row.feasible and (best is None or _ms(row) < _ms(best)):
            best = row
        if best is not None:  # also where a solver at its time limit missed it
            bound_ms = (row if row.feasible else best).bound_ms or 0.0
            planned[place] = _held(best, row.budget_bytes, min(bound_ms, _ms(best)))
    bound_ms, result = 0.0, []
    for place, row in reversed([*enumerate(rows)]):
        if place in planned:
            bound_ms = max(bound_ms, planned[place].bound_ms or 0.0)
            row = _held(planned[place], row.budget_bytes, bound_ms)
        result.append(row)
    return result[::-1]


def _ms(row: Row) -> float:
    return row.recompute_ms or 0.0


def _held(row: Row, budget_bytes: int | None, bound_ms: float) -> Row:
    """A row as that of another budget, and with another bound."""
    changed: dict[str, Any] = {"budget_bytes": budget_bytes, "bound_ms": bound_ms}
    gap = share_above(_ms(row), bound_ms)
    plan = row.plan and replace(row.plan, **changed)
    return replace(row, **changed, optimality_gap=gap, plan=plan)
