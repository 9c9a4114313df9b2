"""How the MILPs of a plan are solved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from autosac.errors import ArgumentError
from autosac.quantities import is_positive
from autosac.solvers.curves.fitting import check_segments
from autosac.solvers.milp.solution import Backend

RELATIVE_GAP = 5e-3  # of a plan, unless the caller says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """How the MILPs of a plan are solved.

    Attributes:
        segments: None for the exact points of every curve, a number to let a MILP on
            curves of so many fitted segments pick units and ratios, which are rounded
            to points.
        backend: MILP solver.
        relative_gap: A solve stops when proven this close to the least time.
        time_limit_s: A solve stops after this long; None to count work only, which is
            the same in every run.
        polishes: A solve goes on for a little while when the gap is reached, so that
            smaller budgets are rarely cheaper; estimates need not.
    """

    segments: int | None = None
    backend: Backend = "highs"
    relative_gap: float = RELATIVE_GAP
    time_limit_s: float | None = None
    polishes: bool = True

    def __post_init__(self) -> None:
        if self.segments is not None:
            read_segments(self.segments)
        check_solving(self.backend, self.relative_gap, self.time_limit_s)


def check_solving(
    backend: object, relative_gap: object, time_limit_s: object = None
) -> None:
    """Refuse what no solver can be told.

    Raises:
        ArgumentError: Says which argument, and what it must be.
    """
    if backend not in get_args(Backend):
        known = " or ".join(map(repr, get_args(Backend)))
        raise ArgumentError(f"`backend` must be {known}, got {backend!r}.")
    if not (relative_gap == 0 or is_positive(relative_gap)):
        raise ArgumentError(
            "`relative_gap` must be a share of at least 0, such as 0.005, got"
            f" {relative_gap!r}."
        )
    check_limit(time_limit_s, name="time_limit_s")


def check_limit(limit_s: object, *, name: str) -> None:
    """Refuse what limits no solve.

    Args:
        limit_s: What was passed, in seconds.
        name: The argument's name, for the error message.

    Raises:
        ArgumentError: Says what it must be.
    """
    if not (limit_s is None or limit_s == 0 or is_positive(limit_s)):
        raise ArgumentError(
            f"`{name}` must be a number of seconds, 0 or more, or None for a limit on"
            f" work alone, got {limit_s!r}."
        )


def read_segments(segments: object) -> int:
    """The number of segments that a user asks for.

    Raises:
        ArgumentError: It is no whole number, or less than 1.
    """
    try:
        return check_segments(segments, name="segments")
    except (TypeError, ValueError) as error:
        raise ArgumentError(str(error)) from None
