"""Small models whose ranks the benchmarks run, some of unlike blocks or with images."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH = 1024, 64, 96
IMAGE, NUM_CLASSES = 32, 37


class Attention(nn.Module):
    """Causal attention whose number of heads is what its projections have."""

    def __init__(self, head_dim: int = 16) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        out: torch.Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, head_dim: int = 16) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(head_dim)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """GPT-2: positions are learnt, the head has the weight of the embedding."""

    def __init__(self, head_dim: int = 16, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block(head_dim) for _ in range(4))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(position_ids)
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits


def varied(blocks: nn.ModuleList) -> None:
    """Give inner layers of blocks other widths each, in place."""
    for i, block in enumerate(blocks):
        inner = (i + 1) * WIDTH
        block.mlp = nn.Sequential(
            nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH)
        )


class VariedGPT(GPT):
    """One whose blocks have inner layers of other widths each."""

    def __init__(self) -> None:
        super().__init__()
        varied(self.h)


class Convolution(nn.Module):
    """A block of ConvNeXt whose convolution mixes channels, too."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)).movedim(1, -1)
        out: torch.Tensor = x + self.mlp(y).movedim(-1, 1)
        return out


class Convolutional(nn.Module):
    """Images, convolutions in blocks of other inner widths each, a head of classes."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.h = nn.ModuleList(Convolution(width, i * width) for i in (4, 2, 4, 6))
        self.head = nn.Sequential(
            nn.GroupNorm(4, width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, NUM_CLASSES),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits
