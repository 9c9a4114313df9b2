"""Better choices from given ones: values are kept again, or no more.

Both are rules of thumb: every choice on the way is judged by its true peak and time.
"""

from __future__ import annotations

import heapq
import math
from itertools import cycle, islice

from .recomputation import (
    GraphProblem,
    Position,
    Replay,
    all_rerun_ops,
    peak_bytes,
    recompute_ms,
    reruns,
)

_MOST_REPAIRS = 200  # values that are changed until a choice fits
_MOST_EXCHANGED = 120  # values that are dropped for others; in large steps fewer, as
_WORK_ON_EXCHANGES = 2_000_000  # each takes time by the square of the values
_TRIED = 24  # values at a time, the largest at the peak


def keep_again(
    problem: GraphProblem, kept: frozenset[int], budget_bytes: int
) -> frozenset[int]:
    """Keep what is made again, best first, while the peak stays within the budget.

    Best is what saves most time; or most time a byte, if that ends better. (Reverse
    delete: the end of a greedy makes some of its beginning needless.)

    Args:
        problem: The step.
        kept: A choice that fits.
        budget_bytes: Cap on the peak.

    Returns:
        A choice that fits and takes no more time.
    """
    ends = [_keep_again(problem, kept, budget_bytes, power) for power in (0.0, 1.0)]
    return min(ends, key=lambda end: recompute_ms(problem, end))


def exchange(
    problem: GraphProblem, kept: frozenset[int], budget_bytes: int
) -> frozenset[int]:
    """Drop one value and keep others instead, largest first, while that saves time.

    Args:
        problem: The step.
        kept: A choice that fits.
        budget_bytes: Cap on the peak.

    Returns:
        A choice that fits and takes no more time.
    """
    cost_ms = recompute_ms(problem, kept)
    order = sorted(
        kept & problem.kept_plainly, key=lambda v: (-problem.value_bytes[v], v)
    )
    most = min(_MOST_EXCHANGED, _WORK_ON_EXCHANGES // len(problem.value_bytes) ** 2)
    since = 0  # values that were tried in vain, one after the other
    for value in islice(cycle(order), most):
        since += 1
        if value in kept:
            try:
                other = _keep_again(problem, kept - {value}, budget_bytes, 0.0, value)
                other_ms = recompute_ms(problem, other)
            except ValueError:  # it needs a pinned op again
                continue
            if other_ms < cost_ms:
                kept, cost_ms, since = other, other_ms, 0
        if since >= len(order):
            break
    return kept


def _keep_again(
    problem: GraphProblem,
    kept: frozenset[int],
    budget_bytes: int,
    power: float,
    without: int | None = None,
) -> frozenset[int]:
    """Keep values by time saved over bytes to a power, until nothing changes.

    The one that is to be left out at first may come back once others are kept.
    """
    before = None
    cost_ms = recompute_ms(problem, kept)
    while before != kept:
        before = kept
        again = all_rerun_ops(problem, kept)
        values = {v for op in again for v in problem.makes[op]} - kept - {without}
        without = None
        # Savings of an earlier round order the queue: mostly they only fall.
        queue = [(-math.inf, v) for v in sorted(values - problem.returned)]
        while queue:
            value = heapq.heappop(queue)[1]
            after_ms = recompute_ms(problem, kept | {value})
            saved = (cost_ms - after_ms) / max(1, problem.value_bytes[value]) ** power
            if saved <= 0.0:
                continue
            if queue and -saved > queue[0][0]:
                heapq.heappush(queue, (-saved, value))
            elif peak_bytes(problem, kept | {value}) <= budget_bytes:
                kept, cost_ms = kept | {value}, after_ms
    return kept


def repair(
    problem: GraphProblem, kept: frozenset[int], budget_bytes: int
) -> frozenset[int] | None:
    """Lower the peak of a choice value by value until the budget holds.

    What is kept at the peak is dropped, or what is recomputed there is kept: whatever
    frees most bytes a time.

    Args:
        problem: The step.
        kept: Any choice.
        budget_bytes: Cap on the peak.

    Returns:
        A choice that fits; where that was not reached, that of the least peak. None if
        the given one needs a pinned op again.
    """
    try:
        replay = Replay(problem, kept)
    except ValueError:
        return None
    for _ in range(_MOST_REPAIRS):
        highest = replay.peak
        if highest.live_bytes <= budget_bytes:
            break
        changes = _could_be_dropped(problem, kept, highest.position)
        changes += _could_be_kept(problem, kept, highest.position)
        best = _best_change(problem, kept, replay, changes)
        if best is None:
            break
        kept, replay = best  # which frees bytes, so that the last is the lowest
    return kept


def _could_be_dropped(
    problem: GraphProblem, kept: frozenset[int], position: Position
) -> list[int]:
    """Kept values that are only kept for later at a position, largest first."""
    step, op = position
    if step < 0:
        assert op is not None
        values = [v for v in kept if problem.last_forward_read[v] < op]
    else:
        values = [v for v in kept if problem.first_need.get(v, math.inf) > step]
    values.sort(key=lambda v: (-problem.value_bytes[v], v))
    return values[:_TRIED]


def _could_be_kept(
    problem: GraphProblem, kept: frozenset[int], position: Position
) -> list[int]:
    """Values that are recomputed for the step of a position, smallest first."""
    ops = reruns(problem, kept).get(position.step, ())
    values = [v for op in ops for v in problem.makes[op] if v not in kept]
    values.sort(key=lambda v: (problem.value_bytes[v], v))
    return values[:_TRIED]


def _best_change(
    problem: GraphProblem, kept: frozenset[int], replay: Replay, values: list[int]
) -> tuple[frozenset[int], Replay] | None:
    """The change of a value that frees most bytes of the peak a time that it adds."""
    highest_bytes, before_ms = replay.peak.live_bytes, replay.recompute_ms
    best: tuple[float, frozenset[int], Replay] | None = None
    for value in values:
        other = kept ^ {value}
        try:
            after = Replay(problem, other)
        except ValueError:  # it needs a pinned op again
            continue
        freed = highest_bytes - after.peak.live_bytes
        rate = freed / max(after.recompute_ms - before_ms, 1e-9)
        if freed > 0 and (best is None or rate > best[0]):
            best = rate, other, after
    return None if best is None else best[1:]
