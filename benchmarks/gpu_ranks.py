"""One rank of many on one GPU: `python -m benchmarks.gpu_ranks`.

`plan_parallel` plans models for nodes of eight H100s, without a GPU, under caps near
the least peak and half way to the fastest plan's. One rank of each plan then trains on
the GPU that is here, in a fake process group whose collectives do nothing: FSDP2,
tensor parallelism, autograd, CUDA's streams and the allocator are the real ones, at
any number of ranks. What the allocator hands out (`max_memory_allocated`) is held
against the plan's peak, and what it reserves against what the plan tells of that. Last,
steps run under lower and lower caps on what is reserved, as a smaller GPU would set
one. Every plan has a process of its own.

    python -m benchmarks.gpu_ranks [--cases llama:fsdp] [--jobs 6]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

import autosac
from autosac._compat_distributed import fake_group
from autosac.parallel.clusters import cluster_spec
from autosac.step.training_step import finish_step, micro_step
from benchmarks import gpu_tables
from benchmarks.environment import MIB
from benchmarks.gpu_runs import clean
from benchmarks.kept_promises import under_caps
from benchmarks.models.workload import labelled

RESULT = Path(__file__).parent / "results" / "gpu_ranks.md"
LARGEST_ERROR = 0.002
_ROOMS = (0.5, 0.3, 0.2, 0.15, 0.1, 0.05, 0.03, 0.01)  # above what is handed out
_SHARES = (0.03, 0.5)  # of the way from the least peak to the fastest plan's
_CLUSTER, _NUM_STEPS = "hgx-h100", 3
_VOCABULARY, _LENGTH = 32000, 2048
_HALF = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def _llama(family: str, **more: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=8,
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=16,
        max_position_embeddings=_LENGTH,
        vocab_size=_VOCABULARY,
        use_cache=False,
        **{"num_key_value_heads": 8, **more},
    )
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.train()


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=12, n_embd=1024, n_head=16, n_positions=_LENGTH, use_cache=False
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(_llama, "Llama"),
    "qwen3": partial(_llama, "Qwen3", head_dim=128),
    # No groups of queries: for these in float32 there is no fused kernel of attention.
    "heads": partial(_llama, "Llama", num_key_value_heads=16),
    "gpt2": _gpt2,
}
DIVISIONS: dict[str, dict[str, Any]] = {
    "fsdp": {"num_gpus": 8, "degrees": [8]},
    "hsdp": {"num_gpus": 16, "degrees": [8]},
    "half": {"num_gpus": 8, "degrees": [8], **_HALF},
    "tp": {"num_gpus": 16, "mesh": {"tp": 2}, "degrees": [8], "tp_plan": "tensor"},
    "sp": {"num_gpus": 32, "mesh": {"tp": 4}, "degrees": [8], "tp_plan": "sequence"},
    "sp-half": {
        "num_gpus": 32,
        "mesh": {"tp": 4},
        "degrees": [8],
        "tp_plan": "sequence",
        **_HALF,
    },
    "sp-loss": {
        "num_gpus": 32,
        "mesh": {"tp": 4},
        "degrees": [8],
        "tp_plan": "sequence",
        "loss_parallel": True,
    },
    "cp": {"num_gpus": 16, "mesh": {"cp": 4}, "degrees": [16]},
    "cp-half": {"num_gpus": 16, "mesh": {"cp": 4}, "degrees": [16], **_HALF},
    "cp-tp": {
        "num_gpus": 32,
        "mesh": {"cp": 2, "tp": 2},
        "degrees": [16],
        "tp_plan": "sequence",
    },
}
CASES = (
    *(f"llama:{division}" for division in DIVISIONS if "cp" not in division),
    *(f"heads:{division}" for division in DIVISIONS if "cp" in division),
    *(f"gpt2:{division}" for division in ("fsdp", "half", "cp", "cp-half")),
    *(f"qwen3:{division}" for division in ("half", "sp-half")),
)


def _batch(device: str) -> dict[str, torch.Tensor]:
    made = labelled(_VOCABULARY, 2, _LENGTH)
    return {name: tensor.to(device) for name, tensor in made.items()}


def plans(case: str) -> Iterator[autosac.ParallelPlan]:
    """Plans of a case under two caps, made as if no GPU were present."""
    model, _, division = case.partition(":")
    options = dict(DIVISIONS[division])
    cluster = cluster_spec(_CLUSTER, num_gpus=options.pop("num_gpus"))

    def plan(cap: int) -> autosac.ParallelPlan:
        with torch.device("meta"):
            traced = MODELS[model]()
        return autosac.plan_parallel(
            traced,
            _batch("cpu"),
            cluster=cluster,
            memory_budget=cap,
            optimizer=torch.optim.AdamW,
            **options,
        )

    yield from under_caps(plan, _SHARES)


def run(case: str, number: int, device: str) -> dict[str, Any]:
    """What one rank of a plan, by its number, holds in its third step."""
    plan = list(plans(case))[number]
    dimensions = zip(plan.mesh_dim_names, plan.mesh_shape, strict=True)
    return {
        "case": case,
        "mesh": " x ".join(f"{size} {name}" for name, size in dimensions),
        "ac_units": len(plan.policy),
        "budget": plan.budget_bytes,
        "predicted": plan.peak_bytes,
        "predicted_reserved": plan.reserved_bytes,
        **_measured(case, plan, device),
    }


def _measured(case: str, plan: autosac.ParallelPlan, device: str) -> dict[str, float]:
    model_name, _, _ = case.partition(":")
    with fake_group(plan.num_gpus):
        mesh = plan.make_mesh(device)
        torch.manual_seed(0)
        with torch.device(device):
            model = MODELS[model_name]()
        plan.apply(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = _batch(device)
        args, kwargs = plan.part_of(batch, mesh)  # beside it, as in a loop

        def step() -> None:
            with loss_parallel() if plan.tensor.divides_loss else nullcontext():
                loss = micro_step(
                    model, args, kwargs, loss_fn=None, autocast=None, accumulate=1
                )
            del loss
            finish_step(model, optimizer, None)
            model.zero_grad()

        for _ in range(_NUM_STEPS):
            gc.collect()
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            step()
        if device != "cuda":
            return {"requested": 1, "allocated": 1, "reserved": 1, "room": 0.0}
        handed_out = torch.cuda.max_memory_allocated()
        found: dict[str, float] = {
            "requested": torch.cuda.memory_stats()["requested_bytes.all.peak"],
            "allocated": handed_out,
            "reserved": torch.cuda.max_memory_reserved(),
        }
        return {**found, "room": _least_room(step, handed_out)}


def _least_room(step: Callable[[], None], handed_out: int) -> float:
    """How far above its peak a cap on what is reserved must lie for steps to end."""
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    least = inf
    for room in _ROOMS:
        clean("cuda")
        fraction = (1 + room) * handed_out / total_bytes
        torch.cuda.set_per_process_memory_fraction(fraction)
        try:
            for _ in range(2):
                step()
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            break
        least = room
    torch.cuda.set_per_process_memory_fraction(1.0)
    return least


# --- processes and the page -------------------------------------------------------


def _run_apart(one: tuple[str, int], device: str, timeout_s: float) -> dict[str, Any]:
    case, number = one
    command = [sys.executable, "-m", "benchmarks.gpu_ranks", "--in-process"]
    command += ["--cases", case, "--number", str(number), "--device", device]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"case": case, "error": "no time left"}
    departed = [line for line in done.stderr.splitlines() if "AC unit" in line]
    print(*departed[:2], sep="\n", flush=True)
    if done.returncode:
        print(done.stderr[-3000:], flush=True)
        return {"case": case, "error": done.stderr.strip().splitlines()[-1][:300]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(row, flush=True)
    return row


def kept(row: dict[str, Any]) -> bool:
    """Whether a rank is handed out what was predicted, within its cap."""
    if "error" in row:
        return False
    error = abs(row["predicted"] / row["allocated"] - 1)
    return bool(error <= LARGEST_ERROR and row["allocated"] <= row["budget"])


def page(rows: list[dict[str, Any]], device: str) -> str:
    """The result as Markdown."""
    where = ", ".join(f"{k} {v}" for k, v in gpu_tables.environment(device).items())
    lines = [
        "# One rank of many on one GPU",
        "",
        f"`python -m benchmarks.gpu_ranks`: {where}",
        "",
        f"{sum(map(kept, rows))} of {len(rows)} plans are handed out what was predicted"
        f" without a GPU to {LARGEST_ERROR:.1%}, within the cap. MiB of one rank's"
        " third step; collectives are those of a fake group. *room*: how far above what"
        " is handed out the lowest cap on what is reserved lay under which steps still"
        " ended.",
        "",
        "| model | mesh | AC units | cap | predicted | handed out | error | asked for"
        " | reserved | predicted | error | room | kept |",
        f"| --- | --- |{' ---: |' * 10} --- |",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['case']} | {row['error']} |")
            continue
        cells = [
            row["case"],
            row["mesh"],
            str(row["ac_units"]),
            f"{row['budget'] / MIB:,.1f}",
            f"{row['predicted'] / MIB:,.1f}",
            f"{row['allocated'] / MIB:,.1f}",
            f"{row['predicted'] / row['allocated'] - 1:+.2%}",
            f"{row['requested'] / MIB:,.1f}",
            f"{row['reserved'] / MIB:,.0f}",
            f"{row['predicted_reserved'] / MIB:,.0f}",
            f"{row['predicted_reserved'] / row['reserved'] - 1:+.0%}",
            f"{row['room']:.0%}" if row["room"] < inf else "more",
            "yes" if kept(row) else "**no**",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all cases; the exit code tells whether every plan was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--jobs", type=int, default=4, help="processes side by side")
    parser.add_argument("--timeout-s", type=float, default=200.0, help="of a process")
    parser.add_argument("--in-process", action="store_true", help="print a row only")
    parser.add_argument("--number", type=int, default=0, help="of its case's plan")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    cases = options.cases.split(",")
    torch.set_num_threads(1)
    if options.in_process:
        print(json.dumps(run(cases[0], options.number, options.device)), flush=True)
        return 0
    apart = partial(_run_apart, device=options.device, timeout_s=options.timeout_s)
    every = [(case, number) for case in cases for number in range(len(_SHARES))]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(apart, every))
    options.output.write_text(page(rows, options.device))
    print(options.output.read_text())
    return 0 if all(map(kept, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
