"""Meshes that `plan_pipeline` chooses under a global batch, and what planning takes.

    python -m benchmarks.pipeline_meshes [--in-parts] [--cells 8B:8:2 ...]
        [--output DIR]

A cell is a model, a number of GPUs, millions of tokens of a step, and ``cp`` if ranks
may have parts of sequences, too. Each is planned in a process of its own, whose CPU
seconds and memory count from the model on. What does not fit says a budget that is
enough. With ``--in-parts`` other cells are planned, with parts of sequences and
without, for a table of their own. Rows of cells that are not run stay in it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.mixtral import modeling_mixtral

import autosac
from autosac.errors import InfeasibleBudgetError
from autosac.quantities import format_bytes
from benchmarks.environment import cpu_s, environment
from benchmarks.large_meshes import llama, token_loss
from benchmarks.parallel_plans import GIB, LENGTH

BUDGET = "75GiB"
MIXTRAL = "8x7B"
CELLS = (
    *("8B:8:2", "405B:512:2", "70B:64:2", "8x7B:64:2"),
    *("405B:16384:16", "70B:1024:16", "8B:128:16", "8x7B:1024:16"),
    *("8B:8:16", "8B:16384:16", "70B:16384:16", "8x7B:16384:16"),
    *("405B:64:2", "405B:2048:2"),
)
IN_PARTS = ("8B:64:2", "8B:64:2:cp", "405B:512:2", "405B:512:2:cp")


class MixtralBlock(modeling_mixtral.MixtralDecoderLayer):
    """A block of Mixtral that works out the rotary embedding itself."""

    def __init__(self, config: transformers.MixtralConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.rotary_emb = modeling_mixtral.MixtralRotaryEmbedding(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotated = self.rotary_emb(x, positions)
        out: torch.Tensor = super().forward(x, position_embeddings=rotated)
        return out


def mixtral() -> nn.Module:
    """Mixtral 8x7B as a chain of blocks on the meta device, in 32 bits."""
    config = transformers.MixtralConfig(
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",  # whose sizes no values decide
    )
    with torch.device("meta"):
        return nn.Sequential(
            nn.Embedding(config.vocab_size, config.hidden_size),
            *(MixtralBlock(config, i) for i in range(config.num_hidden_layers)),
            modeling_mixtral.MixtralRMSNorm(config.hidden_size),
            nn.Linear(config.hidden_size, config.vocab_size, bias=False),
        ).train()


def planned(
    name: str, num_gpus: int, millions: int, *, in_parts: bool
) -> dict[str, Any]:
    """Plan one cell in this process."""
    torch.set_num_threads(1)
    model = mixtral() if name == MIXTRAL else llama(name)
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    tp: dict[str, Any] = {"mesh": {"pp": None, "fsdp": None, "tp": None}}
    if in_parts:
        tp["mesh"]["cp"] = None
    tp["tp_plan"] = None if name == MIXTRAL else "sequence"
    began = cpu_s()
    row: dict[str, Any] = {}
    try:
        plan = autosac.plan_pipeline(
            model,
            tokens,
            target=tokens,
            loss_fn=token_loss,
            optimizer=torch.optim.AdamW,
            cluster="hgx-h100",
            num_gpus=num_gpus,
            global_batch=millions * 2**20 // LENGTH,
            memory_budget=BUDGET,
            param_dtype="bfloat16",
            reduce_dtype="float32",
            **tp,
        )
    except InfeasibleBudgetError as error:
        row["lowest_bytes"] = error.lowest_peak_bytes
    else:
        sizes = zip(plan.mesh_shape, plan.mesh_dim_names, strict=True)
        row |= {
            "mesh": " x ".join(f"{size} {name}" for size, name in sizes if size > 1),
            "schedule": plan.pipeline.name,
            "micro_batches": plan.pipeline.num_micro_batches,
            "rows": plan.stage_plans[0].received.shape[0],
            "step_ms": plan.step_ms,
            "bound_ms": plan.bound_ms,
            "peak_bytes": plan.peak_bytes,
            "lost": len(plan.alternatives),
        }
    row["cpu_s"] = cpu_s() - began
    row["rss_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return row


def main() -> None:
    """Plan all cells, and write the table as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-parts", action="store_true")
    parser.add_argument("--cells", nargs="*")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if options.one is not None:
        name, num_gpus, millions, *more = options.one.split(":")
        row = planned(name, int(num_gpus), int(millions), in_parts=bool(more))
        print(json.dumps(row))
        return
    cells = IN_PARTS if options.in_parts else CELLS
    path = options.output / f"pipeline_meshes{'_cp' * options.in_parts}.md"
    rows = dict.fromkeys(cells, "") | _kept(path)
    for cell in options.cells or cells:
        command = [sys.executable, "-m", "benchmarks.pipeline_meshes", "--one", cell]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows[cell] = _line(cell, json.loads(done.stdout.splitlines()[-1]))
        print(rows[cell], flush=True)
        lines = [*_heading(), *filter(None, rows.values())]
        path.write_text("\n".join(lines) + "\n")


def _kept(path: Path) -> dict[str, str]:
    """Rows of a table that is there already, by cell."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {}
    for line in lines:
        name, num_gpus, millions, *_ = line.strip("| ").split(" | ") + [""] * 2
        if millions.endswith(" M"):
            name, _, parts = name.partition(", ")
            cell = (
                f"{name}:{num_gpus}:{millions.removesuffix(' M')}{':cp' * bool(parts)}"
            )
            rows[cell] = line
    return rows


def _line(cell: str, row: dict[str, Any]) -> str:
    name, num_gpus, millions, *more = cell.split(":")
    name += ", cp open" * bool(more)
    cost = [f"{row['cpu_s']:.0f}", f"{row['rss_kib'] / 2**10:,.0f}"]
    if "lowest_bytes" in row:
        needs = f"does not fit; {format_bytes(row['lowest_bytes'])} are enough"
        cells = [name, num_gpus, f"{millions} M", needs, *[""] * 6]
        return f"| {' | '.join([*cells, *cost])} |"
    rate = int(millions) * 2**20 / row["step_ms"] * 1e3 / int(num_gpus)
    cells = [
        *(name, num_gpus, f"{millions} M", row["mesh"]),
        f"{row['schedule']}, {row['micro_batches']} x {row['rows']}",
        f"{row['step_ms'] / 1e3:.2f}",
        f"{row['bound_ms'] / 1e3:.2f}",
        f"{rate:,.0f}",
        f"{row['peak_bytes'] / GIB:.1f}",
        str(row["lost"]),
    ]
    return f"| {' | '.join([*cells, *cost])} |"


def _heading() -> list[str]:
    return [
        "# Meshes that are chosen for a global batch",
        "",
        "```",
        *(f"{key}: {value}" for key, value in environment().items()),
        "```",
        "",
        f"`hgx-h100`, {BUDGET} a rank, sequences of {LENGTH} tokens, AdamW, parameters"
        " in 32 bits, gathered in bfloat16, gradients reduced in 32 bits; stages (2 and"
        " more), shards and slices, of Llama 3 with parts of the sequence, are chosen."
        " *bound*: no mesh, schedule and micro-batch size that was enumerated takes"
        " less, by the times of blocks that recompute nothing. *lost*: alternatives"
        " that the plan lists. CPU seconds and memory are those of planning.",
        "",
        "| model | GPUs | tokens | mesh | schedule, micro-batches | step, s | bound, s"
        " | tokens/s/GPU | peak, GiB | lost | CPU s | MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    main()
