from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.solvers.fsdp.collectives import (
    FREE,
    Fabric,
    Group,
    exchange,
    fastest,
    ring,
    shift,
    tree,
)

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# 1 MB/ms inside a node, 0.25 MB/ms to other nodes.
FABRIC = Fabric(
    base_latency_ms=3.0,
    intra_latency_ms=1.0,
    inter_latency_ms=10.0,
    intra_bandwidth_bytes_per_s=1e9,
    inter_bandwidth_bytes_per_s=0.25e9,
)

groups = st.builds(
    Group, ranks_per_node=st.integers(1, 16), num_nodes=st.integers(1, 200)
)
sizes = st.integers(0, 2**40)


def test_a_ring_inside_a_node_by_hand():
    group = Group(ranks_per_node=4, num_nodes=1)

    # 3 + 3 steps, 3/4 of 8 MB at 1 MB/ms; all-reduce does both ways.
    assert ring(FABRIC, group, "all_gather").ms(8e6) == 3 + 3 + 6
    assert ring(FABRIC, group, "reduce_scatter").ms(8e6) == 3 + 3 + 6
    assert ring(FABRIC, group, "all_reduce").ms(8e6) == 3 + 6 + 12


def test_a_ring_over_nodes_enters_each_by_all_its_links():
    two = Group(ranks_per_node=2, num_nodes=2)
    one = Group(ranks_per_node=1, num_nodes=4)

    # Two ranks a node have 0.5 MB/ms to other nodes together, one has 0.25.
    assert ring(FABRIC, two, "all_gather").ms(8e6) == 3 + 2 + 10 + 12
    assert ring(FABRIC, one, "all_gather").ms(8e6) == 3 + 30 + 24


def test_an_exchange_uses_links_of_both_levels_at_once():
    one = Group(ranks_per_node=4, num_nodes=1)
    two = Group(ranks_per_node=2, num_nodes=2)

    # 3 steps, 3/4 of 8 MB at 1 MB/ms. Over nodes 2 of 3 steps are long, and half of it
    # goes at 0.25 MB/ms while a quarter stays inside.
    assert exchange(FABRIC, one).ms(8e6) == 3 + 3 + 6
    assert exchange(FABRIC, two).ms(8e6) == 3 + 1 + 20 + 16


def test_a_shift_takes_as_long_as_its_slowest_link():
    one = Group(ranks_per_node=4, num_nodes=1)
    two = Group(ranks_per_node=2, num_nodes=2)

    assert shift(FABRIC, one).ms(8e6) == 3 + 1 + 8
    assert shift(FABRIC, two).ms(8e6) == 3 + 10 + 32


@given(group=groups, nbytes=sizes, factor=st.integers(1, 9))
def test_exchanges_and_shifts_are_never_slower_by_faster_links(group, nbytes, factor):
    faster = replace(
        FABRIC,
        intra_bandwidth_bytes_per_s=factor * FABRIC.intra_bandwidth_bytes_per_s,
        inter_bandwidth_bytes_per_s=factor * FABRIC.inter_bandwidth_bytes_per_s,
    )
    for cost in (exchange, shift):
        assert cost(faster, group).ms(nbytes) <= cost(FABRIC, group).ms(nbytes)
        assert cost(FABRIC, group).ms(nbytes) <= cost(FABRIC, group).ms(nbytes + 1)


def test_a_tree_takes_logarithmic_steps():
    group = Group(ranks_per_node=8, num_nodes=16)

    assert tree(FABRIC, group).latency_ms == 3 + 14 + 80


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_costs_nothing(collective):
    group = Group(ranks_per_node=1, num_nodes=1)

    assert ring(FABRIC, group, collective) == tree(FABRIC, group) == FREE
    assert exchange(FABRIC, group) == shift(FABRIC, group) == FREE
    assert fastest(FABRIC, group, collective, 10**9) == FREE


@given(
    group=groups,
    collective=st.sampled_from(COLLECTIVES),
    small=sizes,
    large=sizes,
)
def test_more_bytes_never_take_less_time(group, collective, small, large):
    small, large = sorted((small, large))
    times = [
        fastest(FABRIC, group, collective, size).ms(size) for size in (small, large)
    ]

    assert 0.0 <= times[0] <= times[1]


@given(group=groups, collective=st.sampled_from(COLLECTIVES), size=sizes)
def test_the_line_of_one_size_never_understates_another(group, collective, size):
    line = fastest(FABRIC, group, collective, size)

    for other in (1, 2**10, 2**20, 2**30, 2**40):
        best = fastest(FABRIC, group, collective, other).ms(other)
        assert line.ms(other) >= best * (1 - 1e-12)


@given(group=groups)
def test_large_buffers_run_at_the_bandwidth_of_the_narrowest_link(group):
    size = 10**15
    n, nodes = group.size, group.num_nodes
    rate = 1e9 if nodes == 1 else min(1e9, 0.25e9 * group.ranks_per_node)

    time_ms = fastest(FABRIC, group, "all_gather", size).ms(size)

    assert time_ms == pytest.approx(1e3 * size * (n - 1) / n / rate, rel=1e-3)


@given(group=groups)
def test_an_all_reduce_by_rings_is_a_reduce_scatter_and_an_all_gather(group):
    parts = [ring(FABRIC, group, c) for c in ("reduce_scatter", "all_gather")]
    whole = ring(FABRIC, group, "all_reduce")
    base = FABRIC.base_latency_ms if group.size > 1 else 0.0

    assert whole.latency_ms == sum(part.latency_ms for part in parts) - base
    assert whole.ms_per_byte == pytest.approx(sum(part.ms_per_byte for part in parts))


def test_wrong_names_and_sizes_are_errors():
    group = Group(ranks_per_node=2, num_nodes=1)

    with pytest.raises(ValueError, match=r"`collective` must be .* got 'gather'"):
        ring(FABRIC, group, "gather")
    with pytest.raises(ValueError, match="`nbytes` must not be negative, got -1"):
        fastest(FABRIC, group, "all_gather", -1)
    with pytest.raises(ValueError, match="must be at least 1, got 0 and 1"):
        Group(ranks_per_node=0, num_nodes=1)
    with pytest.raises(ValueError, match="`inter_bandwidth_bytes_per_s` must be"):
        Fabric(
            base_latency_ms=0.0,
            intra_latency_ms=0.0,
            inter_latency_ms=0.0,
            intra_bandwidth_bytes_per_s=1.0,
            inter_bandwidth_bytes_per_s=0.0,
        )
