"""Models of timm and torchvision on batches that a CPU trains in seconds.

Images and clips are as small as the model takes; of a model that is large for a CPU,
every run of equal layers is cut to its first two.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional

from autosac.step.training_step import default_loss
from benchmarks.models.drawn import of_vision
from benchmarks.models.drawn.errors import NotBuiltError
from benchmarks.models.drawn.running import copied, first_that_runs, optimizer_by_size
from benchmarks.models.workload import Workload, integers, normal

_BATCH, _CLASSES = 2, 10
_PIXELS = (64, 96, 224)  # those that are tried before a model's own
_MOST_VARIANTS = 12  # of a family, of which the smallest is taken
_MOST_BYTES = 300 * 2**20  # of parameters; a model with more is cut
_DETECTION = {"min_size": 160, "max_size": 224}
_CUT = 2  # equal layers that are left of a run


def build_of_timm(family: str) -> Workload:
    """The smallest of some models of a family that are drawn by number."""
    variants = of_vision.variants_of_timm(family)
    if not variants:
        raise NotBuiltError("the family has no models")
    some = random.Random(family).sample(variants, min(len(variants), _MOST_VARIANTS))
    name = min(sorted(some), key=_bytes_of_timm)
    own = timm.models.get_pretrained_cfg(name).input_size

    def tries() -> Iterator[Callable[[], Workload]]:
        for pixels in _PIXELS:
            for options in ({}, {"img_size": pixels}):
                yield lambda pixels=pixels, options=options: _workload(
                    f"{family}: {name}",
                    lambda: timm.create_model(name, **options),
                    (normal(_BATCH, own[0], pixels, pixels),),
                )
        yield lambda: _workload(
            f"{family}: {name}",
            lambda: timm.create_model(name),
            (normal(_BATCH, *own),),
        )

    return first_that_runs(tries())


def _bytes_of_timm(name: str) -> int:
    return _bytes_of(lambda: timm.create_model(name))


def _bytes_of(make: Callable[[], nn.Module]) -> int:
    """Bytes of the parameters of a model."""
    try:
        with torch.device("meta"):
            model = make()
    except Exception:  # some constructors look at numbers
        model = make()
    return sum(parameter.nbytes for parameter in model.parameters())


def build_of_torchvision(name: str) -> Workload:
    """A model by its name: images, clips, pairs of images, or images with boxes."""
    family = of_vision.family_of_torchvision(name)
    options: dict[str, Any] = {"weights": None}
    if family.startswith(("detection", "segmentation")):
        options["weights_backbone"] = None
    if "inception" in family or "googlenet" in family:
        options["init_weights"] = False  # takes minutes

    def tries() -> Iterator[Callable[[], Workload]]:
        for more, inputs in _tries_of_torchvision(family):
            yield lambda more=more, inputs=inputs: _workload(
                name,
                lambda: torchvision.models.get_model(name, **options, **more),
                inputs,
            )

    return first_that_runs(tries())


def _tries_of_torchvision(family: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Options and inputs, the smallest first."""
    for pixels in _PIXELS:
        if family.startswith("video"):
            for frames in (8, 16):
                yield {}, (normal(_BATCH, 3, frames, pixels, pixels),)
        elif family.startswith("optical_flow"):
            pair = normal(2, _BATCH, 3, 128, 128)
            yield {}, (pair[0], pair[1])
        elif family.startswith("detection"):
            images = list(normal(_BATCH, 3, 224, 224))
            batch = (images, [of_vision.target() for _ in images])
            yield _DETECTION, batch
            yield {}, batch
        else:
            images = (normal(_BATCH, 3, pixels, pixels),)
            yield {}, images
            yield {"image_size": pixels}, images
            yield {"input_size": (pixels, pixels)}, images


def _workload(name: str, make: Callable[[], nn.Module], inputs: Any) -> Workload:
    targets = integers(_CLASSES, _BATCH)

    def loss_fn(output: Any) -> torch.Tensor:
        if isinstance(output, torch.Tensor) and output.ndim == 2:
            return functional.cross_entropy(output, targets.to(output.device))
        return default_loss(output)

    work = Workload(
        name=name,
        make_model=lambda: make().train(),
        make_inputs=lambda: copied(inputs),
        loss_fn=loss_fn,
        make_optimizer=optimizer_by_size,
        blocks=(),
        loss_bytes=targets.nbytes,
    )
    size = _bytes_of(make)
    if size <= _MOST_BYTES:
        return work
    return replace(work, make_model=lambda: cut(make()).train())


def cut(model: nn.Module) -> nn.Module:
    """The model with two layers, where a sequence or list of it has a run of equals."""
    for module in list(model.modules()):
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            runs = itertools.groupby(module.named_children(), lambda c: _kind(c[1]))
            for name in [name for _, run in runs for name, _ in list(run)[_CUT:]]:
                del module._modules[name]
    return model


def _kind(module: nn.Module) -> Hashable:
    """What equal layers have in common."""
    shapes = [(name, p.shape) for name, p in module.named_parameters()]
    return (type(module), tuple(shapes))
