"""Ranks of FSDP2 x tensor parallelism that really run: caps, peaks, gradients.

    python -m benchmarks.mesh_ranks [--models LLAMA,GPT] [--output DIR]

`plan_parallel` plans each model for 2 ranks (tp=2) and for 4 (2 shards or 2 replicas x
tp=2), with and without parts of the sequence between blocks, each under two caps: near
the least peak and in the middle between that and the fastest plan's. Every rank is a
process that gloo connects (`rank_server`); those of a tensor-parallel group get one
batch. What it holds is counted by `allocator_shim.c` on all threads, to the byte; it
takes a C compiler. oneDNN is switched off: it keeps memory between steps that no plan
knows of.
Exits with 1 if a rank is above its cap, above its prediction or below it by over 1 %,
or if losses or gradients differ from those of one process.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import autosac
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.plans import ParallelPlan
from autosac.profiles.profile import Profile
from autosac.step.training_step import finish_step, micro_step, normalize_inputs
from benchmarks import allocator_shim, rank_server
from benchmarks.environment import MIB, environment
from benchmarks.models.workload import labelled
from benchmarks.ranks import Recipe, reference

LINKS = "pcie-l40s"  # the cluster that ranks on the CPU borrow their links from
NUM_STEPS = 7  # of which the first is not measured
LARGEST_ERROR = 0.01
LARGEST_DIFFERENCE = 1e-5  # of gradients, relative to the largest element of any
SHARES = (0.03, 0.5)  # of the way from the least peak to the fastest plan's
KINDS = ("tensor", "sequence")
MESHES = ((2, 1), (4, 2), (4, 1))  # ranks, and over how many of them FSDP2 shards
_VOCABULARY, _LENGTH, _BATCH, _WIDTH = 1024, 64, 4, 96
_INFINITE = 2**40


class Attention(nn.Module):
    """Causal attention whose number of heads is what its projections have."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 16
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(_WIDTH, _WIDTH) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        out: torch.Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """GPT-2: positions are learnt, the head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(_VOCABULARY, _WIDTH)
        self.wpe = nn.Embedding(_LENGTH, _WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.ln_f = nn.LayerNorm(_WIDTH)
        self.lm_head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=_WIDTH,
        intermediate_size=256,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=_LENGTH,
        vocab_size=_VOCABULARY,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).train()
    return model


def _labelled() -> dict[str, torch.Tensor]:
    return labelled(_VOCABULARY, _BATCH, _LENGTH)


def _tokens() -> torch.Tensor:
    return torch.randint(_VOCABULARY, (_BATCH, _LENGTH))


def _mean_softplus(output: Any) -> torch.Tensor:
    return functional.softplus(output.float()).mean()


RECIPES = {
    "LLAMA": Recipe(make_model=_llama, make_inputs=_labelled),
    "GPT": Recipe(make_model=GPT, make_inputs=_tokens, loss_fn=_mean_softplus),
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
    plan: ParallelPlan


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What a rank measured.

    Attributes:
        peaks: The most it held in each step but the first.
        loss: Of the first step,
        gradients: and its whole gradients by name.
    """

    peaks: list[int]
    loss: float
    gradients: dict[str, torch.Tensor]


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
    def error(self) -> float:
        """Of the prediction, at the rank with the highest peak."""
        return self.cell.plan.peak_bytes / max(self.peaks) - 1

    @property
    def is_kept(self) -> bool:
        """Whether every promise is."""
        return (
            self.highest_bytes <= self.cell.plan.budget_bytes
            and 0 <= self.error <= LARGEST_ERROR
            and self.loss_difference <= LARGEST_DIFFERENCE
            and self.gradient_difference <= LARGEST_DIFFERENCE
        )


def planned(name: str, num_ranks: int, degree: int) -> Iterator[Planned]:
    """Plans of a model for so many ranks, two of which share slices.

    Args:
        name: Of the recipe.
        num_ranks: Of all.
        degree: Ranks over which FSDP2 shards.
    """
    profile = autosac.calibrate(RECIPES[name].profile())
    for kind in KINDS:
        fastest = _plan(profile, num_ranks, degree, kind, _INFINITE)
        try:
            _plan(profile, num_ranks, degree, kind, 2**10)
        except autosac.InfeasibleBudgetError as error:
            least_bytes = error.lowest_peak_bytes
        between = fastest.highest_peak_bytes - least_bytes
        for share in SHARES:
            cap = int(least_bytes + share * between)
            plan = _plan(profile, num_ranks, degree, kind, cap)
            yield Planned(model=name, kind=kind, plan=plan)


def _plan(
    profile: Profile, num_ranks: int, degree: int, kind: str, cap: int
) -> ParallelPlan:
    links = cluster_spec(LINKS, num_gpus=num_ranks)
    return autosac.plan_parallel(
        profile,
        cluster=replace(links, device=device_spec("cpu")),
        memory_budget=cap,
        degrees=[degree],
        mesh={"tp": 2},
        tp_plan=kind,  # type: ignore[arg-type]
    )


def run_ranks(cells: list[Planned], num_ranks: int) -> list[Row]:
    """Run plans one after the other on the same processes."""
    measured = rank_server.run_ranks(_run_all, num_ranks, cells, timeout_s=1800)
    with torch.backends.mkldnn.flags(enabled=False):
        truths = {
            name: reference(RECIPES[name], num_ranks // 2)
            for name in {cell.model for cell in cells}
        }
    return [
        _row(cell, results, *truths[cell.model])
        for cell, *results in zip(cells, *measured, strict=True)
    ]


def _row(
    cell: Planned,
    results: list[RankResult],
    losses: list[float],
    gradients: dict[str, torch.Tensor],
) -> Row:
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert all(result.gradients.keys() == gradients.keys() for result in results)
    return Row(
        cell=cell,
        peaks=tuple(min(result.peaks) for result in results),
        highest_bytes=max(max(result.peaks) for result in results),
        loss_difference=max(
            abs(result.loss / losses[rank // 2] - 1)
            for rank, result in enumerate(results)
        ),
        gradient_difference=max(
            float((result.gradients[name] - truth).abs().max()) / scale
            for result in results
            for name, truth in gradients.items()
        ),
    )


def _run_all(rank: int, cells: list[Planned]) -> list[RankResult]:
    torch.backends.mkldnn.set_flags(False)
    return [_run(cell) for cell in cells]


def _run(cell: Planned) -> RankResult:
    recipe, plan = RECIPES[cell.model], cell.plan
    gc.collect()
    dist.barrier()  # which leaves something behind
    before_bytes = allocator_shim.live_bytes()
    mesh = plan.make_mesh("cpu")
    model = recipe.model()
    plan.apply(model, mesh)
    make = recipe.make_optimizer
    assert make is not None
    optimizer = make(model.parameters())
    args, kwargs = normalize_inputs(recipe.inputs(dist.get_rank() // 2))
    peaks = []
    for number in range(NUM_STEPS):
        gc.collect()
        dist.barrier()
        allocator_shim.reset()
        loss = micro_step(
            model, args, kwargs, loss_fn=recipe.loss_fn, autocast=None, accumulate=1
        )
        if number == 0:
            first_loss, gradients = float(loss), _whole_gradients(model)
        del loss
        finish_step(model, optimizer, None)
        model.zero_grad()
        if number:
            peaks.append(allocator_shim.peak_bytes() - before_bytes)
    return RankResult(peaks=peaks, loss=first_loss, gradients=gradients)


def _whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies elsewhere than the allocator's."""
    whole = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        whole[name] = torch.from_numpy(gradient.full_tensor().numpy().copy())
    return whole


def main() -> int:
    """Plan, run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(RECIPES))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for num_ranks, degree in MESHES:
        cells = [
            cell
            for name in options.models.split(",")
            for cell in planned(name, num_ranks, degree)
        ]
        rows += run_ranks(cells, num_ranks)
    text = "\n".join(_table(rows)) + "\n"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "mesh_ranks.md").write_text(text)
    print(text)
    return 0 if all(row.is_kept for row in rows) else 1


def _table(rows: list[Row]) -> list[str]:
    return [
        "# Ranks of FSDP2 x tensor parallelism: caps, predicted and measured peaks",
        "",
        f"{sum(row.is_kept for row in rows)} of {len(rows)} plans keep every promise:"
        " no rank above its cap in any step, none above its prediction nor below it by"
        f" over {LARGEST_ERROR:.0%}, losses and gradients within"
        f" {LARGEST_DIFFERENCE:.0e} of one process that holds all.",
        "",
        "Peaks in MiB. *measured*: what the allocator of each rank held at most, on all"
        f" threads, in the step of {NUM_STEPS - 1} in which threads of gloo were least"
        " late; *highest*: the most in any step of any rank;"
        " *error*: of the prediction at the rank with the highest peak.",
        "",
        "```",
        *(f"{key}: {value}" for key, value in environment().items()),
        "```",
        "",
        "| model | mesh | kind | AC units | cap | predicted | measured | error | late |"
        " highest | losses | gradients | kept |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_line, rows),
    ]


def _line(row: Row) -> str:
    plan = row.cell.plan
    low, high = min(row.peaks) / MIB, max(row.peaks) / MIB
    dimensions = zip(plan.mesh_dim_names, plan.mesh_shape, strict=True)
    cells = [
        row.cell.model,
        " x ".join(f"{size} {dimension}" for dimension, size in dimensions),
        row.cell.kind,
        str(len(plan.policy)),
        f"{plan.budget_bytes / MIB:.3f}",
        f"{plan.peak_bytes / MIB:.3f}",
        f"{high:.3f}" if high == low else f"{low:.3f} to {high:.3f}",
        f"{row.error:+.4%}",
        f"{plan.late_bytes / MIB:.3f}",
        f"{row.highest_bytes / MIB:.3f}",
        f"{row.loss_difference:.1e}",
        f"{row.gradient_difference:.1e}",
        "yes" if row.is_kept else "NO",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    from benchmarks import mesh_ranks  # ranks import what they run from a module

    sys.exit(mesh_ranks.main())
