"""Private APIs of fake tensors: how they are made, and told from others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from autosac._compat import (
    is_foreign,
    is_random,
    is_view,
    no_dispatch,
    no_modes,
    pick_arguments,
    read_as,
    returned_arguments,
)

__all__ = ["FakeTensorMode", "fake_like"]

_KEYS_OF_ALL_DEVICES = (
    *("Meta", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"),
    "CompositeImplicitAutograd",
)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake one."""
    return isinstance(tensor, FakeTensor)


class _FakeMode(FakeTensorMode):
    """A mode that asks the driver for devices once, not in every op."""

    @cached_property
    def avoid_device_init(self) -> bool:
        return bool(super().avoid_device_init)


def fake_mode(*, plain: bool = False) -> FakeTensorMode:
    """A mode for fake tensors beside which real ones may be used.

    Without its cache: in a trace, which knows equal calls itself, that only costs.

    Args:
        plain: Autograd takes its fakes for plain tensors: see `autosac._compat_plain`.
    """
    _start_autograd()
    mode = _FakeMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    vars(mode)["autosac_plain"] = plain
    return mode


@cache
def _start_autograd() -> None:
    """Let the first backward pass of a process be a real one.

    A fake mode gives PyTorch without a GPU something that stands for one, and autograd
    starts a thread for each GPU with its first backward pass. No process that is forked
    behind that could run another.
    """
    with no_modes(), torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()


def has_layout_only(mode: Any, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake one of a mode, strided and without known values.

    Nor is it a conjugate or negative view, of which no layout tells.
    """
    return (
        type(tensor) is FakeTensor
        and tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def forget_values(tensors: Iterable[torch.Tensor]) -> None:
    """Let fake tensors that were made of numbers be like all others."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            tensor.constant = None


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor that is not fake, or what a fake one was made of; None if none is."""
    return tensor.constant if isinstance(tensor, FakeTensor) else tensor


def fake_mode_of(tensor: Any) -> Any:
    """The mode that a fake tensor belongs to, None for anything else."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


# What a fake tensor is made as if autograd shall take it for a plain one: with dispatch
# disabled it gets no key by which autograd knows subclasses. Its class is `FakeTensor`
# afterwards. See `autosac._compat_plain`.
_PlainFake: Any = type(
    "_PlainFake",
    (FakeTensor,),
    {"__torch_dispatch__": torch._C._disabled_torch_dispatch_impl},
)


_META = torch.device("meta")


def new_fake(
    mode: Any,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    base: torch.Tensor | None = None,
    offset: int = 0,
    is_conj: bool = False,
    is_neg: bool = False,
) -> torch.Tensor:
    """A fake tensor with memory of its own, or in that of another one.

    Args:
        mode: Its mode.
        size: Its shape,
        stride: strides,
        dtype: type,
        device: and device.
        base: Whose memory it is in.
        offset: Where in it.
        is_conj: It is a conjugate view of it,
        is_neg: or a negative one.
    """
    with no_dispatch():
        if base is None:
            meta = torch.empty_strided(size, stride, dtype=dtype, device=_META)
        else:
            meta = torch.empty(0, dtype=dtype, device=_META)
            meta.set_(base.untyped_storage(), offset, size, stride)
        meta = read_as(meta, is_conj=is_conj, is_neg=is_neg)
    return as_fake(mode, meta, device)


def maker_of_twins(mode: Any, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that makes fakes like a tensor, which it does not keep alive."""
    layout = (tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
    return partial(new_fake, mode, *layout, is_conj=is_conj, is_neg=is_neg)


def by_meta_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results of an op on tensors of one device, by its kernel for meta tensors.

    Args:
        func: A view, an op that returns an argument that it writes to, or one that
            makes all its results.
        args: Its arguments, all tensors among them; one at least is a fake.
        kwargs: Others.
    """
    with no_dispatch():
        metas = [_as_meta(a) if isinstance(a, torch.Tensor) else a for a in args]
        out = func(*metas, **kwargs)
    if changed := returned_arguments(func):
        return pick_arguments(func, changed, args, kwargs)
    first = next(arg for arg in args if isinstance(arg, FakeTensor))
    mode, device = first.fake_mode, first.device
    if isinstance(out, torch.Tensor):
        return as_fake(mode, out, device)
    return type(out)(None if t is None else as_fake(mode, t, device) for t in out)


@cache
def _composite_key(func: Any) -> Any:
    """Key of the C++ kernel that writes to a copy, or to new memory; None if none does.

    Such are functional forms of writes (`copy`, `slice_scatter`), and random ops.
    """
    if getattr(func, "namespace", None) != "aten" or is_view(func):
        return None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(func.name(), "CPU"):
        return None
    key = "CompositeExplicitAutograd" + ("" if is_random(func) else "NonFunctional")
    if not has_kernel(func.name(), key):
        return None
    return getattr(torch._C.DispatchKey, key)


def reads_memory_around(func: Any) -> bool:
    """Whether the memory around an argument may decide the size of an op's result."""
    return _composite_key(func) is not None


def by_composite_kernel(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Results of an op on fakes by what its C++ kernel runs; None if it has none such.

    PyTorch's fakes may remember the layout alone, not how large the memory around it is
    (`_DispatchCacheEntry` in torch/_subclasses/fake_tensor.py), and kernels for meta
    tensors know of the layout alone.
    """
    if (key := _composite_key(func)) is None:
        return None
    # As the dispatcher does before it comes to such kernels.
    plain = tree_map_only(
        torch.Tensor, lambda t: t.resolve_conj().resolve_neg(), (args, kwargs)
    )
    return func._op_dk(key, *plain[0], **plain[1])


def runs_on_real_copies(func: Any) -> bool:
    """Whether fakes run an op of PyTorch's own on real tensors, as large as they are.

    They do where it has kernels for devices alone (`run_fallback_kernel` in
    torch/_subclasses/fake_tensor.py).
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return not is_foreign(func) and not any(
        has_kernel(func.name(), key) for key in _KEYS_OF_ALL_DEVICES
    )


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the layout of a tensor, and with the memory of a fake one."""
    meta = torch.empty(0, dtype=tensor.dtype, device=_META)
    if not isinstance(tensor, FakeTensor):
        return meta.new_empty_strided(tensor.shape, tensor.stride())
    layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
    meta.set_(tensor.untyped_storage(), *layout)
    return read_as(meta, is_conj=tensor.is_conj(), is_neg=tensor.is_neg())


def as_fake(mode: Any, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor on a device with the layout and the memory of a meta tensor."""
    of_mode = vars(mode)
    by_device = of_mode.get("autosac_known")
    if by_device is None:
        by_device = of_mode["autosac_known"] = {}
    attributes = by_device.get(device)
    if attributes is None:
        attributes = by_device[device] = dict(vars(FakeTensor(mode, meta, device)))
    # What the constructor does, without its checks: it is called for every result.
    backend = of_mode.get("autosac_backend", device)
    plain = bool(of_mode.get("autosac_plain"))
    fake: torch.Tensor = _bare_fake(meta, backend, plain=plain)
    vars(fake).update(attributes)
    return fake


def _bare_fake(meta: torch.Tensor, backend: Any, *, plain: bool) -> Any:
    """A fake tensor that has no attributes yet."""
    fake: Any = torch.Tensor._make_subclass(
        _PlainFake if plain else FakeTensor,
        meta,
        dispatch_device=True,
        device_for_backend_keys=backend,
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    if plain:
        fake.__class__ = FakeTensor
    return fake


def twin_of_fake(fake: Any, *, plain: bool) -> Any:
    """A fake tensor in the memory of another one, a leaf, with its attributes."""
    backend = vars(fake.fake_mode).get("autosac_backend", fake.fake_device)
    with no_dispatch():
        meta = _as_meta(fake)
    twin = _bare_fake(meta, backend, plain=plain)
    vars(twin).update(vars(fake))
    return twin


def is_plain_fake(value: Any) -> bool:
    """Whether autograd takes a fake tensor for a plain one."""
    key = torch._C.DispatchKey.Python
    return type(value) is FakeTensor and not torch._C._dispatch_keys(value).has(key)


def detached(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` below all modes; for a fake tensor without its dispatch."""
    if not has_layout_only(mode, tensor) or tensor.is_complex():
        with no_modes():
            return tensor.detach()
    layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    return new_fake(mode, *layout, base=tensor, offset=int(tensor.storage_offset()))


def fake_like(
    mode: FakeTensorMode, tensor: torch.Tensor, meta_device: torch.device
) -> torch.Tensor:
    """A fake twin of a tensor; one on the meta device moves to ``meta_device``."""
    if isinstance(tensor, FakeTensor):
        return tensor
    data = tensor.detach()
    if tensor.is_meta:
        fake: torch.Tensor = FakeTensor(mode, data, meta_device)
    else:
        fake = mode.from_tensor(data, static_shapes=True)
    if vars(mode).get("autosac_plain"):
        fake = twin_of_fake(fake, plain=True)
    if isinstance(tensor, torch.nn.Parameter):
        # What its constructor does, without a dispatched `detach` for each.
        vars(fake)["_is_param"] = True
    return fake.requires_grad_(tensor.requires_grad)
