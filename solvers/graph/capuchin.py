"""Which forward values to recompute: the greedy of Capuchin, with exact bookkeeping.

Candidates are the values that backward reads. While one is recomputed from the nearest
values that are there (its *sources*: parameters, kept values, other candidates), the
ops in between run. The greedy takes the candidate with most

    MSPS = bytes / added recomputation time

where the time counts what its choice adds: its own ops, and once more for every chosen
recomputation that had it as a source and must now reach past it. Ops are kept as sets,
so that an op on two ways to the same sources counts once; Capuchin adds up times and
repeat counts, which is the same on trees and too much elsewhere.

Recomputations that lie inside one another are merged afterwards by the step itself: see
`recomputation.reruns`.

Source:
    Peng et al., Capuchin: Tensor-based GPU Memory Management for Deep Learning, ASPLOS
    2020, section 4.4 and algorithm 2.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..milp.solution import Solution, Termination
from .recomputation import (
    GraphProblem,
    peak_bytes,
    recompute_ms,
    rerun_ops,
)


class Bookkeeping:
    """Recomputations of all candidates while they are chosen one by one.

    Attributes:
        problem: The step.
        sources: Candidate -> the candidates, not chosen, that it is made from.
        ops: Candidate -> the forward ops that run for it.
        remaining: Candidates that are kept so far -> the time that choosing each adds.
        repeats: How many of the chosen recomputations run each op, merged or not.
    """

    def __init__(self, problem: GraphProblem) -> None:
        self.problem = problem
        self.sources: dict[int, frozenset[int]] = {}
        self.ops: dict[int, frozenset[int]] = {}
        self.repeats: Counter[int] = Counter()
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        self._chosen: set[int] = set()
        self._runs: dict[int, npt.NDArray[np.bool_]] = {}  # `ops` as flags
        self._times_ms = np.array(problem.runtime_ms)
        candidates = problem.kept_plainly
        for value in sorted(candidates):
            there = (candidates | problem.returned) - {value}
            try:
                ops = rerun_ops(problem, [value], there)
            except ValueError:  # a pinned op lies before it
                continue
            read = {v for op in ops for v in problem.reads[op]}
            self.sources[value] = frozenset(read & candidates - {value})
            self.ops[value] = frozenset(ops)
            self._runs[value] = np.zeros(len(problem.reads), bool)
            self._runs[value][list(ops)] = True
        for value, sources in self.sources.items():
            for source in sources:
                self._readers[source].add(value)
        self.remaining = {value: self._added_ms(value) for value in self.sources}

    def choose(self, value: int) -> None:
        """Recompute a candidate: its readers depend on its sources from now on."""
        del self.remaining[value]
        changed = set(self.sources[value])
        for reader in self._readers.pop(value, ()):
            self.sources[reader] = self.sources[reader] - {value} | self.sources[value]
            if reader in self._chosen:
                self.repeats.update(self.ops[value] - self.ops[reader])
                changed |= self.sources[reader]
            changed.add(reader)
            self.ops[reader] |= self.ops[value]
            self._runs[reader] |= self._runs[value]
            for source in self.sources[value]:
                self._readers[source].add(reader)
        self._chosen.add(value)
        self.repeats.update(self.ops[value])
        for other in changed & self.remaining.keys():
            self.remaining[other] = self._added_ms(other)

    def _added_ms(self, value: int) -> float:
        """Time that choosing a candidate adds to all recomputations."""
        readers = self._readers.get(value, set()) & self._chosen
        own = np.flatnonzero(self._runs[value])
        times = self._times_ms[own]
        if readers:  # each runs again what it does not run yet
            runs = np.array([self._runs[r] for r in readers])
            times = times * (1 + len(readers) - runs.sum(axis=0, dtype=np.int64)[own])
        return math.fsum(times.tolist())

    def msps(self, value: int) -> float:
        """Bytes per millisecond that choosing a candidate saves."""
        num_bytes, added_ms = self.problem.value_bytes[value], self.remaining[value]
        return num_bytes / added_ms if added_ms else math.inf

    @property
    def total_ms(self) -> float:
        """Time of all chosen recomputations, each by itself."""
        times = self.problem.runtime_ms
        return math.fsum(times[op] * count for op, count in self.repeats.items())


class AdditiveBookkeeping:
    """The same with Capuchin's own sums: times of sources are added up.

    An op on two ways to the same sources counts twice, so that the order differs, for
    better or worse: a start beside that of `Bookkeeping`.

    Attributes:
        remaining: Candidates that are kept so far.

    Source:
        Algorithm 2 of the paper: lines 8-16 update the chosen, 17-30 the remaining.
    """

    def __init__(self, problem: GraphProblem) -> None:
        exact = Bookkeeping(problem)
        self.problem = problem
        self._sources = dict(exact.sources)
        self._own_ms = dict(exact.remaining)
        self._again_ms = dict.fromkeys(exact.remaining, 0.0)
        self._counts: dict[int, int] = {}
        self.remaining = set(exact.remaining)

    def msps(self, value: int) -> float:
        """Bytes per millisecond that choosing a candidate saves."""
        ms = self._own_ms[value] + self._again_ms[value]
        return self.problem.value_bytes[value] / ms if ms else math.inf

    def choose(self, value: int) -> None:
        """Recompute a candidate; what is made from it is made from its sources."""
        self.remaining.remove(value)
        count = 1
        for chosen in self._counts:
            if value in self._sources[chosen]:
                self._reach_past(chosen, value)
                count += 1
        self._counts[value] = count
        for other in sorted(self.remaining):
            if value in self._sources[other]:
                self._reach_past(other, value)
                self._own_ms[other] += self._own_ms[value]
                self._again_ms[other] = sum(
                    self._own_ms[other]
                    for chosen in self._counts
                    if other in self._sources[chosen]
                )
            if other in self._sources[value]:
                self._again_ms[other] = count * self._own_ms[other]

    def _reach_past(self, reader: int, value: int) -> None:
        self._sources[reader] = self._sources[reader] - {value} | self._sources[value]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapuchinSolution(Solution):
    """What the greedy chose.

    Attributes:
        kept: Values that are kept; None if no choice on the way fits.
        peak_bytes: True peak of that, or the least on the way if none fits.
        lowest: The values kept at the least peak on the way.
    """

    kept: frozenset[int] | None = None
    peak_bytes: int
    lowest: frozenset[int]


Books = Bookkeeping | AdditiveBookkeeping


def choices(
    problem: GraphProblem, bookkeeping: type[Books] = Bookkeeping
) -> Iterator[frozenset[int]]:
    """Values kept after each step of the greedy, from all of them to the fewest."""
    books = bookkeeping(problem)
    kept = problem.kept_plainly
    yield kept
    while books.remaining:
        value = max(books.remaining, key=lambda v: (books.msps(v), -v))
        books.choose(value)
        kept = kept - {value}
        yield kept


def solve(
    problem: GraphProblem,
    *,
    budget_bytes: int,
    bookkeeping: type[Books] = Bookkeeping,
) -> CapuchinSolution:
    """Recompute candidates, best first, until the true peak is within the budget.

    The order does not depend on the budget. So the peak of what is returned never rises
    as the budget falls.

    Args:
        problem: The step.
        budget_bytes: Cap on its peak.
        bookkeeping: What ranks the candidates.
    """
    started = time.perf_counter()
    best: tuple[int, frozenset[int]] | None = None
    for kept in choices(problem, bookkeeping):
        found_bytes = peak_bytes(problem, kept)
        if best is None or found_bytes < best[0]:
            best = found_bytes, kept
        if found_bytes <= budget_bytes:
            break
    assert best is not None
    fits = best[0] <= budget_bytes
    return CapuchinSolution(
        termination=Termination.FEASIBLE if fits else Termination.NO_INCUMBENT,
        objective_ms=recompute_ms(problem, best[1]) if fits else None,
        solve_s=time.perf_counter() - started,
        kept=best[1] if fits else None,
        peak_bytes=best[0],
        lowest=best[1],
    )
