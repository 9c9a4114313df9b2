"""Steps with moved values, run event by event; and all plans of small ones."""

from itertools import product

from autosac.solvers.graph.moving import Choice, Move
from autosac.solvers.graph.recomputation import reruns
from tests.solvers.oracles import replayed_timeline


def _events(problem, choice, moves):
    """What happens, in order: (kind, number, values it reads)."""
    graph, again = problem.graph, reruns(problem.graph, choice.kept)
    events = []
    for op in range(len(graph.reads)):
        events.append(("op", op, graph.reads[op]))
        events += [("send", v, ()) for v in graph.makes[op] if v in choice.moved]
        events += [("release", v, ()) for v in moves if moves[v].released_after == op]
    for t, values in enumerate(graph.step_reads):
        ops = again.get(t, ())
        begun = [v for v in moves if moves[v].fetched_before == t]
        events += [("fetch", v, ()) for v in begun]
        events += [("again", op, graph.reads[op]) for op in ops]
        events.append(("step", t, values))
    return events


def peak_bytes(problem, choice, moves):
    """Most memory: of the step without moves, less what is away at each position."""

    def away(position):
        step, op = position
        return [
            v
            for v, move in moves.items()
            if (op > move.released_after if step < 0 else step < move.fetched_before)
        ]

    return max(
        total - problem.far_bytes(away(position))
        for position, total in replayed_timeline(problem.graph, choice.kept)
    )


def waited_ms(problem, choice, moves, fetch_order):
    """Time that the step takes beyond its own ops and those that run again."""
    graph, events = problem.graph, _events(problem, choice, moves)
    now = out_free = back_free = computed = 0.0
    done, back, awaited = {}, {}, set(moves)
    in_order = iter(fetch_order)
    for kind, number, reads in events:
        if kind == "send":
            out_free = done[number] = max(now, out_free) + problem.out_ms[number]
        elif kind == "release":
            now = max(now, done[number])
        elif kind == "fetch":
            v = next(in_order)  # those of one step begin in the order of their reads
            assert moves[v].fetched_before == moves[number].fetched_before
            back_free = back[v] = max(now, back_free) + problem.back_ms[v]
        else:
            if kind != "op":
                for v in awaited.intersection(reads):
                    now = max(now, back[v])
                    awaited = awaited - {v}
            is_step = kind == "step"
            ms = problem.step_ms[number] if is_step else graph.runtime_ms[number]
            now, computed = now + ms, computed + ms
    assert not awaited
    busy_ms = sum(problem.busy_ms[v] for v in moves) if problem.busy_ms else 0.0
    return now - computed + busy_ms


def every_choice(problem):
    """All choices that can run and that far memory has room for."""
    graph = problem.graph
    values = [v for v in range(len(graph.value_bytes)) if v not in graph.returned]
    states = [(0, 1, 2) if v in problem.movable else (0, 1) for v in values]
    for drawn in product(*states):
        pairs = list(zip(values, drawn, strict=True))
        kept = frozenset(v for v, state in pairs if state)
        moved = frozenset(v for v, state in pairs if state == 2)
        if not problem.holds(moved):
            continue
        try:
            reruns(graph, kept)
        except ValueError:  # it needs a pinned op again
            continue
        yield Choice(kept, moved)


def every_place(problem, choice, late):
    """All moves of a choice: none is released before, or fetched after, a late one."""
    num_ops = len(problem.graph.reads)
    options = [
        [
            Move(released, fetched)
            for released in range(move.released_after, num_ops)
            for fetched in range(move.fetched_before + 1)
        ]
        for move in late.values()
    ]
    for moves in product(*options):
        yield dict(zip(late, moves, strict=True))
