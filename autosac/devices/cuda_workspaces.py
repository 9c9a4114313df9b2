"""Memory that CUDA kernels allocate for themselves, where none can be measured.

Sources are files of PyTorch below aten/src/ATen/native, as of torch 2.10 and of main in
2026; for convolutions see `cuda_convolutions`, for sums `cuda_reductions`, for matrix
products `cuda_matmuls`. Not modelled: split-key buffers of attention for few heads,
scan and radix-sort buffers of CUB, and partial results of norms (all small).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autosac import _compat, _compat_gpu
from autosac.devices import cuda_convolutions, cuda_matmuls, cuda_reductions
from autosac.devices.specs import DeviceSpec

_SUMS = [
    f"aten.{name}"
    for name in ("sum.dim_IntList", "sum.default", "mean.dim", "mean.default")
]
_HALF = (torch.float16, torch.bfloat16)


def op_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: DeviceSpec
) -> int:
    """Bytes that a call allocates and frees inside its kernel; 0 if none is known."""
    product_bytes = cuda_matmuls.temporary_bytes(func, args, kwargs, device)
    if product_bytes:
        return device.allocated_bytes(product_bytes)
    name = str(func)
    own = _ON_NVIDIA.get(name) if device.vendor == "nvidia" else None
    formula = _FORMULAS.get(name)
    if own is None and formula is None:
        return 0
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    blocks = own(given, device) if own else []
    blocks += formula(given) if formula else []
    return sum(device.allocated_bytes(nbytes) for nbytes in blocks)


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flash_backward(given: dict[str, Any]) -> list[int]:
    """`mha_bwd` in transformers/cuda/flash_attn/flash_api.cpp.

    float32 accumulator of the queries' gradient and the row sums of ``dP * P``, with
    sequences in multiples of 128 and heads of 32 (256 above 192); with fewer key heads
    also their gradients expanded. `_flash_attention_backward` in attention_backward.cu
    copies an output or its gradient that is not contiguous as (batch, length, head).
    """
    query, key = given["query"], given["key"]
    batch, heads, length, width = query.shape
    rows = _rounded(length, 128)
    wide = _rounded(width, 32) if width <= 192 else 256
    sizes = [4 * batch * heads * rows * wide, 4 * batch * heads * rows]
    if key.shape[1] != heads:
        expanded = batch * heads * key.shape[2] * width * key.element_size()
        sizes += [expanded, expanded]
    for tensor in (given["grad_out"], given["out"]):
        if not _is_length_major(tensor):
            sizes.append(tensor.numel() * tensor.element_size())
    return sizes


def _cudnn_backward(given: dict[str, Any]) -> list[int]:
    """What cuDNN 9.19 took on an H100 (``benchmarks/results/gpu_published.json``).

    One block of float32: the queries' gradient and the row sums of ``dP * P``; with
    fewer key heads it is taken to expand their gradients, as flash attention does.
    """
    query, key = given["query"], given["key"]
    batch, heads, length, width = query.shape
    sizes = [4 * batch * heads * length * (width + 1)]
    if key.shape[1] != heads:
        expanded = batch * heads * key.shape[2] * width * key.element_size()
        sizes += [expanded, expanded]
    return sizes


def _is_length_major(tensor: torch.Tensor) -> bool:
    """Whether (batch, head, length, width) lies as (batch, length, head, width)."""
    step = 1
    for dim in (3, 1, 2, 0):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != step:
            return False
        step *= tensor.shape[dim]
    return True


def _efficient_backward(given: dict[str, Any]) -> list[int]:
    """`_efficient_attention_backward` in transformers/cuda/attention_backward.cu.

    Row sums of ``dO * O``, and `workspace_size` in mem_eff_attention/kernel_backward.h
    for one split of the keys: tiles of 64 rows with a header of 16 bytes.
    """
    query, key, value = given["query"], given["key"], given["value"]
    batch, heads, length, width = query.shape
    columns = 64 if width <= 64 else 128
    tiles = math.ceil(length / 64) * math.ceil(width / columns)
    elements = tiles * (64 * columns + 4)
    if query.dtype in _HALF and max(width, value.shape[-1]) > 128:
        keys = _rounded(key.shape[2], columns)
        elements += keys * (_rounded(width, 64) + _rounded(value.shape[-1], 64))
    return [4 * batch * heads * elements, 4 * batch * heads * _rounded(length, 32)]


def _embedding_backward(given: dict[str, Any]) -> list[int]:
    """`embedding_dense_backward_cuda`: cuda/Embedding.cu, EmbeddingBackwardKernel.cu.

    Up to 3072 indices run without temporaries. More are sorted: the result takes two
    arrays of 8 bytes an index, sorting three more (CUB's share is an estimate). When
    these are gone, rows are summed in segments of up to 10.
    """
    grad, indices = given["grad_output"], given["indices"]
    number = indices.numel()
    if number <= 3072 and not given.get("scale_grad_by_freq"):
        return []
    segments = min(number, given["num_weights"])
    partial = number // 10 + segments
    itemsize = 4 if grad.dtype in _HALF else grad.element_size()
    rows = partial * grad.shape[-1] * itemsize
    summing = [8 * number, 8 * segments, 8 * segments, 8 * partial, rows]
    return [8 * number] * 2 + max([8 * number] * 3, summing, key=sum)


def _group_norm(given: dict[str, Any]) -> list[int]:
    """`native_group_norm` and its backward in group_norm.cpp.

    Images, and gradients of the result, are copied if they do not lie in the format in
    which the kernel works.
    """
    images = given["input"]
    takes_any = _compat_gpu.GROUP_NORM_TAKES_CHANNELS_LAST
    wished = _compat.memory_format(images) if takes_any else torch.contiguous_format
    read = [images, *([given["grad_out"]] if "grad_out" in given else [])]
    return [t.nbytes for t in read if not t.is_contiguous(memory_format=wished)]


def _copies(*names: str) -> Callable[[dict[str, Any]], list[int]]:
    """Arguments that a kernel copies unless they are contiguous.

    `layer_norm_cuda`, `_fused_rms_norm_cuda` and their backward passes in
    cuda/layer_norm_kernel.cu (`expect_contiguous`); `host_softmax` and
    `host_softmax_backward` in cuda/SoftMax.cu; cudnn/GridSampler.cpp.
    """

    def copies(given: dict[str, Any]) -> list[int]:
        tensors = [given[name] for name in names]
        return [t.nbytes for t in tensors if not t.is_contiguous()]

    return copies


def _softmax_backward(given: dict[str, Any]) -> list[int]:
    """`softmax_backward_cuda_out` in cuda/SoftMax.cu.

    The products of gradient and result, and contiguous copies of these and the result.
    """
    grad, output = given["grad_output"], given["output"]
    dtype = torch.promote_types(grad.dtype, output.dtype)
    products = grad.numel() * dtype.itemsize
    if output.is_contiguous():
        return [products]
    moved = [] if grad.is_contiguous() else [products]
    return [products, *moved, output.nbytes]


def _norm_backward(given: dict[str, Any], device: DeviceSpec) -> list[int]:
    """`LaunchGammaBetaBackwardCUDAKernel` in cuda/layer_norm_kernel.cu.

    Many short rows are summed in parts, each for a block of 32 rows or more.
    """
    width = math.prod(given["normalized_shape"])
    rows = given["input"].numel() // max(width, 1)
    if device.multiprocessors is None or rows <= 65536:
        return []
    if width // 32 >= device.multiprocessors // 2:
        return []
    parts = min(32768 // math.ceil(width / 32), math.ceil(rows / 32))
    dtype = given["input"].dtype
    partial = torch.empty(parts, width, dtype=dtype, device="meta")
    wanted = sum(given["output_mask"][1:])
    summing = cuda_reductions.workspace_bytes(partial, [0], device) if wanted else []
    return [partial.nbytes] * wanted + summing


def _foreach_norm(given: dict[str, Any]) -> list[int]:
    """`foreach_tensor_norm_cuda` in cuda/ForeachReduceOp.cu: chunks of 65536."""
    tensors = given["self"]
    chunks = max((math.ceil(t.numel() / 65536) for t in tensors), default=0)
    return [4 * len(tensors) * chunks]


_FORMULAS: dict[str, Callable[[dict[str, Any]], list[int]]] = {
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _cudnn_backward,
    "aten._scaled_dot_product_efficient_attention_backward.default": (
        _efficient_backward
    ),
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm,
    "aten._foreach_norm.Scalar": _foreach_norm,
    "aten.native_layer_norm.default": _copies("input"),
    "aten.native_layer_norm_backward.default": _copies("grad_out", "input"),
    "aten._fused_rms_norm.default": _copies("input"),
    "aten._fused_rms_norm_backward.default": _copies("grad_out", "input"),
    "aten.cudnn_grid_sampler.default": _copies("self", "grid"),
    "aten.cudnn_grid_sampler_backward.default": _copies("self", "grid", "grad_output"),
    "aten._softmax.default": _copies("self"),
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax.default": _copies("self"),
    "aten._log_softmax_backward_data.default": _copies("grad_output", "output"),
}

# On NVIDIA's GPUs, besides.
_ON_NVIDIA: dict[str, Callable[[dict[str, Any], DeviceSpec], list[int]]] = {
    **dict.fromkeys(_SUMS, cuda_reductions.of_sum),
    **cuda_convolutions.FORMULAS,
    "aten.native_layer_norm_backward.default": _norm_backward,
    "aten._fused_rms_norm_backward.default": _norm_backward,
}
