"""Which tensors keep their values while a step is traced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from autosac import _compat, _compat_alone, _compat_dispatch, _compat_fakes
from autosac.errors import TraceError
from autosac.fake_tensors import real_layouts
from autosac.fake_tensors.repeated_calls import is_real
from autosac.lens.on_gpu import on_fake_gpu
from autosac.pytrees import tensors_in
from autosac.step.op_signatures import Signature, signature

# Elements of a tensor that stays real while tracing: of the user's or computed from one
# as large, and of others, such as causal masks of long sequences, which take time.
_MOST_KNOWN_VALUES, _MOST_MADE_VALUES = 2**22, 2**19

_aten = torch.ops.aten
# Their meta kernels give the layouts of all devices, as do those of elementwise ops.
_BY_LAYOUT = frozenset(
    {
        _aten._log_softmax.default,
        _aten._log_softmax_backward_data.default,
        _aten._safe_softmax.default,
        _aten._softmax.default,
        _aten._softmax_backward_data.default,
        _aten._to_copy.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        _aten.bmm.default,
        _aten.clone.default,
        _aten.embedding.default,
        _aten.embedding_dense_backward.default,
        _aten.empty_like.default,
        _aten.mean.default,
        _aten.mean.dim,
        _aten.mm.default,
        _aten.native_group_norm_backward.default,
        _aten.native_layer_norm_backward.default,
        _aten.nll_loss_backward.default,
        _aten.nll_loss_forward.default,
        _aten.ones_like.default,
        _aten.select_backward.default,
        _aten.slice_backward.default,
        _aten.sum.default,
        _aten.sum.dim_IntList,
        _aten.zeros_like.default,
    }
)
# On the CPU their statistics have the type of the input: theirs do if all is float32.
_BY_LAYOUT_IN_FLOAT32 = frozenset(
    {
        _aten.native_batch_norm.default,
        _aten.native_batch_norm_backward.default,
        _aten.native_layer_norm.default,
    }
)
_PLACES = ("device", "layout", "pin_memory")  # arguments that say where results lie


def keeps_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the user's stays real: steps branch on such values."""
    return (
        not tensor.is_meta
        and not tensor.is_floating_point()
        and not tensor.is_complex()
        and tensor.numel() <= _MOST_KNOWN_VALUES
    )


def run_op(
    func: Any,
    args: Any,
    kwargs: Any,
    inputs: list[torch.Tensor],
    *,
    on_gpu: bool = False,
    floats: bool = True,
) -> Any:
    """Run an op on fakes, or for real if all it reads is real and small.

    Masks, positions and lengths keep their values that way, so that the step takes
    the branches that it takes on this input, and finds its data-dependent shapes. So
    does what is made of nothing, such as a mask of ones, or numbers drawn for layer
    drop.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        inputs: The tensors in them.
        on_gpu: The fakes stand for a GPU's tensors.
        floats: Keep floating-point values of what is made of nothing, too.
    """
    if any(map(_compat_fakes.is_fake, inputs)):
        out = real_layouts.of_own_kernel(func, args, kwargs)
        is_plain = out is None and _has_plain_kernel(func, args, kwargs, inputs)
        if is_plain:
            out = _compat_fakes.by_meta_kernel(func, args, kwargs)
        elif out is None:
            out = func(*args, **kwargs)
        if on_gpu:
            if not is_plain:
                out = _as_on_gpu(func, args, kwargs, out)
            return real_layouts.on_any_device(func, args, out)
        return real_layouts.on_cpu(func, args, out)
    if _compat.is_profiling(func):
        with _compat.no_dispatch():
            return func(*args, **kwargs)
    if _compat_alone.answers(func):
        return func(*args, **kwargs)
    changes_layout = torch.Tag.inplace_view in func.tags  # FakeTensorMode refuses that
    if inputs and (changes_layout or _is_small(func, args, kwargs, inputs)):
        with _compat.no_modes():
            return func(*args, **kwargs)
    try:
        out = func(*args, **kwargs)
    except _compat.TRACE_ERRORS:
        if not inputs:
            raise
    else:
        may_keep = inputs or floats or all(keeps_values(t) for t in tensors_in((out,)))
        if not may_keep or _are_large(out, inputs):
            return out
    with _compat.no_modes():
        return func(*args, **kwargs)


def _is_small(func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> bool:
    """Whether no fake kernel needs to say that the results are not large."""
    if _compat.is_view(func):
        return True  # of no new memory, which a fake view of a real tensor would have
    if not _compat.is_elementwise(func) or _compat.is_random(func):
        return False
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in inputs))
    except RuntimeError:  # what comes of that is the op's own matter
        return False
    return bool(shape.numel() <= _most_elements(inputs))


def _are_large(results: Any, inputs: list[torch.Tensor]) -> bool:
    """Whether working out the values of results takes too long."""
    most = _most_elements(inputs)
    return any(tensor.numel() > most for tensor in tensors_in((results,)))


def _most_elements(inputs: list[torch.Tensor]) -> int:
    largest = max((tensor.numel() for tensor in inputs), default=0)
    return min(max(largest, _MOST_MADE_VALUES), _MOST_KNOWN_VALUES)


def _has_plain_kernel(
    func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]
) -> bool:
    """Whether a meta kernel gives the layouts of all devices; it takes less time."""
    if getattr(func, "namespace", None) != "aten" or not _is_plain(func, kwargs):
        return False
    if func in _BY_LAYOUT_IN_FLOAT32 and any(t.dtype != torch.float32 for t in inputs):
        return False
    num_tensors = sum(isinstance(arg, torch.Tensor) for arg in args)
    first = next(filter(_compat_fakes.is_fake, inputs))
    mode = _compat_fakes.fake_mode_of(first)
    return num_tensors == len(inputs) and all(
        (_compat_fakes.has_layout_only(mode, tensor) or is_real(tensor))
        and tensor.device == first.device
        and not tensor.is_complex()
        and not tensor.is_quantized
        for tensor in inputs
    )


def _is_plain(func: Any, kwargs: Any) -> bool:
    if _compat.is_view(func):
        return True
    if any(kwargs.get(name) for name in _PLACES) or _compat.is_random(func):
        return False
    if func in _BY_LAYOUT or func in _BY_LAYOUT_IN_FLOAT32:
        return True
    if not _compat.is_elementwise(func):
        return False
    makes_or_returns = _compat_dispatch.makes_all_results(func)
    return makes_or_returns or bool(_compat.returned_arguments(func))


def refuse_sparse(func: Any, outputs: Iterable[torch.Tensor]) -> None:
    """Raise a `TraceError` for results whose memory is not known while tracing."""
    for tensor in outputs:
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = f"tensor of layout {tensor.layout}"
            kind = "nested tensor" if tensor.is_nested else layout
            raise TraceError(
                f"{func} makes a {kind}, whose memory is not known while"
                " tracing. Use dense tensors (embeddings: `sparse=False`; nested"
                " tensors: padded; `nn.TransformerEncoder` makes them in evaluation"
                " unless it is built with `enable_nested_tensor=False`)."
            )


_Layouts = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]

_gpu_layouts: dict[Signature, _Layouts | None] = {}


def _as_on_gpu(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """A result of fake CPU tensors with the layouts and types of a GPU's."""
    if not _compat_dispatch.makes_all_results(func) or _compat.is_view(func):
        return out
    key = signature(func, args, kwargs)
    if key not in _gpu_layouts:
        _gpu_layouts[key] = _layouts_on_gpu(func, args, kwargs)
    layouts = _gpu_layouts[key]
    if layouts is None:
        return out
    leaves, spec = tree_flatten(out)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for place, layout in zip(places, layouts, strict=True):
        leaf = leaves[place]
        size, stride, dtype = _with_mixed_statistics(func, args, place, layout)
        if (tuple(leaf.shape), leaf.stride(), leaf.dtype) != (size, stride, dtype):
            leaves[place] = torch.empty_strided(
                size, stride, dtype=dtype, device=leaf.device
            )
    return tree_unflatten(leaves, spec)


def _layouts_on_gpu(func: Any, args: Any, kwargs: Any) -> _Layouts | None:
    """Size, stride and type of an op's results on a GPU; None if nobody knows."""
    try:
        out = on_fake_gpu(func, args, kwargs)
    except (RuntimeError, AssertionError, NotImplementedError):
        return None  # it asks for properties of a GPU
    return tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype)
        for leaf in tree_leaves(out)
        if isinstance(leaf, torch.Tensor)
    )


def _with_mixed_statistics(func: Any, args: Any, place: int, layout: Any) -> Any:
    """Group norm of a half input with float32 weights keeps float32 statistics.

    `param_scalar_type` in aten/src/ATen/native/group_norm.cpp; its fake kernel says
    half.
    """
    size, stride, dtype = layout
    if (
        func is torch.ops.aten.native_group_norm.default
        and place
        and args[1] is not None
    ):
        dtype = args[1].dtype
    return size, stride, dtype
