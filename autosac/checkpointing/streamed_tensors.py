"""A model at work whose saved tensors lie in far memory and come back one by one.

Autograd gets a `_Holder` for each tensor that it would save. Those that the plan names
are sent with their whole storage as they are saved; the program waits for a copy when
some later ones are sent, or forward is over, and the holders let go of their tensors.
Where backward first reads one of them, memory is allocated for it and for those that
are fetched with it, and the copies back begin, that which is read first. What lies in
memory again goes with the last of its holders, which autograd drops.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autosac import _compat_dispatch
from autosac._compat_distributed import unwrapped
from autosac.checkpointing import compiled_parts
from autosac.checkpointing.ambient_state import thread
from autosac.checkpointing.far_places import Place, is_storage
from autosac.checkpointing.running_step import Step
from autosac.checkpointing.stand_ins import StandIn, warn_of_transform
from autosac.checkpointing.tensor_parts import (
    Layout,
    alias_of,
    changed,
    key_of,
    layout_of,
    version_of,
)
from autosac.far_memory import FarMemory
from autosac.units.policies import OpPolicy

_WHOLE = "the whole model"  # its name in messages


class _Storage:
    """A storage that is streamed.

    Attributes:
        place: Its copy; its new memory lives as long as this.
        number: Which of those that the plan names.
        tensor: A tensor in it, until the program lets go of it.
        version: How often that had been changed when it was sent.
        weak: Keeps its address from being used again.
        holders: Of the tensors in it.
        is_away: Holders have let go of their tensors.
    """

    __slots__ = (
        *("__weakref__", "holders", "is_away", "number", "place", "tensor", "version"),
        "weak",
    )

    def __init__(self, tensor: torch.Tensor, number: int, memory: FarMemory) -> None:
        self.place = Place(tensor, memory)
        self.number = number
        self.tensor: torch.Tensor | None = _compat_dispatch.detached(tensor)
        self.version = version_of(tensor)
        self.weak = _compat_dispatch.weak_storage(tensor)
        self.holders: list[weakref.ref[_Holder]] = []
        self.is_away = False

    def take(self, holder: _Holder, tensor: torch.Tensor) -> None:
        """A tensor in it is saved; one that was changed since it was sent stays."""
        if holder.version == self.version:
            holder.storage, holder.layout = self, layout_of(tensor)
            if self.is_away:
                holder.tensor = None
            else:
                self.holders.append(weakref.ref(holder))

    def let_go(self) -> None:
        """Wait for the copy; what was changed meanwhile stays, and is told of then."""
        assert self.tensor is not None
        if self.place.sent is not None:
            self.place.sent.wait()
        is_changed = version_of(self.tensor) != self.version
        self.tensor, self.is_away = None, not is_changed
        for ref in self.holders:
            if self.is_away and (holder := ref()) is not None:
                holder.tensor = None
        self.holders.clear()

    def begin(self) -> None:
        """Allocate memory and begin to copy into it, if that is yet to come."""
        if self.is_away and self.place.tensor is None:
            with _compat_dispatch.untransformed():
                self.place.allocate()
            self.place.begin()

    def fetch(self) -> torch.Tensor:
        """All its elements in new memory."""
        tensor = self.place.fetch()
        if self.place.sent is not None:
            self.place.sent.release()
        return tensor


class _Holder:
    """Stands in for a tensor that autograd saved.

    Attributes:
        call: Which call of the model saved it.
        tensor: It; None while it is away.
        version: How often it had been changed.
        wrap: What makes the tensor that autograd saved of it; None for itself.
        storage: What it lies in, if that is streamed,
        layout: and how.
    """

    __slots__ = (
        *("__weakref__", "call", "layout", "storage", "tensor", "version", "wrap"),
    )

    def __init__(self, call: _Call, tensor: torch.Tensor) -> None:
        self.call = call
        held, self.wrap = unwrapped(tensor)
        if held.requires_grad:  # a result that its own function saves would never go
            held = _compat_dispatch.detached(held)
        self.tensor: torch.Tensor | None = held
        self.version = version_of(held)
        self.storage: _Storage | None = None
        self.layout: Layout = ()

    def read(self) -> torch.Tensor:
        """The tensor, for backward."""
        tensor = self.tensor
        if tensor is None:
            tensor = self.call.fetch(self)
        elif version_of(tensor) != self.version:
            raise changed(tensor, self.version, _WHOLE)
        return tensor if self.wrap is None else self.wrap(tensor)


class _Call:
    """One call of the model.

    Args:
        policy: What is streamed.
        memory: Where it goes.
        device_type: Of the model: what is saved elsewhere does not count.
        followers: Of what the policy names: which are fetched with each of these.

    Attributes:
        is_as_planned: It saves what the plan expects.
    """

    def __init__(
        self,
        policy: OpPolicy,
        memory: FarMemory,
        device_type: str,
        followers: Mapping[int, Sequence[int]],
    ) -> None:
        self._memory = memory
        self._device_type = device_type
        self._policy = policy
        self._followers = followers
        self._numbers = {place: k for k, place in enumerate(policy.streamed)}
        self._num_saved = 0
        self._by_key: dict[int, weakref.ref[_Storage]] = {}
        self._storages: dict[int, weakref.ref[_Storage]] = {}
        self._num_sent = 0
        self._going: list[_Storage] = []
        self.is_as_planned = True

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, forward runs; at its end the program lets go of what it sent."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _Holder.read):
                yield
        finally:
            self._let_go(len(self._policy.streamed))
            self._by_key.clear()
        self.is_as_planned &= self._num_saved == self._policy.num_saved

    def _pack(self, tensor: torch.Tensor) -> _Holder:
        holder = _Holder(self, tensor)
        is_counted = tensor.layout is torch.strided
        is_counted &= not _compat_dispatch.is_number(tensor)
        if is_counted and tensor.device.type == self._device_type:
            self._meet(holder, self._num_saved)
            self._num_saved += 1
        return holder

    def _meet(self, holder: _Holder, place: int) -> None:
        """A tensor is saved that the plan knows of: send its storage, if it says so."""
        tensor = holder.tensor
        assert tensor is not None
        if not is_storage(tensor):
            self.is_as_planned &= place not in self._numbers
            return
        key, number = key_of(tensor), self._numbers.get(place)
        known = self._by_key.get(key)
        storage = None if known is None else known()
        if number is not None:
            expected, nbytes = self._policy.streamed_bytes[number], _nbytes(tensor)
            is_new = storage is None and not isinstance(tensor, torch.nn.Parameter)
            self.is_as_planned &= is_new and nbytes <= expected
            if is_new and not nbytes % tensor.element_size():
                storage = self._send(tensor, number, key)
        if storage is not None:
            storage.take(holder, tensor)

    def _send(self, tensor: torch.Tensor, number: int, key: int) -> _Storage:
        storage = _Storage(tensor, number, self._memory)
        self._by_key[key] = self._storages[number] = weakref.ref(storage)
        self._going.append(storage)
        self._let_go(self._num_sent)
        self._num_sent += 1
        return storage

    def _let_go(self, num_sent: int) -> None:
        """Let go of what goes after so many were sent before the last one."""
        ends, going = self._policy.let_go_with, self._going
        self._going = [one for one in going if ends[one.number] > num_sent]
        for storage in going:
            if ends[storage.number] <= num_sent:
                storage.let_go()

    def fetch(self, holder: _Holder) -> torch.Tensor:
        """A tensor of which the storage is away, or has come back."""
        storage = holder.storage
        assert storage is not None
        storage.begin()
        number = storage.number
        if number in self._storages:  # its first read
            del self._storages[number]
            for other in self._followers.get(number, ()):
                ref = self._storages.get(other)
                if ref is not None and (follower := ref()) is not None:
                    follower.begin()
        tensor = alias_of(storage.fetch(), holder.layout)
        _compat_dispatch.set_version(tensor, holder.version)
        return tensor


class StreamedForward(StandIn):
    """Stands in for a whole model's ``forward`` and streams what it saves.

    Args:
        module: The model.
        policy: What is streamed.
        step: What is shared by the units of the model.
    """

    is_unit = True

    def __init__(self, module: torch.nn.Module, policy: OpPolicy, step: Step) -> None:
        super().__init__(module)
        self.policy = policy
        self.step = step
        self.followers: dict[int, list[int]] = {}
        for other, first in enumerate(policy.fetched_with):
            self.followers.setdefault(first, []).append(other)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = self.__wrapped__
        is_planned = self.module.training == self.policy.training
        if not (is_planned and torch.is_grad_enabled()) or thread.is_rerun:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            compiled_parts.refuse(self.policy.fqn)
        if _compat_dispatch.is_transformed():
            warn_of_transform(_WHOLE)
            return forward(*args, **kwargs)
        kinds = {tensor.device.type for tensor in self.module.parameters()}
        device_type = "cuda" if "cuda" in kinds else "cpu"
        call = _Call(self.policy, self.step.memory, device_type, self.followers)
        with call.running():
            output = forward(*args, **kwargs)
        if not call.is_as_planned:
            warnings.warn(
                "The model saves other tensors for backward than its plan expects:"
                " what the plan does not know stays on the device, and the planned"
                " peak no longer holds. Plan again with inputs like these.",
                stacklevel=2,
            )
        return output


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
