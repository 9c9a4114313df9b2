"""The picture of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autosac.pictures.pictures import MARKERS, Line, Panel, Picture
from autosac.quantities import byte_unit

if TYPE_CHECKING:
    from autosac.sweeps.results import GridRow, Label

    Cells = Sequence[tuple[Mapping[str, Label], list[GridRow]]]

_MOST_PANELS = 12  # more cannot be read


def picture_of(cells: Cells) -> Picture:
    """Step time against the budget for every cell of a grid: see `GridSweep.picture`.

    Raises:
        ValueError: No budget of any cell is feasible.
    """
    planned = [
        (cell, rows)
        for cell, every in cells
        if (rows := [row for row in every if row.status == "planned"])
    ]
    if not planned:
        raise ValueError("No budget of the grid is feasible: there is nothing to draw.")
    most_bytes = max(row.budget_bytes or 0 for _, rows in planned for row in rows)
    unit, size = byte_unit(most_bytes)
    panels: dict[str, list[Line]] = {}
    for cell, rows in planned:
        words = [f"{name}={label}" for name, label in cell.items()]
        lines = panels.setdefault(", ".join(words[:-1]), [])
        ordered = sorted(rows, key=lambda row: row.budget_bytes or 0)
        lines.append(
            Line(
                label=words[-1] if words else "step",
                x=tuple((row.budget_bytes or 0) / size for row in ordered),
                y=tuple(row.step_ms or 0.0 for row in ordered),
                marker=MARKERS[len(lines) % len(MARKERS)],
                grey=0.15 * (len(lines) % 5),
                is_step=True,
            )
        )
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
