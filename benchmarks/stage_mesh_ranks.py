"""Ranks of pipelines x tensor parallelism that really run: caps, peaks, gradients.

    python -m benchmarks.stage_mesh_ranks [--models LLAMA,GPT] [--output DIR]

`plan_pipeline` plans each model for 4 ranks, 2 stages x tp=2, under 1F1B and GPipe,
with and without parts of the sequence between blocks, each under two caps: near the
least peak and in the middle between that and the fastest plan's. Ranks are processes
that gloo connects (`stage_ranks`). What they hold is counted by `allocator_shim.c` on
all threads, to the byte; it takes a C compiler. oneDNN is switched off: it keeps memory
between steps that no plan knows of.
Exits with 1 if a rank is above its cap, above its prediction or below it by over 1 %,
or if losses or gradients differ from those of one process.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama

import autosac
from autosac._compat_pipelining import HOLDS_LESS
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.schedules import GPIPE, ONE_F_ONE_B
from benchmarks.environment import MIB, environment
from benchmarks.mesh_ranks import (
    KINDS,
    LARGEST_DIFFERENCE,
    LARGEST_ERROR,
    LINKS,
    SHARES,
    Block,
)
from benchmarks.stage_ranks import SEED, Job, RankResult, Recipe, reference, run_ranks

NUM_STAGES, DEGREE, NUM_MICRO_BATCHES = 2, 2, 4
NUM_STEPS = 7
_VOCABULARY, _LENGTH, _ROWS, _WIDTH = 1024, 64, 2, 96
_INFINITE = 2**40
# What torch 2.15 lets go of earlier than others is an upper bound.
_MOST = math.inf if HOLDS_LESS else LARGEST_ERROR


class Embedding(nn.Module):
    """Tokens and their positions, which are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(_VOCABULARY, _WIDTH)
        self.wpe = nn.Embedding(_LENGTH, _WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        out: torch.Tensor = self.wte(tokens) + self.wpe(positions)
        return out


class GPT(nn.Module):
    """GPT-2 with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.ln_f = nn.LayerNorm(_WIDTH)
        self.lm_head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits


class LlamaBlock(modeling_llama.LlamaDecoderLayer):
    """A block of Llama that works out the rotary embedding itself."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        # Of the whole sequence, of which `x` may be a part.
        positions = torch.arange(_LENGTH, device=x.device)[None]
        rotated = self.rotary_emb(x, positions)
        out: torch.Tensor = super().forward(x, position_embeddings=rotated)
        return out


class Llama(nn.Module):
    """Llama of Transformers as a chain of blocks."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=_WIDTH,
            intermediate_size=256,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=_LENGTH,
            vocab_size=_VOCABULARY,
            attn_implementation="sdpa",
        )
        self.embed_tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(LlamaBlock(config, i) for i in range(4))
        self.norm = modeling_llama.LlamaRMSNorm(_WIDTH)
        self.lm_head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def _batch(num_micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = num_micro_batches * _ROWS, _LENGTH + 1
    tokens = torch.randint(_VOCABULARY, size, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


RECIPES = {
    "LLAMA": Recipe(make_model=Llama, make_batch=_batch, loss_fn=_loss),
    "GPT": Recipe(make_model=GPT, make_batch=_batch, loss_fn=_loss),
}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One plan.

    Attributes:
        model: Name of the recipe.
        kind: "tensor" or "sequence".
        plan: What was planned.
    """

    model: str
    kind: str
    plan: PipelinePlan


@dataclass(frozen=True, kw_only=True)
class Row:
    """How the ranks of one plan did.

    Attributes:
        cell: What ran.
        peaks: The least of the measured steps, by rank: all do the same, and slow
            threads only add.
        highest_bytes: The most in any step of any rank.
        loss_difference: Largest relative one to one process,
        gradient_difference: and of gradients, relative to the largest element of any.
    """

    cell: Planned
    peaks: tuple[int, ...]
    highest_bytes: int
    loss_difference: float
    gradient_difference: float

    @property
    def errors(self) -> list[float]:
        """Of the prediction, rank by rank."""
        predicted = [peak for peak in self.cell.plan.rank_peaks for _ in range(DEGREE)]
        return [of / own - 1 for of, own in zip(predicted, self.peaks, strict=True)]

    @property
    def is_kept(self) -> bool:
        """Whether every promise is."""
        return (
            self.highest_bytes <= self.cell.plan.budget_bytes
            and all(0 <= error <= _MOST for error in self.errors)
            and self.loss_difference <= LARGEST_DIFFERENCE
            and self.gradient_difference <= LARGEST_DIFFERENCE
        )


@torch.backends.mkldnn.flags(enabled=False)
def planned(name: str, kind: str, schedule: str) -> Iterator[Planned]:
    """Plans of a model under several caps.

    Args:
        name: Of the recipe.
        kind: "tensor" or "sequence".
        schedule: Its name.
    """
    fastest = _plan(name, kind, schedule, _INFINITE)
    try:
        _plan(name, kind, schedule, 2**10)
    except autosac.InfeasibleBudgetError as error:
        least_bytes = error.lowest_peak_bytes
    between = fastest.highest_peak_bytes - least_bytes
    for share in SHARES:
        cap = int(least_bytes + share * between)
        plan = _plan(name, kind, schedule, cap)
        yield Planned(model=name, kind=kind, plan=plan)


def _plan(name: str, kind: str, schedule: str, cap: int) -> PipelinePlan:
    recipe = RECIPES[name]
    torch.manual_seed(SEED)
    inputs, target = recipe.make_batch(NUM_MICRO_BATCHES)
    links = cluster_spec(LINKS, num_gpus=NUM_STAGES * DEGREE)
    return autosac.plan_pipeline(
        recipe.make_model(),
        inputs,
        target=target,
        loss_fn=recipe.loss_fn,
        num_ranks=NUM_STAGES,
        num_micro_batches=NUM_MICRO_BATCHES,
        memory_budget=cap,
        schedules=[schedule],
        cluster=replace(links, device=device_spec("cpu")),
        mesh={"tp": DEGREE},
        tp_plan=kind,  # type: ignore[arg-type]
        optimizer=recipe.make_optimizer,
    )


def run(cell: Planned) -> Row:
    """Run one plan, and hold it against one process."""
    job = Job(
        recipe=RECIPES[cell.model],
        schedule=cell.plan.pipeline,
        starts=(),
        plan=cell.plan,
        num_steps=NUM_STEPS,
    )
    return _row(cell, run_ranks(job), *reference(job))


def _row(
    cell: Planned,
    results: list[RankResult],
    losses: list[float],
    gradients: dict[str, torch.Tensor],
) -> Row:
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    own = {name for result in results for name in result.gradients}
    assert own == gradients.keys()
    pairs = [
        (loss, truth)
        for result in results[-DEGREE:]
        for loss, truth in zip(result.losses, losses, strict=True)
    ]
    return Row(
        cell=cell,
        peaks=tuple(result.peak_bytes for result in results),
        highest_bytes=max(max(result.peaks) for result in results),
        loss_difference=max(abs(loss / truth - 1) for loss, truth in pairs),
        gradient_difference=max(
            float((gradient - gradients[name]).abs().max()) / scale
            for result in results
            for name, gradient in result.gradients.items()
        ),
    )


def main() -> int:
    """Plan, run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(RECIPES))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = product(options.models.split(","), KINDS, (ONE_F_ONE_B, GPIPE))
    rows = [run(cell) for which in cells for cell in planned(*which)]
    text = "\n".join(_table(rows)) + "\n"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "stage_mesh_ranks.md").write_text(text)
    print(text)
    return 0 if all(row.is_kept for row in rows) else 1


def _table(rows: list[Row]) -> list[str]:
    return [
        "# Ranks of pipelines x tensor parallelism: caps, predicted and measured peaks",
        "",
        f"{sum(row.is_kept for row in rows)} of {len(rows)} plans keep every promise:"
        " no rank above its cap in any step, none above its prediction nor below it by"
        f" over {LARGEST_ERROR:.0%}, losses and gradients within"
        f" {LARGEST_DIFFERENCE:.0e} of one process that holds all.",
        "",
        f"{NUM_STAGES} stages x tp={DEGREE}, {NUM_MICRO_BATCHES} micro-batches. Peaks"
        " in MiB, of a rank of each stage. *measured*: what the allocator held at most,"
        f" on all threads, in the step of {NUM_STEPS - 1} in which threads of gloo were"
        " least late; *highest*: the most in any step of any rank; *error*: of the"
        " prediction, at the rank where it is largest.",
        "",
        "```",
        *(f"{key}: {value}" for key, value in environment().items()),
        "```",
        "",
        "| model | kind | schedule | blocks | AC units | cap | predicted | measured |"
        " error | late | highest | losses | gradients | kept |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_line, rows),
    ]


def _line(row: Row) -> str:
    plan = row.cell.plan
    stages = plan.stage_plans
    cells = [
        row.cell.model,
        row.cell.kind,
        plan.pipeline.name,
        " + ".join(str(len(stage.fqns)) for stage in stages),
        " + ".join(str(len(stage.policy)) for stage in stages),
        f"{plan.budget_bytes / MIB:.3f}",
        ", ".join(f"{peak / MIB:.3f}" for peak in plan.rank_peaks),
        ", ".join(f"{peak / MIB:.3f}" for peak in row.peaks[::DEGREE]),
        f"{max(row.errors, key=abs):+.4%}",
        f"{max(stage.late_bytes for stage in stages) / MIB:.3f}",
        f"{row.highest_bytes / MIB:.3f}",
        f"{row.loss_difference:.1e}",
        f"{row.gradient_difference:.1e}",
        "yes" if row.is_kept else "NO",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    from benchmarks import stage_mesh_ranks  # ranks import what they run from a module

    sys.exit(stage_mesh_ranks.main())
