"""A two-tower model and a recommender with large embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.workload import (
    Workload,
    adamw,
    classification,
    integers,
    momentum,
    normal,
    numbered,
)


@dataclass
class Match:
    """Output of `TwoTower`.

    Attributes:
        queries: Normed embeddings, shape (batch, width).
        answers: The same of the answers.
        loss: Contrastive loss.
    """

    queries: torch.Tensor
    answers: torch.Tensor
    loss: torch.Tensor


class TwoTower(nn.Module):
    """Queries and answers through one encoder, matched within the batch."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.1, batch_first=True
            )
            for _ in range(layers)
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.encoder:
            hidden = layer(hidden)
        return functional.normalize(hidden.mean(1), dim=-1)

    def forward(self, batch: dict[str, torch.Tensor]) -> Match:
        queries, answers = self.encode(batch["query"]), self.encode(batch["answer"])
        logits = self.scale.exp() * queries @ answers.T
        wanted = torch.arange(len(logits), device=logits.device)
        return Match(queries, answers, functional.cross_entropy(logits, wanted))


def two_tower(
    *,
    layers: int = 3,
    width: int = 96,
    heads: int = 6,
    vocabulary: int = 512,
    batch: int = 4,
) -> Workload:
    """Nested inputs, a dataclass as output, every block called twice."""
    inputs = {
        "query": integers(vocabulary, batch, 48),
        "answer": integers(vocabulary, batch, 96),
    }
    return Workload(
        name="two towers",
        make_model=lambda: TwoTower(layers, width, heads, vocabulary),
        make_inputs=lambda: (inputs,),
        make_optimizer=adamw,
        blocks=numbered("encoder", layers),
    )


class DLRM(nn.Module):
    """Embedding bags and dense features that interact (Naumov et al., 2019)."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)
        )
        self.bottom = nn.Sequential(
            nn.Linear(13, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, width),
            nn.ReLU(),
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 512), nn.ReLU(), nn.Dropout(0.1))
            for size in (pairs + width, 512, 512)
        )
        self.head = nn.Linear(512, 2)

    def forward(self, dense: torch.Tensor, sparse: list[torch.Tensor]) -> torch.Tensor:
        bottom = self.bottom(dense)
        pairs = zip(self.tables, sparse, strict=True)
        vectors = torch.stack([bottom, *(table(rows) for table, rows in pairs)], 1)
        products = vectors @ vectors.transpose(1, 2)
        above = torch.triu_indices(*products.shape[1:], 1, device=dense.device)
        hidden = torch.cat([bottom, products[:, above[0], above[1]]], 1)
        for layer in self.top:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def dlrm(
    *, tables: int = 8, rows: int = 4000, width: int = 32, batch: int = 1024
) -> Workload:
    """A recommender whose embeddings outweigh all else."""
    dense = normal(batch, 13)
    sparse = list(integers(rows, tables, batch, 4))
    targets = integers(2, batch)
    return Workload(
        name="DLRM",
        make_model=lambda: DLRM(tables, rows, width),
        make_inputs=lambda: (dense, sparse),
        loss_fn=classification(targets),
        make_optimizer=momentum,
        blocks=("bottom", *numbered("top", 3)),
        loss_bytes=targets.nbytes,
    )
