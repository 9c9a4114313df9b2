"""Memory of a fractional solution of the MILP: which positions does it break?

The rows of a position (`graph/model.py`) say how much of each value is alive there at
least. Worked out for all positions at once, they tell which ones should be rows without
having them in the model: steps, and ops that run again before them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .model import GraphModel
from .recomputation import Position

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_NOTICED = 1e-6  # of the cap: LP solvers keep rows to about that
_RUNS = 1e-2  # how much of an op must run again before a step to be looked at there


class Places(NamedTuple):
    """Positions in backward, in the order in which they come.

    Attributes:
        steps: The step of each.
        ops: The op that runs again; the number of all ops for the step itself.
    """

    steps: _Ints
    ops: _Ints


def broken(
    model: GraphModel, budget_bytes: float, *, with_ops: bool = True
) -> list[Position]:
    """The worst position of every stretch above a budget, worst first.

    Args:
        model: Solved as a relaxation; its variables hold values.
        budget_bytes: The cap.
        with_ops: Ops that run again count, too, not steps alone.
    """
    forward, places, backward = live_bytes(model)
    if not with_ops:
        is_step = places.ops == len(model.problem.reads)
        places = Places(places.steps[is_step], places.ops[is_step])
        backward = backward[is_step]
    least = budget_bytes * _NOTICED
    peaks: list[tuple[float, Position]] = []
    for is_backward, live in enumerate((forward, backward)):
        over = live - budget_bytes
        edges = np.flatnonzero(np.diff(over > least)) + 1
        for first, end in pairwise([0, *edges.tolist(), len(over)]):
            if first == end:  # there is no position at all
                continue
            place = first + int(over[first:end].argmax())
            if over[place] > least:
                position = Position(-1, place)
                if is_backward:
                    position = _position(model, places, place)
                peaks.append((float(over[place]), position))
    return [position for _, position in sorted(peaks, key=lambda one: -one[0])]


def _position(model: GraphModel, places: Places, place: int) -> Position:
    step, op = int(places.steps[place]), int(places.ops[place])
    return Position(step, op if op < len(model.problem.reads) else None)


class Shares:
    """What the variables of a relaxation hold.

    Attributes:
        model: The model.
        keep, run, moved: Of its variables of these names.
        again: How much of each op has run again before step 0, and by each step, at
            least: see (3) and (4).
    """

    def __init__(self, model: GraphModel) -> None:
        self.model = model
        self.keep = {v: k.varValue or 0.0 for v, k in model.keep.items()}
        self.run = {op: x.varValue or 0.0 for op, x in model.run.items()}
        self.moved = {v: a.varValue or 0.0 for v, a in model.moved.items()}
        self.again = self._again()

    def _again(self) -> dict[int, _Floats]:
        problem = self.model.problem
        steps = np.arange(-1, len(problem.step_reads))
        again: dict[int, _Floats] = {}
        for op in reversed(self.model.ops):
            if op not in self.run:
                continue
            least = np.zeros(len(steps))
            for v in problem.makes[op]:
                if v not in self.keep:
                    continue
                if v in problem.first_need:
                    asked = (steps >= problem.first_need[v]) * (1.0 - self.keep[v])
                    least = np.maximum(least, asked)
                for reader in self.model.readers.get(v, ()):
                    least = np.maximum(least, again[reader] - self.keep[v])
            again[op] = np.minimum(least, self.run[op])
        return again


def live_bytes(model: GraphModel) -> tuple[_Floats, Places, _Floats]:
    """Memory of each forward op, and of places in backward, by the model's variables.

    Places are all steps, and the ops of which enough runs again before one.
    """
    shares = Shares(model)
    places = _places(shares)
    return _in_forward(shares), places, Backward(shares, places).live_bytes()


def _in_forward(shares: Shares) -> _Floats:
    problem = shares.model.problem
    changes = np.zeros(len(problem.reads) + 1)
    for v, op in enumerate(problem.maker):
        kept = shares.keep.get(v, 0.0) - shares.moved.get(v, 0.0)
        if v in problem.returned:
            kept = 1.0
        changes[op] += problem.value_bytes[v]
        changes[problem.last_forward_read[v] + 1] -= problem.value_bytes[v] * (1 - kept)
    workspaces = np.array(problem.workspace_bytes, np.float64)
    return np.asarray(changes[:-1].cumsum() + problem.other_bytes + workspaces)


def _places(shares: Shares) -> Places:
    """All steps, and the ops of which enough runs again before one."""
    problem = shares.model.problem
    num_steps, num_ops = len(problem.step_reads), len(problem.reads)
    steps, ops = [np.arange(num_steps)], [np.full(num_steps, num_ops)]
    for op, again in shares.again.items():
        own = np.flatnonzero(np.diff(again) > _RUNS)
        steps.append(own)
        ops.append(np.full(len(own), op))
    all_steps, all_ops = np.concatenate(steps), np.concatenate(ops)
    order = np.lexsort((all_ops, all_steps))
    return Places(all_steps[order], all_ops[order])


class Backward:
    """How much of each value is alive at some places in backward."""

    def __init__(self, shares: Shares, places: Places) -> None:
        self.shares, self.places = shares, places
        self._nothing = np.zeros(len(places.steps))

    def live_bytes(self) -> _Floats:
        """Memory at each place."""
        shares, (steps, ops) = self.shares, self.places
        problem = shares.model.problem
        is_step = ops == len(problem.reads)
        beside = problem.arrays
        live = np.where(is_step, beside.step_bytes[steps], beside.carried_bytes[steps])
        live = live + float(sum(problem.value_bytes[v] for v in problem.returned))
        for op in np.unique(ops[~is_step]).tolist():
            here = ops == op
            now = np.diff(shares.again[op])[steps[here]]
            unread = sum(
                problem.value_bytes[v]
                for v in problem.makes[op]
                if v not in shares.keep
            )
            live[here] += now * (problem.workspace_bytes[op] + unread)
        for v in shares.keep:
            live += self.alive(v) * problem.value_bytes[v]
        return live

    def _done(self, op: int) -> _Floats:
        """How much of an op has run again at each place."""
        steps, ops = self.places
        if op not in self.shares.again:
            return self._nothing
        return np.asarray(self.shares.again[op][steps + (op <= ops)])

    def alive(self, value: int) -> _Floats:
        """How much of a value is there at each place."""
        shares, (steps, ops) = self.shares, self.places
        problem, kept = shares.model.problem, shares.keep[value]
        run, again = shares.run, shares.again
        op = problem.maker[value]
        copy = self._done(op)
        ahead = run.get(op, 0.0) - copy
        alive = self._nothing
        for reader in shares.model.readers.get(value, ()):
            # While a reader runs again itself, what it reads is there.
            done = again[reader][steps + (reader < ops)]
            needs = run[reader] - done
            alive = np.maximum(alive, needs - ahead)
            if len(problem.makes[op]) > 1:
                alive = np.maximum(alive, np.maximum(kept, copy) + needs - 1.0)
        if op in again:
            here = copy - again[op][steps]
            alive = np.where(ops == op, np.maximum(alive, here), alive)
        if value in problem.first_need:
            there = np.maximum(np.maximum(kept, copy), 1.0 - ahead)
            if shares.moved.get(value):
                there = np.maximum(there - self._away(value), 0.0)
            last_step = np.where(op <= ops, steps, steps - 1)
            there = np.where(last_step >= problem.first_need[value], 1.0, there)
            alive = np.where(steps <= problem.last_need[value], there, alive)
        return alive

    def _away(self, value: int) -> _Floats:
        shares = self.shares
        away = self._nothing + shares.moved[value]
        for reader in shares.model.readers.get(value, ()):
            away = np.minimum(away, 1.0 - shares.again[reader][self.places.steps + 1])
        return away
