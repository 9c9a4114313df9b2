"""Workspaces of matrix products on GPUs, where none can be measured.

Sources: aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp, as of torch 2.10 to
2.15, and what ranks on an H200 asked for under torch 2.11
(``benchmarks/results/gpu_ranks.md``). `CUBLAS_WORKSPACE_CONFIG` is not looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch

from autosac import _compat_gpu
from autosac.devices.specs import DeviceSpec

_MIB = 2**20
_LT_BYTES = _MIB  # `parseCUDABlasLtWorkspaceSize`
_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ADDMM = ("aten.addmm.default", "aten._addmm_activation.default")
_DOTS = ("aten.dot.default", "aten.vdot.default")
_PRODUCTS = frozenset(
    {
        *_ADDMM,
        *_DOTS,
        "aten.mm.default",
        "aten.bmm.default",
        "aten.baddbmm.default",
        "aten.addbmm.default",
        "aten.mv.default",
        "aten.addmv.default",
        "aten._trilinear.default",
        "aten._euclidean_dist.default",
    }
)


class Library(Enum):
    """What multiplies matrices."""

    CUBLAS = "cuBLAS"
    CUBLASLT = "cuBLASLt"


@functools.cache
def runs_blas(func: Any) -> bool:
    """Whether an op is one that calls cuBLAS, itself or inside its kernel."""
    return str(func) in _PRODUCTS


def library_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Library:
    """What runs an op of `runs_blas`.

    cuBLASLt adds a bias, a contiguous vector, to a product
    (`isInputCompliesAddmmCudaLt` in aten/src/ATen/native/cuda/Blas.cpp).
    """
    if str(func) not in _ADDMM:
        return Library.CUBLAS
    bias, _, matrix = args[:3]
    is_bias = (
        kwargs.get("beta", 1) == 1
        and bias.dim() == 1
        and bias.is_contiguous()
        and bias.shape[0] == matrix.shape[1]
        and min(matrix.shape) > 1
        and matrix.dtype in _LT_TYPES
    )
    return Library.CUBLASLT if is_bias else Library.CUBLAS


def blas_bytes(device: DeviceSpec) -> int:
    """Workspace that cuBLAS gets.

    `parseChosenWorkspaceSize`: 32 MiB on compute capability 9, 10 and 12, else
    ``:4096:2:16:8``; on AMD GPUs 128 MiB on gfx94x (MI300) and 32 MiB on others.
    """
    if device.vendor == "amd":
        return (128 if device.name.startswith("mi3") else 32) * _MIB
    major = (device.compute_capability or (0, 0))[0]
    return 32 * _MIB if major in (9, 10, 12) else (2 * 4096 + 8 * 16) * 2**10


def kept_blocks(
    device: DeviceSpec, forward: Iterable[Library], backward: Iterable[Library]
) -> list[int]:
    """Bytes of the workspaces that stay for good, of each thread that has any.

    A thread gets cuBLAS's with either library, and until torch 2.11 one more with
    cuBLASLt. What forward ran so, a plan may run again in backward.

    Args:
        device: The GPU.
        forward: What ran in the thread of forward and optimizer,
        backward: and in that of backward.
    """
    if _is_temporary(device):
        return []
    ran, blocks = set(forward), []
    for libraries in (ran, set(backward)):
        if not libraries:
            continue
        blocks.append(blas_bytes(device))
        is_shared = _compat_gpu.CUBLASLT_SHARES_WORKSPACE or device.vendor == "amd"
        if Library.CUBLASLT in ran | libraries and not is_shared:
            blocks.append(_LT_BYTES)
    return blocks


def temporary_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: DeviceSpec
) -> int:
    """Bytes of the workspace that one call allocates and frees, since torch 2.15."""
    if not _is_temporary(device) or not runs_blas(func) or str(func) in _DOTS:
        return 0
    is_lt = library_of(func, args, kwargs) is Library.CUBLASLT
    return _LT_BYTES if is_lt else blas_bytes(device)


def _is_temporary(device: DeviceSpec) -> bool:
    return device.vendor != "amd" and not _compat_gpu.cublas_keeps_workspaces()
