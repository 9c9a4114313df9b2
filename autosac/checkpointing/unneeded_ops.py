"""Ops that a plan expects nobody to need, in a unit that departs behind them.

What a unit does after the last tensor that autograd saves there is not recorded. If the
unit then does more than its plan expects, it runs again as Python code, which runs
these ops as well: on what they read, and with what they drew.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from autosac import _compat_dispatch, _compat_fakes
from autosac._compat_dispatch import Traits
from autosac.checkpointing.random_states import RandomStates, random_states
from autosac.checkpointing.tensor_parts import Result, version_of
from autosac.pytrees import tensors_in
from autosac.units.policies import DETACHED


class Passed:
    """An op that the plan expects nobody to need.

    Args:
        traits: What it does.
        args: Its positional arguments, before it runs.
        kwargs: Its keyword arguments.

    Attributes:
        versions: How often each of its tensors had been changed.
        results: What it returned, if it changes nothing.
    """

    __slots__ = ("_drawn", "_states", "_storages", "results", "versions")

    def __init__(self, traits: Traits, args: Any, kwargs: Any) -> None:
        self.versions = [version_of(tensor) for tensor in tensors_in((args, kwargs))]
        self.results: list[Result] = []
        self._storages: list[weakref.ref[Any]] = []
        self._drawn: list[bytes] | None = None
        self._states: RandomStates | None = None  # else what it drew is what it made
        if traits.is_foreign:
            self._states = random_states(traits, args, kwargs)

    def note(self, traits: Traits, out: Any) -> None:
        """Keep what the op drew, as bytes: tensors would count as model memory."""
        if self._states is not None:
            self._states.settle()
        tensors = list(tensors_in((out,)))
        if traits.only_makes:
            self.results = [Result(DETACHED, 0, tensor) for tensor in tensors]
            storages = (tensor.untyped_storage() for tensor in tensors)
            self._storages = [weakref.ref(storage) for storage in storages]
        is_own = traits.is_random and not traits.is_foreign
        if is_own and not any(map(_compat_fakes.is_fake, tensors)):
            self._drawn = [_bytes_of(tensor) for tensor in tensors]

    def alive(self) -> Iterator[tuple[Result, torch.UntypedStorage]]:
        """Results that somebody holds, and their storages."""
        for result, ref in zip(self.results, self._storages, strict=True):
            if (storage := ref()) is not None:
                yield result, storage

    def again(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op again, with what it drew."""
        if self._states is not None:
            return self._states.again(func, args, kwargs)
        if self._drawn is None:
            return func(*args, **kwargs)
        present = random_states(_compat_dispatch.traits(func), args, kwargs)
        assert present is not None
        out = present.again(func, args, kwargs)  # which it does not move
        for tensor, drawn in zip(tensors_in((out,)), self._drawn, strict=True):
            if drawn:
                values = torch.frombuffer(bytearray(drawn), dtype=tensor.dtype)
                tensor.copy_(values.view(tensor.shape))
        return out


def _bytes_of(tensor: torch.Tensor) -> bytes:
    on_cpu = tensor.detach().cpu().contiguous()
    return ctypes.string_at(on_cpu.data_ptr(), on_cpu.nbytes) if on_cpu.numel() else b""
