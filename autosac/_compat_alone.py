"""Private PyTorch APIs for steps that run in one process while others wait for it.

Whatever such a step sends would meet what the others do meanwhile. So collectives of
`torch.distributed` (torch/csrc/distributed/c10d/Ops.cpp, torch 2.10 to 2.15) end at
once and leave tensors as they are, fakes and real ones: they write to memory that is
there already, so that a step takes as much as with the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from autosac import _compat
from autosac._compat_distributed import are_distributed
from autosac.errors import UnsupportedError

COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of ops
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
    return _Answers() if _is_alone.get() else _NOTHING


def answers(func: Any) -> bool:
    """Whether an op is a collective that is not to reach the others."""
    return _is_alone.get() and func.namespace in COLLECTIVES


def waits(func: Any) -> UnsupportedError:
    """What to say of a collective that nobody answers."""
    return UnsupportedError(
        f"`{_compat.op_name(func)}` in the model's step waits for the other processes,"
        " and these wait for the one that plans. Plan in each of them by `autosac.plan`"
        " before DDP wraps the model, or leave the collective out."
    )


class _Answers(_compat.PlainDispatchMode):
    """Ends collectives as soon as they are called."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if are_distributed(types):
            return NotImplemented
        if func.namespace not in COLLECTIVES:
            return func(*args, **(kwargs or {}))
        if func.namespace != "c10d":  # those make their results
            raise waits(func)
        # PyTorch may be built without it
        from torch._C._distributed_c10d import FakeWork

        num_results = len(func._schema.returns)
        work = FakeWork().boxed() if num_results else None
        return (args[0], work) if num_results == 2 else work
