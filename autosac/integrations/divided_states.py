"""Optimizers of which every process keeps a part of the state (ZeRO).

One plan is for all processes: for the part that takes most, whichever process plans.
"""

from __future__ import annotations

from typing import Any

import torch

from autosac._compat_distributed import shards


def largest_parts(optimizer: Any) -> list[Any]:
    """Those parts of an optimizer of which one takes most of all, in any step.

    Which one that is depends on what a step makes besides: as much as the part has, or
    as its largest parameter.

    Args:
        optimizer: What a process steps, or None.

    Returns:
        Optimizers, that with most parameters first; what was passed if it has no parts.
    """
    parts = shards(optimizer)
    if not parts:
        return [optimizer]
    largest: list[torch.optim.Optimizer] = []
    most_bytes = -1
    for part in sorted(parts, key=lambda part: -sum(_sizes(part))):
        part_bytes = max(_sizes(part), default=0)
        if part_bytes > most_bytes:
            largest.append(part)
            most_bytes = part_bytes
    return largest


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of the parameters that an optimizer trains."""
    return [
        parameter.nbytes
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
