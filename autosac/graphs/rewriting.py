"""A joint graph that recomputes: copies of forward nodes, just before they are read."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autosac import _compat, _compat_graphs
from autosac.graphs.joint_graphs import JointGraph
from autosac.graphs.memory import graph_memory


def rewritten(
    joint: JointGraph,
    reruns: Mapping[fx.Node, tuple[fx.Node, ...]],
    dropped: Collection[int],
) -> JointGraph:
    """Insert recomputations and let later nodes of backward read them.

    Args:
        joint: The graph; it is not changed.
        reruns: Node of backward (without an optimizer, or the output) -> forward nodes
            that run again just before it, in forward order.
        dropped: Storages that backward must not take from forward.
    """
    module = _compat_graphs.copy_graph(joint.module)
    twins = dict(zip(joint.module.graph.nodes, module.graph.nodes, strict=True))
    writer = _Writer(joint, twins, frozenset(dropped))
    for node in [*joint.nodes_after_forward, joint.module.graph.output_node()]:
        with module.graph.inserting_before(twins[node]):
            for again in reruns.get(node, ()):
                writer.rerun(again)
            writer.redirect(node)
    _erase_dead(module.graph)
    module.recompile()
    memory = graph_memory(module).with_costs(joint.memory.costs)
    return replace(joint, module=module, memory=memory)


class _Writer:
    """Writes into a copy of a joint graph, at its point of insertion.

    Attributes:
        joint: The original.
        twins: Its nodes -> those of the copy.
        dropped: Storages that are recomputed.
        copies: Forward nodes of the original -> what recomputes them.
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

    def rerun(self, node: fx.Node) -> None:
        """Run a forward node again, and unpack what it makes."""
        self._copy(node)
        for user in node.users:
            if user in self._forward and user.target is operator.getitem:
                self.source(user)

    def source(self, node: fx.Node) -> fx.Node:
        """Where backward gets a value of forward from: a view may be made anew."""
        is_forward = node in self._forward
        if not is_forward or self.dropped.isdisjoint(
            self.joint.memory.nodes[node].storages
        ):
            return self.twins[node]
        return self.copies[node] if node in self.copies else self._copy(node)

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


def _erase_dead(graph: fx.Graph) -> None:
    """Erase nodes without users; but random ops draw, and optimizers update."""
    for node in reversed(graph.nodes):
        is_op = node.op == "call_function" and not node.users
        is_pure = not node.is_impure() and not _compat.is_random(node.target)
        if is_op and is_pure and _compat_graphs.placement(node) != "is_optimizer":
            graph.erase_node(node)
