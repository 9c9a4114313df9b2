"""Draw pictures with Plotly. Imported only when one is drawn."""

from __future__ import annotations

from typing import Any

from plotly import graph_objects, subplots

from autosac.pictures.pictures import FILLS, Grid, Line, Panel, Picture

_PATTERNS = ("", ".", "/", "\\", "|", "", "x", "-")
_SYMBOLS = {
    "o": "circle-open", ".": "circle", "s": "square-open", "^": "triangle-up-open",
    "v": "triangle-down", "D": "diamond-open", "P": "cross-open", "X": "x",
    "*": "star-open",
}  # fmt: skip
_DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot"}
_PANEL_PIXELS = 360


def figure(picture: Picture) -> Any:
    """An interactive figure."""
    num_columns = min(picture.num_columns, len(picture.panels))
    num_rows = -(-len(picture.panels) // num_columns)
    drawn = subplots.make_subplots(
        rows=num_rows,
        cols=num_columns,
        subplot_titles=[panel.title for panel in picture.panels],
    )
    seen: set[str] = set()
    for index, panel in enumerate(picture.panels):
        place = {"row": index // num_columns + 1, "col": index % num_columns + 1}
        if isinstance(panel, Grid):
            _draw_grid(drawn, panel, place)
        else:
            _draw_panel(drawn, panel, place, seen, group=f"stack{index}")
    drawn.update_layout(
        title=picture.title,
        height=120 + _PANEL_PIXELS * num_rows,
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
            showlegend=_is_new(layer.label, seen),
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
    begins = [(x, "dotted", name) for x, name in panel.stretches]
    for x, dash, label in (*panel.verticals, *begins):
        canvas.add_vline(
            x=x,
            line={"dash": _DASHES[dash], "color": "#505050", "width": 1},
            annotation={"text": label, "textangle": -90, "font": {"size": 10}},
            annotation_position="top left",
            **place,
        )
    for note in panel.notes:
        canvas.add_annotation(x=note.x, y=note.y, text=note.text, **place)
    lower = "tozero" if panel.x_min == 0.0 else "normal"
    canvas.update_xaxes(
        title=panel.x_label, rangemode=lower, range=_range(panel.x_max), **place
    )
    canvas.update_yaxes(
        title=panel.y_label, rangemode="tozero", range=_range(panel.y_max), **place
    )


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
