"""Stages of pipelines that offload: predicted floors and times, parts of `offload`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import torch

import autosac
from autosac.errors import InfeasibleBudgetError
from benchmarks import large_meshes
from benchmarks.environment import cpu_s
from benchmarks.large_meshes import token_loss
from benchmarks.parallel_plans import LENGTH

_EIGHTHS = (8, 9, 10, 11, 12, 14, 16)  # of the floor without offload: budgets
_FEW_EIGHTHS = (8, 9, 10, 12)


def pipelines() -> Iterator[str]:
    """Predicted floors and times of stages that may offload."""
    meshes = ("8B", 4, 2, 16), ("70B", 8, 8, 32)
    yield from _pipelines("1F1B", meshes, _EIGHTHS)


def interleaved() -> Iterator[str]:
    """Likewise of ranks with two stages each."""
    meshes = (("8B", 4, 2, 16),)
    yield from _pipelines("Interleaved1F1B", meshes, _FEW_EIGHTHS)


def _pipelines(
    schedule: str, meshes: Sequence[tuple[str, int, int, int]], eighths: Sequence[int]
) -> Iterator[str]:
    yield "Predicted, nothing of this was run: Llama 3 with its loss, sequences of"
    yield f"{LENGTH} tokens one by one, gathered in bfloat16, {schedule} on 8 H100 a"
    yield "node."
    yield "Budgets are the floors with and without offload, and above. *host*: the most"
    yield "that a rank has there. *CPU s*: of the plan with offload, for which that"
    yield "without is made as well."
    yield ""
    heads = "mesh | micro-batches | budget | step without | with | host | CPU s"
    yield f"| model | {heads} |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, stages, shards, number in meshes:
        planned = partial(_pipeline, schedule, name, stages, shards, number)
        low, floor = (_floor(planned, offload) for offload in (True, False))
        before_ms = {False: inf, True: inf}
        for budget in (low, *(floor * eighth // 8 for eighth in eighths)):
            cells = [name, f"{stages} pp x {shards} fsdp", str(number)]
            cells.append(f"{budget / 2**30:.1f} GiB")
            plain_ms = inf if budget < floor else planned(budget, False).step_ms
            cells.append("none fits" if plain_ms == inf else f"{plain_ms:.0f} ms")
            started = cpu_s()
            plan = planned(budget, True)
            taken = cpu_s() - started
            assert plan.step_ms <= plain_ms, "slower than without offload"
            for offload, own_ms in ((False, plain_ms), (True, plan.step_ms)):
                assert own_ms <= before_ms[offload], "slower with more memory"
                before_ms[offload] = own_ms
            cells.append(f"{plan.step_ms:.0f} ms")
            cells.append(f"{plan.far_bytes / 2**30:.1f} GiB")
            row = " | ".join([*cells, f"{taken:.0f}"])
            print(row, flush=True)
            yield f"| {row} |"


def _floor(planned: Any, offload: bool) -> int:
    try:
        planned(1, offload)
    except InfeasibleBudgetError as error:
        return error.lowest_peak_bytes
    raise AssertionError("A plan fits into a byte.")


def _pipeline(
    schedule: str,
    name: str,
    stages: int,
    shards: int,
    number: int,
    budget: int,
    offload: bool,
) -> autosac.PipelinePlan:
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    return autosac.plan_pipeline(
        large_meshes.llama(name),
        tokens,
        target=tokens,
        loss_fn=token_loss,
        optimizer=torch.optim.AdamW,
        cluster="hgx-h100",
        num_gpus=stages * shards,
        mesh={"pp": stages, "fsdp": shards},
        num_micro_batches=number,
        global_batch=number * shards,
        schedules=[schedule],
        memory_budget=budget,
        param_dtype="bfloat16",
        reduce_dtype="float32",
        offload=offload,
    )
