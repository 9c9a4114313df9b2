"""Small parallel problems of whole MiB and milliseconds, and all their answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from autosac.solvers.fsdp import (
    FsdpChoice,
    FsdpModule,
    FsdpProblem,
    broken_rules,
)
from autosac.solvers.fsdp.collectives import AffineCost
from autosac.solvers.sac import Breakpoint, Hold, SacProblem, Unit

MIB = 2**20


@st.composite
def fsdp_problems(draw, *, most=5, kinds=False, replicas=False):
    """Trees of some modules: chains of events with instants between."""
    count = draw(st.integers(2, most))
    parents = [draw(st.integers(0, m - 1)) if m else None for m in range(count)]
    children = [[m for m in range(count) if parents[m] == p] for p in range(count)]
    forward, backward, clock = {}, {}, [0]

    def walk(m, spans, order):
        start = clock[0]
        clock[0] += 2  # its instant, and compute
        for child in order(children[m]):
            walk(child, spans, order)
        clock[0] += 2  # compute, and the instant of its end
        spans[m] = (start, clock[0])

    walk(0, forward, list)
    clock[0] += 1
    walk(0, backward, lambda inner: inner[::-1])
    size = clock[0] + 1
    small, dtypes = st.integers(0, 4), st.sampled_from(["a", "a", "a", "b"])
    modules = []
    for m in range(count):
        own = draw(small) * MIB
        frozen = draw(st.integers(0, 5)) == 0
        modules.append(
            FsdpModule(
                fqn=f"m{m}",
                parent=parents[m],
                forward=forward[m],
                backward=backward[m],
                gather_bytes=own,
                grad_bytes=0 if frozen else own,
                reduce_bytes=0 if frozen else 2 * own,
                shard_grad_bytes=0 if frozen else own // 2,
                dtype=draw(dtypes) if own else None,
                can_be_unit=m == 0 or draw(st.integers(0, 7)) > 0,
                kind=draw(st.integers(0, 1)) if kinds and m else None,
            )
        )
    whole = draw(st.lists(small, min_size=2 * size, max_size=2 * size))
    units, inside, reruns = _ac_units(draw, modules, parents, size)
    holds: tuple[Hold, ...] = ()
    if units and draw(st.booleans()):
        end = draw(st.integers(0, size))
        holders = tuple((u, draw(st.integers(0, size))) for u in range(len(units)))
        start = min((until for _, until in holders), default=end)
        freeing = draw(st.none() | st.integers(0, len(units) - 1))
        by_point: tuple[tuple[int, tuple[int, ...]], ...] = ()
        is_kept = draw(st.booleans())
        if freeing is not None:
            froms = [draw(st.integers(start, size)) for _ in units[freeing].points]
            by_point = ((freeing, tuple(froms)),)
        hold = Hold(nbytes=MIB, held_from=start, holders=holders)
        name = "kept_by" if is_kept else "freed_by"
        holds = (replace(hold, **{name: by_point}),)
    sac = SacProblem(
        units=tuple(units),
        base_bytes=tuple((8 + b) * MIB for b in whole[:size]),
        budget_bytes=draw(st.integers(8, 60)) * MIB,
        holds=holds,
    )
    cost = st.builds(
        AffineCost,
        latency_ms=st.integers(0, 2).map(float),
        ms_per_byte=st.integers(0, 3).map(lambda slow: slow / MIB),
    )
    free = st.just(AffineCost(latency_ms=0.0, ms_per_byte=0.0))
    return FsdpProblem(
        modules=tuple(modules),
        sac=sac,
        inside=tuple(inside),
        rerun_at=tuple(reruns),
        compute_ms=tuple(map(float, whole[size:])),
        gather=draw(cost),
        reduce=draw(cost),
        all_reduce=draw(cost if replicas else free),
        late_copies=draw(st.sampled_from([0, 2])),
        host_bytes=draw(st.sampled_from([None, 0, MIB])),
        contention=draw(st.sampled_from([0.0, 0.0, 0.25, 0.5])),
    )


def _ac_units(draw, modules, parents, size):
    """AC units are some of the modules."""
    count = len(modules)
    chosen = [m for m in range(1, count) if draw(st.integers(0, 2)) == 0][:3]
    units, inside, reruns = [], [], []
    for m in chosen:
        around = [a for a in _around(parents, m) if a in chosen]
        points = tuple(
            Breakpoint(
                ratio=(k + 1) / 2,
                freed_bytes=draw(st.integers(0, 6)) * MIB,
                recompute_ms=(waits := float(draw(st.integers(0, 1))))
                + draw(st.integers(0, 5)),
                waits_ms=waits,
                far_bytes=draw(st.integers(0, 1)) * MIB,
            )
            for k in range(draw(st.integers(1, 2)))
        )
        at = modules[m].backward[0]
        extra = tuple(draw(st.integers(-1, 3)) * MIB for _ in points)
        units.append(
            Unit(
                fqn=modules[m].fqn,
                parent=chosen.index(around[0]) if around else None,
                points=points,
                freed_from=modules[m].forward[1],
                freed_until=at,
                working=((at, extra),),
            )
        )
        inside.append(
            frozenset(n for n in range(count) if m in list(_around(parents, n)))
        )
        reruns.append(at)
    return units, inside, reruns


def _around(parents, m):
    while parents[m] is not None:
        m = parents[m]
        yield m


def every_choice(problem):
    """All choices that keep the rules of FSDP2 and AC."""
    count = len(problem.modules)
    points = [(None, *range(len(unit.points))) for unit in problem.sac.units]
    for units in product((False, True), repeat=count - 1):
        units = (True, *units)
        free = [m for m in range(1, count) if units[m]]
        for flags in product((False, True), repeat=len(free)):
            reshard = tuple(m in free and flags[free.index(m)] for m in range(count))
            for chosen in product(*points):
                choice = FsdpChoice(units=units, reshard=reshard, points=chosen)
                if not broken_rules(problem, choice):
                    yield choice


def layers(count, *, budget_bytes):
    """A network of equal layers, each of two parts: 0.5 and 1 GiB of parameters."""
    gib = 2**30
    spans = {"forward": {}, "backward": {}}
    base, times = [], []

    def run(name, module, inner=(), ms=0.0):
        start = len(base)
        base.append(8 * gib)
        times.append(0.0)
        for part in inner:
            part()
        base.extend((8 * gib,) * 2)
        times.extend((ms, 0.0))
        spans[name][module] = (start, len(base))

    def layer(name, k, ms, order):
        parts = [
            lambda part=part: run(name, 3 * k + 2 + part, ms=ms * (1 + part))
            for part in order
        ]
        run(name, 3 * k + 1, parts)

    for name, ms, order in (("forward", 1.0, 1), ("backward", 2.0, -1)):
        inner = [
            lambda k=k, name=name, ms=ms, order=order: layer(
                name, k, ms, (0, 1)[::order]
            )
            for k in range(count)
        ]
        run(name, 0, inner[::order])
    base.append(8 * gib)
    times.append(0.0)
    modules, units = [], []
    for m in range(3 * count + 1):
        role = (m - 1) % 3
        own = 0 if m and role == 0 else (gib // 2) * max(1, role)
        modules.append(
            FsdpModule(
                fqn=f"m{m}",
                parent=None if m == 0 else 0 if role == 0 else m - role,
                forward=spans["forward"][m],
                backward=spans["backward"][m],
                gather_bytes=own,
                grad_bytes=own,
                reduce_bytes=own,
                dtype="bfloat16" if own else None,
                kind=role if m else None,
            )
        )
        if m and role == 0:
            start, stop = modules[m].forward[1], spans["backward"][m][0]
            for q in range(start, stop):
                base[q] += 2 * gib
            units.append((m, start, stop))
    return FsdpProblem(
        modules=tuple(modules),
        sac=SacProblem(
            units=tuple(
                Unit(
                    fqn=f"m{m}",
                    parent=None,
                    points=tuple(
                        Breakpoint(
                            ratio=k / 4,
                            freed_bytes=k * gib // 2,
                            recompute_ms=k * k / 5,
                        )
                        for k in (1, 2, 3, 4)
                    ),
                    freed_from=start,
                    freed_until=stop,
                    working=(),
                )
                for m, start, stop in units
            ),
            base_bytes=tuple(base),
            budget_bytes=budget_bytes,
        ),
        inside=tuple(frozenset({m + 1, m + 2}) for m, _, _ in units),
        rerun_at=tuple(stop for _, _, stop in units),
        compute_ms=tuple(times),
        gather=AffineCost(latency_ms=0.1, ms_per_byte=1.0 / gib),
        reduce=AffineCost(latency_ms=0.1, ms_per_byte=1.0 / gib),
    )
