"""Which modules are FSDP units, which of them reshard, and what is recomputed: a MILP.

The numbers are in `fsdp/problem.py`, the rows in `fsdp/model.py`. Rows of memory are
added on demand: a solution is checked at every position in whole bytes, and positions
that it breaks become rows.

Problems with modules of one kind are solved in two steps. The first decides on the
units, equal modules alike, with resharding and AC points in shares: a relaxation, so
that its bound holds for every plan that makes equal modules alike. The second decides
the rest in whole for these units. The others are solved at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..milp.solution import Backend
from .greedy import by_hand as choices_by_hand
from .greedy import simple_units
from .problem import FsdpChoice, FsdpProblem
from .search import FsdpSolution, Search, candidates


def solve(
    problem: FsdpProblem,
    *,
    backend: Backend = "highs",
    time_limit_s: float | None = None,
    relative_gap: float = 1e-3,
    fixed_units: Collection[int] | None = None,
    rows: Collection[int] = (),
) -> FsdpSolution:
    """Choose units, resharding and AC points with the least step time in the budget.

    Args:
        problem: Modules, AC units, costs and budget.
        backend: Which MILP solver to run.
        time_limit_s: Stop branching after about this long with the best solution so
            far; a tenth of it is left for what follows the units. None to stop after
            a certain amount of work instead, which is the same in every run.
        relative_gap: Stop when proven this close to the least time.
        fixed_units: Indices of the units besides the root, if that is decided.
        rows: Positions that are likely to bind: those of a solution of a problem like
            this one, with the same positions.

    Returns:
        The outcome; its bound holds for plans that make modules of one kind alike.
        A budget that nothing fits is an outcome, not an error.

    Raises:
        ValueError: The units break a rule of FSDP2, or are no modules.
    """
    search = Search(
        problem,
        peak=False,
        backend=backend,
        time_limit_s=time_limit_s,
        relative_gap=relative_gap,
        rows=rows,
    )
    return search.run(fixed_units)


def lower_bound(
    problem: FsdpProblem, *, backend: Backend = "highs", rows: Collection[int] = ()
) -> float | None:
    """A time that no step in the budget takes less than, by one linear program.

    Args:
        problem: Modules, AC units, costs and budget.
        backend: As in `solve`.
        rows: As in `solve`; only these are capped, and two more.

    Returns:
        The bound in ms, None if it is proven that nothing fits.
    """
    search = Search(
        problem,
        peak=False,
        backend=backend,
        time_limit_s=None,
        relative_gap=0.0,
        rows=rows,
    )
    return search.bound()


def by_hand(
    problem: FsdpProblem, *, fixed_units: Collection[int] | None = None
) -> Iterator[FsdpChoice]:
    """Choices that people write by hand, whether they keep the budget or not.

    Every layer, or every part of one, is a unit, or what is given; all reshard or none;
    AC is nowhere, around every layer or wherever it may be.

    Args:
        problem: Modules and AC units.
        fixed_units: As in `solve`.
    """
    if fixed_units is None:
        every = simple_units(problem, candidates(problem))
    else:
        every = [tuple(sorted({0, *fixed_units}))]
    for units in every:
        yield from choices_by_hand(problem, units)


def lowest_peak(
    problem: FsdpProblem,
    *,
    backend: Backend = "highs",
    time_limit_s: float | None = None,
    relative_gap: float = 0.0,
    fixed_units: Collection[int] | None = None,
) -> FsdpSolution:
    """Find the least peak of a rank that any choice reaches; the budget is ignored.

    Args:
        problem: Modules, AC units and costs.
        backend: As in `solve`, and so are the others.
        time_limit_s: Stop branching after about this long.
        relative_gap: Stop when proven this close to the least peak.
        fixed_units: The units besides the root.

    Returns:
        A solution with that peak, to 4 KiB of the least one if it is optimal. Its time
        is not minimised and has no bound.

    Raises:
        ValueError: As `solve`.
    """
    search = Search(
        problem,
        peak=True,
        backend=backend,
        time_limit_s=time_limit_s,
        relative_gap=relative_gap,
    )
    return search.run(fixed_units)
