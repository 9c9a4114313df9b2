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


def run_op(func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
    """Run an op on fakes, or for real if all it reads is real and small.

    Masks, positions and lengths keep their values that way, so that the step takes
    the branches that it takes on this input, and finds its data-dependent shapes. So
    does a random number that reads nothing, such as `torch.rand([])` for layer drop.
    """
    if any(map(_compat.is_fake, inputs)):
        return _compat.with_real_layouts(func, args, func(*args, **kwargs))
    try:
        out = func(*args, **kwargs)
    except _compat.TRACE_ERRORS:
        if not inputs:
            raise
    else:
        if not inputs and _compat.is_random(func) and out.ndim == 0:
            with _compat.no_modes():
                return func(*args, **kwargs)
        large = any(t.numel() > _MOST_KNOWN_VALUES for t in tensors_in((out,)))
        values = inputs or all(keeps_values(t) for t in tensors_in((out,)))
        if large or not values or _compat.is_random(func):
            return out
    with _compat.no_modes():
        return func(*args, **kwargs)
