"""Which modules are FSDP units, which of them reshard, what is recomputed: a MILP."""

from .greedy import plain
from .problem import (
    FsdpChoice,
    FsdpModule,
    FsdpProblem,
    broken_rules,
    live,
    owner_of_shared,
    schedule,
)
from .search import FsdpSolution, candidates, estimate
from .solver import by_hand, lower_bound, lowest_peak, solve

__all__ = [
    "FsdpChoice",
    "FsdpModule",
    "FsdpProblem",
    "FsdpSolution",
    "broken_rules",
    "by_hand",
    "candidates",
    "estimate",
    "live",
    "lower_bound",
    "lowest_peak",
    "owner_of_shared",
    "plain",
    "schedule",
    "solve",
]
