"""Ask fake GPU tensors what an op returns, where no GPU is."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from autosac import _compat, _compat_fakes


def on_fake_gpu(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on fake GPU tensors in place of its tensors; no backward.

    Fake tensors that say "cuda" run forward without a GPU, and some fake kernels give
    their results another layout or type than on the CPU.
    """
    gpu = torch.device("cuda", 0)
    with _compat.no_modes(), torch.no_grad():
        mode = _compat_fakes.fake_mode()

        def moved(value: Any) -> Any:
            if isinstance(value, torch.device):
                return gpu
            if not isinstance(value, torch.Tensor):
                return value
            meta = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            return _compat_fakes.as_fake(mode, meta, gpu)

        with mode:
            return func(*tree_map(moved, args), **tree_map(moved, kwargs))
