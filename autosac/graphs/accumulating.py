"""Gradients are added up in place, as autograd adds them up.

Autograd adds the second gradient of a tensor to the first where it lies, if nothing
else holds that one; a captured graph makes a third tensor of every sum.

Source:
    `can_accumulate_inplace` of torch/csrc/autograd/input_buffer.cpp.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from autosac import _compat_graphs
from autosac.graphs.memory import GraphMemory

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor


def add_up_in_place(
    graph: fx.Graph, memory: GraphMemory, backward: Collection[fx.Node]
) -> bool:
    """Let sums of backward go into a summand that nothing reads afterwards.

    Results stay bit-identical: sums of two are the same in either order.

    Args:
        graph: A joint graph; it is changed.
        memory: Of its nodes, as they are now.
        backward: Those of backward, in order.

    Returns:
        Whether it was changed.
    """
    summands = _Summands(memory, backward)
    sums = [node for node in backward if node.target is _ADD]
    places = {node: summands.free(node) for node in sums}
    in_place = {node: place for node, place in places.items() if place is not None}
    for node, place in in_place.items():
        own, other = node.args[place], node.args[1 - place]
        with graph.inserting_before(node):
            total = graph.call_function(_ADD_IN_PLACE, (own, other))
        total.meta = dict(node.meta)
        _compat_graphs.place(total, "is_backward")  # a `Function`'s own has no place
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    return bool(in_place)


class _Summands:
    """What sums of a graph may be written into."""

    def __init__(self, memory: GraphMemory, backward: Collection[fx.Node]) -> None:
        self._memory = memory
        self._ends = {storage: last for storage, (_, last) in memory.lives().items()}
        self._places = {node: place for place, node in enumerate(memory.nodes)}
        self._made_by_backward = {s for n in backward for s in memory.nodes[n].makes}

    def free(self, node: fx.Node) -> int | None:
        """Which argument of a sum its result may take the place of, if one."""
        if len(node.args) != 2 or node.kwargs:
            return None
        if not all(isinstance(summand, fx.Node) for summand in node.args):
            return None
        for place in range(2):
            own: Any = node.args[place]
            other: Any = node.args[1 - place]
            if self._ends_in(own, node) and not self._shares(own, other):
                return place
        return None

    def _ends_in(self, own: fx.Node, node: fx.Node) -> bool:
        """Whether a tensor is all of its memory, dies in a sum and looks like it."""
        tensor: Any = own.meta["val"]
        total: Any = node.meta["val"]
        (storage,) = self._memory.nodes[own].storages
        return (
            storage in self._made_by_backward
            and self._ends[storage] == self._places[node]
            and self._memory.nbytes[storage] == tensor.nbytes == total.nbytes
            and (tensor.dtype, tensor.shape) == (total.dtype, total.shape)
            and tensor.stride() == total.stride()
        )

    def _shares(self, one: fx.Node, other: fx.Node) -> bool:
        nodes = self._memory.nodes
        return not set(nodes[one].storages).isdisjoint(nodes[other].storages)
