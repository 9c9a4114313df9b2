"""What a step's MILP and its simulator say of choices: predicted and true memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autosac.simulation.simulator import Simulator
from autosac.solvers import sac
from autosac.solvers.milp.solution import Backend
from autosac.solving.annealing import anneal
from autosac.solving.formulation import Formulation
from autosac.solving.incumbents import recompute_ms
from autosac.solving.lowering import lower_peak
from autosac.solving.one_by_one import OneByOne
from autosac.solving.path_relinking import relink
from autosac.solving.repair import lowered, mend
from autosac.solving.rules_of_thumb import Choice, FloatArray
from autosac.solving.slack import spend_slack
from autosac.solving.solve_options import SolveOptions
from autosac.step.tape import IntArray
from autosac.units.policies import Policy
from autosac.units.unit import Unit


class Floor(NamedTuple):
    """The choice of least predicted peak.

    Attributes:
        peak_bytes: That peak.
        choice: What reaches it.
        predicted_bytes: Predicted memory under it at every position.
    """

    peak_bytes: int
    choice: Choice
    predicted_bytes: IntArray


class StepModel(ABC):
    """One step's MILP, and its simulator.

    Args:
        simulator: Of the step.
        formulation: The MILP's numbers.
    """

    def __init__(self, simulator: Simulator, formulation: Formulation) -> None:
        self._simulator = simulator
        self._formulation = formulation
        self._solver = sac.Solver(formulation.problem(0))
        curves = enumerate(formulation.curves)
        self._mixed_units = [u for u, curve in curves if curve.is_selection]

    @abstractmethod
    def predicted_floor(self, backend: Backend) -> Floor:
        """Least predicted peak, and the choice that reaches it."""

    def true_peak_bytes(self, choice: Choice) -> int:
        """True peak of a choice, which the budget caps."""
        return self._simulator.true_peak_bytes(choice)

    def fits(self, choice: Choice, budget_bytes: int) -> bool:
        """Whether a choice keeps the budget, and the cap on far memory."""
        fits = self._simulator.fits(choice, budget_bytes)
        return fits and self._formulation.keeps_host(choice)

    def simulated_peak_bytes(self, choice: Choice) -> int:
        """Simulated peak of a choice: without what an allocator adds."""
        return self._simulator.peak_bytes(choice)

    def spend(self, choice: Choice, budget_bytes: int) -> Choice:
        """The choice, with more saved where the budget allows it."""
        return spend_slack(self._simulator, self._formulation, choice, budget_bytes)

    def mend(
        self,
        choice: Choice,
        budget_bytes: int,
        most_ms: float,
        *,
        is_last: bool = False,
    ) -> Choice | None:
        """A choice near one that breaks the budget; it takes less than `most_ms`."""
        room_ms = most_ms - recompute_ms(choice)
        return mend(
            self._simulator,
            self._formulation,
            choice,
            budget_bytes,
            room_ms,
            is_last=is_last,
        )

    def lowered(self, choice: Choice) -> Choice | None:
        """A choice beside one whose peak is lower."""
        return lowered(self._simulator, self._formulation, choice)

    def lower_peak(
        self, choice: Choice, most_ms: float, enough_bytes: int = 0, effort: int = 1
    ) -> Choice:
        """A choice near one whose true peak is lower, or itself.

        The search ends at a true peak that is low enough, or after so much effort.
        """
        return lower_peak(
            self._simulator, self._formulation, choice, most_ms, enough_bytes, effort
        )

    def relink(self, fitting: Choice, cheaper: Choice, budget_bytes: int) -> Choice:
        """The fitting choice, with parts of a cheaper one that breaks the budget."""
        return relink(self._simulator, fitting, cheaper, budget_bytes)

    def anneal(self, choice: Choice, start: Choice, budget_bytes: int) -> Choice:
        """A cheaper choice than one that fits, around another one, if one is found."""
        return anneal(self._simulator, self._formulation, choice, start, budget_bytes)

    def one_by_one(
        self,
        budget_bytes: int,
        raised: IntArray,
        options: SolveOptions,
        best_ms: float,
    ) -> OneByOne:
        """Choices that keep some rows and take less than a time."""
        enumeration = self._solver.enumeration(
            budget_bytes,
            most_ms=best_ms,
            raised_bytes=self._formulation.with_host(raised, budget_bytes),
            mixed_units=self._mixed_units,
        )
        return OneByOne(
            self._simulator,
            self._formulation,
            enumeration,
            budget_bytes,
            options.relative_gap,
        )

    def no_bytes(self) -> IntArray:
        """Zero bytes at every position."""
        return np.zeros(len(self._formulation.base_bytes), dtype=np.int64)

    def true_bytes(self, choice: Choice) -> IntArray:
        """True memory at every position."""
        timeline = self._simulator.true_timeline(choice)
        live = timeline.most_from(self._formulation.edges * self._simulator.span)
        return self._formulation.at_positions(live, choice)

    def predicted_bytes(self, solution: sac.SacSolution) -> IntArray:
        """Predicted memory at every position."""
        assert solution.chosen is not None
        return self._solver.live(solution.chosen)

    def understated_bytes(
        self, shares: Mapping[int, FloatArray], budget_bytes: int
    ) -> IntArray:
        """By how much to raise rows so that a mixture does not come again.

        Its true memory above the predicted one at every position; more where it breaks
        the budget, as mixtures keep rows within a tolerance only.
        """
        predicted = np.floor(self._solver.live_mixed(shares)).astype(np.int64)
        true = self.true_bytes(self.finer(shares))
        breaks = np.where(true > budget_bytes, sac.TOLERANCE_BYTES, 0)
        understated: IntArray = true - predicted + breaks
        understated[len(self._formulation.edges) :] = 0  # of far memory
        return understated

    def solve(
        self,
        budget_bytes: int,
        options: SolveOptions,
        *,
        raised: IntArray | None = None,
        start: sac.Start | None = None,
        least_ms: float = 0.0,
        likely_ms: float = 0.0,
        most_ms: float = math.inf,
        most_work: int | None = None,
        near: tuple[int | None, ...] | None = None,
        rows: tuple[int, ...] = (),
        finer: sac.Finer | None = None,
    ) -> sac.SacSolution:
        """Choose among the exact points of all candidates."""
        raised = self._formulation.with_host(
            self.no_bytes() if raised is None else raised, budget_bytes
        )
        return self._solver.solve(
            budget_bytes,
            raised_bytes=raised if raised.any() else None,
            start=start,
            backend=options.backend,
            time_limit_s=options.time_limit_s,
            relative_gap=options.relative_gap,
            polishes=options.polishes,
            mixed_units=self._mixed_units,
            least_ms=least_ms,
            likely_ms=likely_ms,
            most_ms=most_ms,
            most_work=most_work,
            near=near,
            rows=rows,
            finer=finer,
        )

    def relaxed_ms(
        self, budget_bytes: int, options: SolveOptions, most_ms: float
    ) -> float:
        """The bound of the MILP's relaxation, without branching; 0 without one.

        Args:
            budget_bytes: Cap on the predicted peak.
            options: How to solve.
            most_ms: Time of a known choice.
        """
        relaxed = replace(options, relative_gap=math.inf)
        return self.solve(budget_bytes, relaxed, most_ms=most_ms).bound_ms or 0.0

    def decode(self, solution: sac.SacSolution) -> dict[Unit, Policy]:
        """Units and policies of a solution over exact points."""
        assert solution.chosen is not None
        parts = zip(
            self._formulation.units,
            self._formulation.curves,
            solution.chosen,
            strict=True,
        )
        return {
            unit: curve.policies[point]
            for unit, curve, point in parts
            if point is not None
        }

    def finer(self, shares: Mapping[int, FloatArray]) -> dict[Unit, Policy]:
        """The known points that are closest to mixtures of those of the MILP."""
        units, curves = self._formulation.units, self._formulation.curves
        return {
            units[u]: curves[u].between(mixture.tolist())
            for u, mixture in shares.items()
        }
