"""torchtitan's Llama 3 of early 2025, rewritten from its description.

Its own norm is spelt out, as PyTorch 2.6 ran `nn.RMSNorm` op by op, and rotary
embeddings are complex products in float32.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Norm(nn.Module):
    """Root mean square norm in float32, scaled in the type of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        full = x.float()
        scaled = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Queries or keys (batch, length, heads, size) times unit complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Block(nn.Module):
    """Attention with all heads' keys and values written out, and a gated MLP."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        shared = groups * self.size
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, shared, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(self.attention_norm(x), angles)
        normed = self.ffn_norm(x)
        return x + self.w2(functional.silu(self.w1(normed)) * self.w3(normed))

    def _attention(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        heads = (-1, self.size)
        query = rotated(self.wq(x).unflatten(-1, heads), angles)
        key = rotated(self.wk(x).unflatten(-1, heads), angles)
        value = self.wv(x).unflatten(-1, heads)
        query, key, value = (
            t.repeat_interleave(self.heads // t.shape[2], 2).transpose(1, 2)
            if t.shape[2] < self.heads
            else t.transpose(1, 2)
            for t in (query, key, value)
        )
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    """Llama 3 with its loss in float32, as torchtitan trains it."""

    def __init__(self, layers: int, width: int, hidden: int, words: int) -> None:
        super().__init__()
        size = 128
        self.tok_embeddings = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            Block(width, width // size, 8, hidden) for _ in range(layers)
        )
        self.norm = Norm(width)
        self.output = nn.Linear(width, words, bias=False)
        angles = torch.empty(8192, 1, size // 2, dtype=torch.complex64)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        angles = self.angles[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, angles)
        scores = self.output(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(scores, labels.flatten())
