"""Short models that once got wrong gradients, broken budgets or raw errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional


class Scan(nn.Module):
    """A recurrence that writes its states into a tensor."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate, self.input = nn.Linear(width, width), nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, update = torch.sigmoid(self.gate(x)), self.input(x)
        state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for step in range(x.shape[1]):
            state = gate[:, step] * state + update[:, step]
            out[:, step] = state
        return self.output(out * functional.gelu(x))


class ScanBlock(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.scan = Scan(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scan(self.norm(x))
        return x + self.mlp(self.other_norm(x))


class MaskedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden = functional.gelu(self.up(x))
        if mask is not None:
            hidden = hidden + mask
        return x + self.down(self.dropout(torch.tanh(hidden)))


class Masked(nn.Module):
    """Asks whether it is traced, as masks of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MaskedLayer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones, mask = torch.ones(x.shape[:2]), None
        if isinstance(ones, FakeTensor) or not ones.all():
            mask = (1 - ones)[..., None] * -1e4
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Functional(nn.Module):
    """Calls a module with the parameters of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = dict(self.other.named_parameters())
        return torch.func.functional_call(self.one, parameters, (x,))


class Grouped(nn.Module):
    """The meta kernel refuses float32, the real one takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([8, 16], dtype=torch.int32)
        return torch._grouped_mm(self.linear(x), self.weight, offs=ends)


class Pick(nn.Module):
    """Draws a size, as detection models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = int(torch.empty(1).uniform_(0.0, 3.0).item())
        return self.linear(x).pow([1, 2, 3][place])


class Gaussian(nn.Module):
    """Its loss asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(16, 16), nn.GaussianNLLLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(x), x, functional.softplus(self.linear(x)))


class Ctc(nn.Module):
    """Lengths are tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(15, 15), nn.CTCLoss()

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_probs = self.linear(x).log_softmax(2)
        return self.loss(log_probs, targets, (50, 50, 50), (30, 25, 20))


def _noise(*shape: int) -> Callable[[], Any]:
    return lambda: torch.randn(*shape)


def _labelled() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(50, 3, 15), torch.randint(1, 15, (3, 30))


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


CASES = {
    "scan": (lambda: nn.Sequential(*[Scan() for _ in range(4)]), _noise(8, 16, 32)),
    "scan-blocks": (
        lambda: nn.Sequential(*[ScanBlock() for _ in range(6)]),
        _noise(8, 16, 32),
    ),
    "masked": (Masked, _noise(16, 64, 64)),
    "functional": (Functional, _noise(256, 64)),
    "grouped": (Grouped, _noise(16, 16)),
    "pick": (Pick, _noise(16, 16)),
    "gaussian": (Gaussian, _noise(16, 16)),
    "ctc": (Ctc, _labelled),
}
DRAWN = ("pick",)  # of the steps that draws decide, the largest is planned
