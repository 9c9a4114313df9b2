"""Plan files of every kind: read as JSON, and told apart by what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autosac.errors import ArgumentError
from autosac.kinds import file_path

# What files of one kind alone hold -> the kind, and the class that loads it.
_KINDS = {
    "op_sequences": ("a plan", "Plan"),
    "sharding": ("a parallel plan", "ParallelPlan"),
    "stage_plans": ("a pipeline plan", "PipelinePlan"),
}


def plan_record(path: str | Path, *, wanted: str) -> dict[str, Any]:
    """The JSON object of a plan file.

    Args:
        path: The file.
        wanted: Name of the class that loads it.

    Raises:
        ArgumentError: It is no plan file, or one that another class loads; says which.
    """
    path = file_path(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise _no_plan(path, "no text") from error
    except (ValueError, RecursionError) as error:  # or JSON of some thousand levels
        raise _no_plan(path, "no JSON") from error
    if not isinstance(record, dict) or "format" not in record:
        raise ArgumentError(
            f"{path} is not a plan saved by autosac: it names no format."
        )
    for key, (kind, loader) in _KINDS.items():
        if key in record and loader != wanted:
            raise ArgumentError(
                f"{path} is {kind}; load it by `autosac.{loader}.load`."
            )
    return record


def _no_plan(path: Path, what: str) -> ArgumentError:
    return ArgumentError(f"{path} is not a plan saved by autosac: it is {what}.")
