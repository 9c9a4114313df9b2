"""Models drawn at random, of the habits that make recomputation go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

WIDTH, ROWS, LENGTH = 8, 4, 3

STEPS = (
    *("linear", "gelu", "tanh", "relu_", "dropout", "norm", "batch_norm"),
    *("write_rows", "count", "average", "replace", "codes", "shared", "swapped"),
    *("parametrized", "noise", "choose", "literal", "split", "no_grad", "attribute"),
    *("residual", "remember", "recall"),
)
BRANCH_STEPS = (  # "view" has groups that planning cannot order yet
    *(*STEPS, "view", "shift", "level", "given", "shift_", "write_given", "recall"),
)
# Between the parts of a block: nothing here is saved by autograd or must not run twice.
GLUE = ("same", "shift", "level", "given", "shift_")


@dataclass(frozen=True)
class BlockSpec:
    """What a block does.

    Attributes:
        steps: One after the other.
        branch: What it does more on the other branch, before step `at`.
        at: Where.
        asks: Whether the branch depends on the batch's size, or on an attribute.
        is_swapped: It is called with one layer's parameters for another's.
        is_parted: Every step is followed by a part, which all that is saved lies in.
    """

    steps: tuple[str, ...]
    branch: tuple[str, ...]
    at: int
    asks: str
    is_swapped: bool = False
    is_parted: bool = False


class _Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.tanh(x)


class Block(nn.Module):
    """Does what it is told."""

    average: torch.Tensor
    codes: torch.Tensor
    num_calls: torch.Tensor
    replaced: torch.Tensor

    def __init__(self, spec: BlockSpec, shared: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(LENGTH)
        self.shared = shared
        self.parametrized = nn.Linear(WIDTH, WIDTH)
        nn.utils.parametrize.register_parametrization(
            self.parametrized, "weight", _Doubled()
        )
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("codes", torch.ones(WIDTH))
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(WIDTH))
        if spec.is_parted:
            self.parts = nn.ModuleList(_Part() for _ in spec.steps)
        self.calls = 0
        self.remembered: torch.Tensor | None = None
        self.argument = torch.zeros(())
        self.kept: torch.Tensor | None = None
        self.is_other = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.argument, self.remembered = x, None
        for place, step in enumerate(self.spec.steps):
            if place == self.spec.at and self._takes_branch(x):
                for more in self.spec.branch:
                    x = getattr(self, f"do_{more}")(x)
            y = getattr(self, f"do_{step}")(x)
            x = x + self.parts[place](y) if self.spec.is_parted else y
        self.argument = torch.zeros(())
        return x if self.spec.is_parted else x + self.linear(x)

    def _takes_branch(self, x: torch.Tensor) -> bool:
        if self.spec.asks == "size":
            return x.shape[0] != ROWS
        return self.is_other

    def do_linear(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def do_gelu(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x)

    def do_tanh(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def do_relu_(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.other(x))

    def do_dropout(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.3, self.training)

    def do_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def do_batch_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(x)

    def do_write_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Writes into a tensor row by row, as recurrences do."""
        out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
        for row in range(x.shape[1]):
            state = torch.tanh(state + x[:, row])
            out[:, row] = state
        return out * functional.gelu(x)

    def do_count(self, x: torch.Tensor) -> torch.Tensor:
        """Its result depends on a buffer that it changes."""
        before = x * (1 + self.num_calls)
        self.num_calls.add_(1)
        return torch.tanh(before) + torch.sin(x * self.num_calls.clone())

    def do_average(self, x: torch.Tensor) -> torch.Tensor:
        """Changes a buffer that nothing here reads."""
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return torch.sin(x)

    def do_replace(self, x: torch.Tensor) -> torch.Tensor:
        """Assigns another tensor to its buffer."""
        self.replaced = 0.5 * self.replaced + x.detach().mean((0, 1))
        return torch.tanh(x + self.replaced)

    def do_codes(self, x: torch.Tensor) -> torch.Tensor:
        """Reads a buffer, then moves it, as vector quantization does."""
        moved = torch.tanh(x * self.codes.clone())
        with torch.no_grad():
            self.codes.lerp_(moved.mean((0, 1)), 0.1)
        return torch.exp(moved)

    def do_shared(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(x))

    def do_swapped(self, x: torch.Tensor) -> torch.Tensor:
        """Runs a module with another module's parameters."""
        parameters = {k: v * 1.5 for k, v in self.other.named_parameters()}
        return torch.func.functional_call(self.linear, parameters, (x,)).tanh()

    def do_parametrized(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.parametrized(x))

    def do_noise(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x).mul_(0.1)
        return torch.tanh(x + noise) * torch.empty_like(x).bernoulli_(0.7)

    def do_choose(self, x: torch.Tensor) -> torch.Tensor:
        values, places = x.topk(3, -1)
        return torch.zeros_like(x).scatter(-1, places, values.tanh())

    def do_literal(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * torch.tensor([1.0, 2.0]).repeat(WIDTH // 2))

    def do_split(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.other(x).chunk(2, -1)
        return torch.cat([first.sigmoid() * second, torch.exp(-first.square())], -1)

    def do_no_grad(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        return torch.tanh(x / (1 + scale))

    def do_attribute(self, x: torch.Tensor) -> torch.Tensor:
        """Depends on a number that every call changes, and keeps a tensor."""
        self.kept = x.sin()
        return torch.tanh(x * (1 + self.calls % 3)) + self.kept

    def do_residual(self, x: torch.Tensor) -> torch.Tensor:
        y = self.other(x)
        y += x
        return torch.tanh(y)

    def do_remember(self, x: torch.Tensor) -> torch.Tensor:
        """Keeps something made of a buffer, then changes the buffer."""
        self.remembered = self.num_calls + 1.5
        self.remembered.mul_(2)
        y = torch.tanh(x) + self.remembered.floor()
        self.num_calls.add_(1)
        return y

    def do_recall(self, x: torch.Tensor) -> torch.Tensor:
        """Reads what was kept, if anything was."""
        return x.sin() if self.remembered is None else x.sin() * self.remembered

    def do_same(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def do_shift(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def do_level(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.num_calls

    def do_given(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.argument

    def do_shift_(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1).add_(self.average)

    def do_write_given(self, x: torch.Tensor) -> torch.Tensor:
        """Changes what the block was given."""
        self.argument.detach().mul_(0.5)
        return x + 1

    def do_view(self, x: torch.Tensor) -> torch.Tensor:
        """A view that is written to behind a read of its base."""
        y = torch.sigmoid(x) * 2
        z = y.floor() + x
        y[:, 0].mul_(0.5)
        return torch.tanh(y * z)


class Drawn(nn.Module):
    """Blocks around a module that all of them share."""

    def __init__(self, specs: tuple[BlockSpec, ...]) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
        self.blocks = nn.ModuleList(Block(spec, self.shared) for spec in specs)

    def forward(self, x: torch.Tensor, is_other: bool = False) -> torch.Tensor:
        for block in self.blocks:
            block.is_other = is_other
            if block.spec.is_swapped:
                named = block.other.named_parameters()
                parameters = {f"linear.{name}": value for name, value in named}
                x = torch.func.functional_call(block, parameters, (x,))
            else:
                x = block(x + 0)
        return x

    def touch(self) -> None:
        """Change what a rerun must find as forward found it."""
        for block in self.blocks:
            block.calls += 1
            block.is_other = not block.is_other
            block.replaced = block.replaced + 1


@st.composite
def block_specs(draw: Any) -> BlockSpec:
    """What a block does, and does more on another branch."""
    is_parted = draw(st.booleans())
    kinds = st.sampled_from(GLUE if is_parted else STEPS)
    steps = draw(st.lists(kinds, min_size=1 + is_parted, max_size=4))
    branch = draw(st.lists(st.sampled_from(BRANCH_STEPS), max_size=2))
    at = draw(st.integers(0, len(steps) - 1))
    asks = draw(st.sampled_from(["size", "flag"]))
    is_swapped = draw(st.booleans())
    return BlockSpec(tuple(steps), tuple(branch), at, asks, is_swapped, is_parted)


models = st.lists(block_specs(), min_size=1, max_size=3).map(tuple)
