"""Measure the collectives of the running process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autosac.errors import ArgumentError
from autosac.parallel.clusters import ClusterSpec
from autosac.solvers.fsdp.collectives import Collective, Fabric, Group, ring

_SIZES_BYTES = (2**12, 2**16, 2**20, 2**23)
_COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """One measured collective.

    Attributes:
        collective: What the ranks did.
        nbytes: The whole, unsharded buffer.
        ms: Least time of some runs on the slowest rank.
    """

    collective: Collective
    nbytes: int
    ms: float


def calibrate_cluster(
    cluster: ClusterSpec,
    *,
    sizes_bytes: Sequence[int] = _SIZES_BYTES,
    num_runs: int = 5,
) -> ClusterSpec:
    """Measure latency and bandwidth of the running process group's collectives.

    Every rank of the default process group (gloo or NCCL) must call this at the same
    point, in a program started as many times as the cluster has GPUs, the ranks of a
    node next to each other as `torchrun` starts them. All-gather, reduce-scatter and
    all-reduce of a few sizes run inside nodes and between them, and a fit in least
    squares of relative errors to the cost of rings gives the constants.

    Args:
        cluster: GPUs per node and nodes of the program; its other constants stay where
            nothing measures them: a level of one rank.
        sizes_bytes: Sizes of the whole buffer.
        num_runs: Runs of each; the least time counts, as noise only adds.

    Returns:
        The cluster with measured latencies and bandwidths, the same on every rank.

    Raises:
        RuntimeError: No process group is initialised.
        ArgumentError: The process group has another size than the cluster, or there are
            less than two sizes or no runs.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "`calibrate_cluster` needs a running process group: call"
            " torch.distributed.init_process_group first, as torchrun programs do."
        )
    if dist.get_world_size() != cluster.num_gpus:
        raise ArgumentError(
            f"`cluster` has {cluster.num_gpus} GPUs, and the process group"
            f" {dist.get_world_size()} ranks; use `cluster.resized(...)`."
        )
    if len(set(sizes_bytes)) < 2 or min(sizes_bytes) < 1 or num_runs < 1:
        raise ArgumentError(
            "`sizes_bytes` needs two or more different sizes and `num_runs` at least 1,"
            f" got {tuple(sizes_bytes)} and {num_runs}."
        )
    device = _device()
    mesh = init_device_mesh(device.type, (cluster.num_nodes, cluster.gpus_per_node))
    fabric = cluster.fabric
    if cluster.gpus_per_node > 1:
        group = Group(ranks_per_node=cluster.gpus_per_node, num_nodes=1)
        timings = _measured(mesh.get_group(1), sizes_bytes, num_runs, device)
        base_ms, step_ms, bandwidth = fit_ring(group, timings)
        fabric = replace(
            fabric,
            base_latency_ms=base_ms,
            intra_latency_ms=step_ms,
            intra_bandwidth_bytes_per_s=bandwidth,
        )
    if cluster.num_nodes > 1:
        group = Group(ranks_per_node=1, num_nodes=cluster.num_nodes)
        timings = _measured(mesh.get_group(0), sizes_bytes, num_runs, device)
        # What a collective takes before its first step is known from inside the node.
        fixed_base_ms = fabric.base_latency_ms if cluster.gpus_per_node > 1 else None
        base_ms, step_ms, bandwidth = fit_ring(group, timings, base_ms=fixed_base_ms)
        fabric = replace(
            fabric,
            base_latency_ms=base_ms,
            inter_latency_ms=step_ms,
            inter_bandwidth_bytes_per_s=bandwidth,
        )
    return replace(cluster, fabric=_agreed(fabric, device))


def fit_ring(
    group: Group, timings: Iterable[CollectiveTiming], *, base_ms: float | None = None
) -> tuple[float, float, float]:
    """Fit the cost of rings to measured times, in least squares of relative errors.

    Args:
        group: The ranks, on one level: all in one node, or each in its own.
        timings: What they measured.
        base_ms: The base latency if it is known.

    Returns:
        Base latency and latency of a step in ms, neither negative, and bandwidth in
        bytes per second.

    Raises:
        ArgumentError: No positive bandwidth fits: times do not grow with bytes.
    """
    from scipy.optimize import nnls  # slow to import

    timings = tuple(timings)
    columns = np.array([_ring_terms(group, timing) for timing in timings])
    times = np.array([timing.ms for timing in timings])
    fixed = 0.0 if base_ms is None else base_ms
    if base_ms is not None:
        columns[:, 0] = 0.0
    values, _ = nnls(columns / times[:, None], (times - fixed) / times)
    base, step, ms_per_byte = values.tolist()
    if ms_per_byte == 0.0:
        raise ArgumentError(
            f"No bandwidth fits the measured times {times.tolist()} ms: they do not"
            " grow with bytes. Measure larger `sizes_bytes`."
        )
    return base + fixed, step, 1e3 / ms_per_byte


def _ring_terms(group: Group, timing: CollectiveTiming) -> tuple[float, float, float]:
    """Factors of base latency, step latency and ms per wire byte in a ring's time."""
    unit = Fabric(
        base_latency_ms=0.0,
        intra_latency_ms=1.0,
        inter_latency_ms=1.0,
        intra_bandwidth_bytes_per_s=1e3,
        inter_bandwidth_bytes_per_s=1e3,
    )
    cost = ring(unit, group, timing.collective)
    return 1.0, cost.latency_ms, cost.ms_per_byte * timing.nbytes


def _device() -> torch.device:
    """Where the process group's tensors must be."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _measured(
    group: dist.ProcessGroup,
    sizes_bytes: Sequence[int],
    num_runs: int,
    device: torch.device,
) -> list[CollectiveTiming]:
    timings = []
    for collective in _COLLECTIVES:
        for size in sorted(set(sizes_bytes)):
            run, nbytes = _runner(collective, size, group, device)
            timings.append(
                (collective, nbytes, _least_ms(run, num_runs, group, device))
            )
    times = torch.tensor(
        [ms for _, _, ms in timings], dtype=torch.float64, device=device
    )
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [
        CollectiveTiming(collective=collective, nbytes=nbytes, ms=ms)
        for (collective, nbytes, _), ms in zip(timings, times.tolist(), strict=True)
    ]


def _runner(
    collective: Collective, size: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Callable[[], object], int]:
    """A function that runs a collective of about a size, and its buffer's bytes."""
    num_ranks = dist.get_world_size(group)
    shard = torch.ones(-(-size // (4 * num_ranks)), device=device)
    whole = torch.ones(shard.numel() * num_ranks, device=device)
    runs: dict[Collective, Callable[[], object]] = {
        "all_gather": partial(dist.all_gather_into_tensor, whole, shard, group=group),
        "reduce_scatter": partial(
            dist.reduce_scatter_tensor, shard, whole, group=group
        ),
        "all_reduce": partial(dist.all_reduce, whole, group=group),
    }
    return runs[collective], whole.nbytes


def _least_ms(
    run: Callable[[], object],
    num_runs: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> float:
    times_ms = []
    for _ in range(num_runs + 1):  # the first one sets up connections
        dist.barrier(group=group)
        _synchronize(device)
        started = perf_counter()
        run()
        _synchronize(device)
        times_ms.append(1e3 * (perf_counter() - started))
    return min(times_ms[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreed(fabric: Fabric, device: torch.device) -> Fabric:
    """Rank 0's figures, so that all ranks plan with the same ones."""
    figures = asdict(fabric)
    values = torch.tensor(list(figures.values()), dtype=torch.float64, device=device)
    dist.broadcast(values, src=0)
    return Fabric(**dict(zip(figures, values.tolist(), strict=True)))
