"""The pictures of sweeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from reprlib import repr as shortened
from typing import Any

from autosac.errors import ArgumentError
from autosac.kinds import check_kind
from autosac.pictures.panels import MARKERS, Line, Panel
from autosac.pictures.pictures import Picture
from autosac.quantities import byte_unit
from autosac.results.rows import Row

Rivals = Mapping[str, Sequence[tuple[int, float]]]
_MOST_PANELS = 12  # more cannot be read


def picture_of(
    all_rows: Sequence[Row], axes: Sequence[str], *, rivals: Rivals | None = None
) -> Picture:
    """The picture of a sweep: see `Sweep.picture`.

    Raises:
        ArgumentError: No row has a plan.
    """
    if rivals is not None:
        wanted = "a dict of points by the name of another way to plan"
        check_kind(rivals, Mapping, name="rivals", wanted=wanted)
        for name, points in rivals.items():
            _check_points(name, points)
    rows = [row for row in all_rows if row.status == "planned"]
    if not rows:
        raise ArgumentError("No row of the sweep has a plan: there is nothing to draw.")
    if not axes:
        return Picture(title="", panels=(_budget_panel(rows, rivals or {}),))
    last = axes[-1]
    alone = len({row.budget_bytes for row in rows}) == 1
    if alone and all(type(row.cell[last]) in (int, float) for row in rows):
        return _along_axis(rows, axes)
    return _by_cell(rows, axes)


def _check_points(name: str, points: Any) -> None:
    """Complain of a rival's points that are no pairs of bytes and ms."""
    is_several = isinstance(points, Iterable) and not isinstance(points, str)
    for point in points if is_several else [points]:
        if not _is_pair(point):
            raise ArgumentError(
                f"Points of rival {name!r} must be pairs of a budget in bytes and ms of"
                f" recomputation, as `[(2**30, 12.5)]`, got {shortened(point)}."
            )


def _is_pair(point: Any) -> bool:
    """Whether it is two finite numbers; rows of arrays and tensors are, too."""
    try:
        return len(point) == 2 and all(map(math.isfinite, point))
    except TypeError:
        return False


def _budget_panel(rows: Sequence[Row], rivals: Rivals) -> Panel:
    """Recompute time against the budget, with floor, baseline, bound and rivals."""
    rows = sorted(rows, key=lambda row: row.budget_bytes or 0)
    floor_bytes = rows[0].floor_bytes or 0  # of one step, as is the baseline
    baseline_bytes = rows[0].baseline_peak_bytes or 0
    unit, size = byte_unit(baseline_bytes)
    x = tuple((row.budget_bytes or 0) / size for row in rows)
    times = tuple(row.recompute_ms or 0.0 for row in rows)
    bounds = tuple(row.bound_ms or 0.0 for row in rows)
    lines = [
        Line(label="plan", x=x, y=times, is_step=True),
        Line(label="bound", x=x, y=bounds, dash="dashed", grey=0.5, is_step=True),
    ]
    for i, (name, points) in enumerate(rivals.items()):
        lines.append(
            Line(
                label=name,
                x=tuple(nbytes / size for nbytes, _ in points),
                y=tuple(ms for _, ms in points),
                dash="none",
                marker=MARKERS[i % len(MARKERS)],
                grey=0.2 + 0.15 * (i % 4),
            )
        )
    return Panel(
        title="Recomputation against memory",
        x_label=f"memory budget [{unit}]",
        y_label="recomputation per step [ms]",
        lines=tuple(lines),
        verticals=(
            (floor_bytes / size, "dotted", "least feasible budget"),
            (baseline_bytes / size, "dashdot", "peak without a plan"),
        ),
    )


def _along_axis(rows: Sequence[Row], axes: Sequence[str]) -> Picture:
    """Throughput, or step time if it is not known, against the last axis."""
    figure = "samples_per_s"
    if all(row.samples_per_s is None for row in rows):
        known = any(row.batches_per_s is not None for row in rows)
        figure = "batches_per_s" if known else "step_ms"
    grouped: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = ", ".join(f"{axis}={row.cell[axis]}" for axis in axes[:-1])
        point = (float(row.cell[axes[-1]] or 0), float(getattr(row, figure) or 0.0))
        grouped.setdefault(name, []).append(point)
    lines = [
        _line(name or "planned", sorted(points), place, is_step=False)
        for place, (name, points) in enumerate(grouped.items())
    ]
    what = {"step_ms": "step [ms]"}.get(figure, figure.replace("_per_", "/"))
    panel = Panel(title="", x_label=axes[-1], y_label=what, lines=tuple(lines))
    return Picture(title="Under one budget", panels=(panel,))


def _by_cell(rows: Sequence[Row], axes: Sequence[str]) -> Picture:
    """Step time against the budget for every cell."""
    unit, size = byte_unit(max(row.budget_bytes or 0 for row in rows))
    cells: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows:
        words = tuple(f"{name}={row.cell[name]}" for name in axes)
        point = ((row.budget_bytes or 0) / size, row.step_ms or 0.0)
        cells.setdefault(words, []).append(point)
    panels: dict[str, list[Line]] = {}
    for words, points in cells.items():
        lines = panels.setdefault(", ".join(words[:-1]), [])
        lines.append(_line(words[-1], sorted(points), len(lines), is_step=True))
    drawn = list(panels.items())[:_MOST_PANELS]
    return Picture(
        title=f"Step time under a budget: {len(drawn)} of {len(panels)} panels",
        panels=tuple(
            Panel(
                title=title or "all cells",
                x_label=f"memory budget [{unit}]",
                y_label="step [ms]",
                lines=tuple(lines),
            )
            for title, lines in drawn
        ),
        num_columns=min(3, len(drawn)),
    )


def _line(
    label: str, points: Sequence[tuple[float, float]], place: int, *, is_step: bool
) -> Line:
    """One of several lines, told apart by marker and shade."""
    return Line(
        label=label,
        x=tuple(x for x, _ in points),
        y=tuple(y for _, y in points),
        marker=MARKERS[place % len(MARKERS)],
        grey=0.15 * (place % 5),
        is_step=is_step,
    )
