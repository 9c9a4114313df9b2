"""A joint graph that recomputes: copies of forward nodes, just before they are read.

It may move what forward makes as well: nodes that send it to far memory and let go of
it, and that fetch it and wait for it where it is first read (`far_nodes.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autosac import _compat, _compat_graphs
from autosac.far_memory import FarMemory
from autosac.graphs import far_nodes
from autosac.graphs.joint_graphs import JointGraph
from autosac.graphs.memory import graph_memory


@dataclass(frozen=True, kw_only=True)
class MovedNode:
    """A tensor of forward that is moved.

    Attributes:
        node: It, the first one on its storage.
        storage: Its number.
        released_after: The node of forward after which it is freed.
        fetched_before: The node of backward before which, and before what runs again
            for it, its copy back begins.
    """

    node: fx.Node
    storage: int
    released_after: fx.Node
    fetched_before: fx.Node


def rewritten(
    joint: JointGraph,
    reruns: Mapping[fx.Node, tuple[fx.Node, ...]],
    dropped: Collection[int],
    moved: Sequence[MovedNode] = (),
    memory: FarMemory | None = None,
) -> JointGraph:
    """Insert recomputations and moves, and let later nodes of backward read them.

    Args:
        joint: The graph; it is not changed.
        reruns: Node of backward (without an optimizer, or the output) -> forward nodes
            that run again just before it, in forward order.
        dropped: Storages that backward must not take from forward.
        moved: What is moved, in the order in which it is fetched.
        memory: Where to.
    """
    module = _compat_graphs.copy_graph(joint.module)
    twins = dict(zip(joint.module.graph.nodes, module.graph.nodes, strict=True))
    writer = _Writer(joint, twins, frozenset(dropped))
    if memory is not None:
        writer.send(moved, memory)
    for node in [*joint.nodes_after_forward, joint.module.graph.output_node()]:
        with module.graph.inserting_before(twins[node]):
            for move in moved:
                if move.fetched_before is node:
                    writer.fetch(move)
            for again in reruns.get(node, ()):
                writer.rerun(again)
            writer.redirect(node)
    _erase_dead(module.graph)
    module.recompile()
    graph = graph_memory(module).with_costs(joint.memory.costs)
    return replace(joint, module=module, memory=graph)


class _Writer:
    """Writes into a copy of a joint graph, at its point of insertion.

    Attributes:
        joint: The original.
        twins: Its nodes -> those of the copy.
        dropped: Storages that are recomputed.
        copies: Forward nodes of the original -> what recomputes them, or brings them
            back.
    """

    def __init__(
        self,
        joint: JointGraph,
        twins: dict[fx.Node, fx.Node],
        dropped: frozenset[int],
    ) -> None:
        self.joint = joint
        self.twins = twins
        self.dropped = dropped
        self.copies: dict[fx.Node, fx.Node] = {}
        self._forward = frozenset(joint.forward_nodes)
        self._tickets: dict[fx.Node, fx.Node] = {}
        self._begun: dict[fx.Node, fx.Node] = {}
        self._moved: frozenset[int] = frozenset()

    def send(self, moved: Sequence[MovedNode], memory: FarMemory) -> None:
        """Move tensors: each is sent where it is made, and let go of where it says.

        Its order after one node: sent first, then let go of.
        """
        self._moved = frozenset(move.storage for move in moved)
        places = {node: i for i, node in enumerate(self.joint.module.graph.nodes)}
        ends: dict[fx.Node, fx.Node] = {}  # last node after each, so far
        send = far_nodes.Send(memory)
        for move in sorted(moved, key=lambda move: places[move.node]):
            maker = _maker(move.node)
            self._tickets[move.node] = self._after(
                maker, ends, send, (self.twins[move.node],)
            )
        order = [
            (places[move.released_after], places[move.node], move) for move in moved
        ]
        for _, _, move in sorted(order, key=lambda item: item[:2]):
            arguments = (self._tickets[move.node], self.twins[move.node])
            self._tickets[move.node] = self._after(
                move.released_after, ends, far_nodes.release, arguments
            )

    def _after(
        self,
        node: fx.Node,
        ends: dict[fx.Node, fx.Node],
        target: Any,
        arguments: tuple[fx.Node, ...],
    ) -> fx.Node:
        """Add a node that gives a ticket after one of forward, and what unpacks it."""
        if node not in ends:
            unpacking = [u for u in node.users if u.target is operator.getitem]
            ends[node] = max([self.twins[u] for u in unpacking] or [self.twins[node]])
        with self.twins[node].graph.inserting_after(ends[node]):
            ticket = self.twins[node].graph.call_function(target, arguments)
        tensor: torch.Tensor = arguments[0].meta["val"]
        ticket.meta["val"] = tensor.new_empty(0, dtype=torch.uint8)
        _compat_graphs.place(ticket, "is_forward")
        ends[node] = ticket
        return ticket

    def fetch(self, move: MovedNode) -> None:
        """Begin to copy a tensor back."""
        self._begun[move.node] = self._back(
            move.node, far_nodes.fetch, (self._tickets[move.node],)
        )

    def _arrive(self, node: fx.Node) -> fx.Node:
        """Wait until a tensor is back, where it is read first."""
        arguments = self._tickets[node], self._begun[node]
        self.copies[node] = self._back(node, far_nodes.arrive, arguments)
        return self.copies[node]

    def _back(
        self, node: fx.Node, target: Any, arguments: tuple[fx.Node, ...]
    ) -> fx.Node:
        """Add a node of backward that gives what one of forward gives."""
        back = self.twins[node].graph.call_function(target, arguments)
        tensor: torch.Tensor = node.meta["val"]
        back.meta = {
            **node.meta,
            "val": tensor.new_empty_strided(tensor.shape, tensor.stride()),
        }
        _compat_graphs.place(back, "is_backward")
        return back

    def rerun(self, node: fx.Node) -> None:
        """Run a forward node again, and unpack what it makes."""
        self._copy(node)
        for user in node.users:
            if user not in self._forward or user.target is not operator.getitem:
                continue
            if self._moved.isdisjoint(self.joint.memory.nodes[user].storages):
                self.source(user)

    def source(self, node: fx.Node) -> fx.Node:
        """Where backward gets a value of forward from: a view may be made anew."""
        if node in self.copies:
            return self.copies[node]
        if node in self._begun:
            return self._arrive(node)
        storages = self.joint.memory.nodes[node].storages
        is_made_anew = not (self.dropped | self._moved).isdisjoint(storages)
        return (
            self._copy(node)
            if node in self._forward and is_made_anew
            else (self.twins[node])
        )

    def _copy(self, node: fx.Node) -> fx.Node:
        graph = self.twins[node].graph
        arguments = {n: self.source(n) for n in node.all_input_nodes}
        copy = graph.node_copy(node, lambda n: arguments[n])
        copy.name = graph._graph_namespace.create_name(f"{node.name}_again", None)
        copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
        self.copies[node] = copy
        return copy

    def redirect(self, node: fx.Node) -> None:
        """Let a node after forward read copies; results of forward stay as they are."""
        twin = self.twins[node]
        if node.op == "output":
            results: Any = node.args[0]
            count = self.joint.num_forward_outputs
            kept = [self._twin(r) for r in results[:count]]
            copies = [
                self.source(r) if isinstance(r, fx.Node) else r for r in results[count:]
            ]
            twin.args = ((*kept, *copies),)
            return
        for argument in node.all_input_nodes:
            if (source := self.source(argument)) is not self.twins[argument]:
                twin.replace_input_with(self.twins[argument], source)

    def _twin(self, result: Any) -> Any:
        return self.twins[result] if isinstance(result, fx.Node) else result


def _maker(node: fx.Node) -> fx.Node:
    """The op that makes a tensor, which may be one of several results."""
    is_unpacking = node.target is operator.getitem
    return node.all_input_nodes[0] if is_unpacking else node


def _erase_dead(graph: fx.Graph) -> None:
    """Erase nodes without users; but ops may draw, and optimizers update."""
    for node in reversed(graph.nodes):
        is_op = node.op == "call_function" and not node.users
        is_pure = not node.is_impure() and not _compat.may_draw(node.target)
        if is_op and is_pure and _compat_graphs.placement(node) != "is_optimizer":
            graph.erase_node(node)
