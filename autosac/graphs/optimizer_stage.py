"""A joint graph that goes on with a step of an optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autosac import _compat_fakes, _compat_graphs
from autosac.graphs.memory import GraphMemory
from autosac.graphs.optimizer_steps import OptimizerStep


def append_step(
    graph: fx.Graph,
    memory: GraphMemory,
    step: OptimizerStep,
    *,
    results: Sequence[int],
    parameters: Sequence[int],
    backward: Collection[fx.Node],
) -> None:
    """Let a joint graph update parameters, and states, which become its last inputs.

    Gradients stay results of the graph, so that all of them are alive while the
    optimizer steps, as they are until ``zero_grad()``.

    Args:
        graph: The joint graph, which is changed.
        memory: Of the graph as it is.
        step: The step to append.
        results: Place of each parameter's gradient among the results.
        parameters: Place of each parameter among the inputs.
        backward: The nodes of the stage backward.
    """
    inputs = graph.find_nodes(op="placeholder")
    mode = _compat_fakes.fake_mode_of(inputs[0].meta["val"])
    gradients = _Gradients(graph, memory, backward)
    given = [inputs[place] for place in parameters]
    given += [
        gradients.own(result, inputs[place])
        for result, place in zip(results, parameters, strict=True)
    ]
    last = inputs[-1]
    for i, state in enumerate(step.states):
        with graph.inserting_after(last):
            last = graph.placeholder(f"states_{i + 1}")
        last.meta["val"] = _compat_graphs.fake_twin(mode, state)
        given.append(last)
    of_step = step.module.graph
    values = dict(zip(of_step.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(graph.output_node()):
        for node in of_step.nodes:
            if node.op == "call_function":
                values[node] = graph.node_copy(node, lambda n: values[n])
                values[node].meta = _meta_of(node)


def _meta_of(node: fx.Node) -> dict[str, Any]:
    """Metadata of a node of an optimizer's step; an example value for a number."""
    value = node.meta.get("val")
    kept: dict[str, Any] = {"partitioner_tag": "is_optimizer"}
    if isinstance(value, (torch.SymFloat, float)):
        kept["val"] = 1.0
    elif isinstance(value, (torch.SymInt, int)):
        kept["val"] = 1
    return kept


class _Gradients:
    """Gradients as autograd gives them to parameters (``AccumulateGrad``).

    An optimizer may change a gradient in place. So autograd copies a gradient whose
    strides are not the parameter's, or that is another tensor as well.
    """

    def __init__(
        self, graph: fx.Graph, memory: GraphMemory, backward: Collection[fx.Node]
    ) -> None:
        self._graph = graph
        self._memory = memory
        self._backward = backward

    def own(self, result: int, parameter: fx.Node) -> fx.Node:
        """The gradient among the results, which is a copy from now on if need be."""
        output = self._graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        node: fx.Node = results[result]
        stride = torch.empty_like(parameter.meta["val"]).stride()
        others = [r for i, r in enumerate(results) if i != result]
        if _has_strides(node.meta["val"], stride) and not self._is_shared(node, others):
            return node
        # Beside ops of forward there may be no room for it yet.
        point = node.next if node in self._backward else output
        with self._graph.inserting_before(point):
            size = list(parameter.meta["val"].shape)
            empty = self._graph.call_function(
                torch.ops.aten.new_empty_strided.default, (node, size, list(stride))
            )
            call = self._graph.call_function(
                torch.ops.aten.copy_.default, (empty, node)
            )
        for new in (empty, call):
            _compat_graphs.place(new, "is_backward")
            new.meta["val"] = node.meta["val"].new_empty_strided(size, stride)
        results[result] = call
        output.args = (tuple(results),)
        return call

    def _is_shared(self, node: fx.Node, others: Sequence[Any]) -> bool:
        """Whether memory of a gradient is that of an input, or of another result."""
        other_nodes = [
            n for n in others if isinstance(n, fx.Node) and n in self._memory.nodes
        ]
        own = self._range(node)
        return any(
            storage == own[0] and begin < own[2] and own[1] < end
            for storage, begin, end in (*map(self._range, other_nodes), *self._inputs())
        )

    def _inputs(self) -> Iterator[tuple[int, int, int]]:
        for node in self._graph.find_nodes(op="placeholder"):
            for storage in self._memory.nodes[node].storages:
                yield storage, 0, self._memory.nbytes[storage]

    def _range(self, node: fx.Node) -> tuple[int, int, int]:
        """Storage of a tensor, and the first and one past the last byte in it."""
        value = node.meta["val"]
        pairs = zip(value.shape, value.stride(), strict=True)
        reach = sum((size - 1) * step for size, step in pairs) + 1
        begin = value.storage_offset() * value.itemsize
        (storage,) = self._memory.nodes[node].storages
        return storage, begin, begin + reach * value.itemsize


def _has_strides(value: torch.Tensor, wanted: Sequence[int]) -> bool:
    """Whether a tensor has some strides, where it has more than one element."""
    return all(
        size == 1 or step == wish
        for size, step, wish in zip(value.shape, value.stride(), wanted, strict=True)
    )
