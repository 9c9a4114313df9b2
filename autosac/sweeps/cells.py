"""One cell of a grid: a step is built, traced once and planned for all budgets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosac.costs import caching
from autosac.planning.budget_sweep import sweep
from autosac.profiles.given import calibrated_if_present
from autosac.profiles.profile import Profile, profile
from autosac.results.rows import FIGURES, Label, Row, reason_of
from autosac.step.marks import Marks
from autosac.step.random_streams import random_streams_kept, seed_streams
from autosac.sweeps import files

MakeStep = Callable[..., Any]
_PARTS = ("model", "inputs", "loss_fn", "optimizer")
_ONE_AT_A_TIME = threading.Lock()  # tracing changes what belongs to the whole process


Record = list[dict[str, Any]]  # rows of a cell as plain data


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """State of the calling process that changes results: workers take it over."""

    num_threads: int
    default_dtype: torch.dtype

    @staticmethod
    def here() -> Surroundings:
        """The surroundings of this process."""
        return Surroundings(
            num_threads=torch.get_num_threads(), default_dtype=torch.get_default_dtype()
        )

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take the surroundings over for a while, with the random numbers of a seed."""
        before = Surroundings.here()
        with random_streams_kept():
            seed_streams(0)
            self._set()
            try:
                yield
            finally:
                before._set()

    def _set(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a grid, as a worker gets it.

    Attributes:
        make_step: Builds the step,
        values: from these.
        labels: What tables call the values.
        budgets: Bytes or text; None for `n` of them.
        n: As in `autosac.sweep`.
        ac_units: As in `autosac.sweep`,
        fsdp_units: likewise.
        plan_options: As in `autosac.sweep`, complete.
        calibrate: Measure where the model lies on this machine.
        surroundings: State of the process that asks.
        file: Where finished cells are kept; None if they are not.
    """

    make_step: MakeStep
    values: Mapping[str, Any]
    labels: Mapping[str, Label]
    budgets: tuple[int | str, ...] | None
    n: int | None
    ac_units: Marks | None
    fsdp_units: Marks | None
    plan_options: Mapping[str, Any]
    calibrate: bool
    surroundings: Surroundings
    file: files.CellFile | None

    def run(self) -> Record:
        """Rows of the cell, one if it fails; a finished cell's go to the file."""
        with _ONE_AT_A_TIME, self.surroundings.taken():
            try:
                record = self._planned()
            except Exception as error:  # the user's code and any model: all may happen
                return self.failed(error)
        if self.file is not None:
            self.file.write_if_reachable(record)
        return record

    def failed(self, error: BaseException) -> Record:
        """The row of a cell that could not be done."""
        row = Row(cell=self.labels, status="failed", reason=reason_of(error))
        return [row.record()]

    def rows(self, record: Record) -> tuple[Row, ...]:
        """A record as rows."""
        return tuple(
            Row(cell=self.labels, **{name: figures[name] for name in FIGURES})
            for figures in record
        )

    def _planned(self) -> Record:
        traced = self._profile()
        budget_sweep = sweep(
            traced,
            memory_budgets=self.budgets,
            n=self.n,
            ac_units=self.ac_units,
            fsdp_units=self.fsdp_units,
            plan_options=dict(self.plan_options),
        )
        return [replace(row, cell=self.labels).record() for row in budget_sweep]

    def _profile(self) -> Profile:
        parts = _parts_of(self.make_step(**self.values))
        traced = profile(parts.pop("model"), parts.pop("inputs"), **parts)
        if not self.calibrate:
            return traced
        with caching.alone():  # what others run meanwhile would be measured too
            return calibrated_if_present(traced, progress=False)


def _parts_of(parts: Any) -> dict[str, Any]:
    """What `make_step` returned, by name."""
    if isinstance(parts, tuple) and 2 <= len(parts) <= len(_PARTS):
        parts = dict(zip(_PARTS, parts, strict=False))
    if not isinstance(parts, Mapping) or not {"model", "inputs"} <= parts.keys():
        raise TypeError(
            "`make_step` must return a dict with `model`, `inputs` and options of"
            " `autosac.profile`, or a tuple (model, inputs[, loss_fn[, optimizer]]);"
            f" it returned {type(parts).__name__}."
        )
    return dict(parts)
