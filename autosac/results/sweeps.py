"""Tables of what is planned for many budgets, cells, sizes or clusters."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from autosac.errors import ArgumentError
from autosac.kinds import new_file
from autosac.optional import needed
from autosac.pictures.pictures import Picture
from autosac.quantities import format_bytes, format_ms
from autosac.results.pictures import Rivals, picture_of
from autosac.results.rows import FIGURES, Label, Row
from autosac.summaries import Summarized, Summary, Table

_NUMBERS = {  # column -> its type in tables that know types
    **{name: "Int64" for name in FIGURES if name.endswith("_bytes")},
    **{name: "Float64" for name in FIGURES if name.endswith(("_ms", "_gap", "_s"))},
    "num_units": "Int64",
    "calibrated": "boolean",
}
_AXIS_TYPES = ((bool, "boolean"), (int, "Int64"), (float, "Float64"), (str, "string"))
_SHOWN = {  # figure -> its head in text
    "budget_bytes": "budget", "peak_bytes": "peak", "recompute_ms": "recompute",
    "bound_ms": "at least", "step_ms": "step", "samples_per_s": "samples/s",
    "batches_per_s": "batches/s", "mesh_shape": "mesh", "floor_bytes": "floor",
    "reason": "why not",
}  # fmt: skip
_OPTIONAL = ("samples_per_s", "batches_per_s", "mesh_shape", "reason")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sweep(Summarized, Sequence[Row]):
    """Rows of many budgets, of one step or of each cell of a grid; a sequence.

    Under one cell a larger budget never costs more: `recompute_ms` and `bound_ms` fall.

    Attributes:
        axes: Names of the axes, the slowest first; none for a single step.
        rows: One for each budget of each cell, in the order they were asked for; one in
            all for a cell that failed.
    """

    axes: tuple[str, ...] = ()
    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sweep: ...

    def __getitem__(self, index: int | slice) -> Row | Sweep:
        if isinstance(index, slice):
            return replace(self, rows=self.rows[index])
        return self.rows[index]

    def summary(self) -> Summary:
        """The rows as people read them; the middle of many is left out."""
        heads, *rows = self.text_table()
        table = Table(heads=heads, rows=tuple(rows), left=frozenset())
        return Summary(title="Sweep", tables=(table,))

    @property
    def floor_bytes(self) -> int:
        """Least feasible budget of a single step."""
        return self._of_the_step("floor_bytes")

    @property
    def baseline_peak_bytes(self) -> int:
        """Budget at which nothing is recomputed, of a single step."""
        return self._of_the_step("baseline_peak_bytes")

    def _of_the_step(self, name: str) -> int:
        if self.axes:
            raise ArgumentError(f"Each cell has a `{name}` of its own: see the rows.")
        return int(getattr(self.rows[0], name))

    @property
    def failures(self) -> tuple[Row, ...]:
        """Rows of the cells that failed."""
        return tuple(row for row in self.rows if row.status == "failed")

    def records(self) -> list[dict[str, Any]]:
        """The rows as plain data: axes first, then figures; no plans."""
        return [row.record() for row in self.rows]

    def text_table(self) -> list[tuple[str, ...]]:
        """Heads, then each row, as people read them."""
        figures = {
            name: head
            for name, head in _SHOWN.items()
            if name not in _OPTIONAL or any(getattr(r, name) for r in self.rows)
        }
        return [
            (*self.axes, *figures.values()),
            *(
                (
                    *(str(row.cell[name]) for name in self.axes),
                    *(_shown(row, name) for name in figures),
                )
                for row in self.rows
            ),
        ]

    def to_dataframe(self) -> Any:
        """The rows as a pandas table; bytes stay whole where some are missing.

        An axis whose values are of several types is text.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = needed("pandas", "`Sweep.to_dataframe`")
        columns = {
            name: pandas.array(values, dtype=kind)
            for name, (values, kind) in self._columns().items()
        }
        return pandas.DataFrame(columns)

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as comma-separated values (RFC 4180); None is an empty field.

        Raises:
            OSError: The file cannot be written.
        """
        with open(new_file(path), "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*self.axes, *FIGURES])
            writer.writeheader()
            writer.writerows(self.records())

    def to_parquet(self, path: str | Path) -> None:
        """Write the rows as Parquet, with the types of `to_dataframe`.

        Raises:
            ImportError: pandas or pyarrow is not installed.
            OSError: The file cannot be written.
        """
        needed("pyarrow", "`Sweep.to_parquet`")
        self.to_dataframe().to_parquet(new_file(path), index=False)

    def picture(self, *, rivals: Rivals | None = None) -> Picture:
        """The rows as a picture, whose ``save`` writes a file.

        Of one step: recompute time against the budget, with bound, floor and baseline.
        Of a grid: step time against the budget, with the values of the last axis as
        lines and a panel for each combination of the others, at most 12 in all. Under
        one budget for all, throughput or step time against the last axis.

        Args:
            rivals: Name of another way to plan -> peak in bytes and recompute time in
                milliseconds of each of its points; for a single step.

        Raises:
            ArgumentError: No row has a plan.
        """
        return picture_of(self.rows, self.axes, rivals=rivals)

    def plot(self, axes: Any = None, *, rivals: Rivals | None = None) -> Any:
        """Draw the picture with Matplotlib.

        Args:
            axes: Axes to draw on, if the picture has one panel; None for new ones.
            rivals: As in `picture`.

        Returns:
            The axes, a list of them if there are several panels.

        Raises:
            ImportError: Matplotlib is not installed.
            ArgumentError: As `picture`; or one pair of axes is given for several
                panels.
        """
        return self.picture(rivals=rivals).plot(axes)

    def _columns(self) -> dict[str, tuple[list[Any], str]]:
        """Name -> values and type of each column."""
        records = self.records()
        columns = {}
        for name in (*self.axes, *FIGURES):
            values: list[Any] = [record[name] for record in records]
            kind = _NUMBERS.get(name, "string")
            if name in self.axes:
                kind = _type_of(values)
                if kind == "string":
                    values = [None if x is None else str(x) for x in values]
            columns[name] = (values, kind)
        return columns


def _shown(row: Row, name: str) -> str:
    value = getattr(row, name)
    if value is None:
        return ""
    if name == "reason":
        return "below the floor" if row.status == "infeasible" else str(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_ms"):
        return format_ms(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _type_of(values: list[Label]) -> str:
    """The type that all values of an axis have, text if they share none."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return "Float64"
    for kind, name in _AXIS_TYPES:
        if kinds == {kind}:
            return name
    return "string"
