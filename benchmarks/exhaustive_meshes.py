"""Meshes, cuts, micro-batches and recomputation that are planned, against all others.

    python -m benchmarks.exhaustive_meshes [--models MLP,GPT] [--output DIR]

Toys whose choices can be tried one by one, on four GPUs (or two of them) with links
that take time: every mesh of stages, replicas, shards and slices with and without parts
of the sequence, every number of micro-batches under 1F1B and GPipe, all cuts, and for
every stage all choices of its AC units' points, each replayed as a rank. The fastest
of them that fits is held against what `plan_pipeline` chooses.
Exits with 1 if that is slower by over 0.5 %.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac.devices.specs import device_spec
from autosac.parallel.clusters import ClusterSpec, cluster_spec
from autosac.parallel.mesh_racing import divisions
from autosac.parallel.tp_styles import TensorParallel
from autosac.parallel.tp_tracing import fake_ranks
from autosac.pipelines.constant_memory import besides_bytes
from autosac.pipelines.mesh_choosing import parts
from autosac.pipelines.micro_batches import MicroBatch, rows_of
from autosac.pipelines.planning import given_batch
from autosac.pipelines.playing import StageTimes, step_ms
from autosac.pipelines.rank_memory import RankReplay
from autosac.pipelines.schedule_racing import Race
from autosac.pipelines.schedules import GPIPE, ONE_F_ONE_B, Schedule, can_have
from autosac.pipelines.sharded_stages import DataParallel
from autosac.pipelines.stage_steps import StageStep
from autosac.solving.rules_of_thumb import Choice
from benchmarks.environment import MIB, environment
from benchmarks.kept_promises import under_caps
from benchmarks.kept_traces import kept_traces
from benchmarks.stage_models import GPT, token_loss

MOST_SLOWER = 0.005
NUM_GPUS, ROWS, LENGTH, WIDTH, VOCABULARY = 4, 4, 32, 32, 64
SHARES = (0.1, 0.4, 0.7)  # of the way from the least peak to the fastest plan's
OPEN: dict[str, int | None] = {"pp": None, "replicate": None, "fsdp": None, "tp": None}


class Mlp(nn.Module):
    """A residual block."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, factor * WIDTH)
        self.down = nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


def mlps(*factors: int) -> nn.Module:
    """Blocks between an embedding and a head."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *map(Mlp, factors),
        nn.Linear(WIDTH, VOCABULARY, bias=False),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "like blocks": partial(mlps, 4, 4, 4),
    "unlike blocks": partial(mlps, 1, 6, 2),
    "a block of GPT": partial(GPT, vocabulary=VOCABULARY, num_blocks=1),
}


@dataclass
class Trial:
    """All that may be chosen for one model under one cap, tried.

    Attributes:
        cluster: All GPUs.
        base: The whole model and one row.
        rows: All of a step.
        num_choices: Of all stages so far.
    """

    cluster: ClusterSpec
    base: MicroBatch
    rows: torch.Tensor
    num_choices: int = 0
    _stages: dict[Any, _Stage] = field(default_factory=dict)
    _races: list[tuple[str, Race]] = field(default_factory=list)

    def prepare(self) -> None:
        """Find every mesh with every schedule."""
        for cluster in parts(self.cluster):
            for degree in (1, 2):
                if cluster.num_gpus % (2 * degree) == 0:
                    for tensor in divisions(self.base.model, degree, None, False):
                        self._races += self._meshes(cluster, tensor)

    def fastest(self, cap_bytes: int, stages: int | None) -> tuple[float, str]:
        """Time of the fastest step that fits, and what it is.

        Args:
            cap_bytes: On the peak of a rank.
            stages: So many only; None for any number.
        """
        return min(
            (self._fastest_cuts(race, cap_bytes), name)
            for name, race in self._races
            if stages in (None, race.schedule.num_stages)
        )

    def _meshes(
        self, cluster: ClusterSpec, tensor: TensorParallel
    ) -> Iterator[tuple[str, Race]]:
        num_groups = cluster.num_gpus // tensor.degree
        for stages in _divisors(num_groups):
            if not 1 < stages <= len(self.base.chain):
                continue
            for shards in _divisors(num_groups // stages):
                parallel = DataParallel(
                    shard_degree=shards,
                    replicate_degree=num_groups // stages // shards,
                )
                if parallel.fits(cluster, tensor.degree):
                    own = ROWS // parallel.num_batches
                    yield from self._schedules(cluster, tensor, parallel, stages, own)

    def _schedules(
        self,
        cluster: ClusterSpec,
        tensor: TensorParallel,
        parallel: DataParallel,
        stages: int,
        rows: int,
    ) -> Iterator[tuple[str, Race]]:
        for number in _divisors(rows):
            some = rows_of(self.rows, rows // number)
            micro_batch = replace(self.base, inputs=some, target=some)
            if tensor.degree > 1:
                micro_batch = micro_batch.on_rank(tensor, self.base)
            micro_batch = micro_batch.among(parallel, cluster)
            for name in (ONE_F_ONE_B, GPIPE):
                if can_have(name, stages, number):
                    schedule = Schedule(
                        name=name, num_ranks=stages, num_micro_batches=number
                    )
                    words = [f"{stages} pp", *map(_sized, parallel.sizes.items())]
                    words += [f"{tensor.degree} tp"] * (tensor.degree > 1)
                    words[-1] += ", sequence" * tensor.cuts_sequences
                    text = f"{' x '.join(words)}; {name}, {number}"
                    yield text, Race(micro_batch, schedule, 0, 0.0)

    def _fastest_cuts(self, race: Race, cap_bytes: int) -> float:
        """Time of the fastest step of one mesh and schedule, of all cuts."""
        num_stages = race.schedule.num_stages
        fastest_ms = inf
        for starts in itertools.combinations(race.micro_batch.cuts, num_stages - 1):
            stages = race.stages_at((0, *starts))
            times = [self._times(race, stage, cap_bytes) for stage in stages]
            fitting = [own for own in times if own]
            if len(fitting) == len(times):
                fastest_ms = min(fastest_ms, step_ms(race.schedule, fitting))
        return fastest_ms

    def _times(
        self, race: Race, stage: tuple[int, int, int], cap_bytes: int
    ) -> StageTimes | None:
        """What a stage takes at least, if anything fits."""
        index, first, end = stage
        blocks = tuple(range(first, end))
        left_bytes = cap_bytes - race.micro_batch.late_bytes(first, end)
        step = race.micro_batch.step_of(blocks)
        key = id(race), stage
        if key not in self._stages:
            replay = RankReplay(
                race.schedule,
                index,
                {index: step},
                besides_bytes=besides_bytes(race.micro_batch, race.schedule, index),
            )
            choices = sorted(_choices(step), key=itemgetter(0))
            self.num_choices += len(choices)
            self._stages[key] = _Stage(replay, index, choices)
        time_ms = self._stages[key].least_ms(left_bytes)
        if time_ms is None:
            return None
        return race.times_of_step(index, blocks, time_ms, end)


@dataclass
class _Stage:
    """A stage and its choices, the fastest first.

    Attributes:
        replay: Of its rank.
        index: Of the stage.
        choices: With their times.
    """

    replay: RankReplay
    index: int
    choices: list[tuple[float, Choice]]
    _peaks: list[int] = field(default_factory=list)

    def least_ms(self, left_bytes: int) -> float | None:
        """Time of the fastest that fits: slower ones need not be replayed."""
        for i, (time_ms, choice) in enumerate(self.choices):
            if i == len(self._peaks):
                self._peaks.append(self.replay.peak_bytes({self.index: choice}))
            if self._peaks[i] <= left_bytes:
                return time_ms
        return None


def _choices(step: StageStep) -> Iterator[tuple[float, Choice]]:
    """Every choice of points of units that are not in one another, with its time."""
    formulation = step.later.formulation
    problem = formulation.problem(0)

    def beside(u: int, chosen: dict[int, int]) -> Iterator[dict[int, int]]:
        if u == len(problem.units):
            yield chosen
            return
        yield from beside(u + 1, chosen)
        around = set(problem.ancestry(u))
        if not any(other in around or u in problem.ancestry(other) for other in chosen):
            for k in range(len(problem.units[u].points)):
                yield from beside(u + 1, {**chosen, u: k})

    for chosen in beside(0, {}):
        points = (problem.units[u].points[k] for u, k in chosen.items())
        choice = {
            formulation.units[u]: formulation.curves[u].policies[k]
            for u, k in chosen.items()
        }
        yield sum(point.recompute_ms for point in points), choice


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _sized(pair: tuple[str, int]) -> str:
    return f"{pair[1]} {pair[0]}"


def rows(name: str) -> Iterator[dict[str, str]]:
    """Lines of the table for one model."""
    spec = cluster_spec("pcie-l40s", num_gpus=NUM_GPUS)
    spec = replace(spec, device=device_spec("cpu"))
    with torch.device("meta"):
        model = MODELS[name]()
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)

    def plan(stages: int | None, cap_bytes: int) -> Any:
        return autosac.plan_pipeline(
            model,
            tokens,
            target=tokens,
            loss_fn=token_loss,
            optimizer=torch.optim.AdamW,
            cluster=spec,
            mesh={**OPEN, "pp": stages},
            global_batch=ROWS,
            memory_budget=cap_bytes,
        )

    plans = [
        (stages, own)
        for stages in (None, 2)
        for own in under_caps(partial(plan, stages), SHARES)
    ]
    one = rows_of(tokens, 1)
    options = {"optimizer": torch.optim.AdamW}
    trial = Trial(
        cluster=spec,
        base=given_batch(model, one, one, token_loss, spec, options),
        rows=tokens,
    )
    with fake_ranks(2, divides_loss=False):
        trial.prepare()
        for stages, own in plans:
            least_ms, best = trial.fastest(own.budget_bytes, stages)
            sizes = zip(own.mesh_shape, own.mesh_dim_names, strict=True)
            mesh = " x ".join(f"{size} {dimension}" for size, dimension in sizes)
            pipeline = own.pipeline
            yield {
                "model": name,
                "stages": "any" if stages is None else str(stages),
                "cap, MiB": f"{own.budget_bytes / MIB:.3f}",
                "planned": f"{mesh}; {pipeline.name}, {pipeline.num_micro_batches}",
                "AC units": " + ".join(str(len(s.policy)) for s in own.stage_plans),
                "step, ms": f"{own.step_ms:.4f}",
                "the fastest of all": best,
                "its step, ms": f"{least_ms:.4f}",
                "slower": f"{own.step_ms / least_ms - 1:+.3%}",
                "choices": f"{trial.num_choices:,}",
            }


def main() -> int:
    """Try all, and write the table as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    table: list[dict[str, str]] = []
    for name in options.models.split(","):
        with kept_traces():
            for row in rows(name):
                print(row, flush=True)
                table.append(row)
                text = "\n".join(_page(table)) + "\n"
                (options.output / "exhaustive_meshes.md").write_text(text)
    return int(any(float(row["slower"][:-1]) / 100 > MOST_SLOWER for row in table))


def _page(table: list[dict[str, str]]) -> list[str]:
    heads = list(table[0])
    return [
        "# Planned meshes against all there are",
        "",
        "```",
        *(f"{key}: {value}" for key, value in environment().items()),
        "```",
        "",
        f"Toys of a few blocks, {NUM_GPUS} CPUs with the links of `pcie-l40s`, AdamW,"
        f" {ROWS} rows a step. *the fastest of all*: every mesh of stages, replicas,"
        " shards and slices of all or half of them, every number of micro-batches under"
        " 1F1B and GPipe, all cuts, all *choices* of points of every stage's AC units,"
        " replayed one by one. *slower*: the plan than that.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(row.values())} |" for row in table),
    ]


if __name__ == "__main__":
    sys.exit(main())
