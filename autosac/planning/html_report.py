"""The report as one HTML file: pictures are SVG, there are no scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from autosac.pictures.pictures import Picture
from autosac.planning import plotting, reporting
from autosac.planning.budget_sweep import sweep
from autosac.planning.plans import Plan
from autosac.planning.reporting import Details, Section
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes, format_ms

_NUM_BUDGETS = 12  # of the sweep in the report
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; margin: 2rem auto;
       max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .6rem 0; font-size: .87rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap; }
th { border-bottom: 2px solid #888; }
td.text, th.text { text-align: left; white-space: normal; }
td:first-child { white-space: nowrap; }
tr.recomputed td { background: #ececec; }
code, td:first-child { font-family: ui-monospace, monospace; }
svg { max-width: 100%; height: auto; } summary { cursor: pointer; margin: .4rem 0; }
details { overflow-x: auto; }
"""
_TEXT_COLUMNS = frozenset(
    {"AC unit", "class", "why", "module", "because", "op", "shape", "what happens",
     "source", "category", "note", ""}
)  # fmt: skip


def page(plan: Plan, profile: TracedStep | None = None) -> str:
    """The report as one HTML document: see `Plan.to_html`."""
    traced = profile if profile is not None else plan.traced
    details = reporting.report(plan, traced).details
    title = (
        f"Plan under {format_bytes(plan.budget_bytes)}:"
        f" {format_bytes(plan.baseline_peak_bytes)} → {format_bytes(plan.peak_bytes)}"
        f" for {format_ms(plan.recompute_ms)} a step"
    )
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            _table(reporting.summary(plan, details)),
            *(_known(plan, traced, details) if traced and details else _unknown(plan)),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _unknown(plan: Plan) -> Iterator[str]:
    """Sections of the report on a plan from a file, without its step."""
    yield f"<p>{escape(reporting.MISSING)}</p>"
    yield from _ratios(plan)
    yield _headed(reporting.policy(plan))


def _known(plan: Plan, profile: TracedStep, details: Details) -> Iterator[str]:
    parts = _table(reporting.composition(plan, details))
    memory = _svg(plotting.memory(plan, profile))
    yield _section("Memory over the step", memory + parts)
    lines = "".join(f"<li>{escape(x)}</li>" for x in reporting.price_lines(details))
    yield _section(
        "What would more memory buy?", f"<ul>{lines}</ul>{_swept(plan, profile)}"
    )
    yield _headed(reporting.units(details))
    yield from _ratios(plan)
    if profile.formulation.units:
        curves = _svg(plotting.trade_offs(plan, profile))
        yield _section("What memory costs in each module", curves)
    if details.refused:
        yield _headed(reporting.refused(details))
    ops = "".join(
        f"<details><summary><code>{escape(table.title)}</code>: {len(table.rows)} ops"
        f"</summary>{_table(reporting.ops(table))}</details>"
        for table in details.tables
    )
    yield _section("What happens to every op", ops)


def _swept(plan: Plan, profile: TracedStep) -> str:
    """Recompute time against the budget, with this plan in it."""
    if plan.baseline_peak_bytes <= plan.budget_bytes:
        return ""
    swept = sweep(profile, n=_NUM_BUDGETS, plan_options={"dry_run": False})
    here = {"this plan": [(plan.budget_bytes, plan.recompute_ms)]}
    return _svg(swept.picture(rivals=here))


def _ratios(plan: Plan) -> Iterator[str]:
    if plan.policy:
        picture = _svg(plotting.ratios(plan))
        yield _section("How much of every module is recomputed", picture)


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}"


def _headed(section: Section) -> str:
    return _section(section.title, _table(section))


def _svg(picture: Picture) -> str:
    return f"<figure>{picture.svg()}</figure>"


def _table(section: Section) -> str:
    heads = section.heads
    kinds = [' class="text"' if head in _TEXT_COLUMNS else "" for head in heads]

    def line(tag: str, cells: Sequence[str]) -> str:
        inner = "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>"
            for kind, cell in zip(kinds, cells, strict=True)
        )
        mark = ' class="recomputed"' if "recomputed" in cells and tag == "td" else ""
        return f"<tr{mark}>{inner}</tr>"

    head = line("th", heads) if any(heads) else ""
    return f"<table>{head}{''.join(line('td', row) for row in section.rows)}</table>"
