"""Memory that convolutions on the CPU allocate inside themselves, where not measured.

oneDNN brings input, weight and result into layouts of its own: blocks of 16 channels
if the input lies channels-first, else the weight only. Which layouts and scratch pads
depends on the processor: the formulas here explain measurements with torch 2.15 on an
AVX-512 machine with one thread, in float32 and bfloat16 (`calibrate` gives the figures
themselves). Rough for a single op, they are good enough for a peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from autosac import _compat

_BLOCK = 16  # channels of a block
_PAD_BYTES = 8 * 2**10  # scratch pad of most kernels
_STRIDED_PAD_BYTES = 36 * 2**10  # of those that scatter into a strided gradient
_SMALL = 20_480  # elements of a single image that oneDNN does not take


def forward_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of ``aten.convolution`` beyond its result."""
    images, weight, stride, padding, dilation, transposed, extra, groups = (
        *args[:2],
        *args[3:9],
    )
    spans = zip(
        images.shape[2:],
        weight.shape[2:],
        stride,
        padding,
        dilation,
        extra,
        strict=False,
    )
    pixels = math.prod(
        (size - 1) * step - 2 * pad + wide * (taps - 1) + more + 1
        if transposed
        else (size + 2 * pad - wide * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, wide, more in spans
    )
    channels = weight.shape[1] * groups if transposed else len(weight)
    result_bytes = len(images) * channels * pixels * images.itemsize
    case = _case(images, weight, args[3:9], pixels)
    copied = _copied_bytes(images, case) + case.weight_copy_bytes
    if not _uses_onednn(images, weight, args[3:9]):
        return copied + _columns_bytes(case)
    most = _data_bytes(case) if transposed else _result_bytes(case)
    return int(copied + most - result_bytes)


def backward_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of ``aten.convolution_backward`` beyond the gradients asked for."""
    gradient, images, weight, mask = (*args[:3], args[10])
    case = _case(images, weight, args[4:10], math.prod(gradient.shape[2:]))
    copied = _copied_bytes(gradient, case) + _copied_bytes(images, case)
    copied += case.weight_copy_bytes
    if not _uses_onednn(images, weight, args[4:10]):
        return copied + (_columns_bytes(case) if mask[1] else 0)
    most = kept = 0
    if mask[0]:
        kept = images.numel() * images.itemsize
        most = _result_bytes(case) if args[7] else _data_bytes(case)
    if mask[1] or mask[2]:
        # The gradient of the weight is made, too, if only the bias's is asked for.
        most = max(most, kept + _weight_bytes(case))
    asked = kept + (weight.nbytes if mask[1] else 0)
    return max(0, copied + most - asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A convolution; a transposed one is described by that which it is backward of.

    Attributes:
        batch: Images.
        inputs: Channels of an image; `outputs` of a result.
        outputs: Channels of a result.
        groups: How many convolutions on channels of their own it is.
        rows: Pixels of an image over its width.
        width: The last size of an image.
        pixels: Of a result.
        taps: Pixels of the kernel.
        padding: Largest padding.
        strided: Whether it leaves out pixels.
        itemsize: Bytes of an element.
        channels_last: The memory format of images, weight and result.
        weight_copy_bytes: The weight in that format if it is not.
    """

    batch: int
    inputs: int
    outputs: int
    groups: int
    rows: int
    width: int
    pixels: int
    taps: int
    padding: int
    strided: bool
    itemsize: int
    channels_last: bool
    weight_copy_bytes: int

    @property
    def is_depthwise(self) -> bool:
        """Whether every channel is convolved alone."""
        return 1 < self.groups == self.inputs == self.outputs

    @property
    def is_narrow(self) -> bool:
        """Whether images have less than a block of channels, and stay as they are."""
        return self.groups == 1 and self.inputs < _BLOCK

    def image_bytes(self, *, padded: bool) -> int:
        """Bytes of the images, their channels padded to blocks or not."""
        channels = self._channels(self.inputs, padded)
        return self.batch * channels * self.rows * self.width * self.itemsize

    def result_bytes(self, *, padded: bool) -> int:
        """Bytes of the results, their channels padded to blocks or not."""
        channels = self._channels(self.outputs, padded)
        return self.batch * channels * self.pixels * self.itemsize

    def _channels(self, channels: int, padded: bool) -> int:
        is_whole = self.groups > 1 and not self.is_depthwise
        return channels if is_whole or not padded else _blocks(channels)

    def weights(self, *, inputs: bool, outputs: bool) -> int:
        """Elements of the weight with channels of each group padded to blocks."""
        if self.is_depthwise:
            return _blocks(self.groups) * self.taps
        ins, outs = self.inputs // self.groups, self.outputs // self.groups
        ins, outs = _blocks(ins) if inputs else ins, _blocks(outs) if outputs else outs
        return self.groups * ins * outs * self.taps


def _blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _case(images: Any, weight: Any, options: Any, pixels: int) -> _Case:
    """A case, for images and the number of pixels that they are convolved to."""
    stride, padding, _, transposed, _, groups = options
    last = _channels_last(images) or _channels_last(weight)
    is_contiguous = weight.is_contiguous(memory_format=_format(weight, last))
    rows, width = math.prod(images.shape[2:-1]), images.shape[-1]
    if transposed:  # of a result only the number of pixels counts: a square's
        width = math.isqrt(pixels)
        rows, pixels = pixels // width, rows * images.shape[-1]
    return _Case(
        batch=len(images),
        inputs=weight.shape[1] * groups,
        outputs=len(weight),
        groups=groups,
        rows=rows,
        width=width,
        pixels=pixels,
        taps=math.prod(weight.shape[2:]),
        padding=max(padding),
        strided=max(stride) > 1,
        itemsize=images.itemsize,
        channels_last=last,
        weight_copy_bytes=0 if is_contiguous else weight.nbytes,
    )


def _channels_last(tensor: Any) -> bool:
    return _compat.memory_format(tensor) is not torch.contiguous_format


def _format(tensor: Any, last: bool) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats.get(tensor.dim() if last else 0, torch.contiguous_format)


def _copied_bytes(tensor: Any, case: _Case) -> int:
    """A copy in the format of the case, if it has another one."""
    wished = _format(tensor, case.channels_last)
    if tensor.is_contiguous(memory_format=wished):
        return 0
    return int(tensor.numel() * tensor.itemsize)


def _uses_onednn(images: Any, weight: Any, options: Any) -> bool:
    """`use_mkldnn` in aten/src/ATen/native/Convolution.cpp, where oneDNN is there."""
    stride, _, dilation, _, _, groups = options
    if images.itemsize == 2:
        return True
    kernel = weight.shape[2:]
    many = (
        max(stride) > 1 or max(dilation) > 1 or len(images) >= 16 or max(kernel) > 1
    ) or torch.get_num_threads() > 1
    large = groups > 1 or (len(kernel) > 1 and min(kernel[-2:]) > 3) or len(images) > 1
    return many and (large or math.prod(images.shape[:4]) > _SMALL)


def _columns_bytes(case: _Case) -> int:
    """Images unfolded for a matrix product; without a kernel they are as they are."""
    if case.taps == 1 and not case.padding and not case.strided:
        return 0
    return case.batch * case.groups * _unfolded_bytes(case)


# --- oneDNN's three kernels: most bytes alive, their own result included ------------


def _result_bytes(case: _Case) -> int:
    """Images and weight to results."""
    even = case.inputs if case.itemsize == 4 else case.inputs + case.inputs % 2
    result_bytes = case.result_bytes(padded=False)
    if case.channels_last:
        narrow = case.weights(inputs=False, outputs=True) * even // case.inputs
        pad_bytes = 0 if case.groups > 1 else _PAD_BYTES
        return result_bytes + pad_bytes + narrow * case.itemsize
    blocked_bytes = case.result_bytes(padded=True)
    if _unfolds(case, 4):
        return blocked_bytes + max(_unfolded_bytes(case), result_bytes)
    if case.is_narrow:
        images_bytes = 0
        weights = case.weights(inputs=False, outputs=True) * even // case.inputs
    else:
        images_bytes = case.image_bytes(padded=True)
        weights = _blocked_weights(case)
    kept = images_bytes + weights * case.itemsize + blocked_bytes
    scratch_bytes = _product_bytes(case, case.outputs * case.pixels)
    if case.taps == 1 and case.strided:  # the pixels that count
        scratch_bytes += case.inputs * case.pixels * case.itemsize
    return max(kept + scratch_bytes, blocked_bytes + result_bytes)


def _data_bytes(case: _Case) -> int:
    """Gradient of results and weight to gradient of images."""
    images_bytes = case.image_bytes(padded=False)
    weight_bytes = case.weights(inputs=True, outputs=False) * case.itemsize
    scatters = case.strided and (case.groups == 1 or case.itemsize == 2)
    scratch_bytes = 0 if case.groups > 1 else _PAD_BYTES
    if scatters:
        scratch_bytes = _STRIDED_PAD_BYTES
    if case.channels_last:
        return images_bytes + weight_bytes + scratch_bytes
    if scatters:  # made channels-last, and converted twice
        given = case.result_bytes(padded=False) + weight_bytes + scratch_bytes
        return images_bytes + max(given, 2 * images_bytes)
    blocked_bytes = case.image_bytes(padded=True)
    if _unfolds(case, 4):
        summed_bytes = _unfolded_bytes(case) * 4 // case.itemsize  # in float32
        return blocked_bytes + max(summed_bytes, images_bytes)
    given = case.result_bytes(padded=True) + _blocked_weights(case) * case.itemsize
    given += _product_bytes(case, case.inputs * case.rows * case.width)
    return blocked_bytes + max(given, images_bytes)


def _weight_bytes(case: _Case) -> int:
    """Gradient of results and images to gradient of the weight."""
    own = case.inputs // case.groups * case.outputs * case.taps
    own_bytes = own * case.itemsize
    direct = not case.is_depthwise or case.taps <= 9
    if case.channels_last:
        weights = case.weights(inputs=not case.is_narrow, outputs=True)
        if not direct:
            weights = case.groups * _BLOCK * _BLOCK * case.taps
        scratch_bytes = _summed_bytes(case, weights, direct)
        return weights * case.itemsize + max(scratch_bytes, 2 * own_bytes)
    uneven = case.is_narrow and case.itemsize == 2 and case.outputs % _BLOCK
    if not direct or uneven or _unfolds(case, 32 // case.itemsize):
        # Sums in float32, four of them as measured; with it the images of a group.
        sums = 4 * 4 * own
        return own_bytes + max(own_bytes, _unfolded_bytes(case) + sums)
    weights = _blocked_weights(case)
    images_bytes = case.image_bytes(padded=True)
    if case.is_narrow:
        weights, images_bytes = case.weights(inputs=False, outputs=True), 0
    weight_bytes = weights * case.itemsize
    given = case.result_bytes(padded=True) + images_bytes
    scratch_bytes = _summed_bytes(case, weights, direct)
    return weight_bytes + max(given + scratch_bytes, own_bytes)


def _blocked_weights(case: _Case) -> int:
    """Elements of a weight between images in blocks."""
    whole = case.groups == 1
    return case.weights(inputs=whole, outputs=whole)


def _unfolds(case: _Case, multiple: int) -> bool:
    """Whether groups have numbers of channels that no blocks fit; then one by one."""
    if case.groups == 1 or case.is_depthwise:
        return False
    return bool(
        case.inputs // case.groups % multiple or case.outputs // case.groups % multiple
    )


def _unfolded_bytes(case: _Case) -> int:
    """An image of a group, unfolded for a matrix product."""
    return case.inputs // case.groups * case.taps * case.pixels * case.itemsize


def _product_bytes(case: _Case, elements: int) -> int:
    """Sums of a convolution that is a matrix product: float32, one image at a time."""
    return 4 * elements if case.itemsize == 2 and case.taps == 1 else 0


def _summed_bytes(case: _Case, weights: int, direct: bool) -> int:
    """Sums in float32 of a bfloat16 weight's gradient, and images with their gradient
    turned for it: all channels of one image, its rows padded by up to two pixels."""
    if case.itemsize == 4:
        return 0
    sums = 4 * weights
    if case.is_depthwise and direct:
        return sums
    if case.taps == 1 and not case.channels_last:
        return sums
    if case.is_depthwise:
        inputs = outputs = case.groups * _BLOCK
    else:
        inputs = (
            0 if case.is_narrow else case.groups * _blocks(case.inputs // case.groups)
        )
        outputs = case.groups * _blocks(case.outputs // case.groups)
    turned = inputs * case.rows * (case.width + min(2 * case.padding, 4))
    turned += outputs * case.pixels
    return sums + turned * case.itemsize + _PAD_BYTES
