"""Tiny models whose values decide what they do."""

from __future__ import annotations

import random
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

from tests.models import BATCH, WIDTH, Case

ROWS, EXPERTS = 24, 3


class Step(nn.Module):
    """A residual step around what a subclass does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(self.between(functional.gelu(self.inner(x))))

    def between(self, hidden):
        return hidden


class Peeks(Step):
    """Reads a number of an activation and branches on it."""

    threshold = 0.0

    def between(self, hidden):
        if hidden.mean().item() > self.threshold:
            return torch.tanh(hidden).sin()
        return hidden.exp()


class Guards(Step):
    """Looks for numbers that are none."""

    def between(self, hidden):
        if torch.isnan(hidden).any() or bool(torch.isinf(hidden).any()):
            hidden = torch.nan_to_num(hidden)
        return hidden.tanh()


class Selects(Step):
    """Works on some rows only, as many as their values say."""

    def between(self, hidden):
        chosen = hidden.sum(1) > hidden.sum(1).mean()
        out = torch.zeros_like(hidden)
        out[chosen] = torch.tanh(hidden[chosen]) * hidden[chosen]
        places = (hidden[:, 0] > 0).nonzero()[:, 0]
        return out.index_add(0, places, hidden[places].exp())


class Routes(nn.Module):
    """A mixture of experts that gets real counts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(16, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        weights, picked = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(picked == number)
            if len(rows) == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return x + out


class Sorts(nn.Module):
    """As `Routes`, sorted by expert, with counts as a list."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        score, expert = self.gate(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=EXPERTS).tolist()
        parts = x[order].split(counts)
        pairs = zip(parts, self.weights, strict=True)
        done = torch.cat([functional.gelu(part @ weight) for part, weight in pairs])
        return x + torch.zeros_like(x).index_copy(0, order, done) * score[:, None]


class Drops(nn.Module):
    """Layer drop: a draw decides which layers run."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Step() for _ in range(4))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if torch.rand([]).item() > 0.4 or number == 0:
                x = layer(x)
        return x


class Passes(nn.Module):
    """Messages along edges whose number its values decide, in plain torch."""

    def __init__(self):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())
        self.update = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        source, target = (torch.cdist(x, x) < 3.0).nonzero(as_tuple=True)
        messages = self.message(torch.cat([x[source], x[target]], -1))
        total = torch.zeros_like(x).index_add_(0, target, messages)
        return torch.relu(self.update(torch.cat([x, total], -1)))


class Features(nn.Module):
    """Gets and returns ordered dicts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        return OrderedDict(
            (name, torch.tanh(self.linear(x)) * x) for name, x in features.items()
        )


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(Features(), Features())

    def forward(self, x):
        large = x[x[:, 0] > 0]
        return sum(
            y.square().sum() for y in self.parts(OrderedDict(a=x, b=large)).values()
        )


class Density(nn.Module):
    """A loss that refuses variances below zero."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread = Step(), Step()
        self.loss = nn.GaussianNLLLoss()

    def forward(self, x):
        return self.loss(self.mean(x), x, functional.softplus(self.spread(x)))


class Numpy(Step):
    """Leaves PyTorch for a number."""

    def between(self, hidden):
        return hidden.sin() * float(hidden.detach().numpy().max() > 0)


def stack(kind):
    return lambda: nn.Sequential(kind(), Step(), kind())


def rows():
    return torch.randn(ROWS, WIDTH)


VALUE_CASES = {
    kind.__name__: Case(stack(kind), rows)
    for kind in (Peeks, Guards, Selects, Routes, Sorts, Passes, Numpy)
} | {
    "Drops": Case(Drops, rows),
    "Density": Case(Density, rows),
    "Pyramid": Case(Pyramid, rows),
}


def drawn_case(seed: int) -> Case:
    """A stack of some of these, drawn at random."""
    draw = random.Random(seed)
    kinds = draw.choices((Peeks, Guards, Selects, Routes, Sorts, Passes, Numpy), k=4)
    num_rows = draw.randrange(BATCH, 2 * ROWS)
    return Case(
        lambda: nn.Sequential(*(kind() for kind in kinds)),
        lambda: torch.randn(num_rows, WIDTH),
    )
