"""Which modules to put under AC and how much each recomputes: the main MILP."""

from .enumeration import MOST_NODES, Enumeration
from .items import Part
from .problem import Between, Breakpoint, Hold, SacProblem, Unit, live_bytes
from .rows import TOLERANCE_BYTES
from .search import Finer
from .solver import SacSolution, Solver, lowest_peak, solve
from .start import Start

__all__ = [
    "MOST_NODES",
    "TOLERANCE_BYTES",
    "Between",
    "Breakpoint",
    "Enumeration",
    "Finer",
    "Hold",
    "Part",
    "SacProblem",
    "SacSolution",
    "Solver",
    "Start",
    "Unit",
    "live_bytes",
    "lowest_peak",
    "solve",
]
