"""Private PyTorch APIs that let fake CPU tensors dispatch as a GPU's."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autosac._compat import TORCH_VERSION

# Where a GPU's group norm gets a contiguous input from if its own is none
# (aten/src/ATen/native/group_norm.cpp). Before torch 2.14 `group_norm` calls
# `contiguous`, so that autograd saves the copy. In 2.14 the kernel copies for itself,
# and does the same in backward. Since 2.15 it works on channels-last tensors as well.
GROUP_NORM_COPIES_FIRST = TORCH_VERSION < (2, 14)
GROUP_NORM_TAKES_CHANNELS_LAST = TORCH_VERSION >= (2, 15)

# Whether memory-efficient attention takes fewer key heads than query heads, and one of
# them without `enable_gqa` (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
EFFICIENT_ATTENTION_HAS_GQA = TORCH_VERSION >= (2, 14)

# Whether cuDNN runs attention only with dropout in sixteenths (`check_cudnn_dropout` in
# sdp_utils.cpp; pytorch/pytorch#174245). An H100 ran it with 0.1 under torch 2.11.
CUDNN_DROPOUT_IN_SIXTEENTHS = TORCH_VERSION >= (2, 12)

# Whether cuBLASLt works in cuBLAS's workspace; before, it had one of its own
# (`getCUDABlasLtWorkspace` in aten/src/ATen/cuda/CublasHandlePool.cpp;
# pytorch/pytorch#175879).
CUBLASLT_SHARES_WORKSPACE = TORCH_VERSION >= (2, 12)

# cuDNN of PyTorch's CUDA wheels, by what they require (nvidia-cudnn-cu12 or -cu13).
_WHEEL_CUDNN = {10: 91002, 11: 91900, 12: 92000, 13: 92000, 14: 92400, 15: 92600}
WHEEL_CUDNN = _WHEEL_CUDNN.get(TORCH_VERSION[1], max(_WHEEL_CUDNN.values()))

# `sDPPriorityOrder` of aten/src/ATen/Context.h, until somebody changes it.
DEFAULT_SDP_ORDER = (1, 2, 0, 3, 4)


def cublas_keeps_workspaces() -> bool:
    """Whether a thread keeps cuBLAS's workspace; since torch 2.15 each call has one.

    `isCUDABlasWorkspaceCachingEnabled` in aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    cache = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE", "").lower()
    return TORCH_VERSION < (2, 15) or cache in ("1", "on", "yes", "y", "true")


def matmuls_are_tf32() -> bool:
    """Whether PyTorch multiplies float32 matrices in TensorFloat-32 on a GPU."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def convolutions_are_tf32() -> bool:
    """Whether float32 convolutions run in TensorFloat-32 on a GPU, as by default."""
    settings: Any = torch.backends.cudnn
    return bool(settings.conv.fp32_precision == "tf32")


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """What PyTorch's allocator hands out on a GPU now, and the most that it has.

    The most since somebody called `torch.cuda.reset_peak_memory_stats`, if one did.
    """
    now, most = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
    return int(now(device)), int(most(device))


def sdp_priority_order() -> tuple[int, ...]:
    """Attention kernels in the order in which they are tried."""
    return tuple(torch._C._get_sdp_priority_order())


def autocast_ops(key: str = "AutocastCUDA") -> frozenset[str]:
    """Ops, without namespace, that have a kernel for autocast on a GPU or the CPU."""
    return frozenset(
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        and not re.search(r"[Dd]im_?[Dd]?name|names_|DimnameList", name)
    )


@contextlib.contextmanager
def without_cpu_autocast() -> Iterator[None]:
    """Let autocast leave ops alone for the sake of an argument on the CPU.

    Numbers whose values are known stay real tensors in a trace, so that the
    dispatcher finds the keys of both devices in one call.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in autocast_ops("AutocastCPU"):
                library.impl(
                    name,
                    torch.library.fallthrough_kernel,
                    "AutocastCPU",
                    allow_override=True,
                )
        yield
    finally:
        library._destroy()


def below_autocast() -> contextlib.AbstractContextManager[Any]:
    """Dispatch past the autocast kernels of a GPU."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    guard: contextlib.AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(
        keys
    )
    return guard


def composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the C++ composite kernel of an op; its `decompose` may be a Python one."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return op._op_dk(key, *args, **kwargs)


@contextlib.contextmanager
def gpu_kernel(name: str, key: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """Run a Python function for an op of ATen under a dispatch key."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # That it takes the place of another is meant.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            library.impl(name, kernel, key, allow_override=True)
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def gpu_dispatch(mode: FakeTensorMode) -> Iterator[None]:
    """Give the mode's fake CPU tensors the dispatch keys of a GPU's.

    They say that they lie on the CPU, so that autograd asks for no GPU; the dispatcher
    takes them for CUDA tensors. (Fake tensors that say "cuda" cannot go backward
    without a GPU: the engine asks for its context.)
    """
    fakes: Any = FakeTensor
    original: Any = fakes.__new__
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        ours = (args and args[0] is mode) or kwargs.get("fake_mode") is mode
        if not ours or len(args) < 3 or torch.device(args[2]).type != "cpu":
            return original(cls, *args, **kwargs)
        fake: Any = original(cls, *args[:2], gpu, *args[3:], **kwargs)
        fake.fake_device = cpu
        return fake

    fakes.__new__ = staticmethod(new)
    vars(mode)["autosac_backend"] = gpu  # for `new_fake`
    try:
        yield
    finally:
        fakes.__new__ = staticmethod(original)


@contextlib.contextmanager
def real_foreach(*, on_gpu: bool) -> Iterator[None]:
    """Let optimizers and `clip_grad_norm_` choose foreach kernels as for real tensors.

    The rules are `_default_to_fused_or_foreach` in torch/optim/optimizer.py and
    `_has_foreach_support` in torch/utils/_foreach_utils.py; neither knows fake tensors.

    Args:
        on_gpu: Choose for fake CPU tensors as for a GPU's.
    """
    places: list[Any] = [
        importlib.import_module(name)
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils")
    ]
    devices = [place._get_foreach_kernels_supported_devices for place in places]
    types = [list(place._foreach_supported_types) for place in places]
    supported = [*devices[0](), *(["cpu"] if on_gpu else [])]
    try:
        for place in places:
            place._get_foreach_kernels_supported_devices = supported.copy
            place._foreach_supported_types.append(FakeTensor)
        yield
    finally:
        for place, function, kinds in zip(places, devices, types, strict=True):
            place._get_foreach_kernels_supported_devices = function
            place._foreach_supported_types[:] = kinds
