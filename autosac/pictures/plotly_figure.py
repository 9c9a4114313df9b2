"""Draw pictures with Plotly. Imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plotly import graph_objects, subplots

from autosac.pictures.panels import FILLS, Dash, Grid, Line, Panel

_PATTERNS = ("", ".", "/", "\\", "|", "", "x", "-")
_SYMBOLS = {
    "o": "circle-open", ".": "circle", "s": "square-open", "^": "triangle-up-open",
    "v": "triangle-down", "D": "diamond-open", "P": "cross-open", "X": "x",
    "*": "star-open",
}  # fmt: skip
_DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot"}
_PANEL_PIXELS, _BETWEEN_PIXELS, _ROOM_PIXELS = 340, 105, 70
_AT_THE_TOP = {
    "xref": "x domain", "yref": "y domain", "y": 1, "align": "left", "xanchor": "left",
    "showarrow": False,
}  # fmt: skip


def figure(title: str, panels: Sequence[Panel | Grid], num_columns: int) -> Any:
    """An interactive figure."""
    num_columns = min(num_columns, len(panels))
    num_rows = -(-len(panels) // num_columns)
    height = _ROOM_PIXELS + _PANEL_PIXELS * num_rows
    drawn = subplots.make_subplots(
        rows=num_rows,
        cols=num_columns,
        vertical_spacing=_BETWEEN_PIXELS / height,
        horizontal_spacing=0.22 / num_columns,
    )
    seen: set[str] = set()
    for index, panel in enumerate(panels):
        place = {"row": index // num_columns + 1, "col": index % num_columns + 1}
        if isinstance(panel, Grid):
            _draw_grid(drawn, panel, place)
        else:
            _draw_panel(drawn, panel, place, seen, group=f"stack{index}")
        drawn.add_annotation(
            text=panel.title.replace("\n", "<br>"),
            **_AT_THE_TOP, x=0, yanchor="bottom", font={"size": 12}, **place,
        )  # fmt: skip
    drawn.update_layout(
        title={"text": title, "font": {"size": 16}, "x": 0.01},
        height=height,
        margin={"l": 60, "r": 20, "t": 90, "b": 60},
        template="simple_white",
    )
    return drawn


def _draw_panel(
    canvas: Any, panel: Panel, place: dict[str, int], seen: set[str], group: str
) -> None:
    for layer in panel.stack:
        area = graph_objects.Scatter(
            x=panel.stack_x,
            y=layer.y,
            name=layer.label,
            legendgroup=layer.label,
            showlegend=bool(layer.label) and _is_new(layer.label, seen),
            stackgroup=group,
            mode="lines",
            line={"width": 0.5, "color": "#404040"},
            fillcolor=FILLS[layer.style],
            fillpattern={
                "shape": _PATTERNS[layer.style],
                "fgcolor": "#404040",
                "size": 6,
            },
        )
        canvas.add_trace(area, **place)
    for line in panel.lines:
        canvas.add_trace(_scatter(line, seen), **place)
    for x, dash, label in panel.verticals:
        _draw_vertical(canvas, x, dash, place)
        nowhere = (float("nan"),)  # the line itself is no trace, and in no legend
        alike = Line(label=label, x=nowhere, y=nowhere, dash=dash, grey=0.3)
        canvas.add_trace(_scatter(alike, seen), **place)
    for x, name in panel.stretches:
        _draw_vertical(canvas, x, "dotted", place)
        named = {**_AT_THE_TOP, "xref": "x", "yanchor": "top"}
        canvas.add_annotation(x=x, text=name, font={"size": 10}, **named, **place)
    for note in panel.notes:
        canvas.add_annotation(
            x=note.x, y=note.y, text=note.text, ax=70, ay=-24, arrowhead=2,
            bgcolor="white", bordercolor="#666666", borderwidth=0.5, **place,
        )  # fmt: skip
    lower = "tozero" if panel.x_min == 0.0 else "normal"
    canvas.update_xaxes(
        title=panel.x_label, rangemode=lower, range=_range(panel.x_max), **place
    )
    canvas.update_yaxes(
        title=panel.y_label, rangemode="tozero", range=_range(panel.y_max), **place
    )


def _draw_vertical(canvas: Any, x: float, dash: Dash, place: dict[str, int]) -> None:
    style = {"dash": _DASHES[dash], "color": "#505050", "width": 1}
    canvas.add_vline(x=x, line=style, **place)


def _range(top: float | None) -> list[float] | None:
    return None if top is None else [0.0, top]


def _scatter(line: Line, seen: set[str]) -> Any:
    has_line = line.dash != "none"
    modes = ["lines"] * has_line + ["markers"] * bool(line.marker)
    shade = round(255 * line.grey)
    return graph_objects.Scatter(
        x=line.x,
        y=line.y,
        name=line.label,
        legendgroup=line.label,
        showlegend=bool(line.label) and _is_new(line.label, seen),
        mode="+".join(modes),
        line={
            "dash": _DASHES.get(line.dash, "solid"),
            "shape": "hv" if line.is_step else "linear",
            "color": f"rgb({shade},{shade},{shade})",
        },
        marker={"symbol": _SYMBOLS.get(line.marker, "circle"), "size": line.size + 2},
    )


def _is_new(label: str, seen: set[str]) -> bool:
    """Whether a legend lacks a label; it has it from then on."""
    is_new = label not in seen
    seen.add(label)
    return is_new


def _draw_grid(canvas: Any, grid: Grid, place: dict[str, int]) -> None:
    percent = [[None if v is None else 100 * v for v in row] for row in grid.values]
    shades = graph_objects.Heatmap(
        x=grid.columns,
        y=grid.rows,
        z=percent,
        zmin=0,
        zmax=125,
        colorscale="Greys",
        reversescale=False,
        showscale=False,
        texttemplate="%{z:.0f}",
        hovertemplate="%{y}, %{x}: %{z:.1f} %<extra></extra>",
        hoverongaps=False,
    )
    canvas.add_trace(shades, **place)
    canvas.update_xaxes(
        title=f"{grid.x_label}<br>{grid.legend}", type="category", **place
    )
    canvas.update_yaxes(autorange="reversed", type="category", **place)
