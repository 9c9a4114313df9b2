"""Which nodes of a joint graph are of forward, loss, backward or the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import fx

from autosac import _compat_graphs

Stage = Literal["placeholder", "forward", "loss", "backward", "optimizer"]


def stages_of(graph: fx.Graph, num_forward_outputs: int) -> dict[fx.Node, Stage]:
    """The stage of every node but constants and the output.

    Args:
        graph: Forward, loss and backward, and perhaps a step of an optimizer.
        num_forward_outputs: How many of its outputs, which come first, forward makes.
    """
    last = last_forward_node(graph, num_forward_outputs)
    stages: dict[fx.Node, Stage] = {}
    is_forward = True
    for node in graph.nodes:
        if node.op == "placeholder":
            stages[node] = "placeholder"
        elif node.op == "call_function" and _is_of_optimizer(node):
            stages[node] = "optimizer"
        elif node.op == "call_function":
            stages[node] = "forward" if is_forward else "backward"
        is_forward = is_forward and node is not last
    for node in _loss_nodes([n for n, s in stages.items() if s == "forward"]):
        stages[node] = "forward" if is_update(node) else "loss"
    return stages


def is_update(node: fx.Node) -> bool:
    """Whether a node writes a value over an input."""
    return node.target is torch.ops.aten.copy_.default


def _is_of_optimizer(node: fx.Node) -> bool:
    return _compat_graphs.placement(node) == "is_optimizer"


def _updates_of_forward(graph: fx.Graph) -> list[fx.Node]:
    """Nodes of forward that update inputs, without the optimizer's updates."""
    return [
        node
        for node in graph.nodes
        if is_update(node)
        and node.args[0].op == "placeholder"
        and not _is_of_optimizer(node)
    ]


def last_forward_node(graph: fx.Graph, num_forward_outputs: int) -> fx.Node:
    """The last node that results of forward, or updates of inputs, depend on."""
    outputs: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    pending = [n for n in outputs[:num_forward_outputs] if isinstance(n, fx.Node)]
    updates = _updates_of_forward(graph)
    pending += [n.args[1] for n in updates if isinstance(n.args[1], fx.Node)]
    needed: set[fx.Node] = set(updates) if _updates_are_moved(updates) else set()
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    last: fx.Node = [node for node in graph.nodes if node in needed][-1]
    while _compat_graphs.placement(last.next) == "is_forward":
        last = last.next  # what only backward reads
    return last


def _updates_are_moved(updates: list[fx.Node]) -> bool:
    """Whether backward follows the updates of inputs."""
    return bool(updates) and updates[-1].next.op != "output"


def is_backward(value: Any, last: fx.Node) -> bool:
    """Whether a value is that of a node after the last one of forward."""
    return isinstance(value, fx.Node) and last < value


def _loss_nodes(forward: list[fx.Node]) -> list[fx.Node]:
    """Nodes outside of the model; if there are none, those after its last submodule."""
    depths = [len(n.meta.get("nn_module_stack") or ()) for n in forward]
    if 0 in depths and max(depths, default=0) > 0:
        inside = [place for place, depth in enumerate(depths) if depth > 0]
    else:
        inside = [place for place, depth in enumerate(depths) if depth > 1]
    return forward[inside[-1] + 1 :] if inside else []
