"""The best choice of units and recomputation at one sharding degree, and the least.

The *predicted* peak is the MILP's, the *simulated* one that of `RankSimulator`, byte
for byte; the budget caps the second. Where they differ, the rows of the MILP move as in
`planning.choosing`, and the fastest choice that fits is kept throughout. Times are told
apart likewise: the MILP's are linear, and of two choices that fit the one is faster
whose step is, played event by event.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autosac.errors import ArgumentError, UnsupportedError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.formulating import ParallelFormulation
from autosac.parallel.sharding import Sharding
from autosac.solvers import fsdp
from autosac.solvers.fsdp import FsdpChoice, FsdpProblem, FsdpSolution, step_time
from autosac.solvers.fsdp.step_time import StepTime
from autosac.solving.corrections import Rows
from autosac.solving.solve_options import SolveOptions
from autosac.step.tape import IntArray
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_ROUNDS = 6  # of moving the rows
_NEAR = 2**-10  # of the budget: rows this close to each other give the same plan
_SLACK_SHARE = 0.01  # of the budget: more than that overstated is worth a solve


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedChoice:
    """A choice at one sharding degree.

    Attributes:
        choice: As the MILP has it,
        sharding: its FSDP units,
        chosen: and its AC units.
        peak_bytes: Simulated peak of the first rank, which is the highest;
        late_bytes: what slow threads of gloo may add to it,
        room_bytes: and what the steps that come may, where sizes vary.
        step: Step time, played event by event.
        milp_ms: As the MILP sees it,
        bound_ms: and its bound, 0 before a search gave it one.
    """

    choice: FsdpChoice
    sharding: Sharding
    chosen: Mapping[Unit, Policy]
    peak_bytes: int
    late_bytes: int
    room_bytes: int
    step: StepTime
    milp_ms: float
    bound_ms: float = 0.0

    @property
    def highest_peak_bytes(self) -> int:
        """Peak if threads are slow and sizes vary, which the budget caps."""
        return self.peak_bytes + self.late_bytes + self.room_bytes

    @property
    def times(self) -> tuple[float, float]:
        """Sort key of choices: the step time as played, then as the MILP sees it."""
        return self.step.total_ms, self.milp_ms


class Degree:
    """A step at one sharding degree; keeps every choice that it simulated.

    Args:
        form: The step.
        spec: The GPUs, all of which take part.
        degree: Ranks over which parameters are sharded.
        plain: The same without far memory; None if this one uses none.

    Attributes:
        problem: The MILP, whatever the budget.
    """

    def __init__(
        self,
        form: ParallelFormulation,
        spec: ClusterSpec,
        degree: int,
        plain: Degree | None = None,
    ) -> None:
        self.form, self.spec, self.degree = form, spec, degree
        self._plain = plain
        self.problem = form.problem(spec, degree, 0)
        self._check_given()
        self._known: dict[FsdpChoice, SimulatedChoice] = {}
        self._least_of: set[SolveOptions] = set()  # with which it was looked for

    @cached_property
    def rules_by_time(self) -> tuple[tuple[float, FsdpChoice], ...]:
        """Rules of thumb with their step times, fastest first, fitting or not."""
        timed = [
            (step_time.simulate(fsdp.schedule(self.problem, choice)).total_ms, choice)
            for choice in fsdp.by_hand(self.problem, fixed_units=self.form.fixed_units)
        ]
        return tuple(sorted(timed, key=lambda pair: pair[0]))

    def _check_given(self) -> None:
        """Refuse FSDP units that FSDP2 does not take.

        Raises:
            ArgumentError: Says why.
        """
        given = self.form.fixed_units
        if given is None:
            return
        plain = fsdp.plain(self.problem, {0, *given})
        if broken := fsdp.broken_rules(self.problem, plain):
            raise ArgumentError(f"`fsdp_units` cannot all be FSDP units: {broken[0]}")

    def simulated(self, choice: FsdpChoice) -> SimulatedChoice:
        """Memory and time of a choice."""
        if choice not in self._known:
            replicas = self.spec.num_gpus // self.degree
            sharding = self.form.sharding(choice, self.degree, replicas)
            chosen = self.form.policies(choice)
            times = fsdp.schedule(self.problem, choice)
            self._known[choice] = SimulatedChoice(
                choice=choice,
                sharding=sharding,
                chosen=chosen,
                peak_bytes=self.form.ranks.peak_bytes(sharding, chosen),
                late_bytes=self.form.ranks.late_bytes(sharding),
                room_bytes=self.form.room_bytes(chosen),
                step=step_time.simulate(times),
                milp_ms=step_time.linear(times).total_ms,
            )
        return self._known[choice]

    def fastest_known(self, budget_bytes: int) -> SimulatedChoice | None:
        """The fastest choice so far that fits a budget."""
        if self._plain is not None:
            self._add_of_plain(self._plain.fastest_known(budget_bytes))
        fitting = (
            choice
            for choice in self._known.values()
            if choice.highest_peak_bytes <= budget_bytes
        )
        return min(fitting, key=lambda choice: choice.times, default=None)

    def lowest(self, options: SolveOptions) -> SimulatedChoice:
        """The choice of least peak; its time has no bound.

        Raises:
            UnsupportedError: No choice of units keeps the rules of FSDP2.
        """
        if not self.has_lowest(options):
            solution = fsdp.lowest_peak(
                replace(self.problem, left_out=self.form.early),
                backend=options.backend,
                time_limit_s=options.time_limit_s,
                relative_gap=options.relative_gap,
                fixed_units=self.form.fixed_units,
            )
            if solution.choice is None:
                raise UnsupportedError(
                    "FSDP2 wants the parameters of a unit to be of one type, and no"
                    " choice of units of this model gives it that. Convert the model to"
                    " one type."
                )
            for choice in (solution.choice, *self._with_fewer_units(solution.choice)):
                self.simulated(choice)
            if self._plain is not None:
                self._add_of_plain(self._plain.lowest(options))
            self._least_of.add(options)
        return min(self._known.values(), key=lambda choice: choice.highest_peak_bytes)

    def _with_fewer_units(self, choice: FsdpChoice) -> Iterator[FsdpChoice]:
        """A choice without its units of one kind, or without those that are like none.

        The MILP does not know that the last gradient of a unit outlives the others:
        among more parameters it may be a smaller one.
        """
        is_held = self.form.ranks.how.holds_last_gradient
        if self.form.fixed_units is not None or not is_held:
            return
        kinds = [module.kind for module in self.problem.modules]
        for kind in dict.fromkeys(kinds[1:]):
            flags = [i == 0 or own != kind for i, own in enumerate(kinds)]
            fewer = replace(
                choice,
                units=tuple(map(min, choice.units, flags)),
                reshard=tuple(map(min, choice.reshard, flags)),
            )
            if fewer != choice and not fsdp.broken_rules(self.problem, fewer):
                yield fewer

    def _add_of_plain(self, known: SimulatedChoice | None) -> None:
        """Know a choice without far memory as well."""
        if self._plain is not None and known is not None:
            self.simulated(self.form.of_plain(self._plain.form, known.choice))

    def has_lowest(self, options: SolveOptions) -> bool:
        """Whether the least peak was looked for, so that nothing is sought below it."""
        return options in self._least_of

    def lower_bound(
        self, budget_bytes: int, options: SolveOptions, before: Search
    ) -> float | None:
        """A time that no step takes less than, as the MILP sees it.

        Its memory is taken to be overstated by as much as is not worth a solve.

        Args:
            budget_bytes: Cap on the simulated peak.
            options: How to solve.
            before: A search at another degree, whose rows are capped.

        Returns:
            The bound in ms, None if nothing fits.
        """
        more_bytes = int(_SLACK_SHARE * budget_bytes)
        return fsdp.lower_bound(
            _raised(
                self.problem.with_budget(budget_bytes + more_bytes), before.lowered
            ),
            backend=options.backend,
            rows=before.rows,
        )

    def search(
        self,
        budget_bytes: int,
        options: SolveOptions,
        *,
        before: Search | None = None,
    ) -> Search:
        """Look for the fastest choice that fits a budget.

        Args:
            budget_bytes: Cap on the simulated peak.
            options: How to solve.
            before: A search at another degree, whose rows this one begins with.
        """
        search = Search(self, budget_bytes, options)
        if before is not None:
            search.rows, search.raised = before.rows, before.lowered
        search.run()
        return search


@dataclass(slots=True)
class Search:
    """The correction loop for one budget at one sharding degree.

    Attributes:
        at: The step at that degree.
        budget_bytes: Cap on the simulated peak.
        options: How to solve.
        best: The fastest choice so far that fits.
        bound_ms: Of the solve with the lowest rows.
        raised: By how much the rows of the last solve were raised; at first, to begin
            with.
        rows: Positions that bound.
    """

    at: Degree
    budget_bytes: int
    options: SolveOptions
    best: SimulatedChoice | None = None
    bound_ms: float = 0.0
    raised: IntArray | None = None
    rows: frozenset[int] = frozenset()
    _breaking_ms: float = 0.0  # of the last choice that broke the budget
    _moves: Rows = field(init=False)

    def __post_init__(self) -> None:
        self._moves = Rows(_NEAR * self.budget_bytes)

    @property
    def lowered(self) -> IntArray:
        """Changes of the last solve's rows, only where they were lowered."""
        if self.raised is None:
            return self.at.form.no_bytes()
        return np.minimum(self.raised, 0)

    def run(self) -> None:
        """Move the rows until nothing is left to gain."""
        self.best = self.at.fastest_known(self.budget_bytes)
        if self.best is None and self.at.has_lowest(self.options):
            return
        raised = self.at.form.no_bytes() if self.raised is None else self.raised
        lowest = int(raised.min()) + 1
        next_rows: IntArray | None = raised
        for _ in range(_ROUNDS):
            if next_rows is None:
                break
            self.raised = raised = next_rows
            solution = self._solve(raised)
            if int(raised.min()) < lowest:  # its bound holds for all others
                lowest, self.bound_ms = int(raised.min()), solution.bound_ms or 0.0
            next_rows = self._next_rows(raised, solution)
        if self.best is None:
            self._offer(self.at.lowest(self.options))
        for total_ms, choice in self.at.rules_by_time:
            if self.best is not None and self.best.step.total_ms <= total_ms:
                break
            self._offer(self.at.simulated(choice))
        if self.best is not None:
            self.best = self.with_bound(self.best)

    def with_bound(self, choice: SimulatedChoice) -> SimulatedChoice:
        """A choice that fits, with the bound of the solves.

        Where these found none, at budgets that hardly anything fits, it is that of the
        relaxation; and where that finds nothing either, the compute of the step.
        """
        bound_ms = self.bound_ms
        if not bound_ms:
            relaxed_ms = self.at.lower_bound(self.budget_bytes, self.options, self)
            bound_ms = relaxed_ms or sum(self.at.problem.compute_ms)
        return replace(choice, bound_ms=bound_ms)

    def _solve(self, raised: IntArray) -> FsdpSolution:
        problem = self.at.problem.with_budget(self.budget_bytes)
        solution = fsdp.solve(
            _raised(problem, raised),
            backend=self.options.backend,
            time_limit_s=self.options.time_limit_s,
            relative_gap=self.options.relative_gap,
            fixed_units=self.at.form.fixed_units,
            rows=self.rows,
        )
        self.rows = solution.rows
        return solution

    def _next_rows(self, raised: IntArray, solution: FsdpSolution) -> IntArray | None:
        """What to add to the rows in the next solve; None if nothing is to be gained.

        Raises no row further than the last choice asks for, and where the budget was
        broken, each at least so far: no choice comes twice.
        """
        moves = self._moves
        if solution.choice is None:
            moves.enough = raised
            if moves.too_low is None and not self._is_settled():
                # The MILP may see more memory than there is.
                return self._rows_of_fitting(raised)
        else:
            simulated = self.at.simulated(solution.choice)
            predicted = fsdp.live(self.at.problem, simulated.choice)
            off = self.at.form.understated_bytes(
                simulated.sharding, simulated.chosen, predicted
            )
            if simulated.highest_peak_bytes > self.budget_bytes:
                self._breaking_ms = simulated.milp_ms
                kept = (self.budget_bytes - predicted).astype(np.int64)
                higher = moves.after_breaking(raised, off, kept)
                if moves.enough is None:
                    return higher
            else:
                self._offer(simulated)
                assert solution.predicted_peak_bytes is not None
                spare = solution.predicted_peak_bytes - simulated.highest_peak_bytes
                overstated = spare > _SLACK_SHARE * self.budget_bytes
                # Where nothing is recomputed, hardly anything is left to gain.
                overstated = overstated and bool(simulated.chosen)
                lower = moves.after_fitting(raised, off, overstated=overstated)
                if moves.too_low is None:
                    return lower
        return None if self._is_settled() else moves.between()

    def _rows_of_fitting(self, raised: IntArray) -> IntArray | None:
        """Lower rows, which a choice that fits keeps; None if none fits.

        It is the best so far, or that of least peak.
        """
        fitting = self.best or self.at.lowest(self.options)
        if fitting.highest_peak_bytes > self.budget_bytes:
            return None
        self._offer(fitting)
        off = self.at.form.understated_bytes(
            fitting.sharding, fitting.chosen, fsdp.live(self.at.problem, fitting.choice)
        )
        return self._moves.after_fitting(raised, off, overstated=True)

    def _offer(self, choice: SimulatedChoice) -> None:
        """Keep a choice if it fits and none is known that is faster."""
        if choice.highest_peak_bytes > self.budget_bytes:
            return
        if self.best is None or choice.times < self.best.times:
            self.best = choice

    def _is_settled(self) -> bool:
        """Whether what is left to gain is within the gap that was asked for."""
        if self.best is None:
            return False
        least_ms = max(self.bound_ms, self._breaking_ms)
        gap_ms = self.options.relative_gap * self.best.milp_ms
        return self.best.milp_ms - least_ms <= gap_ms


def _raised(problem: FsdpProblem, added_bytes: IntArray) -> FsdpProblem:
    return problem.raised(added_bytes.tolist()) if added_bytes.any() else problem


class ParallelChooser:
    """Finds choices for one step on any cluster; keeps what it found.

    Args:
        form: The step.
        plain: Of the same step without far memory: nothing that it chooses beats what
            is chosen here. None if this one uses none.
    """

    def __init__(
        self, form: ParallelFormulation, plain: ParallelChooser | None = None
    ) -> None:
        self.form, self.plain = form, plain
        self._degrees: dict[Hashable, Degree] = {}

    def at(self, spec: ClusterSpec, degree: int) -> Degree:
        """The step at one sharding degree."""
        key = self._key(spec, degree)
        if key not in self._degrees:
            plain = None if self.plain is None else self.plain.at(spec, degree)
            self._degrees[key] = Degree(self.form, spec, degree, plain)
        return self._degrees[key]

    def fastest_known(
        self, spec: ClusterSpec, degree: int, budget_bytes: int
    ) -> SimulatedChoice | None:
        """The fastest choice so far that fits a budget; None if there is none."""
        sharded_step = self._degrees.get(self._key(spec, degree))
        if sharded_step is not None:
            return sharded_step.fastest_known(budget_bytes)
        if self.plain is None:
            return None
        return self.plain.fastest_known(spec, degree, budget_bytes)

    @staticmethod
    def _key(spec: ClusterSpec, degree: int) -> Hashable:
        """What tells degrees apart: the cluster's links and shape, not its GPUs."""
        return spec.fabric, spec.gpus_per_node, spec.num_nodes, degree
