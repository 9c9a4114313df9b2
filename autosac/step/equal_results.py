"""Whether an op made the same twice, as numbers outside of PyTorch's memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def filled_memory() -> Iterator[None]:
    """Inside, memory that an op leaves as it finds it holds the same each time."""
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    was = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what has no deterministic kernel
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was, warn_only=only_warns)
            torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


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
