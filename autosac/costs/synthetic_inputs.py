"""Made-up arguments for ops: valid data of recorded layouts.

Floating-point numbers are random in 0..1, masks are true, integers are zero, which is
a valid index of everything that has elements. Where an op's integers are known to be
indices they are spread over their range instead: a kernel that adds to one row a
thousand times takes another time than one that adds to a thousand rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autosac import _compat
from autosac.fake_tensors import real_layouts
from autosac.step.op_signatures import Layout, Signature

_TILE = 65_521  # random numbers that are drawn; more elements repeat them
_INDEX_TYPES = (torch.int32, torch.int64)

Arguments = tuple[list[Any], dict[str, Any]]


def refusal(signature: Signature) -> str | None:
    """Why an op must not be run on made-up data; None if it may.

    A collective wants all ranks, which may not plan just now.
    Bytes that a kernel hands to its backward kernel cannot be made up: backward
    kernels of oneDNN and cuDNN read outside of them, which ends the process. Fake
    kernels give them no elements, which is how they are known.
    """
    if _name(signature) in _FITTED:
        return None
    if signature.func.namespace == "_c10d_functional":
        return "other ranks have to take part"
    for value in signature.args:
        if isinstance(value, Layout) and value.dtype == torch.uint8 and 0 in value.size:
            return "it reads bytes that only its forward kernel can make"
    return None


def arguments(signature: Signature, device: torch.device) -> Arguments:
    """Made-up positional and keyword arguments of an op.

    Raises:
        RuntimeError: They do not fit into memory.
    """
    args = [_thaw(value, device) for value in signature.args]
    kwargs = {name: _thaw(value, device) for name, value in signature.kwargs}
    name = _name(signature)
    if name in _INDEXED:
        position, limit = _INDEXED[name]
        _spread(args[position], limit(args))
    elif name in _INDEXED_BY_LIST:
        _spread_list(args)
    elif name in _FITTED:
        _FITTED[name](args)
    return args, kwargs


def _name(signature: Signature) -> str:
    """Name of an op without its overload, in place or not."""
    return str(signature.func).rpartition(".")[0].rstrip("_")


def _thaw(value: Any, device: torch.device) -> Any:
    """Made-up data for one frozen argument."""
    if isinstance(value, tuple):
        return [_thaw(item, device) for item in value]
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device)  # the user's own is left alone
    if not isinstance(value, Layout):
        return value
    reach = 1 + sum(
        (size - 1) * step for size, step in zip(value.size, value.stride, strict=True)
    )
    reach = 0 if 0 in value.size else reach
    # The memory first: a layout may visit an element twice (`expand`).
    if value.dtype.is_floating_point or value.dtype.is_complex:
        flat = _random(reach, value.dtype, device)
    elif value.dtype == torch.bool:
        flat = torch.ones(reach, dtype=value.dtype, device=device)
    else:
        flat = torch.zeros(reach, dtype=value.dtype, device=device)
    tensor = flat.as_strided(value.size, value.stride)
    return _compat.read_as(tensor, is_conj=value.is_conj, is_neg=value.is_neg)


def _random(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers in 0..1; drawing every one of them takes longer than most ops."""
    tile = torch.rand(min(size, _TILE), device=device).to(dtype)
    if size <= _TILE:
        return tile
    flat = torch.empty(size, dtype=dtype, device=device)
    whole = size - size % _TILE
    flat[:whole].view(-1, _TILE).copy_(tile)
    flat[whole:] = tile[: size - whole]
    return flat


def _spread(indices: Any, limit: int) -> None:
    """Fill integers with indices below a limit, far from their neighbours."""
    if not isinstance(indices, torch.Tensor) or indices.dtype not in _INDEX_TYPES:
        return
    if limit <= 0 or _visits_twice(indices):
        return
    places = torch.arange(indices.numel(), device=indices.device)
    indices.copy_((places * 7919 % limit).view(indices.shape))


def _visits_twice(tensor: torch.Tensor) -> bool:
    return 0 in tensor.stride() or not tensor.numel()


def _spread_list(args: list[Any]) -> None:
    """Indices of ``self[indices]``: each has a dimension of its own."""
    indices = [index for index in args[1] if index is not None]
    if any(index.dtype not in _INDEX_TYPES for index in indices):
        _fit_mask(args)
        return
    for index, size in zip(args[1], args[0].shape, strict=False):
        _spread(index, size)


def _fit_mask(args: list[Any]) -> None:
    """As many true elements in a single mask as there are values to put there."""
    places = [i for i, index in enumerate(args[1]) if index is not None]
    if len(args) > 2 and len(places) == 1 and args[2].dim():
        count = args[2].shape[0]
        if count > 1:
            args[1][places[0]] = _with_true(args[1][places[0]], count)


def _fit_source(args: list[Any]) -> None:
    """``masked_scatter`` needs a source element for every true one."""
    args[1] = _with_true(args[1], args[2].numel())


def _fit_sizes(args: list[Any]) -> None:
    """The backward of ``masked_scatter`` gives back a source of the size it had."""
    args[1] = _with_true(args[1], math.prod(args[2]))


def _with_true(mask: torch.Tensor, count: int) -> torch.Tensor:
    """A mask of which only so many elements are true, at its beginning."""
    if _visits_twice(mask) or not mask.is_contiguous():
        mask = mask.clone(memory_format=torch.contiguous_format)
    mask.view(-1)[count:] = False
    return mask


def _offsets(args: list[Any]) -> None:
    """Bags of equal size."""
    weight, indices, offsets = args[:3]
    _spread(indices, weight.shape[0])
    bags = max(1, offsets.numel())
    places = torch.arange(offsets.numel(), device=offsets.device)
    offsets.copy_(places * indices.numel() // bags)


def _bags(args: list[Any]) -> None:
    """What ``_embedding_bag`` hands to its backward op, for bags of equal size."""
    _, indices, offset2bag, bag_size, _, num_weights = args[:6]
    _spread(indices, num_weights)
    bags = max(1, bag_size.numel())
    each = max(1, -(-offset2bag.numel() // bags))
    places = torch.arange(offset2bag.numel(), device=offset2bag.device)
    offset2bag.copy_(places // each)
    bag_size.fill_(each)


def _group_ends(args: list[Any]) -> None:
    """Groups of equal size, each end of one counted from the first row or column."""
    left, right, ends = args[:3]
    if ends is not None:
        total = left.shape[-2] if right.dim() == 3 else left.shape[-1]
        total = right.shape[-1] if left.dim() == 3 else total
        places = torch.arange(1, ends.numel() + 1, device=ends.device)
        ends.copy_(places * total // ends.numel())


def _pivots(args: list[Any]) -> None:
    """Rows that stay where they are, counted from 1."""
    args[1].fill_(1)


def _lengths(args: list[Any]) -> None:
    """Sequences of full length."""
    args[1].fill_(args[0].shape[1 if args[2] else 0])


def _onednn_rnn(args: list[Any]) -> None:
    """Run the forward kernel, whose bytes (the last argument) the backward reads."""
    reverse, mode, hidden_size, num_layers, has_biases = args[13:18]
    train, bidirectional, batch_sizes, batch_first = args[18:22]
    sizes = (hidden_size, num_layers, has_biases, bidirectional, batch_first, train)
    inputs = [tensor.detach() for tensor in args[:7]]
    results = real_layouts.onednn_rnn(inputs, (reverse, batch_sizes, mode, *sizes))
    args[7:10] = [tensor.detach() for tensor in results[:3]]
    args[-1] = results[3].detach()


def _equal_elements(args: list[Any]) -> None:
    """As few distinct elements as there may be.

    Room for as many as there are elements is made, and what is not used given back:
    the fewer come out, the more of it was workspace.
    """
    args[0].zero_()


def _host_seeds(args: list[Any]) -> None:
    """Seed and offset of dropout, which the kernel reads on the host.

    But for captured graphs, `_efficient_attention_forward` in
    aten/src/ATen/native/transformers/cuda/attention.cu makes them there; a pointer to
    the device ends the process.
    """
    args[7:9] = [torch.zeros(t.shape, dtype=t.dtype) for t in args[7:9]]


def _along(position: int) -> Callable[[list[Any]], int]:
    """Size of the first argument along the dimension that another one names."""

    def limit(args: list[Any]) -> int:
        return int(args[0].shape[args[position]]) if args[0].dim() else 1

    return limit


def _classes(position: int) -> Callable[[list[Any]], int]:
    """Number of classes in a tensor of shape (classes) or (batch, classes, ...)."""
    return lambda args: int(args[position].shape[min(1, args[position].dim() - 1)])


# Op -> position of its indices, and what they must stay below.
_INDEXED: dict[str, tuple[int, Callable[[list[Any]], int]]] = {
    "aten.embedding": (1, lambda args: int(args[0].shape[0])),
    "aten.embedding_dense_backward": (1, lambda args: int(args[2])),
    "aten.nll_loss_forward": (1, _classes(0)),
    "aten.nll_loss_backward": (2, _classes(1)),
    "aten.nll_loss2d_forward": (1, _classes(0)),
    "aten.nll_loss2d_backward": (2, _classes(1)),
    "aten.index_select": (2, _along(1)),
    "aten.index_add": (2, _along(1)),
    "aten.index_copy": (2, _along(1)),
    "aten.index_fill": (2, _along(1)),
    "aten.index_reduce": (2, _along(1)),
    "aten.gather": (2, _along(1)),
    "aten.scatter": (2, _along(1)),
    "aten.scatter_add": (2, _along(1)),
    "aten.scatter_reduce": (2, _along(1)),
}
_INDEXED_BY_LIST = frozenset(
    {
        "aten.index",
        "aten.index_put",
        "aten._index_put_impl",
        "aten._unsafe_index",
        "aten._unsafe_index_put",
    }
)
# Op -> what makes its arguments fit each other.
_FITTED: dict[str, Callable[[list[Any]], None]] = {
    "aten._embedding_bag": _offsets,
    "aten._scaled_dot_product_efficient_attention_backward": _host_seeds,
    "aten._embedding_bag_forward_only": _offsets,
    "aten._embedding_bag_dense_backward": _bags,
    "aten._grouped_mm": _group_ends,
    "aten._unique": _equal_elements,
    "aten._unique2": _equal_elements,
    "aten.unique_consecutive": _equal_elements,
    "aten.unique_dim": _equal_elements,
    "aten.unique_dim_consecutive": _equal_elements,
    "aten.masked_scatter": _fit_source,
    "aten.linalg_lu_solve": _pivots,
    "aten.masked_scatter_backward": _fit_sizes,
    "aten._pack_padded_sequence": _lengths,
    "aten.mkldnn_rnn_layer_backward": _onednn_rnn,
}
