"""Memory of a fractional solution of the MILP: which positions does it break?

The rows of a position (`graph/model.py`) say how much of each value is alive there at
least. Worked out for all steps at once, they tell which positions should be rows
without having them in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .model import GraphModel
from .recomputation import Position

_Floats = npt.NDArray[np.float64]

_NOTICED = 1e-6  # of the cap: LP solvers keep rows to about that


def broken(model: GraphModel, budget_bytes: float) -> list[Position]:
    """The worst position of every stretch above a budget, worst first.

    Args:
        model: Solved as a relaxation; its variables hold values.
        budget_bytes: The cap.
    """
    forward, steps = live_bytes(model)
    least = budget_bytes * _NOTICED
    peaks: list[tuple[float, Position]] = []
    for is_step, live in enumerate((forward, steps)):
        over = live - budget_bytes
        edges = np.flatnonzero(np.diff(over > least)) + 1
        for first, end in pairwise([0, *edges.tolist(), len(over)]):
            place = first + int(over[first:end].argmax())
            if over[place] > least:
                position = Position(place, None) if is_step else Position(-1, place)
                peaks.append((float(over[place]), position))
    return [position for _, position in sorted(peaks, key=lambda one: -one[0])]


def live_bytes(model: GraphModel) -> tuple[_Floats, _Floats]:
    """Memory of each forward op and of each step itself, by the model's variables."""
    keep = {v: k.varValue or 0.0 for v, k in model.keep.items()}
    run = {op: x.varValue or 0.0 for op, x in model.run.items()}
    moved = {v: a.varValue or 0.0 for v, a in model.moved.items()}
    here = {v: kept - moved.get(v, 0.0) for v, kept in keep.items()}
    return _in_forward(model, here), _in_steps(model, keep, run, moved)


def _in_forward(model: GraphModel, keep: Mapping[int, float]) -> _Floats:
    problem = model.problem
    changes = np.zeros(len(problem.reads) + 1)
    for v, op in enumerate(problem.maker):
        kept = 1.0 if v in problem.returned else keep.get(v, 0.0)
        changes[op] += problem.value_bytes[v]
        changes[problem.last_forward_read[v] + 1] -= problem.value_bytes[v] * (1 - kept)
    workspaces = np.array(problem.workspace_bytes, np.float64)
    return np.asarray(changes[:-1].cumsum() + problem.other_bytes + workspaces)


def _in_steps(
    model: GraphModel,
    keep: Mapping[int, float],
    run: Mapping[int, float],
    moved: Mapping[int, float],
) -> _Floats:
    problem = model.problem
    steps = np.arange(len(problem.step_reads))
    again = _again(model, keep, run, steps)
    live = np.array(problem.step_bytes, np.float64)
    live += sum(problem.value_bytes[v] for v in problem.returned)
    nothing = np.zeros(len(steps))
    for v, kept in keep.items():
        op = problem.maker[v]
        copy = again.get(op, nothing)
        ahead = run.get(op, 0.0) - copy
        is_single = len(problem.makes[op]) == 1
        alive = nothing
        for reader in model.readers.get(v, ()):
            needs = run[reader] - again[reader]
            alive = np.maximum(alive, needs - ahead)
            if not is_single:
                alive = np.maximum(alive, np.maximum(kept, copy) + needs - 1.0)
        if v in problem.first_need:
            there = np.maximum(np.maximum(kept, copy), 1.0 - ahead)
            if moved.get(v):
                away = np.full(len(steps), moved[v])
                for reader in model.readers.get(v, ()):
                    away = np.minimum(away, 1.0 - again.get(reader, nothing))
                there = np.maximum(there - away, 0.0)
            there = np.where(steps >= problem.first_need[v], 1.0, there)
            alive = np.where(steps <= problem.last_need[v], there, alive)
        live += alive * problem.value_bytes[v]
    return live


def _again(
    model: GraphModel,
    keep: Mapping[int, float],
    run: Mapping[int, float],
    steps: npt.NDArray[np.int64],
) -> dict[int, _Floats]:
    """How much of each op has run again by each step at least, see (3) and (4)."""
    problem = model.problem
    again: dict[int, _Floats] = {}
    for op in reversed(model.ops):
        if op not in run:
            continue
        least = np.zeros(len(steps))
        for v in problem.makes[op]:
            if v not in keep:
                continue
            if v in problem.first_need:
                asked = (steps >= problem.first_need[v]) * (1.0 - keep[v])
                least = np.maximum(least, asked)
            for reader in model.readers.get(v, ()):
                least = np.maximum(least, again[reader] - keep[v])
        again[op] = np.minimum(least, run[op])
    return again
