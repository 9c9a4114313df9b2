"""Autocast inside of ops whose kernels run other ops (torch 2.10 to 2.15).

Autocast changes the ops that such a kernel runs, for instance the matrix products of a
custom op. A dispatch mode hides it: what its ``__torch_dispatch__`` calls runs without
autocast, as what reached it has been cast already. So autocast is opened again where
such an op runs under a mode, and where it is run again from a record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["as_called", "is_runner", "open_types", "runners_under_autocast"]

_Types = tuple[tuple[str, torch.dtype], ...]
_DEVICES = ("cpu", "cuda")
_NAMESPACES = frozenset(  # PyTorch's own
    {
        *("aten", "prim", "prims", "profiler", "quantized", "mkldnn", "onednn"),
        *("c10d", "_c10d_functional", "fsdp", "higher_order"),
    }
)
# Of PyTorch's own list of ops those with other results under autocast and a mode that
# only calls them, and with equal ones without autocast; and the fast paths of attention
# in evaluation, which that list lacks.
_RUNNERS = frozenset(
    {
        "aten::_native_multi_head_attention",
        "aten::_transformer_encoder_layer_fwd",
        "aten::_trilinear",  # of `torch.nn.Bilinear`
        "aten::affine_grid_generator",
        "aten::linalg_pinv.atol_rtol_tensor",
        "aten::linalg_polar",
    }
)
# Autograd takes these apart before a mode sees them, but not in inference mode.
_COMPOSITE = "CompositeImplicitAutograd"
_known: dict[int, tuple[Any, bool]] = {}  # by address, as ops are slow to hash


def is_runner(func: Any) -> bool:
    """Whether the kernel of an op runs others, which autocast changes."""
    known = _known.get(id(func))
    if known is None:
        known = _known[id(func)] = (func, _is_runner(func))
    return known[1]


def _is_runner(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func.name()
    if not torch._C._dispatch_has_kernel(name):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    is_own = func.namespace in _NAMESPACES and name not in _RUNNERS
    if is_own and not has_kernel(name, _COMPOSITE):
        return False
    # One that has a kernel for autocast opens and closes it by itself.
    return not any(has_kernel(name, f"Autocast{kind.upper()}") for kind in _DEVICES)


def as_called(func: Any) -> Callable[..., Any]:
    """An op that runs again later, under the autocast that is open now."""
    types = open_types() if is_runner(func) else ()
    if not types:
        return func  # type: ignore[no-any-return]

    def run(*args: Any, **kwargs: Any) -> Any:
        with _opened(types):
            return func(*args, **kwargs)

    return run


def open_types() -> _Types:
    """Devices that autocast is open for, each with its type."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    )


@contextlib.contextmanager
def _opened(types: _Types) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device, dtype in types:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        yield


def runners_under_autocast(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A mode's ``__torch_dispatch__``, under the autocast that an op was called in.

    Args:
        dispatch: That of a class of dispatch modes.
    """

    def __torch_dispatch__(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = _known.get(id(func))
        if not (is_runner(func) if known is None else known[1]):
            return dispatch(self, func, types, args, kwargs)
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            hidden = open_types()
        with _opened(hidden):
            return dispatch(self, func, types, args, kwargs)

    return __torch_dispatch__
