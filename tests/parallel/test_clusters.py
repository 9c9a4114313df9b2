from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.devices.specs import device_spec
from autosac.parallel.clusters import KNOWN_CLUSTERS, cluster_spec
from autosac.solvers.fsdp.collectives import Group


def test_knows_clusters_by_name_in_any_case():
    assert cluster_spec("HGX-H100").device.name == "h100"
    assert cluster_spec("hgx-h100", num_gpus=1024).num_nodes == 128
    assert cluster_spec("hgx-h100", num_gpus=2).gpus_per_node == 2


def test_gpus_that_share_a_link_to_their_host_have_a_part_of_it_each():
    rates = [
        cluster_spec(name, num_gpus=num_gpus).link.out_bytes_per_s
        for name, num_gpus in (("dgx-a100", 8), ("dgx-a100", 1), ("hgx-h100", 8))
    ]
    whole = [device_spec(name).link.out_bytes_per_s for name in ("a100", "h100")]

    assert rates == [whole[0] / 2, whole[0], whole[1]]


def test_collectives_take_multiprocessors_from_compute_on_gpus_alone():
    cluster = cluster_spec("hgx-h100")

    assert cluster.contention == 16 / 132  # whitepaper of the H100
    assert replace(cluster, device=device_spec("cpu")).contention == 0.0
    with pytest.raises(ValueError, match=r"`collective_multiprocessors`.*-1"):
        replace(cluster, collective_multiprocessors=-1)


def test_names_the_known_clusters_when_asked_for_another():
    with pytest.raises(ValueError, match=r"'dgx-2' is not a known.*hgx-h100"):
        cluster_spec("dgx-2")


@pytest.mark.parametrize("num_gpus", [0, -8, 12])
def test_a_cluster_is_part_of_a_node_or_whole_nodes(num_gpus):
    with pytest.raises(ValueError, match=f"multiple of it, whole nodes.*{num_gpus}"):
        cluster_spec("hgx-h100", num_gpus=num_gpus)


@pytest.mark.parametrize("spec", KNOWN_CLUSTERS.values(), ids=lambda spec: spec.name)
def test_figures_are_of_the_right_order(spec):
    fabric = spec.fabric

    assert spec.gpus_per_node == 8
    assert fabric.inter_bandwidth_bytes_per_s * spec.gpus_per_node >= 1e9
    assert 2e10 <= fabric.intra_bandwidth_bytes_per_s <= 9e11
    assert fabric.inter_bandwidth_bytes_per_s < fabric.intra_bandwidth_bytes_per_s
    assert 0 < fabric.intra_latency_ms < fabric.inter_latency_ms < 0.1


def test_bandwidths_stay_below_the_data_sheets():
    # One direction of 900, 900, 1800 and 600 GB/s.
    peaks = {"hgx-h100": 450, "hgx-h200": 450, "hgx-b200": 900, "dgx-a100": 300}

    for name, peak in peaks.items():
        intra_bandwidth_bytes_per_s = cluster_spec(
            name
        ).fabric.intra_bandwidth_bytes_per_s
        assert 0.75 * peak <= intra_bandwidth_bytes_per_s / 1e9 < peak


def test_groups_of_hybrid_sharding():
    spec = cluster_spec("hgx-h100", num_gpus=64)

    assert spec.shard_group(64) == Group(ranks_per_node=8, num_nodes=8)
    assert spec.replica_group(64).size == 1
    assert spec.shard_group(8) == Group(ranks_per_node=8, num_nodes=1)
    assert spec.replica_group(8) == Group(ranks_per_node=1, num_nodes=8)
    assert spec.shard_group(2) == Group(ranks_per_node=2, num_nodes=1)
    assert spec.replica_group(2) == Group(ranks_per_node=4, num_nodes=8)
    assert spec.shard_group(1).size == 1
    assert spec.replica_group(1) == Group(ranks_per_node=8, num_nodes=8)


@given(num_nodes=st.integers(1, 40), degree=st.integers(1, 400))
def test_shards_and_replicas_make_the_cluster(num_nodes, degree):
    spec = cluster_spec("hgx-h100", num_gpus=8 * num_nodes)
    fits = spec.num_gpus % degree == 0 and (degree % 8 == 0 or 8 % degree == 0)
    if not fits:
        with pytest.raises(ValueError, match=f"`degree` must divide.*{degree}"):
            spec.shard_group(degree)
        return

    shard, replicas = spec.shard_group(degree), spec.replica_group(degree)

    assert shard.size == degree
    assert shard.size * replicas.size == spec.num_gpus


@given(num_gpus=st.sampled_from([8, 64, 1024]), nbytes=st.integers(0, 10**11))
def test_sharding_inside_a_node_never_gathers_slower(num_gpus, nbytes):
    spec = cluster_spec("hgx-h100", num_gpus=num_gpus)
    inside, across = spec.shard_group(8), spec.shard_group(num_gpus)

    times = [
        spec.cost("all_gather", group, nbytes).ms(nbytes) for group in (inside, across)
    ]
    assert times[0] <= times[1]


def test_a_gather_of_one_gigabyte_on_eight_h100():
    spec = cluster_spec("hgx-h100")
    time_ms = spec.cost("all_gather", spec.shard_group(8), 10**9).ms(10**9)

    # 7/8 GB at 370.8 GB/s, 8.4 us and seven steps of 3.4 us.
    assert time_ms == pytest.approx(875 / 370.8 + 0.0084 + 7 * 0.0034)


def test_replicas_reduce_only_their_shards():
    spec = cluster_spec("hgx-h100", num_gpus=64)
    costs = spec.fsdp_costs(8, 10**9)

    assert costs.gather == spec.cost("all_gather", spec.shard_group(8), 10**9)
    assert costs.reduce == spec.cost("reduce_scatter", spec.shard_group(8), 10**9)
    shard_bytes = 10**9 / 8
    total = spec.cost("all_reduce", spec.replica_group(8), shard_bytes)
    assert costs.all_reduce.ms(10**9) == pytest.approx(total.ms(shard_bytes))
    assert spec.fsdp_costs(64, 10**9).all_reduce.ms(10**9) == 0.0
