"""Every model of timm and torchvision as a training step, at its own size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional

from autosac.step.training_step import default_loss
from benchmarks.models.workload import Workload, adamw, integers, normal

_FRAMES, _PIXELS = 16, 224
_FEWEST_CLASSES = 10  # targets are among so many first ones of any model
_INCEPTION_PIXELS, _FLOW_PIXELS = 299, 128
_BOXES = 2  # in each image


def families_of_timm() -> list[str]:
    """The files that timm's models are in, one for each kind of architecture."""
    return sorted(timm.list_modules())


def variants_of_timm(family: str) -> list[str]:
    """All sizes of the models of a file."""
    return sorted(timm.list_models(module=family))


def names_of_torchvision() -> list[str]:
    """All models of torchvision."""
    return sorted(torchvision.models.list_models())


def family_of_torchvision(name: str) -> str:
    """The file that a model is in, such as ``"detection.fcos"``."""
    module = torchvision.models.get_model_builder(name).__module__
    return module.removeprefix("torchvision.models.")


def build_of_timm(name: str, batch: int) -> Workload:
    """A step of a model of timm on images of its own size."""
    size = timm.models.get_pretrained_cfg(name).input_size
    return _workload(
        name, lambda: timm.create_model(name), lambda: normal(batch, *size), batch
    )


def build_of_torchvision(name: str, batch: int) -> Workload:
    """A step of a model of torchvision: images, clips, pairs, or images with boxes."""
    family = family_of_torchvision(name)
    options: dict[str, Any] = {"weights": None}
    if family.startswith(("detection", "segmentation")):
        options["weights_backbone"] = None
    if "inception" in family or "googlenet" in family:
        options["init_weights"] = False  # takes minutes
    return _workload(
        name,
        lambda: torchvision.models.get_model(name, **options),
        lambda: _batch_of_torchvision(family, batch),
        batch,
    )


def _batch_of_torchvision(family: str, batch: int) -> Any:
    if family.startswith("video"):
        return normal(batch, 3, _FRAMES, _PIXELS, _PIXELS)
    if family.startswith("optical_flow"):
        pair = normal(2, batch, 3, _FLOW_PIXELS, _FLOW_PIXELS)
        return (pair[0], pair[1])
    if family.startswith("detection"):
        images = list(normal(batch, 3, _PIXELS, _PIXELS))
        return (images, [target() for _ in images])
    pixels = _INCEPTION_PIXELS if "inception" in family else _PIXELS
    return normal(batch, 3, pixels, pixels)


def target() -> dict[str, torch.Tensor]:
    """Boxes, classes, masks and key points of an image."""
    box = torch.tensor([20.0, 30.0, 120.0, 150.0])
    keypoints = torch.tensor([60.0, 90.0, 1.0]).expand(_BOXES, 17, 3)
    return {
        "boxes": torch.stack([box, box + 40.0]),
        "labels": torch.ones(_BOXES, dtype=torch.int64),
        "masks": torch.ones(_BOXES, _PIXELS, _PIXELS, dtype=torch.uint8),
        "keypoints": keypoints.clone(),
    }


def _workload(
    name: str,
    make_model: Callable[[], nn.Module],
    make_inputs: Callable[[], Any],
    batch: int,
) -> Workload:
    targets = integers(_FEWEST_CLASSES, batch)
    return Workload(
        name=name,
        make_model=lambda: make_model().train(),
        make_inputs=make_inputs,
        loss_fn=_loss_against(targets),
        make_optimizer=adamw,
        blocks=(),
        loss_bytes=targets.nbytes,
    )


def _loss_against(targets: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Cross entropy of logits of images; the output's own loss of anything else."""

    def loss_fn(output: Any) -> torch.Tensor:
        if isinstance(output, torch.Tensor) and output.ndim == 2:
            wanted = targets.to(output.device)
            return functional.cross_entropy(output, wanted)
        return default_loss(output)

    return loss_fn
