"""A U-Net and a diffusion transformer, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.workload import Workload, adamw, normal, numbered, regression


class UNetBlock(nn.Module):
    """Two convolutions with group norm, and a residual."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, channels)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = self.dropout(functional.silu(self.norm2(hidden)))
        out: torch.Tensor = self.skip(x) + self.conv2(hidden)
        return out


class UNet(nn.Module):
    """A U-Net with skip connections."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(levels)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            UNetBlock(width if i == 0 else sizes[i - 1], sizes[i])
            for i in range(levels)
        )
        self.middle = UNetBlock(sizes[-1], sizes[-1])
        self.up = nn.ModuleList(
            UNetBlock(2 * sizes[i], sizes[max(i - 1, 0)])
            for i in reversed(range(levels))
        )
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        skips = []
        for block in self.down:
            hidden = block(hidden)
            skips.append(hidden)
            hidden = functional.avg_pool2d(hidden, 2)
        hidden = self.middle(hidden)
        for block in self.up:
            hidden = functional.interpolate(hidden, scale_factor=2.0)
            hidden = block(torch.cat([hidden, skips.pop()], 1))
        out: torch.Tensor = self.head(hidden)
        return out


def unet(
    *, width: int = 16, levels: int = 3, batch: int = 4, pixels: int = 32
) -> Workload:
    """A U-Net that learns to repeat its input."""
    images = normal(batch, 3, pixels, pixels)
    return Workload(
        name="U-Net",
        make_model=lambda: UNet(width, levels),
        make_inputs=lambda: images,
        loss_fn=regression(images),
        make_optimizer=adamw,
        blocks=(*numbered("down", levels), "middle", *numbered("up", levels)),
    )


class DiTBlock(nn.Module):
    """A transformer block that is shifted, scaled and gated by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        parts = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        hidden = self.norm1(x) * (1 + scale1) + shift1
        attended = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        x = x + gate1 * attended
        hidden = self.norm2(x) * (1 + scale2) + shift2
        out: torch.Tensor = x + gate2 * self.mlp(hidden)
        return out


class DiT(nn.Module):
    """A diffusion transformer (Peebles and Xie, 2023) on tokens of an image."""

    def __init__(self, layers: int, width: int, heads: int, channels: int) -> None:
        super().__init__()
        self.embed = nn.Linear(channels, width)
        self.time = nn.Sequential(
            nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, channels)

    def forward(self, tokens: torch.Tensor, *, times: torch.Tensor) -> torch.Tensor:
        condition = self.time(times[:, None])
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, condition)
        out: torch.Tensor = self.head(hidden)
        return out


def dit(
    *,
    layers: int = 4,
    width: int = 96,
    heads: int = 6,
    batch: int = 4,
    length: int = 128,
) -> Workload:
    """A diffusion transformer that learns to repeat its input."""
    tokens = normal(batch, length, 16)
    times = normal(batch)
    return Workload(
        name="DiT",
        make_model=lambda: DiT(layers, width, heads, 16),
        make_inputs=lambda: ((tokens,), {"times": times}),
        loss_fn=regression(tokens),
        make_optimizer=adamw,
        blocks=numbered("blocks", layers),
    )
