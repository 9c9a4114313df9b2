"""What `benchmarks.gpu_validation` trains: several GiB each, or tiny for a CPU.

All tensors are made on a device that is named, targets too. The models whose library
is not installed are left out with a reason; the others need nothing but PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autosac.cli import demo
from benchmarks.models import diffusion, other
from benchmarks.models.workload import adamw, integers, momentum, normal

LossFn = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a step is fed with, on one device.

    Attributes:
        inputs: Of the model, in any form that `autosac.profile` takes.
        targets: Tensors that the loss function holds besides.
        loss_fn: Output -> scalar; None for the output's own loss.
    """

    inputs: Any
    targets: tuple[torch.Tensor, ...] = ()
    loss_fn: LossFn | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training step that can be built anew on any device.

    Attributes:
        make_model: Builds the model on the default device, in training mode.
        make_batch: Makes the batch on a device, the same at every call.
        make_optimizer: Builds the optimizer of a model.
        autocast: Type that forward and loss autocast to.
        context: Entered for all that is done with the model.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[str], Batch]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    autocast: torch.dtype | None = None
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def build(self, device: str) -> nn.Module:
        """The model on a device; its first weights are made there."""
        with torch.device(device):
            return self.make_model()


def subject(name: str, *, tiny: bool) -> Subject:
    """A model by its command-line name.

    Raises:
        ModuleNotFoundError: Its library is not installed.
    """
    library = _LIBRARIES.get(name)
    if library is not None and find_spec(library) is None:
        raise ModuleNotFoundError(f"{library} is not installed")
    return _SUBJECTS[name](tiny)


# --- batches ------------------------------------------------------------------


def _language_batch(vocabulary: int, batch: int, length: int, device: str) -> Batch:
    tokens = integers(vocabulary, batch, length).to(device)
    return Batch(inputs=tokens, loss_fn=demo.next_token_loss(tokens))


def _image_batch(batch: int, pixels: int, classes: int, device: str) -> Batch:
    targets = integers(classes, batch).to(device)
    return Batch(
        inputs=normal(batch, 3, pixels, pixels).to(device),
        targets=(targets,),
        loss_fn=lambda logits: functional.cross_entropy(logits, targets),
    )


def _copying_batch(inputs: Any, wanted: torch.Tensor) -> Batch:
    """The model learns to give back what it gets."""
    targets = wanted.clone()
    return Batch(
        inputs=inputs,
        targets=(targets,),
        loss_fn=lambda output: functional.mse_loss(output.float(), targets),
    )


# --- models that need nothing but PyTorch -------------------------------------


def _gpt(
    *, batch: int, autocast: torch.dtype | None, flash: bool
) -> Callable[[bool], Subject]:
    def make(tiny: bool) -> Subject:
        length, vocabulary = (32, 64) if tiny else (1024, 8192)
        size = {"num_layers": 8, "width": 1024, "num_heads": 16}
        if tiny:
            size = {"num_layers": 2, "width": 32, "num_heads": 2}
        return Subject(
            make_model=lambda: demo.GPT(
                **size, vocabulary=vocabulary, length=length, dropout=0.1
            ),
            make_batch=lambda device: _language_batch(
                vocabulary, 8 if tiny else batch, length, device
            ),
            autocast=autocast,
            context=_flash if flash else contextlib.nullcontext,
        )

    return make


def _flash() -> AbstractContextManager[Any]:
    """Flash attention, also where cuDNN's would come first."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])


class DecoderBlock(nn.Module):
    """Llama's block: RMS norm, rotary grouped-query attention, SwiGLU."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        keys = width // heads * key_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, keys, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(
        self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.norm1(x)

        def split(projected: torch.Tensor, heads: int) -> torch.Tensor:
            return projected.unflatten(-1, (heads, -1)).transpose(1, 2)

        query = _rotated(split(self.query(hidden), self.heads), cosine, sine)
        key = _rotated(split(self.key(hidden), self.key_heads), cosine, sine)
        value = split(self.value(hidden), self.key_heads)
        key, value = (
            part.repeat_interleave(self.heads // self.key_heads, 1)
            for part in (key, value)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = self.norm2(x)
        out: torch.Tensor = x + self.down(
            functional.silu(self.gate(hidden)) * self.up(hidden)
        )
        return out


def _rotated(
    heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (heads * cosine + turned * sine).to(heads.dtype)


class Decoder(nn.Module):
    """A language model of Llama's kind."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        key_heads: int,
        vocabulary: int,
        length: int,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            DecoderBlock(width, heads, key_heads, width * 11 // 4)
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        speeds = 10000.0 ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(length).float(), speeds).repeat(1, 2)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.token(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.cosine, self.sine)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def _decoder(tiny: bool) -> Subject:
    vocabulary, length = (64, 32) if tiny else (8192, 1024)
    size = {"layers": 8, "width": 1024, "heads": 16, "key_heads": 4}
    if tiny:
        size = {"layers": 2, "width": 32, "heads": 4, "key_heads": 2}
    return Subject(
        make_model=lambda: Decoder(**size, vocabulary=vocabulary, length=length),
        make_batch=lambda device: _language_batch(
            vocabulary, 8 if tiny else 24, length, device
        ),
        autocast=torch.bfloat16,
    )


def _unet(tiny: bool) -> Subject:
    width, levels, batch, pixels = (8, 2, 2, 16) if tiny else (64, 4, 16, 256)

    def make_batch(device: str) -> Batch:
        images = normal(batch, 3, pixels, pixels).to(device)
        return _copying_batch(images, images)

    return Subject(
        make_model=lambda: diffusion.UNet(width, levels), make_batch=make_batch
    )


def _dit(tiny: bool) -> Subject:
    layers, width, heads, batch, length = (
        (2, 32, 2, 8, 64) if tiny else (8, 768, 12, 32, 1024)
    )

    def make_batch(device: str) -> Batch:
        tokens = normal(batch, length, 16).to(device)
        times = normal(batch).to(device)
        return _copying_batch(((tokens,), {"times": times}), tokens)

    return Subject(
        make_model=lambda: diffusion.DiT(layers, width, heads, 16),
        make_batch=make_batch,
        autocast=torch.bfloat16,
    )


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm and in-place ReLU, and a residual."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.skip = nn.Sequential()
        if stride > 1 or channels_in != channels:
            self.skip = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.norm1(self.conv1(x)))
        hidden = self.norm2(self.conv2(hidden))
        hidden += self.skip(x)
        out: torch.Tensor = self.relu(hidden)
        return out


class ResNet(nn.Module):
    """A ResNet-18 whose stem has a strided convolution in place of max pooling."""

    def __init__(self, width: int, stages: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        sizes = [width, *(width * 2**i for i in range(stages))]
        self.blocks = nn.ModuleList()
        for before, after in pairwise(sizes):
            self.blocks.append(ResidualBlock(before, after, 2))
            self.blocks.append(ResidualBlock(after, after, 1))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden.mean((2, 3)))
        return logits


def _resnet(tiny: bool) -> Subject:
    width, stages, batch, pixels = (8, 2, 2, 32) if tiny else (64, 4, 256, 224)
    return Subject(
        make_model=lambda: ResNet(width, stages, 100),
        make_batch=lambda device: _image_batch(batch, pixels, 100, device),
        make_optimizer=momentum,
    )


def _two_towers(tiny: bool) -> Subject:
    layers, width, heads, vocabulary, batch = (
        (2, 32, 2, 64, 2) if tiny else (4, 512, 8, 8192, 64)
    )
    short, long = (8, 16) if tiny else (256, 512)

    def make_batch(device: str) -> Batch:
        pair = {
            "query": integers(vocabulary, batch, short).to(device),
            "answer": integers(vocabulary, batch, long).to(device),
        }
        return Batch(inputs=(pair,))

    return Subject(
        make_model=lambda: other.TwoTower(layers, width, heads, vocabulary),
        make_batch=make_batch,
    )


# --- models of libraries ------------------------------------------------------


def _hugging_face(family: str, autocast: torch.dtype | None) -> Callable[..., Subject]:
    def make(tiny: bool) -> Subject:
        # Here, as it need not be installed.
        import transformers

        layers, width, heads = (2, 32, 2) if tiny else (8, 768, 12)
        vocabulary, batch, length = (64, 2, 32) if tiny else (8192, 16, 1024)
        shape = (
            {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": length}
            if family == "GPT2"
            else {
                "num_hidden_layers": layers,
                "hidden_size": width,
                "intermediate_size": width * 8 // 3,
                "num_attention_heads": heads,
                "num_key_value_heads": heads // 2,
                "max_position_embeddings": length,
            }
        )
        config = getattr(transformers, f"{family}Config")(
            **shape, vocab_size=vocabulary, use_cache=False
        )
        config.bos_token_id = config.eos_token_id = 0
        names = {"GPT2": "GPT2LMHeadModel"}
        model_class = getattr(transformers, names.get(family, f"{family}ForCausalLM"))

        def make_batch(device: str) -> Batch:
            tokens = integers(vocabulary, batch, length).to(device)
            return Batch(inputs={"input_ids": tokens, "labels": tokens.clone()})

        return Subject(
            make_model=lambda: model_class(config).train(),
            make_batch=make_batch,
            autocast=autocast,
        )

    return make


def _torchvision(name: str) -> Callable[[bool], Subject]:
    def make(tiny: bool) -> Subject:
        # Here, as it need not be installed.
        import torchvision

        batch, pixels = (2, 32) if tiny else (64, 224)
        options: dict[str, Any] = {"num_classes": 100}
        if name == "vit_b_16":
            options["image_size"] = pixels
        model = getattr(torchvision.models, "resnet18" if tiny else name)
        if name == "vit_b_16":
            model = getattr(torchvision.models, name)
            options["dropout"] = 0.1
        return Subject(
            make_model=lambda: model(**options).train(),
            make_batch=lambda device: _image_batch(batch, pixels, 100, device),
            make_optimizer=momentum,
        )

    return make


_SUBJECTS: dict[str, Callable[[bool], Subject]] = {
    "gpt-bf16": _gpt(batch=32, autocast=torch.bfloat16, flash=True),
    "gpt-fp32": _gpt(batch=12, autocast=None, flash=False),
    "decoder": _decoder,
    "resnet": _resnet,
    "unet": _unet,
    "dit": _dit,
    "two-towers": _two_towers,
    "hf-gpt2": _hugging_face("GPT2", None),
    "hf-llama": _hugging_face("Llama", torch.bfloat16),
    "tv-resnet50": _torchvision("resnet50"),
    "tv-vit": _torchvision("vit_b_16"),
}
_LIBRARIES = {
    "hf-gpt2": "transformers",
    "hf-llama": "transformers",
    "tv-resnet50": "torchvision",
    "tv-vit": "torchvision",
}
NAMES = tuple(_SUBJECTS)
