"""Run cells side by side with joblib, wherever that runs what it is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import joblib

from autosac.sweeps.cells import Cell, Record

Keep = Callable[[int, Record], None]


def run_all(
    cells: Sequence[Cell],
    keep: Keep,
    *,
    n_jobs: int | None,
    advance: Callable[[], None],
) -> None:
    """Run cells; what is done is kept at once.

    A worker that dies takes a few cells with it. They are run again one by one, so
    that only the one it died of is lost, as a row.

    Args:
        cells: What to run.
        keep: Gets the index of a cell and its rows.
        n_jobs: As in `joblib.Parallel`.
        advance: Called when a cell is done.
    """
    todo = list(range(len(cells)))
    while todo:
        sent: list[int] = []
        kept: set[int] = set()
        results = _results(cells, todo, sent, n_jobs, advance)
        with contextlib.closing(results):
            while (outcome := _next(results)) is not None:
                if isinstance(outcome, Exception):
                    if not sent:
                        raise outcome  # there is no pool
                    break
                index, record = outcome
                keep(index, record)
                kept.add(index)
        for index in (index for index in sent if index not in kept):
            keep(index, _alone(cells[index]))
            advance()
        todo = todo[len(sent) :]


def _next(
    results: Iterator[tuple[int, Record]],
) -> tuple[int, Record] | Exception | None:
    """The next result, or the pool's error: errors of cells are rows."""
    try:
        return next(results, None)
    except Exception as error:  # every backend has its own
        return error


def _results(
    cells: Sequence[Cell],
    todo: Sequence[int],
    sent: list[int],
    n_jobs: int | None,
    advance: Callable[[], None],
) -> Generator[tuple[int, Record], None, None]:
    """Indices and rows of cells as they end; all at the end from pools of processes
    and Ray, which joblib cannot ask before."""

    def calls() -> Iterator[Any]:
        for index in todo:
            sent.append(index)
            yield joblib.delayed(_numbered)(index, cells[index])

    pool = _pool(n_jobs, advance)
    results = pool(calls())
    try:
        yield from results
    finally:
        if hasattr(results, "close"):
            with contextlib.suppress(Exception):  # the first error is the one to show
                results.close()


def _numbered(index: int, cell: Cell) -> tuple[int, Record]:
    return index, cell.run()


def _alone(cell: Cell) -> Record:
    """The rows of a cell that was lost with its worker."""
    record = None if cell.file is None else cell.file.read()
    if record is not None:
        return record
    try:  # two jobs, as a single one would run in this process
        calls = [joblib.delayed(_numbered)(0, cell)]
        pairs: list[tuple[int, Record]] = joblib.Parallel(n_jobs=2)(calls)
    except Exception as error:  # the pool's again: the worker died of this cell
        return cell.failed(error)
    return pairs[0][1]


class _Pool(joblib.Parallel):  # type: ignore[misc]
    """Joblib's pool; it says when a task ends, whatever runs it."""

    def __init__(self, advance: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._advance = advance

    def print_progress(self) -> None:
        """Called by joblib after every task."""
        self._advance()


def _pool(n_jobs: int | None, advance: Callable[[], None]) -> _Pool:
    options = {"n_jobs": n_jobs, "batch_size": 1}
    try:
        return _Pool(advance, return_as="generator_unordered", **options)
    except ValueError:  # not with every backend
        return _Pool(advance, **options)
