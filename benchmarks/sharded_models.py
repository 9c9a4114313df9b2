"""Small models whose steps ranks really run: a few MiB, activations that count."""

from __future__ import annotations

from typing import Any

import torch
import torchvision
import transformers
from torch import nn

from autosac.cli.demo import GPT
from benchmarks.models.workload import labelled, numbered
from benchmarks.ranks import Recipe

_VOCABULARY, _LENGTH, _BATCH, _WIDTH, _RANK = 1031, 64, 6, 96, 8


class GiantEmbedding(nn.Module):
    """Most of its parameters are one table, looked up for a few tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30_011, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), _Last())
            for _ in range(3)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class _Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(256, 64)


def _gpt() -> nn.Module:
    return GPT(
        num_layers=4,
        width=_WIDTH,
        num_heads=4,
        vocabulary=_VOCABULARY,
        length=_LENGTH,
    ).train()


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=_WIDTH,
        intermediate_size=250,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=_LENGTH,
        vocab_size=_VOCABULARY,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def _vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32,
        patch_size=4,
        num_layers=4,
        num_heads=4,
        hidden_dim=_WIDTH,
        mlp_dim=4 * _WIDTH,
        dropout=0.1,
        num_classes=37,
    ).train()


class _LowRank(nn.Module):
    """A frozen linear layer and a low-rank update that trains.

    As in "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al., 2021), but
    `b` is not 0 at first, so that `a` has a gradient in the first step.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, _RANK, bias=False)
        self.b = nn.Linear(_RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.b(self.a(x))
        return out


def _lora() -> nn.Module:
    model = _llama().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            model.set_submodule(name, _LowRank(module))
    return model


def _frozen() -> nn.Module:
    model = _gpt().requires_grad_(False)
    model.get_submodule("blocks.3").requires_grad_(True)
    model.head.requires_grad_(True)
    return model


def _tokens() -> torch.Tensor:
    return torch.randint(_VOCABULARY, (_BATCH, _LENGTH))


def _labelled() -> dict[str, torch.Tensor]:
    return labelled(_VOCABULARY, _BATCH, _LENGTH)


def _images() -> torch.Tensor:
    return torch.randn(_BATCH, 3, 32, 32)


def _ids() -> torch.Tensor:
    return torch.randint(30_011, (16, 128))


def _mean_exponential(output: Any) -> torch.Tensor:
    # Not stationary where the vision transformer's head begins, at 0.
    loss: torch.Tensor = output.float().exp().mean()
    return loss


RECIPES = {
    "GPT": Recipe(
        make_model=_gpt,
        make_inputs=_tokens,
        loss_fn=_mean_exponential,
        blocks=numbered("blocks", 4),
    ),
    "HF Llama": Recipe(
        make_model=_llama, make_inputs=_labelled, blocks=numbered("model.layers", 4)
    ),
    "ViT": Recipe(
        make_model=_vit,
        make_inputs=_images,
        loss_fn=_mean_exponential,
        blocks=tuple(f"encoder.layers.encoder_layer_{index}" for index in range(4)),
    ),
    "LoRA": Recipe(
        make_model=_lora, make_inputs=_labelled, blocks=numbered("model.layers", 4)
    ),
    "frozen GPT": Recipe(
        make_model=_frozen,
        make_inputs=_tokens,
        loss_fn=_mean_exponential,
        blocks=numbered("blocks", 4),
    ),
    "giant embedding": Recipe(
        make_model=GiantEmbedding,
        make_inputs=_ids,
        loss_fn=_mean_exponential,
        blocks=numbered("blocks", 3),
    ),
}
