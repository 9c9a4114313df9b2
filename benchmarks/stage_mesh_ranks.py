"""Ranks of pipelines whose stages lie on one or several: caps, peaks, gradients.

    python -m benchmarks.stage_mesh_ranks [--models LLAMA,GPT,ODD] [--output DIR]
        [--schedules 1F1B,GPipe] [--dimension cp] [--shares 0.03,0.5]

`plan_pipeline` plans models of 2 stages (4 under ``Interleaved1F1B``) for 2 ranks, for
4 and for 8 (`CASES`): FSDP2 shards each stage, copies of it train on batches of their
own, ranks share slices of tensors with or without parts of the sequence between blocks
and with losses of divided logits, or have parts of the sequence all the time, FSDP2
with slices, and with mixed precision, whose truth is one process that computes in that
type; some have activations in far memory, a file. With ``--dimension`` only meshes that
have it are planned, else those without ``cp``. Each is planned under three caps: near
the least peak, and at a third and two thirds of the way to the fastest plan's, or at
other ``--shares`` of that way. Each schedule has a table, which is written as rows
come; rows of models that are not run stay in it.
Ranks are processes that gloo connects (`stage_ranks`). What they hold is counted by
`allocator_shim.c` on all threads, to the byte; it takes a C compiler. oneDNN is
switched off: it keeps memory between steps that no plan knows of.
Exits with 1 if a rank is above its cap, above its prediction or below it by over 1 %,
or if losses or gradients differ from those of one process.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import autosac
from autosac._compat_pipelining import HOLDS_LESS
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from autosac.pipelines.plans import PipelinePlan
from autosac.pipelines.schedules import GPIPE, INTERLEAVED, ONE_F_ONE_B
from autosac.quantities import format_bytes
from benchmarks.kept_promises import (
    EXPERT,
    GIVEN,
    KINDS,
    LARGEST_ERROR,
    LINKS,
    LOSS,
    NUM_STEPS,
    SHARES,
    Outcome,
    differences,
    divided_by,
    under_caps,
    write_table,
)
from benchmarks.kept_traces import kept_traces
from benchmarks.rank_models import (
    IMAGE,
    LENGTH,
    NUM_CLASSES,
    VOCABULARY,
    Convolutional,
)
from benchmarks.stage_models import (
    GPT,
    OddGPT,
    TiedGPT,
    VariedGPT,
    small_llama,
    small_mixtral,
    token_loss,
)
from benchmarks.stage_ranks import (
    SEED,
    Job,
    RankResult,
    Recipe,
    reference,
    run_jobs,
)

NUM_STAGES, NUM_MICRO_BATCHES = 2, 4
_ROWS = 2  # of a micro-batch
_LARGE = 2**40
_SCHEDULES = f"{ONE_F_ONE_B},{GPIPE},{INTERLEAVED}"
_TITLE = "Ranks of pipelines whose stages lie on one or several"
# What torch 2.15 lets go of earlier than others is an upper bound.
_MOST = math.inf if HOLDS_LESS else LARGEST_ERROR


def _batch(num_micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = num_micro_batches * _ROWS, LENGTH + 1
    tokens = torch.randint(VOCABULARY, size, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _images(num_micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    number = num_micro_batches * _ROWS
    images = torch.randn(number, 3, IMAGE, IMAGE, generator=generator)
    return images, torch.randint(NUM_CLASSES, (number,), generator=generator)


RECIPES = {
    "LLAMA": Recipe(make_model=small_llama, make_batch=_batch, loss_fn=token_loss),
    "MIXTRAL": Recipe(make_model=small_mixtral, make_batch=_batch, loss_fn=token_loss),
    "GPT": Recipe(make_model=GPT, make_batch=_batch, loss_fn=token_loss),
    "ODD": Recipe(make_model=OddGPT, make_batch=_batch, loss_fn=token_loss),
    "VARIED": Recipe(make_model=VariedGPT, make_batch=_batch, loss_fn=token_loss),
    "CONV": Recipe(
        make_model=Convolutional,
        make_batch=_images,
        loss_fn=functional.cross_entropy,
    ),
    "TIED": Recipe(make_model=TiedGPT, make_batch=_batch, loss_fn=token_loss),
    # With heads for two ranks that have slices and parts of the sequence each.
    "LLAMA8": Recipe(
        make_model=partial(small_llama, num_heads=8),
        make_batch=_batch,
        loss_fn=token_loss,
    ),
    "GPT8": Recipe(
        make_model=partial(GPT, head_dim=12), make_batch=_batch, loss_fn=token_loss
    ),
}
MIXED = "bfloat16"  # the kind of plans that gather in that type, and reduce in 32 bits
OFFLOAD = "offload"  # the kind of plans that may have activations in a file
_OPTIONS: dict[str, dict[str, Any]] = {
    MIXED: {"param_dtype": MIXED, "reduce_dtype": "float32"},
    OFFLOAD: {"offload": True},
}
# On each of pp, pp x fsdp, pp x tp and pp x fsdp x tp: like and unlike blocks, experts,
# an odd vocabulary, convolutions.
_SIX = ("LLAMA", "MIXTRAL", "GPT", "ODD", "VARIED", "CONV")
# Models, ranks of a stage, and kinds of tensor parallelism.
CASES: tuple[tuple[str, dict[str, int], str], ...] = (
    *((name, {"tp": 2}, kind) for name in ("LLAMA", "GPT") for kind in KINDS),
    ("LLAMA", {"tp": 2}, LOSS),
    *(("MIXTRAL", {"tp": 2}, kind) for kind in ("sequence", EXPERT)),
    ("MIXTRAL", {"fsdp": 2, "tp": 2}, EXPERT),
    *((name, {}, "") for name in _SIX),
    *((name, {"fsdp": 2}, "") for name in _SIX),
    *(
        (name, {**shards, "tp": 2}, kind)
        for shards in ({}, {"fsdp": 2})
        for name, kind in (("ODD", GIVEN), ("VARIED", "sequence"), ("CONV", "tensor"))
    ),
    *((name, {"fsdp": 2}, MIXED) for name in ("GPT", "ODD")),
    ("GPT", {"replicate": 2}, ""),
    *((name, {}, OFFLOAD) for name in ("LLAMA", "ODD")),
    *((name, {"fsdp": 2}, OFFLOAD) for name in ("LLAMA", "GPT")),
    ("LLAMA", {"fsdp": 2, "tp": 2}, "sequence"),
    ("LLAMA", {"fsdp": 2, "tp": 2}, LOSS),
    ("GPT", {"fsdp": 2, "tp": 2}, "tensor"),
    ("ODD", {"replicate": 2, "fsdp": 2}, ""),
    *((name, {"cp": 2}, "") for name in ("LLAMA", "GPT", "ODD", "VARIED")),
    *((name, {"fsdp": 2, "cp": 2}, "") for name in ("LLAMA", "VARIED")),
    ("ODD", {"replicate": 2, "cp": 2}, ""),
    *(("LLAMA8", {"cp": 2, "tp": 2}, kind) for kind in (*KINDS, LOSS)),
    ("GPT8", {"cp": 2, "tp": 2}, "tensor"),
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One plan.

    Attributes:
        model: Name of the recipe.
        kind: "tensor", "sequence", `GIVEN`, `EXPERT`, `LOSS`, `MIXED`,
            `OFFLOAD` or nothing.
        plan: What was planned.
    """

    model: str
    kind: str
    plan: PipelinePlan


def planned(
    name: str,
    schedule: str,
    mesh: Mapping[str, int],
    kind: str = "",
    shares: Sequence[float] = SHARES,
) -> Iterator[Planned]:
    """Plans of a model under several caps.

    Args:
        name: Of the recipe.
        schedule: Its name.
        mesh: Ranks of a stage, by dimension.
        kind: "tensor", "sequence", `GIVEN`, `EXPERT`, `LOSS`, `MIXED`,
            `OFFLOAD` or nothing.
        shares: As in `under_caps`.
    """
    for plan in under_caps(partial(_plan, name, schedule, mesh, kind), shares):
        yield Planned(model=name, kind=kind, plan=plan)


@torch.backends.mkldnn.flags(enabled=False)
def _plan(
    name: str, schedule: str, mesh: Mapping[str, int], kind: str, cap: int
) -> PipelinePlan:
    recipe = RECIPES[name]
    torch.manual_seed(SEED)
    inputs, target = recipe.make_batch(NUM_MICRO_BATCHES)
    links = cluster_spec(LINKS, num_gpus=NUM_STAGES * math.prod(mesh.values()))
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
        mesh=mesh,
        **_OPTIONS.get(kind) or divided_by(kind),
        optimizer=recipe.make_optimizer,
    )


def run(cell: Planned) -> Outcome:
    """Run one plan, and hold it against one process."""
    (outcome,) = run_all([cell])
    return outcome


def run_all(cells: Sequence[Planned]) -> list[Outcome]:
    """The same with plans of one model on one mesh, one after the other."""
    jobs = [
        Job(
            recipe=RECIPES[cell.model],
            schedule=cell.plan.pipeline,
            starts=(),
            plan=cell.plan,
            num_steps=NUM_STEPS,
        )
        for cell in cells
    ]
    truth = reference(jobs[0])
    return [
        _outcome(cell, results, *truth)
        for cell, results in zip(cells, run_jobs(jobs), strict=True)
    ]


def _outcome(
    cell: Planned,
    results: Sequence[RankResult],
    losses: list[float],
    gradients: dict[str, torch.Tensor],
) -> Outcome:
    plan = cell.plan
    # Every rank of the last stage has those of its share of the batch.
    pairs = [
        (loss, losses[result.share * NUM_MICRO_BATCHES + i])
        for result in results
        for i, loss in enumerate(_of_whole(result, results))
    ]
    stages = plan.stage_plans
    dimensions = zip(plan.mesh_dim_names, plan.mesh_shape, strict=True)
    return Outcome(
        label={
            "model": cell.model,
            "mesh": " x ".join(f"{size} {dimension}" for dimension, size in dimensions),
            "kind": cell.kind,
            "schedule": plan.pipeline.name,
            "blocks": " + ".join(str(len(stage.fqns)) for stage in stages),
            "AC units": " + ".join(str(len(stage.policy)) for stage in stages),
            "in files": " + ".join(format_bytes(stage.far_bytes) for stage in stages),
        },
        cap=plan.budget_bytes,
        predicted=plan.rank_peaks,
        late_bytes=max(stage.late_bytes for stage in stages),
        most_error=_MOST,
        **differences(results, pairs, gradients),
    )


def _of_whole(result: RankResult, results: Sequence[RankResult]) -> list[float]:
    """Losses of whole sequences of which a rank has a part: means over all parts."""
    parts = {own.part: own.losses for own in results if own.share == result.share}
    parts[result.part] = result.losses
    columns = zip(*parts.values(), strict=True) if result.losses else ()
    return [sum(losses) / len(losses) for losses in columns]


def _refused(name: str, mesh: Mapping[str, int]) -> str:
    """Why a model is not planned, in a line of the table's notes."""
    try:
        _plan(name, GPIPE, mesh, "", _LARGE)
    except autosac.AutosacError as error:
        return f"{name} with {mesh} is refused: {error}"
    raise AssertionError(f"{name} is planned.")


def main() -> int:
    """Plan, run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(RECIPES))
    parser.add_argument("--schedules", default=_SCHEDULES)
    parser.add_argument("--dimension", default="")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    is_kept = [_table(schedule, options) for schedule in options.schedules.split(",")]
    return 0 if all(is_kept) else 1


def _table(schedule: str, options: argparse.Namespace) -> bool:
    """Plan and run under one schedule; the table is written as its rows come."""
    path = options.output / f"stage_mesh_ranks_{schedule}.md"
    if options.dimension:
        path = path.with_stem(f"{path.stem}_{options.dimension}")
    notes = (
        f"{NUM_STAGES * (1 + (schedule == INTERLEAVED))} stages, {NUM_MICRO_BATCHES}"
        " micro-batches for each replica and shard. *predicted*, *measured*: of the"
        " ranks of each place in the pipeline.",
        _refused("TIED", {"fsdp": 2}),
    )
    shares = [*map(float, options.shares.split(","))]
    is_kept, rows = True, list[Outcome]()
    for name, mesh, kind in _cases(options):
        with kept_traces():
            cells = [*planned(name, schedule, mesh, kind, shares)]
        rows += run_all(cells)
        is_kept = write_table(path, _TITLE, rows, *notes)
        print(*(row.cells for row in rows[-len(cells) :]), sep="\n", flush=True)
    return is_kept


def _cases(
    options: argparse.Namespace,
) -> Iterator[tuple[str, Mapping[str, int], str]]:
    """What is planned for one table: model, mesh and kind."""
    for name, mesh, kind in CASES:
        # Meshes with parts of sequences are in tables of their own.
        is_asked = options.dimension in mesh if options.dimension else "cp" not in mesh
        if name in options.models.split(",") and is_asked:
            yield name, mesh, kind


if __name__ == "__main__":
    from benchmarks import stage_mesh_ranks  # ranks import what they run from a module

    sys.exit(stage_mesh_ranks.main())
