"""Models that the benchmarks train: from config, random weights, CPU size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional

from autosac import demo

transformers.logging.set_verbosity_error()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step that can be built anew any number of times.

    Attributes:
        name: What tables call it.
        make_model: Builds the model in training mode.
        make_inputs: Makes the batch, the same at every call.
        loss_fn: Output -> scalar; None for the output's own loss.
        make_optimizer: Builds the optimizer of a model.
        blocks: FQNs of the blocks that people would checkpoint.
        loss_bytes: Memory that the loss function alone holds: targets.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[], Any]
    loss_fn: Callable[[Any], torch.Tensor] | None
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    blocks: tuple[str, ...]
    loss_bytes: int = 0


def workloads() -> dict[str, Workload]:
    """All models of the benchmark, by the name that the command line takes."""
    return {
        "gpt": _gpt(),
        "gpt2": _gpt2(),
        "llama": _llama(),
        "bert": _bert(),
        "resnet50": _resnet50(),
        "vit": _vit(),
    }


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _blocks(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{index}" for index in range(count))


def _numbers(high: int, *size: int) -> torch.Tensor:
    """Random integers that do not depend on the global generator."""
    return torch.randint(high, size, generator=torch.Generator().manual_seed(0))


def _images(batch: int, pixels: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, pixels, pixels, generator=generator)


def _gpt() -> Workload:
    tokens = _numbers(2048, 8, 256)
    return Workload(
        name="GPT",
        make_model=lambda: demo.GPT(
            num_layers=12,
            width=192,
            num_heads=6,
            vocabulary=2048,
            length=256,
            dropout=0.1,
        ),
        make_inputs=lambda: tokens,
        loss_fn=demo.next_token_loss(tokens),
        make_optimizer=_adamw,
        blocks=_blocks("blocks", 12),
    )


def _labelled(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = _numbers(vocabulary, batch, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _gpt2() -> Workload:
    config = transformers.GPT2Config(
        n_layer=12,
        n_embd=192,
        n_head=6,
        n_positions=256,
        vocab_size=2048,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    inputs = _labelled(2048, 6, 256)
    return Workload(
        name="HF GPT-2",
        make_model=lambda: transformers.GPT2LMHeadModel(config).train(),
        make_inputs=lambda: inputs,
        loss_fn=None,
        make_optimizer=_adamw,
        blocks=_blocks("transformer.h", 12),
    )


def _llama() -> Workload:
    config = transformers.LlamaConfig(
        num_hidden_layers=12,
        hidden_size=192,
        intermediate_size=512,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        vocab_size=2048,
        use_cache=False,
    )
    inputs = _labelled(2048, 6, 256)
    return Workload(
        name="HF Llama",
        make_model=lambda: transformers.LlamaForCausalLM(config).train(),
        make_inputs=lambda: inputs,
        loss_fn=None,
        make_optimizer=_adamw,
        blocks=_blocks("model.layers", 12),
    )


def _bert() -> Workload:
    config = transformers.BertConfig(
        num_hidden_layers=12,
        hidden_size=192,
        intermediate_size=768,
        num_attention_heads=6,
        max_position_embeddings=256,
        vocab_size=2048,
    )
    tokens = _numbers(2048, 8, 256)
    hidden = _numbers(100, 8, 256) < 15  # the tokens to guess: 15 %
    inputs = {
        "input_ids": tokens.masked_fill(hidden, 3),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~hidden, -100),
    }
    return Workload(
        name="HF BERT",
        make_model=lambda: transformers.BertForMaskedLM(config).train(),
        make_inputs=lambda: inputs,
        loss_fn=None,
        make_optimizer=_adamw,
        blocks=_blocks("bert.encoder.layer", 12),
    )


def _resnet50() -> Workload:
    images, targets = _images(16, 112), _numbers(1000, 16)
    stages = zip(range(1, 5), (3, 4, 6, 3), strict=True)
    return Workload(
        name="ResNet-50",
        make_model=lambda: torchvision.models.resnet50().train(),
        make_inputs=lambda: images,
        loss_fn=lambda logits: functional.cross_entropy(logits, targets),
        make_optimizer=_sgd,
        blocks=tuple(f for i, count in stages for f in _blocks(f"layer{i}", count)),
        loss_bytes=targets.nbytes,
    )


def _vit() -> Workload:
    images, targets = _images(6, 128), _numbers(100, 6)

    def make_model() -> nn.Module:
        return torchvision.models.VisionTransformer(
            image_size=128,
            patch_size=8,
            num_layers=12,
            num_heads=6,
            hidden_dim=192,
            mlp_dim=768,
            dropout=0.1,
            attention_dropout=0.1,
            num_classes=100,
        ).train()

    return Workload(
        name="ViT",
        make_model=make_model,
        make_inputs=lambda: images,
        loss_fn=lambda logits: functional.cross_entropy(logits, targets),
        make_optimizer=_adamw,
        blocks=tuple(f"encoder.layers.encoder_layer_{index}" for index in range(12)),
        loss_bytes=targets.nbytes,
    )
