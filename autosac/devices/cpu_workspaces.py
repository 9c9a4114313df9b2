"""Memory that CPU kernels allocate for themselves, where it has not been measured.

The formulas are those that explain measurements with torch 2.15 on an AVX-512 machine
that multiplies in bfloat16, too, but has no tiles for it: without `avx512_bf16`, and
with AMX, oneDNN takes other blocks for that type. `calibrate` gives the figures
themselves. They are rough for a single op, and good enough for a peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from autosac.devices import cpu_convolutions

_TINY = 16**3  # multiplications that oneDNN is not asked for


def op_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a call allocates and frees inside its kernel; 0 if none is known."""
    formula = _FORMULAS.get(str(func))
    return 0 if formula is None else formula(args)


def _product(args: tuple[Any, ...]) -> int:
    """Blocks of oneDNN in half precision.

    Sums in float32, the right factor and, if it is transposed, the left one. Rough if
    more than 512 numbers are summed; with torch 2.10 a bound, as its oneDNN keeps no
    sums of fewer.
    """
    left, right = args[-2:]
    (size, inner), width = left.shape, right.shape[1]
    if left.itemsize != 2 or min(size, width) < 2 or size * inner * width <= _TINY:
        return 0
    rows = -(-size // -(-size // 256))  # equal parts
    depth = min(inner, 512 if inner <= 1024 else 1024)
    sums_bytes = 4 * rows * min(width, 64)
    right_bytes = -(-depth // 32) * 32 * 64 * right.itemsize
    depth = -(-min(inner, 512) // 32) * 32
    left_bytes = 0 if left.stride(1) == 1 else rows * depth * left.itemsize
    return int(2**10 + sums_bytes + right_bytes + left_bytes)


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
    "aten.convolution.default": cpu_convolutions.forward_bytes,
    "aten.convolution_backward.default": cpu_convolutions.backward_bytes,
    "aten.mm.default": _product,
    "aten.addmm.default": _product,
    "aten.mkldnn_rnn_layer.default": _recurrent,
    "aten.mkldnn_rnn_layer_backward.default": _recurrent_backward,
    "aten.upsample_nearest2d.default": _upsampling,
    "aten.upsample_nearest2d_backward.default": _first_argument,
    "aten.native_batch_norm_backward.default": _first_argument,
    "aten.embedding_dense_backward.default": _contiguous_gradient,
}
