"""Random states: a random op that runs again draws the numbers that it drew before."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from autosac import _compat_fakes
from autosac._compat_dispatch import Traits
from autosac.checkpointing.first_reruns import FirstCall, first_call, is_capturing
from autosac.pytrees import tensors_in
from autosac.step.random_streams import OtherStreams
from autosac.step.reaching import op_generators


class RandomStates:
    """Where the streams were that an op may draw from, before it runs.

    One of PyTorch's draws from the generator that it is given, or that of its device.
    Others may also draw from that of the CPU; in Python from the global streams of
    Python and NumPy, too, and from generators that their code names.

    Args:
        traits: Of the op.
        args: Its positional arguments,
        kwargs: and those by name.
    """

    __slots__ = ("_first", "_others", "_states", "_traits")

    def __init__(self, traits: Traits, args: Any, kwargs: Any) -> None:
        generators = [_generator(args, kwargs)]
        if traits.is_foreign:
            generators += [torch.default_generator, *op_generators(traits.func)]
            generators = list(dict.fromkeys(generators))
        # Not tensors: random states must not count as the model's memory.
        self._states = [(g, _bytes_of(g.get_state())) for g in generators]
        self._traits = traits
        self._first: FirstCall | None = None
        self._others = OtherStreams() if traits.runs_python else None

    def settle(self, out: Any = None) -> None:
        """The op has run: drop the states of Python and NumPy if it has not moved them.

        Args:
            out: What it returned, if a rerun of it is certain.
        """
        if self._traits.is_foreign and out is not None:
            self._first = first_call(self._traits, out)
        if self._others is not None and not self._others.have_moved():
            self._others = None

    def again(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the op with these states, and put those of now back."""
        out = self._run(func, args, kwargs)
        first, self._first = self._first, None
        if first is not None:
            first.compare(out, partial(self._run, func, args, kwargs))
        return out

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        (first, _), *rest = self._states
        counted = first.get_state()  # is alive meanwhile: see `simulation.reruns`
        present = [(g, _bytes_of(g.get_state())) for g, _ in rest]
        others = None if self._others is None else OtherStreams()
        try:
            _set(self._states)
            if self._others is not None:
                self._others.restore()
            return func(*args, **kwargs)
        finally:
            first.set_state(counted)
            _set(present)
            if others is not None:
                others.restore()


def random_states(traits: Traits, args: Any, kwargs: Any) -> RandomStates | None:
    """States for an op that may draw and is about to run; None on fake tensors."""
    tensors = list(tensors_in((args, kwargs)))
    if any(map(_is_empty, tensors)):
        return None
    in_doubt = traits.is_foreign and not traits.is_random
    if in_doubt and is_capturing(tensors):
        return None  # no state can be read, and what draws has a tag then
    return RandomStates(traits, args, kwargs)


def _is_empty(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or _compat_fakes.is_fake(tensor)


def _generator(args: Any, kwargs: Any) -> torch.Generator:
    """The generator that an op draws from that is PyTorch's own."""
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):
        return generator
    tensor = next(tensors_in((args, kwargs)), None)
    if tensor is not None:
        device = tensor.device
    else:
        device = torch.device(kwargs.get("device") or "cpu")
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


def _set(states: Iterable[tuple[torch.Generator, bytes]]) -> None:
    for generator, state in states:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)
