"""Plan files of every kind: read as JSON, and told apart by what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, TypeVar

from autosac.errors import ArgumentError
from autosac.kinds import file_path
from autosac.typed_json import built

T = TypeVar("T")

# What files of one kind alone hold -> the kind, and the class that loads it.
_KINDS = {
    "op_sequences": ("a plan", "Plan"),
    "sharding": ("a parallel plan", "ParallelPlan"),
    "stage_plans": ("a pipeline plan", "PipelinePlan"),
}


def plan_record(
    path: str | Path, *, wanted: str, format_version: int
) -> dict[str, Any]:
    """The JSON object of a plan file, without its format.

    Args:
        path: The file.
        wanted: Name of the class that loads it.
        format_version: The one that it reads.

    Raises:
        ArgumentError: It is no plan file, of another format, or one that another class
            loads; says which.
    """
    path = file_path(path)
    try:  # as editors leave it: some begin with the mark of their encoding
        record = json.loads(path.read_text(encoding="utf-8-sig"))
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
    found = record.pop("format")
    if found != format_version:
        raise ArgumentError(
            f"{path} has plan format {shortened(found)}; this autosac reads format"
            f" {format_version}. Plan again, or use the autosac it was made with."
        )
    return record


def loaded(kind: type[T], path: str | Path, record: dict[str, Any]) -> T:
    """The plan of a plan file.

    Args:
        kind: Its class.
        path: The file.
        record: Its fields, as JSON has them.

    Raises:
        ArgumentError: They are not what that class holds; names the first that is not.
    """
    try:
        return built(kind, record)
    except ValueError as error:
        why = str(error).rstrip(".")
        raise ArgumentError(f"{path} is damaged: {why}. Plan again.") from error


def check_consistent(path: str | Path, problem: str | None) -> None:
    """Refuse a plan whose fields cannot be true together.

    Raises:
        ArgumentError: Says why.
    """
    if problem is not None:
        raise ArgumentError(f"{path} contradicts itself: {problem}. Plan again.")


def _no_plan(path: Path, what: str) -> ArgumentError:
    return ArgumentError(f"{path} is not a plan saved by autosac: it is {what}.")
