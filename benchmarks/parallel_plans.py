"""Parallel plans of Llama 3 for 8 to 1,024 H100 beside plans written by hand.

    python -m benchmarks.parallel_plans [--models 8B,70B,405B] [--output DIR]

One sequence of 8192 tokens a GPU, AdamW. Parameters, gradients and optimizer state are
bfloat16, so that the step is what the model alone says. Everything is predicted: peaks
by simulating the ranks of FSDP2, times from the roofline of the ops and the cost model
of the cluster, played event by event. No GPU is needed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import autosac
from autosac.errors import InfeasibleBudgetError
from autosac.parallel.clusters import ClusterSpec, cluster_spec
from autosac.parallel.formulating import ParallelFormulation, Setting
from autosac.parallel.plans import ParallelPlan
from autosac.parallel.racing import make_parallel_plan
from autosac.parallel.solving import ParallelChooser
from autosac.quantities import format_ms
from benchmarks.environment import cpu_s, environment
from benchmarks.parallel_rules import BY_HAND, ByHand, at_degree

LENGTH = 8192
GIB = 2**30
BUDGET_BYTES = 74 * GIB  # of the 80 GB (74.5 GiB) of an H100
NUM_GPUS = (8, 16, 64, 256, 1024)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What tells one Llama 3 from another (Dubey et al. 2024, table 3)."""

    width: int
    inner: int
    layers: int
    heads: int


SIZES = {
    "8B": Size(width=4096, inner=14336, layers=32, heads=32),
    "70B": Size(width=8192, inner=28672, layers=80, heads=64),
    "405B": Size(width=16384, inner=53248, layers=126, heads=128),
}


def llama(size: Size) -> torch.nn.Module:
    """The model on the meta device, in bfloat16."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).bfloat16().train()


def main() -> None:
    """Plan all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--gpus", default=",".join(map(str, NUM_GPUS)))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = _heading()
    for name in options.models.split(","):
        began = cpu_s()
        form = _formulation(SIZES[name])
        traced_s = cpu_s() - began
        for num_gpus in map(int, options.gpus.split(",")):
            rows = _rows(name, form, traced_s, num_gpus)
            print("\n".join(rows), flush=True)
            lines += rows
    path = options.output / "parallel_plans.md"
    path.write_text("\n".join(lines) + "\n")


def _formulation(size: Size) -> ParallelFormulation:
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    profile = autosac.profile(
        llama(size),
        {"input_ids": tokens, "labels": tokens},
        optimizer=torch.optim.AdamW,
        device=cluster_spec("hgx-h100").device,
    )
    return ParallelFormulation(profile, Setting())


def _rows(
    name: str, form: ParallelFormulation, traced_s: float, num_gpus: int
) -> list[str]:
    spec = cluster_spec("hgx-h100", num_gpus=num_gpus)
    head = f"| {name} | {num_gpus} "
    began = cpu_s()
    try:
        plan = make_parallel_plan(ParallelChooser(form), spec, BUDGET_BYTES)
    except InfeasibleBudgetError as error:
        took_s = traced_s + cpu_s() - began
        advice = str(error).split("; ")[-1].rstrip(".")
        row = f"none: {error.lowest_peak_bytes / GIB:.1f} GiB at least, {advice}"
        rows = [f"{head}| autosac | {row} | | | | | | {took_s:.0f} |"]
    else:
        took_s = traced_s + cpu_s() - began
        rows = [_plan_row(head, plan, took_s)]
    for rule in BY_HAND:
        rows.append(_rule_row(head, form, spec, rule))
    return rows


def _plan_row(head: str, plan: ParallelPlan, took_s: float) -> str:
    exposed_ms = plan.exposed_forward_ms + plan.exposed_backward_ms
    resharded = sum(bool(u.reshard_after_forward) for u in plan.sharding.units)
    count = len(plan.sharding.units)
    mesh = " x ".join(map(str, plan.mesh_shape))
    return (
        f"{head}| autosac | {mesh}, {count} units, {resharded} reshard,"
        f" {len(plan.policy)} under AC | {plan.peak_bytes / GIB:.1f}"
        f" | {format_ms(plan.step_ms)} | {format_ms(plan.recompute_ms)}"
        f" | {format_ms(exposed_ms)} | {plan.optimality_gap:.1%} | {took_s:.0f} |"
    )


def _rule_row(
    head: str, form: ParallelFormulation, spec: ClusterSpec, rule: ByHand
) -> str:
    """What a rule gives at its best sharding degree."""
    plans = [at_degree(form, spec, degree, rule) for degree in _degrees(spec)]
    fitting = [one for one in plans if one.peak_bytes <= BUDGET_BYTES]
    best = min(fitting, key=lambda one: one.step_ms, default=None)
    if best is None:
        least = min(plans, key=lambda one: one.peak_bytes)
        peak = f"{least.peak_bytes / GIB:.1f}"
        return f"{head}| {rule.name} | too large | {peak} | | | | | |"
    mesh = f"{spec.num_gpus // best.degree} x {best.degree}"
    return (
        f"{head}| {rule.name} | {mesh} | {best.peak_bytes / GIB:.1f}"
        f" | {format_ms(best.step_ms)} | {format_ms(best.recompute_ms)}"
        f" | {format_ms(best.exposed_ms)} | | |"
    )


def _degrees(spec: ClusterSpec) -> list[int]:
    """What people choose from: one node, or all."""
    return sorted({min(spec.gpus_per_node, spec.num_gpus), spec.num_gpus})


def _heading() -> list[str]:
    return [
        "# Parallel plans of Llama 3 for H100 with 80 GB",
        "",
        "```",
        *(f"{key}: {value}" for key, value in environment().items()),
        "```",
        "",
        f"One sequence of {LENGTH} tokens a GPU, AdamW; parameters, gradients and"
        " optimizer state in bfloat16; `hgx-h100` nodes (NVLink inside, 400 Gb/s a GPU"
        f" between). The cap is {BUDGET_BYTES // GIB} GiB. All figures are predicted:"
        " the peak of a rank by simulation of FSDP2, the step by playing the roofline"
        " times of ops and the cost model of collectives event by event. *by hand*:"
        " every block one unit that reshards, the rest in the root unit; all of a block"
        " is recomputed, or all but its matrix products and attention; sharded within"
        " nodes or over all GPUs, whichever fits and is faster. *planned in*: CPU"
        " seconds of one thread, trace included. *gap*: to the proven bound at the"
        " mesh's sharding degree.",
        "",
        "| model | GPUs | plan | mesh and units | peak, GiB | step | recomputation |"
        " exposed communication | gap | planned in, CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    main()
