"""Transformers' configurations with few layers, small widths and few words.

What a field means is guessed from its name: the names of some 800 configurations are
few. There are three degrees, because not every model can be made arbitrarily small:
`SIZES` puts small numbers in place of layers, widths and heads, `SHARES` divides
widths and keeps heads, so that what has to add up still does, and `LAYERS` leaves
widths as they are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from transformers import CONFIG_MAPPING, PretrainedConfig

Degree = Literal["SIZES", "SHARES", "LAYERS"]
DEGREES: tuple[Degree, ...] = ("SIZES", "SHARES", "LAYERS")

LAYERS, VOCABULARY, POSITIONS, PIXELS = 4, 512, 512, 224
FIRST_WORD = 64  # of a batch: the ids below are those of special tokens
_HEADS, _WIDTH, _INNER, _HEAD_WIDTH, _EXPERTS = 4, 64, 128, 16, 4
_SHARE = 4  # of `SHARES`: widths are divided by it
_LEAST_SHARED = 128  # and are left alone if they are smaller
_STAGE = 2  # most layers of a stage


def _named(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


_NO_SIZE = _named(r"first_k_", r"max_window_", r"shared_layers", r"upsampl", r"_idx$")
_LAYER_COUNT = _named(r"layers$", r"n_layer$", r"^depth$", r"num_(encoder_)?blocks$")
_STAGE_COUNTS = _named(r"depths?$", r"num_blocks$", r"layers_per_stage$", r"_repeats$")
_KEY_HEADS = _named(r"num_key_value_heads$", r"num_kv_heads$")
_HEAD_COUNT = _named(r"heads$", r"^n_head$", r"num_attention_heads")
_HEAD_SIZE = _named(r"head_dim$", r"^d_kv$", r"dim_head$", r"^kv_channels$")
_RANK = _named(r"lora_rank$")
_EXPERT_INNER = _named(r"(moe|expert).*intermediate_size$")
_INNER_SIZE = _named(
    r"intermediate_size$", r"ffn_dim", r"^d_ff$", r"^n_inner$", r"mlp_dim$"
)
_SIZE = _named(
    r"hidden_size", r"hidden_dim$", r"^d_model$", r"^n_embd$", r"embed_dim$",
    r"^dim$", r"embedding_size$", r"projection_dim$", r"embed_proj_dim$",
    r"pooler_output_size$", r"emb_dim$", r"lru_width$",
)  # fmt: skip
_EXPERT_COUNT = _named(
    r"^(moe_)?num_(local_)?experts$", r"^n_routed_experts$", r"^num_routed_experts$"
)
_EXPERTS_TAKEN = _named(r"experts_per_tok", r"^moe_k$", r"^top_?k$", r"moe_top_?k$")
_EXPERT_GROUPS = _named(r"^n_group$", r"^topk_group$")
_POSITION_COUNT = _named(r"max_position_embeddings$", r"^n_positions$", r"^n_ctx$")
_SECTIONS = "mrope_section"  # of a field that is a dictionary
_SPECIAL = _named(r"token_ids?$", r"token_index$")


def shrunken(model_type: str, degree: Degree) -> PretrainedConfig:
    """The configuration of an architecture, made small.

    Args:
        model_type: Its name in Transformers.
        degree: How small.

    Raises:
        Exception: Whatever the configuration raises, without arguments or with these.
    """
    return _shrink(CONFIG_MAPPING[model_type](), degree, {})


def _shrink(
    config: PretrainedConfig, degree: Degree, special: dict[int, int]
) -> PretrainedConfig:
    settings: dict[str, Any] = {}
    fields = _fields(config)
    for name in sorted(fields):
        value = fields[name]
        if isinstance(value, PretrainedConfig):
            settings[name] = _shrink(value, degree, special)
        elif name == "use_cache":
            settings[name] = False
        elif _SPECIAL.search(name):
            settings[name] = _special(value, special)
        else:
            smaller = _smaller(name, value, degree, fields)
            if smaller != value:
                settings[name] = smaller
    return type(config)(**settings)


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    """What can be given to the constructor of a configuration."""
    if dataclasses.is_dataclass(config):
        names = [field.name for field in dataclasses.fields(config)]
        return {name: vars(config)[name] for name in names if name in vars(config)}
    return {k: v for k, v in vars(config).items() if not k.startswith("_")}


def _special(value: Any, special: dict[int, int]) -> Any:
    """Ids of special tokens that are in the small vocabulary, equal ones alike."""
    if isinstance(value, (list, tuple)):
        return type(value)(_special(item, special) for item in value)
    if not isinstance(value, int) or value < FIRST_WORD // 2:
        return value
    return special.setdefault(value, FIRST_WORD // 2 + len(special) % (FIRST_WORD // 2))


def _smaller(name: str, value: Any, degree: Degree, fields: Mapping[str, Any]) -> Any:
    if isinstance(value, (list, tuple)):
        if _is_whole(*value) and _STAGE_COUNTS.search(name):
            return type(value)(min(item, _STAGE) for item in value)
        return value
    if isinstance(value, Mapping) and _SECTIONS in value and degree != "LAYERS":
        return {**value, _SECTIONS: _sections(value[_SECTIONS], degree)}
    if value is None and degree == "SIZES":  # a default that some models leave out
        return {"num_experts_per_tok": 2, "head_dim": _HEAD_WIDTH}.get(name)
    if not _is_whole(value) or value <= 0 or _NO_SIZE.search(name):
        return value
    if name == "vocab_size":
        return min(value, VOCABULARY)
    if name == "image_size":
        return min(value, PIXELS)
    for pattern, most in (
        (_POSITION_COUNT, POSITIONS),
        (_LAYER_COUNT, LAYERS),
        (_EXPERT_COUNT, _EXPERTS),
        (_EXPERTS_TAKEN, 2),
        (_EXPERT_GROUPS, 1),
    ):
        if pattern.search(name):
            return min(value, most)
    if degree == "SIZES":
        return _sized(name, value, fields)
    return _shared(name, value) if degree == "SHARES" else value


def _sections(sections: list[int], degree: Degree) -> list[int]:
    """Shares of a rotary embedding that add up to half of the width of a head."""
    whole = sum(sections)
    half = _HEAD_WIDTH // 2 if degree == "SIZES" else whole // _SHARE
    smaller = [section * half // whole for section in sections]
    return [*smaller[:-1], half - sum(smaller[:-1])]


def _sized(name: str, value: int, fields: Mapping[str, Any]) -> int:
    """A width or a number of heads in place of another."""
    if _KEY_HEADS.search(name):
        every_head = value == fields.get("num_attention_heads", value)
        return min(value, _HEADS if every_head else _HEADS // 2)
    for pattern, small in (
        (_HEAD_COUNT, _HEADS),
        (_HEAD_SIZE, _HEAD_WIDTH),
        (_RANK, _WIDTH // 2),
        (_EXPERT_INNER, _INNER // 2),
        (_INNER_SIZE, _INNER),
        (_SIZE, _WIDTH),
    ):
        if pattern.search(name):
            return min(value, small)
    return value


def _shared(name: str, value: int) -> int:
    """A share of a width."""
    widths = (_HEAD_SIZE, _RANK, _INNER_SIZE, _SIZE)
    if not any(pattern.search(name) for pattern in widths):
        return value
    least = 32 if _HEAD_SIZE.search(name) else _LEAST_SHARED
    return value // _SHARE if value % _SHARE == 0 and value >= least else value


def _is_whole(*values: Any) -> bool:
    """Whether all are integers; True and False are none."""
    return all(isinstance(v, int) and not isinstance(v, bool) for v in values)


def sizes_of(config: PretrainedConfig, *names: str) -> list[Any]:
    """What a configuration or those inside it say under any of some names."""
    inner = [v for v in vars(config).values() if isinstance(v, PretrainedConfig)]
    own = [getattr(config, n) for n in names if getattr(config, n, None) is not None]
    return own + [size for item in inner for size in sizes_of(item, *names)]
