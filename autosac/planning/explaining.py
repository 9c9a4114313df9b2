"""Why a plan is as it is: what every unit frees and costs, what more memory buys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autosac.planning.choices import SWEEP_GAP, choose_fastest, evenly, least_budget
from autosac.planning.eager_steps import times_of
from autosac.planning.plan_data import PlanData
from autosac.profiles.restricting import restricted
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes, format_ms
from autosac.results.rows import Row, monotone
from autosac.solvers import sac
from autosac.step.source_lines import shortened
from autosac.step.tape import Op
from autosac.units import curves
from autosac.units.policies import DETACHED, RERUN, SAVE, SKIP, Policy
from autosac.units.unit import Unit

_GIB = 2**30
_SHARES = (0.1, 0.25, 0.5, 1.0)  # of the way from the budget to the baseline
_MOST_COUNTERFACTUALS = 200  # a simulation each, of milliseconds
_ACTIONS = {
    SAVE: "saved",
    RERUN: "recomputed",
    SKIP: "not needed again",
    DETACHED: "not repeated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """What one candidate does in a plan.

    Attributes:
        fqn: Its name, of a chain the first and the last.
        class_name: Class of its module.
        ratio: Share of its activation memory that is recomputed.
        activation_bytes: What it would keep.
        freed_bytes: What it does not keep.
        recompute_ms: Time of its reruns in a step.
        without_peak_bytes: Peak of the step if it alone were no AC unit; None if that
            was not simulated.
        why: A sentence.
    """

    fqn: str
    class_name: str
    ratio: float
    activation_bytes: int
    freed_bytes: int
    recompute_ms: float
    without_peak_bytes: int | None
    why: str

    @property
    def ms_per_gib(self) -> float:
        """Recompute time for each GiB that the unit frees, in milliseconds."""
        return self.recompute_ms / max(self.freed_bytes, 1) * _GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One op, or several that agree in all fields but `count`.

    Attributes:
        fqn: The module it belongs to.
        name: Overload name.
        shape: Shapes of its outputs.
        nbytes: What it allocates for them.
        action: What the plan does with it.
        ms: Its time in forward.
        source: Line of the user's code, '' if there is none.
        count: How many there are.
    """

    fqn: str
    name: str
    shape: str
    nbytes: int
    action: str
    ms: float
    source: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """Ops of a module call, views left out.

    Attributes:
        title: Whose they are.
        rows: The ops in forward order.
    """

    title: str
    rows: tuple[OpRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What more memory would buy.

    Attributes:
        more_bytes: Added to the budget.
        recompute_ms: Time of the plan for that,
        saved_ms: and how much less than the present one's it is.
    """

    more_bytes: int
    recompute_ms: float
    saved_ms: float


def unit_rows(
    plan: PlanData, profile: TracedStep, chosen: Mapping[Unit, Policy]
) -> tuple[UnitRow, ...]:
    """What each unit of a plan frees and costs, in forward order."""
    rows = []
    rerun = [(u, policy) for u, policy in chosen.items() if not u.is_streamed]
    for number, (unit, policy) in enumerate(rerun):
        most = max(unit.activation_bytes, unit.sole_bytes)
        freed = max(most - curves.kept(unit, policy), 0)
        peak = None
        if number < _MOST_COUNTERFACTUALS:
            others = {u: p for u, p in chosen.items() if u is not unit}
            peak = profile.peak_bytes(others)
        rows.append(
            UnitRow(
                fqn=unit.title,
                class_name=profile.tape.modules[unit.module].class_name,
                ratio=freed / max(most, 1),
                activation_bytes=most,
                freed_bytes=freed,
                recompute_ms=curves.recompute_ms(unit, policy),
                without_peak_bytes=peak,
                why=_why(plan, peak),
            )
        )
    return tuple(rows)


def _why(plan: PlanData, without_peak_bytes: int | None) -> str:
    if without_peak_bytes is None:
        return "not simulated: the plan has many units"
    excess = without_peak_bytes - plan.budget_bytes
    if excess > 0:
        return (
            f"without it the peak is {format_bytes(without_peak_bytes)},"
            f" {format_bytes(excess)} above the budget"
        )
    return "the budget holds without it: the solver's gap or a tie"


def offers(plan: PlanData, profile: TracedStep) -> tuple[Offer, ...]:
    """What more memory saves, by planning: a GiB, and shares up to the plain peak."""
    missing = profile.baseline_peak_bytes - plan.budget_bytes
    if missing <= 0:
        return ()
    amounts = {_GIB, *(max(1, round(share * missing)) for share in _SHARES)}
    all_offers = []
    for more in sorted(amounts):
        budget_bytes = plan.budget_bytes + more
        chosen, _ = choose_fastest(profile, budget_bytes)
        time_ms = times_of(profile, chosen, 0.0).added_ms
        time_ms = min(time_ms, plan.recompute_ms)  # the present plan fits as well
        all_offers.append(
            Offer(
                more_bytes=more,
                recompute_ms=time_ms,
                saved_ms=plan.recompute_ms - time_ms,
            )
        )
    return tuple(all_offers)


def swept(profile: TracedStep, n: int) -> tuple[Row, ...]:
    """Figures of so many budgets from the least feasible one to the baseline."""
    least_bytes, most_bytes = least_budget(profile), profile.baseline_peak_bytes
    how: dict[str, Any] = {"start": sac.Start(), "relative_gap": SWEEP_GAP}
    rows = []
    for budget_bytes in evenly(least_bytes, most_bytes, n):
        chosen, bound_ms = choose_fastest(profile, budget_bytes, **how)
        times = times_of(profile, chosen, bound_ms)
        rows.append(
            Row(
                status="planned",
                budget_bytes=budget_bytes,
                recompute_ms=times.added_ms,
                bound_ms=times.bound_ms,
                floor_bytes=least_bytes,
                baseline_peak_bytes=most_bytes,
            )
        )
    return tuple(monotone(rows))


def offload_ms(plan: PlanData, profile: TracedStep) -> float | None:
    """Recompute time of the plan for the same budget that may offload as well.

    None if it may already, or if that is not possible.
    """
    if not profile.may_offload:
        return None
    offloading = restricted(profile, cap=profile.cap, offload=True)
    chosen, _ = choose_fastest(offloading, plan.budget_bytes)
    return times_of(offloading, chosen, 0.0).added_ms


def op_tables(
    profile: TracedStep, chosen: Mapping[Unit, Policy]
) -> tuple[OpTable, ...]:
    """Ops of every unit, those that are treated alike once, and of what is left."""
    calls: list[tuple[Unit, Policy]] = []
    moved: set[int] = set()
    for unit, policy in chosen.items():
        calls += () if unit.is_streamed else unit.by_call(policy)
        moved.update(move.storage for move in unit.moves(policy))
    alike: dict[tuple[object, Policy], list[Unit]] = {}
    for unit, policy in calls:
        alike.setdefault((unit.key, policy), []).append(unit)
    tables = []
    for (_, policy), units in alike.items():
        others = f" and {len(units) - 1} alike" if len(units) > 1 else ""
        rows = tuple(_unit_ops(profile, units[0], policy))
        title = f"{units[0].fqn}{others}"
        if followed_ms := units[0].followed_ms:
            title += f", each {format_ms(followed_ms)} of the program besides"
        tables.append(OpTable(title=title, rows=rows))
    inside = {i for unit, _ in calls for i in unit.ops}
    rest = tuple(_other_ops(profile, inside, moved))
    return (*tables, OpTable(title="outside of AC units", rows=rest))


def _unit_ops(profile: TracedStep, unit: Unit, policy: Policy) -> Iterator[OpRow]:
    actions = {
        i: choice
        for group, choice in zip(unit.groups, policy.choices, strict=True)
        for i in group.ops
    }
    for place, index in enumerate(unit.ops):
        op = profile.tape.ops[index]
        if not op.is_view:
            # After its last saved tensor a unit is not rerun.
            action = _ACTIONS[actions.get(place, SKIP)]
            row = _op_row(profile, op, index, action)
            is_rerun = action == _ACTIONS[RERUN]
            yield replace(row, ms=profile.rerun_ms[index]) if is_rerun else row


def _other_ops(
    profile: TracedStep, inside: set[int], moved: set[int]
) -> Iterator[OpRow]:
    """Forward ops that always run once; those that are alike in one row."""
    kept = {saved.storage for saved in profile.tape.saved}
    rows: Counter[OpRow] = Counter()
    for index, op in enumerate(profile.tape.ops):
        if op.phase in ("forward", "loss") and index not in inside and not op.is_view:
            is_kept = any(storage in kept for storage in op.creates)
            action = "kept for backward" if is_kept else "freed at once"
            if not moved.isdisjoint(op.creates):
                action = "offloaded"
            rows[_op_row(profile, op, index, action)] += 1
    for row, count in rows.items():
        yield replace(row, count=count)


def _op_row(profile: TracedStep, op: Op, index: int, action: str) -> OpRow:
    return OpRow(
        fqn=profile.tape.modules[op.module].fqn,
        name=op.name,
        shape=", ".join("x".join(map(str, shape)) or "()" for shape in op.shapes),
        nbytes=sum(profile.tape.storages[s].nbytes for s in op.creates),
        action=action,
        ms=profile.op_ms[index],
        source=shortened(op.source),
    )


def priced(ms_per_byte: float, more_bytes: int) -> str:
    """What an amount of memory is worth at the margin."""
    return f"{format_ms(ms_per_byte * more_bytes)} per {format_bytes(more_bytes)}"
