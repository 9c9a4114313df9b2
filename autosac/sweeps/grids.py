"""Plans for a grid of steps: batch sizes, lengths, types, devices, whole models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autosac.costs import caching
from autosac.devices.free_memory import physical_bytes
from autosac.devices.specs import DeviceSpec
from autosac.errors import ArgumentError
from autosac.kinds import check_kind
from autosac.planning.budget_sweep import check_plan_options
from autosac.progress import progress_bar
from autosac.quantities import is_whole, parse_bytes, read_budgets
from autosac.results.rows import FIGURES, Label, Row
from autosac.results.sweeps import Sweep
from autosac.step.marks import Marks, marks_of
from autosac.sweeps import cell_facts, files, running
from autosac.sweeps.cells import Cell, MakeStep, Record, Surroundings

Grid = Mapping[str, Sequence[Any] | Mapping[str, Any]]

_LIBRARIES = ("numpy", "pulp", "highspy")  # what decides a plan besides torch


def sweep_grid(
    make_step: MakeStep,
    grid: Grid,
    *,
    memory_budgets: Sequence[int | str] | None = None,
    n: int | None = None,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    plan_options: Mapping[str, Any] | None = None,
    calibrate: bool = False,
    n_jobs: int | None = None,
    directory: str | Path | None = None,
    version: str = "",
    progress: bool | None = None,
) -> Sweep:
    """Plan for every combination of some values, each under many budgets.

    Each combination is a cell: its step is traced once, which serves all budgets. A
    cell that fails is a row with its reason, and so is a budget that nothing fits.

    Args:
        make_step: Called with a value for each axis, by name. Returns a dict with
            ``model``, ``inputs`` and options of `autosac.profile` (``loss_fn``,
            ``optimizer``, ``device``, ``autocast``, ...), or a tuple (model, inputs[,
            loss_fn[, optimizer]]). PyTorch's random numbers start from seed 0.
        grid: Name of each axis -> its values, or label -> value where values have no
            short text of their own. The last axis changes fastest.
        memory_budgets: As in `sweep`, like `n`; the innermost axis.
        n: So many budgets for each cell, from its floor to its plain peak.
        ac_units: The only modules that may be AC units, as in `plan`; a cell without
            one of them fails.
        fsdp_units: FSDP units, around which no module may be one, likewise.
        plan_options: As in `sweep`.
        calibrate: Measure times and workspaces of the cells whose models lie on the
            present device, as `autosac.plan` does, one cell at a time on a machine.
            That takes the memory and the time of the ops, and times differ from run to
            run. Otherwise they are modelled.
        n_jobs: Cells that run at a time: as in `joblib.Parallel`, which obeys
            `joblib.parallel_config`: processes here, Dask, Ray.
        directory: Where finished cells are kept, a JSON file for each. Those that are
            there are not done again, unless the code of `make_step`, `version` or
            anything else that decides the result has changed. Failed cells are tried
            again. None to keep nothing.
        version: Any text: another text, another cell. It stands for the code of
            `make_step`; without it the source files of your own modules do, that of
            `make_step` and those which are imported from there.
        progress: Show a progress bar; None for only on a terminal.

    Returns:
        A row for each budget of each cell, in the order of the grid, the same for every
        `n_jobs` (but for times, with `calibrate`).

    Raises:
        TypeError: Neither or both of `memory_budgets` and `n` are given.
        ValueError: A budget cannot be read, `n` is less than 2, or an axis has no
            values, values that cannot be told apart, or the name of a column.
            With `directory` also: the code of `make_step` is in no file and there is no
            `version`, or nothing tells a value from others.
        OSError: The directory cannot be written.
        KeyboardInterrupt: It was interrupted; finished cells are in the directory.
    """
    if n_jobs is not None and (not is_whole(n_jobs) or n_jobs == 0):
        raise ArgumentError(
            "`n_jobs` must be a whole number of cells at a time, -1 for one on each"
            f" core, or None, got {n_jobs!r}."
        )
    wanted = "a dict of the values of each argument of `make_step`"
    check_kind(grid, Mapping, name="grid", wanted=wanted)
    check_plan_options(plan_options)
    budgets = _budgets(memory_budgets, n)
    axes = {name: _axis(name, values) for name, values in grid.items()}
    shared: dict[str, Any] = {
        "make_step": make_step,
        "budgets": budgets,
        "n": n,
        "ac_units": None if ac_units is None else marks_of(ac_units),
        "fsdp_units": None if fsdp_units is None else marks_of(fsdp_units),
        "plan_options": dict(plan_options or {}),
        "calibrate": calibrate,
        "surroundings": Surroundings.here(),
    }
    folder = None if directory is None else Path(directory).resolve()
    cells = _cells(axes, shared, folder, version)
    return Sweep(axes=tuple(axes), rows=_rows(cells, n_jobs, progress))


def _cells(
    axes: Mapping[str, Mapping[Any, Any]],
    shared: dict[str, Any],
    folder: Path | None,
    version: str,
) -> list[Cell]:
    """A cell for every combination, with its file where there is a folder."""
    facts = {}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        facts = _facts(shared, version)
    cells = []
    for items in itertools.product(*(axis.items() for axis in axes.values())):
        labels = dict(zip(axes, (label for label, _ in items), strict=True))
        values = dict(zip(axes, (value for _, value in items), strict=True))
        file = None
        if folder is not None:
            own = {**facts, "cell": cell_facts.text_of(values)}
            own["labels"] = cell_facts.text_of(labels)
            file = files.cell_file(folder, labels, own)
        cells.append(Cell(**shared, labels=labels, values=values, file=file))
    return cells


def _rows(
    cells: Sequence[Cell], n_jobs: int | None, progress: bool | None
) -> tuple[Row, ...]:
    """Rows of all cells in their order; those with files are not done again."""
    records: dict[int, Record] = {}
    for index, cell in enumerate(cells):
        record = None if cell.file is None else cell.file.read()
        if record is not None:
            records[index] = record
    todo = [index for index in range(len(cells)) if index not in records]

    def keep(place: int, record: Record) -> None:
        cell = cells[todo[place]]
        records[todo[place]] = record
        has_failed = any(row["status"] == "failed" for row in record)
        if cell.file is not None and not has_failed and not cell.file.path.exists():
            cell.file.write(record)  # the worker could not

    with progress_bar(
        "Planning cells", len(cells), done=len(records), show=progress, at_once=True
    ) as advance:
        waiting = [cells[index] for index in todo]
        running.run_all(waiting, keep, n_jobs=n_jobs, advance=advance)
    return tuple(
        row for index, cell in enumerate(cells) for row in cell.rows(records[index])
    )


# --- reading arguments --------------------------------------------------------------


def _budgets(
    memory_budgets: Sequence[int | str] | None, n: int | None
) -> tuple[int | str, ...] | None:
    budgets = read_budgets(memory_budgets, n)
    for budget in budgets or ():
        parse_bytes(budget, total_bytes=1 << 50)  # complain before anything is built
    return budgets


def _axis(name: str, values: Sequence[Any] | Mapping[str, Any]) -> dict[Label, Any]:
    """Label -> value for one axis of a grid."""
    if not str(name).isidentifier() or name in FIGURES:
        raise ArgumentError(
            f"`grid` has an axis {name!r}, which must be the name of an argument and no"
            f" column of the table ({', '.join(sorted(FIGURES))})."
        )
    if isinstance(values, str) or not isinstance(values, (Sequence, Mapping)):
        raise ArgumentError(
            f"`grid[{name!r}]` must be a list of values or a dict of labels and values,"
            f" got {values!r}."
        )
    if not values:
        raise ArgumentError(f"`grid[{name!r}]` is empty: give at least one value.")
    pairs = values.items() if isinstance(values, Mapping) else [(v, v) for v in values]
    labelled: dict[Label, Any] = {_label(name, label): value for label, value in pairs}
    if len(labelled) < len(values):
        raise ArgumentError(
            f"`grid[{name!r}]` has values with equal labels; give a dict of labels and"
            " values."
        )
    return labelled


def _label(name: str, value: Any) -> Label:
    """The label of a value in tables."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, DeviceSpec):
        return value.name
    if isinstance(value, (list, tuple)):
        return ",".join(str(_label(name, item)) for item in value)
    label = getattr(value, "__name__", None)
    if isinstance(label, str) and re.fullmatch(r"\w+", label):
        return label
    raise ArgumentError(
        f"`grid[{name!r}]` has a value without a short name, {value!r}; give a dict of"
        " labels and values."
    )


def _facts(shared: Mapping[str, Any], version: str) -> dict[str, str]:
    """All that decides results but the cell itself; files of others are not used."""
    places = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    states = {place: caching.environment(torch.device(place)) for place in places}
    if not shared["calibrate"]:  # modelled figures are those of no machine
        del states["cpu"]["device"]
    if any("%" in str(budget) for budget in shared["budgets"] or ()):
        states["cpu"]["memory"] = str(physical_bytes())
    names = (
        "budgets", "n", "ac_units", "fsdp_units", "plan_options", "calibrate",
        "surroundings", "make_step",
    )  # fmt: skip
    return {
        "autosac": cell_facts.own_version(),
        "libraries": cell_facts.versions(_LIBRARIES),
        "code": version or cell_facts.code_of(shared["make_step"]),
        "cudnn": str(torch.backends.cudnn.version()),
        "state": cell_facts.text_of(states),
        **{name: cell_facts.text_of(shared[name]) for name in names},
    }
