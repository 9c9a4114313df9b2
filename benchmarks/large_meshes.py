"""Llama 3 on meshes that others have trained on, with what they have measured.

    python -m benchmarks.large_meshes [--output DIR]

Meshes, batches and rules of recomputation are those that torchtitan has published for
H100 (benchmarks/llama3_h100_202412_torchtitan.md of its repository, without
torch.compile where there are figures of both; docs/performance.md for context
parallelism); memory and throughput are predicted for
exactly these, nothing is planned.

What is published is reserved memory, the most of any rank, with `expandable_segments`
(torchtitan/metrics.py and run_llama_train.sh at 9dec370). So each rank's allocations
are given to a model of PyTorch's allocator, those of FSDP2's streams apart. Stages have
as many blocks as `generate_split_points` gives them there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.nn import functional

import autosac
from autosac.devices.allocator_settings import AllocatorSettings
from autosac.parallel import cp_tracing
from autosac.parallel.clusters import ClusterSpec, cluster_spec
from autosac.parallel.formulating import ParallelFormulation, Setting
from autosac.parallel.mesh_racing import division_of
from autosac.parallel.preparing import in_gathered_type
from autosac.parallel.tp_finding import find_styles, with_divided_loss
from autosac.parallel.tp_styles import WHOLE, TensorParallel
from autosac.parallel.tp_tracing import fake_ranks, rank_profile
from autosac.pipelines.micro_batches import MicroBatch
from autosac.pipelines.playing import StageTimes, step_ms
from autosac.pipelines.rank_memory import RankReplay
from autosac.pipelines.schedules import INTERLEAVED, ONE_F_ONE_B, Schedule
from autosac.pipelines.sharded_stages import DataParallel
from autosac.pipelines.shared_sequences import context_of
from autosac.simulation import allocator_steps
from autosac.step.ledger import Ledger
from autosac.units import curves
from benchmarks.environment import cpu_s, environment
from benchmarks.parallel_plans import GIB, LENGTH, SIZES
from benchmarks.parallel_rules import (
    ALL_RECOMPUTED,
    HALF_SAVED,
    ByHand,
    at_degree,
    policy,
)
from benchmarks.stage_models import Llama

_ALLOCATOR = AllocatorSettings(expandable_segments=True)
_TYPES = Setting(param_dtype="bfloat16", reduce_dtype="float32")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A setting, and what was measured.

    Attributes:
        size: Of the model.
        stages: Ranks of the pipeline, under 1F1B,
        per_rank: or interleaved 1F1B, if each has several stages.
        fsdp: Ranks that share parameters.
        tp: Ranks that share slices.
        cp: Ranks that have parts of a sequence,
        length: and its tokens.
        rows: Sequences of a micro-batch,
        micro_batches: and how many of these a step has.
        rule: What is recomputed.
        asynchronous: Products hide collectives of tensor parallelism.
        gib: Peak of a rank,
        tokens: and tokens a second and GPU, that were measured.
        note: How it was, where that is not what is predicted.
    """

    size: str
    stages: int = 1
    per_rank: int = 1
    fsdp: int
    tp: int = 1
    cp: int = 1
    length: int = LENGTH
    rows: int
    micro_batches: int = 1
    rule: ByHand
    asynchronous: bool = False
    gib: float
    tokens: int
    note: str = ""

    @property
    def num_gpus(self) -> int:
        """Of all ranks."""
        return self.stages * self.fsdp * self.tp * self.cp

    @property
    def rank_tokens(self) -> int:
        """Of a step, for each GPU."""
        rows = self.rows * self.micro_batches
        return rows * self.length // (self.stages * self.tp * self.cp)


_HEADS = (
    "| model | mesh | micro-batches x sequences | recomputed or saved | GiB reserved,"
    " published | predicted | difference | allocated, predicted | tokens/s/GPU"
    " published | predicted | published with | CPU s |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)


class Predicted(NamedTuple):
    """What the stages' ranks allocate, and time of a step in ms."""

    ledgers: list[Ledger]
    step_ms: float


_LARGE = Published(
    size="70B",
    fsdp=32,
    tp=8,
    rows=16,
    rule=ALL_RECOMPUTED,
    asynchronous=True,
    gib=67.6,
    tokens=876,
    note="float8, compiled",
)
_LARGEST = Published(
    size="405B",
    stages=8,
    per_rank=2,
    fsdp=8,
    tp=8,
    rows=4,
    micro_batches=8,
    rule=ALL_RECOMPUTED,
    asynchronous=True,
    gib=72.7,
    tokens=128,
    note="float8, compiled",
)
SETTINGS = (
    Published(size="8B", fsdp=8, rows=2, rule=HALF_SAVED, gib=82.4, tokens=5762),
    Published(size="8B", fsdp=128, rows=2, rule=HALF_SAVED, gib=67.0, tokens=5605),
    _LARGE,
    replace(_LARGE, asynchronous=False, gib=71.9, tokens=829),
    _LARGEST,
    replace(_LARGEST, per_rank=1, gib=82.5, tokens=100),
)


_LONG = partial(
    Published, size="8B", rows=1, rule=ALL_RECOMPUTED, note="float8, compiled"
)
SEQUENCES = (
    _LONG(fsdp=8, cp=1, length=32768, gib=83.9, tokens=3890),
    _LONG(fsdp=4, cp=2, length=65536, gib=84.2, tokens=2540),
    _LONG(fsdp=2, cp=4, length=131072, gib=84.0, tokens=1071),
    _LONG(fsdp=1, cp=8, length=262144, gib=84.5, tokens=548),
)
_LONGEST = partial(
    Published,
    size="405B",
    stages=8,
    tp=8,
    rows=1,
    micro_batches=8,
    rule=ALL_RECOMPUTED,
    asynchronous=True,
    note="float8, compiled",
)
STAGES_OF_PARTS = (
    _LONGEST(fsdp=8, cp=1, length=32768, gib=75.3, tokens=76),
    _LONGEST(fsdp=4, cp=2, length=65536, gib=75.9, tokens=47),
    _LONGEST(fsdp=2, cp=4, length=131072, gib=77.1, tokens=31),
    _LONGEST(fsdp=1, cp=8, length=262144, gib=84.9, tokens=16),
)


class Positioned(nn.Module):
    """Llama of Transformers, tokens and their positions -> logits."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        output = self.llama(
            input_ids=tokens, position_ids=position_ids, use_cache=False
        )
        logits: torch.Tensor = output.logits
        return logits


def llama(name: str, length: int = LENGTH, *, is_chain: bool = True) -> nn.Module:
    """The model on the meta device, in 32 bits.

    Args:
        name: Its size.
        length: Tokens of a sequence.
        is_chain: Of blocks that work out where they are; else the model takes that.
    """
    size = SIZES[name]
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=8,
        max_position_embeddings=length,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = Llama(config) if is_chain else Positioned(config)
        return model.train()


def loss_of(target: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Of all tokens, or of a part of them."""
    target = target[:, : logits.shape[1]]
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next tokens, as a pipeline has it."""
    return loss_of(target, logits)


def predicted(setting: Published) -> Predicted:
    """Memory and time of a setting."""
    is_chain = setting.stages > 1 or setting.length == LENGTH
    model = llama(setting.size, setting.length, is_chain=is_chain)
    tokens = torch.zeros(setting.rows, setting.length, dtype=torch.int64)
    spec = cluster_spec("hgx-h100", num_gpus=setting.num_gpus)
    tensor = WHOLE
    if setting.tp > 1:
        styles = with_divided_loss(find_styles(model, sequence=True))
        tensor = TensorParallel(
            degree=setting.tp, styles=styles, asynchronous=setting.asynchronous
        )
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "device": spec.device}
    if setting.stages > 1:
        micro_batch = MicroBatch(
            model=model,
            inputs=tokens,
            target=tokens,
            loss_fn=token_loss,
            options=options,
            cluster=spec,
            parallel=DataParallel(
                shard_degree=setting.fsdp,
                param_dtype=_TYPES.param_dtype,
                reduce_dtype=_TYPES.reduce_dtype,
            ),
        )
        context = context_of(micro_batch, setting.cp, "ring")
        division = division_of(tensor, context)
        with fake_ranks(division.degree, divides_loss=tensor.divides_loss):
            return _of_stages(setting, micro_batch.on_rank(division, micro_batch))
    profile = autosac.profile(
        model, tokens, loss_fn=partial(loss_of, tokens), **options
    )
    profile = _of_rank(setting, profile, tensor, spec)
    node = spec.gpus_per_node // setting.tp
    outcome = at_degree(
        ParallelFormulation(profile, _TYPES),
        replace(spec, gpus_per_node=node),
        setting.fsdp * setting.cp,
        setting.rule,
    )
    return Predicted([outcome.ledger], outcome.step_ms)


def reserved_bytes(ledger: Ledger) -> int:
    """What PyTorch's allocator reserves for a rank in the first steps."""
    nbytes = ledger.constant_bytes
    for part in ledger.by_stream():
        replayed = allocator_steps.replay(part, settings=_ALLOCATOR)
        nbytes += replayed.peak_reserved_bytes
    return nbytes


def _of_rank(
    setting: Published,
    profile: autosac.Profile,
    tensor: TensorParallel,
    spec: ClusterSpec,
) -> autosac.Profile:
    """The step of a rank, in the type of gathered parameters."""
    if setting.tp > 1:
        return rank_profile(profile, tensor, spec, _TYPES)
    if setting.cp > 1:
        context = cp_tracing.context_of(profile, setting.cp, "ring")
        return cp_tracing.rank_profile(profile, context, spec, _TYPES)
    return in_gathered_type(profile, _TYPES)


def _of_stages(setting: Published, micro_batch: MicroBatch) -> Predicted:
    """Stages of as many blocks each, embedding and head counted as one each."""
    schedule = Schedule(
        name=INTERLEAVED if setting.per_rank > 1 else ONE_F_ONE_B,
        num_ranks=setting.stages,
        num_micro_batches=setting.micro_batches,
        stages_per_rank=setting.per_rank,
    )
    size, number = len(micro_batch.chain) - 1, schedule.num_stages
    ends = [size * (i + 1) // number for i in range(number)]
    ends[-1] += 1  # the norm goes with the head
    steps, chosen, times = {}, {}, []
    for stage, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        is_inner = 0 < stage < number - 1
        # Inner stages are alike.
        own = (ends[0], ends[0] + end - first) if is_inner else (first, end)
        step = steps[stage] = micro_batch.step(*own)
        later = step.later
        layers = [u for u in later.candidates if u.fqn.rpartition(".")[2].isdigit()]
        chosen[stage] = {u: policy(later.tape, u, setting.rule) for u in layers}
        gather_ms, reduce_ms = micro_batch.sharding_ms(tuple(range(*own)))
        rerun_ms = sum(curves.recompute_ms(*pair) for pair in chosen[stage].items())
        times.append(
            StageTimes(
                forward_ms=step.phase_ms["forward"],
                backward_ms=step.phase_ms["backward"] + rerun_ms,
                optimizer_ms=step.phase_ms["optimizer"] + reduce_ms,
                gather_ms=gather_ms,
                send_ms=micro_batch.send_ms(
                    (schedule.rank_of(stage), schedule.rank_of(stage + 1)),
                    own[1] if is_inner else end,
                ),
            )
        )
    ledgers = []
    for rank in range(setting.stages):
        own_steps = {stage: steps[stage] for stage in schedule.stages_of(rank)}
        ledgers.append(RankReplay(schedule, rank, own_steps).ledger(chosen))
    return Predicted(ledgers, step_ms(schedule, times))


def main() -> None:
    """Predict all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [*_heading(), *_table(SETTINGS), "", *_sequences(), *_table(SEQUENCES)]
    lines += ["", *_stages_of_parts(), *_table(STAGES_OF_PARTS)]
    path = options.output / "large_meshes.md"
    path.write_text("\n".join(lines) + "\n")


def _table(settings: Sequence[Published]) -> list[str]:
    """Lines of settings, fastest by measurement first, and whether they come so."""
    lines, throughputs = list(_HEADS), []
    for setting in settings:
        began = cpu_s()
        own = predicted(setting)
        throughputs.append(1e3 * setting.rank_tokens / own.step_ms)
        line = _line(setting, own, throughputs[-1], cpu_s() - began)
        print(line, flush=True)
        lines.append(line)
    pairs = list(combinations(throughputs, 2))
    in_order = sum(first > second for first, second in pairs)
    return [
        *lines,
        "",
        f"{in_order} of {len(pairs)} pairs have the order of what was measured.",
    ]


def _line(setting: Published, own: Predicted, rate: float, took_s: float) -> str:
    peak = max(map(reserved_bytes, own.ledgers)) / GIB
    allocated = [f"{x.timeline().peak_bytes / GIB:.1f}" for x in own.ledgers]
    mesh = {"pp": setting.stages, "fsdp": setting.fsdp, "cp": setting.cp}
    mesh["tp"] = setting.tp
    how = f", {setting.per_rank} stages a rank" * (setting.per_rank > 1)
    how += ", asynchronous" * setting.asynchronous
    cells = [
        setting.size,
        " x ".join(f"{size} {name}" for name, size in mesh.items() if size > 1) + how,
        f"{setting.micro_batches} x {setting.rows}",
        setting.rule.name.partition(", ")[2],
        f"{setting.gib:.1f}",
        f"{peak:.1f}",
        f"{peak / setting.gib - 1:+.0%}",
        ", ".join(allocated),
        f"{setting.tokens:,}",
        f"{rate:,.0f}",
        setting.note,
        f"{took_s:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _heading() -> list[str]:
    return [
        "# Llama 3 on meshes that others have trained on",
        "",
        "```",
        *(f"{key}: {value}" for key, value in environment().items()),
        "```",
        "",
        f"Sequences of {LENGTH} tokens, AdamW, parameters in 32 bits, gathered in"
        " bfloat16, gradients reduced in 32 bits. *published*: torchtitan's, on H100"
        " with 96 GB and 500 W. *predicted*: of all ranks the most, by replay, for"
        " `hgx-h100`, in bfloat16: float8 and compilation are not modelled, and of"
        " *asynchronous* tensor parallelism the time alone (`parallel/async_tp.py`)."
        " With tensor parallelism sequences are divided between blocks, and logits for"
        " the loss; *2 stages a rank* are interleaved 1F1B. *reserved*: by PyTorch's"
        " allocator, with expandable segments, of which *allocated* is in use, of each"
        " rank of the pipeline.",
        "",
    ]


def _sequences() -> list[str]:
    return [
        "## Parts of sequences",
        "",
        "8B over 8 GPUs with context parallelism, 32,768 tokens a rank (torchtitan,"
        " docs/performance.md, table 2). Predicted for ring attention whose parts are"
        " sent on one by one, in bfloat16 and not compiled.",
        "",
    ]


def _stages_of_parts() -> list[str]:
    return [
        "## Stages of parts of sequences",
        "",
        "405B over 512 GPUs (torchtitan, docs/performance.md, table 6), 32,768 tokens a"
        " rank of 8 stages and 8 tp, under 1F1B, likewise.",
        "",
    ]


if __name__ == "__main__":
    main()
