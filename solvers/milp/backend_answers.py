"""What a backend says of a model, and what it is told about limits."""

from __future__ import annotations

import math
from typing import NamedTuple

from pulp import constants

from .solution import Termination

TERMINATIONS = {  # of PuLP's solution statuses
    constants.LpSolutionOptimal: Termination.OPTIMAL,
    constants.LpSolutionIntegerFeasible: Termination.FEASIBLE,
    constants.LpSolutionInfeasible: Termination.INFEASIBLE,
    constants.LpSolutionUnbounded: Termination.UNBOUNDED,
    constants.LpSolutionNoSolutionFound: Termination.NO_INCUMBENT,
}

Answer = tuple[Termination, float | None, float]  # ended, bound, looks at limits


class Looks(NamedTuple):
    """How often a MILP may look at its limits; more often while its gap is wide.

    Looks at the root count as so many.
    """

    usual: float = math.inf
    if_wide: float = math.inf
    at_root: float = 1.0
