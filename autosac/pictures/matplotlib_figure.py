"""Draw pictures with Matplotlib. Imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from autosac.pictures.panels import FILLS, Grid, Note, Panel

_HATCHES = ("", "...", "///", "\\\\\\", "|||", "", "xxx", "---")
_PANEL_INCHES = (7.2, 3.1)
_SMALL_PANEL_INCHES = (4.2, 3.1)
_CELL_INCHES = 0.32
_MANY_COLUMNS = 24  # above which shades have no figures in them


def figure(title: str, panels: Sequence[Panel | Grid], num_columns: int) -> Any:
    """A Matplotlib figure that belongs to no window."""
    num_columns = min(num_columns, len(panels))
    num_rows = -(-len(panels) // num_columns)
    drawn = Figure(figsize=_inches(panels, num_columns), layout="constrained")
    axes = drawn.subplots(num_rows, num_columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    known: set[str] = set()  # one legend is enough for panels that share it
    for axis, panel in zip(axes.flat, panels, strict=False):
        if isinstance(panel, Grid):
            _draw_grid(axis, panel)
        else:
            draw_panel(axis, panel)
            labels = set(axis.get_legend_handles_labels()[1])
            if not labels <= known:
                known |= labels
                axis.legend(fontsize=7, framealpha=0.9, **_legend_place(panel))
    if title:
        drawn.suptitle(title, fontsize=11)
    return drawn


def _legend_place(panel: Panel) -> dict[str, Any]:
    if panel.stack:  # the areas take all the room
        return {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "reverse": True}
    return {"loc": "best"}


def _inches(panels: Sequence[Panel | Grid], num_columns: int) -> tuple[float, float]:
    first = panels[0]
    if isinstance(first, Grid):
        width = 3.2 + _CELL_INCHES * len(first.columns)
        return max(6.0, min(width, 16.0)), 1.6 + _CELL_INCHES * len(first.rows)
    width, height = _PANEL_INCHES if num_columns == 1 else _SMALL_PANEL_INCHES
    num_rows = -(-len(panels) // num_columns)
    return width * num_columns, 0.4 + height * num_rows


def draw_panel(axis: Any, panel: Panel) -> None:
    """Draw all of a panel but its legend on Matplotlib axes."""
    if panel.stack:
        drawn = axis.stackplot(
            panel.stack_x,
            *(layer.y for layer in panel.stack),
            labels=[layer.label for layer in panel.stack],
            colors=[FILLS[layer.style] for layer in panel.stack],
            edgecolor="0.25",
            linewidth=0.3,
        )
        for area, layer in zip(drawn, panel.stack, strict=True):
            area.set_hatch(_HATCHES[layer.style])
        axis.set_xlim(panel.stack_x[0], panel.stack_x[-1])
    for line in panel.lines:
        axis.plot(
            line.x,
            line.y,
            linestyle=line.dash,
            marker=line.marker,
            markersize=line.size,
            markerfacecolor="none",
            color=str(line.grey),
            drawstyle="steps-post" if line.is_step else "default",
            label=line.label or None,
            clip_on=bool(panel.stack),
        )
    for x, dash, label in panel.verticals:
        axis.axvline(x, linestyle=dash, color="0.3", linewidth=1.0, label=label)
    if panel.x_min is not None:
        axis.set_xlim(left=panel.x_min)
    if panel.x_max is not None:
        axis.set_xlim(right=panel.x_max)
    for x, name in panel.stretches:
        axis.axvline(x, linestyle="dotted", color="0.3", linewidth=0.8)
        place = (x, 0.98)
        transform = axis.get_xaxis_transform()
        axis.text(*place, f" {name}", fontsize=7, va="top", transform=transform)
    for note in panel.notes:
        _draw_note(axis, panel, note)
    axis.set_title(panel.title, fontsize=9, loc="left")
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.set_ylim(bottom=0.0, top=panel.y_max)


def _draw_note(axis: Any, panel: Panel, note: Note) -> None:
    left, right = axis.get_xlim()
    is_right = note.x > (left + right) / 2
    axis.annotate(
        note.text,
        (note.x, note.y),
        xytext=(-12 if is_right else 12, 10),
        textcoords="offset points",
        ha="right" if is_right else "left",
        fontsize=8,
        arrowprops={"arrowstyle": "->"},
        bbox={"boxstyle": "round", "fc": "white", "ec": "0.4", "lw": 0.5},
    )


def _draw_grid(axis: Any, grid: Grid) -> None:
    shown = [[float("nan") if v is None else v for v in row] for row in grid.values]
    axis.imshow(shown, cmap="Greys", vmin=0.0, vmax=1.25, aspect="auto")
    for i, row in enumerate(grid.values):
        for j, value in enumerate(row):
            if value is None:
                axis.text(j, i, "·", ha="center", va="center", color="0.6")
            elif len(grid.columns) <= _MANY_COLUMNS:
                ink = "white" if value > 0.6 else "black"
                text = f"{100 * value:.0f}"
                axis.text(j, i, text, ha="center", va="center", color=ink, fontsize=7)
    axis.set_yticks(range(len(grid.rows)), grid.rows, fontsize=8)
    every = -(-len(grid.columns) // _MANY_COLUMNS)
    places = range(0, len(grid.columns), every)
    axis.set_xticks(places, grid.columns[::every], fontsize=8)
    axis.set_xlabel(f"{grid.x_label}\n{grid.legend}", fontsize=8)
    axis.set_title(grid.title, fontsize=9, loc="left")
