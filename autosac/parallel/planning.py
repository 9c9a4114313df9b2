"""From a model and a cluster to a parallel plan.

Sharding degrees are enumerated; one MILP each decides on FSDP units, resharding and
recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autosac.errors import InfeasibleBudgetError
from autosac.parallel.clusters import ClusterSpec, cluster_spec
from autosac.parallel.fewest import fewest_gpus
from autosac.parallel.formulating import ParallelFormulation, Setting
from autosac.parallel.plans import Alternative, ParallelPlan
from autosac.parallel.sharding import Sharding, fsdp_units
from autosac.parallel.solving import Degree, ParallelChooser, Search, SimulatedChoice
from autosac.planning.make_plan import policy_ratios
from autosac.planning.spelling import spell_out
from autosac.profiles.compute_dtype import in_compute_dtype
from autosac.profiles.given import profile_of
from autosac.profiles.profile import Profile, calibrate
from autosac.profiles.restricting import restricted
from autosac.quantities import format_bytes, format_ms, format_parts, parse_bytes
from autosac.solvers.milp.solution import Backend
from autosac.solving.solve_options import RELATIVE_GAP, SolveOptions, read_segments
from autosac.step.marks import Marks, marked, marks_of
from autosac.units import curves

_LATE = "held by slow threads of gloo"  # beside the categories of the tape


def plan_parallel(
    model: torch.nn.Module | Profile,
    inputs: Any = None,
    *,
    cluster: str | ClusterSpec,
    memory_budget: int | str,
    num_gpus: int | None = None,
    degrees: Sequence[int] | None = None,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    segments: int | None = None,
    backend: Backend = "highs",
    relative_gap: float = RELATIVE_GAP,
    time_limit_s: float | None = None,
    **options: Any,
) -> ParallelPlan:
    """Find how to shard and recompute for the least step time under a memory budget.

    Neither a GPU nor a cluster is needed. Equal arguments give equal plans, however
    busy the machine is, unless there is a time limit; to have one plan on all ranks
    make it once and load the saved file on each. Plans that were made from a `Profile`
    before are known: none is slower than one of them that fits.

    Args:
        model: The model, on the CPU or the meta device, or a `Profile` of its step on
            a GPU of the cluster (then no other option is taken).
        inputs: Of one rank, as in `profile`.
        cluster: A `ClusterSpec`, or the name of a known one such as "hgx-h100".
        memory_budget: Cap on the peak of a rank: bytes, or text such as "72GiB".
        num_gpus: GPUs to use: part of a node, or whole nodes; None for all of them.
        degrees: Sharding degrees to look at; None for all that fit the cluster.
        ac_units: The only modules that may be AC units: names, patterns such as
            ``"blocks.*"``, or classes; None for all that can be.
        fsdp_units: The modules that are FSDP units besides the model itself, likewise;
            None to choose the best. Which of them reshard is chosen in any case.
        param_dtype: Type in which parameters are gathered and used, such as
            "bfloat16"; None for their own.
        reduce_dtype: Type in which gradients are reduced; given with `param_dtype`.
        segments: None to choose among many exact points of every trade-off curve; a
            number to choose among the breakpoints of fits of up to so many linear
            segments (pwlf), which are points as well. Each number up to it is planned
            with, and the fastest plan is kept.
        backend: MILP solver, "highs" or "cbc".
        relative_gap: A solve stops when the step time is proven this close to the
            least; another degree must be faster by more to be worked out.
        time_limit_s: A solve stops after this long with the best plan so far; None to
            count work only, which is the same in every run.
        options: As in `profile`, but `device`.

    Raises:
        InfeasibleBudgetError: No plan fits; says the least peak of a rank and how many
            GPUs would be enough.
        ValueError: An argument does not fit the cluster, or cannot be read; or FSDP2
            does not take `fsdp_units`.
        UnsupportedError: The memory of such a step under FSDP2 is not modelled.
    """
    spec = cluster_of(cluster, num_gpus)
    numbers: list[int | None] = [None]
    if segments is not None:
        numbers = list(range(1, read_segments(segments) + 1))
    profile = profile_for(spec, model, inputs, options)
    budget_bytes = parse_bytes(memory_budget, total_bytes=spec.device.memory_bytes)
    how = SolveOptions(
        backend=backend, relative_gap=relative_gap, time_limit_s=time_limit_s
    )
    setting = Setting(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    profile, setting = with_given_units(profile, setting, ac_units, fsdp_units)
    plans: list[ParallelPlan] = []
    for number in numbers:
        chooser = chooser_of(profile, replace(setting, segments=number))
        try:
            plans.append(
                make_parallel_plan(
                    chooser, spec, budget_bytes, degrees=degrees, options=how
                )
            )
        except InfeasibleBudgetError:
            if number == numbers[-1] and not plans:
                raise
    return min(plans, key=lambda plan: plan.step_ms)


def min_gpus(
    model: torch.nn.Module | Profile,
    inputs: Any = None,
    *,
    cluster: str | ClusterSpec,
    memory_budget: int | str,
    most_gpus: int = 65_536,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    **options: Any,
) -> int | None:
    """Fewest GPUs that share all parameters on which a step fits the budget.

    Sizes are parts of one node, then whole nodes.

    Args:
        model: As in `plan_parallel`, like all that follows.
        inputs: Of one rank.
        cluster: Says what nodes are like; how many it has does not matter.
        memory_budget: Cap on the peak of a rank.
        most_gpus: Where to stop looking.
        param_dtype: Type in which parameters are gathered.
        reduce_dtype: Type in which gradients are reduced.
        ac_units: The only modules that may be AC units.
        fsdp_units: The FSDP units besides the model itself.
        options: As in `profile`, but `device`.

    Returns:
        That number, or None if `most_gpus` are not enough.

    Raises:
        ValueError: An argument cannot be read.
        UnsupportedError: The memory of such a step is not modelled.
    """
    spec = cluster_of(cluster, None)
    profile = profile_for(spec, model, inputs, options)
    setting = Setting(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    chooser = chooser_of(*with_given_units(profile, setting, ac_units, fsdp_units))
    budget_bytes = parse_bytes(memory_budget, total_bytes=spec.device.memory_bytes)
    return fewest_gpus(chooser, spec, budget_bytes, most_gpus=most_gpus)


# --- its parts ----------------------------------------------------------------


def cluster_of(cluster: str | ClusterSpec, num_gpus: int | None) -> ClusterSpec:
    """The cluster that was passed or named, with so many GPUs."""
    if isinstance(cluster, str):
        return cluster_spec(cluster, num_gpus=num_gpus)
    return cluster if num_gpus is None else cluster.resized(num_gpus)


def chooser_of(profile: Profile, setting: Setting) -> ParallelChooser:
    """The chooser for a setting; the profile keeps it."""
    if setting not in profile.parallel:
        typed = _in_gathered_type(profile, setting)
        form = ParallelFormulation(typed, setting)
        profile.parallel[setting] = ParallelChooser(form)
    chooser: ParallelChooser = profile.parallel[setting]
    return chooser


def with_given_units(
    profile: Profile,
    setting: Setting,
    ac_units: Marks | None,
    fsdp_units: Marks | None,
) -> tuple[Profile, Setting]:
    """Both with the only units that there may be, as in `plan_parallel`."""
    if fsdp_units is not None:
        tree = profile.tape.modules
        own = marked(marks_of(fsdp_units), tree, name="fsdp_units")
        setting = replace(setting, fsdp_units=frozenset(tree[i].fqn for i in own))
    only = None if ac_units is None else marks_of(ac_units)
    return restricted(profile, only), setting


def profile_for(
    spec: ClusterSpec,
    model: torch.nn.Module | Profile,
    inputs: Any,
    options: dict[str, Any],
) -> Profile:
    """The profile that was passed, or a new one, on a GPU of the cluster."""
    if "device" in options:
        raise ValueError("`device` is that of `cluster`; leave it out.")
    if isinstance(model, Profile):
        profile = profile_of(model, inputs, options)
        if profile.device.name != spec.device.name:
            raise ValueError(
                f"The profile is for {profile.device.name!r}, and cluster"
                f" {spec.name!r} has {spec.device.name!r}; profile the model with that"
                " device."
            )
    else:
        profile = profile_of(model, inputs, {**options, "device": spec.device})
    assert isinstance(profile, Profile)
    return profile


def _in_gathered_type(profile: Profile, setting: Setting) -> Profile:
    """The step as it runs under a mixed-precision policy."""
    if setting.param_dtype is None:
        return profile
    # Checks the names before the step is traced once more.
    Sharding(
        units=fsdp_units([]),
        shard_degree=1,
        param_dtype=setting.param_dtype,
        reduce_dtype=setting.reduce_dtype,
    )
    typed = in_compute_dtype(profile, getattr(torch, setting.param_dtype))
    return calibrate(typed) if profile.calibrated else typed


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


def make_parallel_plan(
    chooser: ParallelChooser,
    spec: ClusterSpec,
    budget_bytes: int,
    *,
    degrees: Sequence[int] | None = None,
    options: SolveOptions | None = None,
) -> ParallelPlan:
    """Make the parallel plan of a step that is formulated already.

    Raises:
        InfeasibleBudgetError: No plan fits.
        ValueError: A degree does not fit the cluster.
    """
    if degrees is not None:
        for degree in degrees:
            spec.shard_group(degree)
        if not degrees:
            raise ValueError("`degrees` must name at least one sharding degree.")
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
        self._search, best = search, self.best
        if search.best is None:
            lowest = sharded_step.lowest(self.options)
            self.least = _lower(lowest, self.least)
            return f"its least peak is {format_bytes(lowest.highest_peak_bytes)}"
        if best is None:
            self.best = search.best
            return ""
        is_faster = search.best.step.total_ms < best.step.total_ms
        self.best, slower = (search.best, best) if is_faster else (best, search.best)
        self.others.append(_slower(slower, self.best))
        return ""

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
        least_ms = max(form.compute_ms(degree), form.collectives_ms(spec, degree))
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
            lowest = race.chooser.at(race.spec, degree).lowest(race.options)
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
        composition = {**composition, _LATE: least.late_bytes}
    lowest_bytes = least.highest_peak_bytes
    enough = fewest_gpus(
        race.chooser, race.spec, budget_bytes, guess=least, options=race.options
    )
    advice = (
        f"{enough} GPUs that share all parameters would be enough"
        if enough is not None and enough > degree
        else "more GPUs would not help; use a smaller batch a rank"
    )
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}) on"
        f" {race.spec.num_gpus} GPUs: the lowest peak of a rank is {lowest_bytes}"
        f" bytes ({format_bytes(lowest_bytes)}) with parameters sharded"
        f" {degree} times, made of {format_parts(composition)}. Raise the budget to"
        f" that; {advice}.",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest_bytes,
        composition=composition,
    )


def _as_plan(race: _Race, best: SimulatedChoice) -> ParallelPlan:
    form, spec = race.chooser.form, race.spec
    profile = form.profile
    recompute_ms = sum(curves.recompute_ms(*item) for item in best.chosen.items())
    return ParallelPlan(
        sharding=best.sharding,
        policy=policy_ratios(profile, best.chosen),
        op_policies=spell_out(profile, best.chosen),
        budget_bytes=race.budget_bytes,
        peak_bytes=best.peak_bytes,
        late_bytes=best.late_bytes,
        composition=form.ranks.timeline(best.sharding, best.chosen).composition,
        compute_ms=best.step.compute_ms - recompute_ms,
        recompute_ms=recompute_ms,
        exposed_forward_ms=best.step.exposed_forward_ms,
        exposed_backward_ms=best.step.exposed_backward_ms,
        milp_ms=best.milp_ms,
        bound_ms=min(best.bound_ms, best.milp_ms),
        alternatives=tuple(race.others),
        cluster=spec.name,
        device=spec.device.name,
        calibrated=profile.calibrated,
        model=profile.model,
        torch_version=torch.__version__,
    )
