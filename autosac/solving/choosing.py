"""Which units recompute what under a budget: solve, simulate, correct, keep the best.

Three peaks are told apart. The *predicted* one is the MILP's: it adds up what single
units change, with every storage as large as the block that the allocator gave it in the
plain step. The *simulated* one is the most bytes alive on the tape. The *true* one is
the simulated one on the CPU, and on a GPU what the replayed caching allocator hands
out (`autosac.simulation.caching_allocator`): the budget caps it.

Where the true peak of a choice is above the budget, the MILP's rows are *raised*: each
position by as much as the true memory there is above the predicted one, so that the
same choice cannot come again. Rows that were raised too far come down half way, as long
as a choice between may be worth it. The cheapest choice that fits is kept throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from autosac.simulation.simulator import Simulator
from autosac.solvers import sac
from autosac.solvers.milp.solution import Backend
from autosac.solving.corrections import Rows
from autosac.solving.formulation import Formulation
from autosac.solving.incumbents import Incumbents, recompute_ms
from autosac.solving.moved_blocks import MovedBlocks
from autosac.solving.one_by_one import OneByOne
from autosac.solving.path_relinking import relink
from autosac.solving.repair import mend
from autosac.solving.rules_of_thumb import Choice, FloatArray
from autosac.solving.segmented import search_segments
from autosac.solving.slack import spend_slack
from autosac.solving.solve_options import SolveOptions
from autosac.step.tape import IntArray
from autosac.units.policies import Policy
from autosac.units.unit import Unit

_ROUNDS = 6  # of moving the rows
_MOST_WORK = 6_000_000  # of all of them: see `solvers.milp.pulp_runner.run`
_FIRST_SHARE = 5 / 6  # of that for the first one, and of what is left for the next
_MOST_MENDS = 14  # a tenth of a second each where an allocator is replayed
_FLOOR_ROUNDS = 4  # of looking for a lower peak where the MILP is off
_FLOOR_MENDS = 8  # of making it a little lower
_SMALL_GAP = 0.02  # what mixtures that broke the budget may have cost at most
_NEAR = 2**-11  # of the budget: rows this close to each other give the same plan
_NEAR_FLOOR = 2**-7  # of the least peak
_MANY_POINTS = 5000  # of a step with offload, whose least peak is then proven to
_LARGE_FLOOR_GAP = 2**-10  # of it
_HOST_ROUNDS = 6  # of looking for it where far memory is capped


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


class Chooser:
    """Finds choices for one step; keeps what holds for all budgets.

    Args:
        simulator: Of the step.
        formulation: The MILP's numbers.
        incumbents: Choices that are known from the start.
        plain: Of the same step without offload: nothing that it chooses beats what is
            chosen here. None if this one offloads nothing.
        moved: Finds choices with offload that are not to be beaten either.
    """

    def __init__(
        self,
        simulator: Simulator,
        formulation: Formulation,
        incumbents: Incumbents,
        plain: Chooser | None = None,
        moved: MovedBlocks | None = None,
    ) -> None:
        self._simulator = simulator
        self._plain = plain
        self._moved = moved
        self._formulation = formulation
        self._incumbents = incumbents
        self._solver = sac.Solver(formulation.problem(0))
        curves = enumerate(formulation.curves)
        self._mixed_units = [u for u, curve in curves if curve.is_selection]
        self._lowest: dict[Backend, Choice] = {}
        self._predicted_floor: dict[Backend, Floor] = {}

    def choose(
        self,
        budget_bytes: int,
        options: SolveOptions,
        start: sac.Start | None = None,
    ) -> tuple[Choice | None, float]:
        """The cheapest choice that fits a budget, and a bound on its time.

        Args:
            budget_bytes: Cap on the true peak.
            options: How to solve.
            start: What smaller budgets of a sweep found.

        Returns:
            The choice, None if nothing fits; and no choice whose predicted peak fits
            takes less than so many ms.
        """
        if self.true_peak_bytes({}) <= budget_bytes:
            return {}, 0.0
        lowest = self._lowest.get(options.backend)
        if lowest is not None and self.true_peak_bytes(lowest) > budget_bytes:
            return None, 0.0
        search = _Search(self, budget_bytes, options, start)
        search.offer(self._incumbents.cheapest(budget_bytes))
        if self._plain is not None:
            search.offer(self._plain.choose(budget_bytes, options)[0])
        if self._moved is not None:
            search.offer(self._moved.cheapest(budget_bytes))
        if self._formulation.units and options.segments is not None:
            search.run_on_segments(self._formulation)
        elif self._formulation.units:
            search.run()
        if self._moved is not None and search.choice and not search.is_settled():
            for cheaper in self._moved.alike:
                search.offer(self.relink(search.choice, cheaper, budget_bytes))
        if search.choice is None:
            search.offer(self.lowest(options.backend))
        if search.choice is None:
            return None, 0.0
        self._incumbents.add(search.choice)
        return search.choice, search.bound_ms

    def lowest(self, backend: Backend = "highs") -> Choice:
        """The choice of least true peak, found once for all budgets."""
        if backend not in self._lowest:
            self._lowest[backend] = self._find_lowest(backend)
        return self._lowest[backend]

    def price_ms_per_byte(self, budget_bytes: int) -> float | None:
        """What one more byte of budget saves at the margin; None below the floor."""
        if self.true_peak_bytes({}) <= budget_bytes:
            return 0.0
        if not self._formulation.units:
            return None
        num_positions = len(self._formulation.edges)
        raised = self._formulation.with_host(self.no_bytes(), budget_bytes)
        return self._solver.price(
            budget_bytes, raised_bytes=raised, num_positions=num_positions
        )

    def predicted_floor(self, backend: Backend) -> Floor:
        """Least predicted peak, and the choice that reaches it."""
        if backend not in self._predicted_floor:
            self._predicted_floor[backend] = self._find_floor(backend)
        return self._predicted_floor[backend]

    @property
    def _floor_gap(self) -> float:
        """How close to its bound the least predicted peak must be proven to lie."""
        num_points = sum(len(curve.policies) for curve in self._formulation.curves)
        is_large = self._plain is not None and num_points > _MANY_POINTS
        return _LARGE_FLOOR_GAP if is_large else 0.0

    def _find_floor(self, backend: Backend) -> Floor:
        """As `predicted_floor`; raises the row of far memory until it is kept."""
        peak_bytes, host = 0, self._formulation.host_bytes
        known: list[Choice] = []
        if self._plain is not None:
            known = self._known_lowest(self._plain.lowest(backend))
        points = (self._formulation.encoded(choice) for choice in known)
        may_be_lowest = [choice for choice in points if choice is not None]
        for number in range(1 if host is None else _HOST_ROUNDS):
            least_bytes = peak_bytes + number * sac.TOLERANCE_BYTES
            raised = self._formulation.with_host(self.no_bytes(), least_bytes)
            found = self._solver.lowest_peak(
                backend=backend,
                raised_bytes=raised,
                known=may_be_lowest,
                relative_gap=self._floor_gap,
            )
            peak_bytes, solution = found
            choice: Choice = self.decode(solution)
            assert solution.chosen is not None
            quicker = replace(solution, chosen=self._solver.trimmed(solution.chosen))
            faster = self.decode(quicker)
            is_faster = self._formulation.keeps_host(faster)
            if is_faster and self.true_peak_bytes(faster) <= self.true_peak_bytes(
                choice
            ):
                # else an allocator adds more to it
                solution, choice = quicker, faster
            predicted_bytes = self.predicted_bytes(solution)
            if self._formulation.keeps_host(choice):
                return Floor(peak_bytes, choice, predicted_bytes)
        assert self._plain is not None
        return Floor(peak_bytes, self._plain.lowest(backend), predicted_bytes)

    def _known_lowest(self, plain: Choice) -> list[Choice]:
        """Choices of low peaks: that without offload, and a heuristic's with it."""
        return [plain, *([] if self._moved is None else [self._moved.lowest(plain)])]

    def true_peak_bytes(self, choice: Choice) -> int:
        """True peak of a choice, which the budget caps."""
        return self._simulator.true_peak_bytes(choice)

    def fits(self, choice: Choice, budget_bytes: int) -> bool:
        """Whether a choice keeps the budget, and the cap on far memory."""
        peak_bytes = self.true_peak_bytes(choice)
        return peak_bytes <= budget_bytes and self._formulation.keeps_host(choice)

    def simulated_peak_bytes(self, choice: Choice) -> int:
        """Simulated peak of a choice: without what an allocator adds."""
        return self._simulator.peak_bytes(choice)

    def spend(self, choice: Choice, budget_bytes: int) -> Choice:
        """The choice, with more saved where the budget allows it."""
        return spend_slack(self._simulator, self._formulation, choice, budget_bytes)

    def mend(self, choice: Choice, budget_bytes: int, most_ms: float) -> Choice | None:
        """A choice near one that breaks the budget; it takes less than `most_ms`."""
        room_ms = most_ms - recompute_ms(choice)
        return mend(self._simulator, self._formulation, choice, budget_bytes, room_ms)

    def relink(self, fitting: Choice, cheaper: Choice, budget_bytes: int) -> Choice:
        """The fitting choice, with parts of a cheaper one that breaks the budget."""
        return relink(self._simulator, fitting, cheaper, budget_bytes)

    def one_by_one(
        self, budget_bytes: int, raised: IntArray, options: SolveOptions
    ) -> OneByOne:
        """Choices that keep some rows."""
        enumeration = self._solver.enumeration(
            budget_bytes,
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

    def _find_lowest(self, backend: Backend) -> Choice:
        if not self._formulation.units:
            return self._incumbents.lowest()
        least_bytes, choice, _ = self.predicted_floor(backend)
        best = self._incumbents.lowest(choice)
        if self._plain is not None:
            choices = (best, *self._known_lowest(self._plain.lowest(backend)))
            best = min(choices, key=self.true_peak_bytes)
        best_bytes = self.true_peak_bytes(best)
        for _ in range(_FLOOR_ROUNDS):  # where the MILP is off, another may be lower
            if best_bytes - least_bytes <= _NEAR_FLOOR * best_bytes:
                break
            target = (best_bytes + least_bytes) // 2
            search = _Search(self, target, SolveOptions(backend=backend), None)
            search._work_left = _MOST_WORK // _FLOOR_ROUNDS
            search.run()
            if search.choice is None:
                least_bytes = target
            else:
                best = search.choice
                best_bytes = self.true_peak_bytes(best)
        for _ in range(_FLOOR_MENDS):  # a choice near it may suit an allocator better
            lower = self.mend(best, self.true_peak_bytes(best) - 1, math.inf)
            if lower is None or not self._formulation.keeps_host(lower):
                break
            best = lower
        self._incumbents.add(best)
        return best

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
            most_ms=most_ms,
            most_work=most_work,
            near=near,
            rows=rows,
            finer=finer,
        )

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


@dataclass(slots=True)
class _Search:
    """The correction loop for one budget.

    Attributes:
        chooser: Of the step.
        budget_bytes: Cap on the true peak.
        options: How to solve.
        start: What smaller budgets of a sweep found.
        choice: The cheapest choice so far that fits, and its time.
        bound_ms: Of the solve with the lowest rows.
        mends_left: How many choices that break the budget may still be mended.
    """

    chooser: Chooser
    budget_bytes: int
    options: SolveOptions
    start: sac.Start | None
    choice: Choice | None = None
    time_ms: float = math.inf
    bound_ms: float = 0.0
    mends_left: int = _MOST_MENDS
    _work_left: int = _MOST_WORK
    _breaking_ms: float = 0.0
    _breaking: Choice = field(default_factory=dict)  # the last that broke the budget
    _near: tuple[int | None, ...] | None = None  # the same as the MILP has it
    _is_feasible: bool = False  # as far as the MILP's relaxation can tell
    _last_rows: tuple[int, ...] = ()  # of the last solve: positions
    _understated: IntArray | None = None  # memory of the last mixture that broke it
    _rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self._rows = Rows(_NEAR * self.budget_bytes)

    def offer(self, choice: Choice | None) -> None:
        """Keep a choice if it fits and none is known that is cheaper."""
        if choice is None or not self.chooser.fits(choice, self.budget_bytes):
            return
        time_ms = recompute_ms(choice)
        if time_ms < self.time_ms:
            self.choice, self.time_ms = choice, time_ms

    def _offer_mended(self, choice: Choice) -> None:
        """Keep a choice, or one near it that fits and uses what it leaves."""
        if not choice or recompute_ms(choice) >= self.time_ms or not self.mends_left:
            return
        self.mends_left -= 1
        mended = self.chooser.mend(choice, self.budget_bytes, self.time_ms)
        if mended is not None:
            self.offer(self.chooser.spend(mended, self.budget_bytes))

    def _try_finer(self, shares: Mapping[int, FloatArray]) -> float:
        self._is_feasible = True
        choice = self.chooser.finer(shares)
        self._offer_mended(choice)
        if self.chooser.simulated_peak_bytes(choice) > self.budget_bytes:
            self._understated = self.chooser.understated_bytes(
                shares, self.budget_bytes
            )
        return self.time_ms

    def run_on_segments(self, formulation: Formulation) -> None:
        """Round what is best on fitted curves; the bound is that of the exact points.

        It is the relaxation's, which takes no branching.
        """

        def attempt(shares: Mapping[int, FloatArray]) -> IntArray | None:
            self._understated = None
            self._try_finer(shares)
            return self._understated

        search_segments(formulation, self.budget_bytes, self.options, attempt)
        relaxed = replace(self.options, relative_gap=math.inf)
        solution = self.chooser.solve(self.budget_bytes, relaxed)
        self.bound_ms = solution.bound_ms or 0.0

    def run(self) -> None:
        """Move the rows until nothing is left to gain."""
        raised: IntArray | None = self.chooser.no_bytes()
        lowest: IntArray | None = None
        for _ in range(_ROUNDS):
            if raised is None:
                break
            # The bound of the lowest rows holds for all others.
            is_lower = lowest is None or int(raised.min()) < int(lowest.min())
            solution = self._solve(raised, proves=is_lower)
            bound_ms = solution.bound_ms or 0.0
            if is_lower:
                lowest, self.bound_ms = raised, bound_ms
            elif (raised == lowest).all():
                self.bound_ms = max(self.bound_ms, bound_ms)
            higher = self._next_rows(raised, solution)
            raised = self._after_mixture(raised) if higher is None else higher
        if self.choice is not None and self._breaking:
            self.offer(
                self.chooser.relink(self.choice, self._breaking, self.budget_bytes)
            )
            if lowest is not None and self.bound_ms < self.time_ms * (1 - _SMALL_GAP):
                self._look_one_by_one(lowest)

    def _look_one_by_one(self, raised: IntArray) -> None:
        """Look at what takes less than the best choice, as the bound of rows allows."""
        looking = self.chooser.one_by_one(self.budget_bytes, raised, self.options)
        looking.bound_ms = self.bound_ms
        cheaper = looking.cheapest(self.time_ms)
        if cheaper is not None:
            self.offer(cheaper)
            self.offer(self.chooser.spend(cheaper, self.budget_bytes))
        self.bound_ms = looking.bound_ms

    def _solve(self, raised: IntArray, *, proves: bool) -> sac.SacSolution:
        most_work = int(_FIRST_SHARE * self._work_left)
        solution = self.chooser.solve(
            self.budget_bytes,
            self.options,
            raised=raised,
            start=self.start,
            least_ms=0.0 if proves else self.bound_ms,
            most_ms=self.time_ms,
            most_work=most_work,
            near=self._near,
            rows=self._last_rows,
            finer=self._try_finer,
        )
        # Where the gap is wide a solve may do more; that is not taken from others.
        self._work_left -= min(solution.work, most_work)
        self._last_rows = solution.rows
        return solution

    def _next_rows(
        self, raised: IntArray, solution: sac.SacSolution
    ) -> IntArray | None:
        """What to add to the rows in the next solve; None if nothing is to be gained.

        Raises no row further than the last choice asks for, and where the budget was
        broken, each at least so far: no choice comes twice.
        """
        rows = self._rows
        if solution.chosen is None:
            if self.is_settled():
                return None
            if not raised.any() and not self._is_feasible:
                floor = self.chooser.predicted_floor(self.options.backend)
                if floor.peak_bytes > self.budget_bytes:
                    # The MILP sees more memory than there is: what it can meet.
                    return np.minimum(0, self.budget_bytes - floor.predicted_bytes)
            rows.enough = raised
        else:
            choice = self.chooser.decode(solution)
            predicted = self.chooser.predicted_bytes(solution)
            off = self.chooser.true_bytes(choice) - predicted
            excess = self._excess(choice)
            if excess > 0:
                self._breaking, self._breaking_ms = choice, recompute_ms(choice)
                self._near = solution.chosen
                if not self.is_settled():
                    self._offer_mended(choice)
                kept = self.budget_bytes - predicted
                higher = rows.after_breaking(raised, off, kept)
                if rows.enough is None:
                    return higher
            else:
                overstated = excess + int(off.max()) < -_NEAR * self.budget_bytes
                lower = rows.after_fitting(raised, off, overstated=overstated)
                self.offer(self.chooser.spend(choice, self.budget_bytes))
                if rows.too_low is None and not self.is_settled():
                    return lower
        return None if self.is_settled() else rows.between()

    def _after_mixture(self, raised: IntArray) -> IntArray | None:
        """Rows that the last mixture does not keep whose choice broke the budget.

        The MILP takes the working set of a point between two others to lie between
        theirs. Where it does not, it finds the same mixture again and again.
        """
        understated, self._understated = self._understated, None
        if understated is None or self.is_settled(_SMALL_GAP):
            return None
        higher = np.maximum(raised, understated)
        return None if (higher == raised).all() else higher

    def is_settled(self, gap: float = 0.0) -> bool:
        """Whether what is left to gain is within the gap that was asked for."""
        least_ms = max(self.bound_ms, self._breaking_ms)
        gap = max(gap, self.options.relative_gap)
        return self.time_ms - least_ms <= gap * self.time_ms

    def _excess(self, choice: Choice) -> int:
        """True peak above the budget."""
        return self.chooser.true_peak_bytes(choice) - self.budget_bytes
