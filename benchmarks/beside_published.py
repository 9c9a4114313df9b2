"""Plans on the meshes that others have trained on, within the memory that theirs take.

    python -m benchmarks.beside_published [--output DIR]

The settings of `large_meshes` without stages and without asynchronous tensor
parallelism, which plans do not count on: what is recomputed there by hand is predicted,
and beside it what `plan_parallel` chooses on the same mesh under a cap of as many bytes
as that allocates. Settings with stages are in `interleaved`.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autosac
from benchmarks.environment import cpu_s, environment
from benchmarks.large_meshes import SETTINGS, Published, llama, loss_of, predicted
from benchmarks.parallel_plans import GIB


def row(setting: Published) -> dict[str, str]:
    """What one setting takes by hand and as planned."""
    by_hand = predicted(setting)
    cap = max(ledger.timeline().peak_bytes for ledger in by_hand.ledgers)
    tokens = torch.zeros(setting.rows, setting.length, dtype=torch.int64)
    tp: dict[str, Any] = {}
    if setting.tp > 1:
        tp = {"tp_plan": "sequence", "loss_parallel": True}
    began = cpu_s()
    plan = autosac.plan_parallel(
        llama(setting.size),
        tokens,
        loss_fn=partial(loss_of, tokens),
        optimizer=torch.optim.AdamW,
        cluster="hgx-h100",
        num_gpus=setting.num_gpus,
        memory_budget=cap,
        mesh={"tp": setting.tp},
        degrees=[setting.fsdp],
        param_dtype="bfloat16",
        reduce_dtype="float32",
        **tp,
    )
    took_s = cpu_s() - began
    mesh = {"fsdp": setting.fsdp, "tp": setting.tp}
    return {
        "model": setting.size,
        "mesh": " x ".join(f"{size} {name}" for name, size in mesh.items() if size > 1),
        "sequences": str(setting.rows),
        "by hand": setting.rule.name.partition(", ")[2],
        "cap, GiB": f"{cap / GIB:.1f}",
        "its step, s": f"{by_hand.step_ms / 1e3:.3f}",
        "AC units": str(len(plan.policy)),
        "peak, GiB": f"{plan.peak_bytes / GIB:.1f}",
        "step, s": f"{plan.step_ms / 1e3:.3f}",
        "faster": f"{1 - plan.step_ms / by_hand.step_ms:.1%}",
        "CPU s": f"{took_s:.0f}",
    }


def main() -> None:
    """Plan all, and write the table as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, str]] = []
    for setting in SETTINGS:
        if setting.stages == 1 and not setting.asynchronous:
            rows.append(row(setting))
            print(rows[-1], flush=True)
            text = "\n".join(_page(rows)) + "\n"
            (options.output / "beside_published.md").write_text(text)


def _page(rows: list[dict[str, str]]) -> list[str]:
    return [
        "# Plans on meshes that others have trained on",
        "",
        "```",
        *(f"{key}: {value}" for key, value in environment().items()),
        "```",
        "",
        "Llama 3, `hgx-h100`, sequences of 8192 tokens, AdamW, parameters in 32 bits,"
        " gathered in bfloat16, gradients reduced in 32 bits; with tensor parallelism"
        " sequences are divided between blocks, and logits for the loss. *by hand*:"
        " torchtitan's settings, of which the *cap* is what they allocate; planned on"
        " the same mesh. Steps in the same model of time.",
        "",
        f"| {' | '.join(rows[0])} |",
        f"|{'---|' * len(rows[0])}",
        *(f"| {' | '.join(row.values())} |" for row in rows),
    ]


if __name__ == "__main__":
    main()
