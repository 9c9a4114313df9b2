"""Rich, imported without a trace: it draws from Python's global random numbers.

Source:
    Rich 14, rich/style.py: ``_id_generator = count(getrandbits(24))``.
"""

import random

_state = random.getstate()
try:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
    from rich.text import Text
finally:
    random.setstate(_state)

__all__ = [
    "BarColumn",
    "Console",
    "ConsoleOptions",
    "MofNCompleteColumn",
    "Progress",
    "RenderableType",
    "Table",
    "Text",
    "TextColumn",
    "TimeElapsedColumn",
    "TimeRemainingColumn",
]
