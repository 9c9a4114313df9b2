"""Packages of models of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.models.drawn.packages.guessing import (
    Package,
    classes_in,
    last_of_files,
)
from benchmarks.models.workload import integers, normal

_PIXELS, _BATCH = 32, 2
_IMAGES = normal(_BATCH, 3, _PIXELS, _PIXELS)
_VIDEO = normal(_BATCH, 3, 4, _PIXELS, _PIXELS)
_UNIT = normal(_BATCH).sigmoid()
_VIT = {
    "image_size": _PIXELS,
    "patch_size": 8,
    "num_classes": 10,
    "dim": 64,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 128,
}


def _vit(_: Any) -> nn.Module:
    from vit_pytorch import ViT  # optional

    return ViT(**_VIT)


def _distilled(_: Any) -> nn.Module:
    from vit_pytorch.distill import DistillableViT  # optional

    return DistillableViT(**_VIT)


def _channels_of_vit(default: Any) -> Any:
    """A number of channels; MobileViT's are a list without a default."""
    if isinstance(default, int):
        return default
    return [16, 32, 48, 48, 48, 64, 64, 80, 80, 96, 96]


VIT = Package(
    distribution="vit-pytorch",
    models=lambda: last_of_files("vit_pytorch"),
    settings=(
        _VIT
        | {
            "dim_head": 16,
            "cls_depth": 2,
            "max_tokens_per_depth": (16, 8),
            "sm_dim": 32,
            "lg_dim": 64,
            "frames": 4,
            "max_frames": 4,
            "frame_patch_size": 2,
            "image_patch_size": 8,
            "spatial_depth": 2,
            "temporal_depth": 2,
            "seq_len": 64,
            "freq_patch_size": 8,
            "num_residual_streams": 2,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
            "dims": [64, 80, 96],
            "channels": _channels_of_vit,
            "mlp_mult": 2,
            "ndim": 2,
            "input_shape": (_PIXELS, _PIXELS),
            "masking_ratio": 0.5,
            "decoder_dim": 64,
            "num_slots": 4,
            **dict.fromkeys(("vit", "encoder", "net"), _vit),
            "student": _distilled,
            "teacher": _vit,
        },
        {
            "num_classes": 10,
            "dim": 16,
            "depth": (1, 1, 1, 1),
            "heads": (1, 1, 2, 2),
            "reduction_factor": (8, 4, 2, 1),
            "image_size": 224,
            "patch_size": 16,
            "mlp_dim": 128,
            "mlp_mult": 2,
            "cls_depth": 1,
        },
    ),
    batches={
        "img": [_IMAGES, normal(_BATCH, 3, 224, 224)],
        "x": [_IMAGES, normal(_BATCH, 3, 224, 224), _VIDEO],
        "images": [_IMAGES, list(normal(3, 3, _PIXELS, _PIXELS))],
        "input": _IMAGES,
        "batched_images": [[list(_IMAGES), list(_IMAGES)]],
        "volumes": [list(_VIDEO)],
        "video": _VIDEO,
        "series": normal(_BATCH, 3, 64),
        "labels": integers(10, _BATCH),
    },
)

SEGMENTATION = Package(
    distribution="segmentation-models-pytorch",
    models=lambda: classes_in("segmentation_models_pytorch"),
    settings=({"encoder_weights": None, "classes": 3},),
    batches={"x": [normal(_BATCH, 3, 64, 64), normal(_BATCH, 3, 224, 224)]},
)

KORNIA = Package(
    distribution="kornia",
    models=lambda: classes_in("kornia.feature", "kornia.models"),
    settings=({"pretrained": False, "num_features": 3, "num_in_ch": 3}, {}),
    batches={
        name: [
            normal(4, 1, _PIXELS, _PIXELS),
            normal(1, 1, 64, 64),
            normal(1, 3, 64, 64),
        ]
        for name in ("x", "input", "img", "images", "patch", "patches")
    },
)

MONAI = Package(
    distribution="monai",
    models=lambda: classes_in("monai.networks.nets"),
    settings=tuple(
        {
            "spatial_dims": dims,
            "in_channels": 1,
            "out_channels": 2,
            "channels": (8, 16, 32),
            "strides": (2, 2, 2),
            "num_classes": 3,
            "classes": 3,
            "in_shape": (1, *[_PIXELS] * dims),
            "out_shape": (3,),
            "latent_shape": (16,),
            "start_shape": (16, 4, 4),
            "input_shape": [_PIXELS] * dims,
            "input_image_size": (_PIXELS,) * dims,
            "image_size": [_PIXELS] * dims,
            "img_size": (_PIXELS,) * dims,
            "patch_size": (8,) * dims,
            "label_nc": 3,
            "latent_size": 8,
            "hidden_channels": (16, 16),
            "encode_channels": (16, 16),
            "decode_channels": (16, 16),
            "num_channel_initial": 4,
            "extract_levels": (0, 1, 2),
            "depth": lambda default: 2 if isinstance(default, type) else default,
            "kernel_size": (3, 3, 3),
            "upsample_kernel_size": (2, 2),
            "num_tokens": 64,
            "max_seq_len": 64,
            "attn_layers_dim": 32,
            "attn_layers_depth": 2,
            "attn_layers_heads": 4,
            "hidden_size": 48,
            "mlp_dim": 64,
            "num_layers": 2,
            "num_heads": 4,
            "feature_size": 12,
            "init_filters": 8,
            "num_d": 2,
            "num_layers_d": 2,
            "backbone": "efficientnet-b0",
            "model_name": "efficientnet-b0",
            "pretrained": False,
            "num_res_blocks": lambda default: default,
            "block": "basic",
            "layers": (1, 1, 1, 1),
            "block_inplanes": (8, 16, 32, 64),
            "unet_out_channels": 8,
            "final_conv_channels": (8, 8),
            "in_planes": 8,
            "planes": 8,
            "dim": lambda default: 16 if isinstance(default, type) else default,
        }
        for dims in (2, 3)
    ),
    batches={
        name: [
            normal(_BATCH, 1, _PIXELS, _PIXELS),
            normal(1, 1, _PIXELS, _PIXELS, _PIXELS),
            normal(_BATCH, 3, 64, 64),
            integers(64, _BATCH, 64),
        ]
        for name in ("x", "x_in", "inputs", "input", "images", "moving", "fixed", "i")
    }
    | {
        "timesteps": integers(100, _BATCH),
        "seg": normal(_BATCH, 3, _PIXELS, _PIXELS),
        "concatenated_pairs": normal(_BATCH, 1, _PIXELS, _PIXELS),
        "controlnet_cond": normal(_BATCH, 1, _PIXELS, _PIXELS),
    },
)


def _unet(_: Any) -> nn.Module:
    from denoising_diffusion_pytorch import Unet  # optional

    return Unet(dim=16, dim_mults=(1, 2))


def _unet_of_series(_: Any) -> nn.Module:
    from denoising_diffusion_pytorch import Unet1D  # optional

    return Unet1D(dim=16, dim_mults=(1, 2), channels=3)


_DIFFUSION: dict[str, Any] = {
    "dim": 16,
    "dim_mults": (1, 2),
    "image_size": _PIXELS,
    "frames": 4,
    "seq_len": _PIXELS,
    "seq_length": _PIXELS,
    "dim_max": 64,
    "num_downsamples": 2,
    "num_blocks_per_stage": 1,
    "attn_res": (8,),
    "channels": 3,
}

DENOISING = Package(
    distribution="denoising-diffusion-pytorch",
    models=lambda: classes_in("denoising_diffusion_pytorch"),
    settings=(
        _DIFFUSION | {"model": _unet, "net": _unet},
        {"model": _unet_of_series, "seq_length": _PIXELS},
        {"image_size": _PIXELS, "model": _unet, "dim": 16},
    ),
    batches={
        "x": [_IMAGES, normal(_BATCH, 3, _PIXELS), _VIDEO],
        "img": [_IMAGES.sigmoid(), normal(_BATCH, 3, _PIXELS).sigmoid()],
        "images": _IMAGES.sigmoid(),
        "time": _UNIT,
    },
)


def _diffusers() -> dict[str, Callable[..., Any]]:
    import diffusers  # optional

    return classes_in("diffusers", base=diffusers.ModelMixin)


def _narrow(default: Any) -> Any:
    """Widths of blocks, less; multiples of 32 as norms of groups want them."""
    if isinstance(default, int):
        return min(default, 32)
    if isinstance(default, (list, tuple)):
        return type(default)(min(32 * 2 ** min(i, 1), w) for i, w in enumerate(default))
    return (32, 64)


def _few(default: Any) -> Any:
    """Two layers of many."""
    if isinstance(default, (list, tuple)):
        return type(default)(min(n, 1) for n in default)
    return 2 if not isinstance(default, int) else min(default, 2)


_WIDTHS = dict.fromkeys(
    (
        *("block_out_channels", "encoder_block_out_channels", "base_dim", "base_dims"),
        *("decoder_block_out_channels", "decoder_base_dim"),
    ),
    _narrow,
)
_COUNTS = dict.fromkeys(
    (
        *("num_layers", "num_single_layers", "layers_per_block", "depth", "num_blocks"),
        *("transformer_layers_per_block", "num_refiner_layers", "num_mmdit_layers"),
        *("num_single_dit_layers", "num_double_layers", "num_hidden_layers"),
        *("encoder_layers_per_block", "decoder_layers_per_block", "num_text_blocks"),
        *("num_visual_blocks", "num_res_blocks"),
    ),
    _few,
)
_TEXT = 32  # width of what stands for text
_DIFFUSERS = {
    **_WIDTHS,
    **_COUNTS,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_cross_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "attention_head_dim": lambda default: 8 if default == 8 else 16,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 64,
    "joint_attention_dim": _TEXT,
    "caption_projection_dim": 64,
    "caption_channels": _TEXT,
    "cap_feat_dim": _TEXT,
    "pooled_projection_dim": _TEXT,
    "text_embed_dim": _TEXT,
    "text_dim": _TEXT,
    "freq_dim": 32,
    "ffn_dim": 128,
    "intermediate_size": 128,
    "hidden_size": 64,
    "inner_dim": 64,
    "mlp_ratio": 2.0,
    "in_channels": 16,
    "out_channels": lambda default: default and 16,
    "axes_dims_rope": (4, 6, 6),
    "axes_dim_rope": (4, 6, 6),
    "sample_size": 16,
    "sample_width": 16,
    "sample_height": 16,
    "sample_frames": 4,
    "embedding_dim": 32,
    "num_embeddings": 8,
    "max_text_seq_length": 8,
    "time_embed_dim": 32,
    "condition_dim": 32,
    "encoder_hid_dim": None,
}


# Latents of images and of videos, and as tokens.
_LATENTS = [
    normal(_BATCH, 16, 16, 16),
    normal(_BATCH, 16, 5, 16, 16),
    normal(_BATCH, 64, 16),
    normal(_BATCH, 3, 64, 64),
    normal(_BATCH, 3, 5, 64, 64),
    normal(_BATCH, 4, 32, 32),
]
_OWN_CHANNELS = {k: v for k, v in _DIFFUSERS.items() if not k.endswith("_channels")}
DIFFUSERS = Package(
    distribution="diffusers",
    models=_diffusers,
    settings=(
        _DIFFUSERS,
        {**_DIFFUSERS, "cross_attention_dim": _TEXT},
        {**_OWN_CHANNELS, "cross_attention_dim": _TEXT, "block_out_channels": _narrow},
    ),
    batches={
        **{name: _LATENTS for name in ("hidden_states", "sample", "x")},
        "t": normal(_BATCH).sigmoid(),
        "cap_feats": [[normal(8, _TEXT)] * _BATCH],
        "timestep_ratio": normal(_BATCH).sigmoid(),
        "encoder_mask": torch.ones(_BATCH, 8),
        "clip_text_pooled": normal(_BATCH, 1, _TEXT),
        "global_hidden_states": normal(_BATCH, 1, _TEXT),
        "timestep": integers(1000, _BATCH).float(),
        "encoder_hidden_states": normal(_BATCH, 8, _TEXT),
        "encoder_attention_mask": torch.ones(_BATCH, 8),
        "pooled_projections": normal(_BATCH, _TEXT),
        "proj_embedding": normal(_BATCH, 32),
        "controlnet_cond": normal(_BATCH, 3, 128, 128),
        "r_timestep": integers(1000, _BATCH).float(),
        "num_frames": lambda: 5,
        "height": 16,
        "width": 16,
        "img_ids": torch.zeros(64, 3),
        "txt_ids": torch.zeros(8, 3),
        "class_labels": integers(10, _BATCH),
    },
    whole=True,
    is_large=True,
)
