"""PyTorch's loops of ring attention, with parts sent on one by one.

Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py, torch
2.10 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention

forward: Any = _attention._templated_ring_attention
backward: Any = _attention._templated_ring_attention_backward


class _Held(_attention._AllToAllRotater):
    """Keeps what is sent until it has arrived."""

    def exchange_buffers(self, curr_buffer: torch.Tensor) -> None:
        self.sent = curr_buffer
        super().exchange_buffers(curr_buffer)

    def next_buffer(self) -> torch.Tensor:
        arrived: torch.Tensor = super().next_buffer()
        del self.sent
        return arrived


@contextlib.contextmanager
def turning(*, balanced: bool) -> Iterator[None]:
    """PyTorch's loops send parts on one by one."""
    module: Any = _attention
    options = module._cp_options
    before = options.enable_load_balance, module._create_rotater
    options.enable_load_balance = balanced
    module._create_rotater = lambda group, dim, method=None: _Held(group, dim)
    try:
        yield
    finally:
        options.enable_load_balance, module._create_rotater = before
