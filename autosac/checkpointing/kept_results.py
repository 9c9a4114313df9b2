"""Results that a departing unit keeps, as no rerun could make them again.

A unit may read a buffer, change it, and depart behind that. Run again as Python code,
it finds the buffer changed. What backward needs of the ops before the departure is
saved or made from other tensors; a plan takes care of that. But the ops behind it may
read what nobody was expected to need. All results that depend on a changed tensor and
that the unit still holds as it departs are kept, and put where a rerun has made them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autosac import _compat, _compat_dispatch
from autosac.checkpointing.call_arguments import leaves
from autosac.checkpointing.op_records import Call, Record
from autosac.checkpointing.tensor_parts import (
    Part,
    Result,
    copy_of,
    elements,
    key_of,
    version_of,
)
from autosac.checkpointing.unneeded_ops import Passed


class KeptResult:
    """The memory of a result as it was when a unit departed.

    Args:
        result: The result.
        storage: It.
    """

    __slots__ = ("_tensor", "_version", "result")

    def __init__(self, result: Result, storage: torch.UntypedStorage) -> None:
        self.result = result
        whole = result.whole()
        if whole is None:  # only views are left, which count changes by themselves
            self._tensor = copy_of(_tensor_in(storage, result.dtype))
        else:
            self._tensor = _compat_dispatch.detached(whole)
        self._version = version_of(self._tensor)

    @property
    def key(self) -> int:
        """Address of the storage, while nothing was copied."""
        return key_of(self._tensor)

    def protect(self) -> None:
        """Copy the memory, as it is about to change."""
        self._tensor = copy_of(self._tensor)
        self._version = version_of(self._tensor)

    def put(self, storage: torch.UntypedStorage) -> bool:
        """Write to a storage what the memory held.

        Returns:
            Whether that is still there.
        """
        if version_of(self._tensor) != self._version:
            return False
        source = elements(self._tensor)
        with _compat.no_modes(), torch.no_grad():
            _tensor_in(storage, source.dtype).copy_(source)
        return True


def _tensor_in(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """All elements of a storage."""
    whole = torch.empty(0, dtype=dtype, device=storage.device)
    size = (storage.nbytes() // dtype.itemsize,)
    return whole.set_(storage, 0, size, (1,))


def results_to_keep(record: Record, passed: Mapping[int, Passed]) -> list[KeptResult]:
    """Results of a unit that depend on what it has changed, as far as they are alive.

    Args:
        record: What the unit did so far.
        passed: And what nobody was expected to need.
    """
    depending = _stale(record)
    alive = [entry for entry in record.alive() if id(entry[0]) in depending]
    alive += [entry for op in passed.values() for entry in op.alive()]
    return [KeptResult(result, storage) for result, storage in alive]


def _stale(record: Record) -> set[int]:
    """Results that a rerun would make of changed tensors, by identity."""
    stale: set[int] = set()
    for call in record.calls:
        parts = list(leaves([call.args, call.kwargs], Part))
        if any(id(p.source) in stale or record.is_changed(p) for p in parts):
            stale.update(map(id, (*filter(None, call.results), *_written(call))))
    return stale


def _written(call: Call) -> list[Result]:
    """Results that an op changed."""
    targets = _compat_dispatch.traits(call.func).targets(tuple(call.args), call.kwargs)
    sources = (part.source for part in leaves(targets, Part))
    return [source for source in sources if isinstance(source, Result)]


class Memory:
    """Where results lie in a rerun."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[Any]] = {}

    def note(self, result: Result, tensor: torch.Tensor) -> None:
        """Remember in which storage a result lies."""
        self._storages[id(result)] = weakref.ref(tensor.untyped_storage())

    def put(self, kept: Iterable[KeptResult]) -> list[int]:
        """Put kept results where a rerun has made them; the keys of their storages."""
        keys = []
        for entry in kept:
            ref = self._storages.get(id(entry.result))
            storage = None if ref is None else ref()
            if storage is not None and entry.put(storage):
                keys.append(storage._cdata)
        return keys
