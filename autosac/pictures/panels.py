"""Panels of pictures as plain data.

What belongs together is told apart by lines, markers and hatches, never by colour
alone: every picture can be read in grey.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dash = Literal["solid", "dashed", "dotted", "dashdot", "none"]
# Of the layers of a stack. Neighbours differ in lightness, and are hatched besides.
FILLS = (
    "#3b528b", "#5ec962", "#21918c", "#fde725", "#f1f1f1", "#b5de2b", "#8ea6c9",
    "#c9c9c9",
)  # fmt: skip
MARKERS = ("s", "^", "D", "v", "P", "X", "*")  # of lines, in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points, a line through them, or both.

    Attributes:
        label: For the legend; '' for none.
        x: Where the points lie,
        y: and how high.
        dash: Kind of line, "none" for points alone.
        marker: A Matplotlib marker, '' for none.
        grey: 0 for black, 1 for white.
        is_step: A value holds until the next point.
        size: Of the markers, in points.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dash: Dash = "solid"
    marker: str = ""
    grey: float = 0.0
    is_step: bool = False
    size: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a stack of areas over the `Panel.stack_x` of its panel.

    Attributes:
        label: For the legend.
        y: How thick it is at each point.
        style: Which fill and hatch it has, the same in every picture.
    """

    label: str
    y: tuple[float, ...]
    style: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A text with an arrow to a point."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: What it shows.
        x_label: With its unit,
        y_label: likewise.
        lines: Drawn over the stack.
        stack_x: Where the layers have their points.
        stack: Layers, the lowest first.
        verticals: Position, dash and label of lines from bottom to top.
        stretches: Where named stretches of the x axis begin, and their names.
        notes: Texts at points.
        x_min: Lower end of the x axis; None for what fits,
        x_max: and its upper end,
        y_max: and of the y axis.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...] = ()
    stack_x: tuple[float, ...] = ()
    stack: tuple[Layer, ...] = ()
    verticals: tuple[tuple[float, Dash, str], ...] = ()
    stretches: tuple[tuple[float, str], ...] = ()
    notes: tuple[Note, ...] = ()
    x_min: float | None = None
    x_max: float | None = None
    y_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Shares from 0 to 1 in rows and columns, as shades and in figures.

    Attributes:
        title: What it shows.
        x_label: What the columns are.
        rows: Names of the rows,
        columns: and of the columns.
        values: A share for each row and column; None where there is nothing.
        legend: What a shade means.
    """

    title: str
    x_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    legend: str
