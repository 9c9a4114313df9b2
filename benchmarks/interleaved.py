"""Interleaved 1F1B beside 1F1B, planned; and beside what others recompute by hand.

    python -m benchmarks.interleaved [--output DIR]

Llama 3 on meshes that are given, every plan under several caps. The first cap of 405B
is what torchtitan's setting takes (`large_meshes`), whose blocks all recompute all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import autosac
from autosac.errors import InfeasibleBudgetError
from autosac.pipelines.schedules import INTERLEAVED, ONE_F_ONE_B
from autosac.quantities import format_bytes
from benchmarks.environment import cpu_s, environment
from benchmarks.large_meshes import (
    LENGTH,
    SETTINGS,
    Published,
    llama,
    predicted,
    token_loss,
)
from benchmarks.parallel_plans import GIB
from benchmarks.parallel_rules import ALL_RECOMPUTED

_8B = Published(
    size="8B",
    stages=4,
    fsdp=8,
    rows=1,
    micro_batches=8,
    rule=ALL_RECOMPUTED,
    gib=0.0,
    tokens=0,
)
_70B = replace(_8B, size="70B", stages=8, tp=4, micro_batches=16)
_SHARES = (1.0, 1.1, 1.25)  # of what all blocks recomputed under interleaved 1F1B take


def settings() -> Iterator[Published]:
    """Meshes, with two stages a rank."""
    for one in (_8B, _70B, *(s for s in SETTINGS if s.per_rank > 1)):
        yield replace(one, per_rank=2, asynchronous=False)


def planned(setting: Published, schedule: str, budget_bytes: int) -> tuple[str, str]:
    """Step and CPU time of the plan of one schedule."""
    tokens = torch.zeros(setting.rows, LENGTH, dtype=torch.int64)
    rows = setting.rows * setting.micro_batches * setting.fsdp
    tp = {"tp": setting.tp} if setting.tp > 1 else {}
    sequence = {"tp_plan": "sequence", "loss_parallel": True} if tp else {}
    began = cpu_s()
    try:
        plan = autosac.plan_pipeline(
            llama(setting.size),
            tokens,
            target=tokens,
            loss_fn=token_loss,
            optimizer=torch.optim.AdamW,
            cluster="hgx-h100",
            num_gpus=setting.num_gpus,
            mesh={"pp": setting.stages, "fsdp": setting.fsdp, **tp},
            num_micro_batches=setting.micro_batches,
            global_batch=rows,
            schedules=[schedule],
            memory_budget=budget_bytes,
            param_dtype="bfloat16",
            reduce_dtype="float32",
            **sequence,
        )
    except InfeasibleBudgetError as error:
        step = f"takes {format_bytes(error.lowest_peak_bytes)}"
    else:
        step = f"{plan.step_ms / 1e3:.2f}"
    return step, f"{cpu_s() - began:.0f}"


def rows() -> Iterator[str]:
    """Lines of the table."""
    for setting in settings():
        by_hand = predicted(setting)
        least = max(ledger.timeline().peak_bytes for ledger in by_hand.ledgers)
        alone = predicted(replace(setting, per_rank=1))
        alone_bytes = max(ledger.timeline().peak_bytes for ledger in alone.ledgers)
        mesh = {"pp": setting.stages, "fsdp": setting.fsdp, "tp": setting.tp}
        for share in _SHARES:
            cap = int(share * least)
            own = planned(setting, INTERLEAVED, cap)
            other = planned(setting, ONE_F_ONE_B, cap)
            by_hand_1f1b = f"{alone.step_ms / 1e3:.2f}" if alone_bytes <= cap else ""
            cells = [
                setting.size,
                " x ".join(f"{size} {name}" for name, size in mesh.items() if size > 1),
                f"{setting.micro_batches} x {setting.rows}",
                f"{cap / GIB:.1f}",
                f"{by_hand.step_ms / 1e3:.2f}",
                own[0],
                by_hand_1f1b,
                other[0],
                own[1],
                other[1],
            ]
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Plan all, and write the table as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = _heading()
    for row in rows():
        print(row, flush=True)
        lines.append(row)
        (options.output / "interleaved.md").write_text("\n".join(lines) + "\n")


def _heading() -> list[str]:
    return [
        "# Interleaved 1F1B beside 1F1B",
        "",
        "```",
        *(f"{key}: {value}" for key, value in environment().items()),
        "```",
        "",
        f"Llama 3, `hgx-h100`, sequences of {LENGTH} tokens, AdamW, parameters in 32"
        " bits, gathered in bfloat16, gradients reduced in 32 bits; with tensor"
        " parallelism sequences are divided between blocks and logits for the loss."
        " Interleaved 1F1B has two stages a rank. *by hand*: stages of as many blocks"
        " each, all of which recompute all; the first cap is what that takes with two"
        " stages a rank. Seconds of a step, in the model; an empty cell does not fit.",
        "",
        "| model | mesh | micro-batches x sequences | cap, GiB | interleaved, by hand"
        " | planned | 1F1B, by hand | planned | CPU s | CPU s, 1F1B |",
        f"|{'---|' * 10}",
    ]


if __name__ == "__main__":
    main()
