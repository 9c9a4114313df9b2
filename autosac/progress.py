"""Bars on the standard error stream of a terminal, for what takes seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from autosac.rich_parts import (
    BarColumn,
    Console,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_SHOW_AFTER_S = 1.0  # no bar for what is done by then
_shown: list[Progress] = []  # the bar on the screen; one inside another is not shown

Advance = Callable[[], None]


@contextlib.contextmanager
def progress_bar(
    what: str,
    total: int | None,
    *,
    done: int = 0,
    show: bool | None = None,
    at_once: bool = False,
) -> Iterator[Advance]:
    """A bar, and what moves it on by one. It goes when all is done, or interrupted.

    Args:
        what: Text beside it.
        total: Of how many; None if that is not known.
        done: How many are done already.
        show: Whether to; None for only on a terminal.
        at_once: Show it from the beginning, not after a second.
    """
    console = Console(stderr=True, force_terminal=True if show else None)
    if show is False or (show is None and not console.is_terminal) or _shown:
        yield lambda: None
        return
    hidden = show is None and not at_once
    begin = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(
        *columns, console=console, transient=True, disable=hidden, refresh_per_second=4
    )

    def advance() -> None:
        bar.advance(task)
        if bar.disable and time.perf_counter() - begin > _SHOW_AFTER_S:
            bar.disable = False
            bar.start()

    with bar:
        _shown.append(bar)
        try:
            task = bar.add_task(what, total=total, completed=done)
            yield advance
        finally:
            _shown.remove(bar)
