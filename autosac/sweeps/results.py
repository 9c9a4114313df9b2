"""What a grid of cells came to: rows, tables, files."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autosac.optional import needed

if TYPE_CHECKING:
    from autosac.pictures.pictures import Picture

Label = bool | int | float | str | None
Status = Literal["planned", "infeasible", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRow:
    """One budget of one cell; figures are None where there is no plan.

    Attributes:
        cell: Name of each axis -> label of its value.
        status: "planned", "infeasible" (no plan fits) or "failed" (the step could not
            be built, traced or planned: a cell's only row).
        budget_bytes: Cap on the peak.
        peak_bytes: Predicted peak of the plan.
        recompute_ms: Predicted time that a step spends on recomputation.
        step_ms: Predicted time of a step, recomputation included.
        bound_ms: Proven lower bound on `recompute_ms`.
        optimality_gap: Share of `recompute_ms` that the bound leaves open.
        num_units: AC units of the plan.
        floor_bytes: Least feasible budget of the cell.
        baseline_peak_bytes: Budget at which nothing is recomputed.
        planned_for: Name of the device that was planned for.
        calibrated: Times and workspaces were measured, not modelled.
        reason: Why there is no plan: type of the exception, and its sentence.
    """

    cell: Mapping[str, Label]
    status: Status
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    recompute_ms: float | None = None
    step_ms: float | None = None
    bound_ms: float | None = None
    optimality_gap: float | None = None
    num_units: int | None = None
    floor_bytes: int | None = None
    baseline_peak_bytes: int | None = None
    planned_for: str | None = None
    calibrated: bool | None = None
    reason: str | None = None


_FIGURES = tuple(field.name for field in fields(GridRow) if field.name != "cell")
_NUMBERS = {  # column -> its type in tables that know types
    **{name: "Int64" for name in _FIGURES if name.endswith("_bytes")},
    **{name: "Float64" for name in _FIGURES if name.endswith(("_ms", "_gap"))},
    "num_units": "Int64",
    "calibrated": "boolean",
}
_AXIS_TYPES = ((bool, "boolean"), (int, "Int64"), (float, "Float64"), (str, "string"))
_ARROW = {"Int64": "int64", "Float64": "float64", "boolean": "bool_"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSweep:
    """Plans for a grid of steps, each under many budgets.

    Attributes:
        axes: Names of the axes, the slowest first.
        rows: One for each budget of each cell in the order of the grid; one in all for
            a cell that failed.
    """

    axes: tuple[str, ...]
    rows: tuple[GridRow, ...]

    @property
    def failures(self) -> tuple[GridRow, ...]:
        """Rows of the cells that failed."""
        return tuple(row for row in self.rows if row.status == "failed")

    def records(self) -> list[dict[str, Any]]:
        """The rows as plain data: axes first, then figures."""
        return [
            {**row.cell, **{name: getattr(row, name) for name in _FIGURES}}
            for row in self.rows
        ]

    def to_dataframe(self) -> Any:
        """The rows as a pandas table; bytes stay whole where some are missing.

        An axis whose values are of several types is text.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = needed("pandas", "`GridSweep.to_dataframe`")
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
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*self.axes, *_FIGURES])
            writer.writeheader()
            writer.writerows(self.records())

    def to_parquet(self, path: str | Path) -> None:
        """Write the rows as Parquet, with the types of `to_dataframe`.

        Raises:
            ImportError: pyarrow is not installed.
            OSError: The file cannot be written.
        """
        arrow = needed("pyarrow", "`GridSweep.to_parquet`")
        parquet = needed("pyarrow.parquet", "`GridSweep.to_parquet`")
        columns = {
            name: arrow.array(values, getattr(arrow, _ARROW.get(kind, "string"))())
            for name, (values, kind) in self._columns().items()
        }
        parquet.write_table(arrow.table(columns), path)

    def picture(self) -> Picture:
        """Step time against the budget for every cell.

        A panel has the values of the last axis as lines; there is one for each
        combination of the others, at most 12 in all.

        Raises:
            ValueError: No budget of any cell is feasible.
        """
        from autosac.sweeps.plotting import picture_of

        return picture_of(cells_of(self))

    def _columns(self) -> dict[str, tuple[list[Any], str]]:
        """Name -> values and type of each column."""
        records = self.records()
        columns = {}
        for name in (*self.axes, *_FIGURES):
            values: list[Any] = [record[name] for record in records]
            kind = _NUMBERS.get(name, "string")
            if name in self.axes:
                kind = _type_of(values)
                if kind == "string":
                    values = [None if x is None else str(x) for x in values]
            columns[name] = (values, kind)
        return columns


def _type_of(values: list[Label]) -> str:
    """The type that all values of an axis have, text if they share none."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return "Float64"
    for kind, name in _AXIS_TYPES:
        if kinds == {kind}:
            return name
    return "string"


def cells_of(sweep: GridSweep) -> list[tuple[Mapping[str, Label], list[GridRow]]]:
    """Each cell with its rows."""
    cells: list[tuple[Mapping[str, Label], list[GridRow]]] = []
    for row in sweep.rows:
        if not cells or cells[-1][0] != row.cell:
            cells.append((row.cell, []))
        cells[-1][1].append(row)
    return cells
