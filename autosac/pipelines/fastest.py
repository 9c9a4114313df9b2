"""Schedules of a pipeline against each other: the fastest step that fits."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from autosac.errors import InfeasibleBudgetError
from autosac.parallel.racing import LATE
from autosac.pipelines.cutting import Cuts
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.schedule_racing import MARGIN, Race
from autosac.quantities import format_bytes, format_ms

_FEW_LOWEST = 4  # schedules whose least peak is asked for if nothing fits


class Runners:
    """Schedules one after the other, on estimates first.

    Attributes:
        bound_ms: No step of those that entered is faster.
    """

    def __init__(self) -> None:
        self.bound_ms = inf
        self._races: list[Race] = []
        self._guessed: list[tuple[float, int]] = []
        self._lost: dict[str, str] = {}

    @property
    def best_ms(self) -> float:
        """The best step by estimates, or a little more than that."""
        return MARGIN * min((ms for ms, _ in self._guessed), default=inf)

    @property
    def has_any(self) -> bool:
        """Whether any entered."""
        return bool(self._races)

    def enter(self, race: Race) -> None:
        """Guess what one more takes."""
        self.bound_ms = min(self.bound_ms, race.bound_ms)
        self._races.append(race)
        best_ms = self.best_ms
        cuts = race.guess(best_ms)
        if cuts.starts or best_ms == inf:
            self._guessed.append((cuts.step_ms, len(self._races) - 1))
        else:
            self._lost[race.name] = "nothing faster fits"

    def plan(self, others: Sequence[str] = ()) -> PipelinePlan:
        """Plan the fastest.

        Args:
            others: What lost before it entered, and why.

        Raises:
            InfeasibleBudgetError: Nothing fits.
            SolverError: As `plan_pipeline`.
        """
        best: tuple[Race, Cuts] | None = None
        fitting = sorted(pair for pair in self._guessed if pair[0] < inf)
        tried = [(guessed_ms, self._races[place]) for guessed_ms, place in fitting]
        for guessed_ms, race in tried or [(inf, race) for race in self._lowest()]:
            best_ms = best[1].step_ms if best else inf
            if best and guessed_ms >= (1 - race.gap) * best_ms:
                self._lost[race.name] = f"about {format_ms(guessed_ms)} a step"
                continue
            cuts = race.run(best_ms)
            if not cuts.starts:
                faster = " faster" * bool(best)
                self._lost[race.name] = f"nothing{faster} fits"
                continue
            if best is not None:
                self._lost[best[0].name] = f"{format_ms(best[1].step_ms)} a step"
            best = race, cuts
        if best is None:
            raise _infeasible(self._lowest())
        race, cuts = best
        planned = race.planned(cuts)
        if planned is None:
            race.micro_batch.shares = False  # stages were not so alike
            return self.plan(others)
        self._lost.pop(race.name, None)
        lost = tuple(f"{name}: {why}" for name, why in self._lost.items())
        return race.plan(cuts, planned, (*lost, *others), self.bound_ms)

    def _lowest(self) -> list[Race]:
        """Some of those that come with least memory, by what is known and guessed."""
        kept = sorted(self._races, key=lambda race: race.least_bytes)[:_FEW_LOWEST]
        return sorted(kept, key=lambda race: race.guessed_lowest_bytes)[:2]


def fastest(races: Sequence[Race]) -> PipelinePlan:
    """The plan of the fastest step that fits."""
    runners, too_long = Runners(), list[str]()
    for race in races:
        most = len(race.micro_batch.cuts) + 1
        if race.schedule.num_stages <= most:
            runners.enter(race)
        else:
            too_long.append(f"{race.name}: only {most} stages are possible")
    return runners.plan(too_long)


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
