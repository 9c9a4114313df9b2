"""Ring attention as PyTorch runs it, for the trace of one rank.

Keys and values of a part go from rank to rank; while they do, each rank attends to the
part that it has, and merges what that yields by the logarithms of its sums. The loops
are PyTorch's own (`_templated_ring_attention`), over the kernel that the device runs,
with the parts sent on one by one (`_RotateMethod.ALL_TO_ALL`). Under a causal mask each
rank has a part near the beginning and its mirror image near the end, so that all have
as much to do: to parts of ranks before it attends with all queries and half of the
keys, to those of ranks behind it with half of the queries. So ranks run other ops,
which no policy that names ops by their place can describe: rings are predicted, not
run. What is sent is kept until it has arrived, as process groups do, and traces of
PyTorch's loops do not.

Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py, torch
2.10 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autosac import _compat_ring
from autosac._compat_distributed import group_of
from autosac.devices.specs import DeviceSpec
from autosac.errors import UnsupportedError
from autosac.lens import attention_choice
from autosac.parallel.context_parallel import SEQUENCE, Attention, AttentionMode

_aten = torch.ops.aten


class RingMode(AttentionMode):
    """Ring attention in place of attention to a part.

    Args:
        group_name: PyTorch's name of the group.
        device: The GPU whose kernels are traced, None for the CPU's.
    """

    def __init__(self, group_name: str, device: DeviceSpec | None) -> None:
        super().__init__()
        self.group_name, self.device = group_name, device

    def attend(self, call: Attention) -> torch.Tensor:
        """Attend to parts that go around."""
        kernel, num_tokens = _kernel(call, self.device), call.query.shape[SEQUENCE]
        if num_tokens % (2 * kernel.rows):
            raise UnsupportedError(
                f"PyTorch's ring attention halves the {num_tokens} tokens of a rank"
                f" into multiples of {kernel.rows}, and cannot: pad the sequence."
            )
        options = {"dropout_p": call.dropout_p, "scale": call.rest.get("scale")}
        ring = _Ring(self.group_name, kernel, call.is_causal, options)
        out: torch.Tensor = _RingAttention.apply(call.query, call.key, call.value, ring)
        return out


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One attention kernel.

    Attributes:
        forward: Op, whose results are output, logarithms of sums, and `rest`.
        backward: The op that differentiates it,
        gradient: and what that calls the gradient of the output.
        options: Of forward besides dropout, causality and scale.
        rest: What backward calls the other results.
        more: Options of backward besides.
        rows: It rounds the number of queries up to a multiple of this in its sums.
    """

    forward: Any
    backward: Any
    gradient: str = "grad_out"
    options: Mapping[str, Any] = field(default_factory=dict)
    rest: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 1


_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
_SEEDS = ("philox_seed", "philox_offset")
_KERNELS = {
    "cpu": _Kernel(
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ),
    attention_choice.FLASH: _Kernel(
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_backward.default,
        rest=(*_LENGTHS, *_SEEDS),
    ),
    attention_choice.CUDNN: _Kernel(
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_cudnn_attention_backward.default,
        options={"attn_bias": None, "compute_log_sumexp": True},
        rest=(*_LENGTHS, *_SEEDS),
        more={"attn_bias": None},
    ),
    attention_choice.EFFICIENT: _Kernel(
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_efficient_attention_backward.default,
        "grad_out_",
        options={"attn_bias": None, "compute_log_sumexp": True},
        rest=_SEEDS,
        more={"attn_bias": None, "grad_input_mask": (True, True, True, False)},
        rows=32,  # kAlignLSE of its kernel
    ),
}


def _kernel(call: Attention, device: DeviceSpec | None) -> _Kernel:
    """What a device runs for a call."""
    if device is None:
        return _KERNELS["cpu"]
    name = attention_choice.backend(
        attention_choice.Call(
            *(call.query, call.key, call.value, None, call.dropout_p, call.is_causal),
            bool(call.rest.get("enable_gqa")),
        ),
        device,
    )
    if name not in _KERNELS or call.query.shape[-1] % 8:
        raise UnsupportedError(
            f"Ring attention of heads {call.query.shape[-1]} wide in"
            f" {call.query.dtype} has no fused kernel on {device.name}: use half types"
            " and widths that 8 divides, or plan with `cp_method='ulysses'`."
        )
    return _KERNELS[name]


@dataclass(frozen=True, slots=True)
class _Ring:
    """One call of attention in a group; holds none of its tensors."""

    group_name: str
    kernel: _Kernel
    is_causal: bool
    options: Mapping[str, Any]

    def run(self, loop: Callable[..., Any], op: Any, *args: Any, **options: Any) -> Any:
        """Run one of PyTorch's loops."""
        with _compat_ring.turning(balanced=self.is_causal):
            return loop(
                group_of(self.group_name),
                SEQUENCE,
                op,
                *args,
                is_causal=self.is_causal,
                **self.options,
                **options,
            )


class _RingAttention(torch.autograd.Function):
    """Attention of a part to the whole sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ring: _Ring,
    ) -> torch.Tensor:
        kernel = ring.kernel
        loop = _compat_ring.forward
        out, sums, *rest = ring.run(
            loop, kernel.forward, query, key, value, **kernel.options
        )
        named = dict(zip(kernel.rest, rest, strict=False))
        tensors = {n: t for n, t in named.items() if isinstance(t, torch.Tensor)}
        ctx.ring, ctx.names = ring, tuple(tensors)
        ctx.numbers = {n: t for n, t in named.items() if n not in tensors}
        ctx.save_for_backward(query, key, value, out, sums, *tensors.values())
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ring: _Ring = ctx.ring
        kernel = ring.kernel
        query, key, value, out, sums, *rest = ctx.saved_tensors
        parts = ring.run(
            _compat_ring.backward,
            kernel.backward,
            *(*gradients, kernel.gradient, query, key, value, out, sums),
            **dict(zip(ctx.names, rest, strict=True)),
            **ctx.numbers,
            **kernel.more,
        )
        return *parts[:3], None
