"""Plans from module statistics alone: what PyTorch's `sac_milp` answers, proven.

A policy says what share of each module to recompute. There is neither tape nor model
behind it: its peak is that of the MILP's memory model, not a simulated one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from autosac.errors import ArgumentError, InfeasibleBudgetError
from autosac.quantities import format_bytes, format_ms, parse_bytes, share_above
from autosac.solvers import sac
from autosac.solvers.milp.solution import Backend
from autosac.solving.solve_options import read_segments
from autosac.solving.statistics_problem import StatisticsProblem, formulate
from autosac.statistics.by_module import Statistics
from autosac.statistics.trade_offs import refitted
from autosac.step.marks import Marks, marked
from autosac.summaries import Summarized, Summary, Table, equal_rows_once

_MOST_SOLVES = 4  # with less and less memory, a few bytes each
_MOST_WORK = 50_000_000  # of each: seconds, see `solvers.milp.pulp_runner.run`


@dataclass(frozen=True, kw_only=True, repr=False)
class StatisticsPlan(Summarized):
    """Which modules are AC units, and what share of each is recomputed.

    Attributes:
        policy: FQN of each AC unit -> share (0 to 1) of its activation memory that is
            recomputed instead of saved.
        discarded: The same as shares of `ModuleStatistics.sac_memory`: what PyTorch's
            `sac_milp` returns, and of which its
            ``get_optimal_checkpointing_policy_per_module`` takes the rest to 1.
        budget_bytes: The cap that was asked for.
        peak_bytes: Most memory of a rank in backward, as the MILP counts it.
        baseline_peak_bytes: The same if nothing is recomputed.
        recompute_ms: Time a step spends on recomputation.
        baseline_ms: Time of the step without it.
        bound_ms: Proven lower bound on `recompute_ms` on these statistics.
        world_size: Ranks that share parameters and gradients.
    """

    policy: dict[str, float]
    discarded: dict[str, float]
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    recompute_ms: float
    baseline_ms: float
    bound_ms: float
    world_size: int

    @property
    def step_ms(self) -> float:
        """Time of a step, recomputation included."""
        return self.baseline_ms + self.recompute_ms

    @property
    def optimality_gap(self) -> float:
        """``(recompute_ms - bound_ms) / recompute_ms``, 0.0 without recomputation."""
        return share_above(self.recompute_ms, self.bound_ms)

    def summary(self) -> Summary:
        """Budget, peak, time, and what is recomputed of each AC unit."""
        facts = (
            ("budget", format_bytes(self.budget_bytes)),
            (
                "peak",
                f"{format_bytes(self.peak_bytes)} by the statistics,"
                f" {format_bytes(self.baseline_peak_bytes)} without the plan",
            ),
            (
                "time",
                f"{format_ms(self.step_ms)} a step, {format_ms(self.recompute_ms)} of"
                f" it recomputation (gap {self.optimality_gap:.1%})",
            ),
        )
        rows = [(fqn, f"{ratio:.1%}") for fqn, ratio in self.policy.items()]
        units = Table(heads=("AC unit", "recomputed"), rows=equal_rows_once(rows))
        return Summary(title="Plan by statistics", facts=facts, tables=(units,))


def plan_statistics(
    statistics: Statistics,
    memory_budget: int | str,
    *,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    world_size: int = 1,
    segments: int | None = None,
    backend: Backend = "highs",
    relative_gap: float = 0.0,
    time_limit_s: float | None = None,
) -> StatisticsPlan:
    """Find the least recompute time under a budget by statistics: see `autosac.plan`.

    Raises:
        InfeasibleBudgetError: No plan fits.
        ArgumentError: An argument cannot be meant.
    """
    if not isinstance(world_size, Integral) or world_size < 1:
        raise ArgumentError(
            f"`world_size` must be a whole number of ranks, 1 or more, got"
            f" {world_size!r}."
        )
    budget_bytes = parse_bytes(memory_budget)
    if segments is not None:
        statistics = refitted(statistics, read_segments(segments))
    tree = statistics.tree
    form = formulate(
        statistics,
        budget_bytes,
        allowed=None if ac_units is None else marked(ac_units, tree, name="ac_units"),
        fsdp_units=()
        if fsdp_units is None
        else marked(fsdp_units, tree, name="fsdp_units"),
        world_size=int(world_size),
    )
    solution = _solved(
        form.problem,
        backend=backend,
        time_limit_s=time_limit_s,
        relative_gap=relative_gap,
    )
    if solution is None:
        raise _infeasible(form)
    root = statistics.modules[0]
    ratios, freed = _ratios(form, solution)
    assert solution.recompute_ms is not None
    assert solution.predicted_peak_bytes is not None
    return StatisticsPlan(
        policy={
            fqn: freed[fqn] / max(1, statistics[fqn].activation_bytes or 0)
            for fqn in ratios
        },
        discarded=ratios,
        budget_bytes=budget_bytes,
        peak_bytes=solution.predicted_peak_bytes,
        baseline_peak_bytes=max(form.problem.base_bytes),
        recompute_ms=solution.recompute_ms,
        baseline_ms=(root.forward_ms or 0.0) + (root.backward_ms or 0.0),
        bound_ms=solution.bound_ms or 0.0,
        world_size=int(world_size),
    )


def _solved(problem: sac.SacProblem, **options: Any) -> sac.SacSolution | None:
    """The cheapest ratios whose memory is within the budget to the byte, or None.

    A solver keeps rows within a tolerance of some bytes: what it exceeds the budget by
    is taken off the budget. Where that leaves nothing, or no time is left, whole points
    of least peak are a plan, if they fit.
    """
    cap_bytes, bound_ms = problem.budget_bytes, 0.0
    work = _MOST_WORK if options["time_limit_s"] is None else None
    for _ in range(_MOST_SOLVES):
        capped = replace(problem, budget_bytes=cap_bytes)
        solution = sac.solve(capped, integral=False, most_work=work, **options)
        if cap_bytes == problem.budget_bytes:
            bound_ms = solution.bound_ms or 0.0
        if solution.predicted_peak_bytes is None:
            break
        excess = solution.predicted_peak_bytes - problem.budget_bytes
        if excess <= 0:
            return replace(solution, bound_ms=bound_ms)
        cap_bytes -= excess
    peak_bytes, lowest = sac.lowest_peak(problem)
    if peak_bytes > problem.budget_bytes:
        return None
    return replace(lowest, bound_ms=bound_ms)


def _ratios(
    form: StatisticsProblem, solution: sac.SacSolution
) -> tuple[dict[str, float], dict[str, float]]:
    """What each AC unit discards, as a share of its `sac_memory` and in bytes."""
    assert solution.weights is not None and solution.ratios is not None
    ratios: dict[str, float] = {}
    freed: dict[str, float] = {}
    for unit, shares, ratio in zip(
        form.problem.units, solution.weights, solution.ratios, strict=True
    ):
        own = math.fsum(
            share * point.freed_bytes
            for share, point in zip(shares, unit.points, strict=True)
        )
        if own > 0.0:
            ratios[unit.fqn], freed[unit.fqn] = ratio, own
    return ratios, freed


def _infeasible(form: StatisticsProblem) -> InfeasibleBudgetError:
    """Say what the least peak is, and where."""
    problem = form.problem
    lowest_bytes, solution = sac.lowest_peak(problem)
    assert solution.weights is not None
    live = sac.live_bytes(problem, solution.weights)
    place = max(range(len(live)), key=live.__getitem__)
    parameters, gradients = form.shared_bytes[place]
    composition = {
        "parameter": parameters,
        "gradient": gradients,
        "activation": lowest_bytes - parameters - gradients,
    }
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={problem.budget_bytes}"
        f" ({format_bytes(problem.budget_bytes)}) by these statistics: the lowest peak"
        f" is {lowest_bytes} bytes ({format_bytes(lowest_bytes)}), in backward of"
        f" {form.rows[place].fqn or 'the model itself'}. Raise the budget to that, or"
        " share parameters by more ranks (`world_size`).",
        budget_bytes=problem.budget_bytes,
        lowest_peak_bytes=lowest_bytes,
        composition=composition,
    )
