"""The only file that touches private PyTorch APIs (checked for torch 2.10 to 2.15)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

__all__ = [
    "IGNORED_OPS",
    "ITEM",
    "METADATA_OPS",
    "TRACE_ERRORS",
    "FakeTensorMode",
    "TorchDispatchMode",
    "current_node_sequence_nr",
    "current_node_variable",
    "fake_like",
    "flops_of",
    "is_random",
    "next_sequence_nr",
    "written_arguments",
]

TRACE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

# Ops whose number may differ between forward and recomputation: the ones that
# torch/utils/checkpoint.py ignores as well (SAC_IGNORED_OPS, torch 2.15).
METADATA_OPS: frozenset[Any] = frozenset(
    {torch.ops.prim.device.default, *FunctionalTensor.metadata_fns}
)
IGNORED_OPS = METADATA_OPS | {torch.ops.aten.detach.default}

# Ops that update arguments which their schema does not mark as written
# (aten/src/ATen/native/native_functions.yaml, torch 2.15): name -> positions.
_HIDDEN_WRITES = {
    "aten.native_batch_norm.default": (3, 4),
    "aten.cudnn_batch_norm.default": (3, 4),
    "aten.miopen_batch_norm.default": (3, 4),
}


ITEM = torch.ops.aten._local_scalar_dense.default


# Views whose schema does not say so.
_HIDDEN_VIEWS = frozenset({"aten._unsafe_view.default", "aten._reshape_alias.default"})

_written_positions: dict[Any, tuple[tuple[int, str], ...]] = {}


def written_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Arguments that a call mutates, by its schema or by `_HIDDEN_WRITES`."""
    positions = _written_positions.get(func)
    if positions is None:
        hidden = _HIDDEN_WRITES.get(str(func), ())
        schema = getattr(func, "_schema", None)
        arguments = () if schema is None else schema.arguments
        positions = tuple(
            (i, argument.name)
            for i, argument in enumerate(arguments)
            if i in hidden
            or (argument.alias_info is not None and argument.alias_info.is_write)
        )
        _written_positions[func] = positions
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in positions]


_returned: dict[Any, tuple[int, ...]] = {}
_views: dict[Any, bool] = {}


def returned_arguments(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an in-place or out= op returns."""
    if func not in _returned:
        schema = getattr(func, "_schema", None)
        returns = () if schema is None else schema.returns
        written = {
            frozenset(argument.alias_info.before_set): i
            for i, argument in enumerate(() if schema is None else schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        _returned[func] = tuple(
            written[frozenset(result.alias_info.before_set)]
            for result in returns
            if result.alias_info is not None and result.alias_info.is_write
        )
    return _returned[func]


def pick_arguments(
    func: Any, positions: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The arguments at some positions of a call, as the call would return them."""
    names = [argument.name for argument in func._schema.arguments]
    picked = tuple(args[i] if i < len(args) else kwargs[names[i]] for i in positions)
    if not picked:
        return None
    return picked[0] if len(picked) == 1 else picked


def is_view(func: Any) -> bool:
    """Whether all results of an operator alias its arguments without writing."""
    if func not in _views:
        schema = getattr(func, "_schema", None)
        returns = () if schema is None else schema.returns
        _views[func] = bool(returns) and all(
            result.alias_info is not None and not result.alias_info.is_write
            for result in returns
        )
    return _views[func] or str(func) in _HIDDEN_VIEWS


def without_running_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a batch norm in training mode with no statistics to update."""
    positions = _HIDDEN_WRITES.get(str(func))
    if positions is None or not args[5]:
        return args
    return tuple(None if i in positions else arg for i, arg in enumerate(args))


def with_real_layouts(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """A fake result with the types and sizes that the kernel gives it.

    On the CPU batch norm of a bfloat16 input with float32 weights keeps its statistics
    in float32 (aten/src/ATen/native/Normalization.cpp); its fake kernel says bfloat16.
    oneDNN's LSTM saves bytes for its backward, often more than its output has
    (aten/src/ATen/native/mkldnn/RNN.cpp); its fake kernel says none.
    Losses that reduce in place keep the memory of what they reduced (`_UNREDUCED`).
    """
    if str(func) in _UNREDUCED:
        return _with_unreduced_storage(func, args, out)
    if str(func) == "aten.mkldnn_rnn_layer.default":
        return (*out[:3], out[3].new_empty(_saved_rnn_bytes(args)))
    if str(func) != "aten.native_batch_norm.default":
        return out
    weight = args[1]
    if weight is None or weight.device.type != "cpu" or weight.dtype == out[1].dtype:
        return out
    return (out[0], *(statistic.to(weight.dtype) for statistic in out[1:]))


# Losses that shrink their result from one number an element to one, by `resize_`,
# which keeps the memory (aten/src/ATen/native: BinaryOps.cpp, Loss.cpp, cuda/Loss.cu):
# name -> position of the reduction, which is 0 for none and 1 by default.
_UNREDUCED = {
    "aten.mse_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.binary_cross_entropy.default": 3,
}


def _with_unreduced_storage(
    func: Any, args: tuple[Any, ...], out: torch.Tensor
) -> torch.Tensor:
    position = _UNREDUCED[str(func)]
    if len(args) > position and args[position] == 0:
        return out
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return out.new_empty(shape).as_strided((), ())


_rnn_bytes: dict[Any, int] = {}


def _saved_rnn_bytes(args: tuple[Any, ...]) -> int:
    """Bytes that oneDNN's LSTM saves: only running it tells."""
    layouts = tuple((tuple(arg.shape), arg.stride(), arg.dtype) for arg in args[:7])
    key = (layouts, str(args[7:]))
    if key not in _rnn_bytes:
        with _disable_current_modes():
            zeros = [torch.zeros(size, dtype=dtype) for size, _, dtype in layouts]
            made = onednn_rnn(zeros, args[7:])
        _rnn_bytes[key] = 0 if made[3] is None else made[3].nbytes
    return _rnn_bytes[key]


def onednn_rnn(inputs: list[torch.Tensor], options: Any) -> Any:
    """Run oneDNN's LSTM as in training: it saves bytes only if autograd watches."""
    with torch.enable_grad():
        watched = [tensor.requires_grad_() for tensor in inputs]
        return torch.ops.aten.mkldnn_rnn_layer.default(*watched, *options)


def wrapper_subclass(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """A tensor subclass instance without memory."""
    return torch.Tensor._make_wrapper_subclass(cls, *args, **kwargs)


# For subclasses that only dispatch; typed as what torch expects of an override.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Suspend all dispatch modes."""
    return _disable_current_modes()


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake one."""
    return isinstance(tensor, FakeTensor)


def fake_mode_of(tensor: torch.Tensor) -> Any:
    """The mode that a fake tensor belongs to, None for a real one."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def as_fake(mode: Any, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor on a device with the layout of a meta tensor."""
    return FakeTensor(mode, meta, device)


_tensor_positions: dict[Any, tuple[int, ...]] = {}


def wrapped_numbers(func: Any, args: tuple[Any, ...]) -> int:
    """How many positional arguments are numbers where the schema says tensor."""
    positions = _tensor_positions.get(func)
    if positions is None:
        schema = getattr(func, "_schema", None)
        arguments = () if schema is None else schema.arguments
        positions = tuple(
            i for i, argument in enumerate(arguments) if str(argument.type) == "Tensor"
        )
        _tensor_positions[func] = positions
    return sum(
        isinstance(args[i], (int, float, complex)) for i in positions if i < len(args)
    )


def is_random(func: Any) -> bool:
    """Whether an operator draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating point operations of a call, 0 for ops without a formula."""
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def next_sequence_nr() -> int:
    """Sequence number that the next autograd node will get."""
    return int(torch._C._autograd._get_sequence_nr())


def current_node_sequence_nr() -> int | None:
    """Sequence number of the autograd node that runs now, None outside backward."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    return int(node._sequence_nr())


def current_node_variable() -> torch.Tensor | None:
    """The leaf that the running ``AccumulateGrad`` node accumulates into."""
    return getattr(torch._C._current_autograd_node(), "variable", None)


def has_hooks(parameter: torch.nn.Parameter) -> bool:
    """Whether hooks are registered on a parameter, of either kind."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, kind, None) for kind in kinds)


def clear_blas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps; the next matrix product makes a new one.

    There is one per thread and stream (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """
    torch._C._cuda_clearCublasWorkspaces()


def fake_like(
    mode: FakeTensorMode, tensor: torch.Tensor, meta_device: torch.device
) -> torch.Tensor:
    """A fake twin of a tensor; one on the meta device moves to ``meta_device``."""
    if isinstance(tensor, FakeTensor):
        return tensor
    data = tensor.detach()
    if tensor.is_meta:
        fake: torch.Tensor = FakeTensor(mode, data, meta_device)
    else:
        fake = mode.from_tensor(data, static_shapes=True)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
