"""Language models: Transformers' own and small recurrent ones, random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn

from autosac.cli import demo
from benchmarks.models.workload import (
    Workload,
    adamw,
    classification,
    integers,
    labelled,
    numbered,
)

transformers.logging.set_verbosity_error()


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model and of its batch; functions take others by these names."""

    layers: int = 12
    width: int = 192
    heads: int = 6
    vocabulary: int = 2048
    batch: int = 6
    length: int = 256

    @property
    def of_batch(self) -> tuple[int, int, int]:
        return self.vocabulary, self.batch, self.length


_SMALL = Sizes(layers=4, width=96, vocabulary=512, batch=4, length=128)


def gpt(**others: int) -> Workload:
    """The model of ``autosac demo``, with dropout."""
    sizes = replace(Sizes(batch=8), **others)
    tokens = integers(*sizes.of_batch)
    return Workload(
        name="GPT",
        make_model=lambda: demo.GPT(
            num_layers=sizes.layers,
            width=sizes.width,
            num_heads=sizes.heads,
            vocabulary=sizes.vocabulary,
            length=sizes.length,
            dropout=0.1,
        ),
        make_inputs=lambda: tokens,
        loss_fn=demo.next_token_loss(tokens),
        make_optimizer=adamw,
        blocks=numbered("blocks", sizes.layers),
    )


def _from_transformers(
    name: str,
    model_class: Any,
    config: Any,
    blocks: tuple[str, ...],
    inputs: dict[str, torch.Tensor],
) -> Workload:
    return Workload(
        name=name,
        make_model=lambda: model_class(config).train(),
        make_inputs=lambda: inputs,
        make_optimizer=adamw,
        blocks=blocks,
    )


def gpt2(**others: int) -> Workload:
    """GPT-2 (dropout 0.1 everywhere, tied head)."""
    sizes = replace(Sizes(), **others)
    config = transformers.GPT2Config(
        n_layer=sizes.layers,
        n_embd=sizes.width,
        n_head=sizes.heads,
        n_positions=sizes.length,
        vocab_size=sizes.vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _from_transformers(
        "HF GPT-2",
        transformers.GPT2LMHeadModel,
        config,
        numbered("transformer.h", sizes.layers),
        labelled(*sizes.of_batch),
    )


def _of_all(sizes: Sizes) -> dict[str, int]:
    """What configs of most families call the sizes."""
    return {
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.width,
        "num_attention_heads": sizes.heads,
        "max_position_embeddings": sizes.length,
        "vocab_size": sizes.vocabulary,
    }


def _decoder(name: str, family: str, sizes: Sizes, **settings: Any) -> Workload:
    """A model of the Llama family, with grouped-query attention."""
    config = getattr(transformers, f"{family}Config")(
        **_of_all(sizes),
        intermediate_size=sizes.width * 8 // 3,
        num_key_value_heads=max(sizes.heads // 3, 1),
        use_cache=False,
        **settings,
    )
    return _from_transformers(
        name,
        getattr(transformers, f"{family}ForCausalLM"),
        config,
        numbered("model.layers", sizes.layers),
        labelled(*sizes.of_batch),
    )


def llama(*, tied: bool = False, **others: int) -> Workload:
    """Llama."""
    name = "HF Llama, tied" if tied else "HF Llama"
    sizes = replace(Sizes(), **others)
    return _decoder(name, "Llama", sizes, tie_word_embeddings=tied)


def qwen3(**others: int) -> Workload:
    """Qwen 3 (normalized queries and keys)."""
    sizes = replace(_SMALL, **others)
    return _decoder("HF Qwen3", "Qwen3", sizes, head_dim=sizes.width // sizes.heads)


def mistral(**others: int) -> Workload:
    """Mistral with a sliding window shorter than the sequence."""
    sizes = replace(_SMALL, **others)
    return _decoder("HF Mistral", "Mistral", sizes, sliding_window=sizes.length // 2)


def mixtral(**others: int) -> Workload:
    """Mixtral: a router sends every token to two of four experts."""
    sizes = replace(_SMALL, **others)
    return _decoder(
        "HF Mixtral",
        "Mixtral",
        sizes,
        num_local_experts=4,
        output_router_logits=True,
    )


def mamba() -> Workload:
    """Mamba, a state-space model, by its sequential scan."""
    layers, vocabulary = 3, 512
    config = transformers.MambaConfig(
        num_hidden_layers=layers,
        hidden_size=64,
        state_size=8,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return _from_transformers(
        "HF Mamba",
        transformers.MambaForCausalLM,
        config,
        numbered("backbone.layers", layers),
        labelled(vocabulary, 2, 32),
    )


def bert(**others: int) -> Workload:
    """BERT, guessing 15 % of the tokens."""
    sizes = replace(Sizes(batch=8), **others)
    return _from_transformers(
        "HF BERT",
        transformers.BertForMaskedLM,
        transformers.BertConfig(**_of_all(sizes), intermediate_size=4 * sizes.width),
        numbered("bert.encoder.layer", sizes.layers),
        _masked(*sizes.of_batch),
    )


def albert() -> Workload:
    """ALBERT: one block, called once per layer."""
    config = transformers.AlbertConfig(
        **_of_all(_SMALL),
        embedding_size=_SMALL.width // 2,
        intermediate_size=4 * _SMALL.width,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return _from_transformers(
        "HF ALBERT",
        transformers.AlbertForMaskedLM,
        config,
        ("albert.encoder.albert_layer_groups.0",),
        _masked(*_SMALL.of_batch),
    )


def _masked(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = integers(vocabulary, batch, length)
    hidden = integers(100, batch, length) < 15
    return {
        "input_ids": tokens.masked_fill(hidden, 3),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~hidden, -100),
    }


def t5(**others: int) -> Workload:
    """T5, an encoder and a decoder."""
    sizes = replace(_SMALL, **{"layers": 3, "length": 96, **others})
    config = transformers.T5Config(
        num_layers=sizes.layers,
        d_model=sizes.width,
        d_ff=4 * sizes.width,
        d_kv=sizes.width // sizes.heads,
        num_heads=sizes.heads,
        vocab_size=sizes.vocabulary,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return _from_transformers(
        "HF T5",
        transformers.T5ForConditionalGeneration,
        config,
        numbered("encoder.block", sizes.layers)
        + numbered("decoder.block", sizes.layers),
        labelled(*sizes.of_batch),
    )


class RecurrentLM(nn.Module):
    """Embedding, recurrent layers, head."""

    def __init__(self, kind: Any, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            kind(width, width, batch_first=True) for _ in range(layers)
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = self.dropout(layer(hidden)[0])
        logits: torch.Tensor = self.head(hidden)
        return logits


def recurrent(
    *,
    kind: Any = nn.LSTM,
    layers: int = 3,
    width: int = 96,
    vocabulary: int = 512,
    batch: int = 8,
    length: int = 64,
) -> Workload:
    """A language model of LSTM or GRU layers."""
    tokens, targets = map(torch.clone, integers(vocabulary, 2, batch, length))
    return Workload(
        name=f"{kind.__name__} LM",
        make_model=lambda: RecurrentLM(kind, layers, width, vocabulary),
        make_inputs=lambda: tokens,
        loss_fn=classification(targets),
        make_optimizer=adamw,
        blocks=numbered("layers", layers),
        loss_bytes=targets.nbytes,
    )


class CellsLM(nn.Module):
    """Embedding, a recurrent cell that is called for each token, head."""

    def __init__(self, cell: nn.GRUCell | nn.LSTMCell, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, cell.input_size)
        self.cell = cell
        self.head = nn.Linear(cell.hidden_size, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = self.embedding(tokens)
        hidden = inputs.new_zeros(inputs.shape[0], self.cell.hidden_size)
        state = (hidden, hidden) if isinstance(self.cell, nn.LSTMCell) else hidden
        for step in range(inputs.shape[1]):
            state = self.cell(inputs[:, step], state)
        last = state[0] if isinstance(state, tuple) else state
        logits: torch.Tensor = self.head(last)
        return logits


def gru_cells(
    *, width: int = 64, vocabulary: int = 64, batch: int = 64, length: int = 12
) -> Workload:
    """A GRU cell in a loop over tokens; it says what comes after the last one."""
    return _cells(nn.GRUCell, width, vocabulary, batch, length)


def lstm_cells(
    *, width: int = 64, vocabulary: int = 64, batch: int = 64, length: int = 20
) -> Workload:
    """An LSTM cell in a loop over tokens; it says what comes after the last one."""
    return _cells(nn.LSTMCell, width, vocabulary, batch, length)


def _cells(
    cell: type[nn.GRUCell | nn.LSTMCell],
    width: int,
    vocabulary: int,
    batch: int,
    length: int,
) -> Workload:
    tokens, targets = integers(vocabulary, batch, length), integers(vocabulary, batch)
    return Workload(
        name=f"{cell.__name__.removesuffix('Cell')} cells",
        make_model=lambda: CellsLM(cell(width, width), vocabulary),
        make_inputs=lambda: tokens,
        loss_fn=classification(targets),
        make_optimizer=adamw,
        blocks=("cell",),
        loss_bytes=targets.nbytes,
    )
