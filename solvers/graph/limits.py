"""What ends a search: a time limit, or an amount of work, the same in every run."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from ..milp.solution import Backend
from .model import GraphModel

_ANY_WORK = 2**50
_MANY_COLUMNS = 2500  # from which on a unit of work takes longer, as LPs do,
_POWER_OF_COLUMNS = 2.5  # by this power: a heuristic
_SMALL_ROOT = 900  # columns from which on looks at the root take longer than others,
_POWER_AT_ROOT = 2.0  # by this power, as LPs with cuts are larger: likewise


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far a search goes, from now on.

    Attributes:
        backend: Which solver runs.
        time_limit_s: Stop after about so long; None to stop after some work.
        relative_gap: Stop as soon as what was found is proven this close to the best.
        started: Seconds of `time.perf_counter`.
    """

    backend: Backend
    time_limit_s: float | None = None
    relative_gap: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def solve_s(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.started

    @property
    def left_s(self) -> float:
        """Seconds until the search ends."""
        limit_s = math.inf if self.time_limit_s is None else self.time_limit_s
        return limit_s - self.solve_s

    @property
    def solver_limit_s(self) -> float | None:
        """The same for a solver."""
        return None if self.time_limit_s is None else self.left_s

    def work(self, most: int) -> int:
        """Work that may be done, if it is not time that ends the search."""
        return most if self.time_limit_s is None else _ANY_WORK

    def closes(self, cost_ms: float, bound_ms: float) -> bool:
        """Whether a cost is proven as close to the best as is asked for."""
        return cost_ms - bound_ms <= self.relative_gap * cost_ms


def charge_of(model: GraphModel, share: float = 1.0) -> float:
    """What a unit of `pulp_runner`'s work counts if a share of the values is free.

    A heuristic, by times of MILPs: held values leave columns and rows out, and large
    LPs take longer than their size tells.
    """
    columns = share * len(model.model.variables())
    return float(share * max(1.0, columns / _MANY_COLUMNS) ** _POWER_OF_COLUMNS)


def look_at_root(model: GraphModel, share: float = 1.0) -> float:
    """How many other looks one at the root takes if a share of the values is free.

    A heuristic, by times of MILPs of 900 to 3,500 columns, 4 to 490 ms a look; from
    `_MANY_COLUMNS` on it is `charge_of` that grows.
    """
    columns = min(_MANY_COLUMNS, share * len(model.model.variables()))
    return float(max(1.0, columns / _SMALL_ROOT) ** _POWER_AT_ROOT)
