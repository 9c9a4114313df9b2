"""What results say of themselves: one screen, as text and in notebooks."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

_MOST_ROWS = 40  # of a table; more are in `to_dataframe` or the plan itself
_BETWEEN = "  "  # columns
_LEAST_NAME = 18  # characters of a name that are always shown
_NUMBER = re.compile(r"\d+")
_MOST_ALIKE = 8  # rows that come again together
_LEFT, _RIGHT = "text-align:left;white-space:pre-wrap", "text-align:right"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text; the first column is of names.

    Attributes:
        heads: Of the columns.
        rows: A text for each column.
        left: Columns that are aligned at their left; the others hold figures.
        clips: Text shortens names that are too long for the terminal.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})
    clips: bool = False

    def shortened(self) -> Table:
        """The table with its middle left out if it is too long for a screen."""
        if len(self.rows) <= _MOST_ROWS:
            return self
        half = _MOST_ROWS // 2
        left_out = f"... {len(self.rows) - 2 * half} more ..."
        between = (left_out, *[""] * (len(self.heads) - 1))
        return replace(self, rows=(*self.rows[:half], between, *self.rows[-half:]))

    def lines(self) -> Iterator[str]:
        """The table as text."""
        rows = (self.heads, *self.shortened().rows)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if self.clips:
            figures = sum(widths[1:]) + len(_BETWEEN) * (len(widths) - 1)
            left = shutil.get_terminal_size().columns - figures
            widths[0] = min(widths[0], max(left, _LEAST_NAME))
        for row in rows:
            cells = (
                _clipped(cell, width).ljust(width)
                if i in self.left
                else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            yield _BETWEEN.join(cells).rstrip()

    def html(self) -> str:
        """The table as an HTML element, in the colours of what is around it."""
        rows = [_row("th", self.heads, self.left)]
        rows += [_row("td", row, self.left) for row in self.shortened().rows]
        return f"<table>{''.join(rows)}</table>"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One screen about a result.

    Attributes:
        title: What it is; in notebooks only.
        facts: Names and texts.
        tables: Further figures.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()

    def text(self) -> str:
        """The summary as lines."""
        lines = [f"{name:<9} {text}" for name, text in self.facts]
        for table in self.tables:
            if table.rows:
                lines += table.lines()
        return "\n".join(lines)

    def html(self) -> str:
        """The summary for a notebook."""
        facts = "".join(_row("td", fact, frozenset({0, 1})) for fact in self.facts)
        parts = [f"<b>{html.escape(self.title)}</b>"]
        if facts:
            parts.append(f"<table>{facts}</table>")
        parts += [table.html() for table in self.tables if table.rows]
        return f"<div>{''.join(parts)}</div>"


class Summarized:
    """Base of results: text, ``repr`` and notebooks show their summary."""

    __slots__ = ()

    def summary(self) -> Summary:
        """What the result says in one screen."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summary().text()

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return self.summary().html()


def _clipped(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."


def _row(tag: str, cells: Iterable[str], left: frozenset[int]) -> str:
    written = (
        f'<{tag} style="{_LEFT if i in left else _RIGHT}">{html.escape(cell)}</{tag}>'
        for i, cell in enumerate(cells)
    )
    return f"<tr>{''.join(written)}</tr>"


def equal_rows_once(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Rows in which those that differ in the number in their name are one.

    They follow one another, alone or as parts of a few rows that come again and again.

    Args:
        rows: A name and other texts each, such as ``("blocks.0", "50.0%")``.
    """
    keys = [(_NUMBER.sub("#", row[0]), *row[1:]) for row in rows]
    folded, start = [], 0
    while start < len(rows):
        period, times = _repeats(keys[start:])
        stop = start + period * times
        for place in range(start, start + period):
            name, *others = rows[place]
            if times > 1:
                last = rows[place + stop - start - period][0]
                name = f"{name} ... {last} (x {times})"
            folded.append((name, *others))
        start = stop
    return tuple(folded)


def _repeats(keys: Sequence[tuple[str, ...]]) -> tuple[int, int]:
    """Of how many of these the first ones come again, and how many times in a row."""
    for period in range(1, _MOST_ALIKE + 1):
        first, times = keys[:period], 1
        if len({name for name, *_ in first}) < period:
            break  # which of them a name with another number is would not be clear
        while keys[period * times : period * (times + 1)] == first:
            times += 1
        if times > 1:
            return period, times
    return 1, 1
