"""Use what a plan leaves of its budget: save more in the chosen units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autosac.simulation.simulator import Simulator
from autosac.solving.formulation import Formulation
from autosac.units import curves
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_LESS = 1.0 - 1e-12  # of a time: not rounding
_MOST_SIMULATIONS = 24  # milliseconds each; the dearest reruns are spared first


@dataclass(frozen=True, slots=True)
class _Move:
    """Another policy for a unit: it keeps more and reruns less."""

    gain_ms: float
    point: int  # on the unit's front, the fastest first
    policy: Policy


def spend_slack(
    simulator: Simulator,
    formulation: Formulation,
    chosen: Mapping[Unit, Policy],
    budget_bytes: int,
) -> dict[Unit, Policy]:
    """Move units to Pareto points that keep more, while the true peak fits.

    A heuristic: the MILP chooses among some points of each curve only, and its memory
    model may leave some bytes. Units that behave alike are looked at once.

    Args:
        simulator: Says the peak.
        formulation: The curves of the units.
        chosen: The plan to improve.
        budget_bytes: Cap on the true peak.
    """
    chosen = dict(chosen)
    curve_of = dict(zip(formulation.units, formulation.curves, strict=True))
    peak_bytes = simulator.true_peak_bytes(chosen)
    # What an allocator adds hardly changes: only what fits with that is replayed.
    added_bytes = peak_bytes - simulator.peak_bytes(chosen)
    refused: dict[tuple[int, Policy], int] = {}  # slowest point that did not fit
    for _ in range(_MOST_SIMULATIONS):
        alike = {(id(curve_of[unit]), policy): unit for unit, policy in chosen.items()}
        slack = budget_bytes - peak_bytes
        moves = []
        for key, unit in alike.items():
            last = refused.get(key, -1)
            move = _best_move(curve_of[unit], unit, chosen[unit], slack, last)
            if move is not None:
                moves.append((move.gain_ms, move, key, unit))
        if not moves:
            break
        _, move, key, unit = max(moves, key=lambda entry: entry[0])
        changed = {**chosen, unit: move.policy}
        may_fit = simulator.peak_bytes(changed) + added_bytes <= budget_bytes
        if may_fit and simulator.fits(changed, budget_bytes):
            chosen, peak_bytes = changed, simulator.true_peak_bytes(changed)
            refused[key[0], move.policy] = refused.pop(key, -1)
        else:
            refused[key] = move.point
    return chosen


def _best_move(
    curve: curves.UnitCurve, unit: Unit, policy: Policy, limit_bytes: int, refused: int
) -> _Move | None:
    """The fastest Pareto point within a limit on the bytes kept in addition.

    Half way to the unit's own point from one that did not fit: a unit's own rerun may
    be the peak, which bytes that are kept say little of.

    Args:
        curve: That of the unit.
        unit: A chosen unit.
        policy: Its own.
        limit_bytes: Of what is kept beyond its own point.
        refused: The slowest point that did not fit, -1 for none.
    """
    before_ms = curves.recompute_ms(unit, policy)
    front = curve.front
    if front is None:
        return None
    most_bytes = curves.kept(unit, policy) + limit_bytes
    i = curves.first_within(front, most_bytes)
    if refused >= 0:
        own = int(np.searchsorted(front.recompute_ms, before_ms * _LESS))
        i = max(i, (refused + own) // 2, refused + 1)
    if i >= len(front) or int(front.saved_bytes[i]) > most_bytes:
        return None
    time_ms = float(front.recompute_ms[i])
    if time_ms >= before_ms * _LESS:
        return None
    return _Move(before_ms - time_ms, i, curves.policy_of(front, i))
