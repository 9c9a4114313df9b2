"""Ranks of FSDP2 with tensor or context parallelism that really run, and their peaks.

    python -m benchmarks.mesh_ranks [--models LLAMA,GPT] [--bfloat16] [--output DIR]

`plan_parallel` plans each model for 2 ranks (tp=2) and for 4 (2 shards or 2 replicas x
tp=2), with and without parts of the sequence between blocks, one of them with a loss of
divided logits as well, and with parts of the sequence all the time (cp=2), or both at
once (cp=2 x tp=2), each under three caps: near the least peak, and at a third and two
thirds of the way to the fastest plan's. Every rank is a process that gloo connects
(`rank_server`); two of them get one batch, or four with both. What it holds is counted
by `allocator_shim.c` on all threads, to the byte; it takes a C compiler. oneDNN is
switched off: it keeps memory between steps that no plan knows of.
Exits with 1 if a rank is above its cap, above its prediction or below it by over 1 %,
or if losses or gradients differ from those of one process. Rows of models that are not
run stay in the table.

With ``--bfloat16`` some kinds run in that type, in a table of their own: as FSDP2's
mixed precision, and under autocast, under the fastest plan's cap as well. One process
rounds otherwise, so that losses and gradients are held against those of ranks that
recompute nothing, bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

import autosac
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.plans import ParallelPlan
from autosac.profiles.profile import Profile
from autosac.step.training_step import finish_step, micro_step
from benchmarks import allocator_shim, rank_server
from benchmarks.kept_promises import (
    EXPERT,
    GIVEN,
    KINDS,
    LARGEST_DIFFERENCE,
    LINKS,
    LOSS,
    NUM_STEPS,
    SHARES,
    TRUTH,
    Outcome,
    differences,
    divided_by,
    under_caps,
    write_table,
)
from benchmarks.models.workload import labelled
from benchmarks.rank_models import (
    GPT,
    IMAGE,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Convolutional,
    VariedGPT,
)
from benchmarks.ranks import Recipe, reference

MESHES = ((2, 1), (4, 2), (4, 1))  # ranks, and over how many pairs of them FSDP2 shards
CONTEXT = "context"  # the kind whose ranks have parts of the sequence
MIXED, AUTOCAST = "bfloat16", "autocast"  # FSDP2 gathers in that type; or autocast
BOTH = tuple(f"{CONTEXT} and {kind}" for kind in (*KINDS, LOSS))  # and share slices
_BATCH = 4


def _llama(num_heads: int = 6) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).train()
    return model


def _labelled() -> dict[str, torch.Tensor]:
    return labelled(VOCABULARY, _BATCH, LENGTH)


def _tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (_BATCH, LENGTH))


def _odd_tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY + 3, (_BATCH, LENGTH))


def _images() -> torch.Tensor:
    return torch.randn(_BATCH, 3, IMAGE, IMAGE)


def _mean_softplus(output: Any) -> torch.Tensor:
    return functional.softplus(output.float()).mean()


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        num_hidden_layers=3,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,  # of which comes a loss of its own
        experts_implementation="grouped_mm",
        use_cache=False,
    )
    model: nn.Module = transformers.MixtralForCausalLM(config).train()
    return model


def _uneven() -> nn.Module:
    """Mixtral whose routers at first send all tokens to the same two experts."""
    model = _mixtral()
    for name, parameter in model.named_parameters():
        if name.endswith(".gate.weight"):
            nn.init.zeros_(parameter)
    return model


RECIPES = {
    "LLAMA": Recipe(make_model=_llama, make_inputs=_labelled),
    "MIXTRAL": Recipe(make_model=_mixtral, make_inputs=_labelled),
    "UNEVEN": Recipe(make_model=_uneven, make_inputs=_labelled),
    "GPT": Recipe(make_model=GPT, make_inputs=_tokens, loss_fn=_mean_softplus),
    "ODD": Recipe(
        make_model=partial(GPT, vocabulary=VOCABULARY + 3),
        make_inputs=_odd_tokens,
        loss_fn=_mean_softplus,
    ),
    "VARIED": Recipe(make_model=VariedGPT, make_inputs=_tokens, loss_fn=_mean_softplus),
    "CONV": Recipe(
        make_model=Convolutional, make_inputs=_images, loss_fn=_mean_softplus
    ),
    # With heads for two ranks that have slices and parts of the sequence each.
    "LLAMA8": Recipe(make_model=partial(_llama, 8), make_inputs=_labelled),
    "GPT8": Recipe(
        make_model=partial(GPT, 12), make_inputs=_tokens, loss_fn=_mean_softplus
    ),
}
_KINDS_OF = {
    "LLAMA": (*KINDS, LOSS, CONTEXT),
    "MIXTRAL": (*KINDS, EXPERT),
    "UNEVEN": (EXPERT,),
    "GPT": (*KINDS, CONTEXT),
    "ODD": (GIVEN,),
    "VARIED": KINDS,
    "CONV": KINDS[:1],
    "LLAMA8": BOTH,
    "GPT8": BOTH[:2],
}
_IN_BFLOAT16 = {
    name: tuple(f"{kind}, {types}" for types in (MIXED, AUTOCAST))
    for name, kind in (("LLAMA", CONTEXT), ("MIXTRAL", EXPERT), ("LLAMA8", BOTH[1]))
}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One plan.

    Attributes:
        model: Name of the recipe.
        kind: "tensor", "sequence", `GIVEN`, `EXPERT`, `LOSS`, `CONTEXT` or one of
            `BOTH`; some with `MIXED` or `AUTOCAST`.
        plan: What was planned.
    """

    model: str
    kind: str
    plan: ParallelPlan

    @property
    def types(self) -> str:
        """`MIXED`, `AUTOCAST` or nothing."""
        return self.kind.partition(", ")[2]

    def without_units(self) -> Planned:
        """The same with nothing recomputed."""
        return replace(self, plan=replace(self.plan, op_policies=()))


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


def planned(
    name: str, num_ranks: int, degree: int, kinds: Sequence[str] = ()
) -> Iterator[Planned]:
    """Plans of a model for so many ranks, some of which see one batch.

    Args:
        name: Of the recipe.
        num_ranks: Of all.
        degree: Such groups of ranks over which FSDP2 shards.
        kinds: Which, if not all; those that need more ranks are left out.
    """
    kinds = [
        kind
        for kind in kinds or _KINDS_OF[name]
        if num_ranks >= degree * (4 if kind.partition(", ")[0] in BOTH else 2)
    ]
    profiles: dict[str, Profile] = {}
    for kind in kinds:
        own, _, types = kind.partition(", ")
        autocast = torch.bfloat16 if types == AUTOCAST else None
        if str(autocast) not in profiles:
            traced = RECIPES[name].profile(autocast)
            profiles[str(autocast)] = autosac.calibrate(traced)
        profile = profiles[str(autocast)]
        make_plan = partial(_plan, profile, num_ranks, degree, own, types)
        shares = (*SHARES, 1.0) if types else SHARES
        for plan in under_caps(make_plan, shares):
            yield Planned(model=name, kind=kind, plan=plan)


def _plan(
    profile: Profile, num_ranks: int, degree: int, kind: str, types: str, cap: int
) -> ParallelPlan:
    links = cluster_spec(LINKS, num_gpus=num_ranks)
    division: dict[str, Any]
    if kind == CONTEXT:  # whose ranks FSDP2 shards over as well
        division = {"mesh": {"cp": 2}, "degrees": [2 * degree]}
    elif kind in BOTH:
        shared = divided_by(kind.removeprefix(f"{CONTEXT} and "))
        division = {"mesh": {"cp": 2, "tp": 2}, "degrees": [2 * degree], **shared}
    else:
        division = {"mesh": {"tp": 2}, "degrees": [degree], **divided_by(kind)}
    if types == MIXED:
        division |= {"param_dtype": MIXED, "reduce_dtype": "float32"}
    return autosac.plan_parallel(
        profile,
        cluster=replace(links, device=device_spec("cpu")),
        memory_budget=cap,
        **division,
    )


def run_ranks(cells: list[Planned], num_ranks: int) -> list[Outcome]:
    """Run plans one after the other on the same processes."""
    twins = [cell.without_units() for cell in cells if cell.types]
    measured = rank_server.run_ranks(
        _run_all, num_ranks, [*cells, *twins], timeout_s=1800
    )
    results = [list(of_cell) for of_cell in zip(*measured, strict=True)]
    with torch.backends.mkldnn.flags(enabled=False):
        truths = {
            (name, seen): reference(RECIPES[name], num_ranks // seen)
            for name, seen in {
                (c.model, c.plan.division.degree) for c in cells if not c.types
            }
        }
    of_twins = iter(results[len(cells) :])
    return [
        _outcome(cell, own, *_whole(cell, next(of_twins)))
        if cell.types
        else _outcome(cell, own, *truths[cell.model, cell.plan.division.degree])
        for cell, own in zip(cells, results, strict=False)
    ]


def _whole(
    cell: Planned, results: list[RankResult]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the batches and gradients, as ranks have them."""
    losses = _losses(cell.plan, results)
    return losses[:: cell.plan.division.degree], results[0].gradients


def _losses(plan: ParallelPlan, results: list[RankResult]) -> list[float]:
    """Of the batch that each rank sees."""
    own, seen = [result.loss for result in results], plan.division.degree
    if plan.context.degree > 1:  # each has that of its part
        groups = (own[i : i + seen] for i in range(0, len(own), seen))
        own = [sum(group) / seen for group in groups for _ in group]
    return own


def _outcome(
    cell: Planned,
    results: list[RankResult],
    losses: list[float],
    gradients: dict[str, torch.Tensor],
) -> Outcome:
    plan = cell.plan
    dimensions = zip(plan.mesh_dim_names, plan.mesh_shape, strict=True)
    seen = plan.division.degree
    pairs = [
        (loss, losses[rank // seen]) for rank, loss in enumerate(_losses(plan, results))
    ]
    return Outcome(
        label={
            "model": cell.model,
            "mesh": " x ".join(f"{size} {dimension}" for dimension, size in dimensions),
            "kind": cell.kind,
            "AC units": str(len(plan.policy)),
        },
        cap=plan.budget_bytes,
        predicted=(plan.peak_bytes,),
        late_bytes=plan.late_bytes,
        most_difference=0.0 if cell.types else LARGEST_DIFFERENCE,
        **differences(results, pairs, gradients),
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
    batch = recipe.inputs(dist.get_rank() // plan.division.degree)
    args, kwargs = plan.part_of(batch, mesh)  # beside it, as in a loop
    autocast = torch.bfloat16 if cell.types == AUTOCAST else None
    peaks = []
    for number in range(NUM_STEPS):
        gc.collect()
        dist.barrier()
        allocator_shim.reset()
        with loss_parallel() if plan.tensor.divides_loss else nullcontext():
            loss = micro_step(
                model,
                args,
                kwargs,
                loss_fn=recipe.loss_fn,
                autocast=autocast,
                accumulate=1,
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
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # as ranks have it
    kinds = _IN_BFLOAT16 if options.bfloat16 else _KINDS_OF
    names = [name for name in options.models.split(",") if name in kinds]
    rows: list[Outcome] = []
    for num_ranks, degree in MESHES:
        for name in names:  # groups of meshes have threads that never sleep for long
            cells = list(planned(name, num_ranks, degree, kinds[name]))
            rows += run_ranks(cells, num_ranks) if cells else []
    title = "Ranks of FSDP2 x context x tensor parallelism"
    path, truth = options.output / "mesh_ranks.md", TRUTH
    if options.bfloat16:
        title, path = f"{title} in bfloat16", path.with_stem("mesh_ranks_bfloat16")
        truth = "those of ranks that recompute nothing, bit by bit"
    is_kept = write_table(path, title, rows, truth=truth)
    print(path.read_text())
    return 0 if is_kept else 1


if __name__ == "__main__":
    from benchmarks import mesh_ranks  # ranks import what they run from a module

    sys.exit(mesh_ranks.main())
