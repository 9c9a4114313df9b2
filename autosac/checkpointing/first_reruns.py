"""The first rerun of an op that is not PyTorch's own is compared with its forward call.

Random states are given back for a rerun. A counter of an op's own is not, nor is a
random generator that its kernel hides: what it makes again is not what forward had.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from autosac.errors import UnsupportedError
from autosac.pytrees import tensors_in
from autosac.step.equal_results import differ, numbers_in

_compared: set[int] = set()  # addresses of ops, which `Traits` keeps
_awaited: dict[int, weakref.ref[FirstCall]] = {}


class FirstCall:
    """What an op made, until it has run again.

    Args:
        func: The op.
        out: What it returned.
    """

    __slots__ = ("__weakref__", "_func", "_numbers")

    def __init__(self, func: Any, out: Any) -> None:
        self._func = func
        self._numbers = numbers_in(out)

    def compare(self, out: Any) -> None:
        """Compare with what a rerun returned.

        Raises:
            UnsupportedError: It is something else.
        """
        if differ(self._numbers, numbers_in(out)):
            raise UnsupportedError(
                f"`{self._func}` made something else when it ran again for backward, so"
                " gradients would not be those of the step without a plan: it may count"
                " its calls, or have a random generator that nobody sees. Plan with a"
                " profile that went through `autosac.calibrate`, so that what it makes"
                " is kept, or name its module in `opaque`."
            )
        _compared.add(id(self._func))
        self._numbers = []


def first_call(func: Any, out: Any) -> FirstCall | None:
    """Note what an op has made, if no rerun of it was compared and none is awaited."""
    key = id(func)
    awaited = _awaited.get(key)
    if key in _compared or (awaited is not None and awaited() is not None):
        return None
    on_gpu = any(tensor.is_cuda for tensor in tensors_in((out,)))
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return None
    call = FirstCall(func, out)
    _awaited[key] = weakref.ref(call)
    return call
