"""Solve the main MILP by rows: only positions that turn out to bind are in the model.

Every model solved here is a relaxation of the whole one: it has some of the rows, and
counts units where these rows cannot tell them apart. So its bound holds for the whole
problem. Its solution is dealt out to the units and checked at every position, in
integers; the positions that are broken become rows of the next model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from time import perf_counter

import numpy as np

from solvers import _pulp
from solvers._pulp import Backend
from solvers._sac_classes import classify, spread
from solvers._sac_counts import CountModel
from solvers._sac_greedy import likely, round_and_repair
from solvers._sac_holds import Numbers
from solvers._sac_start import Start
from solvers._sac_surrogate import least_times
from solvers._sac_table import Choice, Floats, Table
from solvers.solution import Termination

_LP_ROUNDS = 30  # of adding rows to the relaxation: a start, no proof hangs on it
_NEW_ROWS = 3  # at a time: every row splits classes
_TOLERANCE_BYTES = 4096  # weights off by 1e-6 move kilobytes
_MOST_APART = 32  # units: branching on many that are alike takes minutes
_EXACT_BYTES = 8  # what a least peak may be above its bound, if rows are kept well
_FIRST_GAP = 5e-3  # that is proven before a smaller one is tried
_FIRST_SHARE = 1e-3  # above the bound: dearer columns are left out at first,
_WIDER = 4.0  # and then fewer of them
_NEAR_PEAK = 2.0**-9  # of it: no cap is tried that is closer to the best or the bound
_MOST_HALVINGS = 10  # of the distance from a peak to its bound
_FAR_BELOW = -(2.0**60)  # any peak in bytes
_MOST_WORK = 7_000_000  # of all MILPs together, see `_pulp.run`: a second or two
_POLISHING_WORK = 300_000  # of that, to get well below the gap that was asked for,
_POLISHED = 1 / 8  # as a share of it
_MOST_INTEGERS = 400  # of a MILP: larger ones take seconds and find nothing
_ANY_WORK = 2**50
_LEAST_WORK = 200_000  # no MILP is built for less
_LATER_SHARE = 1 / 4  # of that is left for whole points, and of what is left then
_TOLERANCES = (4.0, 1.0)  # of segments of points, in gaps: coarse ones are quick
_NOISE = 1e-9  # of an objective: rounding, far below any gap that is asked for

# Shares of the points of units; the time of a choice in ms.
Finer = Callable[[Mapping[int, Floats]], float]


class Search:
    """One budget, or the least peak, of a table.

    Args:
        table: The units.
        units: Those that may be chosen.
        backend: Which solver to run.
        time_limit_s: Stop branching after this long; None to stop after an amount of
            work. Relaxations are solved in full.
        most_work: That amount, see `_pulp.run`; None for what takes a second or two.
        relative_gap: Stop when proven this close to the optimum.
        least_ms: No choice takes less time, as is known already.
        most_ms: Only choices that take less time are of interest.
        mixed: Units whose points stand for a finer curve: the bound must hold for
            mixtures of their points as well.
        near: A choice that nearly keeps the budget; what it takes to keep it is tried.
        rows: Positions that bound a problem like this one.
        finer: Is told units of a solution in which points are mixed, and their shares;
            says the time of a choice that the caller knows by now, in finer points.
        start: From a smaller budget of the same table and units; it is left with what
            the next one can use. None to begin from nothing.

    Attributes:
        rows: Positions that turned out to bind.
        binding: Those that bound the last relaxation.
        bound: Proven lower bound, in ms, or bytes for the least peak.
        choice: Best choice so far that keeps the budget.
        work: Of its MILPs so far, see `_pulp.run`.
        price: Milliseconds that one more byte of budget saves, by the duals of the
            relaxation.
    """

    def __init__(
        self,
        table: Table,
        *,
        units: Collection[int],
        backend: Backend,
        time_limit_s: float | None,
        relative_gap: float,
        most_work: int | None = None,
        least_ms: float = 0.0,
        most_ms: float = math.inf,
        mixed: Collection[int] = (),
        near: Choice | None = None,
        rows: Collection[int] = (),
        finer: Finer | None = None,
        start: Start | None = None,
    ) -> None:
        self._table = table
        self._start = start
        self._near = near
        self._finer = finer
        self._units = frozenset(units)
        self._mixed = frozenset(mixed) & self._units
        self._backend = backend
        self._gap = relative_gap
        if most_work is None:
            most_work = _MOST_WORK
        if time_limit_s is not None:  # then it ends by that, not by its work
            most_work = _ANY_WORK
        self._most_work = most_work
        self.work = 0
        self._reserve = 0
        self._ends = None if time_limit_s is None else perf_counter() + time_limit_s
        self._apart: set[int] = set() if start is None else start.apart
        self.rows = list(rows) or [int(table.base.argmax())]
        if start is not None and start.rows:
            self.rows = list(start.rows)
        self.binding: list[int] = []
        self.bound = least_ms
        self.choice: Choice | None = None
        self.price = 0.0
        self._best = most_ms
        self._relaxed = 0.0  # optimum of the last LP relaxation, and what a column
        self._surcharges = np.zeros(len(table.times))  # costs beyond it at least
        self._least_using: dict[int, Floats] = {}  # points, a choice takes in all

    # --- least time under a budget ------------------------------------------------

    def least_time(self, budget_bytes: int) -> Termination:
        """Search the choice of least time; `choice` and `bound` say what was found."""
        if self._start is not None and self._start.choice is not None:
            live = self._table.live(self._table.weights(self._start.choice))
            if live.max() <= budget_bytes:  # unless this budget is smaller after all
                self._offer(self._start.choice)
        if self._near is not None:
            weights = self._table.weights(self._near).astype(np.float64)
            self._offer(
                round_and_repair(self._table, budget_bytes, self._units, weights)
            )
        relaxed = self.relax(budget_bytes)
        if relaxed is not Termination.OPTIMAL:
            return relaxed
        ended = self._search(budget_bytes)
        if self._start is not None:
            self._start.choice = self.choice
        return ended

    def _search(self, budget_bytes: int) -> Termination:
        """What follows the relaxation."""
        wanted = self._gap
        # A small gap may not be reached in time: what a larger one needs comes first.
        for gap in dict.fromkeys((max(wanted, _FIRST_GAP), wanted)):
            self._gap = gap
            for tolerance in (math.inf, *_TOLERANCES):
                self._reserve = int(_LATER_SHARE * self._left())
                if not self._mix(budget_bytes, tolerance):
                    break
            self._reserve = 0
            if not self._is_done() and not (self._has_best and self._is_late()):
                ended = self._branch(budget_bytes)
                if ended is Termination.INFEASIBLE and not self._has_best:
                    return ended
        if self._is_done():
            self._polish(budget_bytes)
        if self.choice is None:
            return Termination.NO_INCUMBENT
        return Termination.OPTIMAL if self._is_done() else Termination.FEASIBLE

    def _polish(self, budget_bytes: int) -> None:
        """Go on for a little while: what is easy is solved beyond what was asked for.

        A smaller budget that is asked for later is then rarely found to be cheaper.
        """
        wanted, most_work = self._gap, self._most_work
        self._gap = wanted * _POLISHED
        self._most_work = min(most_work, self.work + _POLISHING_WORK)
        if self._mix(budget_bytes, math.inf):
            self._mix(budget_bytes, _TOLERANCES[-1])
        self._gap, self._most_work = wanted, most_work

    def relax(self, budget_bytes: int) -> Termination:
        """Solve LP relaxations until all rows are kept; round the last one."""
        weights: Floats | None = None
        for _ in range(_LP_ROUNDS):
            if self._is_hopeless(budget_bytes):
                return Termination.INFEASIBLE
            model, outcome, found = self._solve(budget_bytes, relaxed=True)
            if outcome.termination is not Termination.OPTIMAL:
                if weights is None or outcome.termination is Termination.INFEASIBLE:
                    return outcome.termination
                break
            assert outcome.bound is not None
            self._relaxed = outcome.bound / model.scale
            self._prove(self._relaxed)
            self._surcharges = model.surcharges() / model.scale
            prices = dict(zip(self.rows, model.prices(), strict=True))
            self.price = sum(prices.values()) / model.scale
            solved, weights = model, found
            live = self._table.live(weights)
            near = budget_bytes - _TOLERANCE_BYTES
            self.binding = [q for q in self.rows if live[q] >= near]
            if self._start is not None:  # they bind at the next budget too
                self._start.rows = self.binding
            cap = budget_bytes + _TOLERANCE_BYTES
            if not self._refine(model, weights, live, cap):
                break
        if weights is not None:
            self._offer(
                round_and_repair(self._table, budget_bytes, self._units, weights)
            )
            if not self._is_done():
                most_ms = self._best * (1.0 - self._gap * _POLISHED)
                least = least_times(
                    self._table, solved, mixed=self._mixed, most_ms=most_ms
                )
                if math.isinf(least.all_ms) and not self._has_best:
                    return Termination.INFEASIBLE
                self._prove(min(least.all_ms, most_ms))
                self._least_using = least.using_ms
            # The others change no bound, and tell units apart.
            self.rows = [q for q, price in prices.items() if price > 0.0] or self.rows
        return Termination.OPTIMAL

    def _branch(self, budget_bytes: int) -> Termination:
        """Solve MILPs over whole points until one keeps all rows.

        Columns that would cost much beyond the bound are left out at first. A
        solution that uses one of them takes `limit_ms` at least, so no bound above
        that is proven.
        """
        target, lowered = budget_bytes, _TOLERANCE_BYTES
        share = _FIRST_SHARE + self._gap
        limit_ms = self._limit_ms(share)
        whole_bound = 0.0  # of whole points: not of mixtures, for which units may stand
        while True:
            if self._is_hopeless(budget_bytes):
                return Termination.INFEASIBLE
            model, outcome, weights = self._solve(target, whole=True, limit_ms=limit_ms)
            is_true = target == budget_bytes  # else the model is no relaxation
            if outcome.bound is not None and is_true:
                least_ms = min(outcome.bound / model.scale, limit_ms)
                whole_bound = max(whole_bound, least_ms)
                if not self._mixed:
                    self._prove(least_ms)
            if not outcome.termination.has_incumbent:
                if outcome.termination is not Termination.INFEASIBLE:
                    return outcome.termination
                if is_true and not self._mixed and self._has_best:
                    self._prove(min(limit_ms, self._best))  # nothing is faster
                if limit_ms >= self._best:
                    if self.choice is not None:
                        return Termination.FEASIBLE
                    return outcome.termination  # at worst 4 KiB from what fits
                share *= _WIDER
                limit_ms = self._limit_ms(share)
                continue
            live = self._table.live(weights.astype(np.int64))
            if live.max() <= budget_bytes:
                self._offer(self._table.choice(weights))
                if self._is_done(whole_bound) or self._is_late():
                    return outcome.termination
                if limit_ms >= self._best:
                    return outcome.termination
                share *= _WIDER
                limit_ms = self._limit_ms(share)
                continue
            self._offer(
                round_and_repair(self._table, budget_bytes, self._units, weights)
            )
            if self._is_done(whole_bound) or self._is_late():
                return Termination.FEASIBLE
            if not self._refine(model, weights, live, budget_bytes):
                # The rows were kept within their tolerance, not exactly.
                excess = int(live.max()) - budget_bytes
                target -= max(excess, lowered)
                lowered *= 4

    def _mix(self, budget_bytes: int, tolerance: float) -> bool:
        """Solve MILPs in which points may be mixed: their bounds hold for finer curves.

        Args:
            budget_bytes: The cap.
            tolerance: What mixtures in segments of points may be too fast, in gaps;
                infinite if all points are mixed at will, at a tenth of the work.

        Returns:
            Whether smaller segments may prove more.
        """
        tolerance_ms = self._tolerance_ms(tolerance)
        while not self._is_done() and not self._is_late():
            limit_ms = self._interesting_ms
            model, outcome, weights = self._solve(
                budget_bytes, limit_ms=limit_ms, tolerance_ms=tolerance_ms
            )
            if outcome.termination is Termination.INFEASIBLE:
                self._prove(limit_ms)  # nothing is faster
            elif outcome.bound is not None:
                self._prove(min(outcome.bound / model.scale, limit_ms))
            if not outcome.termination.has_incumbent:
                return False
            if self._finer is not None:
                self._best = min(self._best, self._finer(likely(self._table, weights)))
            self._offer(
                round_and_repair(self._table, budget_bytes, self._units, weights)
            )
            live, cap = self._table.live(weights), budget_bytes + _TOLERANCE_BYTES
            if not self._refine(model, weights, live, cap):
                return model.mixes_known()
        return False

    # --- least peak ---------------------------------------------------------------

    def least_peak(self) -> Termination:
        """Search the choice of least peak; `bound` is in bytes."""
        self.bound = _FAR_BELOW  # numbers made up may have peaks below 0
        self._offer_peak([None] * len(self._table.parents))
        relaxed: list[Floats] = []
        for whole in (False, True):
            # Relaxations are not timed: without them the peak may be that of no AC.
            left = math.inf if whole else _LP_ROUNDS
            while not self._is_least(_EXACT_BYTES) and not (whole and self._is_late()):
                model, outcome, weights = self._solve(
                    None, relaxed=not whole, whole=whole
                )
                if outcome.bound is not None:
                    self._prove(outcome.bound / model.scale)
                if not outcome.termination.has_incumbent:
                    break
                dealt = weights.astype(np.int64) if whole else weights
                if whole:
                    self._offer_peak(self._table.choice(weights))
                else:
                    relaxed.append(weights)
                live = self._table.live(dealt)
                cap = int(self.bound) + _EXACT_BYTES
                left -= 1
                if not self._refine(model, weights, live, cap) or not left:
                    break
            if not whole:  # the last first: the bound of few rows is not to be met
                any(self._repair_peak(weights) for weights in relaxed[::-1])
        if not self._is_least(_TOLERANCE_BYTES):
            self._push_peak()
        is_proven = self._is_least(_TOLERANCE_BYTES)
        return Termination.OPTIMAL if is_proven else Termination.FEASIBLE

    def _repair_peak(self, weights: Floats) -> bool:
        """Round to whole points, close to the bound if that can be had."""
        for share in (0.0, 0.01, 0.1, 0.3):
            cap = int(self.bound + share * (self._best - self.bound)) + 1
            found = round_and_repair(self._table, cap, self._units, weights)
            if found is not None:
                self._offer_peak(found)
                return True
        return False

    def _push_peak(self) -> None:
        """Repair the best choice to keep a lower cap, half way to the bound at first.

        What a MILP finds before it must stop may be far from the least.
        """
        least = self.bound
        for _ in range(_MOST_HALVINGS):
            if self._best - least <= _NEAR_PEAK * self._best:
                return
            cap = int((self._best + least) / 2)
            assert self.choice is not None
            weights = self._table.weights(self.choice).astype(np.float64)
            found = round_and_repair(self._table, cap, self._units, weights)
            if found is None:
                least = cap
            else:
                self._offer_peak(found)

    def _offer_peak(self, choice: Choice) -> None:
        peak = float(self._table.live(self._table.weights(choice)).max())
        if peak < self._best:
            self._best, self.choice = peak, choice

    def _is_least(self, tolerance_bytes: int) -> bool:
        left = self._best - self.bound
        return left <= max(tolerance_bytes, self._gap * self._best)

    # --- both -----------------------------------------------------------------------

    def _solve(
        self,
        budget_bytes: int | None,
        *,
        relaxed: bool = False,
        whole: bool = False,
        limit_ms: float = math.inf,
        tolerance_ms: float = math.inf,
    ) -> tuple[CountModel, _pulp.Outcome, Floats]:
        """Model of the rows, how it ended, and its weights dealt out to the units."""
        start = self._start if relaxed else None
        again = start is not None and start.model_rows == self.rows
        if again and start is not None and start.model is not None:
            assert budget_bytes is not None
            model = start.model
            model.set_budget(budget_bytes)
        else:
            model = CountModel(
                self._table,
                classify(self._table, self.rows, self._kinds()),
                self.rows,
                units=self._units,
                budget_bytes=budget_bytes,
                mixed=None if whole or relaxed else self._mixed,
                surcharges=self._surcharges,
                room_ms=limit_ms * (1.0 + _NOISE) - self._relaxed,
                tolerance_ms=tolerance_ms,
                least_using=self._least_using,
                limit_ms=limit_ms * (1.0 + _NOISE),
            )
        if start is not None:
            start.model, start.model_rows = model, list(self.rows)
        if budget_bytes is not None and not relaxed and self._is_too_large(model):
            nothing = _pulp.Outcome(
                termination=Termination.NO_INCUMBENT, bound=None, solve_s=0.0
            )
            return model, nothing, np.zeros(len(self._table.times))
        left = None
        if self._ends is not None and not relaxed:  # a relaxation takes milliseconds
            left = max(0.0, self._ends - perf_counter())
        outcome = _pulp.run(
            model.model,
            backend=self._backend,
            time_limit_s=left,
            work_limit=None if relaxed else max(0, self._left()),
            relative_gap=self._gap,
            relaxed=relaxed,
            again=again,
        )
        if not relaxed:
            self.work += max(1, outcome.work)
        if not outcome.termination.has_incumbent:
            return model, outcome, np.zeros(len(self._table.times))
        totals = model.totals(whole=whole)
        return model, outcome, spread(self._table, model.classes, totals)

    def _kinds(self) -> list[int]:
        """Equal for units that may be in one class."""
        return [
            3 + u if u in self._apart else (u in self._units) + (u in self._mixed)
            for u in range(len(self._table.parents))
        ]

    def _refine(
        self, model: CountModel, weights: Numbers, live: Numbers, cap: int
    ) -> bool:
        """Add what a model lacks that a solution breaks; False if it lacks nothing.

        Classes first: where they hide that a row of the model is broken, more rows
        would be kept in the model and broken by the units in the same way.
        """
        return self._tell_apart(model, weights, live, cap) or self._add_rows(live, cap)

    def _tell_apart(
        self, model: CountModel, weights: Numbers, live: Numbers, cap: int
    ) -> bool:
        """Single out units whose classes hide that one holds what another one frees.

        Or does not hold what another one keeps.

        Layers repeat: what is alike is told apart at once. Where that would be more
        than `_MOST_APART` units the model stays the relaxation that it is.
        """
        table = self._table
        shares = np.bincount(table.owner, weights, len(table.parents))
        found: set[int] = set()
        for position in (q for q in self.rows if live[q] > cap):
            for hold in table.holds.at(position):
                if hold.columns is None:
                    continue
                by_point, held = weights[hold.columns].sum(), shares[hold.holders].max()
                if hold.is_kept:
                    is_hidden = abs(by_point - held) > _NOISE
                else:
                    is_hidden = by_point + held > 1.0 + _NOISE
                if is_hidden:
                    for other in table.holds.alike(hold.index):
                        found |= table.holds.parties(other)
        found = {u for u in found if not model.classes.is_alone(u)}
        if not found or len(self._apart | found) > _MOST_APART:
            return False
        self._apart |= found
        if self._start is not None:
            self._start.model, self._start.model_rows = None, []
        return True

    def _add_rows(self, live: Numbers, cap: int) -> bool:
        """Add the worst positions above a cap; False if all of them are rows."""
        over = np.asarray(live - cap, dtype=np.float64)
        over[self.rows] = 0.0
        if over.max() <= 0.0:
            return False
        # One of each stretch above the cap: neighbours differ little.
        bounds = np.flatnonzero(np.diff(over > 0.0)) + 1
        peaks = [
            (float(part.max()), int(start + part.argmax()))
            for start, part in zip(
                [0, *bounds.tolist()], np.split(over, bounds), strict=True
            )
        ]
        worst = sorted(peaks, reverse=True)[:_NEW_ROWS]
        self.rows += [position for excess, position in worst if excess > 0.0]
        return True

    def _is_hopeless(self, budget_bytes: int) -> bool:
        """Whether a row is above the budget although all that lowers it is chosen."""
        table = self._table
        for position in self.rows:
            least = int(table.base[position] + np.minimum(table.row(position), 0).sum())
            least += sum(min(h.added_bytes, 0) for h in table.holds.at(position))
            if least > budget_bytes:
                return True
        return False

    def _offer(self, choice: Choice | None) -> None:
        if choice is None:
            return
        time_ms = float(self._table.times @ self._table.weights(choice))
        if time_ms < self._best:
            self._best, self.choice = time_ms, choice

    def _prove(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def _tolerance_ms(self, tolerance: float) -> float:
        """So many gaps in time, rounded to a power of two, so that it recurs."""
        if math.isinf(tolerance):
            return tolerance
        most = tolerance * self._gap * self.bound if self.bound > 0.0 else 0.0
        if math.isinf(most) or not most:
            return most
        return math.ldexp(0.5, math.frexp(most)[1])

    def _limit_ms(self, share: float) -> float:
        """A share above the bound; all that may pay once that is a lot."""
        if share > 1.0 or not self.bound:
            return self._best
        return min(self._best, self.bound * (1.0 + share))

    def _is_done(self, bound: float = 0.0) -> bool:
        """Whether the best choice is close enough to what is proven."""
        if not self._has_best:
            return False
        left_ms = self._best - max(self.bound, bound)
        return left_ms <= (self._gap + _NOISE) * self._best

    @property
    def _interesting_ms(self) -> float:
        """What is not faster need not be told from the best choice."""
        return self._best * (1.0 - self._gap)

    @property
    def _has_best(self) -> bool:
        """Whether a time is known that the budget allows."""
        return math.isfinite(self._best)

    def _left(self) -> int:
        """Work that may still be done."""
        return self._most_work - self.work - self._reserve

    def _is_too_large(self, model: CountModel) -> bool:
        """Whether a MILP is not worth its time; with a time limit, all are."""
        if self._ends is not None or not self._has_best:
            return False
        return model.num_integers() > _MOST_INTEGERS

    def _is_late(self) -> bool:
        """Whether what a solve may take is spent: work, or time if that is limited."""
        if self._left() <= _LEAST_WORK:
            return True
        return self._ends is not None and perf_counter() >= self._ends
