"""Packages of models of tables, densities, processes and agents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models.drawn.packages.guessing import Package, classes_in
from benchmarks.models.workload import integers, normal

_ROWS, _COLUMNS, _WORDS = 256, 16, 32
_TABLE = normal(_ROWS, _COLUMNS)

TAB_TRANSFORMER = Package(
    distribution="tab-transformer-pytorch",
    models=lambda: classes_in("tab_transformer_pytorch"),
    settings=(
        {
            "categories": (_WORDS,) * 5,
            "num_continuous": 10,
            "dim": 32,
            "depth": 2,
            "heads": 4,
            "dim_head": 8,
        },
    ),
    batches={
        "x_categ": integers(_WORDS, _ROWS, 5),
        **dict.fromkeys(("x_cont", "x_numer"), normal(_ROWS, 10)),
    },
)

TABNET = Package(
    distribution="pytorch-tabnet",
    models=lambda: classes_in("pytorch_tabnet.tab_network"),
    settings=(
        {
            "input_dim": _COLUMNS,
            "output_dim": 8,
            "group_dim": _COLUMNS,
            "n_glu_independent": 2,
            "pretraining_ratio": 0.2,
            **dict.fromkeys(("group_matrix", "group_attention_matrix"), torch.eye(16)),
        },
    ),
    batches={
        "x": _TABLE,
        **dict.fromkeys(("priors", "processed_feat"), _TABLE.sigmoid()),
        "steps_output": [[normal(_ROWS, 8), normal(_ROWS, 8)]],
    },
)


def _features(_: Any) -> list[Any]:
    from deepctr_torch.inputs import DenseFeat, SparseFeat  # optional

    sparse = [SparseFeat(f"word_{i}", _WORDS, embedding_dim=8) for i in range(6)]
    return [*sparse, *(DenseFeat(f"number_{i}", 1) for i in range(4))]


def _words(_: Any) -> list[Any]:
    return _features(None)[:6]


_CLICKS = torch.cat([integers(_WORDS, _ROWS, 6).float(), normal(_ROWS, 4)], dim=1)
DEEPCTR = Package(
    distribution="deepctr-torch",
    models=lambda: classes_in("deepctr_torch.models"),
    settings=(
        {
            name: _features
            for name in (
                *("linear_feature_columns", "dnn_feature_columns"),
                *("region_feature_columns", "bias_feature_columns"),
            )
        },
        {
            **dict.fromkeys(("linear_feature_columns", "dnn_feature_columns"), _words),
            "history_feature_list": ["word_0"],
        },
    ),
    batches={"X": _CLICKS},
)


class Density(nn.Module):
    """Minus the logarithm of the density that a flow gives to points."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = -self.flow().log_prob(x).mean()
        return loss


ZUKO = Package(
    distribution="zuko",
    models=lambda: classes_in("zuko.flows"),
    settings=({"features": 8, "hidden_features": (32, 32), "transforms": 3},),
    batches={"x": normal(64, 8).tanh()},
    around=Density,
)


class Points(nn.Module):
    """Minus the logarithm of the density that a flow of `nflows` gives to points."""

    def __init__(self, flow: Any) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self.flow, "log_prob"):
            loss: torch.Tensor = -self.flow.log_prob(x).mean()
            return loss
        moved, logarithm = self.flow(x)
        return moved.square().mean() - logarithm.mean()


def _residual_net(inputs: int, outputs: int) -> nn.Module:
    from nflows.nn.nets import ResidualNet  # optional

    net: nn.Module = ResidualNet(inputs, outputs, hidden_features=32)
    return net


NFLOWS = Package(
    distribution="nflows",
    models=lambda: classes_in(*("nflows.flows", "nflows.transforms")),
    settings=(
        {
            "features": 8,
            "hidden_features": 32,
            "num_layers": 3,
            "num_blocks_per_layer": 2,
            "num_transforms": 2,
            "num_householder": 4,
            "mask": torch.arange(8) % 2,
            "shape": (8,),
            "tails": "linear",
            "num_bins": 8,
            "transform_net_create_fn": lambda _: _residual_net,
        },
    ),
    batches={"x": normal(64, 8).sigmoid()},
    around=Points,
)


def _smooth(_: Any) -> nn.Module:
    from gpytorch.kernels import RBFKernel  # optional

    return RBFKernel()


class Process(nn.Module):
    """A Gaussian process, exact, with a kernel; gives minus its marginal likelihood.

    Args:
        kernel: Of the process.
    """

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        import gpytorch  # optional

        self.kernel = kernel
        self.mean = gpytorch.means.ConstantMean()
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.distribution = gpytorch.distributions.MultivariateNormal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        prior = self.distribution(self.mean(x), self.kernel(x))
        loss: torch.Tensor = -self.likelihood(prior).log_prob(x.sin().sum(-1)) / len(x)
        return loss


GPYTORCH = Package(
    distribution="gpytorch",
    models=lambda: classes_in("gpytorch.kernels"),
    settings=(
        {
            "base_kernel": _smooth,
            "radial_base_kernel": _smooth,
            "data_covar_module": _smooth,
            "num_angular_weights": 3,
            "grid_size": 16,
            "num_dims": 2,
            "num_samples": 16,
            "num_tasks": 1,
            "power": 2,
            "vocab_size": _WORDS,
            "num_mixtures": 3,
            "ard_num_dims": 2,
        },
        {"base_kernel": _smooth, "num_dims": 2, "num_mixtures": 3},
    ),
    batches={"x": normal(64, 2).sigmoid()},
    around=Process,
)

TORCHRL = Package(
    distribution="torchrl",
    models=lambda: classes_in("torchrl.modules"),
    settings=(
        {
            "state_dim": 8,
            "action_dim": 4,
            "in_features": _COLUMNS,
            "out_features": 8,
            "input_size": _COLUMNS,
            "hidden_size": 32,
            "num_features": _COLUMNS,
            "n_agents": 4,
            "n_agent_inputs": 8,
            "n_agent_outputs": 8,
            "num_cells": [64, 64],
            "n_atoms": 16,
            "atoms": 16,
            "state_shape": (8,),
            "mixing_embed_dim": 16,
            "device": "cpu",
            "obs_dim": 8,
            "input_dim": _COLUMNS,
            "output_dim": 8,
            "max_action": 1.0,
            "chunk_size": 4,
        },
    ),
    batches={
        "x": [_TABLE, normal(8, 4, 8), normal(4, 3, 64, 64)],
        "input": [_TABLE[:, None], normal(4, 3, 64, 64)],
        "inputs": normal(4, 3, 64, 64),
        "observation": [normal(8, 10, 8), normal(4, 3, 64, 64), normal(8, 8)],
        "image": normal(4, 3, 64, 64),
        "action": [normal(8, 10, 4), normal(4, 4), normal(8, 4)],
        "return_to_go": normal(8, 10, 1),
        "state": normal(8, 30),
        "belief": normal(8, 200),
        "rnn_hidden": normal(8, 200),
        "obs_embedding": normal(8, 1024),
        "value": _TABLE,
    },
)

_CLIP_LAYERS, _CLIP_WIDTH = 2, 64


def _small_clip(name: str) -> nn.Module:
    """A CLIP of the package's list with few layers and small widths."""
    import open_clip  # optional

    config = dict(open_clip.get_model_config(name))
    config["embed_dim"] = _CLIP_WIDTH
    text, vision = dict(config["text_cfg"]), dict(config["vision_cfg"])
    for part in (text, vision):
        if isinstance(part.get("layers"), int):
            part |= {"layers": _CLIP_LAYERS, "width": _CLIP_WIDTH}
        elif isinstance(part.get("layers"), list):
            part |= {"layers": [1, 1, 1, 1], "width": 16}
        part |= {"heads": 4} if "heads" in part else {}
    text |= {"context_length": 77} if "context_length" in text else {}
    text |= {"vocab_size": 512} if "vocab_size" in text else {}
    vision |= {"image_size": 64, "timm_model_pretrained": False}
    vision |= {"head_width": 16} if isinstance(vision.get("layers"), int) else {}
    config |= {"text_cfg": text, "vision_cfg": vision}
    config.pop("custom_text", None)
    kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CLIP
    if "hf_model_name" in text or "timm_model_name" in vision:
        kind = open_clip.CustomTextCLIP
    if kind is open_clip.CoCa:
        more = {"layers": _CLIP_LAYERS, "width": _CLIP_WIDTH, "heads": 4}
        config["multimodal_cfg"] = {**config["multimodal_cfg"], **more}
    allowed = {"embed_dim", "text_cfg", "vision_cfg", "multimodal_cfg", "quick_gelu"}
    model: nn.Module = kind(**{k: v for k, v in config.items() if k in allowed})
    return model


class Contrast(nn.Module):
    """A CLIP with the loss that it is trained by.

    Args:
        clip: Takes images and texts, and gives features of both and a scale.
    """

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        output = self.clip(image, text)
        if isinstance(output, dict):
            values = list(output.values())
            output = output.get("image_features", values[0]), values[1], values[2]
        images, texts, scale = output[:3]
        scores = scale * images @ texts.mT
        targets = torch.arange(len(scores))
        loss = nn.functional.cross_entropy
        return loss(scores, targets) + loss(scores.mT, targets)


def _clips() -> dict[str, Callable[..., Any]]:
    import open_clip  # optional

    return {name: partial(_small_clip, name) for name in open_clip.list_models()}


OPEN_CLIP = Package(
    distribution="open-clip-torch",
    models=_clips,
    batches={"image": normal(4, 3, 64, 64), "text": integers(512, 4, 77)},
    around=Contrast,
)


def _detector(path: str) -> nn.Module:
    from types import SimpleNamespace

    from ultralytics.nn import tasks  # optional

    config = tasks.yaml_model_load(path)
    model: Any = tasks.guess_model_task(config)
    kinds = {
        "detect": tasks.DetectionModel,
        "segment": tasks.SegmentationModel,
        "classify": tasks.ClassificationModel,
        "pose": tasks.PoseModel,
        "obb": tasks.OBBModel,
    }
    model = kinds[model](config, ch=3, verbose=False)
    gains = {"box": 7.5, "cls": 0.5, "dfl": 1.5, "pose": 12.0, "kobj": 1.0}
    model.args = SimpleNamespace(**gains, overlap_mask=True, angle=1.0, rle=1.0)
    return model


def _detectors() -> dict[str, Callable[..., Any]]:
    from ultralytics.utils import ROOT  # optional

    paths = sorted((ROOT / "cfg" / "models").rglob("*.yaml"))
    return {p.stem: partial(_detector, p.name) for p in paths}


class Detection(nn.Module):
    """A detector with the loss of its package."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss, _ = self.detector(batch)
        total: torch.Tensor = loss.sum()
        return total


_BOXES, _CLASSES = 6, integers(10, 2)
ULTRALYTICS = Package(
    distribution="ultralytics",
    models=_detectors,
    batches={
        "batch": [
            {
                "img": normal(2, 3, 128, 128).sigmoid(),
                "cls": integers(10, *size).float() if len(size) > 1 else _CLASSES,
                "bboxes": normal(_BOXES, width).sigmoid() * 0.4 + 0.1,
                "batch_idx": torch.tensor([0.0, 0, 0, 1, 1, 1]),
                "masks": integers(2, 2, 32, 32).float(),
                "keypoints": normal(_BOXES, 17, 3).sigmoid(),
            }
            for size, width in (((_BOXES, 1), 4), ((_BOXES, 1), 5), ((2,), 4))
        ]
    },
    around=Detection,
)
