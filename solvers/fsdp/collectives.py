"""Time of one collective on a cluster of equal nodes: latency plus bytes on the wire.

A group has g ranks on each of m nodes, n = g m in all. An algorithm takes some steps
inside a node and some between nodes, each with its latency, and moves bytes at the
rate of the narrowest link of its rings:

    time = base + intra_steps * intra_latency + inter_steps * inter_latency
           + bytes * factor / bandwidth                                            (1)

    algorithm    collective       intra steps    inter steps         factor
    ring         gather, reduce   n - m          m - 1               (n - 1) / n
    ring         all-reduce       2 (n - m)      2 (m - 1)           2 (n - 1) / n
    tree         all-reduce       2 (g - 1)      2 log2 m            2 / 0.92

with log2 rounded up. `bytes` is the whole, unsharded buffer: what every rank has after
an all-gather or an all-reduce, and before a reduce-scatter. A ring that crosses nodes
enters each of them by the links of all g ranks: its bandwidth is
min(intra, g * inter), or inter if g = 1.

Two more, of which `bytes` is what one rank sends or keeps:

    exchange     base + (g - 1) intra_latency + (n - g) inter_latency
                 + bytes max((g - 1) / (n intra), (n - g) / (n inter))            (2)
    shift        base + latency + bytes / bandwidth of the slowest link           (3)

An exchange (all-to-all) goes in n - 1 pairwise steps, and links of both levels carry
at the same time; in a shift each rank sends everything to the next one.

Source:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication operations
    in MPICH (2005), for steps and bytes of rings and of pairwise exchange; NCCL
    src/graph/tuning.cc for the steps of rings over nodes and for the all-reduce tree
    and its 0.92; nccl-tests doc/PERFORMANCE.md for the factors ("busbw").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]

_TREE_EFFICIENCY = 0.92  # NCCL src/graph/tuning.cc, tree all-reduce with SIMPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Speed of the links between ranks.

    Attributes:
        base_latency_ms: What any collective takes before its first step.
        intra_latency_ms: Of one step between ranks of a node.
        inter_latency_ms: Of one step between nodes.
        intra_bandwidth_bytes_per_s: Of one rank to the others of its node, in one
            direction.
        inter_bandwidth_bytes_per_s: Of one rank to other nodes, in one direction: its
            share of the node's network.
    """

    base_latency_ms: float
    intra_latency_ms: float
    inter_latency_ms: float
    intra_bandwidth_bytes_per_s: float
    inter_bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("base_latency_ms", "intra_latency_ms", "inter_latency_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"`{name}` must be finite and >= 0, got {value}.")
        for name in ("intra_bandwidth_bytes_per_s", "inter_bandwidth_bytes_per_s"):
            value = getattr(self, name)
            if not value > 0.0:
                raise ValueError(f"`{name}` must be positive, got {value}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that take part in a collective.

    Attributes:
        ranks_per_node: How many of them share a node.
        num_nodes: On how many nodes they are.
    """

    ranks_per_node: int
    num_nodes: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.num_nodes < 1:
            raise ValueError(
                "`ranks_per_node` and `num_nodes` must be at least 1, got"
                f" {self.ranks_per_node} and {self.num_nodes}."
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks_per_node * self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineCost:
    """Time of a collective that grows in proportion to its bytes.

    Attributes:
        latency_ms: Of a collective of no bytes.
        ms_per_byte: Of each byte.
    """

    latency_ms: float
    ms_per_byte: float

    def ms(self, nbytes: float) -> float:
        """Time for some bytes; a collective of none is not called and takes 0."""
        return self.latency_ms + nbytes * self.ms_per_byte if nbytes > 0 else 0.0


FREE = AffineCost(latency_ms=0.0, ms_per_byte=0.0)


def ring(fabric: Fabric, group: Group, collective: Collective) -> AffineCost:
    """Formula (1) for a ring; a group of one rank costs nothing.

    Raises:
        ValueError: `collective` is unknown.
    """
    if collective not in ("all_gather", "reduce_scatter", "all_reduce"):
        raise ValueError(
            "`collective` must be 'all_gather', 'reduce_scatter' or 'all_reduce', got"
            f" {collective!r}."
        )
    m, n = group.num_nodes, group.size
    rounds = 2 if collective == "all_reduce" else 1
    return _cost(
        fabric, group, rounds * (n - m), rounds * (m - 1), rounds * (n - 1) / n
    )


def tree(fabric: Fabric, group: Group) -> AffineCost:
    """Formula (1) for an all-reduce by a tree; a group of one rank costs nothing."""
    g, m = group.ranks_per_node, group.num_nodes
    levels = (m - 1).bit_length()  # log2 m, rounded up
    return _cost(fabric, group, 2 * (g - 1), 2 * levels, 2.0 / _TREE_EFFICIENCY)


def exchange(fabric: Fabric, group: Group) -> AffineCost:
    """Formula (2): every rank has a part for every rank; one rank costs nothing."""
    g, n = group.ranks_per_node, group.size
    if n == 1:
        return FREE
    return AffineCost(
        latency_ms=fabric.base_latency_ms
        + (g - 1) * fabric.intra_latency_ms
        + (n - g) * fabric.inter_latency_ms,
        ms_per_byte=max(
            1e3 * (g - 1) / n / fabric.intra_bandwidth_bytes_per_s,
            1e3 * (n - g) / n / fabric.inter_bandwidth_bytes_per_s,
        ),
    )


def shift(fabric: Fabric, group: Group) -> AffineCost:
    """Formula (3): every rank sends to the next one; one rank costs nothing."""
    if group.size == 1:
        return FREE
    latencies, bandwidths = [], []
    if group.ranks_per_node > 1:
        latencies.append(fabric.intra_latency_ms)
        bandwidths.append(fabric.intra_bandwidth_bytes_per_s)
    if group.num_nodes > 1:
        latencies.append(fabric.inter_latency_ms)
        bandwidths.append(fabric.inter_bandwidth_bytes_per_s)
    return AffineCost(
        latency_ms=fabric.base_latency_ms + max(latencies),
        ms_per_byte=1e3 / min(bandwidths),
    )


def fastest(
    fabric: Fabric, group: Group, collective: Collective, nbytes: float
) -> AffineCost:
    """The algorithm that takes least time for a size.

    NCCL chooses from rings and, for all-reduce, trees on several GPUs a node. The least
    of several increasing lines: monotone in `nbytes`, and concave, so that the line
    returned is nowhere below the fastest algorithm of another size.

    Args:
        fabric: Speed of the links.
        group: The ranks.
        collective: What they do.
        nbytes: The whole, unsharded buffer.

    Raises:
        ValueError: `nbytes` is negative, or `collective` is unknown.
    """
    if not nbytes >= 0:
        raise ValueError(f"`nbytes` must not be negative, got {nbytes}.")
    costs = [ring(fabric, group, collective)]
    if collective == "all_reduce":
        costs.append(tree(fabric, group))
    return min(costs, key=lambda cost: cost.latency_ms + nbytes * cost.ms_per_byte)


def _cost(
    fabric: Fabric, group: Group, intra_steps: int, inter_steps: int, factor: float
) -> AffineCost:
    if group.size == 1:
        return FREE
    return AffineCost(
        latency_ms=fabric.base_latency_ms
        + intra_steps * fabric.intra_latency_ms
        + inter_steps * fabric.inter_latency_ms,
        ms_per_byte=1e3 * factor / _bandwidth(fabric, group),
    )


def _bandwidth(fabric: Fabric, group: Group) -> float:
    intra = fabric.intra_bandwidth_bytes_per_s
    if group.num_nodes == 1:
        return intra
    inter = fabric.inter_bandwidth_bytes_per_s
    if group.ranks_per_node == 1:
        return inter
    return min(intra, group.ranks_per_node * inter)
