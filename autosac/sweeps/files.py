"""Finished cells on disk: one JSON file for each, so that none is done twice.

    {"format": 1, "facts": {all that decides the result}, "rows": [...]}
A file appears whole or not at all. One that is damaged is done again, with a warning.
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosac.profiles.fingerprints import digest
from autosac.whole_files import write_whole

_FORMAT_VERSION = 1
_MOST_CHARACTERS = 80  # of the readable part of a name


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFile:
    """Where a cell is kept.

    Attributes:
        path: The file.
        facts: All that decides the result, as text.
    """

    path: Path
    facts: Mapping[str, str]

    def read(self) -> list[dict[str, Any]] | None:
        """The rows of the file; None if there are none that can be used."""
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            self._warn(error)
            return None
        try:
            is_this = record["format"] == _FORMAT_VERSION and (
                record["facts"] == dict(self.facts)
            )
            rows: list[dict[str, Any]] = [dict(row) for row in record["rows"]]
        except (KeyError, TypeError, ValueError) as error:
            self._warn(error)
            return None
        return rows if is_this and rows else None

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Write the rows to the file, in one step."""
        record = {"format": _FORMAT_VERSION, "facts": dict(self.facts), "rows": rows}
        text = json.dumps(record, indent=1, allow_nan=False)
        write_whole(self.path, text + "\n")

    def write_if_reachable(self, rows: list[dict[str, Any]]) -> None:
        """As `write` in a worker: one of another machine may not see the directory.

        Then the process that asked writes the file when it gets the rows.
        """
        with contextlib.suppress(OSError):
            self.write(rows)

    def _warn(self, error: Exception) -> None:
        warnings.warn(
            f"The finished cell {self.path} is damaged ({error}); it is done again.",
            stacklevel=2,
        )


def cell_file(
    directory: Path, labels: Mapping[str, Any], facts: Mapping[str, str]
) -> CellFile:
    """The file of a cell: its name shows the labels, and a digest of the facts."""
    words = ",".join(f"{name}={label}" for name, label in labels.items())
    words = re.sub(r"[^A-Za-z0-9=,._-]+", "-", words)[:_MOST_CHARACTERS]
    name = f"{words or 'cell'}-{digest(dict(facts))[:16]}.json"
    return CellFile(path=directory / name, facts=facts)
