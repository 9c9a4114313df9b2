"""The account of memory that a recorder keeps: storages, their births and deaths.

Of a distributed tensor counts what this rank holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autosac import _compat_fakes
from autosac._compat_distributed import local
from autosac.devices.cuda_matmuls import Library, kept_blocks
from autosac.devices.specs import DeviceSpec
from autosac.pytrees import module_tensors
from autosac.quantities import rounded_up
from autosac.step.tape import Storage


class Account:
    """Storages on one type of device, each counted once, and a clock of events.

    Args:
        device_type: Only storages on this type of device count.
        granularity_bytes: Allocations are rounded up to a multiple of this.
    """

    def __init__(self, device_type: str, granularity_bytes: int) -> None:
        self.device_type = device_type
        self.granularity_bytes = granularity_bytes
        self.clock = 0
        self.live_bytes = 0  # of what the step has made
        self.nbytes: list[int] = []
        self.categories: list[str] = []
        self.born: list[int] = []
        self.died: list[int | None] = []
        self.ids: dict[int, int] = {}
        self.watchers: dict[int, weakref.ref[Any]] = {}
        self.originals: dict[int, int] = {}
        self.counts_foreign = False
        self.users: set[int] = set()  # copies of tensors of theirs
        self.exempted: dict[int, Any] = {}  # kept, so that no address is used twice

    def tick(self) -> int:
        """Advance the clock by one event."""
        self.clock += 1
        return self.clock

    def register(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count tensors that exist before the step."""
        for tensor in tensors:
            if self._counts(tensor):
                self._index(tensor, 0, category)

    def register_left(self, before: Account, addresses: Iterable[int]) -> None:
        """Count what earlier steps have left to anybody, such as a queue of a loss."""
        for address in addresses:
            storage = before.watchers[address]()
            if storage is not None:
                self._index_of(storage, 0, "buffer")

    def register_copies(
        self,
        originals: Iterable[torch.Tensor],
        copies: Iterable[torch.Tensor],
        category: str,
    ) -> None:
        """Count copies of the user's tensors, each with the memory of its original.

        Where the user's code meets an original itself, it counts as its copy.
        """
        for original, copy in zip(originals, copies, strict=True):
            if not self._counts(copy):
                continue
            index = self._index(copy, 0, category)
            storage = local(original).untyped_storage()
            first = self.originals.setdefault(storage._cdata, index)
            self.users.add(index)
            self.nbytes[index] = (
                self._rounded(storage.nbytes()) if first == index else 0
            )
            self.ids.setdefault(storage._cdata, first)

    def grow(self, resized: Iterable[tuple[torch.Tensor, int]]) -> bool:
        """Count tensors as large as they become, all of their time.

        Returns:
            Whether one was there before the step, which it finds larger from then on.
        """
        is_older = False
        for tensor, num_bytes in resized:
            index = self._index(tensor, 0, "input") if self._counts(tensor) else None
            if index is not None and self._rounded(num_bytes) > self.nbytes[index]:
                self.nbytes[index] = self._rounded(num_bytes)
                is_older = is_older or not self.born[index]
        return is_older

    def forget(self, tensor: torch.Tensor) -> bool:
        """Take a tensor out of the account again, unless it is one of the user's.

        Returns:
            Whether it was taken out.
        """
        index = self._index(tensor, 0, "temporary")
        if index in self.users:
            return False
        self.nbytes[index] = 0
        return True

    def adopt(self, other: Account, category: str) -> None:
        """Count what another account has of storages that are alive."""
        for key, watcher in list(other.watchers.items()):
            storage = watcher()
            if storage is not None and key not in self.exempted:
                self._index_of(storage, 0, category)

    def exempt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave tensors out of the account: they lie on the CPU in a real run."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            self.exempted[storage._cdata] = storage

    def are_exempt(self, tensors: list[torch.Tensor]) -> bool:
        """Whether there are tensors, and none of them counts."""
        exempted = (t.untyped_storage()._cdata in self.exempted for t in tensors)
        return bool(tensors) and all(exempted)

    def indices_read(
        self, tensors: list[torch.Tensor], *, strided: bool
    ) -> tuple[int, ...]:
        """Indices of the storages that an op reads."""
        first_new = len(self.nbytes)
        indices = self._indices(tensors, 0, "input", strided=strided)
        if len(self.nbytes) > first_new:
            self.leave_out_foreign(tensors, first_new)
        return indices

    def leave_out_foreign(self, tensors: Iterable[torch.Tensor], first: int) -> None:
        """Do not count memory that is not PyTorch's, as that of NumPy's arrays.

        Unless tensors of the CPU stand for a GPU's, to which it may be copied.

        Args:
            tensors: What an op reads or makes.
            first: Only storages from this index on, which were not known before.
        """
        for tensor in () if self.counts_foreign else tensors:
            if _compat_fakes.is_fake(tensor) or not self._counts(tensor):
                continue
            storage = local(tensor).untyped_storage()
            index = self.ids[storage._cdata]
            if index >= first and not storage.resizable():
                self.live_bytes -= self.nbytes[index] if self.born[index] else 0
                self.nbytes[index] = 0

    def rename(self, tensor: torch.Tensor | None, category: str) -> None:
        """Change the category of a tensor's storage."""
        if tensor is not None and self._counts(tensor):
            self.categories[self._index(tensor, 0, category)] = category

    def storages_of(self, tensors: Iterable[Any]) -> tuple[int, ...]:
        """Indices of the storages of those tensors that count."""
        return self._indices([t for t in tensors if t is not None], 0, "temporary")

    def deaths(self) -> list[int]:
        """Tick at which each storage died, the last one if it did not.

        Storages that die with nothing in between do so in the order of their indices.
        Really it may be that of their addresses, in which autocast lets go of its
        copies of weights: that differs from run to run, and means nothing.
        """
        died = [self.clock if tick is None else tick for tick in self.died]
        seen = [i for i, tick in enumerate(self.died) if tick is not None]
        for group in _following_each_other(sorted(seen, key=died.__getitem__), died):
            ticks = [died[index] for index in group]
            for index, tick in zip(sorted(group), ticks, strict=True):
                died[index] = tick
        return died

    def original_parameter(self, tensors: list[torch.Tensor]) -> tuple[int, ...] | None:
        """Shape of the first of the user's own parameters among tensors, if any."""
        for tensor in tensors:
            if not _compat_fakes.is_fake(tensor) and self._counts(tensor):
                index = self.originals.get(tensor.untyped_storage()._cdata)
                if index is not None and self.categories[index] == "parameter":
                    return tuple(tensor.shape)
        return None

    def left_alive(self, model: torch.nn.Module) -> set[int]:
        """Addresses of storages that forward made and somebody still holds.

        And of those that backward made, as a hook does, and a module holds.
        """
        held = (local(tensor) for tensor in module_tensors(model))
        kept = {t.untyped_storage()._cdata for t in held if t.layout is torch.strided}
        return {
            address
            for address, index in self.ids.items()
            if self.born[index]
            and (
                self.categories[index] == "activation"
                or (self.categories[index] == "temporary" and address in kept)
            )
        }

    def _counts(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.device.type == self.device_type
            and not (
                self.exempted
                and local(tensor).untyped_storage()._cdata in self.exempted
            )
        )

    def _index(self, tensor: torch.Tensor, born: int, category: str) -> int:
        """Index of a tensor's storage; an unknown one is added."""
        return self._index_of(local(tensor).untyped_storage(), born, category)

    def _index_of(self, storage: Any, born: int, category: str) -> int:
        key = storage._cdata
        index = self.ids.get(key)
        if index is None:
            index = self.ids[key] = len(self.nbytes)
            self.nbytes.append(self._rounded(storage.nbytes()))
            self.live_bytes += self.nbytes[index] if born else 0
            self.categories.append(category)
            self.born.append(born)
            self.died.append(None)
            self._watch(storage, self._on_death, index)
        return index

    def _rounded(self, num_bytes: int) -> int:
        return rounded_up(num_bytes, self.granularity_bytes)

    def _watch(self, storage: Any, on_death: Callable[[int], None], index: int) -> None:
        key = storage._cdata

        def forget(_: Any) -> None:
            del self.ids[key], self.watchers[key]
            on_death(index)

        self.watchers[key] = weakref.ref(storage, forget)

    def _on_death(self, index: int) -> None:
        self.live_bytes -= self.nbytes[index] if self.born[index] else 0
        self.died[index] = self.tick()

    def _indices(
        self,
        tensors: list[torch.Tensor],
        born: int,
        category: str,
        *,
        strided: bool = False,
    ) -> tuple[int, ...]:
        """Indices of storages, each once; knowing that all are strided saves time."""
        indices = []
        for tensor in tensors:
            index = None
            if strided:
                key = tensor.untyped_storage()._cdata
                if key in self.exempted:
                    continue
                index = self.ids.get(key)
            if index is None and self._counts(tensor):
                index = self._index(tensor, born, category)
            if index is not None:
                indices.append(index)
        return tuple(indices) if len(indices) < 2 else tuple(dict.fromkeys(indices))


def blas_storages(
    target: DeviceSpec | None, products: set[tuple[str, Library]], end: int
) -> tuple[Storage, ...]:
    """What the threads that run matrix products hold all the time.

    Args:
        target: The GPU that tensors stand for.
        products: Phases in which there are such products, and what ran them.
        end: Last tick of the step.
    """
    if target is None:
        return ()
    backward = {library for phase, library in products if phase == "backward"}
    forward = {library for phase, library in products if phase != "backward"}
    return tuple(
        Storage(
            nbytes=target.allocated_bytes(nbytes),
            category="workspace",
            born=0,
            died=end,
        )
        for nbytes in kept_blocks(target, forward, backward)
    )


def _following_each_other(items: list[int], ticks: list[int]) -> list[list[int]]:
    """Items in the order of their ticks, cut where other events come in between."""
    groups: list[list[int]] = []
    for item in items:
        if groups and ticks[item] == ticks[groups[-1][-1]] + 1:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
