"""How the MILPs of a plan are solved."""

from __future__ import annotations

from dataclasses import dataclass

from autosac.solvers.milp.solution import Backend

RELATIVE_GAP = 5e-3  # of a plan, unless the caller says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """How the MILPs of a plan are solved.

    Attributes:
        segments: None for the exact points of every curve, a number to let a MILP on
            curves of so many fitted segments pick the units first.
        backend: MILP solver.
        relative_gap: A solve stops when proven this close to the least time.
        time_limit_s: A solve stops after this long; None to count work only, which is
            the same in every run.
    """

    segments: int | None = None
    backend: Backend = "highs"
    relative_gap: float = RELATIVE_GAP
    time_limit_s: float | None = None
