"""Nets of recurrent, convolutional and attention parts in one another, by chance."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn

_MOST_DEPTH = 2  # of parts inside parts


class _Recurrent(nn.Module):
    """A recurrent layer, and what brings its output back to the width."""

    def __init__(self, kind: type[nn.RNNBase], width: int, *, both_ways: bool) -> None:
        super().__init__()
        self.layer = kind(width, width, batch_first=True, bidirectional=both_ways)
        self.back = nn.Linear(width * (1 + both_ways), width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.back(self.layer(x)[0])
        return out


class _Cells(nn.Module):
    """A recurrent cell in a loop over the time steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, outputs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outputs.append(state)
        return torch.stack(outputs, 1)


class _Attention(nn.Module):
    """Attention, written out or fused."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
            mixed = weights @ v
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _Convolution(nn.Module):
    """Convolution over time, of all channels or of each."""

    def __init__(self, width: int, size: int, groups: int) -> None:
        super().__init__()
        self.layer = nn.Conv1d(width, width, size, padding=size // 2, groups=groups)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.norm(self.layer(x.transpose(1, 2)))).transpose(
            1, 2
        )


class _Residual(nn.Module):
    """Adds what parts make of the normalized input, or gates the input by it."""

    def __init__(self, width: int, parts: nn.Module, *, gate: bool) -> None:
        super().__init__()
        self.norm, self.parts, self.gate = nn.LayerNorm(width), parts, gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.parts(self.norm(x))
        return x * out.sigmoid() if self.gate else x + out


class _Fork(nn.Module):
    """Two ways whose outputs are joined."""

    def __init__(self, width: int, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other
        self.join = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.join(torch.cat([self.one(x), self.other(x)], -1))
        return out


class _Repeated(nn.Module):
    """The same parts several times."""

    def __init__(self, parts: nn.Module, count: int) -> None:
        super().__init__()
        self.parts, self.count = parts, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = self.parts(x)
        return x


def nested(draw: random.Random, width: int) -> nn.Module:
    """A net that maps (batch, time, width) to the same size."""
    return _parts(draw, width, 0, draw.randint(2, 4))


def _parts(draw: random.Random, width: int, depth: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(_part(draw, width, depth) for _ in range(count)))


def _part(draw: random.Random, width: int, depth: int) -> nn.Module:
    def inside() -> nn.Module:
        return _parts(draw, width, depth + 1, draw.randint(1, 2))

    kinds: list[Callable[[], nn.Module]] = [
        lambda: _Recurrent(
            draw.choice([nn.LSTM, nn.GRU, nn.RNN]), width, both_ways=draw.random() < 0.4
        ),
        lambda: _Cells(width),
        lambda: _Attention(width, draw.choice([2, 4]), fused=draw.random() < 0.5),
        lambda: _Convolution(width, draw.choice([3, 5]), draw.choice([1, width])),
        lambda: nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        ),
    ]
    if depth < _MOST_DEPTH:
        kinds += [
            *(2 * [lambda: _Residual(width, inside(), gate=draw.random() < 0.3)]),
            lambda: _Fork(width, inside(), inside()),
            lambda: _Repeated(inside(), draw.randint(2, 3)),
        ]
    return draw.choice(kinds)()
