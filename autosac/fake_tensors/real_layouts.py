"""What kernels really return, where their fake kernels say something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autosac import _compat, _compat_fakes

_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"

# Arguments of norms that return statistics: the first that is given has their type.
_NORM_PARAMETERS = {
    "aten.native_batch_norm.default": slice(1, 5),
    "aten._native_batch_norm_legit.default": slice(1, 5),
    "aten._native_batch_norm_legit.no_stats": slice(1, 3),
    "aten._native_batch_norm_legit_functional.default": slice(1, 5),
    "aten.native_layer_norm.default": slice(2, 4),
    "aten.native_group_norm.default": slice(1, 3),
}

# Losses that shrink their result from one number an element to one, by `resize_`,
# which keeps the memory (aten/src/ATen/native: BinaryOps.cpp, Loss.cpp, cuda/Loss.cu):
# name -> position of the reduction, which is 0 for none and 1 by default.
_UNREDUCED = {
    "aten.mse_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.soft_margin_loss.default": 2,
    "aten.binary_cross_entropy.default": 3,
}

# Their gradient has the type of the input, whatever the target's is (Loss.cpp there).
_LOSS_BACKWARDS = {
    "aten.mse_loss_backward.default",
    "aten.smooth_l1_loss_backward.default",
    "aten.soft_margin_loss_backward.default",
}


def of_own_kernel(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Fake results of an op whose fake kernel refuses too much, or says the wrong size.

    Functional forms of writes copy all memory around a view of it (`copy`,
    `slice_scatter`; `clone_preserve_strides` in aten/src/ATen/native/TensorFactories).

    None for other ops, and where the results depend on values that are not known.
    """
    kernel = _OWN_KERNELS.get(str(func))
    if kernel is None:
        return _compat_fakes.by_composite_kernel(func, args, kwargs)
    return kernel(*args, **kwargs)


def _ctc_loss(
    log_probs: torch.Tensor, targets: Any, input_lengths: Any, lengths: Any, *_: Any
) -> Any:
    """The longest target decides the shape of what a CTC loss saves.

    aten/src/ATen/native: LossCTC.cpp, cuda/LossCTC.cu.
    """
    if isinstance(lengths, torch.Tensor):
        if _compat_fakes.is_fake(lengths):
            return None
        with _compat.no_modes():
            lengths = lengths.tolist()
    num_steps, batch = log_probs.shape[:2]
    alphas = (batch, num_steps, 2 * max(lengths, default=0) + 1)
    return log_probs.new_empty((batch,)), log_probs.new_empty(alphas)


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Rows of 16 bytes' multiples (aten/src/ATen/native/GroupedMMUtils.h, torch 2.14).

    The fake kernel refuses float32, and pads no rows where PyTorch has no CUDA.

    Raises:
        RuntimeError: Rows of an argument are not such.
    """
    for given in (left, right):
        row_bytes = max(given.stride()[-2:]) * given.itemsize
        if row_bytes % 16:
            raise RuntimeError(
                f"grouped_mm takes rows of a multiple of 16 bytes, and has {row_bytes}"
            )
    size = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        groups = left.shape[0] if left.dim() == 3 or offsets is None else len(offsets)
        size.insert(0, groups)
    dtype = out_dtype or left.dtype
    padded = -(-size[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize
    stride = [size[-2] * padded, padded, 1][-len(size) :]
    return torch.empty_strided(size, stride, dtype=dtype, device=left.device)


def _sampled(images: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """`cudnn_grid_sampler_forward` in aten/src/ATen/native/cudnn/GridSampler.cpp."""
    return images.new_empty((*images.shape[:2], *grid.shape[1:3]))


def _sampled_backward(
    images: torch.Tensor, grid: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cudnn_grid_sampler_backward` there."""
    return images.new_empty(images.shape), grid.new_empty(grid.shape)


_OWN_KERNELS: dict[str, Callable[..., Any]] = {
    "aten.cudnn_grid_sampler.default": _sampled,
    "aten.cudnn_grid_sampler_backward.default": _sampled_backward,
    "aten._ctc_loss.Tensor": _ctc_loss,
    "aten._ctc_loss.default": _ctc_loss,
    "aten._grouped_mm.default": _grouped_mm,
}


def on_any_device(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """A fake result with the memory that every device's kernel gives it.

    Losses that reduce in place keep the memory of what they reduced (`_UNREDUCED`);
    gradients of losses have the type of the input (`_LOSS_BACKWARDS`), where fake
    kernels say that of input and target together.
    The backward of batch norm makes no gradient of images that need none (cpu and cuda
    in aten/src/ATen/native: batch_norm.cpp, Normalization.cu). `fold` makes its result
    in a tensor of its input's size (Col2Im.cpp, cuda/Col2Im.cu there).
    """
    if str(func) == "aten.col2im.default":
        return args[0].new_empty(args[0].shape).as_strided(out.shape, out.stride())
    if str(func) == "aten.native_batch_norm_backward.default":
        return (out[0] if args[9][0] else None, *out[1:])
    if str(func) in _LOSS_BACKWARDS:
        return out.to(args[1].dtype)
    position = _UNREDUCED.get(str(func))
    if position is None or (len(args) > position and args[position] == 0):
        return out
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return out.new_empty(shape).as_strided((), ())


def on_cpu(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """A fake result with the types and sizes that the CPU kernel gives it.

    Norms of a bfloat16 input with float32 parameters keep their statistics in float32
    (aten/src/ATen/native: Normalization, layer_norm, group_norm); their fake kernels
    say bfloat16. Batch norm in bfloat16 alone returns running statistics in that type;
    its fake kernel says float32. In evaluation it saves none, as a GPU does. A group
    norm's result has the memory format of its input, as the input's gradient has, and
    that has its type, too; fake kernels give contiguous ones, and the weight's type.
    oneDNN's LSTM saves bytes for its backward, often more than its output has
    (aten/src/ATen/native/mkldnn/RNN.cpp); its fake one says none.
    Attention in float64 keeps its statistics in that type (FlashAttentionKernel.cpp);
    in torch 2.10 its fake kernel says float32. Norms of float16 weights are in float32
    (WeightNorm.cpp); before torch 2.15 their fake kernel says float16.
    Bags of embeddings: see `_bags`.
    """
    name = str(func)
    if name in _ATTENDED and torch.is_autocast_enabled("cpu"):
        return _attended(func, args, out)
    if name in _BAGS:
        return _bags(*args, out=out, trains=_BAGS[name])
    if name == _ATTENTION and args[0].dtype == torch.float64:
        return (out[0], out[1].to(torch.float64))
    if name == "aten._weight_norm_interface.default" and args[1].itemsize == 2:
        return (out[0], out[1].to(torch.float32))
    if name == "aten.mkldnn_rnn_layer.default":
        return (*out[:3], out[3].new_empty(_saved_rnn_bytes(args)))
    if name == "aten.mkldnn_rnn_layer_backward.default":
        # The fake kernel returns one gradient for both biases, sometimes.
        return (*out[:4], torch.empty_like(out[4]), *out[5:])
    if name == "aten.native_group_norm_backward.default" and out[0] is not None:
        return (_laid_out_as(args[1], out[0].to(args[1].dtype)), *out[1:])
    if name == "aten.native_group_norm.default":
        out = (_laid_out_as(args[0], out[0]), *out[1:])
    if name not in _NORM_PARAMETERS:
        return on_any_device(func, args, out)
    given = [p for p in args[_NORM_PARAMETERS[name]] if p is not None]
    if not given or given[0].device.type != "cpu":
        return out
    statistics = [statistic.to(given[0].dtype) for statistic in out[1:3]]
    if name == "aten.native_batch_norm.default" and not args[5]:
        statistics = [statistic.new_empty(0) for statistic in statistics]
    running = zip(out[3:], args[3:5], strict=False)  # the new ones, and the old
    return (out[0], *statistics, *(new.to(old.dtype) for new, old in running))


# The fast paths of attention in evaluation: where their arguments are the number of
# features, that of heads, and masks.
_ATTENDED = {
    "aten._native_multi_head_attention.default": (3, 4, (9, 12)),
    "aten._transformer_encoder_layer_fwd.default": (1, 2, (18, 19)),
}


def _attended(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Results in the types that autocast gives them: only running a small one tells."""
    width, heads, masks = _ATTENDED[str(func)]
    sizes = {args[width]: 4, 3 * args[width]: 12}

    def small(place: int, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor) and place not in masks:
            return torch.zeros([sizes.get(n, 8) for n in arg.shape], dtype=arg.dtype)
        return {width: 4, heads: 1, **dict.fromkeys(masks)}.get(place, arg)

    with _compat.no_modes():
        results = func(*(small(place, arg) for place, arg in enumerate(args)))
    if isinstance(out, torch.Tensor):
        return out.to(results.dtype)
    return tuple(o.to(r.dtype) for o, r in zip(out, results, strict=True))


_BAGS = {  # and whether a gradient may follow
    "aten._embedding_bag.default": True,
    "aten._embedding_bag_forward_only.default": False,
}
_FAST_SUMS = {torch.float32, torch.float16, torch.bfloat16}


def _bags(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    _: bool = False,
    mode: int = 0,
    __: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
    out: Any,
    trains: bool,
) -> Any:
    """Results of bags of embeddings in the memory that they are made in.

    The bag of each index is found in memory of one index more; sums that are fast have
    none of it, in bfloat16 neither, of which the fake kernel does not know. Sizes of
    bags lie in memory of one for each offset, though the last one begins no bag where
    it is given (`make_offset2bag`, `make_bag_size` and `is_fast_path_index_select` in
    aten/src/ATen/native: EmbeddingBag.cpp).
    """
    results = list(out)
    is_fast = mode == 0 and weight.dtype in _FAST_SUMS and padding_idx < 0
    is_fast &= weight.stride(1) == 1
    if per_sample_weights is not None:
        is_fast &= per_sample_weights.stride(0) == 1
    found = indices.new_empty(0 if is_fast else len(indices) + 1)
    results[1] = found if is_fast else found[:-1]
    counts = offsets.new_empty(len(offsets))
    if mode == 0 and not trains:
        return (*results[:2], counts, torch.empty_like(counts))
    return (*results[:2], counts[: len(out[0])], results[3])


def _laid_out_as(images: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A result in the memory format that a tensor suggests."""
    return out.contiguous(memory_format=_compat.memory_format(images))


_rnn_bytes: dict[Any, int] = {}


def _saved_rnn_bytes(args: tuple[Any, ...]) -> int:
    """Bytes that oneDNN's LSTM saves: only running it tells."""
    layouts = tuple((tuple(arg.shape), arg.stride(), arg.dtype) for arg in args[:7])
    key = (layouts, str(args[7:]))
    if key not in _rnn_bytes:
        with _compat.no_modes():
            zeros = [torch.zeros(size, dtype=dtype) for size, _, dtype in layouts]
            results = onednn_rnn(zeros, args[7:])
        _rnn_bytes[key] = 0 if results[3] is None else results[3].nbytes
    return _rnn_bytes[key]


def onednn_rnn(inputs: list[torch.Tensor], options: Any) -> Any:
    """Run oneDNN's LSTM as in training: it saves bytes only if autograd watches."""
    with torch.enable_grad():
        watched = [tensor.requires_grad_() for tensor in inputs]
        return torch.ops.aten.mkldnn_rnn_layer.default(*watched, *options)
