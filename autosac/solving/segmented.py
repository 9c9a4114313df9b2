"""Units and ratios on curves of few segments, for an exact step that rounds them.

The piecewise-linear MILP mixes neighbouring breakpoints, so that each ratio lies on a
segment of its unit's fitted curve. What is tried is a mixture: the known point that
frees as much, and what it really does to memory. Rows that fell short are raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from autosac.solvers import sac
from autosac.solving.formulation import Fitted, Formulation
from autosac.solving.rules_of_thumb import FloatArray
from autosac.solving.solve_options import SolveOptions
from autosac.step.tape import IntArray

_ROUNDS = 3  # of raising the rows of one fit
_MOST_WORK = 1_000_000  # of one solve: see `solvers.milp.pulp_runner.run`

# Tries a mixture of exact points, by unit; says by how much to raise each position, or
# None if it fits.
Try = Callable[[Mapping[int, FloatArray]], IntArray | None]


def search_segments(
    formulation: Formulation, budget_bytes: int, options: SolveOptions, attempt: Try
) -> None:
    """Try the best mixtures on curves of 1, 2, ... segments, as many as are asked for.

    All smaller numbers are tried too, so that no plan of more segments costs more.

    Args:
        formulation: The exact points.
        budget_bytes: Cap on the peak.
        options: How to solve; says the number of segments.
        attempt: Told each mixture.
    """
    assert options.segments is not None
    before: Fitted | None = None
    for num_segments in range(1, options.segments + 1):
        fitted = formulation.fitted(num_segments)
        if before is not None and fitted.problem == before.problem:
            break  # no curve has more
        _search(formulation, fitted, budget_bytes, options, attempt)
        before = fitted


def _search(
    formulation: Formulation,
    fitted: Fitted,
    budget_bytes: int,
    options: SolveOptions,
    attempt: Try,
) -> None:
    nothing = np.zeros(len(formulation.base_bytes), dtype=np.int64)
    base = np.array(formulation.base_bytes)
    base += formulation.with_host(nothing, budget_bytes)
    raised = nothing
    for _ in range(_ROUNDS):
        solution = sac.solve(
            replace(
                fitted.problem,
                base_bytes=tuple((base + raised).tolist()),
                budget_bytes=budget_bytes,
            ),
            integral=False,
            backend=options.backend,
            time_limit_s=options.time_limit_s,
            most_work=_MOST_WORK,
            relative_gap=options.relative_gap,
        )
        if solution.weights is None:
            return
        short = attempt(_mixture(formulation, fitted, solution.weights))
        if short is None or (np.maximum(raised, short) == raised).all():
            return
        raised = np.maximum(raised, short)


def _mixture(
    formulation: Formulation, fitted: Fitted, weights: tuple[tuple[float, ...], ...]
) -> dict[int, FloatArray]:
    """Shares of the exact points, of units under AC."""
    mixture = {}
    for u, (kept, shares) in enumerate(zip(fitted.kept, weights, strict=True)):
        if any(shares):
            mixture[u] = np.zeros(len(formulation.solver_units[u].points))
            mixture[u][list(kept)] = shares
    return mixture
