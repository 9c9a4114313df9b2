"""Private PyTorch APIs for global settings by which kernels round and choose.

Those that are read by public names raise where legacy names and new ones were mixed, or
take several times as long; a trace asks at each op.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_C: Any = torch._C
_SMALLEST = 5e-324  # is zero while denormal numbers are flushed


def _precisions(backend: str) -> list[Callable[[], Any]]:
    """What float32 is computed in."""
    ops = ("matmul", "conv", "rnn")
    return [partial(_C._get_fp32_precision_getter, backend, op) for op in ops]


_ANYWHERE = [
    torch.get_default_dtype,
    _C._get_deterministic_algorithms,
    _C._get_deterministic_fill_uninitialized_memory,
]
_OF_DEVICE: dict[str, list[Callable[[], Any]]] = {
    "cpu": [
        torch.get_num_threads,
        _C._get_mkldnn_enabled,
        _C._get_mkldnn_deterministic,
        _C._get_nnpack_enabled,
        *_precisions("mkldnn"),
    ],
    "cuda": [
        _C._get_cudnn_enabled,
        _C._get_cudnn_benchmark,
        _C._get_cudnn_deterministic,
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        _C._get_cublas_allow_fp16_accumulation,
        _C._get_linalg_preferred_backend,
        _C._get_blas_preferred_backend,
        *_precisions("cuda"),
    ],
}
_GETTERS = {kind: [*_ANYWHERE, *getters] for kind, getters in _OF_DEVICE.items()}


def settings(device_type: str) -> tuple[Any, ...]:
    """All that decides what kernels of a device compute, besides their arguments."""
    getters = _GETTERS.get(device_type, _ANYWHERE)
    return (_SMALLEST > 0.0, *[getter() for getter in getters])
