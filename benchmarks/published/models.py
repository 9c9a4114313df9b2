"""The models of published figures, rebuilt from public code; as a rule on "meta"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training step whose figures were published.

    Attributes:
        model: On the device that is asked for, in training mode.
        inputs: Its keyword arguments; the loss is part of its output, or all of it.
        options: Of `autosac.profile`.
        samples: What a step trains on: samples, or tokens where figures are in tokens.
        tf32: Whether float32 matmuls ran in TensorFloat-32.
    """

    model: nn.Module
    inputs: Batch
    options: dict[str, Any] = field(default_factory=dict)
    samples: int
    tf32: bool = False


class Classifier(nn.Module):
    """A vision model with its loss, as a training script calls both.

    Args:
        model: Images -> scores.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(images), targets)


# Optimizers as the scripts build them.
def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _milabench_hf(
    architecture: str,
    config: Callable[[], Any],
    inputs: Callable[[Any, int], Batch],
    autocast: torch.dtype | None,
    batch: int,
    *,
    tf32: bool = False,
    device: str = "meta",
    **how: Any,
) -> Subject:
    """milabench, benchmarks/huggingface/bench: it never zeroes gradients."""
    configuration = config()
    with torch.device(device):
        auto: Any = getattr(transformers, architecture)
        model = auto.from_config(configuration, **how).train()
    return Subject(
        model=model,
        inputs=inputs(configuration, batch),
        options={"optimizer": _adam, "autocast": autocast, "keeps_gradients": True},
        samples=batch,
        tf32=tf32,
    )


def _tokens(length: int, config: Any, batch: int) -> Batch:
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def _sounds(config: Any, batch: int) -> Batch:
    frames = 2 * config.max_source_positions
    features = torch.empty(batch, config.num_mel_bins, frames, device="meta")
    return {
        "input_features": features,
        "labels": torch.zeros(batch, dtype=torch.long),
    }


def _t5_small() -> Any:
    return transformers.T5Config(
        vocab_size=32128,
        d_model=512,
        d_ff=2048,
        num_layers=6,
        num_heads=8,
        decoder_start_token_id=0,
        pad_token_id=0,
    )


def _whisper_tiny() -> Any:
    return transformers.WhisperConfig(
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
    )


def _images(
    build: Callable[[], nn.Module],
    batch: int,
    *,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd,
    tf32: bool = False,
    reads_values: bool = False,
    device: str = "meta",
) -> Subject:
    # Constructors that read values cannot run on "meta".
    with torch.device("cpu" if reads_values else device):
        model = build().to(device).train()
    images = torch.empty(batch, 3, 224, 224, dtype=dtype, device=device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    return Subject(
        model=Classifier(model),
        inputs={"images": images, "targets": torch.zeros(batch, dtype=torch.long)},
        options={"optimizer": optimizer, "autocast": autocast},
        samples=batch,
        tf32=tf32,
    )


def _llama(
    batch: int, *, length: int, tokens: bool, device: str = "meta", **config: Any
) -> Subject:
    """A Llama in pure bfloat16, as in torchtune's and NeMo's full finetuning."""
    configuration = transformers.LlamaConfig(
        **config, num_key_value_heads=8, vocab_size=128256, intermediate_size=8192
    )
    configuration.tie_word_embeddings = True
    configuration.use_cache = False
    with torch.device(device):
        model = transformers.LlamaForCausalLM(configuration)
    return Subject(
        model=model.to(torch.bfloat16).train(),
        inputs=_tokens(length, configuration, batch),
        options={"optimizer": _adamw},
        samples=batch * (length if tokens else 1),
    )


_BERT = partial(
    _milabench_hf,
    "AutoModelForMaskedLM",
    transformers.BertConfig,
    partial(_tokens, 512),
)
_CONVNEXT = partial(_images, torchvision.models.convnext_large)
_HALF = {"autocast": torch.float16, "dtype": torch.float16}

SUBJECTS: dict[str, Callable[..., Subject]] = {  # batch, device -> step
    "bert-fp32": partial(_BERT, None),
    "bert-tf32": partial(_BERT, None, tf32=True),
    "bert-fp16": partial(_BERT, torch.float16),
    "t5-small": partial(
        _milabench_hf,
        "AutoModelForSeq2SeqLM",
        _t5_small,
        partial(_tokens, 1024),
        torch.float16,
        tf32=True,
        attn_implementation="eager",  # transformers 4.49 had no other
    ),
    "whisper-tiny": partial(
        _milabench_hf,
        "AutoModelForAudioClassification",
        _whisper_tiny,
        _sounds,
        torch.float16,
        tf32=True,
    ),
    "resnet50": partial(
        _images,
        torchvision.models.resnet50,
        channels_last=True,
        tf32=True,
        **_HALF,
    ),
    "convnext-large-fp32": _CONVNEXT,
    "convnext-large-tf32": partial(_CONVNEXT, tf32=True),
    "convnext-large-fp16": partial(_CONVNEXT, **_HALF),
    "regnet-y-128gf": partial(
        _images,
        torchvision.models.regnet_y_128gf,
        tf32=True,
        reads_values=True,
        **_HALF,
    ),
    "focalnet-base": partial(
        _images,
        partial(timm.create_model, "focalnet_base_lrf"),
        autocast=torch.bfloat16,
        optimizer=_momentum,
    ),
    "llama-3.2-3b": partial(
        _llama,
        length=4096,
        tokens=True,
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
    ),
    "llama-3.2-1b": partial(
        _llama,
        length=2048,
        tokens=True,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
    ),
}
