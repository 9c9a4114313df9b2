"""Models that the benchmarks train: from config, random weights, CPU size."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.models.workload import Workload

__all__ = ["Workload", "workloads", "zoo"]


def workloads() -> dict[str, Workload]:
    """Six models that `benchmarks.compare` really trains, by command-line name."""
    # Not at the top: `benchmarks.gpu_validation` does without these libraries.
    from benchmarks.models import language, vision

    return {
        "gpt": language.gpt(),
        "gpt2": language.gpt2(),
        "llama": language.llama(),
        "bert": language.bert(),
        "resnet50": vision.resnet50(),
        "vit": vision.vit(),
    }


def zoo() -> dict[str, Workload]:
    """One small model of every kind that people train, by command-line name."""
    from benchmarks.models import diffusion, language, other, vision  # as above

    small: dict[str, Any] = {
        "layers": 4,
        "width": 96,
        "vocabulary": 512,
        "batch": 4,
        "length": 128,
    }
    return {
        "gpt2": language.gpt2(**small),
        "llama": language.llama(**small),
        "llama-tied": language.llama(**small, tied=True),
        "qwen3": language.qwen3(),
        "mistral": language.mistral(),
        "mixtral": language.mixtral(),
        "bert": language.bert(**small),
        "albert": language.albert(),
        "t5": language.t5(),
        "mamba": language.mamba(),
        "lstm": language.recurrent(),
        "gru": language.recurrent(kind=nn.GRU),
        "vit": vision.vit(layers=4, width=96, batch=4, pixels=64),
        "swin": vision.swin(),
        "convnext": vision.convnext(),
        "resnet": vision.resnet18(),
        "densenet": vision.densenet(),
        "unet": diffusion.unet(),
        "dit": diffusion.dit(),
        "two-towers": other.two_tower(),
        "dlrm": other.dlrm(),
    }
