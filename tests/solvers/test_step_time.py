"""The event simulation by hand, and the linear form against it."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers.fsdp.step_time import (
    BackwardEvent,
    Schedule,
    UnitTimes,
    linear,
    simulate,
)

times = st.integers(0, 6).map(float)


def _schedule(units, forward, backward, rest_ms=0.0):
    """`backward`: ("(", unit, ms) begins, (")", unit, ms) ends."""
    return Schedule(
        units=tuple(UnitTimes(**unit) for unit in units),
        forward=tuple(forward),
        backward=tuple(
            BackwardEvent(unit=u, begins=kind == "(", compute_ms=ms)
            for kind, u, ms in backward
        ),
        rest_ms=rest_ms,
    )


def _unit(gather=0.0, regather=0.0, reduce=0.0, all_reduce=0.0):
    return {
        "gather_ms": gather,
        "regather_ms": regather,
        "reduce_ms": reduce,
        "all_reduce_ms": all_reduce,
    }


@st.composite
def chains(draw, *, replicas=False, forward=True, reshard=None):
    """A root around units that follow each other without compute between them."""
    num_units = draw(st.integers(1, 6))
    units = [_unit(gather=draw(times), reduce=draw(times))]
    for _ in range(num_units):
        gather = draw(st.integers(1, 6).map(float))
        again = draw(st.booleans()) if reshard is None else reshard
        units.append(_unit(gather, gather if again else 0.0, reduce=draw(times)))
    if replicas:
        for unit in units:
            unit["all_reduce_ms"] = draw(times)
    backward = [("(", 0, draw(times))]
    for u in reversed(range(1, num_units + 1)):
        backward += [("(", u, draw(times)), (")", u, 0.0)]
    backward.append((")", 0, 0.0))
    played = [(u, draw(times)) for u in range(num_units + 1)] if forward else []
    return _schedule(units, played, backward, draw(times))


@st.composite
def trees(draw):
    """Any nesting, any compute between events."""
    num_units = draw(st.integers(1, 7))
    parents = [draw(st.integers(0, u - 1)) if u else None for u in range(num_units)]
    units = [
        _unit(g := draw(times), g if u and draw(st.booleans()) else 0.0, draw(times))
        for u in range(num_units)
    ]
    backward, order = [], []

    def visit(u):
        order.append(u)
        backward.append(("(", u, draw(times)))
        for child in reversed(range(num_units)):
            if parents[child] == u:
                visit(child)
        backward.append((")", u, draw(times)))

    visit(0)
    forward = [(u, draw(times)) for u in sorted(order)]
    return _schedule(units, forward, backward)


def test_forward_by_hand():
    units = [_unit(gather=2.0), _unit(gather=5.0), _unit(gather=1.0)]
    schedule = _schedule(units, [(0, 3.0), (1, 4.0), (2, 1.0)], [])

    # Gathers end at 2, 7 and 8; compute runs 2-5, 7-11, 11-12.
    assert simulate(schedule).total_ms == 12.0
    assert linear(schedule).exposed_forward_ms == 2.0 + 2.0 == 12.0 - 8.0


def test_forward_gathers_at_most_two_units_ahead():
    units = [_unit(gather=1.0), _unit(gather=1.0), _unit(gather=9.0)]
    schedule = _schedule(units, [(0, 5.0), (1, 1.0), (2, 1.0)], [])

    # Unit 2's gather waits for unit 0's copy at 1, and for unit 1's gather until 2; it
    # is done at 11. The linear form lets it start with unit 1 at 6: until 15.
    assert simulate(schedule).total_ms == 12.0
    assert linear(schedule).total_ms == 16.0


def test_backward_by_hand():
    units = [
        _unit(reduce=1.0),
        _unit(regather=3.0, reduce=4.0),
        _unit(regather=2.0, reduce=2.0),
    ]
    backward = [
        ("(", 0, 1.0),
        *[("(", 2, 4.0), (")", 2, 0.0)],
        *[("(", 1, 5.0), (")", 1, 0.0)],
        (")", 0, 0.0),
    ]
    schedule = _schedule(units, [], backward)

    # Unit 2 is gathered 0-2 and computes 2-6; unit 1's gather runs 2-5. It computes
    # 6-11 beside unit 2's reduce 6-8. Then reduces of 4 and of 1: 16.
    assert simulate(schedule).total_ms == 16.0
    assert linear(schedule).total_ms == 16.0


def test_hidden_collectives_slow_compute_by_hand():
    units = [_unit(gather=1.0), _unit(gather=4.0, regather=4.0, reduce=2.0)]
    backward = [("(", 0, 8.0), ("(", 1, 6.0), (")", 1, 0.0), (")", 0, 0.0)]
    schedule = _schedule(units, [(0, 8.0), (1, 3.0)], backward, rest_ms=2.0)

    # The root's 8 ms of compute hide the other unit's gathers of 4, in forward and in
    # backward; its own 1 ms and the reduction's 2 are exposed.
    for time in (linear, simulate):
        assert time(schedule).total_ms == 27.0 + 1.0 + 2.0
        slowed = time(replace(schedule, contention=0.25))
        assert slowed.contention_ms == 0.25 * (4.0 + 4.0)
        assert slowed.total_ms == time(schedule).total_ms + 2.0


@given(
    pairs=st.lists(st.tuples(times, times), min_size=1, max_size=6),
    contention=st.sampled_from([0.125, 0.5, 1.0]),
)
def test_compute_beside_collectives_gets_what_these_leave_of_the_device(
    pairs, contention
):
    # The root has no parameters; (c, g): its compute, and the next unit's gather beside
    # it. In g, (1 - contention) g of the compute are done, and the rest behind it.
    units = [_unit(), *(_unit(gather=gather) for _, gather in pairs)]
    played = [
        *((k, compute) for k, (compute, _) in enumerate(pairs)),
        (len(pairs), 0.0),
    ]
    schedule = replace(_schedule(units, played, []), contention=contention)
    true_ms = sum(max(compute + contention * g, g) for compute, g in pairs)
    error_ms = contention * sum(compute for compute, g in pairs if compute < g)

    assert true_ms <= linear(schedule).total_ms <= true_ms + error_ms


@given(schedule=chains(), contention=st.sampled_from([0.0, 0.5, 1.0]))
def test_what_is_exposed_takes_nothing_from_compute(schedule, contention):
    slowed = simulate(replace(schedule, contention=contention))
    plain = simulate(schedule)
    units = schedule.units
    gathers = sum(units[u].gather_ms for u, _ in schedule.forward)
    every = gathers + sum(u.regather_ms + u.reduce_ms for u in units)
    exposed = plain.exposed_forward_ms + plain.exposed_backward_ms

    assert plain.contention_ms == 0.0
    assert slowed.total_ms == plain.total_ms + contention * (every - exposed)


def test_replicas_add_their_all_reduces_at_the_end():
    units = [_unit(), _unit(reduce=1.0, all_reduce=7.0), _unit(reduce=1.0)]
    backward = [
        ("(", 0, 0.0),
        *[("(", 1, 2.0), (")", 1, 0.0)],
        *[("(", 2, 3.0), (")", 2, 0.0)],
        (")", 0, 0.0),
    ]
    schedule = _schedule(units, [], backward)

    assert simulate(schedule).total_ms == 2.0 + 1.0 + 7.0 == linear(schedule).total_ms


def test_what_two_channels_win():
    units = [_unit(), _unit(regather=4.0, reduce=4.0), _unit(regather=4.0, reduce=4.0)]
    units.append(_unit(regather=4.0))
    backward = [("(", 0, 4.0)]
    for u in (1, 2, 3):
        backward += [("(", u, 4.0), (")", u, 0.0)]
    schedule = _schedule(units, [], [*backward, (")", 0, 0.0)])

    # One channel reduces unit 1's and gathers unit 3's, 4 + 4 against 4 of compute.
    assert simulate(schedule, shared_channel=False).exposed_backward_ms == 0.0
    assert simulate(schedule).exposed_backward_ms == 4.0


@given(schedule=chains(forward=False, reshard=True))
def test_the_linear_form_of_backward_is_exact_if_units_reshard_and_do_not_nest(
    schedule,
):
    assert linear(schedule).total_ms == simulate(schedule).total_ms


@given(schedule=chains(forward=False))
def test_the_linear_form_of_backward_overstates_gathers_after_units_that_stay(schedule):
    order = [event.unit for event in schedule.backward if event.begins]
    again = [schedule.units[u].regather_ms for u in order]
    early = sum(g for before, g in itertools.pairwise(again) if not before)

    exact, observed = simulate(schedule).total_ms, linear(schedule).total_ms

    assert exact <= observed <= exact + early


@given(schedule=chains())
def test_the_linear_form_overstates_forward_by_less_than_its_gathers(schedule):
    exact, observed = simulate(schedule), linear(schedule)
    gathers = sum(schedule.units[u].gather_ms for u, _ in schedule.forward)
    again = sum(unit.regather_ms for unit in schedule.units)

    assert exact.exposed_forward_ms <= observed.exposed_forward_ms
    assert observed.exposed_forward_ms <= exact.exposed_forward_ms + gathers
    assert exact.total_ms <= observed.total_ms <= exact.total_ms + gathers + again


@given(gather=times, compute=times, num_units=st.integers(1, 9))
def test_the_linear_form_of_forward_is_exact_for_equal_units(
    gather, compute, num_units
):
    units = [_unit(gather=gather)] * num_units
    schedule = _schedule(units, [(u, compute) for u in range(num_units)], [])

    assert linear(schedule).total_ms == simulate(schedule).total_ms


@given(schedule=trees())
def test_the_linear_form_of_nested_units_keeps_its_bounds(schedule):
    exact, observed = simulate(schedule), linear(schedule)
    held_up, after, since = 0.0, 0.0, []
    for event in (*schedule.backward, None):
        if event is None or event.begins:
            held_up += sum(since[:-1])
            since = []
        else:
            since.append(schedule.units[event.unit].reduce_ms)
        if event is not None and since:
            after += event.compute_ms
    every = sum(u.gather_ms + u.regather_ms + u.reduce_ms for u in schedule.units)

    assert exact.total_ms <= observed.total_ms + held_up + after
    assert observed.total_ms <= exact.total_ms + every


@given(schedule=st.one_of(chains(replicas=True), trees()))
def test_a_step_takes_no_less_than_its_compute_and_its_channel(schedule):
    played = simulate(schedule)
    load = sum(u.gather_ms + u.regather_ms + u.reduce_ms for u in schedule.units)
    alone = simulate(schedule, shared_channel=False)

    assert played.total_ms >= played.compute_ms
    assert played.total_ms >= load
    assert played.total_ms <= played.compute_ms + load + sum(
        u.all_reduce_ms for u in schedule.units
    )
    assert alone.total_ms <= played.total_ms


@given(schedule=chains(replicas=True, forward=False, reshard=True))
def test_the_linear_form_with_replicas_is_off_by_one_collective_at_most(schedule):
    exact, observed = simulate(schedule), linear(schedule)
    units = schedule.units
    order = [event.unit for event in schedule.backward if event.begins]
    # The last unit's reduce-scatter, for which the root's all-reduce waits too.
    left_out = units[order[-1]].reduce_ms if units[0].all_reduce_ms else 0.0
    # All-gathers beside which only an all-reduce starts.
    early = [
        units[after].regather_ms
        for unit, after in itertools.pairwise(order)
        if units[unit].all_reduce_ms and not units[unit].reduce_ms
    ]

    assert observed.total_ms <= exact.total_ms + max(early, default=0.0)
    assert exact.total_ms <= observed.total_ms + left_out


def test_an_all_reduce_alone_does_not_wait_for_the_next_gather():
    units = [_unit(), _unit(gather=1.0, regather=1.0)]
    units.append(_unit(gather=1.0, regather=1.0, all_reduce=1.0))
    backward = [("(", 0, 0.0)]
    for u in (2, 1):
        backward += [("(", u, 0.0), (")", u, 0.0)]
    schedule = _schedule(units, [], [*backward, (")", 0, 0.0)])

    # Unit 2 is gathered 0-1; its all-reduce and unit 1's all-gather run 1-2. The linear
    # form begins the all-reduce at 2, as if a reduce-scatter were queued before it.
    assert simulate(schedule).total_ms == 2.0
    assert linear(schedule).total_ms == 3.0


def test_a_backward_that_does_not_nest_is_an_error():
    with pytest.raises(ValueError, match="unit 0 does not"):
        _schedule([_unit()], [], [(")", 0, 0.0)])
    with pytest.raises(ValueError, match="does not end"):
        _schedule([_unit()], [], [("(", 0, 0.0)])
    with pytest.raises(ValueError, match="finite and not negative"):
        UnitTimes(gather_ms=-1.0, regather_ms=0.0, reduce_ms=0.0)
