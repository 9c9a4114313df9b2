"""Fake tensors that autograd takes for plain ones.

After an in-place write to memory that views look at, autograd makes the functions of
these views anew. That of a view of a plain tensor becomes an ``AsStridedBackward0``,
and no op runs; a tensor with the Python dispatch key replays its views instead
(`VariableHooks::grad_fn` in torch/csrc/autograd/variable.cpp, ``is_python_dispatch`` in
the generated kernels of all views). So only fakes without that key do what a real step
with such writes does.

An op on such a fake finds `FakeTensorMode` by the stack of modes alone. That mode calls
ops on fakes while it is off the stack; so `_Between` hands it twins with the key and
takes the key from its results. No fake without it may be left to code that runs without
modes, where it would meet a kernel that reads memory: see `restore_keys`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from autosac import _compat, _compat_fakes
from autosac.pytrees import mapped


@contextlib.contextmanager
def fakes_of(mode: FakeTensorMode | None) -> Iterator[None]:
    """Run ops on the fakes of a mode, plain or not; without one, on real tensors."""
    if mode is None:
        yield
        return
    log = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, log.disabled = log.disabled, True  # it prints what is raised anyway
    between = _Between(mode) if is_plain(mode) else contextlib.nullcontext()
    try:
        with mode, between:
            yield
    finally:
        log.disabled = was_disabled


def is_plain(mode: FakeTensorMode | None) -> bool:
    """Whether autograd takes the fakes of a mode for plain tensors."""
    return mode is not None and bool(vars(mode).get("autosac_plain"))


class _Between(_compat.PlainDispatchMode):
    """A dispatch mode between a fake tensor mode and the ops on its plain fakes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _compat.DEVICE:
            return args[0].device
        pairs: list[tuple[Any, Any]] = []
        twins: dict[int, Any] = {}  # by address: of a fake, and the other way round

        def with_key(value: Any) -> Any:
            if id(value) not in twins and _compat_fakes.is_plain_fake(value):
                twin = _compat_fakes.twin_of_fake(value, plain=False)
                pairs.append((value, twin))
                twins[id(value)], twins[id(twin)] = twin, value
            return twins.get(id(value), value)

        def without_key(value: Any) -> Any:
            if id(value) in twins or _compat_fakes.fake_mode_of(value) is not self.mode:
                return twins.get(id(value), value)
            return _compat_fakes.twin_of_fake(value, plain=True)

        out = func(*mapped(with_key, args), **mapped(with_key, kwargs or {}))
        for fake, twin in pairs:
            vars(fake).update(vars(twin))  # what is known of its values
            if torch.Tag.inplace_view in func.tags:
                _take_layout(fake, twin)
        return mapped(without_key, out)


def _take_layout(fake: Any, twin: torch.Tensor) -> None:
    layout = (int(twin.storage_offset()), twin.shape, twin.stride())
    with in_kernel_invocation_manager(fake.fake_mode):
        fake.set_(twin.untyped_storage(), *layout)


def restore_keys(mode: FakeTensorMode | None) -> None:
    """End the use of a mode: whoever still holds a plain fake of it, gets another."""
    if not is_plain(mode):
        return
    if not _are_restored(mode):
        gc.collect()  # what cannot be another one, is of copies that hang in cycles
        _are_restored(mode)


def _are_restored(mode: FakeTensorMode | None) -> bool:
    """Give all plain fakes of a mode the key; False if one is referred to weakly.

    As `Tensor.retain_grad` does.
    """
    are_restored = True
    fakes = [value for value in gc.get_objects() if type(value) is FakeTensor]
    for fake in fakes:
        if fake.fake_mode is mode and _compat_fakes.is_plain_fake(fake):
            twin = _compat_fakes.twin_of_fake(fake, plain=False)
            try:
                torch._C._swap_tensor_impl(fake, twin)
            except RuntimeError:  # "Expected no weakrefs to t1's Tensor object"
                are_restored = False
    return are_restored
