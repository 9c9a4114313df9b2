"""Which tensors keep their values while a step is traced."""

from __future__ import annotations

from typing import Any

import torch

from autosac import _compat
from autosac.pytrees import tensors_in

_MOST_KNOWN_VALUES = 2**22  # elements of a tensor that stays real while tracing


def keeps_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the user's stays real: steps branch on such values."""
    return (
        not tensor.is_meta
        and not tensor.is_floating_point()
        and not tensor.is_complex()
        and tensor.numel() <= _MOST_KNOWN_VALUES
    )


def run_op(
    func: Any,
    args: Any,
    kwargs: Any,
    inputs: list[torch.Tensor],
    *,
    on_gpu: bool = False,
) -> Any:
    """Run an op on fakes, or for real if all it reads is real and small.

    Masks, positions and lengths keep their values that way, so that the step takes
    the branches that it takes on this input, and finds its data-dependent shapes.
    """
    if any(map(_compat.is_fake, inputs)):
        types = _compat.with_gpu_types if on_gpu else _compat.with_real_types
        return types(func, args, func(*args, **kwargs))
    try:
        out = func(*args, **kwargs)
    except _compat.TRACE_ERRORS:
        if not inputs:
            raise
    else:
        large = any(t.numel() > _MOST_KNOWN_VALUES for t in tensors_in((out,)))
        values = inputs or all(keeps_values(t) for t in tensors_in((out,)))
        if large or not values or _compat.is_random(func):
            return out
    with _compat.no_modes():
        return func(*args, **kwargs)
