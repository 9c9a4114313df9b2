"""Schedules of a pipeline against each other: the fastest step that fits."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple

from autosac.errors import InfeasibleBudgetError
from autosac.parallel.racing import LATE
from autosac.pipelines.blocks import only_possible
from autosac.pipelines.cutting import Cuts
from autosac.pipelines.planned_stages import PlannedStage
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.playing import step_ms
from autosac.pipelines.schedule_racing import MARGIN, Race
from autosac.pipelines.stage_choosing import FarBytes
from autosac.profiles.restricting import check_far_memory
from autosac.quantities import format_bytes, format_ms

_FEW_LOWEST = 4  # schedules whose least peak is asked for if nothing fits


class _Planned(NamedTuple):
    """The best race so far, as it is planned."""

    race: Race
    cuts: Cuts
    stages: list[PlannedStage]


class Runners:
    """Schedules one after the other, on estimates first.

    Attributes:
        bound_ms: No step of those that entered is faster.
    """

    def __init__(self) -> None:
        self.bound_ms = inf
        self._races: list[Race] = []
        self._guessed: list[tuple[float, Race]] = []
        self._lost: dict[str, str] = {}
        self._best: _Planned | None = None

    @property
    def best_ms(self) -> float:
        """The best step by estimates, or a little more than that."""
        return MARGIN * min(self._planned_ms, *(ms for ms, _ in self._guessed), inf)

    @property
    def _planned_ms(self) -> float:
        """The best step that is planned."""
        return self._best.cuts.step_ms if self._best else inf

    @property
    def has_any(self) -> bool:
        """Whether any entered."""
        return bool(self._races)

    def enter(self, race: Race) -> None:
        """Guess what one more takes, which may be one that entered, with offload."""
        self.bound_ms = min(self.bound_ms, race.bound_ms)
        self._races = [other for other in self._races if other is not race.plain]
        self._races.append(race)
        best_ms = self.best_ms
        cuts = race.guess(best_ms)
        if cuts.starts or best_ms == inf:
            self._guessed.append((cuts.step_ms, race))
        else:
            self._lost[race.name] = "nothing faster fits"
            self._races[-1] = race.anew()

    def _settle(self) -> None:
        """Plan the fastest of those that entered, if one is faster than before.

        Raises:
            SolverError: As `plan_pipeline`.
        """
        best: tuple[Race, Cuts] | None = None
        best_ms = self._planned_ms
        fitting = [pair for pair in self._guessed if pair[0] < inf]
        tried = sorted(fitting, key=itemgetter(0))
        if not tried and best_ms == inf:
            tried = [(-inf, race) for race in self._lowest()]
        for guessed_ms, race in tried:
            # A race with offload begins with the cuts of the one without.
            less = 1.0 if race.plain else 1 - race.gap
            if guessed_ms >= less * best_ms:
                self._lost[race.name] = f"about {format_ms(guessed_ms)} a step"
                continue
            cuts = race.run(best_ms)
            if not cuts.starts:
                faster = " faster" * (best_ms < inf)
                self._lost[race.name] = f"nothing{faster} fits"
                continue
            if best is not None:
                self._note_time(best[0], best_ms)
            best, best_ms = (race, cuts), cuts.step_ms
        if best is not None and not self._has_planned(*best):
            best[0].micro_batch.shares = False  # stages were not so alike
            self._settle()
        self._guessed.clear()

    def _has_planned(self, race: Race, cuts: Cuts) -> bool:
        """Plan the stages of some cuts as they are; whether all fit."""
        stages = race.planned(cuts)
        if stages is None:
            return False
        own_ms = step_ms(race.schedule, race.times_of_plan(cuts.starts, stages))
        best = self._best
        if best is not None and own_ms >= best.cuts.step_ms:
            self._note_time(race, own_ms)
            return True
        if best is not None:
            self._note_time(best.race, best.cuts.step_ms)
        self._best = _Planned(race, Cuts(own_ms, cuts.starts), stages)
        return True

    def _note_time(self, race: Race, own_ms: float) -> None:
        """Note that a race lost, and by which step."""
        self._lost[race.name] = f"{format_ms(own_ms)} a step"

    def plan(
        self, others: Sequence[str] = (), far: FarBytes | None = None
    ) -> PipelinePlan:
        """Plan the fastest.

        Args:
            others: What lost before it entered, and why.
            far: What a rank may have in far memory where a schedule can offload; None
                for nothing.

        Raises:
            ArgumentError: The device has no known link to far memory.
            InfeasibleBudgetError: Nothing fits.
            SolverError: As `plan_pipeline`.
        """
        if far is not None:
            self._enter_with_offload(far)
        self._settle()
        if self._best is None:
            raise _infeasible(self._lowest())
        race, cuts, stages = self._best
        self._lost.pop(race.name, None)
        lost = tuple(f"{name}: {why}" for name, why in self._lost.items())
        return race.plan(cuts, stages, (*lost, *others), self.bound_ms)

    def _enter_with_offload(self, far: FarBytes) -> None:
        """Let those that entered enter once more, each where that may be faster.

        No plan is slower than the one without, which is made first.

        Raises:
            ArgumentError: The device has no known link to far memory.
        """
        able = [race for race in self._races if race.may_offload]
        for race in able:
            check_far_memory(race.micro_batch.whole)
        self._settle()
        best = self._best
        for race in able:
            is_best = best is not None and best.race is race
            starts = best.cuts.starts if best is not None and is_best else ()
            if is_best or race.bound_ms < self.best_ms:
                self.enter(race.offloading(far, starts))

    def _lowest(self) -> list[Race]:
        """Some of those that come with least memory, by what is known and guessed."""
        kept = sorted(self._races, key=lambda race: race.least_bytes)[:_FEW_LOWEST]
        return sorted(kept, key=lambda race: race.guessed_lowest_bytes)[:2]


def fastest(races: Sequence[Race], far: FarBytes | None = None) -> PipelinePlan:
    """The plan of the fastest step that fits.

    Args:
        races: Schedules.
        far: As in `Runners.plan`.
    """
    runners, too_long = Runners(), list[str]()
    for race in races:
        most = len(race.micro_batch.cuts) + 1
        if race.schedule.num_stages <= most:
            runners.enter(race)
        else:
            too_long.append(f"{race.name}: {only_possible(most)}")
    return runners.plan(too_long, far)


def _infeasible(races: Sequence[Race]) -> InfeasibleBudgetError:
    race = min(races, key=lambda race: race.guessed_lowest_bytes)
    lowest, budget_bytes = race.lowest(), race.budget_bytes
    fqns, degree = list(race.micro_batch.chain), race.micro_batch.tensor.degree
    sizes = {
        **race.micro_batch.parallel.sizes,
        **({"tp": degree} if degree > 1 else {}),
    }
    times = "".join(f" x {name}={size}" for name, size in sizes.items())
    late = {LATE: lowest.late_bytes} if lowest.late_bytes else {}
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}) on"
        f" {race.schedule.num_ranks}{times} ranks: the lowest peak is"
        f" {lowest.peak_bytes} bytes ({format_bytes(lowest.peak_bytes)}), of stage"
        f" {lowest.stage} (`{fqns[lowest.first]}` to `{fqns[lowest.end - 1]}`) under"
        f" {race.schedule.name} with {race.schedule.num_micro_batches} micro-batches."
        " Raise the budget to that, or use more micro-batches or ranks.",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest.peak_bytes,
        composition={**lowest.composition, **late},
    )
