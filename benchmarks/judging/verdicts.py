"""What the file of a model says, in one word and on a page."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.judging.job import PLANNING, SHARES, STEPS
from benchmarks.models.drawn import SOURCES

Record = dict[str, Any]
EXACT, BITS, OVER, RAW = "exact", "other bits", "over budget", "raw exception"
DEARER, REFUSED, SLOW = "dearer with more", "refused", "too slow"
VERDICTS = (EXACT, OVER, BITS, RAW, DEARER, REFUSED, SLOW)
NOT_JUDGED = "not judged"
MOST_REFUSED = 0.03
LEAST_JUDGED = 300
_FAR, _FAR_BYTES = 0.002, 4096  # a prediction further off than both is listed
_WIDE = 0.05  # a gap above it is listed


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What models were drawn from.

    Attributes:
        title: Of the page.
        text: Says which models these are.
        sources: Beginnings of their names.
        least_judged: Models that are asked for.
    """

    title: str
    text: str
    sources: tuple[str, ...]
    least_judged: int


LIBRARIES = Draw(
    title="Breadth: models that nobody chose by hand",
    text=(
        "All models of torchvision, one of each family of timm, every architecture of"
        " Transformers (from a configuration made small) and every module of"
        " `torch.testing`'s list, in an order drawn by number."
    ),
    sources=SOURCES,
    least_judged=LEAST_JUDGED,
)


def verdict(record: Record) -> str:
    """One of `VERDICTS`, or `NOT_JUDGED`: nothing could be said of it here.

    Of a model whose plain runs differ, only that a budget is exceeded.
    """
    status = record["status"]
    if status in ("refused", "raw error"):
        return REFUSED if status == "refused" else RAW
    if status == "ended":
        return SLOW if record.get("phase") in PLANNING else NOT_JUDGED
    if status != "done":
        return NOT_JUDGED
    cells, is_certain = record["cells"], not record["plain"]["differences"]
    if is_certain and any(cell["differences"] for cell in cells):
        return BITS
    over = max(cell["measured_bytes"] - cell["budget_bytes"] for cell in cells)
    if over > 0:
        plain = record["plain"]
        grown = plain["measured_bytes"] - plain["predicted_bytes"]
        return NOT_JUDGED if _growth(record) and over <= grown else OVER
    if not is_certain:
        return NOT_JUDGED
    times = record.get("recompute_ms", [])
    if any(more > less for less, more in itertools.pairwise(times)):
        return DEARER
    return EXACT


def _growth(record: Record) -> str:
    """What autosac says of a model that takes more with every step; '' for others."""
    said = record.get("warnings", [])
    return next((text for text in said if "more with every step" in text), "")


def why(record: Record) -> str:
    """What there is to say of a model that is not exact."""
    kind = verdict(record)
    if kind == OVER:
        over = [
            cell["measured_bytes"] / cell["budget_bytes"] - 1 for cell in _cells(record)
        ]
        most = [
            f"{share:+.2%} at {at}"
            for share, at in zip(over, SHARES, strict=True)
            if share > 0
        ]
        return "; ".join([*most, *record.get("warnings", [])[:1]])
    if kind == BITS:
        return str(next(text for c in _cells(record) for text in c["differences"]))
    if kind == DEARER:
        return ", ".join(f"{time:.4f} ms" for time in record["recompute_ms"])
    if kind == NOT_JUDGED and record["status"] == "done":
        if growth := _growth(record):
            return growth
        return f"two plain runs differ: {record['plain']['differences'][0]}"
    phase = record.get("phase")
    reason: str = record.get("reason", "")
    return f"{phase}: {reason}" if phase else reason


def _cells(record: Record) -> list[Record]:
    return list(record.get("cells", ()))


def errors(record: Record) -> list[float]:
    """Predicted over measured peak, less one, of each plan; exact bits only."""
    if verdict(record) not in (EXACT, OVER, DEARER):
        return []
    return [c["predicted_bytes"] / c["measured_bytes"] - 1 for c in _cells(record)]


def is_far(record: Record) -> bool:
    """Whether a prediction is far from what was measured."""
    return any(
        abs(error) > _FAR
        and abs(cell["predicted_bytes"] - cell["measured_bytes"]) > _FAR_BYTES
        for error, cell in zip(errors(record), _cells(record), strict=False)
    )


def summary(
    records: Iterable[Record], least_judged: int = LEAST_JUDGED
) -> list[tuple[str, str, bool]]:
    """What is asked for, what came of it, whether that is enough."""
    counts = Counter(verdict(record) for record in records)
    num_judged = sum(counts[kind] for kind in VERDICTS)
    most = int(MOST_REFUSED * num_judged)
    rows = [
        (
            f"at least {least_judged} models judged",
            f"{num_judged}",
            num_judged >= least_judged,
        )
    ]
    for kind in (OVER, BITS, RAW, DEARER, SLOW):
        rows.append((f"{kind}: 0", f"{counts[kind]}", counts[kind] == 0))
    refused = counts[REFUSED]
    rows.append((f"refused: at most {MOST_REFUSED:.0%}", f"{refused}", refused <= most))
    return rows


def page(whole: Record, draw: Draw = LIBRARIES) -> Iterator[str]:
    """All of it as Markdown."""
    records = whole["records"]
    yield f"# {draw.title}\n"
    yield (
        f"{draw.text} Each is planned at"
        f" {', '.join(f'{share:.0%}' for share in SHARES)} of the way from its floor"
        f" to the plain step's peak ({whole['device']}, calibrated), and each"
        " plan really trains for two steps: loss, gradients, parameters, buffers,"
        " optimizer and random state are compared with the plain step's bit by bit, and"
        " the allocator's peak with the budget. A model is judged where it can be"
        " built, fits the machine and two plain runs agree. A model a process."
        f" {len(records)} of {whole['num_names']} names have been drawn so far.\n"
    )
    yield f"    {whole['command']}\n"
    yield "| asked for | result | |\n| --- | --- | --- |"
    for asked, result, is_kept in summary(records, draw.least_judged):
        yield f"| {asked} | {result} | {'PASS' if is_kept else '**FAIL**'} |"
    yield from _by_source(records, draw.sources)
    yield from _quantiles(records)
    yield from _failures(records)
    yield from _refusals(records)
    yield from _lists(records)
    days = Counter(record.get("date", "unknown")[:10] for record in records)
    judged = ", ".join(f"{day}: {days[day]}" for day in sorted(days))
    where = ", ".join(f"{name} {value}" for name, value in whole["where"].items())
    yield f"\nModels by the day of their run: {judged}. The last run: {where}.\n"


def _by_source(records: list[Record], sources: Iterable[str]) -> Iterator[str]:
    kinds = (*VERDICTS, NOT_JUDGED)
    yield f"\n| source | {' | '.join(kinds)} | drawn |"
    yield f"| --- |{' ---: |' * (len(kinds) + 1)}"
    for source in (*sources, ""):
        of_source = [
            r for r in records if r["model"].startswith(f"{source}/" if source else "")
        ]
        counts = Counter(verdict(record) for record in of_source)
        row = [str(counts[kind]) for kind in kinds]
        yield f"| {source or 'all'} | {' | '.join(row)} | {len(of_source)} |"


def _quantiles(records: list[Record]) -> Iterator[str]:
    off = [abs(error) for record in records for error in errors(record)]
    plain = [
        abs(record["plain"]["predicted_bytes"] / record["plain"]["measured_bytes"] - 1)
        for record in records
        if verdict(record) in (EXACT, OVER, DEARER)
    ]
    gaps = [gap for record in records for gap in record.get("gaps", ())]
    yield "\n| | median | 95 % | most |\n| --- | ---: | ---: | ---: |"
    yield _row("prediction error of a plan", off, ".3%")
    yield _row("prediction error of the plain step", plain, ".3%")
    yield _row("optimality gap", gaps, ".2%")
    for phase in (*PLANNING, STEPS):
        spent = [r["cpu_s"][phase] for r in records if phase in r.get("cpu_s", {})]
        label = f"{phase} (three)" if phase == "plans" else phase
        yield _row(f"CPU s: {label}", spent, ".2f")
    spent = [
        sum(record["cpu_s"].get(phase, 0.0) for phase in PLANNING)
        for record in records
        if record["status"] == "done"
    ]
    yield _row("CPU s: all of planning", spent, ".2f")


def _row(what: str, values: list[float], form: str) -> str:
    cells = [format(quantile(values, share), form) for share in (0.5, 0.95, 1.0)]
    return f"| {what} | {' | '.join(cells)} |"


def quantile(values: list[float], share: float) -> float:
    """The least value that a share of all values does not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _failures(records: list[Record]) -> Iterator[str]:
    for kind in (OVER, BITS, RAW, DEARER, SLOW):
        of_kind = [record for record in records if verdict(record) == kind]
        if of_kind:
            yield f"\n## {kind.capitalize()}\n"
            for record in of_kind:
                yield f"- {record['model']}: {why(record)}"


def _refusals(records: list[Record]) -> Iterator[str]:
    of_kind = [record for record in records if verdict(record) == REFUSED]
    if of_kind:
        yield "\n## Refused, by what they are told\n"
        for record in of_kind:
            yield f"- {record['model']}: {record['reason']}"


def _lists(records: list[Record]) -> Iterator[str]:
    far = [record for record in records if is_far(record)]
    wide = [r for r in records if max(r.get("gaps", [0.0]), default=0.0) > _WIDE]
    if far:
        yield f"\n## Predictions off by more than {_FAR:.1%} and {_FAR_BYTES} bytes\n"
        for record in far:
            off = ", ".join(f"{error:+.2%}" for error in errors(record))
            yield f"- {record['model']}: {off}"
    if wide:
        yield f"\n## Gaps above {_WIDE:.0%}\n"
        for record in wide:
            gaps = ", ".join(f"{gap:.1%}" for gap in record["gaps"])
            yield f"- {record['model']}: {gaps}"
    yield "\n## Exact\n"
    yield ", ".join(_plainly(r["model"]) for r in records if verdict(r) == EXACT) + "."
    yield "\n## Not judged\n"
    for record in records:
        if verdict(record) == NOT_JUDGED:
            yield f"- {record['model']}: {_short(why(record))}"


def _plainly(name: str) -> str:
    return re.sub(r"^transformers/", "", name)


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:160] + "..."
