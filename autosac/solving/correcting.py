"""The search for one budget: solve, simulate, correct, keep the best.

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
from dataclasses import dataclass, field

import numpy as np

from autosac.solvers import sac
from autosac.solving.corrections import Rows
from autosac.solving.formulation import Formulation
from autosac.solving.incumbents import recompute_ms
from autosac.solving.one_by_one import PROVEN, OneByOne
from autosac.solving.rules_of_thumb import Choice, FloatArray
from autosac.solving.segmented import search_segments
from autosac.solving.solve_options import SolveOptions
from autosac.solving.step_model import StepModel
from autosac.step.tape import IntArray

_ROUNDS = 6  # of moving the rows
MOST_WORK = 6_000_000  # of all of them: see `solvers.milp.pulp_runner.run`
_FIRST_SHARE = 5 / 6  # of that for the first one, and of what is left for the next
_ENOUGH = 1.5  # times what the first one leaves: less finds no other mixture
_MOST_MENDS = 14  # a tenth of a second each where an allocator is replayed
_SMALL_GAP = 0.02  # what mixtures that broke the budget may have cost at most
_DESCENTS = 4  # with ever more time, of what broke the budget
_LITTLE = 0.1  # of its time: what the first may add
_NEAR = 2**-11  # of the budget: rows this close to each other give the same plan


@dataclass(slots=True)
class Search:
    """The correction loop for one budget.

    Attributes:
        chooser: Of the step.
        budget_bytes: Cap on the true peak.
        options: How to solve.
        start: What smaller budgets of a sweep found.
        choice: The cheapest choice so far that fits, and its time.
        bound_ms: Of the solve with the lowest rows.
        likely_ms: The same of the last solve, or what is known of a search like this.
        mends_left: How many choices that break the budget may still be mended.
        work_left: Of all MILPs that are still to be solved,
        work: and of those that were: where the gap is wide it is more than was left.
        descends: Whether an allocator may add to choices, so that it pays to lower one
            that breaks the budget.
        asks_floor: Whether rows come down where the MILP's least peak is above the
            budget: it takes a MILP to know that.
    """

    chooser: StepModel
    budget_bytes: int
    options: SolveOptions
    start: sac.Start | None
    choice: Choice | None = None
    time_ms: float = math.inf
    bound_ms: float = 0.0
    likely_ms: float = 0.0
    mends_left: int = _MOST_MENDS
    work_left: int = MOST_WORK
    work: int = 0
    descends: bool = False
    asks_floor: bool = True
    _breaking_ms: float = 0.0
    _breaking: Choice | None = None  # the last that broke the budget
    _descended_from: Choice | None = None  # the same when its peak was lowered,
    _lowered: Choice | None = None  # the lowest choice near it,
    _lowered_ms: float = 0.0  # and what that may have taken
    _near: tuple[int | None, ...] | None = None  # the same as the MILP has it
    _is_feasible: bool = False  # as far as the MILP's relaxation can tell
    _lowest: IntArray | None = None  # rows whose bound holds
    _last_rows: tuple[int, ...] = ()  # of the last solve: positions
    _looking: OneByOne | None = None
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
        self._offer_spent(self.chooser.mend(choice, self.budget_bytes, self.time_ms))

    def _offer_spent(self, choice: Choice | None) -> None:
        """Keep a choice that fits, with what it leaves of the budget used."""
        if choice is not None:
            self.offer(choice)
            self.offer(self.chooser.spend(choice, self.budget_bytes))

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
        self.bound_ms = self.chooser.relaxed_ms(
            self.budget_bytes, self.options, self.time_ms
        )

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
            if self.descends and is_lower:
                self._lower_breaking(_SMALL_GAP, most_descents=1)
            raised = self._after_mixture(raised) if higher is None else higher
        if self.choice is not None and self._breaking is not None:
            self.offer(
                self.chooser.relink(self.choice, self._breaking, self.budget_bytes)
            )
            self._lowest = lowest

    def look_around(self, gap: float) -> None:
        """Look near what broke the budget and what fits, after `run`.

        As long as the gap is wider than some gap.
        """
        self._lower_breaking(gap, most_descents=_DESCENTS)
        breaking = self._breaking if self._breaking_ms < self.time_ms else {}
        if breaking and not self.is_within(gap):
            self._offer_spent(
                self.chooser.mend(
                    breaking, self.budget_bytes, self.time_ms, is_last=True
                )
            )
        for start in (breaking, self.choice):
            if start and self.choice is not None and not self.is_within(gap):
                self._offer_spent(
                    self.chooser.anneal(self.choice, start, self.budget_bytes)
                )

    def _lower_breaking(self, gap: float, most_descents: int) -> None:
        """Lower the peak of what broke the budget, at ever more time, until it fits.

        And once it does, at less time.
        """
        if self._descended_from is not self._breaking:
            self._descended_from = self._lowered = self._breaking
            self._lowered_ms = self._breaking_ms
        for _ in range(most_descents):
            least_ms = self._lowered_ms
            is_near = self.time_ms - least_ms <= gap * self.time_ms
            if not self._lowered or is_near or self.is_within(gap):
                break
            added_ms = least_ms - self._breaking_ms
            most_ms = self._breaking_ms + (2 * added_ms or least_ms * _LITTLE)
            most_ms = min(most_ms, (least_ms + self.time_ms) / 2)
            fitting = self._lower(self._lowered, most_ms)
            if fitting is None:
                self._lowered_ms = most_ms
            else:
                self._offer_spent(fitting)
                self._lowered = self._breaking

    def _lower(self, choice: Choice, most_ms: float) -> Choice | None:
        """A choice near one that breaks the budget; None if none was found that fits.

        The lowest one found is where the next search begins.
        """
        self._lowered = self.chooser.lower_peak(choice, most_ms, self.budget_bytes)
        if self.chooser.fits(self._lowered, self.budget_bytes):
            return self._lowered
        return self.chooser.mend(self._lowered, self.budget_bytes, self.time_ms)

    def look_one_by_one(self, *, is_quick: bool = False) -> None:
        """Look at what takes less than the best choice that fits, after `run`.

        If a gap is left, and a choice broke the budget.

        Args:
            is_quick: See `OneByOne.cheapest`.
        """
        if self._lowest is None or self.is_within(PROVEN * self.options.relative_gap):
            return
        self._looking = self.chooser.one_by_one(
            self.budget_bytes, self._lowest, self.options, self.time_ms
        )
        self._looking.bound_ms = self.bound_ms
        self._offer_spent(self._looking.cheapest(self.time_ms, is_quick=is_quick))
        self.bound_ms = self._looking.bound_ms

    def look_on(self, gap: float) -> None:
        """Go on with that, as long as the gap is wider than some gap."""
        if self._looking is not None and not self.is_within(gap):
            self._offer_spent(self._looking.go_on(self.time_ms))
            self.bound_ms = self._looking.bound_ms

    def _solve(self, raised: IntArray, *, proves: bool) -> sac.SacSolution:
        most_work = int(_FIRST_SHARE * self.work_left)
        solution = self.chooser.solve(
            self.budget_bytes,
            self.options,
            raised=raised,
            start=self.start,
            least_ms=0.0 if proves else self.bound_ms,
            likely_ms=self.likely_ms,
            most_ms=self.time_ms,
            most_work=most_work,
            near=self._near,
            rows=self._last_rows,
            finer=self._try_finer,
        )
        # Where the gap is wide a solve may do more; that is not taken from others.
        self.work_left -= min(solution.work, most_work)
        self.work += solution.work
        self._last_rows = solution.rows
        self.likely_ms = solution.bound_ms or 0.0
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
            if self.asks_floor and not raised.any() and not self._is_feasible:
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
        is_spent = self.work_left < MOST_WORK * (1.0 - _FIRST_SHARE) * _ENOUGH
        if understated is None or is_spent or self.is_settled(_SMALL_GAP):
            return None
        higher = np.maximum(raised, understated)
        return None if (higher == raised).all() else higher

    def is_settled(self, gap: float = 0.0) -> bool:
        """Whether what is left to gain is within the gap that was asked for."""
        least_ms = max(self.bound_ms, self._breaking_ms)
        gap = max(gap, self.options.relative_gap)
        return self.choice is not None and self.time_ms - least_ms <= gap * self.time_ms

    def is_within(self, gap: float) -> bool:
        """Whether the best choice that fits is proven to be this close to the least."""
        is_near = self.time_ms - self.bound_ms <= gap * self.time_ms
        return self.choice is not None and is_near

    def _excess(self, choice: Choice) -> int:
        """True peak above the budget."""
        return self.chooser.true_peak_bytes(choice) - self.budget_bytes
