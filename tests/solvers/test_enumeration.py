"""Enumerated choices against trying every one."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autosac.solvers.sac import Between, Enumeration
from autosac.solvers.sac.table import Table
from tests.solvers import oracles
from tests.solvers.strategies import deep_trees, layered_problems, sac_problems

problems = st.one_of(sac_problems(), layered_problems(), deep_trees())


def change_of(problem, u, k):
    """What a point adds to the live memory at each position."""
    unit, change = problem.units[u], np.zeros(len(problem.base_bytes), dtype=np.int64)
    change[unit.freed_from : unit.freed_until] -= unit.points[k].freed_bytes
    for position, extras in unit.working:
        change[position] += extras[k]
    return change


def is_useful(problem, u, k):
    lowered = change_of(problem, u, k) < 0
    if problem.units[u].points[k].recompute_ms > 0.0:
        return lowered.any()
    return lowered[np.array(problem.base_bytes) > problem.budget_bytes].any()


def fitting(problem, limit_ms):
    """Choices of useful points that keep the budget and take less than a time."""
    return {
        tuple((u, k) for u, k in enumerate(chosen) if k is not None)
        for ms, peak_bytes, chosen in oracles.sac_choices(problem)
        if ms < limit_ms * (1 - 1e-9) and peak_bytes <= problem.budget_bytes
        if all(k is None or is_useful(problem, u, k) for u, k in enumerate(chosen))
    }


def enumerated(problem, limit_ms, *, is_minimal=False):
    enumeration = Enumeration(
        Table(problem), problem.budget_bytes, mixed=(), most_ms=limit_ms
    )
    found = enumeration.below(limit_ms, is_minimal=is_minimal)
    times = [ms for ms, _ in found]
    assert times == sorted(times)
    assert all(ms < limit_ms for ms in times)
    return {
        tuple(sorted((part.unit, part.point) for part in parts)): ms
        for ms, parts in found
    }


def limit_of(problem, share):
    """A time up to which there are some choices, but not all."""
    times = [ms for ms, *_ in oracles.sac_choices(problem)]
    return max(times) * share


@given(problem=problems, share=st.floats(0.05, 1.1))
def test_every_choice_that_fits_is_found(problem, share):
    limit_ms = limit_of(problem, share)
    assume(limit_ms > 0.0)

    found = enumerated(problem, limit_ms)

    assert fitting(problem, limit_ms) <= found.keys()
    for chosen, ms in found.items():
        points = [None] * len(problem.units)
        for u, k in chosen:
            points[u] = k
        assert oracles.peak_of(problem, tuple(points)) <= problem.budget_bytes
        own = (problem.units[u].points[k].recompute_ms for u, k in chosen)
        assert math.isclose(ms, sum(own), abs_tol=1e-12)


@given(problem=problems, share=st.floats(0.05, 1.1))
def test_minimal_ones_need_each_of_their_units(problem, share):
    problem = replace(problem, holds=())
    limit_ms = limit_of(problem, share)
    assume(limit_ms > 0.0)

    minimal = enumerated(problem, limit_ms, is_minimal=True)

    assert minimal.keys() <= enumerated(problem, limit_ms).keys()
    base = np.array(problem.base_bytes)
    for chosen in minimal:
        for left_out in chosen:
            rest = (change_of(problem, *one) for one in chosen if one != left_out)
            live = base + sum(rest, np.zeros_like(base))
            assert live[base > problem.budget_bytes].max() > problem.budget_bytes


@pytest.mark.slow
@given(problem=layered_problems())
def test_known_points_between_those_of_the_milp_count(problem):
    unit = problem.units[0]
    assume(len(unit.points) > 1)
    first, second = (point.recompute_ms for point in unit.points[:2])
    between = Between(0, 0.5, (first + second) / 2)
    finer = replace(unit, between=(between,), mixed_from_ms=math.inf)
    problem = replace(problem, units=(finer, *problem.units[1:]))
    limit_ms = limit_of(problem, 1.1)
    assume(limit_ms > 0.0)

    enumeration = Enumeration(
        Table(problem), problem.budget_bytes, mixed=(0,), most_ms=limit_ms
    )
    found = enumeration.below(limit_ms, is_minimal=False)

    whole = {
        tuple(sorted((part.unit, part.point) for part in parts))
        for _, parts in found
        if not any(part.share for part in parts)
    }
    assert fitting(problem, limit_ms) <= whole
    mixtures = [parts for _, parts in found if any(part.share for part in parts)]
    middle = (change_of(problem, 0, 0) + change_of(problem, 0, 1)) / 2
    over = np.array(problem.base_bytes) > problem.budget_bytes
    alone = np.array(problem.base_bytes) + middle
    if is_useful(problem, 0, 0) and not problem.holds and over.any():
        is_found = any(len(parts) == 1 for parts in mixtures)
        assert is_found == bool(alone[over].max() <= problem.budget_bytes + 4096)


@given(problem=sac_problems())
def test_too_many_are_none(problem):
    limit_ms = limit_of(problem, 1.1)
    assume(limit_ms > 0.0 and fitting(problem, limit_ms))
    enumeration = Enumeration(
        Table(problem), problem.budget_bytes, mixed=(), most_ms=limit_ms
    )
    enumeration.nodes_left = 0
    nothing_fits = max(problem.base_bytes) <= problem.budget_bytes

    found = enumeration.below(limit_ms, is_minimal=False)

    assert found is None or nothing_fits
