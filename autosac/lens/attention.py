"""Attention as a GPU runs it: the kernel, and the ops that PyTorch puts around it.

The composite is `scaled_dot_product_attention` of attention.cpp in
aten/src/ATen/native/transformers: heads padded to a multiple of 8 for flash attention,
boolean masks turned into ones to add, masks aligned for memory-efficient attention.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from autosac import _compat
from autosac.devices.specs import DeviceSpec
from autosac.lens import attention_choice as choice
from autosac.lens.on_gpu import on_fake_gpu


def attend(
    device: DeviceSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run `scaled_dot_product_attention` as the device does."""
    if {query.dim(), key.dim(), value.dim()} == {3} and _makes_batches():
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
        moved = (query, key, value, attn_mask, dropout_p, is_causal)
        return attend(device, *moved, scale=scale, enable_gqa=enable_gqa).squeeze(0)
    call = choice.Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel = choice.backend(call, device)
    aten = torch.ops.aten
    if kernel == choice.FLASH:
        width = query.shape[-1]
        out: torch.Tensor = aten._scaled_dot_product_flash_attention(
            *(_padded(t, 8) for t in call.tensors),
            dropout_p,
            is_causal,
            False,
            scale=1 / math.sqrt(width) if scale is None else scale,
        )[0]
        return out if out.shape[-1] == width else aten.slice.Tensor(out, -1, 0, width)
    mask = _additive(attn_mask, query.dtype)
    if kernel == choice.MATH:
        given = (query, key, value, mask, dropout_p, is_causal, None)
        composite: torch.Tensor = aten._scaled_dot_product_attention_math(
            *given, scale=scale, enable_gqa=enable_gqa
        )[0]
        return composite
    options: tuple[Any, ...] = (call.needs_gradients, dropout_p, is_causal)
    if kernel == choice.CUDNN:
        fused: torch.Tensor = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, *options, False, scale=scale
        )[0]
        return fused
    if mask is not None:
        mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
    efficient: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, *options, scale=scale
    )[0]
    return efficient


@functools.cache
def _makes_batches() -> bool:
    """Whether this PyTorch turns inputs of three dimensions into a batch of one."""
    with _compat.no_modes():
        probe = torch.empty(2, 2, 2, device="meta")
    seen = _Names()

    def call(*moved: Any) -> None:
        with seen:
            torch.nn.functional.scaled_dot_product_attention(*moved)

    on_fake_gpu(call, (probe, probe, probe), {})
    return "aten.unsqueeze.default" in seen.names


class _Names(_compat.DispatchMode):
    """A dispatch mode that lists the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, [0, missing]) if missing else tensor


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask as one to add: `convert_boolean_attn_mask`."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    return torch.where(mask, zero, -math.inf)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask in rows of a multiple of 8 elements: `preprocess_mask`."""
    rows = (mask.stride(i) % 8 == 0 for i in range(mask.dim() - 1))
    if mask.stride(-1) == 1 and all(rows):
        return mask
    width = mask.shape[-1]
    # At least one more: the rule does not ask whether the width is a multiple.
    padded = torch.nn.functional.pad(mask, [0, 8 - width % 8])
    sliced: torch.Tensor = torch.ops.aten.slice.Tensor(padded, -1, 0, width)
    return sliced
