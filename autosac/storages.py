"""Storages behind tensors, and what they take."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autosac import _compat_dispatch
from autosac._compat_distributed import local
from autosac.quantities import rounded_up


def storage_bytes(
    tensors: Iterable[torch.Tensor],
    *,
    device: torch.device | str | None = None,
    granularity_bytes: int = 1,
) -> int:
    """Bytes of the distinct storages behind ``tensors``.

    Args:
        tensors: Views and repeats count once; sparse tensors by their parts,
            distributed ones by what this rank holds.
        device: Count only this one, unless None.
        granularity_bytes: Each storage is rounded up to a multiple of it.
    """
    storages = storages_of(tensors, device)
    return sum(rounded_up(s.nbytes(), granularity_bytes) for s in storages)


def storages_of(
    tensors: Iterable[torch.Tensor], device: torch.device | str | None
) -> Iterable[torch.UntypedStorage]:
    """The distinct storages behind tensors; on one device only, unless None."""
    wanted = None if device is None else torch.device(device)
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for part in dense_parts(tensor):
            if wanted is None or part.device == wanted:
                storage = part.untyped_storage()
                storages[storage._cdata] = storage
    return storages.values()


def addresses_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Addresses of the storages of strided tensors that are not made of others."""
    return {
        int(tensor.untyped_storage()._cdata)
        for tensor in tensors
        if tensor.layout is torch.strided and _compat_dispatch.is_plain(type(tensor))
    }


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a rank holds of a tensor; of a sparse one its indices and values."""
    tensor = local(tensor.detach())
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    return (tensor,)
