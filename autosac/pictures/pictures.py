"""Pictures, which Matplotlib draws for files and Plotly interactively."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosac.errors import ArgumentError
from autosac.kinds import new_file
from autosac.optional import needed
from autosac.pictures.panels import Grid, Panel


def check_suffix(path: str | Path) -> None:
    """Refuse a file that no picture is written as.

    Raises:
        ArgumentError: Its suffix is none of those of pictures.
    """
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf", ".html"):
        raise ArgumentError(
            f"`path`={str(path)!r} must end in .png, .svg, .pdf or .html."
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Picture:
    """Panels under one title.

    Attributes:
        title: What all of it shows.
        panels: From left to right, row by row.
        num_columns: Panels in a row.
    """

    title: str
    panels: tuple[Panel | Grid, ...]
    num_columns: int = 1

    def matplotlib(self) -> Any:
        """The picture as a Matplotlib ``Figure``.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        needed("matplotlib", "A picture in a file")
        from autosac.pictures import matplotlib_figure  # needs Matplotlib

        return matplotlib_figure.figure(self.title, self.panels, self.num_columns)

    def plot(self, axes: Any = None) -> Any:
        """Draw the panels side by side with pyplot.

        Args:
            axes: Axes to draw on, if there is one panel; None for new ones.

        Returns:
            The axes, a list of them if there are several panels.

        Raises:
            ImportError: Matplotlib is not installed.
            ArgumentError: One pair of axes is given for several panels.
        """
        pyplot = needed("matplotlib.pyplot", "A plot")
        from autosac.pictures import matplotlib_figure  # needs Matplotlib

        count = len(self.panels)
        if axes is not None and count > 1:
            raise ArgumentError(
                f"`axes` is one pair, and there are {count} panels: leave it out."
            )
        drawn = [axes]
        if axes is None:
            size = (6.4 * count, 4.8)
            drawn = list(pyplot.subplots(1, count, figsize=size, squeeze=False)[1].flat)
        for place, panel in zip(drawn, self.panels, strict=True):
            assert isinstance(panel, Panel)
            matplotlib_figure.draw_panel(place, panel)
            place.legend()
        return drawn if count > 1 else drawn[0]

    def plotly(self) -> Any:
        """The picture as an interactive Plotly ``Figure``.

        Raises:
            ImportError: Plotly is not installed.
        """
        needed("plotly", "An interactive picture")
        from autosac.pictures import plotly_figure  # needs Plotly

        return plotly_figure.figure(self.title, self.panels, self.num_columns)

    def svg(self) -> str:
        """The picture as an ``<svg>`` element, drawn by Matplotlib."""
        return _svg(self.matplotlib())

    def html(self, *, brings_plotly: bool) -> str:
        """The picture as an interactive element of a page, drawn by Plotly.

        Args:
            brings_plotly: It has Plotly's script in it, for itself and what follows.
        """
        text: str = self.plotly().to_html(
            full_html=False,
            include_plotlyjs=brings_plotly,
            config={"displaylogo": False, "responsive": True},
        )
        return text

    def save(self, path: str | Path) -> None:
        """Write the picture; the suffix says how.

        Args:
            path: ``.png``, ``.svg`` or ``.pdf`` by Matplotlib, ``.html`` by Plotly: one
                file that needs no network.

        Raises:
            ArgumentError: The suffix is none of these.
            ImportError: What draws it is not installed.
        """
        named = new_file(path)
        check_suffix(path)
        suffix = named.suffix.lower()
        if suffix == ".html":
            self.plotly().write_html(named, include_plotlyjs=True)
        elif suffix == ".svg":
            named.write_text(self.svg(), encoding="utf-8")
        else:
            self.matplotlib().savefig(named, dpi=120)

    def __repr__(self) -> str:
        return f"Picture(title={self.title!r}, {len(self.panels)} panels)"

    def _repr_png_(self) -> bytes:
        """What notebooks show."""
        file = io.BytesIO()
        self.matplotlib().savefig(file, format="png", dpi=120)
        return file.getvalue()


def _svg(figure: Any) -> str:
    """An SVG element that is the same whenever it is made."""
    matplotlib = needed("matplotlib", "A picture in a file")
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "autosac", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
