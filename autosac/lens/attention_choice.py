"""Which attention kernel a GPU runs.

The order and every condition are facts of aten/src/ATen/native/transformers, files
cuda/sdp_utils.cpp and sdp_utils_cpp.h, as of torch 2.10 and of main in 2026:

    1. cuDNN, first on compute capability 9.x and 10.x if cuDNN is newer than 9.15.0
       (`check_prefer_cudnn_attention`), else last
    2. flash: 8.0 and newer, half types, no mask, equal head sizes up to 256, causal
       only for square scores
    3. memory-efficient: any NVIDIA GPU; head sizes that are multiples of 8 (half
       types) or 4 (float32)
    4. math: a composite of matmul and softmax

HIP builds have no cuDNN; flash and memory-efficient attention come from AOTriton.
Nested tensors, float8 and FlashAttention-3 are not considered.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from autosac import _compat_gpu
from autosac.devices.specs import DeviceSpec
from autosac.errors import UnsupportedError

CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"

_HALF = (torch.float16, torch.bfloat16)
# The first versions by which cuDNN attention is preferred, and has heads up to 256.
_CUDNN_PREFERRED_AFTER = 91500
_CUDNN_WIDE_HEADS_AFTER = 92200
_CUDNN_MOST_BATCH_OR_HEADS = 65535


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one attention call that decide about its kernel."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value

    @property
    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


def backend(call: Call, device: DeviceSpec) -> str:
    """The kernel that the device runs: one of the constants of this module.

    Raises:
        RuntimeError: The user switched off all kernels that could run it.
    """
    usable = {
        CUDNN: torch.backends.cuda.cudnn_sdp_enabled() and _cudnn(call, device),
        FLASH: torch.backends.cuda.flash_sdp_enabled() and _flash(call, device),
        EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled()
        and _efficient(call, device),
        MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    for name in _order(device):
        if usable[name]:
            return name
    raise RuntimeError(
        f"No attention kernel that is switched on can run this call on {device.name};"
        " switch on another in `torch.nn.attention.sdpa_kernel`."
    )


def _order(device: DeviceSpec) -> tuple[str, ...]:
    names = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
    order = _compat_gpu.sdp_priority_order()
    backends = tuple(names[i] for i in order if i in names)
    if order == _compat_gpu.DEFAULT_SDP_ORDER and _prefers_cudnn(device):
        return (CUDNN, *(name for name in backends if name != CUDNN))
    return backends


def cudnn_version() -> int:
    """Version of cuDNN: the installed one, or what PyTorch's CUDA wheels ship."""
    installed = torch.backends.cudnn.version()
    if installed is not None:
        return int(installed)
    return _compat_gpu.WHEEL_CUDNN


def _capability(device: DeviceSpec) -> tuple[int, int]:
    """Compute capability; that of an AMD GPU is below all others."""
    return device.compute_capability or (0, 0)


def _prefers_cudnn(device: DeviceSpec) -> bool:
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    new_enough = cudnn_version() > _CUDNN_PREFERRED_AFTER
    return (
        device.vendor == "nvidia" and new_enough and _capability(device)[0] in (9, 10)
    )


# --- conditions -----------------------------------------------------------------


def _flash(call: Call, device: DeviceSpec) -> bool:
    head = call.query.shape[-1]
    return (
        _dense(call, gqa=True, one_wide=True)
        and call.mask is None
        and len({t.shape[-1] for t in call.tensors}) == 1
        and head <= (512 if device.vendor == "amd" else 256)
        and (not call.is_causal or call.query.shape[-2] == call.key.shape[-2])
        and _half_types(call, device)
        and (device.vendor == "amd" or _capability(device) >= (8, 0))
        and (not call.needs_gradients or _flash_differentiates(call, device))
    )


def _flash_differentiates(call: Call, device: DeviceSpec) -> bool:
    """Whether flash attention has a backward kernel for the head size of a call.

    Compute capabilities 8.6 to 8.9 and 12.x lack some.
    """
    capability = _capability(device)
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if device.vendor == "amd" or not small:
        return True
    head = call.query.shape[-1]
    return head <= 192 or (call.dropout_p == 0 and head > 224)


def _efficient(call: Call, device: DeviceSpec) -> bool:
    half = call.query.dtype in _HALF
    alignment = _gemm_alignment(half, device)
    query, key, value = call.tensors
    types: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
    if device.vendor == "amd" or _capability(device) >= (8, 0):
        types += (torch.bfloat16,)
    step = alignment * query.element_size()
    new = device.vendor == "nvidia" and _capability(device) >= (8, 0)
    return (
        _dense(call, gqa=_efficient_has_gqa(device), one_wide=False)
        and query.shape[-1] == key.shape[-1]
        and all(t.shape[-1] > 0 and t.shape[-1] % alignment == 0 for t in call.tensors)
        and len({t.dtype for t in call.tensors}) == 1
        and query.dtype in types
        and not (device.vendor == "amd" and value.shape[-1] != query.shape[-1])
        and not (
            new
            and any(
                t.storage_offset() * t.element_size() % step
                for t in call.tensors
                if t.numel()
            )
        )
    )


def _efficient_has_gqa(device: DeviceSpec) -> bool:
    """`supports_gqa` in sdp_utils.cpp; AMD's kernels lack it."""
    return device.vendor == "nvidia" and _compat_gpu.EFFICIENT_ATTENTION_HAS_GQA


def _gemm_alignment(half: bool, device: DeviceSpec) -> int:
    """Elements that head sizes must be multiples of (`minimum_gemm_alignment`)."""
    if device.vendor == "amd" or _capability(device) >= (8, 0):
        return 8 if half else 4
    return 8 if half and _capability(device) >= (7, 0) else 1


def _cudnn(call: Call, device: DeviceSpec) -> bool:
    if device.vendor != "nvidia" or _capability(device) < (8, 0):
        return False
    version = cudnn_version()
    query, key, value = call.tensors
    no_dropout = call.dropout_p == 0
    return (
        _dense(call, gqa=True, one_wide=True, same_kv_heads=False)
        and not torch.are_deterministic_algorithms_enabled()
        and _half_types(call, device)
        and (call.mask is None or call.mask.dim() in (2, 4))
        and (call.mask is None or not call.mask.requires_grad)
        and (call.dropout_p * 16).is_integer()
        >= _compat_gpu.CUDNN_DROPOUT_IN_SIXTEENTHS
        and (no_dropout or not 91100 < version < 91400)
        and max(query.shape[:2]) <= _CUDNN_MOST_BATCH_OR_HEADS
        and query.shape[-1] % 8 == 0
        and value.shape[-1] % 8 == 0
        and key.shape[-2] != 1
        and (no_dropout or query.shape[-2] != 1)
        and _cudnn_heads(call, device, version)
    )


def _cudnn_heads(call: Call, device: DeviceSpec, version: int) -> bool:
    heads = (call.query.shape[-1], call.value.shape[-1])
    if max(heads) <= 128:
        return True
    major, minor = _capability(device)
    if not ((major, minor) == (9, 0) or major == 10):
        return False
    if version > _CUDNN_WIDE_HEADS_AFTER:
        if call.needs_gradients:
            return heads in ((192, 128), (256, 256))
        return max(heads) <= 256
    return version >= 91100 and heads == (192, 128)


def _half_types(call: Call, device: DeviceSpec) -> bool:
    types = {t.dtype for t in call.tensors}
    old = device.vendor == "nvidia" and _capability(device) < (8, 0)
    return len(types) == 1 and types <= ({torch.float16} if old else set(_HALF))


def _dense(
    call: Call, *, gqa: bool, one_wide: bool, same_kv_heads: bool = True
) -> bool:
    """Checks of shapes and strides that all fused kernels share."""
    query, key = call.query, call.key
    if any(t.dim() != 4 for t in call.tensors):
        return False
    if len({t.shape[0] for t in call.tensors}) > 1:
        return False
    if not query.shape[-2] or not key.shape[-2]:
        return False
    unit = all(t.stride(-1) == 1 for t in call.tensors)
    if not (unit or (one_wide and query.shape[-1] == 1)):
        return False
    if call.mask is not None and call.mask.stride(-1) != 1:
        return False
    heads, key_heads, value_heads = (t.shape[1] for t in call.tensors)
    if call.enable_gqa and gqa:
        if same_kv_heads and key_heads != value_heads:
            return False
        return heads % key_heads == 0 and heads % value_heads == 0
    if heads == key_heads == value_heads:
        return True
    if key_heads == value_heads == 1 and _compat_gpu.EFFICIENT_ATTENTION_HAS_GQA:
        raise UnsupportedError(
            "Attention that broadcasts one key head without `enable_gqa` cannot be"
            " planned for a GPU that is not present; pass `enable_gqa=True`."
        )
    return False
