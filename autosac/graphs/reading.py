"""Joint graphs as numbers, and the way back from them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Set
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autosac import _compat
from autosac._compat_graphs import is_tangent
from autosac.devices.links import Link
from autosac.far_memory import FarMemory
from autosac.graphs import rewriting as graph_rewriting
from autosac.graphs.joint_graphs import JointGraph
from autosac.graphs.memory import GraphMemory
from autosac.solvers.graph.moving import MovePlan, MoveProblem
from autosac.solvers.graph.recomputation import GraphProblem, reruns
from autosac.units.groups import BATCH_NORM_OPS, NEVER_RERUN

_AFTER = ("backward", "optimizer")
_FUNCTIONAL_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
_LEAST_MOVED_BYTES = (
    4096  # a page: a heuristic, as every copy takes some time of its own
)


def peak_bytes(joint: JointGraph, dropped: Collection[fx.Node] = ()) -> int:
    """Most bytes alive at once, in forward without what only backward is given.

    Args:
        joint: The graph.
        dropped: Gradients of outputs, and outputs, that only the graph holds in
            backward.
    """
    late_bytes, stages = _late_bytes(joint), joint.stages
    tangents = [node for node in dropped if is_tangent(node) and node.users]
    outputs = [node for node in dropped if not is_tangent(node)]
    live = joint.memory.live(tangents, _ends_of_outputs(joint, outputs))
    return max(
        num_bytes - (0 if stages.get(node, "backward") in _AFTER else late_bytes)
        for node, num_bytes in live
    )


def _ends_of_outputs(
    joint: JointGraph, dropped: Collection[fx.Node]
) -> dict[fx.Node, int]:
    """Last places of outputs that a caller drops before backward begins."""
    places = {node: place for place, node in enumerate(joint.memory.nodes)}
    first = places[(*joint.nodes_after_forward, joint.module.graph.output_node())[0]]
    ends = {}
    for node in dropped:
        readers = [places[user] for user in node.users if user.op != "output"]
        ends[node] = max([first - 1, *readers])
    return ends


def _late_bytes(joint: JointGraph) -> int:
    """Gradients of outputs, which a compiled forward pass is not given yet."""
    if joint.inputs:  # it is run as a whole
        return 0
    nodes, nbytes = joint.memory.nodes, joint.memory.nbytes
    inputs = joint.module.graph.find_nodes(op="placeholder")
    given = {s for n in inputs if not is_tangent(n) for s in nodes[n].storages}
    late = {s for n in inputs if is_tangent(n) for s in nodes[n].storages} - given
    return sum(nbytes[storage] for storage in late)


class GraphReader:
    """Numbers of a joint graph, and the way back from them.

    Attributes:
        joint: The graph.
        ops: Forward nodes that make memory or update inputs.
        steps: Nodes of backward and optimizer, and the output.
        values: Storages that forward makes -> their numbers.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.memory: GraphMemory = joint.memory
        self.ops = [n for n in joint.forward_nodes if self._is_op(n)]
        self.steps = [*joint.nodes_after_forward, joint.module.graph.output_node()]
        storages = [s for n in self.ops for s in self.memory.nodes[n].makes]
        self.values = {storage: value for value, storage in enumerate(storages)}

    def _is_op(self, node: fx.Node) -> bool:
        return bool(self.memory.nodes[node].makes) or node.is_impure()

    def _of(self, nodes: Any) -> tuple[int, ...]:
        """Values that some nodes refer to."""
        storages = (s for n in nodes for s in self.memory.nodes[n].storages)
        return tuple(
            dict.fromkeys(self.values[s] for s in storages if s in self.values)
        )

    def problem(self) -> GraphProblem:
        """The graph as numbers."""
        nodes, nbytes = self.memory.nodes, self.memory.nbytes
        results: Any = self.steps[-1].args[0]
        returned = [
            r
            for r in results[: self.joint.num_forward_outputs]
            if isinstance(r, fx.Node)
        ]
        carried, during = self._beside_values()
        tensors = [
            r for r in results[self.joint.num_forward_outputs :] if r is not None
        ]
        step_reads = (
            *(self._of(n.all_input_nodes) for n in self.steps[:-1]),
            self._of(tensors),
        )
        return GraphProblem(
            value_bytes=tuple(nbytes[storage] for storage in self.values),
            runtime_ms=tuple(nodes[n].runtime_ms for n in self.ops),
            workspace_bytes=tuple(nodes[n].workspace_bytes for n in self.ops),
            reads=tuple(self._of(n.all_input_nodes) for n in self.ops),
            makes=tuple(
                tuple(self.values[s] for s in nodes[n].makes) for n in self.ops
            ),
            pinned=frozenset(i for i, n in enumerate(self.ops) if self._is_pinned(n)),
            returned=frozenset(self._of(returned)) | self._only_updating(step_reads),
            step_reads=step_reads,
            step_bytes=during,
            carried_bytes=carried,
            other_bytes=self.memory.input_bytes - _late_bytes(self.joint),
        )

    def _only_updating(self, step_reads: tuple[tuple[int, ...], ...]) -> frozenset[int]:
        """Values that an optimizer reads and backward does not: gradients, so results.

        They are not made again: what they are made from may be updated by then.
        """
        if not self.joint.has_optimizer:
            return frozenset()
        stages = self.joint.stages
        in_backward = [stages.get(node) == "backward" for node in self.steps]
        pairs = list(zip(step_reads, in_backward, strict=True))
        before = {v for values, is_backward in pairs if is_backward for v in values}
        return frozenset(v for values, _ in pairs for v in values) - before

    def _beside_values(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """All memory but values just before and during each step."""
        places = {node: place for place, node in enumerate(self.memory.nodes)}
        first_place = places[self.steps[0]]
        before = [self.memory.input_bytes] * len(self.steps)
        during = list(before)
        for storage, (first, last) in self.memory.lives().items():
            if storage in self.values:
                continue
            size = self.memory.nbytes[storage]
            for place in range(first, last + 1):
                during[place - first_place] += size
                if place > first:
                    before[place - first_place] += size
        for i, node in enumerate(self.steps):
            during[i] += self.memory.nodes[node].workspace_bytes
        return tuple(before), tuple(during)

    def _is_pinned(self, node: fx.Node) -> bool:
        """Whether a node must not run twice, such as random draws and updates."""
        target: Any = node.target
        name = str(target)
        if _compat.may_draw(target) or node.is_impure():
            return True
        if name.rpartition(".")[0] in NEVER_RERUN:
            return True
        if name in BATCH_NORM_OPS or name == _FUNCTIONAL_BATCH_NORM:
            return not node.args[5]  # in evaluation it reads running statistics
        storages = (
            s for n in node.all_input_nodes for s in self.memory.nodes[n].storages
        )
        return any(storage in self._updated for storage in storages)

    @cached_property
    def _updated(self) -> frozenset[int]:
        """Storages of inputs that forward changes at its end."""
        return frozenset(
            storage
            for node in self.joint.forward_nodes
            if node.is_impure() and node.all_input_nodes
            for storage in self.memory.nodes[node.all_input_nodes[0]].storages
            if storage not in self.values
        )

    @cached_property
    def _numbers(self) -> GraphProblem:
        return self.problem()

    def move_problem(self, link: Link, host_bytes: int | None) -> MoveProblem:
        """The same with a far memory.

        Args:
            link: To it.
            host_bytes: The most that may lie there; None for as much as one likes.
        """
        problem, nodes = self._numbers, self.memory.nodes
        sizes = problem.value_bytes
        return MoveProblem(
            graph=problem,
            step_ms=tuple(nodes[n].runtime_ms for n in self.steps),
            movable=frozenset(v for v in self._tensors if self._may_move(v)),
            out_ms=tuple(link.out_ms(size, 1) for size in sizes),
            back_ms=tuple(link.back_ms(size, 1) for size in sizes),
            busy_ms=tuple(2 * link.issued_ms([size]) for size in sizes),
            host_bytes=host_bytes,
        )

    @cached_property
    def _tensors(self) -> dict[int, fx.Node]:
        """Values -> the node that gives them, of which all others are views."""
        tensors: dict[int, fx.Node] = {}
        several: set[int] = set()
        for op in self.ops:
            results = [u for u in op.users if u.target is operator.getitem] or [op]
            for node in results:
                for storage in self.memory.nodes[node].storages:
                    value = self.values.get(storage)
                    if value is None or storage not in self.memory.nodes[op].makes:
                        continue
                    several |= {value} & tensors.keys()
                    tensors[value] = node
        return {v: node for v, node in tensors.items() if v not in several}

    def _may_move(self, value: int) -> bool:
        """Whether a value is backward's alone, plain memory and large enough."""
        problem, tensor = self._numbers, self._tensors[value].meta.get("val")
        return (
            value in problem.kept_plainly
            and value not in problem.step_reads[-1]  # results of backward
            and problem.value_bytes[value] >= _LEAST_MOVED_BYTES
            and isinstance(tensor, torch.Tensor)
            and tensor.layout is torch.strided
        )

    def rewritten(
        self,
        kept: Set[int],
        plan: MovePlan | None = None,
        memory: FarMemory | None = None,
    ) -> JointGraph:
        """The graph that keeps some values, runs some ops again, and moves some.

        Args:
            kept: Values that are not made again.
            plan: What is moved, and where; None for nothing.
            memory: Where to.
        """
        problem = self._numbers
        again = reruns(problem, kept)
        remade = {v for ops in again.values() for op in ops for v in problem.makes[op]}
        dropped = remade - set(kept) - problem.returned
        storages = list(self.values)
        moves = {} if plan is None else plan.moves
        return graph_rewriting.rewritten(
            self.joint,
            {
                self.steps[step]: tuple(self.ops[op] for op in ops)
                for step, ops in again.items()
            },
            [storages[value] for value in sorted(dropped)],
            [
                graph_rewriting.MovedNode(
                    node=self._tensors[value],
                    storage=storages[value],
                    released_after=self.ops[moves[value].released_after],
                    fetched_before=self.steps[moves[value].fetched_before],
                )
                for value in (plan.fetch_order if plan is not None else ())
            ],
            memory,
        )

    def names(self, values: Set[int]) -> tuple[str, ...]:
        """Names of the nodes that give some values."""
        return tuple(self._tensors[value].name for value in sorted(values))
