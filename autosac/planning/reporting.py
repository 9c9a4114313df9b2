"""A plan explained: tables for people, in a terminal or as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autosac.planning import explaining
from autosac.planning.checking import chosen as chosen_by_plan
from autosac.planning.choices import price_ms_per_byte
from autosac.planning.plan_data import PlanData
from autosac.profiles.memory_history import Place, peak_place
from autosac.profiles.restricting import restricted
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes, format_ms
from autosac.rich_parts import Console, ConsoleOptions, RenderableType, Table, Text

_WIDTH = 120  # of plain text
_MOST_OPS = 40  # of one table, in a terminal
_MOST_REFUSED = 8
_GIB, _MIB = 2**30, 2**20
_TEXT_HEADS = ("why", "because", "class", "source", "what happens")
MISSING = (
    "This plan comes from a file, which holds no ops and times. With"
    " `profile=autosac.profile(model, ...)` the report also tells where the peak is,"
    " why each module is recomputed, what more memory buys, and what happens to every"
    " op; and it draws memory and trade-offs."
)


class Section(NamedTuple):
    """A table of the report as text; heads are empty if it has none."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What a report adds if the step of its plan is there.

    Attributes:
        before: What runs at the peak without the plan,
        after: and with it.
        baseline: Bytes alive at the peak without the plan, per category.
        units: What each AC unit frees and costs.
        refused: Why modules that keep most cannot be AC units.
        price: Milliseconds that a byte more saves at the margin: the dual of the
            budget in the MILP's LP relaxation; None if that has no solution.
        offers: What more memory buys, by planning.
        offload_ms: Recompute time if the plan might offload; None if it may already.
        tables: What happens to every op.
    """

    before: Place
    after: Place
    baseline: dict[str, int]
    units: tuple[explaining.UnitRow, ...]
    refused: tuple[tuple[str, int, str], ...]
    price: float | None
    offers: tuple[explaining.Offer, ...]
    offload_ms: float | None
    tables: tuple[explaining.OpTable, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """A plan and what is known of it; ``print`` it, or take its ``str()``.

    Attributes:
        plan: The plan.
        details: None if the step is not there.
    """

    plan: PlanData
    details: Details | None

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield _table(summary(self.plan, self.details))
        if self.details is None:
            yield _table(policy(self.plan))
            yield Text(MISSING)
            return
        yield _table(composition(self.plan, self.details))
        yield Text("\n".join(price_lines(self.details)) + "\n")
        yield _table(units(self.details))
        if self.details.refused:
            yield _table(refused(self.details))
        for table in self.details.tables:
            yield _table(ops(table), most=_MOST_OPS)

    def __repr__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
        console.print(self)
        written = console.file
        assert isinstance(written, io.StringIO)
        return written.getvalue()


def report(plan: PlanData, profile: TracedStep | None = None) -> Report:
    """Explain a plan: see `Plan.report`."""
    traced = plan.traced
    if profile is not None:
        traced = restricted(profile, cap=plan.cap, offload=plan.offloads)
    return Report(plan=plan, details=None if traced is None else _details(plan, traced))


def _details(plan: PlanData, profile: TracedStep) -> Details:
    chosen = chosen_by_plan(plan, profile)
    return Details(
        before=peak_place(profile, {}),
        after=peak_place(profile, chosen),
        baseline=profile.composition({}),
        units=explaining.unit_rows(plan, profile, chosen),
        refused=tuple(_refused(profile)),
        price=price_ms_per_byte(profile, plan.budget_bytes),
        offers=explaining.offers(plan, profile),
        offload_ms=explaining.offload_ms(plan, profile),
        tables=explaining.op_tables(profile, chosen),
    )


def _refused(profile: TracedStep) -> Iterator[tuple[str, int, str]]:
    keeps = {m.fqn: m.activation_bytes or 0 for m in profile.figures.modules}
    refused = sorted(profile.units.refused.items(), key=lambda item: -keeps[item[0]])
    for fqn, reason in refused[:_MOST_REFUSED]:
        yield fqn, keeps[fqn], reason


def price_lines(details: Details) -> list[str]:
    """Answers to: what would more memory buy?"""
    lines = []
    if details.price is None:
        lines.append("The LP relaxation has no solution here: no price of memory.")
    else:
        unit = _GIB if details.offers and details.offers[-1].more_bytes > _GIB else _MIB
        lines.append(
            f"Price of memory at the margin: {explaining.priced(details.price, unit)}"
            " (dual of the budget in the LP relaxation)."
        )
    saved_ms = 0.0
    for offer in details.offers:
        if offer.saved_ms <= saved_ms:
            continue  # more memory for nothing more
        saved_ms = offer.saved_ms
        lines.append(
            f"{format_bytes(offer.more_bytes)} more would save"
            f" {format_ms(offer.saved_ms)} a step (planned anew:"
            f" {format_ms(offer.recompute_ms)} of recomputation are left)."
        )
    if not details.offers:
        lines.append("More memory would save nothing: the plain step fits.")
    elif details.offload_ms is not None:
        lines.append(
            "With `offload`=True the same budget would take"
            f" {format_ms(details.offload_ms)} of recomputation and waiting."
        )
    return lines


# --- tables, for a terminal and for HTML ----------------------------------------------


def summary(plan: PlanData, details: Details | None) -> Section:
    """What a plan promises, in words."""
    after = f" in {details.after}" if details else ""
    before = f" in {details.before}" if details else ""
    reserved = plan.reserved_bytes
    rows = {
        "budget": format_bytes(plan.budget_bytes),
        "peak with the plan": f"{format_bytes(plan.peak_bytes)}{after}",
        "peak without it": f"{format_bytes(plan.baseline_peak_bytes)}{before}",
        "reserved by PyTorch": None if reserved is None else format_bytes(reserved),
        "step": f"{format_ms(plan.step_ms)} on {plan.device}",
        "of it recomputation": f"{format_ms(plan.recompute_ms)}, at least"
        f" {format_ms(plan.bound_ms)} by the bound: gap"
        f" {100 * plan.optimality_gap:.1f} %",
        "offloaded": f"{format_bytes(plan.offloaded_bytes)},"
        f" {format_ms(plan.exposed_ms)} of that is waiting for it"
        if plan.offloads
        else None,
        "times and workspaces": f"{plan.measured_fraction:.1%} of the time measured",
        "checked by": "a dry run" if plan.dry_run else "simulation only",
        "torch": plan.torch_version,
    }
    return Section("Plan", ("", ""), [(k, v) for k, v in rows.items() if v is not None])


def composition(plan: PlanData, details: Details) -> Section:
    """Bytes at the peak per category, without the plan and with it."""
    before, after = details.baseline, plan.composition
    pairs = {name: (before.get(name, 0), after.get(name, 0)) for name in before | after}
    return Section(
        "What is alive at the peak",
        ("category", "without plan", "with plan"),
        [(name, *map(format_bytes, pair)) for name, pair in pairs.items() if any(pair)],
    )


def units(details: Details) -> Section:
    """What each AC unit frees and costs."""
    return Section(
        "Why is this module recomputed?",
        ("AC unit", "class", "recomputed", "keeps", "frees", "costs", "ms per GiB",
         "why"),
        [
            (
                row.fqn,
                row.class_name,
                f"{row.ratio:.1%}",
                format_bytes(row.activation_bytes - row.freed_bytes),
                format_bytes(row.freed_bytes),
                format_ms(row.recompute_ms),
                f"{row.ms_per_gib:.4g}",
                row.why,
            )
            for row in details.units
        ],
    )  # fmt: skip


def policy(plan: PlanData) -> Section:
    """The ratio of each AC unit: all that a plan file knows."""
    notes = plan.notes()
    rows = [(fqn, f"{r:.1%}", notes.get(fqn, "")) for fqn, r in plan.policy.items()]
    return Section("AC units", ("AC unit", "recomputed", "note"), rows)


def refused(details: Details) -> Section:
    """Modules that keep most of what cannot be recomputed."""
    rows = [(fqn, format_bytes(kept), why) for fqn, kept, why in details.refused]
    heads = ("module", "keeps", "because")
    return Section("Modules that cannot be AC units", heads, rows)


def ops(table: explaining.OpTable) -> Section:
    """What happens to every op of some module calls that are alike."""
    return Section(
        f"Ops of {table.title}",
        ("module", "op", "shape", "bytes", "what happens", "ms", "source", "times"),
        [
            (
                row.fqn,
                row.name,
                row.shape,
                format_bytes(row.nbytes),
                row.action,
                f"{row.ms:.4g}",
                row.source,
                str(row.count),
            )
            for row in table.rows
        ],
    )


def _table(section: Section, most: int | None = None) -> Table:
    has_heads = any(section.heads)
    table = Table(title=section.title, show_header=has_heads, title_justify="left")
    for i, head in enumerate(section.heads):
        is_text = not has_heads or i == 0 or head in _TEXT_HEADS
        table.add_column(head, justify="left" if is_text else "right", overflow="fold")
    for row in section.rows[:most]:
        table.add_row(*row)
    if most is not None and len(section.rows) > most:
        left = len(section.rows) - most
        table.add_row(f"... and {left} more: `plan.to_html` has all of them")
    return table
