"""Small models as chains of blocks, whose stages the benchmarks run."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from benchmarks.rank_models import LENGTH, VOCABULARY, WIDTH, Block, varied


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of tokens that are guessed."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Embedding(nn.Module):
    """Tokens and their positions, which are learnt."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        out: torch.Tensor = self.wte(tokens) + self.wpe(position_ids)
        return out


class GPT(nn.Module):
    """GPT-2 with a head of its own."""

    def __init__(
        self, vocabulary: int = VOCABULARY, num_blocks: int = 4, head_dim: int = 16
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary)
        self.h = nn.ModuleList(Block(head_dim) for _ in range(num_blocks))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits


class OddGPT(GPT):
    """An odd vocabulary, frozen positions, and two blocks that share an MLP."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__(VOCABULARY + 3, num_blocks)
        self.embedding.wpe.requires_grad_(False)
        self.h[-1].mlp = self.h[-2].mlp


class VariedGPT(GPT):
    """One whose blocks have inner layers of other widths each."""

    def __init__(self) -> None:
        super().__init__()
        varied(self.h)


class TiedGPT(GPT):
    """One whose head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.embedding.wte.weight


class _Rotates:
    """Works out the rotary embedding itself, before a block of Transformers."""

    rotary_emb: nn.Module
    length: int

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if position_ids is None:  # of the whole sequence, of which `x` may be a slice
            position_ids = torch.arange(self.length, device=x.device)[None]
        rotated = self.rotary_emb(x, position_ids)
        block: Any = super()
        out: torch.Tensor = block.forward(x, position_embeddings=rotated)
        return out


class LlamaBlock(_Rotates, modeling_llama.LlamaDecoderLayer):
    """A block of Llama."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)
        self.length = config.max_position_embeddings


class MixtralBlock(_Rotates, modeling_mixtral.MixtralDecoderLayer):
    """A block of Mixtral."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.rotary_emb = modeling_mixtral.MixtralRotaryEmbedding(config)
        self.length = config.max_position_embeddings
        for name, parameter in self.named_parameters():
            if ".experts." in name or ".gate." in name:  # which it leaves empty
                nn.init.normal_(parameter, std=0.1)


class Llama(nn.Module):
    """Llama of Transformers as a chain of blocks, or a model like it."""

    def __init__(self, config: Any, block: Any = LlamaBlock) -> None:
        super().__init__()
        vocabulary, width = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            block(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = modeling_llama.LlamaRMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def small_llama(num_blocks: int = 4, num_heads: int = 6) -> Llama:
    config = transformers.LlamaConfig(
        num_hidden_layers=num_blocks,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        vocab_size=VOCABULARY,
        attn_implementation="sdpa",
    )
    return Llama(config)


def small_mixtral(num_blocks: int = 4) -> Llama:
    config = transformers.MixtralConfig(
        num_hidden_layers=num_blocks,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    return Llama(config, MixtralBlock)
