"""Use what a plan leaves of its budget: save more in the chosen units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    cost_bytes: int
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
    refused: dict[tuple[int, Policy], int] = {}  # least cost that did not fit
    for _ in range(_MOST_SIMULATIONS):
        alike = {(id(curve_of[unit]), policy): unit for unit, policy in chosen.items()}
        slack = budget_bytes - peak_bytes
        moves = []
        for key, unit in alike.items():
            limit = min(slack, refused.get(key, slack + 1) - 1)
            move = _best_move(curve_of[unit], unit, chosen[unit], limit)
            if move is not None:
                moves.append((move.gain_ms, move, key, unit))
        if not moves:
            break
        _, move, key, unit = max(moves, key=lambda entry: entry[0])
        changed = {**chosen, unit: move.policy}
        changed_peak = simulator.peak_bytes(changed) + added_bytes
        if changed_peak <= budget_bytes:
            changed_peak = simulator.true_peak_bytes(changed)
        if changed_peak <= budget_bytes:
            chosen, peak_bytes = changed, changed_peak
        else:
            refused[key] = move.cost_bytes
    return chosen


def _best_move(
    curve: curves.UnitCurve, unit: Unit, policy: Policy, limit_bytes: int
) -> _Move | None:
    """The fastest Pareto point within a limit on the bytes kept in addition."""
    before_ms, before_bytes = (
        curves.recompute_ms(unit, policy),
        curves.kept(unit, policy),
    )
    front = curve.front
    if front is None:
        return None
    i = curves.first_within(front, before_bytes + limit_bytes)
    nbytes, time_ms = int(front.saved_bytes[i]), float(front.recompute_ms[i])
    if nbytes > before_bytes + limit_bytes or time_ms >= before_ms * _LESS:
        return None
    better = curves.policy_of(front, i)
    return _Move(before_ms - time_ms, nbytes - before_bytes, better)
