"""What autosac must know about a cluster, and the clusters it knows.

Bandwidths are those that NCCL reaches, in one direction and per GPU: links per GPU,
from the data sheet of the GPU, times the rate of one link in NCCL's src/graph/topo.h
(20.0 GB/s on Ampere, 20.6 on Hopper, 40.1 on Blackwell; the data sheets' peaks are 25,
25 and 50). A GPU's share of the node's network is what NCCL's makers expect of its
adapter, 12 GB/s for each 100 Gb/s (NVIDIA/nccl-tests, issue 119; issue 290: 46 to 48
for 400). Latencies are those of NCCL's src/graph/tuning.cc for rings with the SIMPLE
protocol, which carries large messages. `autosac.calibrate_cluster` replaces them by
measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autosac.devices.links import Link
from autosac.devices.specs import DeviceSpec, device_spec
from autosac.errors import ArgumentError
from autosac.quantities import is_whole, whole_number
from autosac.solvers.fsdp import collectives
from autosac.solvers.fsdp.collectives import AffineCost, Collective, Fabric, Group

_GB = 10**9
_GBIT = 0.12 * _GB
# NCCL src/graph/tuning.cc, ncclTunerConstantsDefaults, ring with SIMPLE, in us:
# base 8.4; a step over NVLink 3.4, over PCIe 5.7, over the network 14.
_BASE_MS = 0.0084
_NVLINK_MS = 0.0034
_PCIE_MS = 0.0057
_NETWORK_MS = 0.014
# NVIDIA/nccl, issue 689: NCCL takes as few multiprocessors as reach a platform's rate,
# 16 on a DGX with 8 adapters, 2 over PCIe with a single one, and shares none of them
# with other kernels.
_NVLINK_MULTIPROCESSORS = 16
_PCIE_MULTIPROCESSORS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpCosts:
    """Costs of an FSDP unit's collectives, each by the bytes of the whole unit.

    Attributes:
        gather: All-gather of its parameters.
        reduce: Reduce-scatter of its gradients.
        all_reduce: All-reduce of the gradients' shards between replicas.
    """

    gather: AffineCost
    reduce: AffineCost
    all_reduce: AffineCost


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Equal nodes of equal GPUs, and the links between them.

    Attributes:
        name: What users call it.
        device: Each GPU.
        gpus_per_node: GPUs of a node.
        num_nodes: Nodes.
        fabric: Latency and bandwidth inside a node and between nodes.
        gpus_per_link: GPUs of a node that share one link to their host.
        collective_multiprocessors: Multiprocessors that a collective's kernel has to
            itself while it runs, one for each channel.
    """

    name: str
    device: DeviceSpec
    gpus_per_node: int
    num_nodes: int
    fabric: Fabric
    gpus_per_link: int = 1
    collective_multiprocessors: int = 0

    def __post_init__(self) -> None:
        if self.collective_multiprocessors < 0:
            raise ArgumentError(
                "`collective_multiprocessors` must not be negative, got"
                f" {self.collective_multiprocessors}."
            )
        if min(self.gpus_per_node, self.num_nodes, self.gpus_per_link) < 1:
            raise ArgumentError(
                "`gpus_per_node`, `num_nodes` and `gpus_per_link` must be at least 1,"
                f" got {self.gpus_per_node}, {self.num_nodes} and {self.gpus_per_link}."
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.gpus_per_node * self.num_nodes

    @property
    def link(self) -> Link | None:
        """What each GPU has of the link to far memory; None if that is not known."""
        link = self.device.link
        sharing = min(self.gpus_per_link, self.gpus_per_node)
        return None if link is None else link.shared_by(sharing)

    @property
    def contention(self) -> float:
        """Share of a GPU that collectives take from the compute beside them."""
        every = self.device.multiprocessors
        if not every:  # the CPU, or not known
            return 0.0
        return min(1.0, self.collective_multiprocessors / every)

    def resized(self, num_gpus: int) -> ClusterSpec:
        """The cluster with another number of GPUs: part of one node, or whole nodes.

        Raises:
            ArgumentError: `num_gpus` is neither.
        """
        node = self.gpus_per_node
        if is_whole(num_gpus) and 1 <= num_gpus <= node:
            return replace(self, gpus_per_node=int(num_gpus), num_nodes=1)
        if not is_whole(num_gpus) or num_gpus < 1 or num_gpus % node:
            raise ArgumentError(
                f"`num_gpus` must be at most {node} or a multiple of it,"
                f" whole nodes of {self.name!r}; got {num_gpus!r}."
            )
        return replace(self, num_nodes=int(num_gpus) // node)

    def shard_group(self, degree: int) -> Group:
        """The ranks that parameters are sharded over: consecutive ones.

        Raises:
            ArgumentError: `degree` does not divide the number of GPUs, or neither
                divides the GPUs of a node nor is a multiple of them.
        """
        whole_number(degree, name="degree")
        node = self.gpus_per_node
        if self.num_gpus % degree or (degree % node and node % degree):
            raise ArgumentError(
                f"`degree` must divide {self.num_gpus} GPUs into equal parts of nodes"
                f" or whole nodes of {node}, got {degree}."
            )
        return self.neighbours(degree)

    def neighbours(self, degree: int) -> Group:
        """So many consecutive ranks, of a part of a node or of whole ones."""
        node = self.gpus_per_node
        return Group(ranks_per_node=min(degree, node), num_nodes=max(1, degree // node))

    def replica_group(self, degree: int) -> Group:
        """The ranks that hold the same shard, if parameters are sharded `degree` times.

        Raises:
            ArgumentError: As `shard_group`.
        """
        shard = self.shard_group(degree)
        per_node = self.gpus_per_node // shard.ranks_per_node
        return Group(
            ranks_per_node=per_node,
            num_nodes=self.num_gpus // degree // per_node,
        )

    def cost(
        self,
        collective: Collective,
        group: Group,
        nbytes: float,
    ) -> AffineCost:
        """Affine cost of the algorithm that is fastest for a size: see `fastest`.

        Args:
            collective: What the ranks do.
            group: The ranks, as from `shard_group` or `replica_group`.
            nbytes: The whole, unsharded buffer.
        """
        return collectives.fastest(self.fabric, group, collective, nbytes)

    def fsdp_costs(self, degree: int, nbytes: float) -> FsdpCosts:
        """What the collectives of FSDP units cost that are sharded `degree` times.

        Args:
            degree: Ranks that parameters are sharded over; the others are replicas.
            nbytes: Size of a typical unit, for which the algorithms are the fastest.

        Raises:
            ArgumentError: As `shard_group`.
        """
        shard, replicas = self.shard_group(degree), self.replica_group(degree)
        total = self.cost("all_reduce", replicas, nbytes / degree)
        return FsdpCosts(
            gather=self.cost("all_gather", shard, nbytes),
            reduce=self.cost("reduce_scatter", shard, nbytes),
            all_reduce=replace(total, ms_per_byte=total.ms_per_byte / degree),
        )


def _nvlink_node(
    name: str,
    device: str,
    num_links: int,
    gb_per_s_per_link: float,
    gbit_per_s: float,
    *,
    gpus_per_link: int = 1,
) -> ClusterSpec:
    """A node of eight GPUs with NVLink, and an InfiniBand adapter for each GPU."""
    return ClusterSpec(
        name=name,
        device=device_spec(device),
        gpus_per_node=8,
        num_nodes=1,
        fabric=Fabric(
            base_latency_ms=_BASE_MS,
            intra_latency_ms=_NVLINK_MS,
            inter_latency_ms=_NETWORK_MS,
            intra_bandwidth_bytes_per_s=num_links * gb_per_s_per_link * _GB,
            inter_bandwidth_bytes_per_s=gbit_per_s * _GBIT,
        ),
        gpus_per_link=gpus_per_link,
        collective_multiprocessors=_NVLINK_MULTIPROCESSORS,
    )


def _pcie_nodes(name: str, *, node_gbit_per_s: float, num_nodes: int) -> ClusterSpec:
    """Nodes of eight L40S on PCIe, and one Ethernet adapter for all of them.

    NVIDIA L40S data sheet: PCIe Gen4 x16, 32 GB/s in one direction; NCCL counts on 24
    (PCI_BW of its src/graph/topo.h, 12 for Gen3, doubled).
    """
    return ClusterSpec(
        name=name,
        device=device_spec("l40s"),
        gpus_per_node=8,
        num_nodes=num_nodes,
        fabric=Fabric(
            base_latency_ms=_BASE_MS,
            intra_latency_ms=_PCIE_MS,
            inter_latency_ms=_NETWORK_MS,
            intra_bandwidth_bytes_per_s=24.0 * _GB,
            inter_bandwidth_bytes_per_s=node_gbit_per_s * _GBIT / 8,
        ),
        collective_multiprocessors=_PCIE_MULTIPROCESSORS,
    )


_SPECS = (
    # NVIDIA H100 data sheet: 900 GB/s NVLink both ways, 18 links; DGX H100 data sheet:
    # a 400 Gb/s ConnectX-7 for each GPU.
    _nvlink_node("hgx-h100", "h100", 18, 20.6, 400),
    # NVIDIA H200 and DGX H200 data sheets: as H100.
    _nvlink_node("hgx-h200", "h200", 18, 20.6, 400),
    # NVIDIA Blackwell data sheet: 1.8 TB/s NVLink both ways, 18 links; DGX B200 data
    # sheet: a 400 Gb/s ConnectX-7 for each GPU.
    _nvlink_node("hgx-b200", "b200", 18, 40.1, 400),
    # NVIDIA A100 data sheet: 600 GB/s NVLink both ways, 12 links; DGX A100 data sheet:
    # a 200 Gb/s ConnectX-6 for each GPU. DGX A100 User Guide, system topology: four
    # PCIe switches connect the eight GPUs with the hosts.
    _nvlink_node("dgx-a100", "a100", 12, 20.0, 200, gpus_per_link=2),
    # A nominal workstation: 25 Gb/s Ethernet if there are several (IEEE 802.3by).
    _pcie_nodes("pcie-l40s", node_gbit_per_s=25, num_nodes=1),
    # A nominal cluster with 100 Gb/s Ethernet to each node (IEEE 802.3bj).
    _pcie_nodes("ethernet-l40s", node_gbit_per_s=100, num_nodes=2),
)

KNOWN_CLUSTERS: Mapping[str, ClusterSpec] = MappingProxyType(
    {spec.name: spec for spec in _SPECS}
)


def cluster_spec(name: str, *, num_gpus: int | None = None) -> ClusterSpec:
    """Look up a known cluster; case does not matter.

    Args:
        name: Such as ``"hgx-h100"``: one node, ``"ethernet-l40s"``: two.
        num_gpus: GPUs in all: part of a node, or a multiple of its GPUs.

    Raises:
        ArgumentError: No cluster of that name is known, or `num_gpus` does not fit it.
    """
    spec = KNOWN_CLUSTERS.get(name.lower()) if isinstance(name, str) else None
    if spec is None:
        raise ArgumentError(
            f"`cluster`={name!r} is not a known cluster; name one of"
            f" {', '.join(KNOWN_CLUSTERS)}, or pass a `ClusterSpec`."
        )
    return spec if num_gpus is None else spec.resized(num_gpus)
