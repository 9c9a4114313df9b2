"""Batches for models of Transformers, guessed from what their forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import PretrainedConfig

from benchmarks.models.drawn.configs import FIRST_WORD, PIXELS, VOCABULARY, sizes_of
from benchmarks.models.workload import integers, normal

BATCH, LENGTH = 4, 64
_SAMPLES, _FRAMES, _MELS = 16_000, 3_000, 80  # of one second and of 30
_LABELS = 2  # classes that Transformers gives to heads
Batch = dict[str, torch.Tensor]
_Maker = Callable[[PretrainedConfig], torch.Tensor]


def batches(model: nn.Module, config: PretrainedConfig, task: str) -> Iterator[Batch]:
    """Batches that the model may take, likelier ones first.

    Args:
        model: The model, on any device.
        config: Its configuration.
        task: What its head is for, such as ``"CAUSAL_LM"``; "" for no head.
    """
    parameters = inspect.signature(model.forward).parameters
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name in _MAKERS
    ]
    main = getattr(model, "main_input_name", "input_ids")
    own = [main] if main in _MAKERS and main in parameters else []
    labels = _labels(config, task) if "labels" in parameters else {}
    known = [name for name in _MAKERS if name in parameters]
    for names in (own + needed, [*own, *needed, *_DECODER], known):
        wanted = [name for name in dict.fromkeys(names) if name in parameters]
        for layout in range(_MOST_LAYOUTS):
            inputs = {name: _made(name, layout, config) for name in wanted}
            if labels:
                yield {**inputs, **labels}
            yield inputs


def _made(name: str, layout: int, config: PretrainedConfig) -> torch.Tensor:
    """An input in one of the layouts that it has in different models."""
    makers = _MAKERS[name]
    return makers[min(layout, len(makers) - 1)](config)


def _tokens(config: PretrainedConfig) -> torch.Tensor:
    words = min([VOCABULARY, *sizes_of(config, "vocab_size")])
    first = min(FIRST_WORD, words // 2)
    return integers(words - first, BATCH, LENGTH) + first


def _side(config: PretrainedConfig) -> tuple[int, int]:
    """Height and width of an image."""
    size = next(iter(sizes_of(config, "image_size", "input_size")), PIXELS)
    if isinstance(size, (list, tuple)):
        return (size[0], size[-1])
    return (size, size) if isinstance(size, int) else (PIXELS, PIXELS)


def _pixels(config: PretrainedConfig) -> torch.Tensor:
    channels = next(iter(sizes_of(config, "num_channels", "in_channels")), 3)
    return normal(BATCH, channels if isinstance(channels, int) else 3, *_side(config))


def _video(config: PretrainedConfig) -> torch.Tensor:
    frames = next(iter(sizes_of(config, "num_frames", "frames_per_clip")), 8)
    images = _pixels(config)
    return normal(BATCH, frames, *images.shape[1:])


def _samples(config: PretrainedConfig) -> torch.Tensor:
    return normal(BATCH, _SAMPLES)


def _channel_of_samples(config: PretrainedConfig) -> torch.Tensor:
    return normal(BATCH, 1, _SAMPLES)


def _spectrogram(config: PretrainedConfig) -> torch.Tensor:
    frames = next(iter(sizes_of(config, "max_length")), 256)
    return normal(BATCH, frames, _mels(config))


def _mels_first(config: PretrainedConfig) -> torch.Tensor:
    positions = sizes_of(config, "max_source_positions")
    return normal(BATCH, _mels(config), 2 * positions[0] if positions else _FRAMES)


def _frames_first(config: PretrainedConfig) -> torch.Tensor:
    return normal(BATCH, 256, _mels(config))


def _mels(config: PretrainedConfig) -> int:
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
    return next((s for s in sizes_of(config, *names) if isinstance(s, int)), _MELS)


_DECODER = ("decoder_input_ids",)
_MAKERS: dict[str, tuple[_Maker, ...]] = {
    "input_ids": (_tokens,),
    "decoder_input_ids": (_tokens,),
    "pixel_values": (_pixels, _video),
    "pixel_values_videos": (_video,),
    "input_features": (_mels_first, _frames_first),
    "input_values": (_samples, _channel_of_samples, _spectrogram),
}
_MOST_LAYOUTS = max(map(len, _MAKERS.values()))


def _labels(config: PretrainedConfig, task: str) -> Batch:
    """Labels of a task whose labels have one form in all models."""
    if task.endswith("CLASSIFICATION"):
        return {"labels": integers(getattr(config, "num_labels", _LABELS), BATCH)}
    if task.endswith(("_LM", "SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT")):
        return {"labels": _tokens(config)}
    if task == "CTC":
        return {"labels": _tokens(config)[:, :8]}
    if task == "SEMANTIC_SEGMENTATION":
        return {"labels": integers(_LABELS, BATCH, *_side(config))}
    return {}
