"""One plan for all processes whose trainer's loop runs a model that it shards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from autosac.errors import InfeasibleBudgetError
from autosac.integrations.budgets import Loop, of_all
from autosac.integrations.divided_states import largest_parts
from autosac.integrations.replicas import planned_once
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.planning import plan_parallel
from autosac.parallel.plans import ParallelPlan
from autosac.quantities import parse_bytes
from autosac.step.marks import Marks


def plan_loop(
    model: torch.nn.Module,
    inputs: Any,
    make_loop: Callable[[], Loop],
    *,
    memory_budget: int | str,
    cluster: ClusterSpec,
    device_type: str,
    degrees: Sequence[int] | None,
    fsdp_units: Marks | None,
) -> ParallelPlan:
    """Plan in the first process, and shard the model in all of them.

    Args:
        model: Whole.
        inputs: What the loop calls it with, as positional and keyword arguments.
        make_loop: The loop; called in the process that plans.
        memory_budget: Of each process, in bytes or as text.
        cluster: As in `plan_parallel`, with as many GPUs as there are processes.
        device_type: Of the processes' devices.
        degrees: As in `plan_parallel`,
        fsdp_units: likewise.

    Raises:
        InfeasibleBudgetError: No plan fits; the figures are those of all.
    """

    def make() -> ParallelPlan:
        loop = make_loop()
        held_bytes = loop.held_bytes(inputs)
        cap_bytes = parse_bytes(memory_budget, total_bytes=cluster.device.memory_bytes)
        optimizer = largest_parts(loop.options.get("optimizer"))[0]
        with loop.profiled(model, inputs, optimizer=optimizer, real_step=True) as step:
            try:
                return plan_parallel(
                    step,
                    cluster=cluster,
                    memory_budget=max(cap_bytes - held_bytes, 1),
                    degrees=degrees,
                    fsdp_units=fsdp_units,
                )
            except InfeasibleBudgetError as error:
                raise of_all(
                    error, held_bytes, memory_budget, cap_bytes, loop.replica
                ) from None

    plan = planned_once(make, -dist.get_rank(), dist.group.WORLD)
    # The loop is planned as the model's forward, of which these say nothing.
    facts = replace(plan.facts, autocast=None, headroom_bytes=None)
    plan = replace(plan, signatures=(), facts=facts)
    gc.collect()  # copies of the model refer to themselves by their `forward`
    plan.apply(model, plan.make_mesh(device_type))
    return plan
