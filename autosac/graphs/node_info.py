"""What forward saves and backward needs, for every node of a joint graph.

The terms are those of `autosac.graph_info`; here the nodes are single operators, and a
backward node belongs to the forward node that it differentiates: AOTAutograd numbers
both alike.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from autosac import _compat_graphs
from autosac.graphs.memory import GraphMemory
from autosac.profiles.node_figures import Figures, Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo(Figures, Staged):
    """Figures of one node of a joint graph.

    Bytes are of whole storages. Parameters and buffers are alive anyway and count
    nowhere but as gradients. Figures of backward are those of the forward node that it
    differentiates, and zero elsewhere.

    Attributes:
        name: Of the node.
        op: What it runs.
        stage: placeholder, forward, loss, backward or optimizer.
        differentiates: Of a backward node: the forward node that it belongs to; None
            if that is unknown, as of sums of gradients.
        is_saved: Backward reads what this node of forward, or this input, makes.
        made_bytes: Size of the storages that it makes.
        flop: Floating point operations of the node itself.
        fwd_flop: The same in forward and loss, else 0.
        bwd_flop: Those of the backward nodes that belong to it.
        fwd_mem_in: Bytes that these read and that existed before the node ran.
        fwd_mem_tmp: Bytes that these read and that the node made.
        bwd_mem_tmp: Most bytes alive at once of what these make and only they read,
            workspaces included.
        bwd_mem_out: Bytes that these make and that others read, or that are results.
        bwd_mem_peak: Most bytes alive at once of all that these make.
    """

    name: str
    op: str
    stage: str
    differentiates: str | None = None
    is_saved: bool = False
    made_bytes: int = 0
    flop: int = 0


def node_infos(
    memory: GraphMemory, stages: Mapping[fx.Node, str], always: Iterable[fx.Node]
) -> list[NodeInfo]:
    """Figures of all nodes that have a stage, in order.

    Args:
        memory: Of the graph.
        stages: Of its nodes.
        always: Inputs that are not counted as saved: parameters, buffers, and the
            gradient of the loss.
    """
    nodes = _Nodes(memory, stages, frozenset(always))
    return [nodes.info(node) for node in stages]


class _Nodes:
    """Which nodes read what, and which backward nodes belong to which forward node."""

    def __init__(
        self,
        memory: GraphMemory,
        stages: Mapping[fx.Node, str],
        always: frozenset[fx.Node],
    ) -> None:
        self.memory = memory
        self.stages = stages
        self.owner = _owners(stages)
        self.belonging: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, owner in self.owner.items():
            self.belonging[owner].append(node)
        self.places = {node: place for place, node in enumerate(memory.nodes)}
        self.lives = memory.lives()
        self.alive_anyway = {s for n in always for s in memory.nodes[n].storages}
        self.readers: defaultdict[int, set[fx.Node]] = defaultdict(set)
        for node in memory.nodes:
            for storage in self._read([node]):
                self.readers[storage].add(node)

    def _read(self, nodes: Iterable[fx.Node]) -> set[int]:
        arguments = (argument for node in nodes for argument in node.all_input_nodes)
        return {
            s for argument in arguments for s in self.memory.nodes[argument].storages
        }

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self.memory.nbytes[storage] for storage in storages)

    def info(self, node: fx.Node) -> NodeInfo:
        """Figures of one node."""
        own, stage = self.memory.nodes[node], self.stages[node]
        owner = self.owner.get(node)
        in_backward = [n for n in node.users if self.stages.get(n) == "backward"]
        belonging = self.belonging[node]
        before = self.places[node]
        read = self._read(belonging) - self.alive_anyway
        made = self._unpacked(node)
        saved = {s for s in read if self._born(s) < before} - made
        leaving, staying = self._made_in_backward(belonging)
        is_forward = stage in ("forward", "loss")
        return NodeInfo(
            name=node.name,
            op=str(node.target),
            stage=stage,
            differentiates=None if owner is None else owner.name,
            is_saved=bool(in_backward) and stage != "backward",
            made_bytes=self._bytes(own.makes) if node.op == "call_function" else 0,
            flop=own.flops,
            fwd_flop=own.flops if is_forward else 0,
            bwd_flop=sum(self.memory.nodes[n].flops for n in belonging),
            fwd_mem_in=self._bytes(saved),
            fwd_mem_tmp=self._bytes(read & made),
            bwd_mem_tmp=self._peak(staying, belonging),
            bwd_mem_out=self._bytes(leaving),
            bwd_mem_peak=self._peak(staying | leaving, belonging),
        )

    def _unpacked(self, node: fx.Node) -> set[int]:
        """Storages that a node makes."""
        return (
            set(self.memory.nodes[node].makes) if node.op == "call_function" else set()
        )

    def _born(self, storage: int) -> int:
        """Place at which a storage is made; inputs are there before all."""
        return self.lives[storage][0] if storage in self.lives else -1

    def _made_in_backward(self, belonging: list[fx.Node]) -> tuple[set[int], set[int]]:
        """Storages that backward nodes make: those that leave them, and the others."""
        made = {s for n in belonging for s in self.memory.nodes[n].makes}
        inside = set(belonging)
        leaving = {s for s in made if not self.readers[s] <= inside}
        return leaving, made - leaving

    def _peak(self, staying: set[int], belonging: list[fx.Node]) -> int:
        """Most bytes at once of some storages and of nodes' workspaces."""
        changes: defaultdict[int, int] = defaultdict(int)
        for storage in staying:
            first, last = self.lives[storage]
            changes[first] += self.memory.nbytes[storage]
            changes[last + 1] -= self.memory.nbytes[storage]
        for node in belonging:
            workspace_bytes = self.memory.nodes[node].workspace_bytes
            changes[self.places[node]] += workspace_bytes
            changes[self.places[node] + 1] -= workspace_bytes
        return max(accumulate(changes[place] for place in sorted(changes)), default=0)


def _owners(stages: Mapping[fx.Node, str]) -> dict[fx.Node, fx.Node]:
    """Backward nodes -> the forward nodes that they differentiate.

    Ops without a gradient have the number of the op before them: the first one counts.
    """
    first: dict[int, fx.Node] = {}
    owners: dict[fx.Node, fx.Node] = {}
    for node, stage in stages.items():
        number = _compat_graphs.autograd_number(node)
        if number is None or (node.target is operator.getitem and stage != "backward"):
            continue
        if stage in ("forward", "loss"):
            first.setdefault(number, node)
        elif stage == "backward" and number in first:
            owners[node] = first[number]
    return owners
