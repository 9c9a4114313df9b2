"""The device lens: a trace on fake CPU tensors that takes a GPU's kernels.

The tensors carry the dispatch keys of a GPU's (`_compat_gpu.gpu_dispatch`), so that
PyTorch's own dispatcher picks the ops that the GPU would run: fused norms, the casts
of CUDA's autocast. Where ATen asks a tensor for its device instead, this module gives
the answer in its place, with temporary kernels for the composite ops that ask:

    dropout                 native_dropout while training       Dropout.cpp
    group_norm              contiguous input, in old versions   group_norm.cpp
    batch_norm              cuDNN, MIOpen or ATen's own         Normalization.cpp
    softmax, log_softmax    half in, float32 out in one kernel  SoftMax.cpp
    attention               see attention.py, attention_choice.py   attention.cpp
    autocast                see autocast.py                     autocast_mode.h
    foreach optimizers      `_compat_gpu.real_foreach`          torch/optim/optimizer.py

(all .cpp files in aten/src/ATen/native). What cannot be known without the GPU is
refused: recurrent layers (the size of cuDNN's reserve), ctc_loss, and grid_sample
where cuDNN has a kernel for it.

Tensors say that they lie on the CPU. Every tensor of the step counts as GPU memory,
also one that the real step makes on the CPU: a bound from above. Except for the
scalars that optimizers keep on the CPU, see `host_state`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autosac import _compat, _compat_fakes, _compat_gpu
from autosac.devices.specs import DeviceSpec
from autosac.errors import ArgumentError, UnsupportedError
from autosac.lens import attention
from autosac.lens.autocast import gpu_autocast
from autosac.step.training_step import AnyOptimizer

# Composite ops that would choose a kernel whose memory is not known here.
_RECURRENT = (
    "lstm.input",
    "lstm.data",
    "gru.input",
    "gru.data",
    "rnn_tanh.input",
    "rnn_tanh.data",
    "rnn_relu.input",
    "rnn_relu.data",
    "lstm_cell",
    "gru_cell",
)
_CTC_LOSS = ("ctc_loss.IntList", "ctc_loss.Tensor")
# Limits of `_select_batch_norm_backend` in aten/src/ATen/native/Normalization.cpp.
_CUDNN_BATCH_NORM_SAMPLES = {True: 880801, False: 65535}
_CUDNN_GRID_TYPES = {torch.float64, torch.float32, torch.float16}
_CUDNN_MOST_ELEMENTS = 2**31 - 1
_MIOPEN_MOST_DIMENSIONS = 5
# Optimizer state that is a CPU scalar unless `capturable` or `fused` (torch/optim).
_HOST_STATE = ("step", "mu_product")


@contextlib.contextmanager
def lens(mode: Any, device: DeviceSpec | None) -> Iterator[None]:
    """Let fake CPU tensors of a mode be treated as tensors of a GPU.

    Args:
        mode: The fake tensor mode.
        device: The GPU, or None if the tensors are where they say they are.

    Raises:
        ArgumentError: The device lacks a compute capability.
    """
    if device is None:
        with _compat_gpu.real_foreach(on_gpu=False):
            yield
        return
    if device.vendor == "nvidia" and device.compute_capability is None:
        raise ArgumentError(
            f"`device`={device.name!r} has no `compute_capability`, on which it depends"
            " what kernels it runs; set it in the `DeviceSpec`, such as (9, 0)."
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_compat_gpu.gpu_dispatch(mode))
        stack.enter_context(_compat_gpu.real_foreach(on_gpu=True))
        stack.enter_context(gpu_autocast())
        for name, kernel in _kernels(device).items():
            guarded = functools.partial(_for_fakes, mode, _overload(name), kernel)
            context = _compat_gpu.gpu_kernel(name, "AutogradCUDA", guarded)
            stack.enter_context(context)
        yield


def host_state(optimizer: AnyOptimizer) -> list[torch.Tensor]:
    """State that an optimizer keeps on the CPU though its parameters are on a GPU."""
    state = optimizer.state  # put together anew each time it is asked for
    return [
        value
        for group in optimizer.param_groups
        if not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]
        for name, value in state.get(parameter, {}).items()
        if name in _HOST_STATE and isinstance(value, torch.Tensor) and not value.dim()
    ]


def _kernels(device: DeviceSpec) -> dict[str, Callable[..., Any]]:
    """Composite op -> what the device does."""
    kernels: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "softmax.int": functools.partial(_softmax, "softmax"),
        "log_softmax.int": functools.partial(_softmax, "log_softmax"),
        "grid_sampler": functools.partial(_grid_sampler, device),
        "group_norm": _group_norm,
        "_batch_norm_impl_index": functools.partial(_batch_norm, device),
        "scaled_dot_product_attention": functools.partial(attention.attend, device),
    }
    kernels |= {name: functools.partial(_refuse, name) for name in _RECURRENT}
    kernels |= {name: functools.partial(_refuse, name) for name in _CTC_LOSS}
    return kernels


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _for_fakes(mode: Any, op: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the kernels away from tensors that other code has on a real GPU."""
    if _compat_fakes.fake_mode_of(args[0]) is mode:
        return kernel(*args, **kwargs)
    return _compat_gpu.composite(op, *args, **kwargs)


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    reason = (
        "the memory that cuDNN reserves for recurrent layers is known only to cuDNN"
        if name in _RECURRENT
        else "it depends on the GPU which kernel runs it"
    )
    raise UnsupportedError(
        f"aten.{name} cannot be planned for a GPU that is not present: {reason}."
        " Profile the model on that GPU."
    )


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, train)[0]
    out: torch.Tensor = _compat_gpu.composite(
        torch.ops.aten.dropout.default, input, p, train
    )
    return out


def _softmax(
    name: str, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    aten = torch.ops.aten
    if input.dtype == torch.float16 and dtype == torch.float32:
        fused: torch.Tensor = getattr(aten, f"_{name}").default(input, dim, True)
        return fused
    out: torch.Tensor = _compat_gpu.composite(
        getattr(aten, name).int, input, dim, dtype
    )
    return out


def _group_norm(input: torch.Tensor, *args: Any) -> torch.Tensor:
    """Group norm of a GPU: unlike the CPU's, some versions drop channels last."""
    if _compat_gpu.GROUP_NORM_COPIES_FIRST:
        input = input.contiguous()
    out: torch.Tensor = _compat_gpu.composite(
        torch.ops.aten.group_norm.default, input, *args
    )
    return out


def _grid_sampler(
    device: DeviceSpec,
    input: torch.Tensor,
    grid: torch.Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> torch.Tensor:
    """Grid sampling of a GPU: `cond_cudnn_grid_sampler` in GridSamplerUtils.h."""
    bilinear, zeros = interpolation_mode == 0, padding_mode == 0
    is_kind = bilinear and zeros and align_corners and input.dim() == 4
    types_fit = {input.dtype, grid.dtype} <= _CUDNN_GRID_TYPES
    sizes = (input.numel(), grid.numel())
    sizes_fit = input.shape[1:2] <= (1024,) and max(sizes) < _CUDNN_MOST_ELEMENTS
    is_here = device.vendor == "nvidia" and torch.backends.cudnn.enabled
    if is_kind and types_fit and sizes_fit and is_here:
        sampled: torch.Tensor = torch.ops.aten.cudnn_grid_sampler(input, grid)
        return sampled
    out: torch.Tensor = _compat_gpu.composite(
        torch.ops.aten.grid_sampler.default,
        input,
        grid,
        interpolation_mode,
        padding_mode,
        align_corners,
    )
    return out


def _batch_norm(
    device: DeviceSpec,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[Any, ...]:
    """`_batch_norm_impl_index`: output, statistics, reserve, number of the backend."""
    aten = torch.ops.aten
    affine = weight is not None and bias is not None
    tracked = running_mean is not None and running_var is not None
    untracked = running_mean is None and running_var is None
    vendor_fits = (
        affine
        and (tracked or (untracked and training))
        and input.dim() >= 3
        and torch.backends.cudnn.enabled
        and bool(input.numel())
    )
    if vendor_fits and weight is not None and bias is not None:
        statistics = [
            None if t is None else t.contiguous() for t in (running_mean, running_var)
        ]
        affines = (weight.contiguous(), bias.contiguous())
        rest = (*statistics, training, momentum, eps)
        if device.vendor == "nvidia" and _cudnn_norms(input, weight, training, eps):
            dense = input.contiguous(memory_format=_compat.memory_format(input))
            return (*aten.cudnn_batch_norm(dense, *affines, *rest), 1)
        if device.vendor == "amd" and _miopen_norms(input, weight):
            out = aten.miopen_batch_norm(input.contiguous(), *affines, *rest)
            return (*out, input.new_empty(0, dtype=torch.uint8), 2)
    return _compat_gpu.composite(  # type: ignore[no-any-return]
        aten._batch_norm_impl_index.default,
        input,
        weight,
        bias,
        running_mean,
        running_var,
        training,
        momentum,
        eps,
        cudnn_enabled,
    )


def _cudnn_norms(
    input: torch.Tensor, weight: torch.Tensor, training: bool, eps: float
) -> bool:
    types = (input.dtype, weight.dtype)
    return (
        torch.bfloat16 not in types
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and input.shape[0] <= _CUDNN_BATCH_NORM_SAMPLES[training]
        and input.numel() < _CUDNN_MOST_ELEMENTS
        and eps >= 0
    )


def _miopen_norms(input: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        input.dim() <= _MIOPEN_MOST_DIMENSIONS
        and input.dtype not in (torch.float64, torch.bfloat16)
        and weight.dtype != torch.float16
        and _compat.memory_format(input) == torch.contiguous_format
    )
