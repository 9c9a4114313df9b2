"""Which units recompute what under a budget, and the least budget that is feasible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

from autosac.simulation.caching_allocator import least_block_bytes
from autosac.simulation.simulator import Simulator
from autosac.solvers import sac
from autosac.solvers.milp.solution import Backend
from autosac.solving.correcting import MOST_WORK, Search
from autosac.solving.formulation import Formulation
from autosac.solving.incumbents import Incumbents, recompute_ms
from autosac.solving.moved_blocks import MovedBlocks
from autosac.solving.one_by_one import PROVEN
from autosac.solving.rules_of_thumb import Choice
from autosac.solving.solve_options import SolveOptions
from autosac.solving.step_model import Floor, StepModel

_FLOOR_ROUNDS = 4  # of looking for a lower peak where the MILP is off
_FLOOR_MENDS = 8  # of making it a little lower
_LITTLE = 0.04  # of a time that a lower peak is worth
_DEARER_DESCENTS = 3  # of a choice that is to be as low as one that takes longer
_FLOOR_EFFORT = 8  # for what is searched once for all budgets
_FEW_MENDS = 4  # of a second search
_OWN_BLOCKS = 3  # searches in blocks of the best choice, each of a better one,
_OWN_WORK = MOST_WORK // 4  # and the work of all of them
_OWN_MENDS = 6
_LEAST_WORK = MOST_WORK // 16  # of the search in the smallest blocks: small gaps,
_LONG_WORK = MOST_WORK // 8  # and others, of a step of many points
_LEAST_MENDS = 4
_LITTLE_LEFT = 1 / 64  # in blocks, of what a plan must free: hardly any is cheaper
_SMALL_GAP = 0.02
_FEW_POINTS = 2500  # whose numbers take half a second to work out
_WIDE_GAP = 0.05  # that is worth some seconds
_NEAR_FLOOR = 2**-7  # of the least peak
_MANY_POINTS = 5000  # of a step with offload, whose least peak is then proven to
_LARGE_FLOOR_GAP = 2**-10  # of it
_HOST_ROUNDS = 6  # of looking for it where far memory is capped


class Chooser(StepModel):
    """Finds choices for one step; keeps what holds for all budgets.

    Args:
        simulator: Of the step.
        formulation: The MILP's numbers.
        incumbents: Choices that are known from the start.
        plain: Of the same step without offload: nothing that it chooses beats what is
            chosen here. None if this one offloads nothing.
        moved: Finds choices with offload that are not to be beaten either.
        usual: Works out the MILP's numbers in other blocks, if that is of use: asked
            for where a wide gap is left. None where no allocator is replayed, or wide
            gaps are not worth some seconds.
        tighter: Choosers of the same step with less far memory: what they found before
            is not to be beaten either.
    """

    def __init__(
        self,
        simulator: Simulator,
        formulation: Formulation,
        incumbents: Incumbents,
        plain: Chooser | None = None,
        moved: MovedBlocks | None = None,
        usual: Callable[[], Formulation | None] | None = None,
        tighter: Callable[[], Iterable[Chooser]] = tuple,
    ) -> None:
        super().__init__(simulator, formulation)
        self._tighter = tighter
        self._plain = plain
        self._moved = moved
        self._incumbents = incumbents
        self._usual = usual
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
            takes less than so many ms: in blocks of the plain step, or in the smallest
            if the choice would not fit in those and nothing is known that beats it.
        """
        if self.true_peak_bytes({}) <= budget_bytes:
            return {}, 0.0
        lowest = self._lowest.get(options.backend)
        if lowest is not None and self.true_peak_bytes(lowest) > budget_bytes:
            return None, 0.0
        descends = self._usual is not None
        search = Search(self, budget_bytes, options, start, descends=descends)
        in_least_blocks = None
        known = self._incumbents.cheapest(budget_bytes)
        search.offer(known)
        if self._plain is not None:
            search.offer(self._plain.choose(budget_bytes, options)[0])
        if self._moved is not None:
            search.offer(self._moved.cheapest(budget_bytes))
        for other in self._tighter():
            search.offer(other._incumbents.cheapest(budget_bytes))
        if self._formulation.units and options.segments is not None:
            search.run_on_segments(self._formulation)
        elif self._formulation.units:
            search.run()
            in_least_blocks = self._search_least_blocks(search)
            if in_least_blocks and in_least_blocks.time_ms < search.bound_ms:
                search = in_least_blocks  # whose bound holds
                search.look_around(_WIDE_GAP)
            else:
                self._close_wide_gap(search)
            is_proven = search.is_within(PROVEN * options.relative_gap)
            if known and search.choice is known and not is_proven:
                # Nothing is cheaper by more than the gap; by less, something may be.
                search.offer(self.spend(known, budget_bytes))
        if self._moved is not None and search.choice and not search.is_settled():
            for cheaper in self._moved.alike:
                search.offer(self.relink(search.choice, cheaper, budget_bytes))
        if search.choice is None:
            search.offer(self.lowest(options.backend))
        if search.choice is None:
            return None, 0.0
        self._incumbents.add(search.choice)
        return search.choice, self._bound_ms(search, in_least_blocks)

    def _is_near(self, search: Search) -> bool:
        """Whether the gap to a bound that holds is small."""
        if search.choice is None:
            return False
        gap_ms = search.time_ms - self._bound_ms(search, None)
        return gap_ms <= _SMALL_GAP * search.time_ms

    def _bound_ms(self, search: Search, in_least_blocks: Search | None) -> float:
        """The bound of a search; in the smallest blocks if its choice refutes it."""
        if search is in_least_blocks or not self._is_refuted(search):
            return search.bound_ms
        if in_least_blocks is not None:
            return in_least_blocks.bound_ms
        return self._in_least_blocks.relaxed_ms(
            search.budget_bytes, search.options, search.time_ms
        )

    def _is_refuted(self, search: Search) -> bool:
        """Whether the best choice breaks the MILP's rows, and beats all that keep them.

        Others that break them may be cheaper still.
        """
        best = search.choice
        if best is None or not search.is_within(search.options.relative_gap):
            return False
        in_blocks = self._simulator.in_blocks
        return in_blocks.peak_bytes(best) > search.budget_bytes

    def _in_blocks(self, blocks: Simulator) -> Chooser:
        """Chooser of the same step whose MILP takes blocks to be of other sizes."""
        formulation = self._formulation.in_blocks(blocks)
        return Chooser(self._simulator, formulation, self._incumbents)

    @cached_property
    def _least_blocks(self) -> Simulator:
        """The step in blocks as small as they can be, whatever a plan does."""
        least_bytes = least_block_bytes(self._simulator.requested_bytes)
        return self._simulator.resized(least_bytes)

    @cached_property
    def _in_least_blocks(self) -> Chooser:
        return self._in_blocks(self._least_blocks)

    def _search_least_blocks(self, search: Search) -> Search | None:
        """Search once more, in blocks so small that no choice that fits is missed.

        None if that takes long, or where requests leave little of their blocks in the
        plain step: under another plan they may leave less. Where the gap to a bound
        that holds is not small, it has as much work as the first search (less if there
        are many points), and goes on if they leave anything.
        """
        if self._usual is None or search.work > MOST_WORK:
            return None
        is_near, is_long = self._is_near(search), self._num_points > _FEW_POINTS
        if is_long and (is_near or not self._is_refuted(search)):
            return None  # else its bound is asked for in these blocks anyway
        least = self._least_blocks.baseline.live_bytes
        plain = self._simulator.in_blocks.baseline.live_bytes
        left_bytes = int((plain - least).max())
        to_free_bytes = self.true_peak_bytes({}) - search.budget_bytes
        if left_bytes <= (_LITTLE_LEFT * to_free_bytes if is_near else 0):
            return None
        more_work = _LONG_WORK if is_long else MOST_WORK
        most_work = _LEAST_WORK if is_near else more_work
        other = self._second_search(
            self._in_least_blocks, search, most_work, _LEAST_MENDS
        )
        other.look_one_by_one(is_quick=True)
        search.offer(other.choice)
        return other

    @cached_property
    def _in_usual_blocks(self) -> Chooser | None:
        """Chooser of the same step whose MILP takes blocks to be as usual."""
        formulation = None if self._usual is None else self._usual()
        if formulation is None:
            return None
        return Chooser(self._simulator, formulation, self._incumbents)

    def _close_wide_gap(self, search: Search) -> None:
        """Look elsewhere for a cheaper choice, where an allocator decides what fits."""
        search.look_one_by_one()
        if self._usual is None or search.work > MOST_WORK:
            return
        search.look_around(_WIDE_GAP)
        is_best = self._is_best_in_own_blocks(search)
        search.look_on(_WIDE_GAP)
        if is_best or search.is_within(_WIDE_GAP):
            return
        if self._in_usual_blocks is not None:
            self._second_search(self._in_usual_blocks, search)

    def _is_best_in_own_blocks(self, search: Search) -> bool:
        """Search again in blocks as large as under the best choice.

        Its predicted peak is then the true one or near it, as are those of its like.

        Returns:
            Whether nothing is much cheaper in these blocks. In others it may be, so
            that is no bound.
        """
        work_left = _OWN_WORK
        for _ in range(_OWN_BLOCKS):
            best = search.choice
            if best is None or search.is_within(_WIDE_GAP):
                return False
            chooser = self._in_blocks(self._simulator.in_blocks_of(best))
            other = self._second_search(chooser, search, work_left, _OWN_MENDS)
            work_left = other.work_left
            if search.choice is best:
                return other.is_within(_WIDE_GAP)
        return False

    def _second_search(
        self,
        chooser: Chooser,
        search: Search,
        most_work: int = MOST_WORK // _FLOOR_ROUNDS,
        most_mends: int = _FEW_MENDS,
    ) -> Search:
        """Search with another MILP for what is cheaper than the choice of a search."""
        other = Search(chooser, search.budget_bytes, search.options, None)
        other.work_left, other.likely_ms = most_work, search.bound_ms
        other.mends_left, other.asks_floor = most_mends, False
        other.offer(search.choice)
        other.run()
        search.offer(other.choice)
        return other

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
    def _num_points(self) -> int:
        return sum(len(curve.policies) for curve in self._formulation.curves)

    @property
    def _floor_gap(self) -> float:
        """How close to its bound the least predicted peak must be proven to lie."""
        is_large = self._plain is not None and self._num_points > _MANY_POINTS
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

    def _find_lowest(self, backend: Backend) -> Choice:
        if not self._formulation.units:
            return self._incumbents.lowest()
        least_bytes, choice, _ = self.predicted_floor(backend)
        best = self._incumbents.lowest(choice)
        if self._plain is not None:
            choices = [best, *self._known_lowest(self._plain.lowest(backend))]
            known = (other._lowest.get(backend) for other in self._tighter())
            choices += [choice for choice in known if choice is not None]
            best = min(choices, key=self.true_peak_bytes)
        best_bytes = self.true_peak_bytes(best)
        # Does the MILP see more memory than there is?
        is_overstated = least_bytes > best_bytes
        for _ in range(_FLOOR_ROUNDS):  # where the MILP is off, another may be lower
            if best_bytes - least_bytes <= _NEAR_FLOOR * best_bytes:
                break
            target = (best_bytes + least_bytes) // 2
            lower = self._below(target, backend)
            if lower is None:
                least_bytes = target
            else:
                best = lower
                best_bytes = self.true_peak_bytes(best)
        fast = None
        if self._usual is not None:
            fast = self._fast_and_low(backend, recompute_ms(best), best_bytes)
        if fast is not None and self.true_peak_bytes(fast) <= best_bytes:
            best = fast
        elif is_overstated and self._in_usual_blocks is not None:
            lower = self._in_usual_blocks._below_all(best, backend)
            best = min(best, lower, key=self.true_peak_bytes)
        best = self._mended(best)
        self._incumbents.add(best)
        return best

    def _fast_and_low(
        self, backend: Backend, best_ms: float, best_bytes: int
    ) -> Choice | None:
        """The fastest choice of least predicted peak, made lower at a little time.

        Many choices reach that peak, and some take a third of others' time. Which of
        them is lowest in truth is up to the allocator. While it is above that of the
        best one known, it is made lower at more time.

        Args:
            backend: Which solver to run.
            best_ms: Time of that one.
            best_bytes: Its true peak.
        """
        floor = self.predicted_floor(backend)
        options = SolveOptions(backend=backend, polishes=False)
        solution = self.solve(
            int(max(floor.predicted_bytes)), options, most_work=MOST_WORK
        )
        if solution.chosen is None:
            return None
        choice: Choice = self.decode(solution)
        least_ms, more = recompute_ms(choice), _LITTLE
        most_ms = least_ms * (1.0 + more)
        choice = self.lower_peak(choice, most_ms, effort=_FLOOR_EFFORT)
        for _ in range(_DEARER_DESCENTS):
            more *= 3
            is_low = self.true_peak_bytes(choice) <= best_bytes
            most_ms = least_ms * (1.0 + more)
            if is_low or most_ms >= best_ms:
                break
            choice = self.lower_peak(choice, most_ms, best_bytes, _FLOOR_EFFORT)
        return choice

    def _mended(self, choice: Choice) -> Choice:
        """A choice near one that suits an allocator better, or itself."""
        for _ in range(_FLOOR_MENDS):
            lower = self.mend(choice, self.true_peak_bytes(choice) - 1, math.inf)
            if lower is None or not self._formulation.keeps_host(lower):
                lower = None if self._usual is None else self.lowered(choice)
            if lower is None:
                break
            choice = lower
        return choice

    def _below(self, peak_bytes: int, backend: Backend) -> Choice | None:
        """A choice of at most some peak, if it is found in little work."""
        search = Search(self, peak_bytes, SolveOptions(backend=backend), None)
        search.work_left = MOST_WORK // _FLOOR_ROUNDS
        search.run()
        return search.choice

    def _below_all(self, best: Choice, backend: Backend) -> Choice:
        """The lowest choice of this MILP, or one below that and another one.

        Args:
            best: The other one.
            backend: Which solver to run.
        """
        lowest = self.predicted_floor(backend).choice
        least_bytes = min(map(self.true_peak_bytes, (best, lowest)))
        below = self._below(least_bytes - 1, backend)
        return lowest if below is None else below
