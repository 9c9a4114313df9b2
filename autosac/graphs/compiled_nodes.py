"""Nodes of a compiled joint graph whose tensors others hold, or forward saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from autosac import _compat_graphs
from autosac.graphs.joint_graphs import JointGraph


def saved_nodes(joint: JointGraph) -> list[fx.Node]:
    """Nodes of forward, and inputs, that backward reads."""
    stages = joint.stages
    backward = [n for n, stage in stages.items() if stage == "backward"]
    read = [a for n in backward for a in n.all_input_nodes]
    results: Any = joint.module.graph.output_node().args[0]
    read += [r for r in results[joint.num_forward_outputs :] if isinstance(r, fx.Node)]
    return [
        node
        for node in dict.fromkeys(read)
        if stages.get(node, "backward") != "backward"
        and not _compat_graphs.is_tangent(node)
    ]


def kept_by_graph_alone(joint: JointGraph, saved: Sequence[fx.Node]) -> list[fx.Node]:
    """Saved nodes whose memory no caller has: neither inputs nor results of forward."""
    results: Any = joint.module.graph.output_node().args[0]
    outside = [*_kept_inputs(joint), *results[: joint.num_forward_outputs]]
    nodes = joint.memory.nodes
    seen = {s for n in outside if isinstance(n, fx.Node) for s in nodes[n].storages}
    return [node for node in saved if seen.isdisjoint(nodes[node].storages)]


def outputs_in_saved_memory(
    joint: JointGraph, saved: Sequence[fx.Node]
) -> list[fx.Node]:
    """Results of forward in memory of saved nodes, which is alive as long as these."""
    results: Any = joint.module.graph.output_node().args[0]
    outputs = results[: joint.num_forward_outputs]
    nodes = joint.memory.nodes
    kept = {storage for node in saved for storage in nodes[node].storages}
    return [
        node
        for node in outputs
        if isinstance(node, fx.Node) and not kept.isdisjoint(nodes[node].storages)
    ]


def least_real_bytes(joint: JointGraph) -> int:
    """Bytes alive where forward ends, or backward, however nodes are fused."""
    results: Any = joint.module.graph.output_node().args[0]
    returned = results[: joint.num_forward_outputs]
    at_loss = [*_kept_inputs(joint), *returned, *saved_nodes(joint)]
    return max(_bytes_of(joint, at_loss), least_bytes_of_any_plan(joint))


def least_bytes_of_any_plan(joint: JointGraph) -> int:
    """Bytes alive where backward ends, whatever is recomputed."""
    results: Any = joint.module.graph.output_node().args[0]
    return _bytes_of(joint, [*_kept_inputs(joint), *results])


def _kept_inputs(joint: JointGraph) -> list[fx.Node]:
    nodes = joint.module.graph.find_nodes(op="placeholder")
    return [node for node in nodes if not _compat_graphs.is_tangent(node)]


def _bytes_of(joint: JointGraph, nodes: Sequence[Any]) -> int:
    """Least memory that holds the tensors of some nodes."""
    sizes: dict[int, int] = {}
    for node in nodes:
        if isinstance(node, fx.Node):
            (storage,) = joint.memory.nodes[node].storages
            sizes[storage] = max(sizes.get(storage, 0), node.meta["val"].nbytes)
    return sum(sizes.values())


def tangents_of(joint: JointGraph, backward: fx.GraphModule) -> list[fx.Node]:
    """Nodes of a joint graph that its backward pass is given as gradients of outputs.

    In the order of its arguments, of which they are the last.
    """
    given = {n.name: n for n in joint.module.graph.find_nodes(op="placeholder")}
    nodes = backward.graph.find_nodes(op="placeholder")
    return [given[node.name] for node in nodes if _compat_graphs.is_tangent(node)]
