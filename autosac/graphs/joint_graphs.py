"""The joint graph of a training step: forward, loss, backward, optimizer in one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autosac import _compat_graphs
from autosac.errors import ArgumentError, TraceError, UnsupportedError
from autosac.graphs.accumulating import add_up_in_place
from autosac.graphs.memory import GraphMemory, graph_memory
from autosac.graphs.node_info import NodeInfo, node_infos
from autosac.graphs.optimizer_stage import append_step
from autosac.graphs.optimizer_steps import captured_step
from autosac.graphs.stages import (
    Stage,
    is_backward,
    is_update,
    last_forward_node,
    stages_of,
)
from autosac.profiles.mistakes import check_unplanned
from autosac.pytrees import tensors_in
from autosac.quantities import format_bytes
from autosac.step.arguments import (
    check_inputs,
    check_kind,
    check_loss_fn,
    read_optimizer,
)
from autosac.step.training_step import (
    LossFn,
    check_one_number,
    default_loss,
    normalize_inputs,
)
from autosac.summaries import Summarized, Summary

_AFTER_FORWARD = ("backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Intermediate:
    """A block of memory that an op of forward or loss makes.

    Attributes:
        node: Name of the node that makes it.
        op: What that node runs.
        stage: forward or loss.
        num_bytes: Its size.
        runtime_ms: Time of the node.
        last_forward_access: Name of the last node of forward or loss that reads it,
            by itself or by a view; None if none does.
        first_backward_access: Name of the first such node of backward, None likewise.
    """

    node: str
    op: str
    stage: Stage
    num_bytes: int
    runtime_ms: float
    last_forward_access: str | None
    first_backward_access: str | None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JointGraph(Summarized):
    """A training step as one graph, in the order in which it runs.

    Attributes:
        module: Takes ``inputs``; returns loss and other results of forward, then
            a gradient (or None) for each input.
        num_forward_outputs: How many of the results belong to forward.
        memory: Storages, times and workspaces of its nodes.
        inputs: Parameters, buffers, inputs, then the gradient of the loss, then the
            optimizer's state: what to run it with. Those that it updates are copies:
            a run leaves the model and its optimizer alone. Empty for a graph that is
            being compiled.
        input_names: What each of them is, as in ``"parameter 0.weight"``,
            ``"buffer 1.running_mean"``, ``"input 0"``, ``"gradient of the loss"``,
            ``"optimizer state ['exp_avg'] of 0.weight"``.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    memory: GraphMemory
    inputs: tuple[torch.Tensor, ...] = ()
    input_names: tuple[str, ...] = ()

    def summary(self) -> Summary:
        """How large the graph is, and its peak."""
        return Summary(
            title="Joint graph",
            facts=(
                ("nodes", f"{len(self.module.graph.nodes)}"),
                ("results", f"{self.num_forward_outputs} of forward"),
                ("peak", f"{format_bytes(self.memory.peak_bytes())} simulated"),
            ),
        )

    def run(self) -> tuple[Any, ...]:
        """Run the graph node by node; values are freed after their last use.

        What it updates is updated in `inputs`: the next run is the next step.

        Returns:
            Results of forward, then a gradient (or None) per parameter, buffer and
            input. The gradients are those after the optimizer's step, which may change
            them (SGD with ``nesterov`` and ``foreach`` does).
        """
        with torch.no_grad():
            return tuple(fx.Interpreter(self.module).run(*self.inputs))

    @property
    def named_inputs(self) -> dict[str, torch.Tensor]:
        """Inputs by name; after a run, parameters and state as the run left them."""
        return dict(zip(self.input_names, self.inputs, strict=True))

    @property
    def persistent_bytes(self) -> int:
        """Bytes of the inputs: alive before, while and after the graph runs."""
        return self.memory.input_bytes

    def stage_peaks(self) -> dict[Stage, int]:
        """Most bytes alive at once in every stage, in the order of the stages."""
        peaks: dict[Stage, int] = {}
        for node, num_bytes in self.memory.live():
            if (stage := self.stages.get(node)) not in (None, "placeholder"):
                peaks[stage] = max(peaks.get(stage, 0), num_bytes)
        return peaks

    @property
    def has_optimizer(self) -> bool:
        """Whether the graph ends with a step of an optimizer."""
        return "optimizer" in self.stages.values()

    @cached_property
    def forward_nodes(self) -> tuple[fx.Node, ...]:
        """Nodes of forward and loss."""
        return tuple(n for n, s in self.stages.items() if s in ("forward", "loss"))

    @cached_property
    def nodes_after_forward(self) -> tuple[fx.Node, ...]:
        """Nodes of backward and optimizer."""
        return tuple(n for n, s in self.stages.items() if s in _AFTER_FORWARD)

    @cached_property
    def stages(self) -> dict[fx.Node, Stage]:
        """The stage of every node but constants and the output."""
        return stages_of(self.module.graph, self.num_forward_outputs)

    def intermediates(self) -> list[Intermediate]:
        """Every storage that forward or loss makes, in order."""
        readers: dict[int, list[fx.Node]] = {}
        for node in self.module.graph.nodes:
            for argument in node.all_input_nodes:
                for storage in self.memory.nodes[argument].storages:
                    readers.setdefault(storage, []).append(node)
        intermediates = []
        for node in self.forward_nodes:
            memory = self.memory.nodes[node]
            for storage in memory.makes:
                reads = readers.get(storage, [])
                after = [n.name for n in reads if self.stages.get(n) == "backward"]
                before = [
                    n.name for n in reads if self.stages.get(n) not in _AFTER_FORWARD
                ]
                intermediates.append(
                    Intermediate(
                        node=node.name,
                        op=str(node.target),
                        stage=self.stages[node],
                        num_bytes=self.memory.nbytes[storage],
                        runtime_ms=memory.runtime_ms,
                        last_forward_access=before[-1] if before else None,
                        first_backward_access=after[0] if after else None,
                    )
                )
        return intermediates

    def graph_info(self) -> list[NodeInfo]:
        """FLOPs, saved bytes and bytes of backward of every node, in order."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        named = zip(placeholders, self.input_names, strict=False)
        kinds = ("parameter", "buffer", "gradient")
        always = [node for node, name in named if name.startswith(kinds)]
        return node_infos(self.memory, self.stages, always)


def joint_graph(
    model: torch.nn.Module,
    inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
) -> JointGraph:
    """Capture forward, loss and backward of a model as one graph; nothing is run.

    Dynamo and AOTAutograd make the graph: in-place ops become ordinary ones, updates of
    buffers are copies at the end of forward. Random ops draw when the graph runs.
    `nn.RNN`, `nn.GRU` and `nn.LSTM` become the plain ops of their time steps.

    With an optimizer the graph goes on with a steady step of it, whose ops update
    parameters and state in their memory. Step counts and what follows from them are
    nodes of the graph; options such as the learning rate are constants of it. The
    gradients stay alive until the end, as they do until ``zero_grad()``.

    Args:
        model: On the CPU, in the mode it trains in.
        inputs: A tensor, a tuple (args), a dict (kwargs) or ``(args, kwargs)``.
        loss_fn: Output -> scalar tensor. Without it ``output.loss`` is used, or the
            sum of all outputs that require gradients.
        optimizer: A ``torch.optim`` instance over the model's parameters, a callable on
            parameters, a name such as ``"adamw"``, or None. State that it does not have
            yet is as the first step of a copy makes it; the momentum of SGD then begins
            with zeros.

    Raises:
        TraceError: The step is no single graph, or the optimizer's step depends on
            values (as that of RAdam).
        UnsupportedError: The graph has ops that cannot be planned, the model is
            not on the CPU, or the optimizer needs a closure, has hooks, steps in
            backward, has a tensor among its options or keeps state in Python.
        ArgumentError: ``optimizer`` is none; the model has a plan; or the model cannot
            be called with `inputs`, or `loss_fn` with its output.
    """
    check_kind(model)
    check_unplanned(model)
    check_loss_fn(loss_fn)
    args, kwargs = normalize_inputs(inputs)
    check_inputs(model, args, kwargs)
    loss = loss_fn or default_loss

    def step() -> torch.Tensor:
        return loss(model(*args, **kwargs))

    if not any(p.requires_grad for p in model.parameters()):
        raise TraceError("No parameter requires a gradient: there is no backward pass.")
    has_recurrent = any(isinstance(m, torch.nn.RNNBase) for m in model.modules())
    capturing = _compat_graphs.recurrent_layers() if has_recurrent else nullcontext()
    try:
        with capturing:
            module, num_outputs, primals = _compat_graphs.capture_joint(step)
    except _compat_graphs.CaptureError as error:
        raise TraceError(
            f"The step cannot be captured as one graph: {error}"
        ) from error
    nodes = filter(_compat_graphs.is_tangent, module.graph.nodes)
    losses = [node.meta["val"] for node in nodes]
    for value in losses:
        check_one_number(value.shape)
    captured = normalized(module, num_outputs)
    tangents = [torch.ones(value.shape, dtype=value.dtype) for value in losses]
    joint = replace(
        captured,
        inputs=_without_updated(captured, (*primals, *tangents)),
        input_names=(
            *_names(model, primals),
            *("gradient of the loss" for _ in tangents),
        ),
    )
    if optimizer is not None:
        own = read_optimizer(optimizer, model)
        joint = _with_optimizer(joint, primals, model, own)
    return replace(joint, memory=joint.memory.measured())


def given_graph(
    module: fx.GraphModule, inputs: Any, *, num_forward_outputs: int
) -> JointGraph:
    """A step that is an FX graph already, with forward and backward in it, to plan it.

    Forward ends with the last node that one of its results depends on.

    Args:
        module: On the CPU; called with the inputs it returns results of forward, then
            gradients. It may call functions, methods and modules; parameters that it
            gets by name count as inputs.
        inputs: A tensor or a tuple of tensors.
        num_forward_outputs: How many of the results belong to forward.

    Raises:
        TypeError: ``module`` is no FX graph, or an input no tensor.
        ArgumentError: There are not more results than that.
        UnsupportedError: As `joint_graph`.
    """
    args, kwargs = normalize_inputs(inputs)
    if not isinstance(module, fx.GraphModule):
        raise TypeError(
            f"`module` must be an `fx.GraphModule`, got {type(module).__name__}."
        )
    if kwargs or not all(isinstance(value, torch.Tensor) for value in args):
        raise TypeError("`inputs` must be a tensor or a tuple of tensors.")
    ops = _compat_graphs.capture_ops(module, args)
    num_results = len(ops.graph.output_node().args[0])  # type: ignore[arg-type]
    if not 0 < num_forward_outputs < num_results:
        raise ArgumentError(
            f"`num_forward_outputs`={num_forward_outputs} must be from 1 to"
            f" {num_results - 1}: the graph has {num_results} results, and the last of"
            " them are gradients."
        )
    captured = normalized(ops, num_forward_outputs)
    return replace(
        captured,
        inputs=_without_updated(captured, args),
        input_names=tuple(f"input {i}" for i in range(len(args))),
        memory=captured.memory.measured(),
    )


def _names(model: torch.nn.Module, primals: Sequence[Any]) -> list[str]:
    """A name for each input of forward, for people."""
    names = {id(p): f"parameter {name}" for name, p in model.named_parameters()}
    names |= {id(b): f"buffer {name}" for name, b in model.named_buffers()}
    given = [p for p in primals if id(p) not in names]
    names |= {id(value): f"input {i}" for i, value in enumerate(given)}
    return [names[id(p)] for p in primals]


def _without_updated(
    joint: JointGraph, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Inputs of a graph, with copies of those that it updates."""
    nodes = joint.memory.nodes
    updates = [n for n in joint.module.graph.nodes if is_update(n)]
    updated = {s for n in updates for s in nodes[n.args[0]].storages}
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    return tuple(
        tensor if updated.isdisjoint(nodes[node].storages) else tensor.detach().clone()
        for node, tensor in zip(placeholders, inputs, strict=True)
    )


def _with_optimizer(
    joint: JointGraph, primals: Sequence[Any], model: torch.nn.Module, optimizer: Any
) -> JointGraph:
    """The graph and a step of an optimizer on the gradients that it makes."""
    results: Any = joint.module.graph.output_node().args[0]
    gradients = results[joint.num_forward_outputs :]
    places = {id(tensor): place for place, tensor in enumerate(primals)}
    trained = [
        p
        for p in model.parameters()
        if id(p) in places and gradients[places[id(p)]] is not None
    ]
    step = captured_step(optimizer, model, trained)
    updated = [places[id(p)] for p in step.trained]
    append_step(
        joint.module.graph,
        joint.memory,
        step,
        results=[joint.num_forward_outputs + place for place in updated],
        parameters=updated,
        backward=frozenset(n for n, s in joint.stages.items() if s == "backward"),
    )
    unpack_at_once(joint.module.graph)
    joint.module.recompile()
    inputs = list(joint.inputs)
    for place, parameter in zip(updated, step.parameters, strict=True):
        inputs[place] = parameter
    return JointGraph(
        module=joint.module,
        num_forward_outputs=joint.num_forward_outputs,
        memory=graph_memory(joint.module),
        inputs=(*inputs, *step.states),
        input_names=(*joint.input_names, *step.state_names),
    )


def normalized(
    module: fx.GraphModule, num_forward_outputs: int, *, in_place: bool = True
) -> JointGraph:
    """A captured graph in the order that memory is counted for; costs are modelled.

    What unpacks the results of an op follows it at once, and updates of inputs end
    forward. Dead nodes go.

    Args:
        module: The graph; it is changed.
        num_forward_outputs: How many of its results belong to forward.
        in_place: Gradients are added up in place, as autograd does.

    Raises:
        UnsupportedError: As `joint_graph`.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    unpack_at_once(graph)
    last = last_forward_node(graph, num_forward_outputs)
    for node in [n for n in graph.nodes if is_update(n)]:
        if node.args[0].op != "placeholder" or is_backward(node.args[1], last):
            raise UnsupportedError(
                f"`{node.name}` changes a tensor in backward; such graphs cannot be"
                " planned."
            )
        last.append(node)
        last = node
    for node in graph.nodes:
        _check(node)
    module.recompile()
    joint = JointGraph(
        module=module,
        num_forward_outputs=num_forward_outputs,
        memory=graph_memory(module),
    )
    if not in_place:
        return joint
    if not add_up_in_place(graph, joint.memory, joint.nodes_after_forward):
        return joint
    module.recompile()
    return replace(joint, memory=graph_memory(module))


def unpack_at_once(graph: fx.Graph) -> None:
    """Move every ``getitem`` to what it unpacks, in the order they have."""
    for node in reversed(graph.find_nodes(op="call_function", target=operator.getitem)):
        node.args[0].append(node)


def _check(node: fx.Node) -> None:
    """Refuse nodes whose memory is not known."""
    if _compat_graphs.is_symbolic(node):
        raise UnsupportedError(
            f"`{node.name}` has a size that is not known while compiling; give inputs"
            " of fixed shapes (`dynamic=False`)."
        )
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
        raise UnsupportedError(
            f"`{node.name}` is on {value.device}: graphs are planned for the CPU only,"
            " so far; use `autosac.plan` on a GPU."
        )
    for tensor in tensors_in(value):
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"`{node.name}` is a tensor of layout {tensor.layout}, whose memory is"
                " not known while planning. Use dense tensors (embeddings:"
                " `sparse=False`; nested tensors: padded)."
            )
    is_op = _compat_graphs.is_op(node.target)
    if node.op == "call_function" and not is_op and node.target != operator.getitem:
        raise UnsupportedError(
            f"`{node.name}` is no plain operator ({node.target}); its memory cannot be"
            " planned."
        )
