"""Hypothesis strategies: small problems of whole MiB and whole milliseconds."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from autosac.solvers.curves.curve import TradeoffCurve
from autosac.solvers.curves.save_problem import SaveProblem
from autosac.solvers.graph.recomputation import GraphProblem
from autosac.solvers.sac import Breakpoint, Hold, SacProblem, Unit

MIB = 2**20


@st.composite
def save_problems(draw: st.DrawFn, *, most: int = 6) -> SaveProblem:
    """Groups that read a few earlier ones; pinned and unsavable groups are rare."""
    size = draw(st.integers(1, most))
    groups = range(size)
    inputs = tuple(
        tuple(sorted(draw(st.sets(st.integers(0, g - 1), max_size=2)))) if g else ()
        for g in groups
    )
    flags = st.sets(st.sampled_from(groups), max_size=size)
    rare = st.sets(st.sampled_from(groups), max_size=1)
    sizes = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    times = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    return SaveProblem(
        saved_bytes=tuple(nbytes * MIB for nbytes in sizes),
        runtime_ms=tuple(map(float, times)),
        inputs=inputs,
        needed=frozenset(draw(flags)),
        pinned=frozenset(draw(rare)),
        unsavable=frozenset(draw(rare)),
    )


@st.composite
def tradeoff_curves(draw: st.DrawFn, *, most: int = 20) -> TradeoffCurve:
    """Curves of whole bytes and milliseconds; half of them start at nothing."""
    steps = draw(
        st.lists(
            st.tuples(st.integers(1, 1000), st.integers(0, 50)),
            min_size=1,
            max_size=most,
        )
    )
    freed, time = draw(st.sampled_from([(0, 0), (3, 2)]))
    points = [(freed, time)]
    for more, slower in steps:
        freed, time = freed + more, time + slower
        points.append((freed, time))
    return TradeoffCurve(
        freed_bytes=tuple(freed for freed, _ in points),
        recompute_ms=tuple(float(time) for _, time in points),
    )


@st.composite
def sac_units(draw: st.DrawFn, index: int, num_positions: int) -> Unit:
    """A unit in one of the earlier units or in none; curves of any shape."""
    num_points = draw(st.integers(1, 3))
    times = sorted(
        draw(st.lists(st.integers(0, 9), min_size=num_points, max_size=num_points))
    )
    freed = sorted(
        draw(st.sets(st.integers(-1, 8), min_size=num_points, max_size=num_points))
    )
    ends = st.integers(0, num_positions)
    freed_from, freed_until = sorted((draw(ends), draw(ends)))
    extras = st.tuples(*[st.integers(-2, 4)] * num_points)
    working = draw(
        st.dictionaries(st.integers(0, num_positions - 1), extras, max_size=2)
    )
    return Unit(
        fqn=f"u{index}",
        parent=draw(st.none() | st.integers(0, index - 1)) if index else None,
        points=tuple(
            Breakpoint(
                ratio=(k + 1) / num_points,
                freed_bytes=freed[k] * MIB,
                recompute_ms=float(times[k]),
            )
            for k in range(num_points)
        ),
        freed_from=freed_from,
        freed_until=freed_until,
        working=tuple(
            (position, tuple(extra * MIB for extra in row))
            for position, row in sorted(working.items())
        ),
    )


@st.composite
def holds(draw: st.DrawFn, traced: tuple[Unit, ...], num_positions: int) -> Hold:
    """Memory that a few units hold, each until a position of its own.

    A unit, and some of those around it, may count it as freed, or keep it themselves.
    """
    held_from = draw(st.integers(0, num_positions))
    ends = st.integers(held_from, num_positions)
    units = st.integers(0, len(traced) - 1)
    u: int | None = draw(st.none() | units)
    by_point = []
    while u is not None:
        if draw(st.booleans()):
            bounds = [draw(ends) for _ in traced[u].points]
            by_point.append((u, tuple(bounds)))
        u = traced[u].parent
    is_kept = draw(st.booleans())
    return Hold(
        nbytes=draw(st.integers(0, 6)) * MIB,
        held_from=held_from,
        holders=tuple(draw(st.dictionaries(units, ends, max_size=4)).items()),
        freed_by=() if is_kept else tuple(by_point),
        kept_by=tuple(by_point) if is_kept else (),
    )


@st.composite
def sac_problems(draw: st.DrawFn, *, most: int = 4) -> SacProblem:
    """A few units over a few positions, with budgets around the peak."""
    num_positions = draw(st.integers(1, 6))
    num_units = draw(st.integers(1, most))
    base = draw(
        st.lists(st.integers(5, 20), min_size=num_positions, max_size=num_positions)
    )
    units = tuple(draw(sac_units(u, num_positions)) for u in range(num_units))
    held = draw(st.lists(holds(units, num_positions), max_size=3))
    if held:  # some once more, of the same size or of another one
        held += [
            replace(hold, nbytes=draw(st.just(hold.nbytes) | st.just(5 * MIB)))
            for hold in draw(st.lists(st.sampled_from(held), max_size=2))
        ]
    return SacProblem(
        units=units,
        base_bytes=tuple(nbytes * MIB for nbytes in base),
        budget_bytes=(max(base) - draw(st.integers(0, 10))) * MIB,
        holds=tuple(held),
    )


@st.composite
def layered_problems(draw: st.DrawFn) -> SacProblem:
    """Equal layers, each a unit with one or two inside, that run backward in turn."""
    layers = draw(st.integers(2, 4))
    num_positions = 2 * layers + 1
    inner = draw(st.integers(1, 2))
    shapes = [
        (
            [draw(st.integers(1, 6)) * MIB for _ in range(points)],
            [float(draw(st.integers(0, 9))) for _ in range(points)],
            [draw(st.integers(0, 4)) * MIB for _ in range(points)],
        )
        for points in [draw(st.integers(1, 2)), *[1] * inner]
    ]
    units: list[Unit] = []
    for layer in range(layers):
        outer = len(units)
        for index, (freed, times, work) in enumerate(shapes):
            units.append(
                Unit(
                    fqn=f"layers.{layer}.{index}",
                    parent=outer if index else None,
                    points=tuple(
                        Breakpoint(ratio=1.0, freed_bytes=b, recompute_ms=t)
                        for b, t in zip(freed, times, strict=True)
                    ),
                    freed_from=layer + 1,
                    freed_until=2 * layers - layer,
                    working=((2 * layers - layer, tuple(work)),),
                )
            )
    held = [(u, 2 * layers - u // (inner + 1)) for u in range(len(units))]
    freed_bytes = draw(st.integers(0, 4)) * MIB
    kept_is_drawn = draw(st.booleans())
    kept = [  # one inner unit frees what the next one holds
        Hold(
            nbytes=freed_bytes,
            held_from=units[u].freed_from,
            holders=((u + 1, units[u].freed_until),),
            freed_by=((u, (units[u].freed_from,)),),
        )
        for u in range(1, len(units), 3)
        if inner == 2
    ]
    kept += [  # a layer keeps what the next one holds
        Hold(
            nbytes=draw(st.integers(0, 2)) * MIB,
            held_from=units[u].freed_from + 1,
            holders=((u + inner + 1, units[u + inner + 1].freed_until),),
            kept_by=((u, (units[u].freed_until,) * len(units[u].points)),),
        )
        for u in range(0, len(units) - inner - 1, inner + 1)
        if kept_is_drawn
    ]
    base = [4 + 5 * min(q, 2 * layers - q) for q in range(num_positions)]
    return SacProblem(
        units=tuple(units),
        base_bytes=tuple(nbytes * MIB for nbytes in base),
        budget_bytes=(max(base) - draw(st.integers(0, 4 * layers))) * MIB,
        holds=(
            Hold(
                nbytes=draw(st.integers(0, 3)) * MIB,
                held_from=layers,
                holders=tuple(held),
            ),
            *kept,
        ),
    )


@st.composite
def deep_trees(draw: st.DrawFn) -> SacProblem:
    """Up to twelve modules of one point each, in one another in any way."""
    num_units = draw(st.integers(5, 12))
    units = []
    for index in range(num_units):
        first = draw(st.integers(0, 4))
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        point = Breakpoint(
            ratio=1.0,
            freed_bytes=draw(st.integers(0, 6)) * MIB,
            recompute_ms=float(draw(st.integers(0, 9))),
        )
        work = (draw(st.integers(0, 4)), (draw(st.integers(-1, 3)) * MIB,))
        units.append(
            Unit(
                fqn=f"u{index}",
                parent=parent,
                points=(point,),
                freed_from=first,
                freed_until=draw(st.integers(first, 5)),
                working=(work,),
            )
        )
    base = [draw(st.integers(15, 30)) for _ in range(5)]
    return SacProblem(
        units=tuple(units),
        base_bytes=tuple(nbytes * MIB for nbytes in base),
        budget_bytes=(max(base) - draw(st.integers(0, 12))) * MIB,
    )


@st.composite
def graph_problems(draw: st.DrawFn, *, most: int = 7) -> GraphProblem:
    """Random graphs; some ops make two values, are pinned, or read nothing."""
    size = draw(st.integers(1, most))
    reads, makes, num_values = [], [], 0
    for _ in range(size):
        earlier = st.sets(st.integers(0, num_values - 1), max_size=2)
        reads.append(tuple(sorted(draw(earlier))) if num_values else ())
        drawn = draw(st.sampled_from([1, 1, 1, 2]))
        makes.append(tuple(range(num_values, num_values + drawn)))
        num_values += drawn
    values = st.sets(st.integers(0, num_values - 1), max_size=2)
    num_steps = draw(st.integers(1, most))

    def whole(count: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))

    carried = whole(num_steps)
    return GraphProblem(
        value_bytes=tuple(n * MIB for n in whole(num_values)),
        runtime_ms=tuple(map(float, whole(size))),
        workspace_bytes=tuple(n * MIB for n in whole(size)),
        reads=tuple(reads),
        makes=tuple(makes),
        pinned=frozenset(draw(st.sets(st.integers(0, size - 1), max_size=1))),
        returned=frozenset(draw(st.sets(st.integers(0, num_values - 1), max_size=1))),
        step_reads=tuple(tuple(sorted(draw(values))) for _ in range(num_steps)),
        carried_bytes=tuple(n * MIB for n in carried),
        step_bytes=tuple(
            (n + more) * MIB for n, more in zip(carried, whole(num_steps), strict=True)
        ),
        other_bytes=draw(st.integers(0, 5)) * MIB,
    )
