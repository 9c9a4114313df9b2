"""Language models: Transformers' own and small recurrent ones, random weights."""

from __future__ import annotations

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


def gpt(
    *,
    layers: int = 12,
    width: int = 192,
    heads: int = 6,
    vocabulary: int = 2048,
    batch: int = 8,
    length: int = 256,
) -> Workload:
    """The model of ``autosac demo``, with dropout."""
    tokens = integers(vocabulary, batch, length)
    return Workload(
        name="GPT",
        make_model=lambda: demo.GPT(
            num_layers=layers,
            width=width,
            num_heads=heads,
            vocabulary=vocabulary,
            length=length,
            dropout=0.1,
        ),
        make_inputs=lambda: tokens,
        loss_fn=demo.next_token_loss(tokens),
        make_optimizer=adamw,
        blocks=numbered("blocks", layers),
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


def gpt2(
    *,
    layers: int = 12,
    width: int = 192,
    heads: int = 6,
    vocabulary: int = 2048,
    batch: int = 6,
    length: int = 256,
) -> Workload:
    """GPT-2 (dropout 0.1 everywhere, tied head)."""
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=length,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _from_transformers(
        "HF GPT-2",
        transformers.GPT2LMHeadModel,
        config,
        numbered("transformer.h", layers),
        labelled(vocabulary, batch, length),
    )


def _decoder(
    name: str,
    family: str,
    *,
    layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    batch: int,
    length: int,
    **settings: Any,
) -> Workload:
    """A model of the Llama family, with grouped-query attention."""
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 3, 1),
        max_position_embeddings=length,
        vocab_size=vocabulary,
        use_cache=False,
        **settings,
    )
    return _from_transformers(
        name,
        getattr(transformers, f"{family}ForCausalLM"),
        config,
        numbered("model.layers", layers),
        labelled(vocabulary, batch, length),
    )


def llama(
    *,
    layers: int = 12,
    width: int = 192,
    heads: int = 6,
    vocabulary: int = 2048,
    batch: int = 6,
    length: int = 256,
    tied: bool = False,
) -> Workload:
    """Llama."""
    return _decoder(
        "HF Llama, tied" if tied else "HF Llama",
        "Llama",
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        batch=batch,
        length=length,
        tie_word_embeddings=tied,
    )


def qwen3(
    *,
    layers: int = 4,
    width: int = 96,
    heads: int = 6,
    vocabulary: int = 512,
    batch: int = 4,
    length: int = 128,
) -> Workload:
    """Qwen 3 (normalized queries and keys)."""
    return _decoder(
        "HF Qwen3",
        "Qwen3",
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        batch=batch,
        length=length,
        head_dim=width // heads,
    )


def mistral(
    *,
    layers: int = 4,
    width: int = 96,
    heads: int = 6,
    vocabulary: int = 512,
    batch: int = 4,
    length: int = 128,
) -> Workload:
    """Mistral with a sliding window shorter than the sequence."""
    return _decoder(
        "HF Mistral",
        "Mistral",
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        batch=batch,
        length=length,
        sliding_window=length // 2,
    )


def mixtral(
    *,
    layers: int = 4,
    width: int = 96,
    heads: int = 6,
    vocabulary: int = 512,
    batch: int = 4,
    length: int = 128,
) -> Workload:
    """Mixtral: a router sends every token to two of four experts."""
    return _decoder(
        "HF Mixtral",
        "Mixtral",
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        batch=batch,
        length=length,
        num_local_experts=4,
        output_router_logits=True,
    )


def mamba(
    *,
    layers: int = 3,
    width: int = 64,
    vocabulary: int = 512,
    batch: int = 2,
    length: int = 32,
) -> Workload:
    """Mamba, a state-space model, by its sequential scan."""
    config = transformers.MambaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        state_size=8,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return _from_transformers(
        "HF Mamba",
        transformers.MambaForCausalLM,
        config,
        numbered("backbone.layers", layers),
        labelled(vocabulary, batch, length),
    )


def bert(
    *,
    layers: int = 12,
    width: int = 192,
    heads: int = 6,
    vocabulary: int = 2048,
    batch: int = 8,
    length: int = 256,
) -> Workload:
    """BERT, guessing 15 % of the tokens."""
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        max_position_embeddings=length,
        vocab_size=vocabulary,
    )
    return _from_transformers(
        "HF BERT",
        transformers.BertForMaskedLM,
        config,
        numbered("bert.encoder.layer", layers),
        _masked(vocabulary, batch, length),
    )


def albert(
    *,
    layers: int = 4,
    width: int = 96,
    heads: int = 6,
    vocabulary: int = 512,
    batch: int = 4,
    length: int = 128,
) -> Workload:
    """ALBERT: one block, called once per layer."""
    config = transformers.AlbertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        embedding_size=width // 2,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        max_position_embeddings=length,
        vocab_size=vocabulary,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return _from_transformers(
        "HF ALBERT",
        transformers.AlbertForMaskedLM,
        config,
        ("albert.encoder.albert_layer_groups.0",),
        _masked(vocabulary, batch, length),
    )


def _masked(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = integers(vocabulary, batch, length)
    hidden = integers(100, batch, length) < 15
    return {
        "input_ids": tokens.masked_fill(hidden, 3),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~hidden, -100),
    }


def t5(
    *,
    layers: int = 3,
    width: int = 96,
    heads: int = 6,
    vocabulary: int = 512,
    batch: int = 4,
    length: int = 96,
) -> Workload:
    """T5, an encoder and a decoder."""
    config = transformers.T5Config(
        num_layers=layers,
        d_model=width,
        d_ff=4 * width,
        d_kv=width // heads,
        num_heads=heads,
        vocab_size=vocabulary,
        decoder_start_token_id=0,
        use_cache=False,
    )
    blocks = numbered("encoder.block", layers) + numbered("decoder.block", layers)
    return _from_transformers(
        "HF T5",
        transformers.T5ForConditionalGeneration,
        config,
        blocks,
        labelled(vocabulary, batch, length),
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
