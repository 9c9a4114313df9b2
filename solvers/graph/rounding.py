"""Rows of memory, rounded: what whole values cannot fill, relaxations must not use.

A row sum_v m_v y_v <= P of whole y >= 0 implies, for every size m > 0,

    sum_v F(m_v / m) y_v <= floor(P / m),    F(a) = floor(a) + max(0, (r - s) / (1 - s))

with r and s the fractional parts of a and of P / m. By itself that says that 10 MiB
hold two values of 4 MiB, not two and a half. A y that the relaxation has near 1 is
replaced by 1 - y first, so that small values that are there lose nothing.

Values of one part of the model are mostly recomputed together, by an op that is dear: a
value v that is not kept is made by its op, from a value u that is kept or made by its
op, and so on: y_v = 1 - k_u - ... - x_o + z with a whole z >= 0. Put into the row
before it is rounded this says that a part is recomputed or not, that 10 MiB too much
take two parts of 8 MiB and not one and a quarter.

Source:
    Marchand and Wolsey, Aggregation and mixed integer rounding to solve MIPs,
    Operations Research 49 (2001).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pulp

from .model import Capped, GraphModel

_Expression = Any  # a pulp.LpAffineExpression: PuLP has no types
_Floats = npt.NDArray[np.float64]

_BROKEN = 2e-2  # how far from a rounded row values must be, to be worth it
_TIGHT = 0.98  # how full a row must be
_MOST_PARTS = 64  # that what is left is divided into: smaller ones round little off
_MOST_SIZES = 16  # that are tried for a row
_LOOSE = 0.1  # how much z may be, to put ops into a row
_LONGEST_WAY, _MOST_WAYS = 8, 40  # from a value to the op that it takes
_NO_WEIGHT = 1e-6


class _Way(NamedTuple):
    """What it takes that a value is not kept: an op, or a value on the way to it."""

    op: int
    values: tuple[int, ...]


def add_rounded_rows(model: GraphModel) -> bool:
    """Add the rounded row that its variables break most, for each row of memory.

    Args:
        model: Solved as a relaxation; its variables hold values.

    Returns:
        Whether there was any.
    """
    keep = {v: k.varValue or 0.0 for v, k in model.keep.items()}
    run = {op: x.varValue or 0.0 for op, x in model.run.items()}
    before = model.model.numConstraints()
    for row in model.capped:
        values = np.array([term.expression.value() for term in row.terms])
        sizes = np.array([term.size for term in row.terms], np.float64)
        if sizes @ values < _TIGHT * row.left_bytes:
            continue
        ways: list[_Way | None] = [None] * len(row.terms)
        _add_most_broken(model, row, ways, keep, run)
        for place, term in enumerate(row.terms):
            if term.kept is not None:
                ways[place] = _dearest(
                    model, term.kept, float(values[place]), keep, run
                )
        if any(ways):
            _add_most_broken(model, row, ways, keep, run)
    return bool(model.model.numConstraints() > before)


def _dearest(
    model: GraphModel,
    value: int,
    share: float,
    keep: dict[int, float],
    run: dict[int, float],
) -> _Way | None:
    """The op of most time that a value takes, as far as the variables have it so."""
    problem = model.problem
    best: _Way | None = None
    pending: list[tuple[_Way, float]] = [(_Way(problem.maker[value], ()), 1.0 - share)]
    for _ in range(_MOST_WAYS):
        if not pending:
            break
        way, least = pending.pop()
        if way.op not in run or run[way.op] - least > _LOOSE:
            continue
        times = problem.runtime_ms
        if best is None or times[way.op] > times[best.op]:
            best = way
        if len(way.values) < _LONGEST_WAY:
            pending += [
                (_Way(problem.maker[u], (*way.values, u)), least - keep[u])
                for u in problem.reads[way.op]
                if u in keep
            ]
    return best


class _Row:
    """A row of memory with ways put into it: sum of weights times columns <= left.

    Attributes:
        expressions: Columns: z of terms; ops, values on ways, other terms, or one
            minus them, whatever is the less,
        shares: what the variables have for them,
        weights: and their bytes.
        left_bytes: Upper bound of the sum.
    """

    def __init__(
        self,
        model: GraphModel,
        row: Capped,
        ways: list[_Way | None],
        keep: dict[int, float],
        run: dict[int, float],
    ) -> None:
        self.expressions: list[_Expression] = []
        self.left_bytes = row.left_bytes
        weights: list[int] = []
        of_ops: dict[int, int] = defaultdict(int)
        of_values: dict[int, int] = defaultdict(int)
        for term, way in zip(row.terms, ways, strict=True):
            if way is None:
                continue
            self.left_bytes -= term.size
            of_ops[way.op] += term.size
            for u in way.values:
                of_values[u] += term.size
            taken = [model.run[way.op], *(model.keep[u] for u in way.values)]
            self.expressions.append(term.expression + pulp.lpSum(taken) - 1)
            weights.append(term.size)
        pairs = zip(row.terms, ways, strict=True)
        others = [(t.expression, t.size) for t, way in pairs if way is None]
        others += [(model.run[op] + 0.0, -size) for op, size in of_ops.items()]
        others += [(model.keep[u] + 0.0, -size) for u, size in of_values.items()]
        for expression, weight in others:
            if expression.value() > 0.5:
                self.left_bytes -= weight
                expression, weight = 1 - expression, -weight
            self.expressions.append(expression)
            weights.append(weight)
        self.weights = np.array(weights, np.float64)
        self.shares = np.array([e.value() for e in self.expressions])

    def sizes(self) -> list[int]:
        """Sizes to round by, those of most columns first."""
        counts: dict[int, int] = defaultdict(int)
        for weight in np.abs(self.weights).astype(np.int64).tolist():
            if weight and weight >= abs(self.left_bytes) / _MOST_PARTS:
                counts[weight] += 1
        return sorted(counts, key=lambda size: (-counts[size], -size))[:_MOST_SIZES]

    def rounded(self, size: int) -> _Floats:
        """Weights of the columns in the row that is rounded by a size."""
        whole, rest = np.divmod(self.weights, size)
        left = self.left_bytes % size
        above = np.maximum(0.0, rest - left) / (size - left)
        return np.asarray(np.where(above < _NO_WEIGHT, 0.0, above) + whole)


def _add_most_broken(
    model: GraphModel,
    row: Capped,
    ways: list[_Way | None],
    keep: dict[int, float],
    run: dict[int, float],
) -> None:
    whole = _Row(model, row, ways, keep, run)
    best = (_BROKEN, 0)
    for size in whole.sizes():
        weights = whole.rounded(size)
        over = weights @ whole.shares - whole.left_bytes // size
        if over > 0.0:
            best = max(best, (float(over / np.linalg.norm(weights)), size))
    size = best[1]
    if size:
        pairs = zip(whole.expressions, whole.rounded(size).tolist(), strict=True)
        total = pulp.lpSum(e * weight for e, weight in pairs if weight)
        model.model += total <= whole.left_bytes // size
