"""Ops that make the memory of a tensor larger that was there before."""

from __future__ import annotations

from typing import Any

import torch

_RESIZES = (torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default)
_OBSERVES = torch.ops.aten._fused_moving_avg_obs_fq_helper.default
RESIZING_IDS = frozenset(map(id, (*_RESIZES, _OBSERVES)))


def resized(func: Any, args: tuple[Any, ...]) -> list[tuple[torch.Tensor, int]]:
    """Tensors with the bytes that they have after an op of `RESIZING_IDS`.

    That which fakes quantization, and observes what it quantizes, makes its statistics
    as long as there are channels when it runs first, which its fake kernel does not
    (aten/src/ATen/native/quantized: cpu, cuda/FusedObsFakeQuant.*, torch 2.15).
    """
    if func is not _OBSERVES:
        return [(args[0], args[0].untyped_storage().nbytes())]
    weight, axis, is_per_channel = args[0], args[10], args[11:12] == (True,)
    if not is_per_channel:
        return []
    return [(t, weight.shape[axis] * t.element_size()) for t in args[3:7]]
