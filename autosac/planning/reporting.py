"""A plan explained: tables for people, in a terminal or as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from autosac.planning import explaining
from autosac.planning.checking import chosen as chosen_by_plan
from autosac.planning.make_plan import price_ms_per_byte
from autosac.planning.plans import Plan
from autosac.profiles.memory_history import Place, peak_place
from autosac.profiles.profile import TracedStep
from autosac.quantities import format_bytes, format_ms

_WIDTH = 120  # of plain text
_MOST_OPS = 40  # of one table, in a terminal
_MOST_REFUSED = 8
_GIB, _MIB = 2**30, 2**20
MISSING = (
    "This plan comes from a file, which holds no ops and times. With"
    " `profile=autosac.profile(model, ...)` the report also tells where the peak is,"
    " why each module is recomputed, what more memory buys, and what happens to every"
    " op; and it draws memory and trade-offs."
)


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
        tables: What happens to every op.
    """

    before: Place
    after: Place
    baseline: dict[str, int]
    units: tuple[explaining.UnitRow, ...]
    refused: tuple[tuple[str, int, str], ...]
    price: float | None
    offers: tuple[explaining.Offer, ...]
    tables: tuple[explaining.OpTable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan and what is known of it; ``print`` it, or take its ``str()``.

    Attributes:
        plan: The plan.
        details: None if the step is not there.
    """

    plan: Plan
    details: Details | None

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield _summary(self.plan, self.details)
        if self.details is None:
            yield _policy_table(self.plan)
            yield Text(MISSING)
            return
        yield _composition(self.plan, self.details)
        yield Text("\n".join(price_lines(self.details)) + "\n")
        yield _unit_table(self.details)
        if self.details.refused:
            yield _refused_table(self.details)
        for table in self.details.tables:
            yield _op_table(table)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
        console.print(self)
        written = console.file
        assert isinstance(written, io.StringIO)
        return written.getvalue()


def report(plan: Plan, profile: TracedStep | None = None) -> Report:
    """Explain a plan: see `Plan.report`."""
    traced = profile if profile is not None else plan.traced
    return Report(plan=plan, details=None if traced is None else _details(plan, traced))


def _details(plan: Plan, profile: TracedStep) -> Details:
    chosen = chosen_by_plan(plan, profile)
    return Details(
        before=peak_place(profile, {}),
        after=peak_place(profile, chosen),
        baseline=profile.composition({}),
        units=explaining.unit_rows(plan, profile, chosen),
        refused=tuple(_refused(profile)),
        price=price_ms_per_byte(profile, plan.budget_bytes),
        offers=explaining.offers(plan, profile),
        tables=explaining.op_tables(profile, chosen),
    )


def _refused(profile: TracedStep) -> Iterator[tuple[str, int, str]]:
    keeps = {m.fqn: m.activation_bytes or 0 for m in profile.statistics.modules}
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
    for offer in details.offers:
        lines.append(
            f"{format_bytes(offer.more_bytes)} more would save"
            f" {format_ms(offer.saved_ms)} a step (planned anew:"
            f" {format_ms(offer.recompute_ms)} of recomputation are left)."
        )
    if not details.offers:
        lines.append("More memory would save nothing: the plain step fits.")
    return lines


def summary_rows(plan: Plan, details: Details | None) -> Iterator[tuple[str, str]]:
    """What a plan promises, in words."""
    after = f" in {details.after}" if details else ""
    before = f" in {details.before}" if details else ""
    gap = f"{100 * plan.optimality_gap:.1f} %"
    yield "budget", format_bytes(plan.budget_bytes)
    yield "peak with the plan", f"{format_bytes(plan.peak_bytes)}{after}"
    yield "peak without it", f"{format_bytes(plan.baseline_peak_bytes)}{before}"
    if plan.reserved_bytes is not None:
        yield "reserved by PyTorch", format_bytes(plan.reserved_bytes)
    yield "step", f"{format_ms(plan.step_ms)} on {plan.device}"
    yield (
        "of it recomputation",
        f"{format_ms(plan.recompute_ms)}, at least {format_ms(plan.bound_ms)} by the"
        f" bound: gap {gap}",
    )
    yield "times and workspaces", f"{plan.measured_fraction:.1%} of the time measured"
    yield "checked by", "a dry run" if plan.dry_run else "simulation only"
    yield "torch", plan.torch_version


def _summary(plan: Plan, details: Details | None) -> Table:
    table = Table(title="Plan", show_header=False, title_justify="left")
    for row in summary_rows(plan, details):
        table.add_row(*row)
    return table


def composition_rows(plan: Plan, details: Details) -> Iterator[tuple[str, str, str]]:
    """Bytes at the peak per category, without the plan and with it."""
    for name in {**details.baseline, **plan.composition}:
        before = details.baseline.get(name, 0)
        after = plan.composition.get(name, 0)
        if before or after:
            yield name, format_bytes(before), format_bytes(after)


def _composition(plan: Plan, details: Details) -> Table:
    table = _table("What is alive at the peak", "category", "without plan", "with plan")
    for row in composition_rows(plan, details):
        table.add_row(*row)
    return table


UNIT_HEADS = (
    "AC unit", "class", "recomputed", "keeps", "frees", "costs", "ms per GiB", "why",
)  # fmt: skip


def unit_cells(row: explaining.UnitRow) -> tuple[str, ...]:
    """One AC unit in the columns of `UNIT_HEADS`."""
    return (
        row.fqn,
        row.class_name,
        f"{row.ratio:.1%}",
        format_bytes(row.activation_bytes - row.freed_bytes),
        format_bytes(row.freed_bytes),
        format_ms(row.recompute_ms),
        f"{row.ms_per_gib:.4g}",
        row.why,
    )


def _unit_table(details: Details) -> Table:
    table = _table("Why is this module recomputed?", *UNIT_HEADS)
    for row in details.units:
        table.add_row(*unit_cells(row))
    return table


def _policy_table(plan: Plan) -> Table:
    table = _table("AC units", "AC unit", "recomputed", "note")
    notes = plan.notes()
    for fqn, ratio in plan.policy.items():
        table.add_row(fqn, f"{ratio:.1%}", notes.get(fqn, ""))
    return table


def _refused_table(details: Details) -> Table:
    table = _table("Modules that cannot be AC units", "module", "keeps", "because")
    for fqn, nbytes, reason in details.refused:
        table.add_row(fqn, format_bytes(nbytes), reason)
    return table


OP_HEADS = (
    "module", "op", "shape", "bytes", "what happens", "ms", "source", "times",
)  # fmt: skip


def op_cells(row: explaining.OpRow) -> tuple[str, ...]:
    """One op in the columns of `OP_HEADS`."""
    return (
        row.fqn,
        row.name,
        row.shape,
        format_bytes(row.nbytes),
        row.action,
        f"{row.ms:.4g}",
        row.source,
        str(row.count),
    )


def _op_table(ops: explaining.OpTable) -> Table:
    table = _table(f"Ops of {ops.title}", *OP_HEADS)
    for row in ops.rows[:_MOST_OPS]:
        table.add_row(*op_cells(row))
    if len(ops.rows) > _MOST_OPS:
        left = len(ops.rows) - _MOST_OPS
        table.add_row(f"... and {left} more: `plan.to_html` has all of them")
    return table


_TEXT_HEADS = ("why", "because", "class", "source", "what happens", "op", "note")


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        is_text = i == 0 or head in (
            "why",
            "because",
            "class",
            "source",
            "what happens",
        )
        table.add_column(head, justify="left" if is_text else "right", overflow="fold")
    return table
