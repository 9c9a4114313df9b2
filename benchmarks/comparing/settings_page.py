"""What the jobs of `benchmarks.comparing.settings` show, judged and as a page."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.comparing.settings import COLUMNS
from benchmarks.comparing.settings_job import SETTINGS
from benchmarks.environment import MIB
from benchmarks.judging.verdicts import quantile

Record = dict[str, Any]
Cell = dict[str, Any]
# What is asked for.
GAP_MEDIAN, GAP_95, GAP_WORST, MOST_CPU_S = 0.005, 0.02, 0.05, 3.0
_ROUNDING = 1e-5  # times are kept with six digits
_MOST_CELLS = 40  # of one kind that a row's line of violations names


def cells(record: Record) -> list[Cell]:
    """The planned cells of a job, by growing budget."""
    rows = (dict(zip(COLUMNS, row, strict=True)) for row in record["cells"])
    return sorted(rows, key=lambda cell: cell["budget_bytes"])


def gaps(record: Record) -> list[float]:
    """Gaps of the cells in which something must be recomputed."""
    least = record.get("baseline_bytes", 0)
    return [c["gap"] for c in cells(record) if c["budget_bytes"] < least]


def dearer_ones(record: Record) -> list[tuple[Cell, float]]:
    """Cells that recompute longer than a smaller budget's, with that one's time."""
    dearer, least_ms = [], float("inf")
    for cell in cells(record):
        if cell["recompute_ms"] > least_ms * (1 + _ROUNDING):
            dearer.append((cell, least_ms))
        least_ms = min(least_ms, cell["recompute_ms"])
    return dearer


def beaten_ones(record: Record) -> list[Cell]:
    """Cells in which a rival that fits recomputes less."""
    return [cell for cell in cells(record) if _is_beaten(cell)]


def _is_beaten(cell: Cell) -> bool:
    rival_ms = cell["best_rival_ms"]
    return rival_ms is not None and cell["recompute_ms"] > rival_ms * (1 + _ROUNDING)


def wide_ones(record: Record) -> list[Cell]:
    """Cells with a gap above the worst that is allowed."""
    return [cell for cell in cells(record) if cell["gap"] > GAP_WORST]


def slow_ones(record: Record) -> list[Cell]:
    """Cells whose plan took too long."""
    return [cell for cell in cells(record) if cell["cpu_s"] > MOST_CPU_S]


def summary(records: list[Record]) -> list[tuple[str, str, bool]]:
    """What is asked for, what was found, whether that is enough.

    Of PyTorch's allocator as it is by default, and of one with expandable segments.
    """
    judged = []
    for is_expandable in (False, True):
        own = [r for r in records if SETTINGS[r["setting"]].expandable is is_expandable]
        said = "expandable segments: " if is_expandable else ""
        if own:
            judged += [(said + what, found, kept) for what, found, kept in _judged(own)]
    return judged


def _judged(records: list[Record]) -> list[tuple[str, str, bool]]:
    rows = [record for record in records if record["cells"]]
    every = [cell for record in rows for cell in cells(record)]
    every_gap = [gap for record in rows for gap in gaps(record)]
    slowest = max((cell["cpu_s"] for cell in every), default=0.0)
    falling = sum(not dearer_ones(record) for record in rows)
    unbeaten = sum(not _is_beaten(cell) for cell in every)
    failed = sum(len(record.get("errors", ())) for record in records)
    statuses = Counter(record["status"] for record in records)
    return [
        (
            "recompute time non-increasing in the budget, in every row",
            f"{falling} of {len(rows)} rows",
            falling == len(rows),
        ),
        _limit("gap: median", quantile(every_gap, 0.5), GAP_MEDIAN),
        _limit("gap: 95 % of cells", quantile(every_gap, 0.95), GAP_95),
        _limit("gap: worst", quantile(every_gap, 1.0), GAP_WORST),
        (
            f"no solve above {MOST_CPU_S:.0f} s of CPU time",
            f"longest {slowest:.1f} s; {sum(len(slow_ones(r)) for r in rows)} of"
            f" {len(every)} longer",
            slowest <= MOST_CPU_S,
        ),
        (
            "never above any rival on the same profile",
            f"{unbeaten} of {len(every)} cells",
            unbeaten == len(every),
        ),
        ("a plan at every budget from the floor on", f"{failed} failed", not failed),
        (
            "every job done in time, no raw error",
            f"{statuses['timeout']} ran out of time, {statuses['raw error']} raised",
            not statuses["timeout"] and not statuses["raw error"],
        ),
    ]


def _limit(what: str, value: float, most: float) -> tuple[str, str, bool]:
    return f"{what} at most {most:.1%}", f"{value:.3%}", value <= most


def page(record: Record) -> Iterator[str]:
    """The part as Markdown."""
    records = record["records"]
    titles = dict.fromkeys(r["model"] for r in records if r["cells"])
    yield "# Every setting: plans of the zoo, of full size, and of drawn models\n"
    yield (
        f"{len(titles)} models x settings x {record['num_budgets']} budgets from the"
        " floor to the plain step's peak. Drawn models: the names of Transformers'"
        " configurations (shrunken), of timm (one model of each family) and of"
        " torchvision, in the order of `random.Random(16)`, without the zoo's"
        " architectures; none was picked by hand. What cannot be built, is refused or"
        " raises is listed with its reason, and the next one drawn takes its place."
        " Every budget is planned on its own from the traced step, largest first, with"
        " the defaults of `autosac.plan` and no dry run. Of every rival the cheapest"
        " setting that fits counts. Gaps are those of budgets"
        " below the plain step's peak. \"Expandable\": PyTorch's allocator has"
        " `expandable_segments:True`, by which no block is larger than its tensor."
        " Models lie on the meta device where they can;"
        f" {'times on the CPU are measured' if record['calibrated'] else _MODELLED}.\n"
    )
    yield f"    {record['command']}\n"
    yield "| asked for | found | |"
    yield "| --- | --- | --- |"
    for wanted, figure, kept in summary(records):
        yield f"| {wanted} | {figure} | {'PASS' if kept else '**FAIL**'} |"
    yield from _by_setting(records)
    yield from _rows(records)
    yield from _violations(records)
    yield from _reasons(records)
    where = ", ".join(f"{name} {value}" for name, value in record["where"].items())
    yield f"\nTaken in {record['minutes']:.0f} minutes: {where}.\n"
    yield from _later(records, record["where"].get("date", ""))


def _later(records: list[Record], date: str) -> Iterator[str]:
    """Which rows were taken on another day than the others."""
    by_date: dict[str, list[str]] = {}
    for record in records:
        if (own := record.get("date", "")) and not date.startswith(own):
            name = f"{record['model']} {record['setting']}"
            by_date.setdefault(own, []).append(name)
    for own, names in sorted(by_date.items()):
        yield f"{len(names)} rows are of {own}: {', '.join(names)}.\n"


_MODELLED = "times are modelled in every setting, not measured"


def short_page(record: Record) -> Iterator[str]:
    """What is asked for and what was found, for the page of all parts."""
    yield "## Every setting\n"
    yield "[Models, settings and all that is violated](settings.md).\n"
    yield "| asked for | found | |"
    yield "| --- | --- | --- |"
    for wanted, figure, kept in record["summary"]:
        yield f"| {wanted} | {figure} | {'PASS' if kept else '**FAIL**'} |"


def _by_setting(records: list[Record]) -> Iterator[str]:
    yield "\nGap and CPU time of a plan, all models of a setting together:\n"
    yield (
        f"| setting | cells | gap median | 95 % | worst | above {GAP_WORST:.0%} |"
        " s median | 95 % | worst |"
    )
    yield "| --- |" + " ---: |" * 8
    for setting in dict.fromkeys(record["setting"] for record in records):
        own = [c for r in records if r["setting"] == setting for c in cells(r)]
        if own:
            its = [g for r in records if r["setting"] == setting for g in gaps(r)]
            seconds = [cell["cpu_s"] for cell in own]
            shown = [f"{quantile(its, share):.2%}" for share in (0.5, 0.95, 1.0)]
            shown.append(f"{sum(gap > GAP_WORST for gap in its)}")
            shown += [f"{quantile(seconds, share):.2f}" for share in (0.5, 0.95, 1.0)]
            yield f"| {setting} | {len(own)} | {' | '.join(shown)} |"


def _rows(records: list[Record]) -> Iterator[str]:
    yield (
        "\nBy model and setting. `s` is the longest plan in seconds of CPU and of wall"
        " time; `floor s` the CPU time of the floor, with the trade-off curves; `saved`"
        " the median share of the best rival's recompute time that our plan saves.\n"
    )
    yield (
        "| model | setting | ops | plain MiB | floor MiB | gap median | 95 % | worst |"
        " non-increasing | not above rivals | saved | s CPU | wall | floor s |"
    )
    yield "| --- | --- |" + " ---: |" * 12
    for record in records:
        if record["cells"]:
            yield row(record)


def row(record: Record) -> str:
    """A job as a line of the table."""
    own = cells(record)
    if not own:
        return f"| {record['model']} | {record['setting']} | {record['status']} |"
    its = gaps(record)
    dearer = len(dearer_ones(record))
    saved = [
        1 - cell["recompute_ms"] / cell["best_rival_ms"]
        for cell in own
        if cell["best_rival_ms"]
    ]
    late = f" ({len(own)} in time)" if record["status"] == "timeout" else ""
    shown = [
        f"{record['num_ops']}",
        f"{record['baseline_bytes'] / MIB:.1f}",
        f"{record['floor_bytes'] / MIB:.1f}",
        *(f"{quantile(its, s):.2%}" if its else "-" for s in (0.5, 0.95, 1.0)),
        "yes" if not dearer else f"**no: {dearer}**",
        f"{len(own) - len(beaten_ones(record))}/{len(own)}{late}",
        f"{statistics.median(saved):.0%}" if saved else "-",
        f"{max(cell['cpu_s'] for cell in own):.1f}",
        f"{max(cell['wall_s'] for cell in own):.1f}",
        f"{record['floor_s']['cpu']:.1f}",
    ]
    return f"| {record['model']} | {record['setting']} | {' | '.join(shown)} |"


def _violations(records: list[Record]) -> Iterator[str]:
    kinds: tuple[tuple[str, Callable[[Record], list[str]]], ...] = (
        ("Dearer than a smaller budget's plan", _told_dearer),
        (f"Gap above {GAP_WORST:.0%}", _told_wide),
        ("A rival is cheaper", _told_beaten),
        (f"Longer than {MOST_CPU_S:.0f} s of CPU time", _told_slow),
        ("No plan", _told_errors),
    )
    for title, tell in kinds:
        lines = [
            f"- {record['model']}, {record['setting']}: {_joined(told)}"
            for record in records
            if (told := tell(record))
        ]
        if lines:
            yield f"\n## {title}\n"
            yield "Model, setting, and how far from the floor to the plain step:\n"
            yield from lines


def _joined(told: list[str]) -> str:
    more = len(told) - _MOST_CELLS
    return "; ".join(told[:_MOST_CELLS]) + (f"; {more} more" if more > 0 else "")


def _told_dearer(record: Record) -> list[str]:
    return [
        f"{cell['fraction']:.2f} ({cell['recompute_ms']:.4g} ms, {least_ms:.4g} at a"
        " smaller one)"
        for cell, least_ms in dearer_ones(record)
    ]


def _told_wide(record: Record) -> list[str]:
    return [f"{c['fraction']:.2f} ({c['gap']:.1%})" for c in wide_ones(record)]


def _told_beaten(record: Record) -> list[str]:
    return [
        f"{c['fraction']:.2f} ({c['recompute_ms']:.4g} ms, {c['best_rival']}"
        f" {c['best_rival_ms']:.4g})"
        for c in beaten_ones(record)
    ]


def _told_slow(record: Record) -> list[str]:
    return [
        f"{c['fraction']:.2f} ({c['cpu_s']:.1f} s, {c['wall_s']:.1f} wall)"
        for c in slow_ones(record)
    ]


def _told_errors(record: Record) -> list[str]:
    return [f"{at:.2f} ({error})" for at, error in record.get("errors", ())]


def _reasons(records: Iterable[Record]) -> Iterator[str]:
    told = [record for record in records if record["status"] != "done"]
    if told:
        yield "\n## Not built, refused, raised, out of time\n"
        for record in told:
            reason = record.get("reason", f"{len(record['cells'])} budgets in time")
            yield (
                f"- {record['model']}, {record['setting']}: {record['status']}."
                f" {reason[:300]}"
            )
