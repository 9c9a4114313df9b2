"""Memory that convolutions allocate for themselves on NVIDIA GPUs.

PyTorch copies what does not lie in the format in which cuDNN is asked to work
(`cudnn_conv_suggest_memory_format` in aten/src/ATen/native/ConvUtils.h; `contiguous` in
cudnn/ConvShared.cpp). cuDNN works in half precision on its tensor cores, whose kernels
take channels last: of tensors that lie otherwise it makes copies in its workspace, of
all channels in multiples of 8 (NVIDIA, "Convolutional Layers User's Guide": tensor
layouts; "Tensor Core Requirements"). That is an estimate: which kernel runs, and what
else it asks for, cuDNN's heuristics decide at run time. Depthwise convolutions of
tensors that lie channels first run in PyTorch's own kernels, without any. What those of
channels last take, and padding, are as an H100 was seen to (cuDNN 9.19,
``benchmarks/results/gpu_published.json``). The gradient of a bias is a sum
(`convolution_backward` in aten/src/ATen/native/Convolution.cpp).

Held against published figures (docs/gpus.md) ResNet-50, ConvNeXt-L and Whisper are
predicted within 1 % in the median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autosac import _compat
from autosac.devices import cuda_reductions
from autosac.devices.specs import DeviceSpec
from autosac.quantities import rounded_up

_CHANNELS = 8  # in multiples of which tensor cores work
_HALF = (torch.float16, torch.bfloat16)
_FEW_CHANNELS = 4  # to which images of fewer are padded
_PARTS = 8  # in which an image's share of a depthwise weight's gradient is summed
_SUM_BYTES = 4  # of each element of a weight's gradient, which adds up in float32


def _forward(given: dict[str, Any], device: DeviceSpec) -> list[int]:
    del device
    images, weight = given["input"], given["weight"]
    wished = _format(images, weight)
    copies = _copied(wished, images, weight)
    if not _transposes(given, wished):
        return [*copies, *_padded(given, wished)]
    out = _out_shape(given)
    moved = [_last(images.shape), _last(out), _last(weight.shape)]
    return [*copies, images.element_size() * sum(moved)]


def _backward(given: dict[str, Any], device: DeviceSpec) -> list[int]:
    """Gradients of input and weight one after the other, then the sum for the bias."""
    grad, images, weight = given["grad_output"], given["input"], given["weight"]
    wished = _format(images, weight)
    blocks = _copied(wished, grad, images, weight)
    if _transposes(given, wished):
        moved = [_last(images.shape), _last(grad.shape), _last(weight.shape)]
        summed = _SUM_BYTES * _last(weight.shape)
        blocks.append(images.element_size() * sum(moved) + summed)
    else:
        blocks += _padded(given, wished) + _partial(given, wished)
    bias = []
    if given["output_mask"][2]:
        dims = [0, *range(2, grad.dim())]
        bias = cuda_reductions.workspace_bytes(grad, dims, device)
    return max(blocks, bias, key=sum)


def _padded(given: dict[str, Any], wished: torch.memory_format) -> list[int]:
    """The copy of images of few channels, such as red, green and blue, with more."""
    images = given["input"]
    rows, channels, *size = images.shape
    if wished == torch.contiguous_format or images.dtype not in _HALF:
        return []
    if given["groups"] != 1 or channels >= _FEW_CHANNELS:
        return []
    return [rows * _FEW_CHANNELS * math.prod(size) * images.element_size()]


def _partial(given: dict[str, Any], wished: torch.memory_format) -> list[int]:
    """Parts of the gradient of a depthwise weight in half types."""
    images, weight = given["input"], given["weight"]
    if wished == torch.contiguous_format or images.dtype not in _HALF:
        return []
    if not _is_depthwise(given):
        return []
    return [images.shape[0] * weight.numel() * _PARTS * _SUM_BYTES]


def _is_depthwise(given: dict[str, Any]) -> bool:
    return bool(given["groups"] > 1 and given["groups"] == given["input"].shape[1])


def _format(images: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Channels last if one of both lies so."""
    for tensor in (images, weight):
        wished = _compat.memory_format(tensor)
        if wished != torch.contiguous_format:
            return wished
    return torch.contiguous_format


def _copied(wished: torch.memory_format, *tensors: torch.Tensor) -> list[int]:
    return [
        t.nbytes
        for t in tensors
        if not t.is_contiguous(
            memory_format=wished if t.dim() in (4, 5) else torch.contiguous_format
        )
    ]


def _transposes(given: dict[str, Any], wished: torch.memory_format) -> bool:
    """Whether cuDNN works on copies that lie channels last."""
    return (
        given["input"].dtype in _HALF
        and wished == torch.contiguous_format
        and not _is_depthwise(given)
        and torch.backends.cudnn.enabled
    )


def _last(shape: Sequence[int]) -> int:
    """Elements of a tensor with channels in multiples of what tensor cores take."""
    rows, channels, *size = shape
    return rows * rounded_up(channels, _CHANNELS) * math.prod(size)


def _out_shape(given: dict[str, Any]) -> list[int]:
    """Shape of a convolution's result."""
    images, weight = given["input"], given["weight"]
    size = []
    for dim, length in enumerate(images.shape[2:]):
        stride, padding, dilation, extra = (
            _of_dim(given[name], dim)
            for name in ("stride", "padding", "dilation", "output_padding")
        )
        reach = dilation * (weight.shape[2 + dim] - 1)
        if given["transposed"]:
            size.append((length - 1) * stride - 2 * padding + reach + extra + 1)
        else:
            size.append((length + 2 * padding - reach - 1) // stride + 1)
    channels = weight.shape[0]
    if given["transposed"]:
        channels = weight.shape[1] * given["groups"]
    return [images.shape[0], channels, *size]


def _of_dim(values: Sequence[int], dim: int) -> int:
    return values[dim] if dim < len(values) else values[0]


FORMULAS: dict[str, Callable[[dict[str, Any], DeviceSpec], list[int]]] = {
    "aten.convolution.default": _forward,
    "aten.convolution_backward.default": _backward,
}
