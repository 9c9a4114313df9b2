"""Private PyTorch APIs for graphs and compilers.

Checked for torch 2.15. Compilers are imported where they are used: they take seconds.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.experimental.symbolic_shapes import is_symbolic as is_symbolic_size
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves

from autosac import _compat, _compat_fakes

Partition = tuple[fx.GraphModule, fx.GraphModule]
PartitionFn = Callable[[fx.GraphModule, int, Sequence[int]], Partition]
OnCompiled = Callable[[Callable[..., Any], Sequence[Any], bool], Callable[..., Any]]

# Look up no graph that was partitioned another way; compile backward at once.
_EAGER_AND_FRESH: dict[str, Any] = {
    "enable_autograd_cache": False,
    "force_non_lazy_backward_lowering": True,
}


class CaptureError(Exception):
    """Dynamo or AOTAutograd could not make one graph; their message."""


class _Captured(BaseException):
    """Ends a compiled call before it runs anything."""

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        self.inputs = inputs


@contextmanager
def recurrent_layers() -> Iterator[None]:
    """Let Dynamo look into `nn.GRU` and the like, down to plain ops.

    Without oneDNN, whose op for an LSTM layer has a backward that no graph can run.
    """
    from torch._dynamo import config

    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with config.patch(allow_rnn=True):
            yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


@contextmanager
def without_logging() -> Iterator[None]:
    """Let Dynamo leave out what loggers are told, which ends a graph otherwise.

    Whatever libraries have added to loggers is left out as well, such as the
    ``warning_once`` of Transformers, with which a model says what its loss is.
    """
    from torch._dynamo import config

    name = "ignore_logging_functions"  # since torch 2.11
    name = name if hasattr(config, name) else "ignore_logger_methods"
    kinds = (logging.Logger, *logging.Logger.__subclasses__())
    told = {f for kind in kinds for f in vars(kind).values() if callable(f)}
    with config.patch({name: getattr(config, name) | told}):
        yield


@contextmanager
def many_graphs() -> Iterator[None]:
    """Let Dynamo compile a model for 256 kinds of inputs before it gives up, not eight.

    Raises:
        CaptureError: It gives up.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    limit = max(config.recompile_limit, config.accumulated_recompile_limit)
    try:
        with config.patch(recompile_limit=limit):
            yield
    except FailOnRecompileLimitHit as error:
        raise CaptureError(f"more than {limit} kinds of inputs.") from error


def capture_ops(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """The graph of the plain operators that a graph runs; nothing is run.

    In-place ops on what the graph makes become ordinary ones; updates of inputs stay.
    Its results are one flat tuple.
    """

    def flat(*args: torch.Tensor) -> tuple[Any, ...]:
        return tuple(tree_leaves(module(*args)))

    with torch.no_grad():
        return make_fx(
            torch.func.functionalize(flat, remove="mutations"),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*inputs)


def capture_joint(
    function: Callable[[], torch.Tensor],
) -> tuple[fx.GraphModule, int, list[Any]]:
    """Joint graph of a function without arguments that returns one loss.

    Returns:
        The graph (forward inputs and one tangent in; loss and gradients out), how many
        of its outputs belong to forward, and the forward inputs.

    Raises:
        CaptureError: There is no such graph.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._functorch.partitioners import default_partition

    partitioned: list[Any] = []

    def partition(
        joint: fx.GraphModule, num_outputs: int, static: Sequence[int]
    ) -> Partition:
        partitioned.extend((copy_graph(joint), num_outputs))
        return default_partition(joint, (), num_fwd_outputs=num_outputs)

    def stop(
        compiled: Callable[..., Any], inputs: Sequence[Any], is_backward: bool
    ) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            raise _Captured(list(args))

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    assert isinstance(function, types.FunctionType)
    # Dynamo counts compilations per code object and refuses the ninth.
    fresh = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_eagerly(gm, inputs, partition, stop)

    compiled: Any = torch.compile(fresh, backend=backend, fullgraph=True, dynamic=False)
    try:
        with without_logging():
            compiled()
    except _Captured as captured:
        return partitioned[0], partitioned[1], captured.inputs
    except TorchDynamoException as error:  # wraps those of AOTAutograd as well
        raise CaptureError(str(error)) from error
    raise CaptureError("nothing requires a gradient.")


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A graph module with a graph of its own; what it refers to is shared."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, values)
    old = module.graph.output_node()
    new = graph.output(output)
    new.meta = dict(old.meta)
    return fx.GraphModule(module, graph)


def symbolic_fake_mode() -> _compat_fakes.FakeTensorMode:
    """A mode for fake tensors whose elements, once read, are unknown numbers."""
    return _compat_fakes.FakeTensorMode(
        shape_env=ShapeEnv(), allow_non_fake_inputs=True
    )


def fake_twin(mode: _compat_fakes.FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the shape, and of nothing else, of a real one."""
    return mode.from_tensor(tensor.detach(), static_shapes=True)


def capture_updates(
    run: Callable[[], object], tensors: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """Graph of what a function does to fake tensors, which are its inputs.

    Nothing is functionalised: ops that write are nodes that write. Numbers that are
    read from tensors are nodes as well, and so is arithmetic on them; a choice that
    depends on one is an error of PyTorch's.

    Args:
        run: Called once.
        tensors: Of a `symbolic_fake_mode`.
    """

    def traced(given: list[torch.Tensor]) -> None:
        assert all(one is own for one, own in zip(given, tensors, strict=True))
        with _PlainNumbers():
            run()

    with _compat_fakes.fake_mode_of(tensors[0]), torch.no_grad():
        module = make_fx(traced, tracing_mode="real")(list(tensors))
    for node in reversed(module.graph.nodes):
        is_unused = node.target is _compat.ITEM and not node.users
        if _compat.is_profiling(node.target) or is_unused:
            module.graph.erase_node(node)
    return module


class _PlainNumbers(_compat.DispatchMode):
    """Numbers of tensors as they are when they are read; constants as `aten.full`.

    Fake tensors remember numbers that were read, past updates by ops on lists. And
    `make_fx` works out what follows from a ``torch.tensor(1.0)``, even with numbers
    that it does not know.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _compat.ITEM:
            args[0].item_memo = None
        elif func is torch.ops.aten.lift_fresh.default and not args[0].dim():
            with _compat.no_modes():
                value = args[0].item()
            return torch.full((), value, dtype=args[0].dtype, device=args[0].device)
        return func(*args, **(kwargs or {}))


def compile_eagerly(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    partition: PartitionFn,
    on_compiled: OnCompiled,
) -> Any:
    """AOTAutograd whose graphs run op by op, as in the backend ``aot_eager``."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config as functorch_config

    def compiler(is_backward: bool) -> Callable[..., Any]:
        def run(graph: fx.GraphModule, example: Sequence[Any]) -> Any:
            return on_compiled(boxed_nop(graph, list(example)), example, is_backward)

        return run

    backend = aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(True),
        inference_compiler=boxed_nop,
        partition_fn=_plain_signature(partition),
        keep_inference_input_mutations=True,
    )
    with functorch_config.patch(**_EAGER_AND_FRESH):
        return backend(gm, inputs)


def compile_with_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    partition: PartitionFn,
    on_compiled: OnCompiled,
) -> Any:
    """TorchInductor with another partition of the joint graph."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compiler(graph: fx.GraphModule, example: Sequence[Any], **options: Any) -> Any:
        # Compiled graphs are looked up by the graph, which the partition made, and by
        # the configuration, in which the partition must not be: it has no name.
        with inductor_config.patch(custom_partitioner_fn=None):
            compiled = compile_fx_inner(graph, example, **options)
        if options.get("is_inference"):
            return compiled
        return on_compiled(compiled, example, bool(options.get("is_backward")))

    patches = {"custom_partitioner_fn": _inductor_partition(partition)}
    with functorch_config.patch(**_EAGER_AND_FRESH):
        return compile_fx(gm, inputs, inner_compile=compiler, config_patches=patches)


def _plain_signature(partition: PartitionFn) -> Callable[..., Partition]:
    def run(
        joint: fx.GraphModule,
        _inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_options: Any,
    ) -> Partition:
        return partition(joint, num_fwd_outputs, static_lifetime_input_indices or ())

    return run


def _inductor_partition(partition: PartitionFn) -> Any:
    """A partition in the form that TorchInductor's configuration takes."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    run = _plain_signature(partition)

    class Partitioner(CustomPartitionerFn):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> Partition:
            return run(gm, joint_inputs, **kwargs)

        def uuid(self) -> Any:
            """No key (None): no graph is looked up by what a partition depends on."""
            return None

    return Partitioner()


def split(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    num_forward_outputs: int,
    static_indices: Sequence[int],
) -> Partition:
    """Split a joint graph into forward and backward that communicate by some nodes."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    primals = [n for n in joint.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    static = OrderedSet([primals[i] for i in static_indices])
    return _extract_fwd_bwd_modules(
        joint,
        saved,
        saved_sym_nodes=[],
        num_fwd_outputs=num_forward_outputs,
        static_lifetime_input_nodes=static,
    )


def free_once_read(node: fx.Node) -> None:
    """Let a saved tensor go when backward has read it, wherever its `Function` kept it.

    AOTAutograd leaves those that one keeps as attributes of ``ctx`` there until
    backward ends, so that it need not ask whether they have changed.
    """
    node.meta.pop("saved_tensor_with_no_vc_check", None)


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is the gradient of an output, given to the backward pass."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_symbolic(node: fx.Node) -> bool:
    """Whether a node is a size, or has one, that is not known while compiling."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return any(is_symbolic_size(size) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_op(target: Any) -> bool:
    """Whether the target of a node is an operator of the dispatcher."""
    return isinstance(target, torch._ops.OpOverload)


def storage_key(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share memory, as long as they are alive."""
    return int(tensor.untyped_storage()._cdata)


def placement(node: fx.Node) -> str | None:
    """Phase of a node by AOTAutograd's tag: forward, backward or optimizer.

    One of ``"is_forward"``, ``"is_backward"``, ``"is_optimizer"`` (see `place`), other
    words of AOTAutograd, or None.
    """
    tag: str | None = node.meta.get("partitioner_tag")
    return tag


def autograd_number(node: fx.Node) -> int | None:
    """AOTAutograd's number of the autograd node: equal in forward and its backward.

    None for sums of gradients, which bear the number of the last op of forward.
    """
    is_sum = node.meta.get("is_gradient_acc", False)
    number: int | None = None if is_sum else node.meta.get("seq_nr")
    return number


def place(node: fx.Node, tag: str) -> None:
    """Say what `placement` tells of a node."""
    node.meta["partitioner_tag"] = tag


def weak_storage(tensor: torch.Tensor) -> Any:
    """A reference to a tensor's memory that tells when it is gone (``expired``)."""
    return StorageWeakRef(tensor.untyped_storage())
