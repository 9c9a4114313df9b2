"""From module statistics to the piecewise-linear MILP, as PyTorch states it.

With r_i the share of its `sac_memory` A_i that module i discards and S_i what it saves
without AC, module i under AC frees d_i = S_i - (1 - r_i) A_i from the end of its
forward on. When backward comes to module i the live memory is

    T_i + G_i - sum_j d_j + (P + Q_i) / W      over the modules j that end before i

with T_i forward results alive when i ends (`total_activation_bytes`), G_i what its
backward adds (`backward_temporary_bytes`), P parameters, Q_i gradients of parameters
so far (`total_gradient_bytes`), W ranks that share these. No module lies inside
another one under AC: row i of the ancestor-descendant matrix says which do, and as an
ancestor ends after all that lies inside it, its row of memory counts what these free.

Source: PyTorch 2.15, torch/distributed/_tools/sac_ilp.py, `sac_milp`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autosac.solvers import sac
from autosac.solvers.curves.lines import highest
from autosac.statistics.by_module import ModuleStatistics, Statistics


@dataclass(frozen=True, kw_only=True, eq=False)
class StatisticsProblem:
    """The MILP of statistics, and what its numbers are of.

    Attributes:
        problem: The MILP; its ratios are shares of `sac_memory`.
        modules: The module of each of its units.
        rows: The module of each of its positions.
        shared_bytes: Parameters and gradients of a rank at each position.
    """

    problem: sac.SacProblem
    modules: tuple[ModuleStatistics, ...]
    rows: tuple[ModuleStatistics, ...]
    shared_bytes: tuple[tuple[int, int], ...]


def formulate(
    statistics: Statistics,
    budget_bytes: int,
    *,
    allowed: Collection[int] | None = None,
    fsdp_units: Collection[int] = (),
    world_size: int = 1,
) -> StatisticsProblem:
    """Work out the MILP's coefficients.

    Args:
        statistics: Of the step.
        budget_bytes: Cap on the memory of a rank.
        allowed: Indices of the modules that may be AC units; None for all.
        fsdp_units: Indices of FSDP units: no module around one may be an AC unit.
        world_size: Ranks that share parameters and gradients.
    """
    rows = [
        statistics[fqn]
        for fqn in statistics.forward_post_order
        if statistics[fqn].total_activation_bytes is not None
    ]
    parameter_bytes = statistics.modules[0].parameter_bytes
    shared = [
        (
            -(-parameter_bytes // world_size),
            -(-(row.total_gradient_bytes or 0) // world_size),
        )
        for row in rows
    ]
    base = [
        (row.total_activation_bytes or 0)
        + (row.backward_temporary_bytes or 0)
        + -(-(parameter_bytes + (row.total_gradient_bytes or 0)) // world_size)
        for row in rows
    ]
    place = {row.fqn: k for k, row in enumerate(rows)}
    barred = _around(statistics, fsdp_units)
    candidates = [
        (i, points)
        for i, module in enumerate(statistics.modules)
        if module.fqn in place
        and i not in barred
        and (allowed is None or i in allowed)
        and len(points := _points(module)) > 1
    ]
    indices = [i for i, _ in candidates]
    parents = _parents(statistics.ad_matrix[np.ix_(indices, indices)])
    units = tuple(
        sac.Unit(
            fqn=statistics.modules[i].fqn,
            parent=parent,
            points=points,
            freed_from=place[statistics.modules[i].fqn] + 1,
            freed_until=len(rows),
            working=(),
        )
        for (i, points), parent in zip(candidates, parents, strict=True)
    )
    return StatisticsProblem(
        problem=sac.SacProblem(
            units=units, base_bytes=tuple(base), budget_bytes=budget_bytes
        ),
        modules=tuple(statistics.modules[i] for i in indices),
        rows=tuple(rows),
        shared_bytes=tuple(shared),
    )


def _around(statistics: Statistics, units: Collection[int]) -> set[int]:
    """Modules around some units."""
    return {
        outer
        for unit in units
        for outer in np.flatnonzero(statistics.ad_matrix[:, unit]).tolist()
        if outer != unit
    }


def _points(module: ModuleStatistics) -> tuple[sac.Breakpoint, ...]:
    """Vertices of a module's lines, from freeing nothing on; none if it cannot."""
    saved = module.activation_bytes
    if module.is_leaf or module.calls != 1 or not saved or not module.n_segments:
        return ()
    candidates = max(module.sac_memory, saved)
    least = (candidates - saved) / candidates
    if module.max_ratio <= least:
        return ()
    by_freed: dict[int, sac.Breakpoint] = {}
    for ratio, share in highest(
        module.slopes, module.intercepts, least, module.max_ratio
    ):
        freed = min(max(0, int(candidates * ratio) - (candidates - saved)), saved)
        point = sac.Breakpoint(
            ratio=ratio, freed_bytes=freed, recompute_ms=share * module.sac_runtime
        )
        by_freed.setdefault(freed, point)
    return tuple(by_freed.values())


def _parents(matrix: npt.NDArray[np.uint8]) -> list[int | None]:
    """Nearest candidate around each: of those around it, the last in pre-order.

    Args:
        matrix: Ancestor-descendant matrix of the candidates.
    """
    around = matrix.astype(bool) & ~np.eye(len(matrix), dtype=bool)
    numbers = np.where(around, np.arange(len(matrix))[:, None], -1)
    nearest = numbers.max(axis=0, initial=-1)
    return [None if n < 0 else int(n) for n in nearest]
