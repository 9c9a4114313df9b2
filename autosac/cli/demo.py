"""``autosac demo``: plan a small language model at three budgets and train it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from autosac.planning.make_plan import floor, make_plan
from autosac.planning.plans import Plan
from autosac.profiles.profile import calibrate, profile
from autosac.quantities import format_bytes, format_ms
from autosac.step.training_step import LossFn
from autosac.verification.verifying import Verification, verify

VOCABULARY, LENGTH, BATCH = 2048, 256, 4
SHARES = (0.75, 0.4, 0.1)  # of the way from the least feasible budget to the baseline


class Attention(nn.Module):
    """Causal self-attention with dropout behind it."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (
            self.qkv(x)
            .view(batch, length, 3, self.num_heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        query, key, value = heads
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        out: torch.Tensor = self.dropout(self.proj(mixed))
        return out


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A plain GPT language model: tokens of shape (batch, length) -> logits."""

    def __init__(
        self,
        *,
        num_layers: int = 8,
        width: int = 192,
        num_heads: int = 6,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(
            Block(width, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if position_ids is None:
            x = self.token(tokens) + self.position[: tokens.shape[1]]
        else:
            x = self.token(tokens) + self.position[position_ids]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(tokens: torch.Tensor) -> LossFn:
    """Loss function that compares logits with the tokens that follow."""

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )

    return loss


@contextmanager
def few_threads() -> Iterator[None]:
    """Run on one thread inside, unless the user has said on how many.

    Threads of a kernel wait for each other: beside processes that keep all cores busy
    they take minutes for what one of them does in seconds.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@few_threads()
def run(console: Console) -> bool:
    """Plan, train, measure and print; tell whether every promise was kept."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    loss = next_token_loss(tokens)
    model = GPT()
    traced = calibrate(
        profile(
            model,
            tokens,
            loss_fn=loss,
            optimizer=torch.optim.AdamW(model.parameters()),
        )
    )
    lowest, baseline = floor(traced), traced.baseline_peak_bytes
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    console.print(
        f"GPT with {millions:.1f} M parameters,"
        f" batch {BATCH} x {LENGTH}, threads: {torch.get_num_threads()}."
        f" A step peaks at {format_bytes(baseline)};"
        f" the least that a plan can reach is {format_bytes(lowest)}."
    )
    kept = True
    table = _table()
    plans = []
    for share in SHARES:
        plan = make_plan(traced, round(lowest + share * (baseline - lowest)))
        verification = _measure(plan, tokens, loss)
        kept = kept and verification.identical and verification.within_budget
        table.add_row(*_row(plan, verification))
        plans.append(plan)
    console.print(table)
    console.print(_policies(plans))
    return kept


def _measure(plan: Plan, tokens: torch.Tensor, loss: LossFn) -> Verification:
    return verify(
        plan,
        GPT,
        lambda: tokens,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        loss_fn=loss,
    )


def _table() -> Table:
    table = Table(title="Real training steps on this machine")
    for title in ("budget", "predicted peak", "measured peak", "without plan"):
        table.add_column(title, justify="right")
    for title in ("recompute, predicted", "step time", "gradients, RNG, buffers"):
        table.add_column(title, justify="right")
    return table


def _row(plan: Plan, verification: Verification) -> Iterator[str]:
    yield format_bytes(plan.budget_bytes)
    error = 100 * verification.prediction_error
    yield f"{format_bytes(plan.peak_bytes)} ({error:+.2f} %)"
    yield format_bytes(verification.measured_peak_bytes)
    yield format_bytes(verification.baseline_peak_bytes)
    yield format_ms(plan.recompute_ms)
    yield f"x{verification.step_ms / verification.baseline_step_ms:.2f}"
    yield (
        "identical"
        if verification.identical
        else "DIFFERENT: " + verification.differences[0]
    )


def _policies(plans: list[Plan]) -> Table:
    table = Table(title="Policy: share of a unit's activation memory to recompute")
    table.add_column("AC unit")
    for plan in plans:
        table.add_column(format_bytes(plan.budget_bytes), justify="right")
    for fqn in dict.fromkeys(fqn for plan in plans for fqn in plan.policy):
        ratios = (plan.policy.get(fqn) for plan in plans)
        table.add_row(fqn, *("" if r is None else f"{r:.0%}" for r in ratios))
    return table
