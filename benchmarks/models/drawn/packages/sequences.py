"""Packages of models of text, sound and time series."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models.drawn.packages.guessing import (
    Package,
    classes_in,
    last_of_files,
    tensors_of,
)
from benchmarks.models.workload import integers, normal

_BATCH, _LENGTH, _WIDTH, _WORDS = 4, 64, 64, 256
_TOKENS, _HIDDEN = integers(_WORDS, _BATCH, _LENGTH), normal(_BATCH, _LENGTH, _WIDTH)
_LAYERS = {
    "dim": _WIDTH,
    "depth": 2,
    "heads": 4,
    "dim_head": 16,
    "num_tokens": _WORDS,
    "max_seq_len": 2 * _LENGTH,
    "causal": True,
}


def _decoder(_: Any) -> nn.Module:
    from x_transformers import Decoder  # optional

    return Decoder(dim=_WIDTH, depth=2, heads=4, attn_dim_head=16)


def _language_model(_: Any) -> nn.Module:
    from x_transformers import TransformerWrapper  # optional

    return TransformerWrapper(
        num_tokens=_WORDS, max_seq_len=2 * _LENGTH, attn_layers=_decoder(None)
    )


X_TRANSFORMERS = Package(
    distribution="x-transformers",
    models=lambda: classes_in("x_transformers") | last_of_files("x_transformers"),
    settings=(
        _LAYERS
        | {
            "attn_layers": _decoder,
            "forward_decoder": _language_model,
            "net": _language_model,
            "decoder": _language_model,
            "model": _language_model,
            "image_size": 32,
            "patch_size": 8,
            "mask_id": 1,
            "numerical_token_id": 2,
            "entropy_threshold": 1.0,
            "dim_in": _WIDTH,
            "dim_out": _WIDTH,
            "dim_hidden": _WIDTH,
            "dim_model": _WIDTH,
            "causal": False,
        },
        {"dim": _WIDTH, "depth": 2, "enc_num_tokens": _WORDS, "dec_num_tokens": _WORDS},
    ),
    batches={
        "x": [_TOKENS, _HIDDEN],
        "seq": _TOKENS,
        "src": _TOKENS,
        "tgt": _TOKENS,
        "img": normal(_BATCH, 3, 32, 32),
        "context": _HIDDEN,
        "condition": normal(_BATCH, _WIDTH),
        "x_num": normal(_BATCH, _LENGTH),
        "preferred_seq": _TOKENS,
        "unpreferred_seq": _TOKENS.flip(0),
        "prompt_mask": torch.arange(_LENGTH).expand(_BATCH, -1) < _LENGTH // 2,
    },
)


class Autoencoder(nn.Module):
    """An encoder and a decoder around what quantizes between them.

    Args:
        quantizer: Takes and gives vectors of `width`; what else it gives is its loss.
        width: Of its vectors.
    """

    def __init__(self, quantizer: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(_WIDTH, 128), nn.GELU(), nn.Linear(128, width)
        )
        self.quantizer = quantizer
        self.decoder = nn.Sequential(
            nn.Linear(width, 128), nn.GELU(), nn.Linear(128, _WIDTH)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        codes, *rest = tensors_of(self.quantizer(self.encoder(x)))
        return self.decoder(codes), [loss.sum() for loss in rest]


VECTOR_QUANTIZE = Package(
    distribution="vector-quantize-pytorch",
    models=lambda: classes_in("vector_quantize_pytorch"),
    settings=(
        {
            "dim": 32,
            "codebook_size": 64,
            "codebook_dim": 16,
            "num_quantizers": 2,
            "groups": 2,
            "levels": [8, 5, 5],
            "scales": (1, 2, 4),
        },
    ),
    batches={"x": _HIDDEN},
    around=Autoencoder,
)


def _performer(_: Any) -> nn.Module:
    from performer_pytorch import PerformerLM  # optional

    return PerformerLM(
        num_tokens=_WORDS, max_seq_len=_LENGTH, dim=_WIDTH, depth=2, heads=4
    )


def _reformer(_: Any) -> nn.Module:
    from reformer_pytorch import ReformerLM  # optional

    return ReformerLM(
        num_tokens=_WORDS, dim=_WIDTH, depth=2, max_seq_len=_LENGTH, bucket_size=8
    )


_EFFICIENT = dict(
    batches={
        "x": [_TOKENS, _HIDDEN, normal(_BATCH, 3, 32, 32)],
        "context": _HIDDEN,
        **dict.fromkeys(("q", "k", "v", "qk"), normal(_BATCH, 4, _LENGTH, 16)),
        **dict.fromkeys(("seq_in", "seq_out"), _TOKENS),
        "i": 8,
        "j": 8,
    },
)

PERFORMER = Package(
    distribution="performer-pytorch",
    models=lambda: classes_in("performer_pytorch"),
    settings=(_LAYERS | {"net": _performer, "dim_heads": 16, "causal": False},),
    **_EFFICIENT,
)
REFORMER = Package(
    distribution="reformer-pytorch",
    models=lambda: classes_in("reformer_pytorch"),
    settings=(
        _LAYERS | {"net": _reformer, "bucket_size": 8, "n_hashes": 2},
        {"dim": _WIDTH, "depth": 2, "bucket_size": 8, "heads": 4},
    ),
    **_EFFICIENT,
)
LOCAL_ATTENTION = Package(
    distribution="local-attention",
    models=lambda: classes_in("local_attention"),
    settings=(_LAYERS | {"window_size": 16, "local_attn_window_size": 16},),
    **_EFFICIENT,
)
COLT5 = Package(
    distribution="colt5-attention",
    models=lambda: classes_in("colt5_attention"),
    settings=(
        _LAYERS
        | {
            name: 16
            for name in (
                *("num_heavy_tokens_q", "num_heavy_tokens_kv", "num_tokens_q"),
                *("num_tokens_kv", "num_heavy_tokens", "num_heavy_attn_tokens_q"),
                *("num_heavy_attn_tokens_kv", "num_heavy_ff_tokens"),
            )
        },
    ),
    **_EFFICIENT,
)


def _mamba(_: Any) -> Any:
    from mambapy.mamba import MambaConfig  # optional

    return MambaConfig(d_model=_WIDTH, n_layers=2)


def _jamba(_: Any) -> Any:
    from mambapy.jamba import JambaLMConfig  # optional

    return JambaLMConfig(
        vocab_size=_WORDS,
        d_model=_WIDTH,
        n_layers=4,
        mlp_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
    )


MAMBAPY = Package(
    distribution="mambapy",
    models=lambda: classes_in("mambapy.mamba", "mambapy.jamba", "mambapy.vim"),
    settings=(
        {"config": _mamba, "vocab_size": _WORDS},
        {"config": _jamba},
    ),
    batches={"x": [_HIDDEN, _TOKENS], "tokens": _TOKENS},
)


def _xlstm(_: Any) -> Any:
    from xlstm import (  # optional
        FeedForwardConfig,
        mLSTMBlockConfig,
        mLSTMLayerConfig,
        sLSTMBlockConfig,
        sLSTMLayerConfig,
        xLSTMLMModelConfig,
    )

    return xLSTMLMModelConfig(
        mlstm_block=mLSTMBlockConfig(mlstm=mLSTMLayerConfig(num_heads=4)),
        slstm_block=sLSTMBlockConfig(
            slstm=sLSTMLayerConfig(backend="vanilla", num_heads=4),
            feedforward=FeedForwardConfig(proj_factor=1.3, act_fn="gelu"),
        ),
        context_length=_LENGTH,
        num_blocks=3,
        embedding_dim=_WIDTH,
        slstm_at=[1],
        vocab_size=_WORDS,
    )


def _prepared(block: Any, layer: str) -> Any:
    """A configuration of a block with the widths that a stack would give it."""
    inside = getattr(block, layer)
    inside.embedding_dim, inside.context_length = _WIDTH, _LENGTH
    block.__post_init__()
    inside.__post_init__()
    return block


XLSTM = Package(
    distribution="xlstm",
    models=lambda: classes_in("xlstm"),
    settings=(
        {"config": _xlstm},
        {"config": lambda _: _prepared(_xlstm(None).mlstm_block, "mlstm")},
        {"config": lambda _: _prepared(_xlstm(None).slstm_block, "slstm")},
        {"config": lambda _: _prepared(_xlstm(None).mlstm_block, "mlstm").mlstm},
        {"config": lambda _: _prepared(_xlstm(None).slstm_block, "slstm").slstm},
    ),
    batches={"x": _HIDDEN, "idx": _TOKENS},
)

_SOUND, _SPECTRUM = normal(2, 8000), normal(2, 100, 40)
TORCHAUDIO = Package(
    distribution="torchaudio",
    models=lambda: classes_in("torchaudio.models"),
    settings=(
        {
            "input_dim": 40,
            "num_heads": 4,
            "ffn_dim": 128,
            "num_layers": 2,
            "depthwise_conv_kernel_size": 31,
            "segment_length": 16,
            "n_feature": 40,
            "n_hidden": 64,
            "n_class": 32,
            "num_classes": 32,
            "num_features": 1,
            "n_classes": 64,
            "hop_length": 8,
            "upsample_scales": [2, 2, 2],
            "sources": ["one", "two"],
            "msk_num_layers": 2,
            "msk_num_stacks": 2,
        },
        {"n_classes": 64, "hop_length": 200, "upsample_scales": [5, 5, 8]},
    ),
    batches={
        "input": [_SPECTRUM, _SOUND[:, None]],
        "x": [_SPECTRUM[:, None], _SOUND[:, None]],
        "lengths": torch.tensor([100, 80]),
        "tokens": integers(100, 2, 20),
        "token_lengths": torch.tensor([20, 12]),
        "mel_specgram": normal(2, 80, 50),
        "mel_specgram_lengths": torch.tensor([50, 40]),
        "waveform": normal(2, 1, (20 - 4) * 8),
        "specgram": normal(2, 1, 128, 20),
    },
)

ASTEROID = Package(
    distribution="asteroid",
    models=lambda: classes_in("asteroid.models"),
    settings=(
        {
            "n_src": 2,
            "n_repeats": 2,
            "n_blocks": 2,
            "bn_chan": 32,
            "hid_chan": 64,
            "n_filters": 64,
            "hid_size": 32,
            "architecture": "mini",
            "stft_n_filters": 512,
            "num_blocks": 2,
        },
        {"n_src": 2, "architecture": "DCUNet-10"},
    ),
    batches={"wav": [_SOUND, _SOUND[:, None]], "x": normal(2, 2, 8000)},
)


def _speechbrain() -> dict[str, Callable[..., Any]]:
    files = last_of_files("speechbrain.lobes.models")
    namespaces = sorted({model.__module__ for model in files.values()})
    return classes_in(*namespaces)


SPEECHBRAIN = Package(
    distribution="speechbrain",
    models=_speechbrain,
    settings=(
        {
            "input_shape": (None, None, 40),
            "input_size": 40,
            "input_dim": 40,
            "d_model": 40,
            "nhead": 4,
            "num_heads": 4,
            "embed_dim": 40,
            "num_layers": 2,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "d_ffn": 128,
            "out_channels": 32,
            "output_size": 40,
            "output_neurons": 32,
            "neurons": 32,
            "kernel_size": 3,
            "inner_dim": 32,
            "vocab": _WORDS,
            "tgt_vocab": _WORDS,
            "in_channels": 40,
            "code_dim": 40,
            "dnn_blocks": 1,
            "cnn_blocks": 2,
            "rnn_layers": 2,
            "rnn_neurons": 32,
            "dnn_neurons": 32,
            "lin_neurons": 32,
            "K": 16,
            "D": 40,
        },
    ),
    batches={
        "x": [_SPECTRUM, _SPECTRUM.mT, _SOUND[:, None], _SOUND[..., None]],
        "src": [_SPECTRUM, integers(_WORDS, 2, _LENGTH)],
        **dict.fromkeys(("query", "key", "value", "hidden_states"), _SPECTRUM),
        "tgt": [_SPECTRUM, integers(_WORDS, 2, _LENGTH)],
        "memory": _SPECTRUM,
    },
)

BRAINDECODE = Package(
    distribution="braindecode",
    models=lambda: classes_in("braindecode.models"),
    settings=tuple(
        {
            "n_chans": channels,
            "n_outputs": 4,
            "n_times": 1000,
            "sfreq": 250,
            "input_window_seconds": 4.0,
        }
        for channels in (8, 22)
    ),
    batches={
        name: [normal(_BATCH, 8, 1000), normal(_BATCH, 22, 1000)]
        for name in ("x", "X", "input", "inputs")
    },
)


def _series() -> Any:
    import pandas  # comes with the package
    from pytorch_forecasting import TimeSeriesDataSet  # optional

    values = normal(2 * 60).cumsum(0).tolist()
    table = pandas.DataFrame(
        {
            "value": values,
            "series": ["one"] * 60 + ["two"] * 60,
            "time": [*range(60)] * 2,
        }
    )
    return TimeSeriesDataSet(
        table,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=24,
        max_prediction_length=6,
        time_varying_unknown_reals=["value"],
    )


class Forecast(nn.Module):
    """A model of a time series with the loss that its package gives it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        more = {}
        if "encoder_target" in inspect.signature(self.model.loss.update).parameters:
            more = {"encoder_target": x["encoder_target"]}
        output = self.model(x).prediction
        loss: torch.Tensor = self.model.loss(output, (y, None), **more)
        self.model.loss.reset()  # its sums over steps, with their graphs
        return loss


def _forecasting() -> dict[str, Callable[..., Any]]:
    listed = classes_in("pytorch_forecasting")
    return {
        name: partial(model.from_dataset, _series())
        for name, model in listed.items()
        if hasattr(model, "from_dataset")
    }


def _forecast_batch() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    x, y = next(iter(_series().to_dataloader(train=True, batch_size=16)))
    return x, y[0]


FORECASTING = Package(
    distribution="pytorch-forecasting",
    models=_forecasting,
    batches={"x": lambda: _forecast_batch()[0], "y": lambda: _forecast_batch()[1]},
    around=Forecast,
)
