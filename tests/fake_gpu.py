"""What a GPU would run, asked of PyTorch's dispatcher without a GPU.

Fake tensors that say "cuda" run forward anywhere (only backward needs a GPU), so the
ops that they dispatch are an independent truth for the device lens.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autosac._compat import IGNORED_OPS
from autosac._compat_fakes import is_fake
from autosac.devices.specs import DeviceSpec
from autosac.fake_tensors.values import run_op
from autosac.lens.mode import lens

Call = tuple[str, tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], ...]]


class Log(TorchDispatchMode):
    """Name of every op, and type, shape and strides of its results."""

    def __init__(self, *, through_lens: bool) -> None:
        super().__init__()
        self.through_lens = through_lens
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if is_fake(t)]
        if self.through_lens:
            out = run_op(func, args, kwargs, inputs, on_gpu=True)
        else:
            out = func(*args, **kwargs)
        if func not in IGNORED_OPS:
            leaves = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            results = tuple((t.dtype, tuple(t.shape), t.stride()) for t in leaves)
            self.calls.append((str(func), results))
        return out


def _moved(mode: FakeTensorMode, device: torch.device) -> Any:
    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        observed = FakeTensor(mode, value.detach().to("meta"), device)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(observed, requires_grad=value.requires_grad)
        return observed.requires_grad_(value.requires_grad)

    return fake


def _run(function: Any, args: Any, fake: Any, mode: Any, log: Log) -> list[Call]:
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function)
        for module in function.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: fake(t) for name, t in tensors.items()})
    args = tree_map(fake, args)
    with mode, log:
        function(*args)
    return log.calls


def gpu_calls(
    function: Any, *args: Any, autocast: torch.dtype | None = None
) -> list[Call]:
    """Ops of a call on fake GPU tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    log = Log(through_lens=False)
    fake = _moved(mode, torch.device("cuda", 0))
    before = torch.get_autocast_dtype("cuda")
    if autocast is not None:
        # `torch.autocast` would switch itself off without a GPU.
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", autocast)
    torch.autocast_increment_nesting()
    try:
        return _run(function, args, fake, mode, log)
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def lens_calls(
    function: Any,
    *args: Any,
    device: DeviceSpec,
    autocast: torch.dtype | None = None,
) -> list[Call]:
    """Ops of the same call on fake CPU tensors, through the lens."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with lens(mode, device):
        fake = _moved(mode, torch.device("cpu"))
        region: Any = contextlib.nullcontext()
        if autocast is not None:
            region = torch.autocast("cuda", dtype=autocast)
        with region:
            return _run(function, args, fake, mode, Log(through_lens=True))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(50, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.layer_norm, self.rms_norm = nn.LayerNorm(32), nn.RMSNorm(32)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.batch_norm, self.group_norm = nn.BatchNorm1d(16), nn.GroupNorm(4, 16)
        self.dropout, self.prelu = nn.Dropout(0.1), nn.PReLU()
        self.attention = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)

    def forward(self, ids):
        x = self.token(ids)
        x = self.dropout(self.down(functional.gelu(self.up(x))))
        x = self.rms_norm(self.layer_norm(x))
        x = x + self.batch_norm(self.group_norm(self.convolution(x)))
        x = self.attention(x, x, x, need_weights=False)[0]
        x = functional.softmax(x, -1) + functional.log_softmax(x, -1) + self.prelu(x)
        scores = torch.einsum("bij,bkj->bik", x, x) @ x
        y = torch.cat([scores, x], -1).cumsum(-1).exp().pow(2)
        loss = functional.cross_entropy(y[:, 0], ids[:, 0]) + y.norm()
        return loss + y.norm(dim=-1).sum() + y.prod(-1).mean()


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.project, self.num_heads = nn.Linear(width, 3 * width), num_heads

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (self.num_heads, -1)).chunk(3, -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v)
