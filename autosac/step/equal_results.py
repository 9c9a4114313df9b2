"""Whether an op made the same twice, as numbers outside of PyTorch's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from autosac.pytrees import tensors_in

_ITEMSIZES = (2, 4, 8)
_ROUNDED = 0.01  # of the largest number: a heuristic, for half types as well


def numbers_in(out: Any) -> list[npt.NDArray[Any]]:
    """Copies of the floating-point tensors that an op made: others may be scratch."""
    return [
        _numbers(tensor.detach())
        for tensor in tensors_in((out,))
        if type(tensor) is torch.Tensor
        and tensor.is_floating_point()
        and tensor.itemsize in _ITEMSIZES
    ]


def differ(
    first: Sequence[npt.NDArray[Any]], second: Sequence[npt.NDArray[Any]]
) -> bool:
    """Whether numbers differ by more than rounding, as of sums in any order."""
    return not all(map(_are_near, first, second))


def _are_near(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    if left.shape != right.shape or np.array_equal(left, right):
        return left.shape == right.shape
    finite = left[np.isfinite(left)]
    slack = _ROUNDED * float(np.abs(finite).max(initial=0.0))
    return np.allclose(left, right, rtol=0.0, atol=slack, equal_nan=True)


def _numbers(tensor: torch.Tensor) -> npt.NDArray[Any]:
    on_host = tensor.cpu()
    if tensor.dtype != torch.bfloat16:
        return np.array(on_host.numpy())
    upper = on_host.view(torch.int16).numpy().astype(np.uint32) << 16
    return upper.view(np.float32)
