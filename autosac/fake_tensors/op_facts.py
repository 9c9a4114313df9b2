"""What the records of equal op calls have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autosac import _compat
from autosac.devices import cpu_workspaces, cuda_workspaces
from autosac.devices.specs import DeviceSpec
from autosac.pytrees import tensors_in
from autosac.step.op_signatures import Signature, signature


@dataclass(frozen=True, slots=True)
class Costs:
    """What an op costs that is not a view.

    Attributes:
        flops: Floating point operations.
        moved_bytes: Bytes of its tensor arguments and outputs.
        workspace_bytes: Bytes its kernel allocates inside itself, until measured.
        signature: Equal for calls that do the same work on the same shapes.
    """

    flops: int
    moved_bytes: int
    workspace_bytes: int
    signature: Signature | None


VIEW = Costs(0, 0, 0, None)
_aten = torch.ops.aten
_OF_NUMBERS = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
# Ops that select by boolean indices.
_BY_MASKS = frozenset(
    {
        _aten.index.Tensor,
        _aten._unsafe_index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._index_put_impl_.default,
    }
)


def _is_mask(func: Any, tensor: torch.Tensor) -> bool:
    return func in _BY_MASKS and tensor.dtype in (torch.bool, torch.uint8)


class Facts:
    """Facts about an op call; costs only when asked for, as views have none.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        inputs: The tensors in them.
        outputs: The tensors that it returned.
    """

    __slots__ = (
        *("costs", "dtype", "finds", "masks", "may_draw", "name"),
        *("random", "shapes", "wrapped", "written"),
    )

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        self.name = str(func)
        self.random = _compat.is_random(func)
        self.may_draw = _compat.may_draw(func)
        self.wrapped = len(_compat.wrapped_numbers(func, args))
        floats = (t.dtype for t in outputs if t.is_floating_point())
        self.dtype = str(next(floats, ""))[6:]
        self.shapes = tuple(tuple(t.shape) for t in outputs)
        written = {
            id(t) for t in tensors_in(_compat.written_arguments(func, args, kwargs))
        }
        self.written = tuple(i for i, t in enumerate(inputs) if id(t) in written)
        self.masks = tuple(i for i, t in enumerate(inputs) if _is_mask(func, t))
        tags = getattr(func, "tags", ())
        self.finds = torch.Tag.dynamic_output_shape in tags and func not in _BY_MASKS
        self.costs: Costs | None = None


def costs(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    tensors: list[torch.Tensor],
    out: Any,
    *,
    device_type: str,
    target: DeviceSpec | None,
) -> Costs:
    """Costs of a call.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        tensors: The tensors in its arguments and results.
        out: What it returned.
        device_type: Where the tensors say that they are.
        target: The GPU that they stand for though they are on the CPU.
    """
    workspace_bytes = 0
    if target is not None:
        workspace_bytes = cuda_workspaces.op_bytes(func, args, kwargs, target)
    elif device_type == "cpu":
        workspace_bytes = cpu_workspaces.op_bytes(func, args)
        workspace_bytes += _number_bytes(func, args)
    return Costs(
        flops=_flops(func, args, kwargs, out),
        moved_bytes=sum(tensor.nbytes for tensor in tensors),
        workspace_bytes=workspace_bytes,
        signature=signature(func, args, kwargs),
    )


def _number_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of the CPU's tensors that numbers among the arguments of an op become.

    One for each of them, and its copy in the type that the op computes in if that is
    another (`TensorIteratorBase::compute_types` in aten/src/ATen/TensorIterator.cpp).
    """
    numbers = _compat.wrapped_numbers(func, args)
    if func._overloadname == "Scalar" and _compat.is_elementwise(func):
        numbers += args[1:2]  # of which the kernel makes a tensor first
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    num_bytes = 0
    for number in numbers:
        own = _OF_NUMBERS.get(type(number), torch.float64)
        computed = own if tensor is None else _computed(tensor.dtype, own)
        num_bytes += own.itemsize + (computed.itemsize if computed != own else 0)
    return num_bytes


def _computed(dtype: torch.dtype, own: torch.dtype) -> torch.dtype:
    """Type in which an op computes with a tensor and a number, which yields to it."""
    if own.is_complex and not dtype.is_complex:
        return torch.complex128 if dtype == torch.float64 else torch.complex64
    if own.is_floating_point and not (dtype.is_floating_point or dtype.is_complex):
        return torch.get_default_dtype()
    return own if dtype == torch.bool else dtype


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating point operations of a call, 0 for ops without a formula."""
    packet = getattr(func, "overloadpacket", None)
    if packet is torch.ops.aten._grouped_mm:
        return _grouped_mm_flops(*args)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    flops = int(formula(*_with_all_heads(func, args), **kwargs, out_val=out))
    if packet is torch.ops.aten.convolution_backward:
        flops -= _of_other_groups(formula, args, out, flops)
    return flops


def _of_other_groups(formula: Any, args: tuple[Any, ...], out: Any, flops: int) -> int:
    """What PyTorch's formula counts too much of a grouped convolution's backward pass.

    It lets each output channel of the weight's gradient meet the inputs of all groups.
    """
    groups: int = args[9]
    wanted = args[10]
    if groups == 1:
        return 0
    no_weight = [wanted[0], False, False]
    of_weight = flops - int(formula(*args[:10], no_weight, out_val=out))
    return of_weight - of_weight // groups


def _grouped_mm_flops(left: torch.Tensor, right: torch.Tensor, *_: Any) -> int:
    """Each row of the flat factor meets one matrix of the other one."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * int(groups * left.shape[-2] * left.shape[-1] * right.shape[-1])


def _with_all_heads(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Attention with a key head for each query head, for the formulas of torch 2.10."""
    if "_scaled_dot_product" not in str(func):
        return args
    names = _compat.argument_names(func)
    batch, heads = args[names.index("query")].shape[:2]
    places = {names.index("key"), names.index("value")}
    with _compat.no_modes():
        return tuple(
            torch.empty(batch, heads, *arg.shape[2:], device="meta")
            if i in places
            else arg
            for i, arg in enumerate(args)
        )
