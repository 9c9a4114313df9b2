"""The choice of least time under a budget: only rows that turn out to bind.

A relaxation first, then a bound by dynamic programming, then MILPs over classes of
units, from coarse ones to those of whole points; `sac/rows.py` has what they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np

from ..milp.solution import Backend, Termination
from .greedy import likely, round_and_repair
from .rows import (
    LP_ROUNDS,
    MOST_IN_VAIN,
    NOISE,
    SMALL_GAP,
    TOLERANCE_BYTES,
    RowSearch,
)
from .start import Start
from .surrogate import least_times
from .table import Choice, Floats, Table

_FIRST_GAP = 5e-3  # that is proven before a smaller one is tried
_FIRST_SHARE = 1e-3  # above the bound: dearer columns are left out at first,
_WIDER = 4.0  # and then fewer of them
_NARROW = 0.02  # likewise, where points are mixed,
_LESS_NARROW = 1.5  # and then so many times as much,
_MUCH_LESS = 2.25  # or so many if nothing lies below it
_LIKELY = 1 - 1 / 64  # of a likely bound: at the bound itself proofs take long
_RISE = 1e-4  # of a relaxation that new rows are worth,
_POLISHING_WORK = 300_000  # to get well below the gap that was asked for,
_POLISHED = 1 / 64  # as a share of it
_TOLERANCES = (4.0, 1.0)  # of segments of points, in gaps: coarse ones are quick
_MOST_CUTS = 4  # of these where solutions mix points, as long as the gap is wide
_CLOSED = 1 / 8  # of it by each
_PROVEN = (Termination.OPTIMAL, Termination.INFEASIBLE)

# Shares of the points of units; the time of a choice in ms.
Finer = Callable[[Mapping[int, Floats]], float]


class Search(RowSearch):
    """Search of the choice of least time for one budget of a table.

    Args:
        table, units, backend, time_limit_s, relative_gap, most_work, mixed, start: As
            `RowSearch`.
        least_ms: No choice takes less time, as is known already.
        likely_ms: Hardly any choice is likely to take less: whether one takes a little
            less than that is asked first.
        most_ms: Only choices that take less time are of interest.
        near: A choice that nearly keeps the budget; what it takes to keep it is tried.
        rows: Positions that bound a problem like this one.
        finer: Is told units of a solution in which points are mixed, and their shares;
            says the time of a choice that the caller knows by now, in finer points.
        polishes: Goes on for a little while when the gap is reached.

    Attributes:
        prices: Milliseconds that one more byte at each row's position saves, by the
            duals of the relaxation.
    """

    quick_nodes = 64  # of CBC without cuts: mostly enough

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
        likely_ms: float = 0.0,
        most_ms: float = math.inf,
        mixed: Collection[int] = (),
        near: Choice | None = None,
        rows: Collection[int] = (),
        finer: Finer | None = None,
        polishes: bool = True,
        start: Start | None = None,
    ) -> None:
        super().__init__(
            table,
            units=units,
            backend=backend,
            time_limit_s=time_limit_s,
            relative_gap=relative_gap,
            most_work=most_work,
            mixed=mixed,
            start=start,
        )
        self._near = near
        self._finer = finer
        self._polishes = polishes
        self.rows = list(rows) or self.rows
        if start is not None and start.rows:
            self.rows = list(start.rows)
        self.bound = least_ms
        self._likely = _LIKELY * likely_ms
        self.prices: dict[int, float] = {}
        self._best = most_ms

    def run(self, budget_bytes: int) -> Termination:
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
        """Solve MILPs after the relaxation, until the gap or the work is reached."""
        wanted = self._gap
        # A small gap may not be reached in time: what a larger one needs comes first.
        for gap in dict.fromkeys((max(wanted, _FIRST_GAP), wanted)):
            self._gap = gap
            for tolerance in (math.inf, *_TOLERANCES):
                if not self._mix_and_cut(budget_bytes, tolerance):
                    break
            if not self._is_done() and not (self._has_best and self._is_late()):
                ended = self._branch(budget_bytes)
                if ended is Termination.INFEASIBLE and not self._has_best:
                    return ended
        if self._is_done() and self._polishes:
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
            # Coarse ones: segments for so small a gap are too many.
            self._mix(budget_bytes, _TOLERANCES[0] / _POLISHED)
        self._gap, self._most_work = wanted, most_work

    def relax(self, budget_bytes: int) -> Termination:
        """Solve LP relaxations until all rows are kept; round the last one."""
        weights: Floats | None = None
        rounds_in_vain = 0
        for _ in range(LP_ROUNDS):
            if self._is_hopeless(budget_bytes):
                return Termination.INFEASIBLE
            model, outcome, new_weights = self._solve(budget_bytes, relaxed=True)
            if outcome.termination is not Termination.OPTIMAL:
                if weights is None or outcome.termination is Termination.INFEASIBLE:
                    return outcome.termination
                break
            assert outcome.bound is not None
            before_ms, self._relaxed = self._relaxed, outcome.bound / model.scale
            self._prove(self._relaxed)
            is_higher = self._relaxed > before_ms * (1.0 + _RISE)
            rounds_in_vain = 0 if is_higher else rounds_in_vain + 1
            self._surcharges = model.surcharges() / model.scale
            priced = zip(self.rows, model.prices(), strict=True)
            self.prices = {q: price / model.scale for q, price in priced}
            solved, weights = model, new_weights
            live = self._table.live(weights)
            near = budget_bytes - TOLERANCE_BYTES
            if self._start is not None:  # what binds does so at the next budget too
                self._start.rows = [q for q in self.rows if live[q] >= near]
            cap = budget_bytes + TOLERANCE_BYTES
            if rounds_in_vain == MOST_IN_VAIN:
                break
            if not self._refine(model, weights, live, cap):
                break
        if weights is not None:
            self._offer(
                round_and_repair(self._table, budget_bytes, self._units, weights)
            )
            if not self._is_done():
                most_ms = self._best * (1.0 - min(1.0, self._gap) * _POLISHED)
                least = least_times(
                    self._table, solved, mixed=self._mixed, most_ms=most_ms
                )
                if math.isinf(least.all_ms) and not self._has_best:
                    return Termination.INFEASIBLE
                self._prove(min(least.all_ms, most_ms))
                self._least_using = least.using_ms
            # The others change no bound, and tell units apart.
            binding = zip(self.rows, solved.is_binding(), strict=False)
            self.rows = [q for q, binds in binding if binds] or self.rows
        return Termination.OPTIMAL

    def _branch(self, budget_bytes: int) -> Termination:
        """Solve MILPs over whole points until one keeps all rows.

        Columns that would cost much beyond the bound are left out at first. A
        solution that uses one of them takes `limit_ms` at least, so no bound above
        that is proven.
        """
        target, lowered = budget_bytes, TOLERANCE_BYTES
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

    def _mix_and_cut(self, budget_bytes: int, tolerance: float) -> bool:
        """As `_mix`; again, with segments cut at mixtures, while the gap is wide.

        And as long as each time closes some of it. Else whole points are tried: where
        mixtures lie far below them, rounding finds no good ones.
        """
        is_mixed = self._mix(budget_bytes, tolerance)
        for _ in range(_MOST_CUTS if math.isfinite(tolerance) else 0):
            if not is_mixed or self._is_done(gap=SMALL_GAP) or self._is_late():
                break
            before_ms = self._best - self.bound
            is_mixed = self._mix(budget_bytes, tolerance)
            if self._best - self.bound > before_ms * (1.0 - _CLOSED):
                return False
        return is_mixed

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
        share = _NARROW
        while not self._is_done() and not self._is_late():
            most_ms = self._interesting_ms
            limit_ms = min(most_ms, max(self._limit_ms(share), self._likely))
            before_ms = self.bound, self._best
            model, outcome, weights = self._solve(
                budget_bytes, limit_ms=limit_ms, tolerance_ms=tolerance_ms
            )
            if outcome.termination is Termination.INFEASIBLE:
                self._prove(limit_ms)  # nothing is faster
            elif outcome.bound is not None:
                self._prove(min(outcome.bound / model.scale, limit_ms))
            if outcome.termination.has_incumbent:
                self._offer_mixture(budget_bytes, weights)
            if outcome.termination in _PROVEN and self.bound >= limit_ms < most_ms:
                is_empty = outcome.termination is Termination.INFEASIBLE
                is_empty &= not outcome.num_nodes  # else what lies above takes longer
                share *= _MUCH_LESS if is_empty else _LESS_NARROW
                continue
            if not outcome.termination.has_incumbent:
                return False
            live, cap = self._table.live(weights), budget_bytes + TOLERANCE_BYTES
            is_refined = self._refine(model, weights, live, cap)
            # Positions that are no rows yet need no tolerance.
            if not is_refined and not self._add_rows(live, budget_bytes):
                for shape, places in model.mixtures().items():
                    self._cuts.setdefault(shape, set()).update(places)
                return model.mixes_known()
            is_in_vain = before_ms == (self.bound, self._best)
            if is_in_vain and math.isinf(tolerance):
                return True  # with these rows smaller segments prove more
        return False

    def _offer_mixture(self, budget_bytes: int, weights: Floats) -> None:
        """Try what is close to a solution that mixes points."""
        if self._finer is not None:
            self._best = min(self._best, self._finer(likely(self._table, weights)))
        self._offer(round_and_repair(self._table, budget_bytes, self._units, weights))

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

    def _tolerance_ms(self, tolerance: float) -> float:
        """A number of gaps as a time, rounded to a power of two so that it recurs."""
        if math.isinf(tolerance):
            return tolerance
        likely_ms = max(self.bound, self._best / 2) if self._has_best else self.bound
        most = tolerance * self._gap * likely_ms if self.bound > 0.0 else 0.0
        if math.isinf(most) or not most:
            return most
        return math.ldexp(0.5, math.frexp(most)[1])

    def _limit_ms(self, share: float) -> float:
        """Time a share above the bound, or the incumbent's if that is less."""
        if share > 1.0 or not self.bound:
            return self._best
        return min(self._best, self.bound * (1.0 + share))

    def _is_done(self, bound: float = 0.0, gap: float = 0.0) -> bool:
        """Whether the best choice is close enough to what is proven."""
        if not self._has_best:
            return False
        left_ms = self._best - max(self.bound, bound)
        return left_ms <= (max(self._gap, gap) + NOISE) * self._best

    @property
    def _interesting_ms(self) -> float:
        """Time below which a choice beats the incumbent by more than the gap."""
        return self._best * (1.0 - self._gap)
