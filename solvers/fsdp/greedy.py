"""Choices of the parallel MILP without a solver: made by hand, or rounded from shares.

They are incumbents, so that a limit never leaves a solve without a choice where one of
them fits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from ..sac.greedy import round_and_repair
from ..sac.holds import Ints
from ..sac.table import Choice, Table
from .problem import FsdpChoice, FsdpProblem, broken_rules, sharded_live

_SOME = 1e-6  # of a unit: what reshards in shares reshards


def simple_units(
    problem: FsdpProblem, open_ones: Sequence[int]
) -> list[tuple[int, ...]]:
    """Units as people choose them: every layer, or every part of one.

    Args:
        problem: The modules.
        open_ones: Those that may be units.
    """
    modules = problem.modules
    alone = [index for index in open_ones if index and modules[index].kind is None]
    kinds = dict.fromkeys(modules[index].kind for index in open_ones)
    plans = [{0, *alone}, {0}]
    for kind in kinds:
        if kind is not None:
            same = [index for index in open_ones if modules[index].kind == kind]
            plans.append({0, *alone, *same})
    around = {modules[index].parent for index in open_ones}
    plans.append({0, *(index for index in open_ones if index not in around)})
    # Each with its own parameters: no unit of another plan has fewer types.
    finest = {0, *(index for index in open_ones if modules[index].gather_bytes)}
    for some in (plans, [finest]):
        distinct = dict.fromkeys(tuple(sorted(plan)) for plan in some)
        legal = [u for u in distinct if not broken_rules(problem, plain(problem, u))]
        if legal:
            return legal
    return []


def by_hand(problem: FsdpProblem, units: Sequence[int]) -> Iterator[FsdpChoice]:
    """Choices with given units: all reshard or none; AC nowhere, or wherever it may be.

    Args:
        problem: The modules and AC units.
        units: Indices of the FSDP units, the root among them.
    """
    kept = plain(problem, units)
    recomputed = _ways(problem, kept)
    for is_resharded in (False, True):
        flags = tuple(
            is_unit and bool(index) and is_resharded
            for index, is_unit in enumerate(kept.units)
        )
        for chosen in recomputed:
            choice = FsdpChoice(units=kept.units, reshard=flags, points=tuple(chosen))
            if not broken_rules(problem, choice):
                yield choice


def rounded(
    problem: FsdpProblem,
    table: Table,
    budget_bytes: int,
    shares: tuple[Sequence[bool], Sequence[float], Sequence[Sequence[float]]],
) -> FsdpChoice | None:
    """A whole choice near one in shares that keeps a budget; None if none was found.

    Args:
        problem: The modules and AC units.
        table: The AC units.
        budget_bytes: Cap on the predicted peak.
        shares: Units, share of each that reshards, and weight of each AC point.
    """
    units, resharded, weights = shares
    flags = tuple(
        is_unit and share > _SOME
        for is_unit, share in zip(units, resharded, strict=True)
    )
    added = sharded_live(problem, units, flags).astype(np.int64)
    chosen = round_and_repair(
        table.raised(added),
        budget_bytes,
        _allowed(problem, units),
        np.array([weight for point in weights for weight in point]),
    )
    if chosen is None:
        return None
    return FsdpChoice(units=tuple(units), reshard=flags, points=tuple(chosen))


def least_live(
    problem: FsdpProblem, table: Table, units: Collection[int], positions: Iterable[int]
) -> int:
    """Memory at some position that no choice with given FSDP units goes below.

    Args:
        problem: The modules and AC units.
        table: The AC units.
        units: Indices of the FSDP units, the root among them.
        positions: Where to look, besides where most is alive if all reshard.
    """
    flags = plain(problem, units).units
    reshard = [is_unit and index > 0 for index, is_unit in enumerate(flags)]
    live = table.base + sharded_live(problem, flags, reshard).astype(np.int64)
    # Nowhere else a unit that stays takes less: at this instant it is gathered again.
    regathered = {problem.modules[index].backward[0] for index in units}
    live[list(regathered)] = 0
    allowed = np.zeros(len(table.parents), dtype=np.int64)
    allowed[_allowed(problem, flags)] = 1
    where = ({int(live.argmax())} | set(positions)) - regathered
    return max(int(live[q]) + _least_added(table, q, allowed) for q in where)


def _least_added(table: Table, position: int, allowed: Ints) -> int:
    """The least that AC units can add to the live memory at a position."""
    if not len(allowed):
        return 0
    added = np.minimum.reduceat(table.row(position), table.first[:-1]) * allowed
    least = np.minimum(added, 0).tolist()
    inside = [0] * len(least)
    for u in reversed(table.depth_first):
        least[u] = min(least[u], inside[u])  # a unit, or what lies in it
        if table.parents[u] >= 0:
            inside[table.parents[u]] += least[u]
    total = sum(least[u] for u, parent in enumerate(table.parents) if parent < 0)
    held = sum(min(h.added_bytes, 0) for h in table.holds.at(position))
    return int(total + held)


def plain(problem: FsdpProblem, units: Collection[int]) -> FsdpChoice:
    """The choice with given units where nothing reshards and nothing is recomputed."""
    count, chosen = len(problem.modules), set(units)
    return FsdpChoice(
        units=tuple(index in chosen for index in range(count)),
        reshard=(False,) * count,
        points=(None,) * len(problem.sac.units),
    )


def _ways(problem: FsdpProblem, kept: FsdpChoice) -> list[Choice]:
    """Points with no AC, with AC on every block, and on every module that may be."""
    allowed = _allowed(problem, kept.units)
    kinds = {module.fqn: module.kind for module in problem.modules}
    repeated = [u for u in allowed if kinds.get(problem.sac.units[u].fqn) is not None]
    return [kept.points, _under_ac(problem, repeated), _under_ac(problem, allowed)]


def _under_ac(problem: FsdpProblem, candidates: Sequence[int]) -> Choice:
    """The outermost of some AC units, each at the point that frees most."""
    chosen: list[int | None] = [None] * len(problem.sac.units)
    among = set(candidates)
    for u in candidates:
        if among.isdisjoint(problem.sac.ancestry(u)[1:]):
            freed = [point.freed_bytes for point in problem.sac.units[u].points]
            chosen[u] = freed.index(max(freed))
    return chosen


def _allowed(problem: FsdpProblem, units: Sequence[bool]) -> list[int]:
    """AC units that lie around no FSDP unit."""
    return [
        u
        for u, inside in enumerate(problem.inside)
        if not any(units[index] for index in inside)
    ]
