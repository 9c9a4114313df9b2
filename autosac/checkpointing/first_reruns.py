"""The first rerun of an op that is not PyTorch's own is compared with its forward call.

Random states are given back for a rerun. A counter of an op's own is not, nor is a
random generator that its kernel hides: what it makes again is not what forward had.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autosac._compat_dispatch import Traits
from autosac.errors import UnsupportedError
from autosac.pytrees import tensors_in
from autosac.step.equal_results import differ, filled_memory, numbers_in

_compared: set[int] = set()  # addresses of ops, which `Traits` keeps
_awaited: dict[int, weakref.ref[FirstCall]] = {}


class FirstCall:
    """What an op made, until it has run again.

    Args:
        traits: Of the op.
        out: What it returned.
    """

    __slots__ = ("__weakref__", "_numbers", "_traits")

    def __init__(self, traits: Traits, out: Any) -> None:
        self._traits = traits
        self._numbers = numbers_in(out)

    def compare(self, out: Any, run: Callable[[], Any]) -> None:
        """Compare with what a rerun returned.

        Args:
            out: That.
            run: Runs the op as the rerun did.

        Raises:
            UnsupportedError: It is something else.
        """
        is_equal = not differ(self._numbers, numbers_in(out))
        if not is_equal and (self._traits.written or _varies(run)):
            raise UnsupportedError(
                f"`{self._traits.func}` made something else when it ran again for"
                " backward, so gradients would not be those of the step without a"
                " plan: it may count its calls, or have a random generator that nobody"
                " sees. Plan with a profile that went through `autosac.calibrate`, so"
                " that what it makes is kept, or name its module in `opaque`."
            )
        _compared.add(id(self._traits.func))
        self._numbers = []


def _varies(run: Callable[[], Any]) -> bool:
    """Whether an op makes something else each time, apart from what it leaves."""
    with filled_memory():
        return differ(numbers_in(run()), numbers_in(run()))


def is_capturing(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether ops on these tensors become part of a CUDA graph."""
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def first_call(traits: Traits, out: Any) -> FirstCall | None:
    """Note what an op has made, if no rerun of it was compared and none is awaited."""
    key = id(traits.func)
    awaited = _awaited.get(key)
    if key in _compared or (awaited is not None and awaited() is not None):
        return None
    if is_capturing(tensors_in((out,))):
        return None
    call = FirstCall(traits, out)
    _awaited[key] = weakref.ref(call)
    return call
