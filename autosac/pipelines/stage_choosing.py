"""What the stages of a rank recompute under a cap on it.

The MILP plans one micro-batch beside the most that are in flight with it: one whose
backward adds to gradients, and if more are in flight in the first backward, which makes
them, that one too. Where a rank has several stages, it plans one of each, beside what
the others hold (`shared_ranks`). What it chooses is replayed action by action. The
MILP's budget then moves by what the replay has more or less, until nothing is to be
gained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from autosac.pipelines.in_flight import InFlightSimulator, with_others
from autosac.pipelines.rank_memory import RankReplay
from autosac.pipelines.schedules import Schedule
from autosac.pipelines.shared_ranks import SharedRankSimulator, Window, of_windows
from autosac.pipelines.stage_steps import StageStep
from autosac.profiles.profile import Profile
from autosac.solving.choosing import Chooser
from autosac.solving.incumbents import Incumbents, most_rules, recompute_ms
from autosac.solving.moved_blocks import MovedBlocks
from autosac.solving.rules_of_thumb import Choice
from autosac.solving.solve_options import SolveOptions
from autosac.tracing.collecting import no_collections
from autosac.units.far_units import within
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_ROUNDS = 6  # of moving the budget
_NEAR = 2**-10  # of the cap: budgets this close to each other give the same choice


@dataclass(frozen=True, slots=True)
class FarBytes:
    """What a rank may have in far memory.

    Attributes:
        most: Bytes of all its micro-batches in flight; None for as many as one likes.
    """

    most: int | None = None

    def of_each(self, in_flight: int) -> int | None:
        """Bytes of each of so many micro-batches."""
        return None if self.most is None else self.most // max(1, in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """What a stage recomputes, or all stages of a rank.

    Attributes:
        choice: AC units and their policies, of the step that adds gradients.
        recompute_ms: What that takes for each micro-batch.
        peak_bytes: Of the rank, replayed.
    """

    choice: Choice
    recompute_ms: float
    peak_bytes: int


class _Planned(Protocol):
    """What a MILP plans."""

    @property
    def chooser(self) -> Chooser:
        """Finds choices."""

    def more_bytes(self, choice: Choice, replayed: StageChoice) -> int:
        """What a replay has more than the MILP's step."""

    def in_later(self, choice: Choice) -> Choice:
        """The choice as units of steps that add to gradients."""


class _View:
    """A stage's micro-batch beside others: what a MILP plans.

    Args:
        step: Of the stage.
        profile: One of its profiles.
        count: How many others are in flight.
    """

    def __init__(self, step: StageStep, profile: Profile, count: int) -> None:
        self._step, self._profile, self._count = step, profile, count
        self._simulator = InFlightSimulator(
            profile, count, is_last=step.is_last, sharded=step.sharded
        )

    @cached_property
    def chooser(self) -> Chooser:
        """Finds choices of units of the profile."""
        simulator, profile = self._simulator, self._profile
        with no_collections():
            if self._step.plain is None:
                rules = profile.rules.some(most_rules(simulator))
                incumbents = Incumbents(simulator, rules)
                return Chooser(simulator, with_others(simulator), incumbents)
            twins = within(profile.far_units, profile.far_unit_bytes)
            return Chooser(
                simulator,
                with_others(simulator),
                Incumbents(simulator, ()),
                self._of_plain(self._step.plain).chooser,
                MovedBlocks(simulator, profile.rules, twins),
            )

    def _of_plain(self, plain: StageStep) -> _View:
        """The same view of the step without offload."""
        is_first = self._profile is self._step.first
        return _view(plain, plain.first if is_first else plain.later, self._count)

    def more_bytes(self, choice: Choice, replayed: StageChoice) -> int:
        """What a replay has more than the MILP's step."""
        return replayed.peak_bytes - self._simulator.peak_bytes(choice)

    def in_later(self, choice: Choice) -> Choice:
        """The choice as units of the step that adds to gradients."""
        if self._profile is self._step.later:
            return choice
        return self._step.in_later(choice)


def _view(step: StageStep, profile: Profile, count: int) -> _View:
    """The view beside so many others; the step keeps it."""
    key = profile is step.first, count
    if key not in step.views:
        step.views[key] = _View(step, profile, count)
    view: _View = step.views[key]
    return view


class RankChooser:
    """Finds choices for the stages of one rank, under any cap.

    Args:
        replay: Of the rank.
        views: What MILPs plan, each for a part of the step; with the units of all.
        without: Of the same without offload: nothing that it chooses beats what is
            chosen here. None if the MILPs' choosers know that, or nothing is moved.
    """

    def __init__(
        self,
        replay: RankReplay,
        views: Sequence[_Planned],
        without: RankChooser | None = None,
    ) -> None:
        self._replay, self._views, self._without = replay, views, without
        self._seen: dict[frozenset[object], StageChoice] = {}

    @property
    def plain(self) -> StageChoice:
        """Nothing recomputed."""
        return self._replayed({})

    def choose(
        self, cap_bytes: int, options: SolveOptions | None = None
    ) -> StageChoice | None:
        """The fastest choice found whose replayed peak is within a cap, or None.

        Args:
            cap_bytes: On the peak of the rank.
            options: How to solve.
        """
        if self.plain.peak_bytes <= cap_bytes:
            return self.plain
        if self._without is not None:
            known = self._without.choose(cap_bytes, options)
            if known is not None:
                self.offer(known.choice)
        for view in self._views:
            self._search(view, cap_bytes, options or SolveOptions())
        fitting = [s for s in self._seen.values() if s.peak_bytes <= cap_bytes]
        if not fitting and self.lowest().peak_bytes <= cap_bytes:
            return self.lowest()
        return min(fitting, key=lambda s: s.recompute_ms, default=None)

    @cached_property
    def _units(self) -> list[Unit]:
        """Of all stages, one after the other."""
        steps = self._replay.stages.values()
        return [unit for step in steps for unit in step.later.candidates]

    @cached_property
    def _stage_of(self) -> dict[Unit, int]:
        stages = self._replay.stages.items()
        return {unit: s for s, step in stages for unit in step.later.candidates}

    def by_stage(self, choice: Choice) -> dict[int, Choice]:
        """A choice of units of all stages, by stage."""
        parts: dict[int, dict[Unit, Policy]] = {s: {} for s in self._replay.stages}
        for unit, policy in choice.items():
            parts[self._stage_of[unit]][unit] = policy
        return {**parts}

    def taken_over(self, twin: RankChooser, other: StageChoice) -> StageChoice | None:
        """The choice of stages of like blocks in these; None if they have none such.

        Args:
            twin: The chooser of those stages, at the same places of the schedule,
            other: and its choice.
        """
        own, theirs = self._units, twin._units
        if len(own) != len(theirs):
            return None
        twins = dict(zip(theirs, own, strict=True))
        choice = {twins[unit]: policy for unit, policy in other.choice.items()}
        if any(len(twins[unit].groups) != len(unit.groups) for unit in other.choice):
            return None
        return self._replayed(choice)

    def offer(self, choice: Choice) -> None:
        """Know one more choice, of units of the steps that add gradients."""
        self._replayed(choice)

    def lowest(self) -> StageChoice:
        """The choice of the least peak."""
        for view in self._views:
            self._replayed(view.in_later(view.chooser.lowest()))
        return min(self._seen.values(), key=lambda s: s.peak_bytes)

    def _search(self, view: _Planned, cap_bytes: int, options: SolveOptions) -> None:
        near_bytes = int(_NEAR * cap_bytes)
        budget_bytes = cap_bytes - view.more_bytes({}, self.plain)
        for _ in range(_ROUNDS):
            choice, _ = view.chooser.choose(budget_bytes, options)
            lowest = view.chooser.lowest() if choice is None else choice
            tried = self._replayed(view.in_later(lowest))
            next_bytes = cap_bytes - view.more_bytes(lowest, tried)
            excess_bytes = tried.peak_bytes - cap_bytes
            if (
                choice is None
            ):  # at the floor it is off elsewhere than in the plain step
                if next_bytes <= budget_bytes:
                    return
            elif excess_bytes > 0:
                next_bytes = min(next_bytes, budget_bytes - max(1, excess_bytes))
            elif next_bytes <= budget_bytes + near_bytes:
                return
            budget_bytes = next_bytes

    def _replayed(self, choice: Choice) -> StageChoice:
        key = frozenset(choice.items())
        if key not in self._seen:
            self._seen[key] = StageChoice(
                choice=choice,
                recompute_ms=recompute_ms(choice),
                peak_bytes=self._replay.peak_bytes(self.by_stage(choice)),
            )
        return self._seen[key]


class StageChooser(RankChooser):
    """Finds choices for one stage at one place of a schedule, under any cap.

    Args:
        schedule: Of the pipeline; one stage per rank.
        stage: Its index.
        step: Its step.
        besides_bytes: What else is on the rank all the time.
        far: What its units may have in far memory; None for nothing.

    Attributes:
        step: The step whose units it chooses.

    Raises:
        UnsupportedError: Collectives may hold what is moved.
        ArgumentError: The device has no known link to far memory.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        step: StageStep,
        *,
        besides_bytes: int = 0,
        far: FarBytes | None = None,
    ) -> None:
        in_first = schedule.most_in_flight(stage)
        in_later = schedule.most_in_flight(stage, adding=True)
        if far is not None:
            step = step.offloading(far.of_each(in_first))
        self.step = step
        views = [_view(step, step.later, max(1, in_later) - 1)]
        if in_first > in_later:
            views.append(_view(step, step.first, in_first - 1))
        replay = RankReplay(schedule, stage, {stage: step}, besides_bytes=besides_bytes)
        super().__init__(replay, views)


class SharedRankChooser(RankChooser):
    """Finds choices for all stages of a rank, under any cap.

    Args:
        schedule: Of the pipeline; several stages per rank.
        rank: The rank.
        steps: Of its stages, by their index; of each one of its own.
        besides_bytes: What else is on the rank all the time.
        far: What its units may have in far memory; None for nothing.
        without: The chooser of the same stages without offload, if they may.

    Attributes:
        steps: The steps whose units it chooses.

    Raises:
        UnsupportedError: As `RankReplay`, and `StageChooser`.
        ArgumentError: As `StageChooser`.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        steps: Mapping[int, StageStep],
        *,
        besides_bytes: int = 0,
        far: FarBytes | None = None,
        without: SharedRankChooser | None = None,
    ) -> None:
        if far is not None:
            steps = {stage: step.offloading(None) for stage, step in steps.items()}
        self.steps = steps
        replay = RankReplay(schedule, rank, steps, besides_bytes=besides_bytes)
        highest = {
            adding: max(replay.stage_peaks({}, adding=adding).values(), default=0)
            for adding in (True, False)
        }
        adding = highest[True] >= highest[False]
        plain = None if without is None else without.view
        self.view: _SharedView = _SharedView(
            replay, adding=adding, far=far, plain=plain
        )
        super().__init__(replay, [self.view], without)


class _SharedView:
    """A micro-batch of each stage of a rank beside others: what a MILP plans.

    What is there besides all the time, such as what is received, is as much as in the
    replay where nothing is recomputed.

    Args:
        replay: Of the rank.
        adding: Whether backwards add to gradients.
        far: What units may have in far memory; None for nothing.
        plain: The same without offload, if they may.
    """

    def __init__(
        self,
        replay: RankReplay,
        *,
        adding: bool,
        far: FarBytes | None = None,
        plain: _SharedView | None = None,
    ) -> None:
        self._plain = plain
        self._host_bytes = None if far is None else far.most
        self._in_flight = [replay.schedule.most_in_flight(s) for s in replay.stages]
        self._steps = list(replay.stages.values())
        self._adding = adding
        alone = [self._simulator(step, 0) for step in self._steps]
        held_bytes = [one.with_held({})[1] for one in alone]
        peaks = replay.stage_peaks({}, adding=adding)
        windows = []
        for place, stage in enumerate(replay.stages):
            numbers = max(
                replay.schedule.in_flight(stage, adding=adding) or [(0,) * len(alone)],
                key=lambda each: (np.dot(each, held_bytes), each),
            )
            others = (*numbers[:place], 0, *numbers[place + 1 :])
            own = self._simulator(self._steps[place], max(1, numbers[place]) - 1)
            beside = int(np.dot(others, held_bytes))
            always = peaks.get(stage, 0) - own.peak_bytes({}) - beside
            windows.append(Window(own, others, always))
        self._rank = SharedRankSimulator(windows)

    def _simulator(self, step: StageStep, count: int) -> InFlightSimulator:
        profile = step.later if self._adding else step.first
        return InFlightSimulator(
            profile, count, is_last=step.is_last, sharded=step.sharded
        )

    @cached_property
    def chooser(self) -> Chooser:
        """Finds choices of units of all stages."""
        with no_collections():
            rules = self._rules() if self._plain is None else ()
            incumbents = Incumbents(self._rank, rules)
            numbers = of_windows(self._rank, self._host_bytes, self._in_flight)
            plain = None if self._plain is None else self._plain.chooser
            return Chooser(self._rank, numbers, incumbents, plain)

    def _rules(self) -> Iterator[Choice]:
        """Choices by the same rule in all stages."""
        profiles = [step.later if self._adding else step.first for step in self._steps]
        most = most_rules(self._rank)
        for parts in zip(*(p.rules.some(most) for p in profiles), strict=False):
            yield {unit: own for part in parts for unit, own in part.items()}

    def more_bytes(self, choice: Choice, replayed: StageChoice) -> int:
        """What a replay has more than the MILP's step."""
        return replayed.peak_bytes - self._rank.peak_bytes(choice)

    def in_later(self, choice: Choice) -> Choice:
        """The choice as units of steps that add to gradients."""
        if self._adding:
            return choice
        later: dict[Unit, Policy] = {}
        parts = self._rank.split(choice)
        for step, part in zip(self._steps, parts, strict=True):
            later.update(step.in_later(part))
        return later
