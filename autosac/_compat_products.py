"""Private PyTorch APIs by which products of batches are those without dispatch modes.

`matmul` of [b, n, m] and [1, m, p] is one product of [b * n, m] if the latter requires
gradients, and b products otherwise: but under any dispatch mode always the first
(`isTensorSubclassLike` in `_matmul_impl` of aten/src/ATen/native/LinearAlgebra.cpp).
These round otherwise, forward and backward. So while a mode of autosac is active, a
dispatch key that PyTorch has for tests brings products here first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_KEY: Any = torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")
_AUTOCAST = (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA)
_matmul = torch.ops.aten.matmul.default


def _product(keys: Any, left: torch.Tensor, right: torch.Tensor) -> Any:
    """What `matmul` is without a dispatch mode."""
    if not _is_batched(keys, left, right):
        return _matmul.redispatch(keys.remove(_KEY), left, right)
    size = right.shape[0] if left.shape[0] == 1 else left.shape[0]
    rows, columns = left.shape[1], right.shape[2]
    factors = (one.expand(size, -1, -1) for one in (left, right))
    product = torch.bmm(*(one.reshape(size, *one.shape[1:]) for one in factors))
    return torch.ops.aten._unsafe_view.default(product, (size, rows, columns))


def _is_batched(keys: Any, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether one of two factors serves a whole batch and requires no gradients."""
    if not all(map(_is_plain, (left, right))) or left.dim() != 3 or right.dim() != 3:
        return False
    one = left if left.shape[0] == 1 else right
    return (
        one.shape[0] == 1
        and left.shape[0] != right.shape[0]
        and not one.requires_grad
        and not any(map(keys.has, _AUTOCAST))  # comes here again when it has cast
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it does nothing of its own when an op is dispatched."""
    kind = type(tensor)
    own = kind.__torch_dispatch__
    is_known = kind is FakeTensor or own is torch._C._disabled_torch_dispatch_impl
    return is_known and not tensor.is_nested


def are_plain() -> bool:
    """Whether products are those without dispatch modes already."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_KEY))


class PlainProducts:
    """A context in which products of this thread are those without dispatch modes."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(are_plain())
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)

    def __exit__(self, *_: object) -> None:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, self._before.pop())


def _registered() -> list[torch.library.Library]:
    """Everything but `matmul` passes the key by. Kept, or it would end."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "TESTING_ONLY_GenericMode")
    products = torch.library.Library("aten", "IMPL")
    products.impl("matmul", _product, "TESTING_ONLY_GenericMode", with_keyset=True)
    return [others, products]


_LIBRARIES = _registered()
