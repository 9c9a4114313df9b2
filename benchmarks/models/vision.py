"""Vision models of torchvision and timm."""

from __future__ import annotations

from collections.abc import Callable

import timm
import torch
import torchvision
from torch import nn

from benchmarks.models.workload import (
    Workload,
    adamw,
    classification,
    integers,
    momentum,
    normal,
    numbered,
)


def _classifier(
    name: str,
    make_model: Callable[[], nn.Module],
    blocks: tuple[str, ...],
    *,
    batch: int,
    pixels: int,
    classes: int,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
) -> Workload:
    images, targets = normal(batch, 3, pixels, pixels), integers(classes, batch)
    return Workload(
        name=name,
        make_model=lambda: make_model().train(),
        make_inputs=lambda: images,
        loss_fn=classification(targets),
        make_optimizer=make_optimizer,
        blocks=blocks,
        loss_bytes=targets.nbytes,
    )


def resnet50(*, batch: int = 16, pixels: int = 112) -> Workload:
    """ResNet-50: batch norm, in-place ReLU."""
    stages = zip(range(1, 5), (3, 4, 6, 3), strict=True)
    return _classifier(
        "ResNet-50",
        torchvision.models.resnet50,
        tuple(f for i, count in stages for f in numbered(f"layer{i}", count)),
        batch=batch,
        pixels=pixels,
        classes=1000,
    )


def resnet18(*, batch: int = 8, pixels: int = 64) -> Workload:
    """ResNet-18."""
    return _classifier(
        "ResNet-18",
        lambda: torchvision.models.resnet18(num_classes=100),
        tuple(f for i in range(1, 5) for f in numbered(f"layer{i}", 2)),
        batch=batch,
        pixels=pixels,
        classes=100,
    )


def mobilenet(*, batch: int = 8, pixels: int = 64) -> Workload:
    """MobileNet v3 small: depthwise convolutions, squeeze and excitation."""
    return _classifier(
        "MobileNet v3",
        lambda: torchvision.models.mobilenet_v3_small(num_classes=10),
        numbered("features", 13),
        batch=batch,
        pixels=pixels,
        classes=10,
    )


def densenet(*, batch: int = 8, pixels: int = 32) -> Workload:
    """DenseNet: every layer joins the features of all before it."""
    sizes = (3, 4, 4)
    return _classifier(
        "DenseNet",
        lambda: torchvision.models.DenseNet(
            growth_rate=16, block_config=sizes, num_init_features=32, num_classes=100
        ),
        tuple(
            f"features.denseblock{i}.denselayer{j}"
            for i, count in enumerate(sizes, 1)
            for j in range(1, count + 1)
        ),
        batch=batch,
        pixels=pixels,
        classes=100,
    )


def vit(
    *,
    layers: int = 12,
    width: int = 192,
    heads: int = 6,
    batch: int = 6,
    pixels: int = 128,
    patch: int = 8,
) -> Workload:
    """A vision transformer with dropout."""
    return _classifier(
        "ViT",
        lambda: torchvision.models.VisionTransformer(
            image_size=pixels,
            patch_size=patch,
            num_layers=layers,
            num_heads=heads,
            hidden_dim=width,
            mlp_dim=4 * width,
            dropout=0.1,
            attention_dropout=0.1,
            num_classes=100,
        ),
        tuple(f"encoder.layers.encoder_layer_{index}" for index in range(layers)),
        batch=batch,
        pixels=pixels,
        classes=100,
        make_optimizer=adamw,
    )


def swin(*, batch: int = 4, pixels: int = 64) -> Workload:
    """Swin: shifted windows, stochastic depth."""
    depths = [2, 2, 2]
    return _classifier(
        "Swin",
        lambda: torchvision.models.SwinTransformer(
            patch_size=[4, 4],
            embed_dim=48,
            depths=depths,
            num_heads=[2, 4, 8],
            window_size=[4, 4],
            stochastic_depth_prob=0.2,
            num_classes=100,
        ),
        tuple(f for i in (1, 3, 5) for f in numbered(f"features.{i}", 2)),
        batch=batch,
        pixels=pixels,
        classes=100,
        make_optimizer=adamw,
    )


def convnext(*, batch: int = 4, pixels: int = 64) -> Workload:
    """ConvNeXt: depthwise convolutions, stochastic depth."""
    return _classifier(
        "ConvNeXt",
        lambda: timm.create_model("convnext_atto", drop_path_rate=0.2, num_classes=100),
        tuple(
            f
            for i, count in enumerate((2, 2, 6, 2))
            for f in numbered(f"stages.{i}.blocks", count)
        ),
        batch=batch,
        pixels=pixels,
        classes=100,
        make_optimizer=adamw,
    )
