"""CUDA's autocast for fake CPU tensors that stand for GPU ones.

The op lists are those of aten/src/ATen/autocast_mode.h, which the AMP page of
PyTorch's documentation prints ("CUDA ops that can autocast to float16", "to float32",
"CUDA ops that promote to the widest input type"). Tests compare them with the kernels
that the dispatcher holds. PyTorch's own kernels cannot serve: they skip tensors whose
device is the CPU.

A float32 leaf that requires gradients is cast once per outermost autocast region.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from autosac import _compat_fakes, _compat_gpu
from autosac.errors import UnsupportedError
from autosac.pytrees import tensors_in

_LOWER = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot
linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""
_FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
group_norm rms_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div
l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
_FLOAT32_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
scatter_add
"""
# Norms get the type of their result in another overload.
_NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}

Kernel = Callable[..., Any]


class Autocast:
    """Autocast's kernels, and the casts kept until the outermost region ends."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self) -> None:
        """Drop the kept casts."""
        self._kept.clear()

    def kernels(self) -> dict[str, Kernel]:
        """Overload name without namespace -> kernel, for every op that autocasts."""
        policies = (
            (_LOWER, self._lower),
            (_FLOAT32, self._float32),
            (_FLOAT32_RESULT, self._float32_result),
            (_WIDEST, self._widest),
        )
        by_name: dict[str, Kernel] = {}
        for names, policy in policies:
            for name in names.split():
                by_name[name] = functools.partial(policy, _overload(name))
        for name in _NORMS:
            by_name[name] = functools.partial(self._norm, name)
        overloads = _compat_gpu.autocast_ops()
        for name in overloads - set(by_name):
            by_name[name] = functools.partial(_refuse, name)
        return {name: kernel for name, kernel in by_name.items() if name in overloads}

    def _lower(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call(op, torch.get_autocast_dtype("cuda"), args, kwargs)

    def _float32(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call(op, torch.float32, args, kwargs)

    def _widest(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        for tensor in tensors_in((args, kwargs)):
            if _eligible(tensor) and tensor.dtype == torch.float32:
                dtype = torch.float32
        return self._call(op, dtype, args, kwargs)

    def _float32_result(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in op._schema.arguments]
        place = names.index("dtype")
        given = args[place] if place < len(args) else kwargs.get("dtype")
        if given is None and _eligible(args[0]):
            args = args[:place]
            kwargs = {**kwargs, "dtype": torch.float32}
        return self._call(op, None, args, kwargs)

    def _norm(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if not _eligible(args[0]):
            return self._call(_overload(name), None, args, kwargs)
        typed = getattr(torch.ops.aten.norm, _NORMS[name])
        if name == "norm.Scalar":
            args = (args[0], args[1] if len(args) > 1 else 2)
        elif len(args) < 4:
            args = (*args, False)
        return self._call(typed, None, args, {**kwargs, "dtype": torch.float32})

    def _call(self, op: Any, dtype: torch.dtype | None, args: Any, kwargs: Any) -> Any:
        with _compat_gpu.below_autocast():
            if dtype is not None:
                args, kwargs = self._cast_all(op, args, kwargs, dtype)
            return op(*args, **kwargs)

    def _cast_all(
        self, op: Any, args: Any, kwargs: Any, dtype: torch.dtype
    ) -> tuple[Any, Any]:
        """Cast all arguments, the last first: GCC, which builds the wheels, does so."""
        cast = functools.partial(self._cast, dtype=dtype)
        names = [argument.name for argument in op._schema.arguments]
        order = sorted(kwargs, key=names.index, reverse=True)
        named = {name: tree_map(cast, kwargs[name]) for name in order}
        placed = [tree_map(cast, value) for value in reversed(args)]
        return placed[::-1], named

    def _cast(self, value: Any, *, dtype: torch.dtype) -> Any:
        if not _eligible(value) or value.dtype == dtype:
            return value
        keep = (
            dtype == torch.get_autocast_dtype("cuda")
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not keep:
            return value.to(dtype)
        kept = self._kept.get(id(value))
        if kept is None:
            kept = self._kept[id(value)] = (value, value.to(dtype))
        return kept[1]


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _eligible(value: Any) -> bool:
    """Whether a tensor is cast on a GPU, where one whose values are known lies too.

    One without dimensions may be a number of the CPU, which is left alone.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and (value.is_cuda or _compat_fakes.is_fake(value) or value.dim() > 0)
    )


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    if name == "binary_cross_entropy":
        raise RuntimeError(
            "binary_cross_entropy is unsafe to autocast on a GPU; use"
            " binary_cross_entropy_with_logits."
        )
    raise UnsupportedError(
        f"aten.{name} under autocast cannot be planned for a GPU that is not present."
    )


@contextlib.contextmanager
def gpu_autocast() -> Iterator[None]:
    """Make every `torch.autocast` inside cast as on a GPU.

    A region for the CPU is one for the GPU here, as tensors say that they are on the
    CPU; both states are set alike, so that `torch.utils.checkpoint` restores them.
    """
    autocast: Any = torch.autocast
    originals = autocast.__init__, autocast.__enter__, autocast.__exit__
    installed = contextlib.ExitStack()
    casts = Autocast()
    depth, ready = 0, False

    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if device_type in ("cuda", "cpu"):
            device_type = "cpu"
            dtype = dtype or torch.get_autocast_dtype("cuda")
        originals[0](self, device_type, dtype, *args, **kwargs)

    def enter(self: Any) -> Any:
        nonlocal depth, ready
        depth += 1
        self._autosac_before = _state()
        result = originals[1](self)
        if self._enabled and not ready:
            ready = True
            installed.enter_context(_compat_gpu.without_cpu_autocast())
            for name, kernel in casts.kernels().items():
                installed.enter_context(
                    _compat_gpu.gpu_kernel(name, "AutocastCUDA", kernel)
                )
        if self.device == "cpu":
            torch.set_autocast_enabled("cuda", self._enabled)
            torch.set_autocast_dtype("cuda", self.fast_dtype)
        return result

    def leave(self: Any, *error: Any) -> Any:
        nonlocal depth
        depth -= 1
        result = originals[2](self, *error)
        enabled, dtype = self._autosac_before
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)
        if depth == 0:
            casts.forget()
        return result

    patched = (init, enter, leave)
    with installed:
        for name, method in zip(_METHODS, patched, strict=True):
            setattr(autocast, name, method)
        try:
            yield
        finally:
            for name, method in zip(_METHODS, originals, strict=True):
                setattr(autocast, name, method)


_METHODS = ("__init__", "__enter__", "__exit__")


def _state() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
