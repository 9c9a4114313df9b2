"""`one_hot` on fakes, as it is on real tensors.

It is made of other ops, and which, depends on the tensor (aten/src/ATen/native:
Onehot.cpp): one with the Python dispatch key is compared with a range, a plain one on
the CPU is looked at twice for values out of range and then scattered into zeros, one on
a GPU is only scattered. So plain fakes are asked for, and told that all is in range.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch

from autosac import _compat_fakes, _compat_gpu
from autosac.tracing.recorder import Recorder

_OP = torch.ops.aten.one_hot.default


@contextlib.contextmanager
def real_one_hot(recorder: Recorder) -> Iterator[None]:
    """Let `one_hot` run the ops of a real step on the fakes of a recorder."""
    of_recorder = weakref.ref(recorder)  # PyTorch keeps kernels that are gone
    with contextlib.ExitStack() as stack:
        for key in ("AutogradCPU", "AutogradCUDA"):
            kernel = partial(_one_hot, of_recorder)
            stack.enter_context(_compat_gpu.gpu_kernel("one_hot", key, kernel))
        yield


def _one_hot(
    of_recorder: weakref.ref[Recorder], indices: torch.Tensor, num_classes: int = -1
) -> torch.Tensor:
    recorder = of_recorder()
    assert recorder is not None
    if recorder.target is not None and num_classes > 0:
        size = (*indices.shape, num_classes)
        zeros = torch.zeros(size, dtype=indices.dtype, device=indices.device)
        return zeros.scatter_(-1, indices.unsqueeze(-1), 1)
    of_pytorch: Callable[[], torch.Tensor] = partial(
        _compat_gpu.composite, _OP, indices, num_classes
    )
    if not _compat_fakes.is_fake(indices) or num_classes == -1:
        return of_pytorch()
    recorder.needs_plain_fakes()
    with recorder.answering_zero():
        return of_pytorch()
