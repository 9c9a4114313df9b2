"""Random batches for models of Transformers, with labels: they compute their loss."""

from __future__ import annotations

from typing import Any

import torch

from autosac.cli.usage import UsageError

_TEXT_HEADS = (
    "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "MTModel",
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
)  # fmt: skip
_IMAGE_HEADS = ("ForImageClassification", "ForSemanticSegmentation")
_IMAGE_SIZE = 224  # of convolutional networks, which take any


def batch_for(model: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    """A batch for a model, by the name of its class.

    Args:
        model: With a common head for text or images.
        batch: Samples in it.
        length: Tokens of each, if they are text.

    Raises:
        UsageError: No batch is known for such a model.
    """
    name, config = type(model).__name__, model.config
    takes = model.main_input_name
    if takes == "input_ids" and name.endswith(_TEXT_HEADS):
        return _texts(name, config, torch.randint(config.vocab_size, (batch, length)))
    if takes == "pixel_values" and name.endswith(_IMAGE_HEADS):
        return _images(name, config, batch)
    raise UsageError(
        f"autosac knows no batch for {name}; write a factory that returns (model,"
        " inputs) and name it as package.module:factory."
    )


def _texts(name: str, config: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    batch, length = tokens.shape
    if name.endswith("ForSequenceClassification"):
        if config.pad_token_id is None:  # where texts end, which is asked of batches
            config.pad_token_id = 0
        if config.is_encoder_decoder:  # these take what stands at the only end
            end = config.eos_token_id
            tokens.masked_fill_(tokens == end, (end + 1) % config.vocab_size)
            tokens[:, -1] = end
        labels = torch.randint(config.num_labels, (batch,))
    elif name.endswith("ForTokenClassification"):
        labels = torch.randint(config.num_labels, (batch, length))
    elif name.endswith("ForQuestionAnswering"):
        places = torch.randint(length, (batch,))
        return {"input_ids": tokens, "start_positions": places, "end_positions": places}
    else:
        labels = tokens
    return {"input_ids": tokens, "labels": labels}


def _images(name: str, config: Any, batch: int) -> dict[str, torch.Tensor]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", _IMAGE_SIZE)
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(batch, vision.num_channels, height, width)
    is_whole = name.endswith("ForImageClassification")
    of_each = () if is_whole else (height, width)
    labels = torch.randint(config.num_labels, (batch, *of_each))
    return {"pixel_values": pixels, "labels": labels}
