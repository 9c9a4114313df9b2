"""Relaxations of a graph's model, with rows for what they break."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..milp import pulp_runner
from ..milp.solution import Backend, Termination
from . import fractional, rounding
from .model import GraphModel
from .recomputation import Position

SHARES = (0.5, 1.0 - 1e-6, 1e-6)  # from which fractional values are kept: heuristics
ROWS_A_ROUND = 4  # positions that become rows at once: a heuristic
_ROUNDS = 40  # of adding rows: a start, no proof hangs on it
_LEAST_RISE = 1e-3  # of the bound, in some rounds of adding rows: else more rows are
_ROUNDS_TO_RISE = 3  # not worth their time


def add_rows(
    model: GraphModel, positions: Iterable[Position], most: int = ROWS_A_ROUND
) -> bool:
    """Make the first of some positions rows; whether any is new."""
    new = [p for p in positions if p not in model.rows]
    for position in new[:most]:
        model.add_row(position)
    return bool(new)


def relax(
    model: GraphModel,
    backend: Backend,
    is_enough: Callable[[float], bool],
    *,
    with_ops: bool = True,
    rows_a_round: int = ROWS_A_ROUND,
    rounds_to_rise: int = _ROUNDS_TO_RISE,
) -> Termination:
    """Solve relaxations until they keep the budget, or the peak that they minimise.

    What the variables hold is checked at all positions, fractions included.

    Args:
        model: It gets the rows that its relaxations break.
        backend: Which LP solver to run.
        is_enough: Told every bound on the objective; whether to stop.
        with_ops: Rows of ops that run again, too, not of steps alone.
        rows_a_round: Positions that become rows at once.
        rounds_to_rise: Rounds after which the bound must be higher.

    Returns:
        How the last one ended; the variables hold it.
    """
    bounds: list[float] = []
    for _ in range(_ROUNDS):
        outcome = pulp_runner.run(
            model.model, backend=backend, relaxed=True, again=True
        )
        if not outcome.termination.has_incumbent or outcome.bound is None:
            return outcome.termination
        bounds.append(outcome.bound)
        if is_enough(outcome.bound) or _hardly_rises(bounds, rounds_to_rise):
            break
        cap_bytes = model.cap_bytes(outcome.bound)
        broken = fractional.broken(model, cap_bytes, with_ops=with_ops)
        is_rounded = rounding.add_rounded_rows(model)
        if not add_rows(model, broken, rows_a_round) and not is_rounded:
            break
    return Termination.OPTIMAL


def _hardly_rises(bounds: list[float], rounds: int) -> bool:
    """Whether the last rounds of rows have hardly raised the bound."""
    if len(bounds) <= rounds:
        return False
    return bounds[-1] - bounds[-1 - rounds] <= _LEAST_RISE * bounds[-1]
