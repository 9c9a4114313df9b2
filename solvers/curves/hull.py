"""The lower convex hull of the Pareto points of a `SaveProblem`, by linear programs.

At a price of L ms per byte the best save set minimises

    sum_g t_g e_g + L sum_g m_g s_g

under rows (1) to (4) of `save_problem.py`. With a_g = s_g + e_g every row is
e_g <= a_h, a_g = 1, e_g <= a_g or a bound: differences of two variables, so the matrix
is totally unimodular, the linear program has whole solutions, and each is a vertex of
the hull (a minimum cut, as in PyTorch's partitioner: torch/_functorch/partitioners.py).
A vertex between two others is sought at the price at which these two cost the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..milp import linear_program as linear
from .save_problem import SaveProblem

_Flags = npt.NDArray[np.bool_]

_LOWER = 1e-9  # than the line between two vertices: another one, not rounding
_LARGEST_COST = 1e3  # of the solver's numbers: it is exact to 1e-7


def save_hull(problem: SaveProblem) -> _Flags:
    """What to save at the vertices of the hull.

    Args:
        problem: The groups.

    Returns:
        Flags, shape (vertices, groups), the most bytes first; no vertices if there is
        no solution.
    """
    program = _Program(problem)
    smallest, fastest = program.best((1.0, 0.0)), program.best((0.0, 1.0))
    if smallest is None or fastest is None:
        return np.zeros((0, problem.num_groups), dtype=bool)
    vertices, pending = [fastest], [(fastest, smallest)]
    while pending:
        fast, small = pending.pop()
        weights = (small.ms - fast.ms, fast.nbytes - small.nbytes)
        if min(weights) > 0.0:
            between = program.best(weights)
            line = fast.cost(weights) * (1.0 - _LOWER)
            if between is not None and between.cost(weights) < line:
                pending += [(between, small), (fast, between)]
                continue
        vertices.append(small)
    return np.array([vertex.saved for vertex in vertices])


class _Vertex(NamedTuple):
    nbytes: float
    ms: float
    saved: _Flags

    def cost(self, weights: tuple[float, float]) -> float:
        return weights[0] * self.nbytes + weights[1] * self.ms


class _Program:
    """The linear program of a problem, for any weights of bytes and time."""

    def __init__(self, problem: SaveProblem) -> None:
        size = problem.num_groups
        self._costs = np.array([problem.runtime_ms, problem.saved_bytes], np.float64)
        most = np.ones((2, size))  # of e_g and of s_g
        most[0, list(problem.pinned)] = most[1, list(problem.unsavable)] = 0.0
        rows: list[tuple[tuple[int, float], ...]] = []
        least: list[float] = []
        for g in range(size):
            if g in problem.needed:
                rows.append(((size + g, 1.0), (g, 1.0)))
                least.append(1.0)
            for h in set(problem.inputs[g]):
                rows.append(((size + h, 1.0), (h, 1.0), (g, -1.0)))
                least.append(0.0)
        self._program = linear.Program(most.ravel(), rows, np.array(least))

    def best(self, weights: tuple[float, float]) -> _Vertex | None:
        """What to save at the least weighted sum of bytes and time; None if nothing is.

        Args:
            weights: Of a byte and of a millisecond.
        """
        costs = self._costs * np.array(weights[::-1])[:, None]
        costs *= _LARGEST_COST / (costs.max() or 1.0)
        values = self._program.best(costs.ravel())
        if values is None:
            return None
        is_chosen = values.reshape(costs.shape) > 0.5
        ms, nbytes = (self._costs * is_chosen).sum(axis=1).tolist()
        return _Vertex(nbytes, ms, is_chosen[1])
