"""Ambient state of a function, restored when the function runs a second time.

Random states, autocast, kernels of attention, buffers and plain attributes of modules:
the second run sees them as the first one did, and leaves them as they are by then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

from autosac import _compat
from autosac._compat_settings import all_settings, with_settings
from autosac.checkpointing.module_attributes import Snapshots


class _Thread(threading.local):
    """Whether this thread runs an AC unit, and whether it is a rerun.

    Attributes:
        is_inside: It runs a unit: what is called in there is a part of that.
        is_rerun: It does so again: calls in there have been counted.
    """

    is_inside = False
    is_rerun = False


thread = _Thread()


class Surroundings:
    """Snapshot of the ambient state of a function that is about to run.

    Args:
        modules: Those that it reaches.
        devices: Where it may draw random numbers, besides the CPU.
        preserve_rng: Whether random states belong to it.
        generators: Others that it may draw from.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        devices: Iterable[torch.device],
        *,
        preserve_rng: bool,
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self.devices = [d for d in devices if d.type not in ("cpu", "meta")]
        self.present = Present()
        self.modules = list(modules)
        self.attributes = [Snapshots(module).take() for module in self.modules]
        buffers = (buffer for module in self.modules for buffer in module.buffers())
        # Copies: a kernel may change a buffer without raising its version, as that of
        # batch norm does.
        self.buffers = {id(b): (b, b.detach().clone()) for b in buffers}
        self.generators = list(generators)
        self.random = self._random() if preserve_rng else None
        self.random_after: list[torch.Tensor] | None = None

    def _random(self) -> list[torch.Tensor]:
        return [
            torch.get_rng_state(),
            *(torch.get_device_module(d).get_rng_state(d) for d in self.devices),
            *(generator.get_state() for generator in self.generators),
        ]

    def _set_random(self, states: list[torch.Tensor]) -> None:
        own, *others = states
        torch.set_rng_state(own)
        for device, state in zip(self.devices, others, strict=False):
            torch.get_device_module(device).set_rng_state(state, device)
        rest = others[len(self.devices) :]
        for generator, state in zip(self.generators, rest, strict=True):
            generator.set_state(state)

    def finish(self) -> None:
        """Note random states and clear cached casts once the function has run."""
        if self.random is not None:
            self.random_after = self._random()
        # Casts that it made have no graph; what follows must not find them.
        torch.clear_autocast_cache()

    def tensors(self) -> list[torch.Tensor]:
        """Copies of the buffers."""
        return [copy for _, copy in self.buffers.values()]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the ambient state while the function runs again inside.

        Raises:
            RuntimeError: It drew other random numbers than before.
        """
        attributes = [earlier.resume() for earlier in self.attributes]
        random = self._random() if self.random is not None else []
        torch.clear_autocast_cache()
        try:
            self._replace_buffers()
            if self.random is not None:
                self._set_random(self.random)
            with self.present.again():
                yield
            self._check_random()
        finally:
            if self.random is not None:
                self._set_random(random)
            torch.clear_autocast_cache()
            for present in attributes:
                present.restore()

    def _replace_buffers(self) -> None:
        """Replace buffers by copies; restoring attributes puts the buffers back."""
        copies = {key: copy.clone() for key, (_, copy) in self.buffers.items()}
        for root in self.modules:
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) in copies:
                        module._buffers[name] = copies[id(buffer)]

    def _check_random(self) -> None:
        if self.random is None or self.random_after is None:
            return
        for before, now in zip(self.random_after, self._random(), strict=True):
            if not torch.equal(before, now):
                raise RuntimeError(
                    "The recomputation did not draw as many random numbers as the"
                    " forward pass, so the gradients would be wrong: either the"
                    " function depends on something that changed in between, or"
                    " another thread drew from the same generator meanwhile. Pass"
                    " what it depends on as arguments, and draw in one thread."
                )


_NO_WEIGHTS: _compat.CachedWeights = (0, {})
_Autocast = tuple[str, torch.dtype, bool, bool]


def _autocast(device_type: str) -> _Autocast:
    """Arguments of `torch.autocast` that bring back the present state."""
    return (
        device_type,
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_enabled(device_type),
        torch.is_autocast_cache_enabled(),
    )


@cache
def _device_types() -> tuple[str, ...]:
    """Types of devices that autocast may be on for."""
    present = torch.accelerator.current_accelerator()
    return ("cpu", "cuda" if present is None else present.type)


# Kernels of attention that `torch.nn.attention.sdpa_kernel` allows, and how.
_ATTENTION: tuple[tuple[Callable[[], bool], Callable[[bool], Any]], ...] = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


def _attention() -> list[bool]:
    return [is_allowed() for is_allowed, _ in _ATTENTION]


@contextlib.contextmanager
def _with_attention(allowed: list[bool]) -> Iterator[None]:
    before = _attention()
    try:
        for (_, allow), flag in zip(_ATTENTION, allowed, strict=True):
            allow(flag)
        yield
    finally:
        for (_, allow), flag in zip(_ATTENTION, before, strict=True):
            allow(flag)


class Present:
    """Autocast, settings of kernels, the default device and cached weights, as now."""

    __slots__ = ("attention", "autocast", "device", "settings", "weights")

    def __init__(self) -> None:
        self.attention = _attention()
        self.settings = all_settings()
        self.weights = _compat.cached_weights()
        self.autocast = [_autocast(kind) for kind in _device_types()]
        self.device = torch.get_default_device()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore them inside."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(with_settings(self.settings))
            if self.weights != _NO_WEIGHTS or _compat.cached_weights() != _NO_WEIGHTS:
                stack.enter_context(_compat.with_cached_weights(self.weights))
            for autocast in self.autocast:
                if autocast != _autocast(autocast[0]):
                    stack.enter_context(torch.autocast(*autocast))
            if self.attention != _attention():
                stack.enter_context(_with_attention(self.attention))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            yield
