"""Shells: tensors with a layout and no memory, for results that nobody needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autosac import _compat
from autosac.pytrees import mapped, tensors_in


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of a tensor without the tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    fake_mode: Any


class _Shell(torch.Tensor):
    """A tensor with a layout and no memory, which no op may read."""

    __torch_function__ = _compat.no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} reads a result that the plan did not recompute.")


def is_shell(value: Any) -> bool:
    return isinstance(value, _Shell) or hasattr(value, "autosac_shell")


def layout_of(value: Any, like: Any = None) -> Any:
    """Layout of a tensor; one on the meta device takes its device from ``like``."""
    if not isinstance(value, torch.Tensor):
        return value
    like = value if like is None else like
    return Layout(
        tuple(value.shape),
        value.stride(),
        int(value.storage_offset()),
        value.dtype,
        like.device,
        _compat.fake_mode_of(like),
    )


def shell_of(value: Any) -> Any:
    """A tensor of some layout that holds no memory; a fake one in a dry run."""
    if not isinstance(value, Layout):
        return value
    if value.fake_mode is None:
        return _compat.wrapper_subclass(
            _Shell,
            value.size,
            strides=value.stride,
            storage_offset=value.offset,
            dtype=value.dtype,
            device=value.device,
        )
    with _compat.no_dispatch():
        fake = _compat.as_fake(value.fake_mode, _on_meta(value), value.device)
    fake.autosac_shell = True  # type: ignore[attr-defined]
    return fake


def _on_meta(layout: Layout) -> torch.Tensor:
    whole = torch.empty(0, dtype=layout.dtype, device="meta")
    return whole.as_strided(layout.size, layout.stride, layout.offset)


def view_of_shell(func: Any, args: Any, kwargs: Any, *, known: bool = False) -> Any:
    """A view of a shell, found on the meta device.

    Some views (`unsafe_split`) do not say so in their schema, but the tape knows.
    """
    if not known and not _compat.is_view(func):
        raise RuntimeError(f"{func} reads a result that the plan did not recompute.")
    shell = next(t for t in tensors_in((args, kwargs)) if is_shell(t))

    def to_meta(value: Any) -> Any:
        return _on_meta(layout_of(value)) if is_shell(value) else value

    with _compat.no_modes():
        out = func(*mapped(to_meta, args), **mapped(to_meta, kwargs))
    return mapped(lambda value: shell_of(layout_of(value, like=shell)), out)
