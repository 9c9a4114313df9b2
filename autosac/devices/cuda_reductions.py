"""Memory in which CUDA's reductions leave partial sums, such as those of biases.

A reduction of many numbers to few results is divided among thread blocks, and each
leaves its part in memory of the device: 132 MiB on an H100, whatever its size, for the
gradient of a bias. How it is divided is what `setReduceConfig` of PyTorch's
aten/src/ATen/native/cuda/Reduce.cuh decides by layout, multiprocessors and threads, the
same in torch 2.10 to 2.15; not so on AMD GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from autosac.devices.specs import DeviceSpec

_MOST_THREADS, _WARP = 512, 32  # of a block; of a warp
_VECTOR = 4  # numbers that a thread reads at once
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # of a thread
_INDEXED_BYTES = 2**31  # further than that 32-bit indices do not reach
_SEMAPHORE_BYTES = 4


class _Dim(NamedTuple):
    """Neighbouring dimensions that one step walks through."""

    size: int
    step: int  # in elements


def workspace_bytes(
    tensor: torch.Tensor, dims: Collection[int] | None, device: DeviceSpec
) -> list[int]:
    """Blocks that a sum or mean of a tensor allocates and frees.

    Args:
        tensor: What is summed, of floating-point numbers.
        dims: Over which dimensions; all if there are none.
        device: Where; nothing is known of one without `multiprocessors`.
    """
    threads = device.threads_per_multiprocessor
    if device.multiprocessors is None or threads is None:
        return []
    if not tensor.is_floating_point() or not tensor.numel():
        return []
    chosen = {dim % tensor.dim() for dim in dims or range(tensor.dim())}
    steps = [_Dim(*pair) for pair in zip(tensor.shape, tensor.stride(), strict=True)]
    reduced = sorted(
        (d for i, d in enumerate(steps) if i in chosen and d.size > 1),
        key=lambda dim: dim.step,
    )
    kept = [d for i, d in enumerate(steps) if i not in chosen and d.size > 1][::-1]
    inner, outer = _joined(_indexed(reduced, tensor.itemsize)), _joined(kept)
    if not inner:
        return []
    return _divided(inner, outer, device.multiprocessors, threads, tensor.itemsize)


def _indexed(dims: list[_Dim], itemsize: int) -> list[_Dim]:
    """A part of the dimensions that 32-bit indices reach: larger ones run in parts."""
    while dims and dims[-1].size * dims[-1].step * itemsize > _INDEXED_BYTES:
        dims = [*dims[:-1], dims[-1]._replace(size=dims[-1].size // 2)]
    return dims


def _joined(dims: Sequence[_Dim]) -> list[_Dim]:
    """Dimensions from the fastest on, neighbours that lie in a row as one."""
    joined: list[_Dim] = []
    for dim in dims:
        if joined and joined[-1].size * joined[-1].step == dim.step:
            joined[-1] = joined[-1]._replace(size=joined[-1].size * dim.size)
        else:
            joined.append(dim)
    return joined


def _divided(
    inner: list[_Dim], outer: list[_Dim], multiprocessors: int, threads: int, item: int
) -> list[int]:
    """Partial results and semaphores, as `setReduceConfig` divides the work.

    Args:
        inner: Dimensions that are summed, from the fastest on; at least one.
        outer: The others.
        multiprocessors: Of the device,
        threads: and how many threads each runs.
        item: Bytes of an element.
    """
    inputs, outputs = (math.prod(dim.size for dim in dims) for dims in (inner, outer))
    sums_fastest = not outer or inner[0].step < outer[0].step
    fast, slow = (inputs, outputs) if sums_fastest else (outputs, inputs)
    vector = 1
    if (inner if sums_fastest else outer)[0].step == 1:
        if not sums_fastest:
            vector = _vector(inner, outer)
            fast //= vector
        elif fast >= 128 and len(inner) == 1:
            fast //= _VECTOR
    width, height = _block(fast, slow, _MOST_THREADS // vector)
    values, grid = inputs, outputs // vector
    if sums_fastest:
        values = _divided_up(values, width)
    else:
        grid = _divided_up(grid, width)
    if values < min(16 * height, _MOST_VALUES):
        return []  # each warp has results of its own
    values = _divided_up(values, height)
    most_blocks = multiprocessors * (threads // (width * height))
    if values < _MOST_VALUES or grid > most_blocks:
        return []
    blocks = min(_divided_up(most_blocks, grid), _divided_up(values, _FEWEST_VALUES))
    blocks = max(blocks, _divided_up(values, _MOST_VALUES))
    if blocks == 1:
        return []
    partial = max(4, item) * outputs * blocks  # halves are summed in float32
    if not sums_fastest:
        partial *= width * vector
    return [partial, _SEMAPHORE_BYTES * grid]


def _vector(inner: list[_Dim], outer: list[_Dim]) -> int:
    """Results of neighbours that a thread sums at once (`get_output_vec_size`)."""
    aligned = [outer[0].size, *(dim.step for dim in (*inner, *outer[1:]))]
    vector = _VECTOR
    while any(number % vector for number in aligned):
        vector //= 2
    return vector


def _block(fast: int, slow: int, most: int) -> tuple[int, int]:
    """Width and height of a thread block (`set_block_dimension`)."""
    fast, slow = (_last_power(size) if size < most else most for size in (fast, slow))
    height = min(slow, most // min(fast, _WARP))
    return min(fast, most // height), height


def _divided_up(number: int, parts: int) -> int:
    return -(-number // parts)


def _last_power(number: int) -> int:
    """The largest power of two that is not above a number; 1 of 0."""
    return 1 << max(0, number.bit_length() - 1)


def of_sum(given: dict[str, Any], device: DeviceSpec) -> list[int]:
    """Of `aten.sum` and `aten.mean`, by the names of their arguments."""
    return workspace_bytes(given["self"], given.get("dim"), device)
