"""Private PyTorch APIs for steps that run in one process while others wait for it.

Whatever such a step sends would meet what the others do meanwhile. So collectives of
`torch.distributed` (torch/csrc/distributed/c10d/Ops.cpp, torch 2.10 to 2.15) end at
once and leave tensors as they are, fakes and real ones: they write to memory that is
there already, so that a step takes as much as with the others. What is gathered is what
this process has, as if the others had the same. Objects that are sent are refused:
tensors are made from their bytes past all modes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from autosac import _compat, _compat_fakes
from autosac._compat_distributed import are_distributed
from autosac.errors import UnsupportedError

_COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of ops
_UNANSWERED = "c10d::recv_any_source_"  # it tells who has sent
_OF_OBJECTS = frozenset(
    {"all_gather_object", "gather_object", "scatter_object_list"}
    | {f"{does}_object_list" for does in ("broadcast", "send", "recv")}
)
_GATHER_LISTS = ("c10d::allgather_", "c10d::gather_")
_GATHERS = ("c10d::_allgather_base_", "c10d::gather_into_tensor_")
_NOTHING = contextlib.nullcontext()
_is_alone: ContextVar[bool] = ContextVar("is_alone", default=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, no step that is traced or run reaches other processes."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


def without_others() -> contextlib.AbstractContextManager[Any]:
    """Run a part of a step without the others, if one is `alone`.

    Raises:
        UnsupportedError: It waits for others in a way that cannot be answered for them.
    """
    return _Collectives() if _is_alone.get() else _NOTHING


def refused() -> contextlib.AbstractContextManager[Any]:
    """Inside, all collectives are refused.

    Raises:
        UnsupportedError: There is one.
    """
    return _Collectives(refuses=True)


def answers(func: Any) -> bool:
    """Whether an op is a collective that is not to reach the others."""
    return _is_alone.get() and func.namespace in _COLLECTIVES


def _waits(func: Any) -> UnsupportedError:
    """What to say of a collective that nobody answers."""
    name = _sends_objects() or _compat.op_name(func)
    return UnsupportedError(
        f"`{name}` in the model's step waits for the other processes,"
        " and these wait for the one that plans. Plan in each of them by `autosac.plan`"
        " before DDP wraps the model, or leave the collective out."
    )


def _sends_objects() -> str:
    """The function of `torch.distributed` that sends objects just now, or ''."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        module = frame.f_globals.get("__name__")
        if module == "torch.distributed.distributed_c10d" and name in _OF_OBJECTS:
            return name
    return ""


class _Collectives(_compat.PlainDispatchMode):
    """Ends collectives as soon as they are called.

    Args:
        refuses: It refuses them all instead.
    """

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.refuses = refuses

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if are_distributed(types):
            return NotImplemented
        if func.namespace not in _COLLECTIVES:
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        refuses = self.refuses or func.namespace != "c10d"  # the latter make results
        if refuses or name == _UNANSWERED or _sends_objects():
            raise _waits(func)
        if name in _GATHER_LISTS:
            for outputs, own in zip(*args[:2], strict=False):  # none where none gathers
                for output in outputs:
                    _fill(output, own)
        if name in _GATHERS:
            _fill(*args[:2])
        num_results = len(func._schema.returns)
        work = _ended() if num_results else None
        return (args[0], work) if num_results == 2 else work


def _fill(output: torch.Tensor, own: torch.Tensor) -> None:
    """Repeat what this process has up to the size of an output, if values are known."""
    if any(map(_compat_fakes.is_fake, (output, own))) or not own.numel():
        return
    with _compat.no_modes():
        fits = output.numel() % own.numel() == 0  # sizes may differ
        if fits and output.is_contiguous():
            output.view(-1, own.numel()).copy_(own.reshape(1, -1))


def _ended() -> Any:
    """What a collective returns that is over."""
    # PyTorch may be built without it
    from torch._C._distributed_c10d import _create_work_from_future

    future: Any = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future).boxed()
