"""Models with habits that make rerunning a module hard; each case is one habit."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional

from tests.models import BATCH, WIDTH, Case


def rows() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def block() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh()
    )


# --- state in Python ----------------------------------------------------------


class CountsCalls(nn.Module):
    """Its result depends on a number that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()
        self.num_calls = 0
        self.seen: list[int] = []
        self.sizes: Counter[int] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.seen.append(len(x))
        self.sizes[len(x)] += 1
        return self.inner(x) * (1 + self.num_calls) + torch.sin(x)


class KeepsItsLoss(nn.Module):
    """Leaves an auxiliary loss behind, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()
        self.gate = nn.Linear(WIDTH, 3)
        self.loss = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        self.loss = shares.mean(0).square().sum()
        return self.inner(x) * shares.amax(-1, keepdim=True)


class WithLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepsItsLoss() for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for one in self.blocks:
            x = one(x)
        losses = [one.loss for one in self.blocks]
        return {"loss": x.square().mean() + torch.stack(losses).sum()}


class ReplacesBuffer(nn.Module):
    """Assigns a new tensor to its buffer instead of changing it in place."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return torch.sigmoid(hidden) + torch.sin(x)


class DrawsInPython(nn.Module):
    """Draws from Python's and NumPy's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x) * random.random()
        return torch.sin(hidden * float(np.random.rand()))


class DropsLayers(nn.Module):
    """Skips layers at random, as Transformers' layer drop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) >= 0.0:
                x = x + layer(x)
        return x


# --- around modules -----------------------------------------------------------


class HasHooks(nn.Sequential):
    """Hooks before and after modules that change what passes."""

    def __init__(self) -> None:
        super().__init__(block(), block())
        self[0].register_forward_hook(lambda module, args, out: out * 2)
        self[0][1].register_forward_hook(lambda module, args, out: out.sin())
        self[1].register_forward_pre_hook(lambda module, args: (args[0].cos(),))


class LooksWithoutGradient(nn.Module):
    """A part under no_grad whose module trains elsewhere; another is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = block(), block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.inner(x).sigmoid()
        return (self.inner(x) - target).square() + self.inner(x + 1)


class Mixed(NamedTuple):
    hidden: torch.Tensor
    size: int
    name: str
    nothing: None


class ReturnsNumbers(nn.Module):
    """Its output holds values that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: torch.Tensor, scale: float) -> Mixed:
        return Mixed(self.inner(x) * scale, x.shape[0], "mixed", None)


class UsesNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ReturnsNumbers(), ReturnsNumbers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leading = self.first(x, 0.5)
        return self.second(leading.hidden, 1 / leading.size).hidden


class SpectralNorm(nn.Sequential):
    """A parametrization that changes its vectors in place in every forward."""

    def __init__(self) -> None:
        super().__init__(
            *(
                nn.Sequential(
                    nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
                    nn.Tanh(),
                )
                for _ in range(3)
            )
        )


class WeightNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(
                nn.Sequential(
                    nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
                    nn.GELU(),
                )
                for _ in range(3)
            )
        )


# --- ops ----------------------------------------------------------------------


@torch.library.custom_op("autosac_tests::swish", mutates_args=())
def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


@swish.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _swish_backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    x, output = ctx.saved_tensors
    gate = torch.sigmoid(x)
    return grad * (gate + output * (1 - gate))


swish.register_autograd(_swish_backward, setup_context=_keep)


class _Scaled(torch.autograd.Function):
    """A custom function whose context hides the attributes of its autograd node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name, ctx.variable = name, 2.0
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.variable, None


class NamesItsContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = _Scaled.apply(self.inner(x), "scale")
        return scaled


class CustomOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swish(swish(self.linear(x)))


class Routed(nn.Module):
    """Sends every row to its best expert: sorts, counts and picks by value."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, places = self.router(x).softmax(-1).topk(2, -1)
        order = weights[:, 0].sort(descending=True).indices
        x = x[order]
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            share = (weights * (places == place)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


class InPlaceDropout(nn.Sequential):
    """Saved results that are changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__(
            *(
                nn.Sequential(
                    nn.Linear(WIDTH, WIDTH),
                    nn.Dropout(0.5, inplace=True),
                    nn.ReLU(inplace=True),
                    nn.Linear(WIDTH, WIDTH),
                    nn.AlphaDropout(0.5),
                    nn.Hardtanh(inplace=True),
                )
                for _ in range(3)
            )
        )


class ComplexNumbers(nn.Module):
    """Goes through the frequencies of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.inner(x))
        return torch.fft.irfft(spectrum * spectrum.abs(), n=WIDTH)


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(16, WIDTH, mode="mean")
        self.inner = block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        bags = self.bag(tokens)
        return self.inner(self.embedding(tokens) + bags[:, None])


def _opt() -> nn.Module:
    config = transformers.OPTConfig(
        num_hidden_layers=2,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=32,
        num_attention_heads=2,
        vocab_size=32,
        max_position_embeddings=16,
        layerdrop=0.0,
        use_cache=False,
    )
    return transformers.OPTForCausalLM(config).train()


def _labelled() -> dict[str, torch.Tensor]:
    ids = torch.randint(32, (2, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def _tokens() -> torch.Tensor:
    return torch.randint(16, (2, 6))


class Transcribes(nn.Module):
    """Has a loss whose saved tensor is as long as the longest target."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(block(), block())

    def forward(
        self, x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        log_probs = self.blocks(x).log_softmax(-1)
        steps = torch.full_like(lengths, len(x))
        return functional.ctc_loss(log_probs, targets, steps, lengths)


def _transcribed() -> tuple[torch.Tensor, ...]:
    lengths = torch.tensor([5, 3, 4])
    return torch.randn(12, 3, WIDTH), torch.randint(1, WIDTH, (3, 5)), lengths


class Checkpointed(nn.Sequential):
    """Checkpoints one of its blocks by itself."""

    def __init__(self) -> None:
        super().__init__(block(), block(), block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        x = torch.utils.checkpoint.checkpoint(self[1], x, use_reentrant=False)
        return functional.relu(self[2](x))


class GatedCells(nn.GRU):
    """PyTorch splits the gates of a cell such that each counts its own changes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class FillsWhatItRead(nn.Module):
    """Ops read of a buffer before it is filled, with what others read of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, filled = self.linear(x), torch.ones_like(x)
        first = torch.sin(filled[0] + hidden[0])
        side = torch.exp(filled[1] + hidden[1])
        filled[0] = torch.tanh(first)  # made of what `filled` was
        filled[1] = hidden[2]  # `side` is made between the two
        return torch.sigmoid(filled * side) * hidden


class Windows(nn.Module):
    """Is called with tuples that cannot be built like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Window() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, x.shape, x.max(dim=0))
        return x


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, shape: torch.Size, most: Any) -> torch.Tensor:
        return torch.tanh(self.linear(x) * most.values).view(shape)


@functools.lru_cache(maxsize=2)
def angles(length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tables, of which the model reads one."""
    places = torch.arange(length, dtype=torch.float32)[:, None]
    turns = torch.sin(places / torch.arange(1, width + 1))
    return turns, turns.repeat(1, 2)


class Remembers(nn.Module):
    """Its first call makes a table that a function keeps for later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.positions = Positions()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns, _ = self.positions(x)
        return torch.tanh(self.linear(x) * torch.exp(turns))


class Positions(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return angles(len(x), x.shape[1])


class ConvertsItself(nn.Module):
    """Makes sure in forward that its gate computes in float32, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gate = self.gate.to(torch.float32)
        return torch.tanh(self.gate(x.float())) * x


class ComputesInVain(nn.Module):
    """Drops results, and with them what autograd has saved for them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.vain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Dropout())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sin(self.linear(x)) + 1
        vain = self.vain(hidden) * (hidden + 2)  # saves the second sum
        more = (hidden + 3) * 2
        vain = vain + more * more  # saves what is read below, too
        return torch.tanh(more + 4) * x


def twice(kind: Any) -> nn.Sequential:
    return nn.Sequential(kind(), kind())


AWKWARD = {
    "counts calls": Case(lambda: twice(CountsCalls), rows),
    "keeps its loss": Case(WithLosses, rows),
    "replaces a buffer": Case(lambda: twice(ReplacesBuffer), rows),
    "draws in Python": Case(lambda: twice(DrawsInPython), rows),
    "drops layers": Case(DropsLayers, rows),
    "hooks": Case(HasHooks, rows),
    "no_grad parts": Case(LooksWithoutGradient, rows),
    "numbers returned": Case(UsesNumbers, rows),
    "spectral norm": Case(SpectralNorm, rows),
    "weight norm": Case(WeightNorm, rows),
    "names its context": Case(lambda: twice(NamesItsContext), rows),
    "custom op": Case(lambda: twice(CustomOp), rows),
    "router": Case(lambda: twice(Routed), rows),
    "in-place dropout": Case(InPlaceDropout, rows),
    "complex numbers": Case(lambda: twice(ComplexNumbers), rows),
    "embedding bag": Case(SparseEmbedding, _tokens),
    "layer drop": Case(_opt, _labelled),
    "CTC loss": Case(Transcribes, _transcribed, lambda loss: loss),
    "gated cells": Case(lambda: twice(GatedCells), rows),
    "fills what it read": Case(lambda: twice(FillsWhatItRead), rows),
    "odd tuples": Case(Windows, rows),
    "remembers": Case(lambda: twice(Remembers), rows),
    "converts itself": Case(lambda: twice(ConvertsItself), rows),
    "computes in vain": Case(lambda: twice(ComputesInVain), rows),
    "own checkpointing": Case(Checkpointed, rows),
}
