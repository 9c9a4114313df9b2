"""Two and four real gloo processes on this machine."""

import os
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import autosac
from autosac.parallel.cluster_timing import CollectiveTiming, fit_ring
from autosac.parallel.clusters import cluster_spec
from autosac.solvers.fsdp.collectives import Fabric, Group, ring
from benchmarks.rank_server import run_processes

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def _rank(rank, nodes, per_node, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=nodes * per_node,
        init_method=f"file://{folder}/store",
    )
    asked = replace(
        cluster_spec("pcie-l40s", num_gpus=8), gpus_per_node=per_node, num_nodes=nodes
    )
    measured = autosac.calibrate_cluster(
        asked, sizes_bytes=(4096, 2**18, 2**21), num_runs=3
    )
    with pytest.raises(ValueError) as refused:
        autosac.calibrate_cluster(replace(asked, num_nodes=7))
    dist.destroy_process_group()
    return asdict(measured.fabric), str(refused.value)


def _run_ranks(nodes, per_node, folder):
    return run_processes(_rank, nodes * per_node, nodes, per_node, folder)


@pytest.mark.slowest
def test_ranks_measure_their_links_and_agree(tmp_path):
    answers = _run_ranks(1, 2, tmp_path)
    asked = cluster_spec("pcie-l40s").fabric

    assert answers[0] == answers[1]
    fabric = Fabric(**answers[0][0])
    assert 1e6 < fabric.intra_bandwidth_bytes_per_s < 1e12
    assert fabric.intra_bandwidth_bytes_per_s != asked.intra_bandwidth_bytes_per_s
    assert 0.0 <= fabric.base_latency_ms + fabric.intra_latency_ms < 1e3
    # One node measures nothing between nodes.
    assert fabric.inter_bandwidth_bytes_per_s == asked.inter_bandwidth_bytes_per_s
    assert "`cluster` has 14 GPUs, and the process group 2 ranks" in answers[0][1]


@pytest.mark.slowest
def test_each_level_of_the_mesh_is_measured(tmp_path):
    answers = _run_ranks(2, 2, tmp_path)
    asked = cluster_spec("pcie-l40s").fabric

    assert all(answer == answers[0] for answer in answers)
    fabric = Fabric(**answers[0][0])
    assert fabric.intra_bandwidth_bytes_per_s != asked.intra_bandwidth_bytes_per_s
    assert fabric.inter_bandwidth_bytes_per_s != asked.inter_bandwidth_bytes_per_s


@given(
    base=st.floats(0.0, 1.0),
    step=st.floats(0.0, 1.0),
    bandwidth=st.floats(1e6, 1e12),
    ranks=st.integers(2, 16),
    apart=st.booleans(),
)
def test_the_fit_finds_the_constants_that_made_the_times(
    base, step, bandwidth, ranks, apart
):
    fabric = Fabric(
        base_latency_ms=base,
        intra_latency_ms=step,
        inter_latency_ms=step,
        intra_bandwidth_bytes_per_s=bandwidth,
        inter_bandwidth_bytes_per_s=bandwidth,
    )
    group = Group(ranks_per_node=1 if apart else ranks, num_nodes=ranks if apart else 1)
    timings = [
        CollectiveTiming(
            collective=collective,
            nbytes=nbytes,
            ms=ring(fabric, group, collective).ms(nbytes),
        )
        for collective in COLLECTIVES
        for nbytes in (2**12, 2**20, 2**30)
    ]

    found_base, found_step, found_bandwidth = fit_ring(group, timings)

    assert found_base == pytest.approx(base, rel=1e-4, abs=1e-6)
    assert found_step == pytest.approx(step, rel=1e-4, abs=1e-6)
    assert found_bandwidth == pytest.approx(bandwidth, rel=1e-3)


def test_times_that_fall_with_bytes_are_an_error():
    group = Group(ranks_per_node=2, num_nodes=1)
    timings = [
        CollectiveTiming(collective="all_gather", nbytes=2**k, ms=1e3 / 2**k)
        for k in (0, 10, 20)
    ]

    with pytest.raises(ValueError, match="they do not grow with bytes"):
        fit_ring(group, timings)


def test_without_a_process_group_there_is_nothing_to_measure():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        autosac.calibrate_cluster(cluster_spec("hgx-h100"))
