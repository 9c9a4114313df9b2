"""What searches with rows on demand share: models of few rows, and adding rows.

Every model solved here is a relaxation of the whole one: it has some of the rows, and
counts units where these rows cannot tell them apart. So its bound holds for the whole
problem. Its solution is dealt out to the units and checked at every position, in
integers; the positions that are broken become rows of the next model.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from time import perf_counter

import numpy as np

from ..milp import highs_runner, pulp_runner
from ..milp.solution import Backend, Termination
from .classes import classify, spread
from .counts import CountModel
from .holds import Numbers
from .start import Start
from .table import Choice, Floats, Table

LP_ROUNDS = 30  # of adding rows to the relaxation: a start, no proof hangs on it
MOST_IN_VAIN = 3  # of these: what breaks then are dealt-out fractions
TOLERANCE_BYTES = 4096  # weights off by 1e-6 move kilobytes
NOISE = 1e-9  # of an objective: rounding, far below any gap that is asked for
_NEW_ROWS = 3  # at a time: every row splits classes
_MOST_APART = 32  # units: branching on many that are alike takes minutes
_MOST_WORK = 7_000_000  # of all MILPs together, see `pulp_runner.run`: a second or two
_COARSER = 4.0  # and segments of points are so many times coarser if it has
_MANY_INTEGERS = 1200
_MOST_INTEGERS = 400  # of a MILP: larger ones take seconds and find little
SMALL_GAP = 0.02  # where that little is not worth the time
_ANY_WORK = 2**50
_NOTHING = pulp_runner.Outcome(
    termination=Termination.NO_INCUMBENT, bound=None, solve_s=0.0
)
_LEAST_WORK = 150_000  # no MILP is built for less


class RowSearch:
    """Search with rows on demand: models of some of a table's rows.

    Args:
        table: The units.
        units: Those that may be chosen.
        backend: Which solver to run.
        time_limit_s: Stop branching after this long; None to stop after an amount of
            work. Relaxations are solved in full.
        relative_gap: Stop when proven this close to the optimum.
        most_work: That amount, see `pulp_runner.run`; None for a second or two.
        mixed: Units whose points stand for a finer curve: the bound must hold for
            mixtures of their points as well.
        start: From a smaller budget of the same table and units; it is left with what
            the next one can use. None to begin from nothing.

    Attributes:
        rows: Positions that turned out to bind.
        bound: Proven lower bound, in ms, or bytes for the least peak.
        choice: Best choice so far.
        work: Of its MILPs so far, see `pulp_runner.run`.
        more_if_wide: Where the gap is wide (`highs_runner.WIDE_GAP`), a MILP may do so
            many times the work that was asked for,
        more_rounds_if_wide: and all of them so many times.
        quick_nodes: See `pulp_runner.run`.
    """

    more_if_wide = 2.5  # what stops at less is often some rows from the optimum
    more_rounds_if_wide = 2.5
    quick_nodes = 0  # HiGHS at once

    def __init__(
        self,
        table: Table,
        *,
        units: Collection[int],
        backend: Backend,
        time_limit_s: float | None,
        relative_gap: float,
        most_work: int | None = None,
        mixed: Collection[int] = (),
        start: Start | None = None,
    ) -> None:
        self._table = table
        self._start = start
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
        self._ends = None if time_limit_s is None else perf_counter() + time_limit_s
        self._apart: set[int] = set() if start is None else start.apart
        self.rows = [int(table.base.argmax())]
        self.bound = 0.0
        self.choice: Choice | None = None
        self._best = math.inf
        self._relaxed = 0.0  # optimum of the last LP relaxation, and what a column
        self._surcharges = np.zeros(len(table.times))  # costs beyond it at least
        self._least_using: dict[int, Floats] = {}  # points, a choice takes in all
        self._cuts: dict[int, set[int]] = {}  # where segments must end, by shape

    def _solve(
        self,
        budget_bytes: int | None,
        *,
        relaxed: bool = False,
        whole: bool = False,
        limit_ms: float = math.inf,
        tolerance_ms: float = math.inf,
    ) -> tuple[CountModel, pulp_runner.Outcome, Floats]:
        """Model of the rows, how it ended, and its weights dealt out to the units."""
        start = self._start if relaxed else None
        again = start is not None and start.model_rows == self.rows
        known = None if start is None or not again else start.model
        again = known is not None and not known.is_for_one_budget
        if known is not None and again:
            assert budget_bytes is not None
            model = known
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
                room_ms=limit_ms * (1.0 + NOISE) - self._relaxed,
                tolerance_ms=tolerance_ms,
                least_using=self._least_using,
                limit_ms=limit_ms * (1.0 + NOISE),
                cuts=self._cuts,
            )
        if start is not None:
            start.model, start.model_rows = model, list(self.rows)
        if math.isfinite(tolerance_ms) and self._is_too_fine(model):
            coarser_ms = self._coarser_ms(tolerance_ms)
            return self._solve(budget_bytes, limit_ms=limit_ms, tolerance_ms=coarser_ms)
        if budget_bytes is not None and not relaxed and self._is_too_large(model):
            return model, _NOTHING, np.zeros(len(self._table.times))
        left = None
        if self._ends is not None and not relaxed:  # a relaxation takes milliseconds
            left = max(0.0, self._ends - perf_counter())
        try:
            outcome = pulp_runner.run(
                model.model,
                backend=self._backend,
                time_limit_s=left,
                work_limit=None if relaxed else max(0, self._left()),
                more_if_wide=self.more_if_wide,
                relative_gap=self._gap,
                relaxed=relaxed,
                again=again,
                presolves=not relaxed,
                cutoff=math.inf if whole or relaxed else limit_ms * model.scale,
                quick_nodes=self.quick_nodes,
            )
        except ArithmeticError:  # the numbers of this model are too far apart
            outcome = _NOTHING
        if not relaxed:
            self.work += max(1, outcome.work)
        if not outcome.termination.has_incumbent:
            return model, outcome, np.zeros(len(self._table.times))
        parts = model.parts(whole=whole)
        return model, outcome, spread(self._table, model.classes, parts)

    def _kinds(self) -> list[int]:
        """A number for each unit, equal for units that may be in one class."""
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
        units: set[int] = set()
        for position in (q for q in self.rows if live[q] > cap):
            for hold in table.holds.at(position):
                if hold.columns is None:
                    continue
                by_point, held = weights[hold.columns].sum(), shares[hold.holders].max()
                if hold.is_kept:
                    is_hidden = abs(by_point - held) > NOISE
                else:
                    is_hidden = by_point + held > 1.0 + NOISE
                if is_hidden:
                    for other in table.holds.alike(hold.index):
                        units |= table.holds.parties(other)
        units = {u for u in units if not model.classes.is_alone(u)}
        if not units or len(self._apart | units) > _MOST_APART:
            return False
        self._apart |= units
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

    def _prove(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    @property
    def _has_best(self) -> bool:
        """Whether a time is known that the budget allows."""
        return math.isfinite(self._best)

    def _left(self) -> int:
        """Work that may still be done: more of it where the gap is wide."""
        is_wide = self._best - self.bound > highs_runner.WIDE_GAP * self._best
        more = self.more_rounds_if_wide if is_wide or not self._has_best else 1.0
        return int(more * self._most_work) - self.work

    def _is_too_large(self, model: CountModel) -> bool:
        """Whether a MILP is not worth its time; with a time limit, all are."""
        if self._ends is not None or not self._has_best:
            return False
        if self._best - self.bound > SMALL_GAP * self._best:
            return False
        return model.num_integers() > _MOST_INTEGERS

    def _is_too_fine(self, model: CountModel) -> bool:
        """Whether a wide gap closes sooner in a MILP of coarser segments."""
        if self._ends is not None or not self._has_best:
            return False
        if self._best - self.bound <= highs_runner.WIDE_GAP * self._best:
            return False
        return model.num_integers() > _MANY_INTEGERS

    def _coarser_ms(self, tolerance_ms: float) -> float:
        """A tolerance of fewer segments; infinite where a unit is one segment."""
        longest_ms = float(self._table.times.max(initial=0.0))
        return tolerance_ms * _COARSER if tolerance_ms < longest_ms else math.inf

    def _is_late(self) -> bool:
        """Whether what a solve may take is spent: work, or time if that is limited."""
        if self._left() <= _LEAST_WORK:
            return True
        return self._ends is not None and perf_counter() >= self._ends
