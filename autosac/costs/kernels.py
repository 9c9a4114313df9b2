"""Kinds of GPU kernels, and what they reach beside matmuls and pointwise kernels.

`DeviceSpec` has the shares of the data sheet's rates that matmuls and pointwise kernels
reach, fitted for each chip. How much less others reach was measured on one, an H100
(``benchmarks/results/gpu_published.md``, "What kernels reach"), and is taken for the
same on NVIDIA's others; on AMD's all reach the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from autosac import _compat_gpu
from autosac._compat import argument_names, is_reduction
from autosac.devices.specs import DeviceSpec
from autosac.step.op_signatures import Layout, Signature, layouts


class Kernel(NamedTuple):
    """What decides how fast an op runs, besides its size.

    Attributes:
        kind: One of `REACHED`.
        rate: Of the device's rates that of its FLOPs, such as "tfloat32".
    """

    kind: str
    rate: str


class Reached(NamedTuple):
    """Shares of the data sheet's rates that a kind of kernel reaches on an H100.

    Attributes:
        memory: Of the memory's rate, where that decides how long it takes,
        half: and of the rate of bfloat16 and float16, where FLOPs do,
        tfloat32: of TensorFloat-32,
        float32: of float32. None: none of them was measured, and it reaches as much of
            a matmul's rate as in half types.
    """

    memory: float
    half: float | None = None
    tfloat32: float | None = None
    float32: float | None = None


MATMUL, POINTWISE = "matmul", "pointwise"
REACHED: Mapping[str, Reached] = MappingProxyType(
    {
        MATMUL: Reached(0.76, half=0.76, tfloat32=0.54, float32=0.74),
        "matmul, unaligned": Reached(0.76, half=0.25, tfloat32=0.25, float32=0.78),
        "attention": Reached(0.76, half=0.39, float32=0.38),
        "attention, backward": Reached(0.76, half=0.35, float32=0.45),
        "attention, dropout": Reached(0.76, half=0.17, float32=0.38),
        "attention, dropout, backward": Reached(0.76, half=0.21, float32=0.45),
        "convolution": Reached(0.63, half=0.54),
        "convolution, backward": Reached(0.41, half=0.49),
        "convolution, channels last": Reached(0.84, half=0.64),
        "convolution, channels last, backward": Reached(0.55, half=0.60),
        "convolution, unaligned": Reached(0.16, half=0.17),
        "convolution, unaligned, backward": Reached(0.078, half=0.21),
        "convolution, grouped": Reached(0.40, half=0.165),
        "convolution, grouped, backward": Reached(0.40, half=0.14),
        # Of the rate of float32, which is that of the cores that are used.
        "convolution, depthwise": Reached(0.40, float32=0.074),
        "convolution, depthwise, backward": Reached(0.40, float32=0.0085),
        "convolution, depthwise, half types": Reached(0.40, float32=0.18),
        "convolution, depthwise, half types, backward": Reached(0.27, float32=0.12),
        POINTWISE: Reached(0.95),
        "pointwise, mixed types": Reached(0.66),
        "pointwise, broadcast": Reached(0.74),
        "pointwise, broadcast, half types": Reached(0.53),
        "pointwise, transposing": Reached(0.36),
        "dropout": Reached(0.78),
        "reduction": Reached(0.47),
        "layer norm": Reached(0.62),
        "layer norm, backward": Reached(0.35),
        "layer norm, short rows": Reached(0.32),
        "layer norm, short rows, backward": Reached(0.42),
        "batch norm": Reached(0.54),
        "softmax": Reached(0.90),
        # Two kernels: the products that it sums come first
        # (softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu).
        "softmax, backward": Reached(0.44),
        "log softmax": Reached(0.64),
        "pooling": Reached(0.25),
        "embedding, backward": Reached(0.12),
    }
)
# Kinds of ops that are known by a part of their name, the first that is in it.
_NAMED = (
    ("attention", "attention"),
    ("convolution", "convolution"),
    ("native_dropout.", "dropout"),
    ("embedding_dense_backward", "embedding"),
    ("layer_norm", "layer norm"),
    ("rms_norm", "layer norm"),
    ("group_norm", "batch norm"),
    ("batch_norm", "batch norm"),
    ("log_softmax", "log softmax"),
    ("softmax", "softmax"),
    ("pool", "pooling"),
)
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
# Place, among its tensors, of that from which an op picks; a backward pass reads none.
_PICKED_FROM = {
    "aten.embedding.default": 0,
    "aten.gather.default": 0,
    "aten.index.Tensor": 0,
    "aten.index_select.default": 0,
    "aten.nll_loss_forward.default": 0,
    "aten.nll_loss_backward.default": 1,
    "aten.nll_loss2d_forward.default": 0,
    "aten.nll_loss2d_backward.default": 1,
}
HALF_TYPES = ("float16", "bfloat16")
_SHORT_ROW = 512  # elements, of which a layer norm does not read several at once
_BLOCK = 128  # queries; the paper's are of 64 or 128.
_ROW_BYTES = 16  # Tensor cores are fed rows that begin at multiples of it.


def kernel_of(name: str, call: Hashable, dtype: str) -> Kernel:
    """The kernel that runs a call on a GPU.

    Args:
        name: Of the overload, such as ``aten.mm.default``.
        call: Its signature; of calls without one only the name is known.
        dtype: Of its first floating-point result. float32 runs in TensorFloat-32 where
            PyTorch is set to it now.
    """
    kind = _kind(name, call if isinstance(call, Signature) else None, dtype)
    if "depthwise" in kind:
        return Kernel(kind, "float32")
    is_tf32 = dtype == "float32" and (
        (kind.startswith("matmul") and _compat_gpu.matmuls_are_tf32())
        or (kind.startswith("convolution") and _compat_gpu.convolutions_are_tf32())
    )
    return Kernel(kind, "tfloat32" if is_tf32 else dtype)


def kernel_ms(
    kernel: Kernel, flops: int, moved_bytes: int, device: DeviceSpec
) -> float:
    """Predicted time in ms of a kernel with so many FLOPs and bytes on a GPU."""
    share = 1.0
    if device.vendor == "nvidia":
        share = REACHED[_on(device, kernel.kind)].memory / REACHED[POINTWISE].memory
    memory_ms = 1e3 * moved_bytes / (device.achieved_bytes_per_s * share)
    return max(compute_ms(kernel, flops, device), memory_ms) + device.launch_overhead_ms


def compute_ms(kernel: Kernel, flops: int, device: DeviceSpec) -> float:
    """Time in ms that a kernel's FLOPs take alone."""
    kind, rate = kernel
    if device.vendor == "nvidia":
        share = _of_flops(_on(device, kind), rate)
    else:  # Its libraries have other kernels, and do not use TensorFloat-32.
        rate, share = "float32" if rate == "tfloat32" else rate, 1.0
    return 1e3 * flops / (device.achieved_flops_per_s(rate) * share)


def _on(device: DeviceSpec, kind: str) -> str:
    """The kind on a device: alignment is known to matter since Hopper.

    Its tensor memory accelerator takes rows in multiples of 16 bytes (CUDA C++
    Programming Guide, tensor maps); published steps on older chips show no such loss.
    """
    if device.compute_capability is None or device.compute_capability < (9, 0):
        return kind.replace(", unaligned", "")
    return kind


def touched_bytes(name: str, call: Hashable, moved_bytes: int) -> int:
    """Of a call's bytes those that its kernel reads or writes: not what is not picked.

    Args:
        name: Of the overload.
        call: Its signature.
        moved_bytes: Of its tensor arguments and results.
    """
    place = _PICKED_FROM.get(name)
    if place is None or not isinstance(call, Signature):
        return moved_bytes
    sizes = [math.prod(x.size) * x.dtype.itemsize for x in layouts(call)]
    results = moved_bytes - sum(sizes)
    read = 0 if "backward" in name else min(sizes[place], results)
    return moved_bytes - sizes[place] + read


def computed_flops(name: str, call: Hashable, flops: int) -> int:
    """Of a call's FLOPs those that its kernel makes: none of what a causal mask hides.

    Attention kernels skip blocks of keys that lie after a block of queries (Dao,
    "FlashAttention-2", 2023, section 3.1; so does PyTorch's on the CPU, in
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp). PyTorch's formulas count them.

    Args:
        name: Of the overload.
        call: Its signature.
        flops: By PyTorch's formula.
    """
    if "_scaled_dot_product" not in name or not isinstance(call, Signature):
        return flops
    given = _given(call)
    query, key = given.get("query"), given.get("key")
    if not isinstance(query, Layout) or not isinstance(key, Layout):
        return flops
    if not given.get("is_causal"):
        return flops
    return round(flops * _seen(query.size[-2], key.size[-2]))


@functools.cache
def _seen(queries: int, keys: int) -> float:
    """Share of the scores in blocks that a causal mask does not hide."""
    ends = [min(start + _BLOCK, queries) for start in range(0, queries, _BLOCK)]
    rows = zip([0, *ends], ends, strict=False)
    made = sum((end - start) * min(end, keys) for start, end in rows)
    return made / (queries * keys) if made else 1.0


def _of_flops(kind: str, rate: str) -> float:
    """Share of a rate, of that which matmuls reach."""
    own, best = REACHED[kind], REACHED[MATMUL]
    field = "half" if rate in HALF_TYPES else rate
    reached = getattr(own, field, None)
    if reached is None:
        field, reached = "half", own.half
    return reached / getattr(best, field) if reached else 1.0


def _kind(name: str, call: Signature | None, dtype: str) -> str:
    op = name.removeprefix("aten.")
    if op.split(".")[0] in _MATMULS:
        return MATMUL if call is None else _matmul(call)
    for part, kind in _NAMED:
        if part in op:
            if call is not None and op != name and kind in _DETAILS:
                kind += _DETAILS[kind](call)
            backward = f"{kind}, backward"
            return backward if "backward" in op and backward in REACHED else kind
    if "mm" in op.split(".")[0].split("_"):
        return MATMUL
    if call is None or op.startswith(("_foreach", "_fused")):
        return POINTWISE
    if is_reduction(call.func):
        return "reduction"
    return _pointwise(call, dtype)


def _matmul(call: Signature) -> str:
    """Whether all rows of the factors and the result begin aligned."""
    *_, left, right = (x for x in layouts(call) if len(x.size) > 1)
    pitches = (max(left.stride[-2:]), max(right.stride[-2:]), right.size[-1])
    is_aligned = all(x * right.dtype.itemsize % _ROW_BYTES == 0 for x in pitches)
    return MATMUL if is_aligned else f"{MATMUL}, unaligned"


def _convolution(call: Signature) -> str:
    given = _given(call)
    images = given.get("input", given.get("self"))
    weight, groups = given.get("weight"), given.get("groups", 1)
    if not isinstance(images, Layout) or not isinstance(weight, Layout):
        return ""
    if groups == 1:
        size = images.dtype.itemsize
        if any(channels * size % _ROW_BYTES for channels in weight.size[:2]):
            return ", unaligned"
        is_last = images.stride[1] == 1 and max(images.size[2:]) > 1
        return ", channels last" if is_last else ""
    if groups != images.size[1]:
        return ", grouped"
    return f", depthwise{', half types' if images.dtype.itemsize == 2 else ''}"


def _layer_norm(call: Signature) -> str:
    width = next((x.size[-1] for x in layouts(call) if x.size), _SHORT_ROW)
    return ", short rows" if width < _SHORT_ROW else ""


def _attention(call: Signature) -> str:
    return ", dropout" if _given(call).get("dropout_p") else ""


_DETAILS = {
    "attention": _attention,
    "convolution": _convolution,
    "layer norm": _layer_norm,
}


def _given(call: Signature) -> dict[str, Any]:
    """Arguments of a call by their names."""
    names = argument_names(call.func)
    return {**dict(zip(names, call.args, strict=False)), **dict(call.kwargs)}


def _pointwise(call: Signature, dtype: str) -> str:
    """By how the arguments lie; the slowest of what holds."""
    tensors = [x for x in layouts(call) if math.prod(x.size) > 1]
    if not tensors:
        return POINTWISE
    whole = max(tensors, key=lambda x: math.prod(x.size))
    order = _order(whole)
    asked = dict(call.kwargs).get("memory_format")
    if asked == torch.contiguous_format:
        order = sorted(order)
    elif asked == torch.channels_last:
        order = [dim for dim in (-4, -2, -1, -3) if dim in order]
    for tensor in tensors:
        own = _order(tensor)
        if own != [dim for dim in order if dim in own]:
            return "pointwise, transposing"
    floats = {str(x.dtype)[6:] for x in tensors if x.dtype.is_floating_point}
    if any(x.size != whole.size for x in tensors):
        is_half = floats.intersection(HALF_TYPES)
        return f"pointwise, broadcast{', half types' if is_half else ''}"
    return "pointwise, mixed types" if floats - {dtype} else POINTWISE


def _order(tensor: Layout) -> list[int]:
    """Dimensions, counted from the last, from the widest apart to the nearest."""
    dims = range(-len(tensor.size), 0)
    spread = [dim for dim in dims if tensor.size[dim] > 1 and tensor.stride[dim]]
    return sorted(spread, key=lambda dim: -tensor.stride[dim])
