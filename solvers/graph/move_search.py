"""Better choices with moves from given ones: what is moved, kept or dropped instead.

Rules of thumb: every choice on the way is judged by its true peak and time.
"""

from __future__ import annotations

from itertools import cycle, islice

from .moving import (
    Choice,
    MovedStep,
    MovePlan,
    MoveProblem,
    plan_moves,
)
from .recomputation import all_rerun_ops, recompute_ms

_MOST_REPAIRS = 200  # values that are changed until a choice fits
_TRIED = 16  # values at a time, the largest at the peak
_SHARE_EXPOSED = 0.25  # of copies, where it is not played: a guess
_MOST_TRIED = 400  # changes of a choice; in large steps fewer, as each takes longer
_WORK_ON_CHANGES = 400_000


def repair(problem: MoveProblem, choice: Choice, budget_bytes: int) -> Choice | None:
    """Lower the peak of a choice value by value until the budget holds.

    What is kept at the peak is moved or dropped, or what is recomputed there is kept:
    whatever frees most bytes a time.

    Args:
        problem: The step.
        choice: Any.
        budget_bytes: Cap on the peak.

    Returns:
        A choice that fits; where that was not reached, that of the least peak. None if
        the given one needs a pinned op again.
    """
    choice = Choice(choice.kept, _that_fit(problem, choice.moved))
    try:
        step = MovedStep(problem, choice)
    except ValueError:
        return None
    for _ in range(_MOST_REPAIRS):
        live = step.live_bytes(step.late)
        place = int(live.argmax())
        if live[place] <= budget_bytes:
            break
        better = _best_change(problem, step, place, int(live[place]))
        if better is None:
            break
        step = better
    return step.choice


def _that_fit(problem: MoveProblem, moved: frozenset[int]) -> frozenset[int]:
    """As many of the moved values as far memory has room for, largest first."""
    if problem.holds(moved):
        return moved
    fitting: set[int] = set()
    for v in sorted(moved, key=lambda v: (-problem.graph.value_bytes[v], v)):
        if problem.holds({*fitting, v}):
            fitting.add(v)
    return frozenset(fitting)


def _best_change(
    problem: MoveProblem, step: MovedStep, place: int, highest_bytes: int
) -> MovedStep | None:
    """The change that frees most bytes of the peak a time that it adds."""
    before_ms = _rough_ms(problem, step.choice)
    best: tuple[float, MovedStep] | None = None
    for choice in _changes_at(problem, step, place):
        try:
            other = MovedStep(problem, choice)
            added_ms = _rough_ms(problem, choice) - before_ms
        except ValueError:  # it needs a pinned op again
            continue
        freed = highest_bytes - int(other.live_bytes(other.late).max())
        rate = freed / max(added_ms, 1e-9)
        if freed > 0 and (best is None or rate > best[0]):
            best = rate, other
    return None if best is None else best[1]


def _rough_ms(problem: MoveProblem, choice: Choice) -> float:
    copies_ms = sum(problem.out_ms[v] + problem.back_ms[v] for v in choice.moved)
    own_ms = problem.all_busy_ms(choice.moved) + _SHARE_EXPOSED * copies_ms
    return recompute_ms(problem.graph, choice.kept) + own_ms


def _changes_at(problem: MoveProblem, step: MovedStep, place: int) -> list[Choice]:
    """Choices with one value of those alive at a place moved, dropped or kept."""
    graph, (kept, moved) = problem.graph, step.choice
    backward_step, op = step.replay.position(place)
    if backward_step < 0:
        assert op is not None
        idle = [v for v in kept if graph.last_forward_read[v] < op]
    else:
        idle = [v for v in kept if graph.first_need.get(v, -1) > backward_step]
    sizes = graph.value_bytes
    idle.sort(key=lambda v: (-sizes[v], v))
    away = [v for v in idle if v in problem.movable - moved]
    changes = [
        Choice(kept, moved | {v}) for v in away[:_TRIED] if problem.holds(moved | {v})
    ]
    there = [v for v in idle if v not in moved and v not in graph.returned]
    changes += [Choice(kept - {v}, moved) for v in there[:_TRIED]]
    again = step.replay.again.get(backward_step, ())
    made = [v for o in again for v in graph.makes[o] if v not in kept]
    made.sort(key=lambda v: (sizes[v], v))
    for v in made[:_TRIED]:
        changes.append(Choice(kept | {v}, moved))
        if v in problem.movable and problem.holds(moved | {v}):
            changes.append(Choice(kept | {v}, moved | {v}))
    return changes


def improved(problem: MoveProblem, plan: MovePlan, budget_bytes: int) -> MovePlan:
    """Change single values while that saves time, or moves less in as much time.

    Args:
        problem: The step.
        plan: One that fits.
        budget_bytes: Cap on the peak.

    Returns:
        A plan that fits and takes no more time.
    """
    graph = problem.graph
    values = sorted(
        {v for op in _made_from(problem) for v in graph.makes[op]} - graph.returned,
        key=lambda v: (-graph.value_bytes[v], v),
    )
    most = min(_MOST_TRIED, _WORK_ON_CHANGES // max(1, len(graph.reads)))
    tried = since = 0
    for v in islice(cycle(values), 2 * len(values)):
        if since >= len(values) or tried >= most or plan.rank == (0.0, 0):
            break
        since += 1
        for choice in _changes_of(problem, plan, v):
            tried += 1
            try:
                other = plan_moves(problem, choice, budget_bytes)
            except ValueError:  # it needs a pinned op again
                continue
            if other is not None and other.rank < plan.rank:
                plan, since = other, 0
    return plan


def _made_from(problem: MoveProblem) -> set[int]:
    """Ops that make what backward reads, or what that is made from again."""
    graph = problem.graph
    needed = {graph.maker[v] for v in graph.first_need}
    pinned = frozenset(v for op in graph.pinned for v in graph.makes[op])
    return needed | all_rerun_ops(graph, pinned)


def _changes_of(problem: MoveProblem, plan: MovePlan, v: int) -> list[Choice]:
    """The other things that can become of a value, cheapest first.

    What is kept on the device goes only where the step waits: others have more room to
    come back early then.
    """
    kept, moved = plan.choice
    changes: list[Choice] = []
    if v in moved or v not in kept:
        changes.append(Choice(kept | {v}, moved - {v}))
    if v in kept and v not in moved and not plan.exposed_ms:
        return changes
    if v in problem.movable and v not in moved:
        changes.append(Choice(kept | {v}, moved | {v}))
    if v in kept:
        changes.append(Choice(kept - {v}, moved - {v}))
    return changes
