"""Random states: a random op that runs again draws the numbers that it drew before."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from autosac import _compat_fakes
from autosac.pytrees import tensors_in


def _generator(args: Any, kwargs: Any) -> torch.Generator | None:
    """The generator that an op draws from; None for fake tensors."""
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):
        return generator
    tensor = next(tensors_in((args, kwargs)), None)
    if tensor is not None and _compat_fakes.is_fake(tensor):
        return None
    device = torch.device(kwargs.get("device") or "cpu")
    if tensor is not None:
        device = tensor.device
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


def random_state(args: Any, kwargs: Any) -> bytes | None:
    generator = _generator(args, kwargs)
    if generator is None:
        return None
    state = generator.get_state()
    # Not a tensor: the random state must not count as the model's memory.
    return ctypes.string_at(state.data_ptr(), state.nbytes)


class RandomState:
    """Gives an op an earlier random state and restores the present one."""

    def __init__(self, state: bytes, args: Any, kwargs: Any) -> None:
        self.generator = _generator(args, kwargs)
        self.state = state

    def __enter__(self) -> None:
        assert self.generator is not None
        self.present = self.generator.get_state()
        earlier = torch.frombuffer(bytearray(self.state), dtype=torch.uint8)
        self.generator.set_state(earlier)

    def __exit__(self, *_: object) -> None:
        assert self.generator is not None
        self.generator.set_state(self.present)
