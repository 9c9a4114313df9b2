"""The best sharding degree for a step on a cluster: they are tried one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from autosac.errors import ArgumentError, InfeasibleBudgetError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.fewest import fewest_gpus
from autosac.parallel.followed_plans import rank_facts, rank_signature
from autosac.parallel.plans import Alternative, ParallelPlan, sharded_over
from autosac.parallel.solving import Degree, ParallelChooser, Search, SimulatedChoice
from autosac.planning.choices import policy_ratios
from autosac.planning.spelling import spell_out
from autosac.quantities import format_bytes, format_ms, format_parts, is_whole
from autosac.solving.incumbents import far_bytes
from autosac.solving.solve_options import SolveOptions
from autosac.tracing.collecting import no_collections
from autosac.units import curves

LATE = "held by slow threads of gloo"  # beside the categories of the tape
ROOM = "room for steps of other sizes"


def shard_degrees(spec: ClusterSpec) -> list[int]:
    """Sharding degrees that fit a cluster, most ranks first."""
    total = spec.num_gpus
    degrees = []
    for degree in range(1, total + 1):
        if total % degree == 0:
            try:
                spec.shard_group(degree)
            except ValueError:
                continue
            degrees.append(degree)
    return degrees[::-1]


def read_shard_degrees(degrees: Any, spec: ClusterSpec) -> list[int]:
    """Sharding degrees that a user asks for.

    Raises:
        ArgumentError: There are none, or one does not fit the cluster.
    """
    if not isinstance(degrees, Collection) or not len(degrees):
        raise ArgumentError(
            "`degrees` must be a list of at least one sharding degree, got"
            f" {degrees!r}."
        )
    fitting = shard_degrees(spec)
    for degree in degrees:
        if not is_whole(degree) or degree not in fitting:
            raise ArgumentError(
                f"`degrees` has {degree!r}, which must be one of"
                f" {', '.join(map(str, fitting[::-1]))} on {spec.num_gpus} GPUs in"
                f" nodes of {spec.gpus_per_node}; None tries all of these."
            )
    return [int(degree) for degree in degrees]  # of an array, too


@no_collections()
def make_parallel_plan(
    chooser: ParallelChooser,
    spec: ClusterSpec,
    budget_bytes: int,
    *,
    degrees: Sequence[int] | None = None,
    options: SolveOptions | None = None,
) -> ParallelPlan:
    """Make the parallel plan of a step that is formulated already.

    Where far memory may be used the plan without is made first: this one is no slower.

    Raises:
        InfeasibleBudgetError: No plan fits.
        ValueError: A degree does not fit the cluster.
    """
    if degrees is not None:
        degrees = read_shard_degrees(degrees, spec)
    if chooser.plain is not None:
        with suppress(InfeasibleBudgetError):
            make_parallel_plan(
                chooser.plain, spec, budget_bytes, degrees=degrees, options=options
            )
    race = _Race(chooser, spec, budget_bytes, options or SolveOptions())
    for degree in sorted(set(degrees or shard_degrees(spec)), reverse=True):
        race.enter(degree)
    if race.best is None:
        raise _infeasible(race, sorted(set(degrees or shard_degrees(spec))))
    return _as_plan(race, race.best)


# --- comparing degrees --------------------------------------------------------


class _Race:
    """Sharding degrees under one budget, one after the other.

    Attributes:
        best: The fastest choice so far that fits.
        least: The choice of least peak, as long as nothing fits.
        others: Degrees that lost.
    """

    def __init__(
        self,
        chooser: ParallelChooser,
        spec: ClusterSpec,
        budget_bytes: int,
        options: SolveOptions,
    ) -> None:
        self.chooser, self.spec = chooser, spec
        self.budget_bytes, self.options = budget_bytes, options
        self.best: SimulatedChoice | None = None
        self.least: SimulatedChoice | None = None
        self.others: list[Alternative] = []
        self._search: Search | None = None
        self._too_large: list[Degree] = []

    def enter(self, degree: int) -> None:
        """Compare one more degree with the best so far."""
        reason = self._lost_before(degree)
        if not reason:
            sharded_step = self.chooser.at(self.spec, degree)
            reason = self._lost_to_best(sharded_step) or self._worked_out(sharded_step)
        if reason:
            replicas = self.spec.num_gpus // degree
            self.others.append(
                Alternative(
                    shard_degree=degree, replicate_degree=replicas, reason=reason
                )
            )

    def _worked_out(self, sharded_step: Degree) -> str:
        """Search a degree; say why no choice of it fits the budget, '' if one does."""
        search = sharded_step.search(
            self.budget_bytes, self.options, before=self._search
        )
        self._search, best, choice = search, self.best, search.best
        if choice is None:
            choice = self.lowest(sharded_step)
            if choice.highest_peak_bytes > self.budget_bytes:
                self.least = _lower(choice, self.least)
                return f"its least peak is {format_bytes(choice.highest_peak_bytes)}"
            choice = search.with_bound(choice)
        if best is None:
            self.best = choice
            return ""
        is_faster = choice.step.total_ms < best.step.total_ms
        self.best, slower = (choice, best) if is_faster else (best, choice)
        self.others.append(_slower(slower, self.best))
        return ""

    def lowest(self, sharded_step: Degree) -> SimulatedChoice:
        """The choice of least peak of a degree, which no limit in seconds raises."""
        return sharded_step.lowest(replace(self.options, time_limit_s=None))

    def _is_known_to_be_faster(self, degree: int, best: SimulatedChoice) -> bool:
        fastest = self.chooser.fastest_known(self.spec, degree, self.budget_bytes)
        return fastest is not None and fastest.step.total_ms < best.step.total_ms

    def _lost_before(self, degree: int) -> str:
        """Why a degree need not be searched, '' if it must be."""
        form, spec = self.chooser.form, self.spec
        resident_bytes = form.resident_bytes(degree)
        if resident_bytes > self.budget_bytes:
            return (
                f"parameters, optimizer state and inputs alone take"
                f" {format_bytes(resident_bytes)} a rank"
            )
        best = self.best
        if best is None or self._is_known_to_be_faster(degree, best):
            return ""
        parts_ms = form.compute_ms(degree), form.collectives_ms(spec, degree)
        least_ms = max(parts_ms) + spec.contention * min(parts_ms)
        if best.step.total_ms <= (1 + self.options.relative_gap) * least_ms:
            return f"its step takes {format_ms(least_ms)} at least"
        return ""

    def _lost_to_best(self, sharded_step: Degree) -> str:
        """Why a degree cannot beat the best so far by its relaxation, '' if it may.

        Ranks that share nothing take less than the MILP sees, which says nothing then.
        """
        best, search = self.best, self._search
        if best is None or search is None or sharded_step.degree == 1:
            return ""
        if self._is_known_to_be_faster(sharded_step.degree, best):
            return ""
        bound_ms = None
        if not any(
            other.problem.is_below(sharded_step.problem) for other in self._too_large
        ):
            bound_ms = sharded_step.lower_bound(self.budget_bytes, self.options, search)
        if bound_ms is None:
            self._too_large.append(sharded_step)
            return f"nothing of it fits {format_bytes(self.budget_bytes)}"
        if best.milp_ms <= (1 + self.options.relative_gap) * bound_ms:
            return f"its step takes {format_ms(bound_ms)} at least"
        return ""


def _lower(choice: SimulatedChoice, least: SimulatedChoice | None) -> SimulatedChoice:
    if least is None or choice.highest_peak_bytes < least.highest_peak_bytes:
        return choice
    return least


def _slower(choice: SimulatedChoice, best: SimulatedChoice) -> Alternative:
    more_ms = choice.step.total_ms - best.step.total_ms
    return Alternative(
        shard_degree=choice.sharding.shard_degree,
        replicate_degree=choice.sharding.replicate_degree,
        reason=f"its step takes {format_ms(more_ms)} more",
        step_ms=choice.step.total_ms,
        peak_bytes=choice.peak_bytes,
    )


def _least_of_all(race: _Race, degrees: Sequence[int]) -> SimulatedChoice:
    """The least peak of those found and of degrees that were not worked out.

    A rank has less of the parameters the more of them share, so that these are the
    largest degree and 1, at which nothing is gathered and no buffers are needed.
    """
    least = race.least
    for degree in sorted({max(degrees), *({1} & set(degrees))}, reverse=True):
        resident_bytes = race.chooser.form.resident_bytes(degree)
        if resident_bytes <= race.budget_bytes:  # worked out
            continue
        if least is None or resident_bytes < least.highest_peak_bytes:
            lowest = race.lowest(race.chooser.at(race.spec, degree))
            least = _lower(lowest, least)
    assert least is not None  # at least the largest degree was looked at
    return least


def _infeasible(race: _Race, degrees: Sequence[int]) -> InfeasibleBudgetError:
    """Say what the least peak is, and on how many GPUs a plan would fit."""
    budget_bytes, ranks = race.budget_bytes, race.chooser.form.ranks
    least = _least_of_all(race, degrees)
    degree = least.sharding.shard_degree
    composition = ranks.timeline(least.sharding, least.chosen).composition
    if least.late_bytes:
        composition = {**composition, LATE: least.late_bytes}
    if least.room_bytes:
        composition = {**composition, ROOM: least.room_bytes}
    lowest_bytes = least.highest_peak_bytes
    enough = fewest_gpus(
        race.chooser, race.spec, budget_bytes, guess=least, options=race.options
    )
    more = ""
    if enough is not None and enough > degree:
        more = f"{enough} GPUs that share all parameters would be enough."
    advice = more or "more GPUs would not help; use a smaller batch a rank."
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}) on"
        f" {race.spec.num_gpus} GPUs: the lowest peak of a rank is {lowest_bytes}"
        f" bytes ({format_bytes(lowest_bytes)}) with parameters"
        f" {sharded_over(degree)}, made of {format_parts(composition)}. Raise the"
        f" budget to that; {advice}",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest_bytes,
        composition=composition,
        advice=more,
    )


def _as_plan(race: _Race, best: SimulatedChoice) -> ParallelPlan:
    form, spec = race.chooser.form, race.spec
    profile = form.profile
    recompute_ms = sum(curves.recompute_ms(*item) for item in best.chosen.items())
    timeline = form.ranks.timeline(best.sharding, best.chosen)
    return ParallelPlan(
        sharding=best.sharding,
        policy=policy_ratios(profile, best.chosen),
        op_policies=spell_out(profile, best.chosen),
        budget_bytes=race.budget_bytes,
        peak_bytes=best.peak_bytes,
        late_bytes=best.late_bytes,
        reserved_bytes=form.ranks.reserved_bytes(best.sharding, best.chosen),
        composition=timeline.composition,
        compute_ms=best.step.compute_ms - recompute_ms,
        recompute_ms=recompute_ms,
        exposed_forward_ms=best.step.exposed_forward_ms,
        exposed_backward_ms=best.step.exposed_backward_ms,
        contention_ms=best.step.contention_ms,
        milp_ms=best.milp_ms,
        bound_ms=min(best.bound_ms, best.milp_ms),
        alternatives=tuple(race.others),
        cluster=spec.name,
        device=spec.device.name,
        calibrated=profile.calibrated,
        model=profile.model,
        torch_version=torch.__version__,
        offloaded_bytes=far_bytes(best.chosen),
        exposed_copies_ms=sum(u.waits_ms(p) for u, p in best.chosen.items()),
        signatures=(rank_signature(profile),),
        facts=rank_facts(profile, timeline, best.sharding),
    )
