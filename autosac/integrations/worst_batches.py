"""The largest batch that a training will see, made of the first one that comes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from autosac.errors import ArgumentError
from autosac.pytrees import tensors_in


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with all tensors on a device, each with memory of its own."""

    def copied(leaf: Any) -> Any:
        return leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(copied, batch)


def lengthened(inputs: Any, max_length: int) -> Any:
    """A batch of sequences repeated up to a length.

    Every dimension but the first that is as long as its sequences becomes longer: ids,
    masks, labels.

    Args:
        inputs: What a model is called with: ids of shape (batch, length).
        max_length: Length of the longest batch; a batch as long stays as it is.

    Raises:
        ArgumentError: The batch does not tell which dimension is the length.
    """
    lengths = {
        tensor.shape[1]
        for tensor in tensors_in(inputs)
        if tensor.ndim == 2 and not tensor.is_floating_point()
    }
    if len(lengths) != 1:
        raise ArgumentError(
            f"`max_length`={max_length} needs ids of shape (batch, length), and the"
            f" first batch has such integers of {len(lengths)} lengths: pass the"
            " largest batch as `worst_batch`."
        )
    (length,) = lengths
    if length >= max_length:
        return inputs

    def longer(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            for dim in range(1, leaf.ndim):
                if leaf.shape[dim] == length:
                    index = torch.arange(max_length, device=leaf.device) % length
                    leaf = leaf.index_select(dim, index)
        return leaf

    return tree_map(longer, inputs)
