"""Memory that CPU kernels allocate for themselves, where it has not been measured.

oneDNN brings arguments into blocked layouts before it convolves. Which ones depends on
the processor; the formulas here are those that explain measurements with torch 2.15 on
an AVX-512 machine (`calibrate` gives the figures themselves). They are rough for a
single op, and good enough for a peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_BLOCK = 16  # channels of a block


def op_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a call allocates and frees inside its kernel; 0 if none is known."""
    formula = _FORMULAS.get(str(func))
    return 0 if formula is None else formula(args)


def _convolution(args: tuple[Any, ...]) -> int:
    """Copies of input and weight, or of the output."""
    images, weight, stride, padding, dilation = (*args[:2], *args[3:6])
    if _is_product(weight, stride, padding):
        return 0
    if args[6]:
        return int(images.nbytes + weight.nbytes)
    if args[8] > 1 and images.itemsize == 4:
        copied = 0 if images.stride(1) == 1 else images.nbytes
        return int(copied + _grouped_bytes(weight))
    pixels = 1
    for size, kernel, step, pad, wide in zip(
        images.shape[2:], weight.shape[2:], stride, padding, dilation, strict=False
    ):
        pixels *= (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
    output_bytes = len(images) * len(weight) * pixels * images.itemsize
    return int(max(images.nbytes + _blocked_bytes(weight, args[8]), output_bytes))


def _convolution_backward(args: tuple[Any, ...]) -> int:
    """Copies of input and gradient, or the gradient of the weight in blocks."""
    gradient, images, weight = args[:3]
    if _is_product(weight, args[4], args[5]):
        return 0
    return int(max(gradient.nbytes + images.nbytes, _blocked_bytes(weight, args[9])))


def _is_product(weight: Any, stride: Any, padding: Any) -> bool:
    """Whether a convolution is a matrix product that needs no copies."""
    taps = math.prod(weight.shape[2:])
    return bool(taps == 1 and all(s == 1 for s in stride) and not any(padding))


def _grouped_bytes(weight: Any) -> int:
    """A weight in float32 as forward wants it: whole blocks of one-channel groups."""
    if weight.shape[1] > 1:
        return int(2 * weight.nbytes)
    groups = -(-len(weight) // _BLOCK) * _BLOCK
    return int(groups * math.prod(weight.shape[2:]) * weight.itemsize)


def _blocked_bytes(weight: Any, groups: int) -> int:
    """A weight whose channels are padded to whole blocks in each group."""
    if groups == 1:
        return int(weight.nbytes)
    outputs = -(-(len(weight) // groups) // _BLOCK) * _BLOCK
    inputs = -(-weight.shape[1] // _BLOCK) * _BLOCK
    taps = math.prod(weight.shape[2:])
    return int(groups * outputs * inputs * taps * weight.itemsize)


def _recurrent(args: tuple[Any, ...]) -> int:
    """Copies of both weights and, in float32, the gates of all steps."""
    inputs, own, hidden = args[:3]
    weight_bytes = own.nbytes + hidden.nbytes
    return int(weight_bytes + (_gate_bytes(args) if inputs.itemsize == 4 else 0))


def _recurrent_backward(args: tuple[Any, ...]) -> int:
    """Copies of both weights, two in half precision, the gates of all steps, and a
    copy of a gradient that is not contiguous."""
    inputs, own, hidden, gradient = (*args[:3], args[10])
    copies = 1 if inputs.itemsize == 4 else 2
    copied = gradient is not None and not gradient.is_contiguous()
    weight_bytes = copies * (own.nbytes + hidden.nbytes)
    return int(weight_bytes + _gate_bytes(args) + (gradient.nbytes if copied else 0))


def _gate_bytes(args: tuple[Any, ...]) -> int:
    inputs, own = args[:2]
    return int(math.prod(inputs.shape[:-1]) * len(own) * inputs.itemsize)


def _upsampling(args: tuple[Any, ...]) -> int:
    """Copies of input and output with the channels last."""
    images, size = args[:2]
    planes = images.shape[0] * images.shape[1]
    return int(images.nbytes + planes * math.prod(size) * images.itemsize)


def _first_argument(args: tuple[Any, ...]) -> int:
    """A copy of the gradient."""
    return int(args[0].nbytes)


def _contiguous_gradient(args: tuple[Any, ...]) -> int:
    """A copy of a gradient that is not contiguous."""
    return 0 if args[0].is_contiguous() else int(args[0].nbytes)


_FORMULAS: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.mkldnn_rnn_layer.default": _recurrent,
    "aten.mkldnn_rnn_layer_backward.default": _recurrent_backward,
    "aten.upsample_nearest2d.default": _upsampling,
    "aten.upsample_nearest2d_backward.default": _first_argument,
    "aten.native_batch_norm_backward.default": _first_argument,
    "aten.embedding_dense_backward.default": _contiguous_gradient,
}
