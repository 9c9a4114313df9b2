"""The best choice of units and recomputation at one sharding degree, and the least.

What the MILP chooses is simulated, memory exactly and time event by event, and solved
again with another cap if the MILP's memory model was off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autosac.candidates.policies import Policy
from autosac.candidates.units import Unit
from autosac.errors import SolverError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.formulating import ParallelFormulation
from autosac.parallel.sharding import Sharding
from solvers import fsdp
from solvers._pulp import Backend
from solvers.fsdp import FsdpChoice, FsdpProblem, FsdpSolution
from solvers.solution import Termination
from solvers.step_time import StepTime

_ATTEMPTS = 6  # to correct the MILP's memory model by simulation
_SLACK_SHARE = 0.01  # of the budget: more than that overstated is worth a solve
RELATIVE_GAP = 5e-3  # of a plan, unless the caller says otherwise
TIME_LIMIT_S = 20.0  # of a solve, unless the caller says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Solving:
    """How MILPs are solved; see `plan_parallel`."""

    backend: Backend = "highs"
    relative_gap: float = RELATIVE_GAP
    time_limit_s: float | None = TIME_LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is best at one sharding degree.

    Attributes:
        choice: As the MILP has it,
        sharding: its FSDP units,
        chosen: and its AC units.
        peak_bytes: Simulated peak of the first rank, which is the highest,
        late_bytes: and what slow threads of gloo may add to it.
        step: Step time, played event by event.
        milp_ms: As the MILP sees it,
        bound_ms: and its bound.
    """

    choice: FsdpChoice
    sharding: Sharding
    chosen: Mapping[Unit, Policy]
    peak_bytes: int
    late_bytes: int
    step: StepTime
    milp_ms: float
    bound_ms: float

    @property
    def highest_peak_bytes(self) -> int:
        """Peak if threads are slow, which the budget caps."""
        return self.peak_bytes + self.late_bytes


def best_at(
    form: ParallelFormulation,
    spec: ClusterSpec,
    degree: int,
    budget_bytes: int,
    how: Solving,
) -> Found:
    """The best choice at one sharding degree; that of least peak if none fits."""
    problem = form.problem(spec, degree, budget_bytes)
    best: Found | None = None
    target, first_bound_ms = budget_bytes, 0.0
    fixed_units: list[int] | None = None
    for attempt in range(_ATTEMPTS):
        solution = fsdp.solve(
            problem.with_budget(target),
            backend=how.backend,
            time_limit_s=how.time_limit_s,
            relative_gap=how.relative_gap,
            fixed_units=fixed_units,
        )
        if attempt == 0:
            first_bound_ms = solution.bound_ms or 0.0
        if solution.choice is None:
            if solution.termination is Termination.INFEASIBLE or fixed_units:
                break
            # For want of time: the units of the least peak leave less to decide.
            units = lowest_at(form, problem, spec, degree, how).choice.units
            fixed_units = [index for index, unit in enumerate(units) if unit and index]
            continue
        found = _simulated(form, problem, spec, degree, solution)
        # What a tighter cap or fixed units left out counts as well.
        if target < budget_bytes or fixed_units:
            found = replace(found, bound_ms=min(first_bound_ms, found.milp_ms))
        spare = budget_bytes - found.highest_peak_bytes
        if spare < 0:
            if best is not None:
                break
            target += spare
            continue
        if best is None or found.step.total_ms < best.step.total_ms:
            best = found
        # Where the MILP saw more memory than there is, some of the cap is left unused.
        seen_bytes = solution.predicted_peak_bytes or 0
        overstated = seen_bytes - found.highest_peak_bytes
        if overstated < _SLACK_SHARE * budget_bytes or not found.chosen:
            break
        target = max(target, budget_bytes) + overstated
    return best or lowest_at(form, problem, spec, degree, how)


def lowest_at(
    form: ParallelFormulation,
    problem: FsdpProblem,
    spec: ClusterSpec,
    degree: int,
    how: Solving,
) -> Found:
    """The choice of least peak at one sharding degree; its time has no bound.

    Raises:
        SolverError: None was found within the time limit.
    """
    # Without it nothing can be said at all, so it may take longer.
    limit_s = None if how.time_limit_s is None else 3 * how.time_limit_s
    solution = fsdp.lowest_peak(
        problem,
        backend=how.backend,
        time_limit_s=limit_s,
        relative_gap=how.relative_gap,
    )
    if solution.choice is None:  # without a cap, only for want of time
        raise SolverError(
            f"No choice of least peak was found in {limit_s} s; raise `time_limit_s`."
        )
    found = _simulated(form, problem, spec, degree, solution)
    return replace(found, bound_ms=0.0)


def _simulated(
    form: ParallelFormulation,
    problem: FsdpProblem,
    spec: ClusterSpec,
    degree: int,
    solution: FsdpSolution,
) -> Found:
    assert solution.choice is not None and solution.simulated is not None
    assert solution.objective_ms is not None
    sharding = form.sharding(solution.choice, degree, spec.num_gpus // degree)
    chosen = form.policies(solution.choice)
    return Found(
        choice=solution.choice,
        sharding=sharding,
        chosen=chosen,
        peak_bytes=form.ranks.peak_bytes(sharding, chosen),
        late_bytes=form.ranks.late_bytes(sharding),
        step=solution.simulated,
        milp_ms=solution.objective_ms,
        bound_ms=solution.bound_ms or 0.0,
    )


def fewest_gpus(
    form: ParallelFormulation,
    spec: ClusterSpec,
    budget_bytes: int,
    *,
    most_gpus: int = 65_536,
    guess: Found | None = None,
    how: Solving | None = None,
) -> int | None:
    """Fewest GPUs whose fully sharded step fits: see `min_gpus`.

    Peaks fall as GPUs are added, until padding outgrows what is left of a parameter.
    So sizes are doubled until a choice of least peak (the guess) fits by simulation,
    and then halved; the choice of least peak on fewer GPUs says whether to go on. One
    GPU alone is another matter: it gathers nothing and needs no buffers for that.
    """
    how = how or Solving()
    sizes = [n for n in range(1, spec.gpus_per_node) if n <= most_gpus]
    sizes += range(spec.gpus_per_node, most_gpus + 1, spec.gpus_per_node)
    if not sizes:
        raise ValueError(f"`most_gpus` must be at least 1, got {most_gpus}.")
    if form.resident_bytes(1) <= budget_bytes:
        alone = _lowest_on(form, spec, 1, how)
        if alone.highest_peak_bytes <= budget_bytes:
            return 1
    some = min(spec.gpus_per_node, most_gpus)
    found = guess or _lowest_on(form, spec, some, how)

    def highest_peak_bytes(place: int) -> int:
        sharding = replace(
            found.sharding, shard_degree=sizes[place], replicate_degree=1
        )
        peak_bytes = form.ranks.peak_bytes(sharding, found.chosen)
        return peak_bytes + form.ranks.late_bytes(sharding)

    def fits(place: int) -> bool:
        return highest_peak_bytes(place) <= budget_bytes

    doubled = [2**k - 1 for k in range(len(sizes).bit_length())]
    place = next(filter(fits, doubled), None)
    if place is None:
        place = min(doubled, key=highest_peak_bytes)
        found = _lowest_on(form, spec, sizes[place], how)
        if not fits(place):
            return None
    place = bisect_left(range(place), True, key=fits)
    while place:
        found = _lowest_on(form, spec, sizes[place - 1], how)
        if not fits(place - 1):
            break
        place = bisect_left(range(place - 1), True, key=fits)
    return sizes[place]


def _lowest_on(
    form: ParallelFormulation, spec: ClusterSpec, num_gpus: int, how: Solving
) -> Found:
    cluster = spec.resized(num_gpus)
    problem = form.problem(cluster, num_gpus, 1)
    return lowest_at(form, problem, cluster, num_gpus, how)
