"""Plans for many budgets from one profile: what a byte of memory costs in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from autosac.errors import InfeasibleBudgetError
from autosac.optional import needed
from autosac.pictures.pictures import Picture
from autosac.planning import plotting
from autosac.planning.make_plan import floor, make_plan
from autosac.planning.plans import Plan
from autosac.profiles.given import profile_of
from autosac.profiles.profile import Profile, TracedStep
from autosac.quantities import parse_bytes
from autosac.solvers import sac

RELATIVE_GAP = 1.5e-2  # of a solve: 64 of them should not outlast a few plans


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """What one budget takes; all figures but the budget are None if nothing fits.

    Attributes:
        budget_bytes: Cap on the peak.
        feasible: Whether a plan fits.
        peak_bytes: Predicted peak of the plan.
        recompute_ms: Predicted time that a step spends on recomputation.
        step_ms: Predicted time of a step, recomputation included.
        bound_ms: Proven lower bound on `recompute_ms`.
        optimality_gap: Share of `recompute_ms` that the bound leaves open.
        reason: Why nothing fits; None if a plan does.
        plan: The plan.
    """

    budget_bytes: int
    feasible: bool
    peak_bytes: int | None = None
    recompute_ms: float | None = None
    step_ms: float | None = None
    bound_ms: float | None = None
    optimality_gap: float | None = None
    reason: str | None = None
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Plans of one step for many budgets.

    A larger budget never costs more: `recompute_ms` and `bound_ms` fall with it.

    Attributes:
        rows: One for each budget, in the order they were asked for.
        floor_bytes: Least feasible budget.
        baseline_peak_bytes: Budget at which nothing is recomputed.
    """

    rows: tuple[SweepRow, ...]
    floor_bytes: int
    baseline_peak_bytes: int

    def to_dataframe(self) -> Any:
        """The rows as a pandas table, without the plans.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = needed("pandas", "`Sweep.to_dataframe`")
        records = [asdict(replace(row, plan=None)) for row in self.rows]
        return pandas.DataFrame.from_records(records).drop(columns="plan")

    def plot(self, axes: Any = None, *, rivals: plotting.Rivals | None = None) -> Any:
        """Draw recompute time against the budget, with bound, floor and baseline.

        `autosac.plotting.budgets` draws the same into a file, or interactively.

        Args:
            axes: Matplotlib axes to draw on; None for new ones.
            rivals: Points of others, as there.

        Returns:
            The axes.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        pyplot = needed("matplotlib.pyplot", "`Sweep.plot`")
        from autosac.pictures.matplotlib_figure import draw_panel  # needs Matplotlib

        if axes is None:
            _, axes = pyplot.subplots()
        draw_panel(axes, plotting.budget_panel(self, rivals=rivals))
        axes.legend()
        return axes

    def picture(self) -> Picture:
        """The sweep as a picture, whose ``save`` writes a file.

        Raises:
            ValueError: No budget is feasible.
        """
        return plotting.budgets(self)


def sweep(
    model: torch.nn.Module | TracedStep,
    inputs: Any = None,
    *,
    memory_budgets: Sequence[int | str] | None = None,
    n: int | None = None,
    plan_options: dict[str, Any] | None = None,
    **options: Any,
) -> Sweep:
    """Plan for many budgets; the step is traced once.

    Args:
        model: The model, or a `Profile` of it, or `Plan.traced` (then no other option
            is taken).
        inputs: As in `profile`.
        memory_budgets: Bytes, or text as in `plan`, in any order.
        n: Instead of these: so many budgets, evenly spaced from the least feasible
            one to the peak of the plain step.
        plan_options: What `plan` takes besides its budget: ``backend``,
            ``relative_gap``, ``time_limit_s``, ``segments``, ``dry_run``. Unless they
            are given, one plan is dry-run and the others are simulated
            (`Plan.dry_run`), and a solve ends when proven within 1.5 %; its row says
            the gap.
        options: As in `profile`.

    Returns:
        A row for each budget. One that nothing fits is a row with its reason.

    Raises:
        TypeError: Neither or both of `memory_budgets` and `n` are given.
        ValueError: A budget cannot be read, there are none, or `n` is less than 2.
    """
    if (memory_budgets is None) == (n is None):
        raise TypeError("Pass either `memory_budgets` or `n`, the number of budgets.")
    if n is not None and n < 2:
        raise ValueError(f"`n` must be at least 2 (both ends), got {n}.")
    if memory_budgets is not None and not memory_budgets:
        raise ValueError("`memory_budgets` is empty: name at least one budget.")
    traced = profile_of(model, inputs, options)
    lowest, baseline = floor(traced), traced.baseline_peak_bytes
    if memory_budgets is None:
        assert n is not None
        budgets = [lowest + (baseline - lowest) * i // (n - 1) for i in range(n)]
    else:
        total = traced.device.memory_bytes
        budgets = [parse_bytes(b, total_bytes=total) for b in memory_budgets]
    start = sac.Start()  # smaller budgets first: what they found holds for larger ones
    answers = {
        budget: _answer(traced, budget, {"start": start, **(plan_options or {})})
        for budget in sorted(set(budgets))
    }
    rows = {row.budget_bytes: row for row in _monotone(answers)}
    return Sweep(
        rows=tuple(rows[budget] for budget in budgets),
        floor_bytes=lowest,
        baseline_peak_bytes=baseline,
    )


def _answer(
    profile: TracedStep, budget_bytes: int, options: dict[str, Any]
) -> Plan | str:
    """A plan for a budget, or why there is none."""
    options = {
        "dry_run": isinstance(profile, Profile) and not any(profile.dry_runs),
        "relative_gap": RELATIVE_GAP,
        **options,
    }
    try:
        return make_plan(profile, budget_bytes, **options)
    except InfeasibleBudgetError as error:
        return str(error)


def _monotone(answers: dict[int, Plan | str]) -> list[SweepRow]:
    """Rows by rising budget: plans of smaller budgets, bounds of larger ones hold."""
    plans: dict[int, Plan] = {}
    best: Plan | None = None
    for budget, plan in answers.items():
        if isinstance(plan, str):
            if best is None:
                continue
            plan = best  # a solver at its time limit may miss it
        if best is None or plan.recompute_ms < best.recompute_ms:
            best = plan
        bound_ms = min(plan.bound_ms, best.recompute_ms)
        plans[budget] = replace(best, budget_bytes=budget, bound_ms=bound_ms)
    bound_ms = 0.0
    rows = []
    for budget, answer in reversed(answers.items()):
        if budget in plans:
            bound_ms = max(bound_ms, plans[budget].bound_ms)
            rows.append(_row(replace(plans[budget], bound_ms=bound_ms)))
        else:
            assert isinstance(answer, str)
            rows.append(SweepRow(budget_bytes=budget, feasible=False, reason=answer))
    return rows[::-1]


def _row(plan: Plan) -> SweepRow:
    return SweepRow(
        budget_bytes=plan.budget_bytes,
        feasible=True,
        peak_bytes=plan.peak_bytes,
        recompute_ms=plan.recompute_ms,
        step_ms=plan.step_ms,
        bound_ms=plan.bound_ms,
        optimality_gap=plan.optimality_gap,
        plan=plan,
    )
