"""Many models x settings x budgets: one job a process, kept on disk, gone on with.

The zoo, the models of full size, and models drawn by number from the lists of three
libraries. A drawn model that cannot be built, is refused or raises keeps its rows with
the reason, and the next one drawn takes its place. The JSON file of a finished job is
not made again: remove the folder of work to begin anew.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.comparing.settings_job import SETTINGS
from benchmarks.models import zoo
from benchmarks.models.drawn import drawn
from benchmarks.models.full_size import full_size

Record = dict[str, Any]
QUOTAS = {"transformers": 25, "timm": 25, "torchvision": 10}
_WITH_CELLS = ("done", "timeout")  # other statuses leave a drawn model's place free
_DIGITS = 6  # of times in the results


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """How jobs are run.

    Attributes:
        folder: Where each leaves its file.
        num_budgets: From the floor to the plain step's peak.
        num_at_once: Processes side by side.
        timeout_s: After which a job is ended; what it has done by then counts.
        calibrate: Measure the times of the CPU's ops.
        settings: Names of `SETTINGS`.
    """

    folder: Path
    num_budgets: int
    num_at_once: int
    timeout_s: float
    calibrate: bool = False
    settings: tuple[str, ...] = tuple(SETTINGS)

    def path(self, model: str, setting: str) -> Path:
        """The file of a job."""
        how = "calibrated" if self.calibrate else "modelled"
        words = (model.replace("/", "-"), *setting.split(), str(self.num_budgets), how)
        return self.folder / f"{'-'.join(words)}.json"

    def of_model(self, model: str) -> list[Record]:
        """The records of a model, one for each setting; fewer if it cannot be built."""
        records = []
        for setting in self.settings:
            records.append(self._record(model, setting))
            if records[-1]["status"] == "not built":
                break
        return records

    def _record(self, model: str, setting: str) -> Record:
        path = self.path(model, setting)
        stored = _read(path)
        if stored["status"] == "unfinished":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            stored = self._run(model, setting, path)
            path.write_text(json.dumps(stored) + "\n")
        return stored

    def _run(self, model: str, setting: str, path: Path) -> Record:
        command = [sys.executable, "-m", "benchmarks.comparing.settings_job"]
        command += ["--model", model, "--setting", setting, "--output", str(path)]
        command += ["--budgets", str(self.num_budgets)]
        if self.calibrate:
            command.append("--calibrate")
        begun = {"model": model, "setting": setting, "cells": []}
        try:
            ended = subprocess.run(
                command, timeout=self.timeout_s, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {**begun, **_read(path), "status": "timeout"}
        record = {**begun, **_read(path)}
        if record["status"] == "unfinished":  # the process died
            last = (ended.stderr.strip().splitlines() or [""])[-1]
            reason = f"exit code {ended.returncode}: {last}"
            record |= {"status": "raw error", "reason": reason}
        return record


def _read(path: Path) -> Record:
    """The file of a job, or that there is none."""
    if not path.exists():
        return {"status": "unfinished"}
    record: Record = json.loads(path.read_text())
    return record


def fixed_models() -> list[str]:
    """Models that are not drawn."""
    return [*(f"zoo/{name}" for name in zoo()), *full_size()]


def run(
    jobs: Jobs, models: Iterable[str], quotas: Mapping[str, int]
) -> Iterator[list[Record]]:
    """The records of a model after the other.

    Args:
        jobs: How they are run.
        models: Those to run in any case.
        quotas: Library -> how many drawn models must have been planned.
    """
    with ThreadPoolExecutor(jobs.num_at_once) as pool:
        yield from pool.map(jobs.of_model, models)
        for library, quota in quotas.items():
            names = iter(drawn(library))
            while quota and (batch := list(islice(names, quota))):
                for records in pool.map(jobs.of_model, batch):
                    quota -= takes_place(records, jobs.settings)
                    yield records


def takes_place(records: list[Record], settings: tuple[str, ...]) -> bool:
    """Whether a drawn model was planned in every setting."""
    planned = sum(record["status"] in _WITH_CELLS for record in records)
    return planned == len(settings)


# --- what is kept -------------------------------------------------------------


def replaced(records: list[Record], newer: list[Record]) -> list[Record]:
    """Records with newer ones in the place of those of the same job."""
    by_job = {(r["model"], r["setting"]): r for r in records}
    return list((by_job | {(r["model"], r["setting"]): r for r in newer}).values())


COLUMNS = (
    "fraction",
    "budget_bytes",
    "peak_bytes",
    "recompute_ms",
    "gap",
    "cpu_s",
    "wall_s",
    "best_rival",
    "best_rival_ms",
    "num_rivals",
)


def compact(record: Record) -> Record:
    """A job's record with its cells as rows of `COLUMNS`; errors are told apart."""
    cells = record["cells"]
    return {
        **record,
        "cells": [_as_row(cell) for cell in cells if "error" not in cell],
        "errors": [
            [cell["fraction"], cell["error"]] for cell in cells if "error" in cell
        ],
    }


def _as_row(cell: Record) -> list[Any]:
    best = min(
        ((r["recompute_ms"], name) for name, r in cell["rivals"].items()),
        default=(None, None),
    )
    values = {
        **cell,
        "cpu_s": round(cell["seconds"]["cpu"], 3),
        "wall_s": round(cell["seconds"]["wall"], 3),
        "best_rival": best[1],
        "best_rival_ms": best[0],
        "num_rivals": len(cell["rivals"]),
    }
    row = [values[column] for column in COLUMNS]
    return [_rounded(value) for value in row]


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
