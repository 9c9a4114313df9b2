"""Plans for many budgets from one profile: what a byte of memory costs in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autosac.devices.allocator_settings import Cap, check_cap
from autosac.errors import InfeasibleBudgetError, Interrupted
from autosac.kinds import check_kind
from autosac.planning.choices import SWEEP_GAP, evenly
from autosac.planning.make_plan import floor, make_plan, may_offload, read_offload
from autosac.profiles.given import check_names, profile_of, unknown_name
from autosac.profiles.profile import Profile
from autosac.profiles.restricting import restricted
from autosac.profiles.traced_step import TracedStep
from autosac.progress import progress_bar
from autosac.quantities import parse_bytes, read_budgets
from autosac.results.rows import Row, figures_of, monotone, reason_of
from autosac.results.sweeps import Sweep
from autosac.solvers import sac
from autosac.step.marks import Marks

_PLAN_OPTIONS = (
    *("backend", "relative_gap", "time_limit_s", "segments", "dry_run", "offload"),
    "offload_dir",
)


def sweep(
    model: torch.nn.Module | TracedStep,
    inputs: Any = None,
    *,
    memory_budgets: Sequence[int | str] | None = None,
    n: int | None = None,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    cap: Cap = "allocated",
    plan_options: dict[str, Any] | None = None,
    progress: bool | None = None,
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
        ac_units: The only modules that may be AC units, as in `plan`.
        fsdp_units: FSDP units, around which no module may be one, as in `plan`.
        cap: What the budgets cap on a GPU, as in `plan`.
        plan_options: What `plan` takes besides its budget: ``backend``,
            ``relative_gap``, ``time_limit_s``, ``segments``, ``dry_run``, ``offload``.
            Unless they are given, one plan is dry-run and the others are simulated
            (`Plan.dry_run`), and a solve ends when proven within 1.5 %; its row says
            the gap.
        progress: Show a bar on the standard error stream; None for only on a terminal.
        options: As in `profile`.

    Returns:
        A row for each budget. One that nothing fits is a row with its reason.

    Raises:
        ArgumentError: Neither or both of `memory_budgets` and `n` are given, a budget
            cannot be read, there are none, or `n` is less than 2; or another argument
            means nothing.
        Interrupted: Ctrl-C was pressed; its ``done`` has the rows planned by then.
    """
    check_names(options, sweep)
    check_plan_options(plan_options)
    asked = read_budgets(memory_budgets, n)
    check_cap(cap)
    traced = restricted(profile_of(model, inputs, options), ac_units, fsdp_units, cap)
    if (plan_options or {}).get("offload") is True:
        traced = may_offload(traced)
    lowest, baseline = floor(traced), traced.baseline_peak_bytes
    if asked is None:
        assert n is not None
        budgets = evenly(lowest, baseline, n)
    else:
        total = traced.device.memory_bytes
        budgets = [parse_bytes(b, total_bytes=total) for b in asked]
    start = sac.Start()  # smaller budgets first: what they found holds for larger ones
    how = {"start": start, **(plan_options or {})}
    answers: dict[int, Row] = {}
    wanted = sorted(set(budgets))
    try:
        with progress_bar("Planning budgets", len(wanted), show=progress) as advance:
            for budget in wanted:
                answers[budget] = _answer(traced, budget, how)
                advance()
    except KeyboardInterrupt as stop:
        done = [budget for budget in budgets if budget in answers]
        what = f"{len(answers)} of {len(wanted)} budgets are planned for"
        raise Interrupted(_rows(traced, answers, done), what) from stop
    return _rows(traced, answers, budgets)


def check_plan_options(plan_options: object) -> None:
    """Refuse what the plans of a sweep cannot be made with.

    Raises:
        ArgumentError: Names what is not taken.
    """
    if plan_options is None:
        return
    wanted = f"a dict of what `plan` takes, of {', '.join(_PLAN_OPTIONS)}"
    check_kind(plan_options, Mapping, name="plan_options", wanted=wanted)
    options: dict[Any, Any] = dict(plan_options)  # type: ignore[call-overload]
    for name in options:
        if name not in _PLAN_OPTIONS:
            raise unknown_name(str(name), "plan_options", _PLAN_OPTIONS)
    read_offload(options.get("offload", False), options.get("offload_dir"))


def _rows(
    profile: TracedStep, answers: dict[int, Row], budgets: Sequence[int]
) -> Sweep:
    """Rows of budgets in the order they were asked for."""
    lowest_bytes = floor(profile)
    rows = {
        row.budget_bytes: replace(
            row,
            floor_bytes=lowest_bytes,
            baseline_peak_bytes=profile.baseline_peak_bytes,
            planned_for=profile.device.name,
            calibrated=profile.calibrated,
        )
        for row in monotone([*answers.values()])
    }
    return Sweep(rows=tuple(rows[budget] for budget in budgets))


def _answer(profile: TracedStep, budget_bytes: int, options: dict[str, Any]) -> Row:
    """The row of a budget by itself."""
    options = {
        "dry_run": isinstance(profile, Profile) and not any(profile.dry_runs),
        "relative_gap": SWEEP_GAP,
        **options,
    }
    try:
        plan = make_plan(profile, budget_bytes, **options)
    except InfeasibleBudgetError as error:
        why = reason_of(error)
        return Row(status="infeasible", budget_bytes=budget_bytes, reason=why)
    return Row(**figures_of(plan), bound_ms=plan.bound_ms, plan=plan)
