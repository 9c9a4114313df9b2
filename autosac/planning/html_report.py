"""The report as one HTML file: pictures are SVG without scripts, or Plotly's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape

from autosac.pictures.panels import Grid
from autosac.pictures.pictures import Picture
from autosac.planning import explaining, plotting, reporting
from autosac.planning.plan_data import PlanData
from autosac.planning.reporting import Details, Section
from autosac.profiles.restricting import restricted
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes, format_ms
from autosac.results.pictures import picture_of

_NUM_BUDGETS = 12  # of the sweep in the report
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #ddd;
        --mark: #ececec; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e3e3; --paper: #17191c; --line: #3a3d42; --mark: #2b2e33; }
  figure { filter: invert(.91) hue-rotate(180deg); }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); margin: 2rem auto;
       background: var(--paper); max-width: 80rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.of { margin-top: 0; opacity: .75; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-size: .87rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line);
         text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; }
td.text, th.text { text-align: left; white-space: normal; }
td.name, code { font-family: ui-monospace, monospace; white-space: nowrap; }
tr.recomputed td { background: var(--mark); }
figure { margin: 1rem 0; overflow-x: auto; }
figure > svg { width: 100%; height: auto; min-width: 34rem; max-width: 64rem; }
figure.small > svg { max-width: 42rem; }
figure > div { min-width: 58rem; }
summary { cursor: pointer; margin: .4rem 0; }
"""
_NAMES = frozenset({"AC unit", "module"})  # heads of columns of names in code
_TEXT_COLUMNS = frozenset(
    {"AC unit", "class", "why", "module", "because", "op", "shape", "what happens",
     "source", "category", "note", ""}
)  # fmt: skip


class _Figures:
    """Draws pictures as elements of one page.

    Args:
        interactive: By Plotly, whose script the first of them brings.
    """

    def __init__(self, interactive: bool) -> None:
        self.interactive = interactive
        self._is_first = True

    def __call__(self, picture: Picture) -> str:
        is_small = isinstance(picture.panels[0], Grid)
        kind = ' class="small"' if is_small else ""
        if self.interactive:
            drawn = picture.html(brings_plotly=self._is_first)
            self._is_first = False
        else:
            drawn = picture.svg()
        return f"<figure{kind}>{drawn}</figure>"


def page(
    plan: PlanData, profile: TracedStep | None = None, *, interactive: bool = False
) -> str:
    """The report as one HTML document: see `Plan.to_html`."""
    traced = profile if profile is not None else plan.traced
    draw = _Figures(interactive)
    details = reporting.report(plan, traced).details
    title = (
        f"Plan under {format_bytes(plan.budget_bytes)}:"
        f" {format_bytes(plan.baseline_peak_bytes)} → {format_bytes(plan.peak_bytes)}"
        f" for {format_ms(plan.recompute_ms)} a step"
    )
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="of">{escape(_subject(plan, traced))}</p>',
            _table(reporting.summary(plan, details)),
            *(
                _known(plan, traced, details, draw)
                if traced and details
                else _unknown(plan, draw)
            ),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(f'{_model(plan)}: {title}')}</title>"
        f"<style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _model(plan: PlanData) -> str:
    return plan.model[0][1]


def _subject(plan: PlanData, traced: TracedStep | None) -> str:
    """Whose plan it is: model, batch, optimizer, device, today."""
    optimizer = [traced.optimizer] if traced is not None and traced.optimizer else []
    batch = f"batch {plan.signatures[0]}"
    today = f"{datetime.now():%Y-%m-%d}"
    return " · ".join([_model(plan), batch, *optimizer, plan.device, today])


def _unknown(plan: PlanData, draw: _Figures) -> Iterator[str]:
    """Sections of the report on a plan from a file, without its step."""
    yield f"<p>{escape(reporting.MISSING)}</p>"
    yield from _ratios(plan, draw)
    yield _headed(reporting.policy(plan))


def _known(
    plan: PlanData, profile: TracedStep, details: Details, draw: _Figures
) -> Iterator[str]:
    parts = _table(reporting.composition(plan, details))
    memory = draw(plotting.memory(plan, profile))
    yield _section("Memory over the step", memory + parts)
    lines = "".join(f"<li>{escape(x)}</li>" for x in reporting.price_lines(details))
    yield _section(
        "What would more memory buy?", f"<ul>{lines}</ul>{_swept(plan, profile, draw)}"
    )
    yield _headed(reporting.units(details))
    yield from _ratios(plan, draw)
    if profile.formulation.units:
        curves = draw(plotting.trade_offs(plan, profile))
        yield _section("What memory costs in each module", curves)
    if details.refused:
        yield _headed(reporting.refused(details))
    ops = "".join(
        f"<details><summary><code>{escape(table.title)}</code>: {len(table.rows)} ops"
        f"</summary>{_table(reporting.ops(table))}</details>"
        for table in details.tables
    )
    yield _section("What happens to every op", ops)


def _swept(plan: PlanData, profile: TracedStep, draw: _Figures) -> str:
    """Recompute time against the budget, with this plan in it."""
    if plan.baseline_peak_bytes <= plan.budget_bytes:
        return ""
    step = restricted(profile, cap=plan.cap, offload=plan.offloads)
    rows = explaining.swept(step, _NUM_BUDGETS)
    here = {"this plan": [(plan.budget_bytes, plan.recompute_ms)]}
    return draw(picture_of(rows, (), rivals=here))


def _ratios(plan: PlanData, draw: _Figures) -> Iterator[str]:
    if plan.policy:
        picture = draw(plotting.ratios(plan))
        yield _section("How much of every module is recomputed", picture)


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}"


def _headed(section: Section) -> str:
    return _section(section.title, _table(section))


def _table(section: Section) -> str:
    heads = section.heads
    kinds = [
        f' class="text{" name" if head in _NAMES else ""}"'
        if head in _TEXT_COLUMNS
        else ""
        for head in heads
    ]

    def line(tag: str, cells: Sequence[str]) -> str:
        inner = "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>"
            for kind, cell in zip(kinds, cells, strict=True)
        )
        mark = ' class="recomputed"' if "recomputed" in cells and tag == "td" else ""
        return f"<tr{mark}>{inner}</tr>"

    head = line("th", heads) if any(heads) else ""
    rows = "".join(line("td", row) for row in section.rows)
    return f'<div class="wide"><table>{head}{rows}</table></div>'
