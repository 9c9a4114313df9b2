"""What the search for one budget hands to that for the next larger one."""

from __future__ import annotations

from dataclasses import dataclass, field

from .counts import CountModel
from .table import Choice


@dataclass(slots=True)
class Start:
    """What a budget hands to the next larger one of a sweep.

    Attributes:
        rows: Positions that bound its relaxation.
        choice: Its choice, which keeps the larger budget too.
        model: Its last relaxation.
        model_rows: The positions that are rows of it.
        apart: Units that had to be told apart.
    """

    rows: list[int] = field(default_factory=list)
    choice: Choice | None = None
    model: CountModel | None = None
    model_rows: list[int] = field(default_factory=list)
    apart: set[int] = field(default_factory=set)
