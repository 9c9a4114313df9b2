"""One plan for a model under `DistributedDataParallel`, in a loop of one's own.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
plan = autosac.plan_replicas(
    model, batch, memory_budget="6GiB", optimizer=optimizer
)
plan.apply(accelerator.unwrap_model(model))  # or model.module
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autosac.errors import ArgumentError
from autosac.integrations.budgets import SCALER_BYTES, Loop, plan_loss
from autosac.integrations.replicas import Replica, replica_of
from autosac.planning.plan_data import OnMismatch
from autosac.planning.plans import Plan
from autosac.profiles.given import check_names
from autosac.step.training_step import LossFn, normalize_inputs


def plan_replicas(
    model: torch.nn.Module,
    inputs: Any,
    *,
    memory_budget: int | str,
    on_mismatch: OnMismatch = "recompute",
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
    **options: Any,
) -> Plan:
    """Plan once for all processes that train copies of a model.

    Every process must call it, each with a batch of its own. The one with the largest
    batch plans, and the others get its plan; an error is raised in all of them. What
    DDP holds counts. The plan is to be applied to the module inside, by each process.

    Args:
        model: The model as it is trained: `DistributedDataParallel` by hand or by
            ``accelerator.prepare``. One without DDP is planned for this process alone.
        inputs: What it is called with: as in `profile`.
        memory_budget: Cap on the peak of each process: bytes, or text.
        on_mismatch: As in `autosac.plan`.
        loss_fn: As in `profile`.
        optimizer: As in `profile`; one that Accelerate has prepared is taken, too.
        options: As in `profile`.

    Raises:
        InfeasibleBudgetError: No plan fits.
        ArgumentError: There are several processes, and no DDP around the model; or an
            argument is not taken.
        UnsupportedError: A plan could not keep its word under this DDP; says why.
    """
    check_names(options, plan_replicas)
    replica = replica_of(model)
    if replica.group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ArgumentError(
            f"`model` is a {type(model).__name__} in one of {dist.get_world_size()}"
            " processes: pass it as DistributedDataParallel, after"
            " `accelerator.prepare`; sharded models are for `autosac.plan_parallel`."
        )
    scaler = getattr(optimizer, "scaler", None)  # of Accelerate with fp16
    loop = Loop(
        forward=lambda module: _Returned(module.forward, replica),
        num_other_batches=0,
        scalars_bytes=0 if scaler is None else SCALER_BYTES,
        replica=replica,
        options={
            **options,
            "loss_fn": loss_fn,
            "optimizer": getattr(optimizer, "optimizer", optimizer),
        },
    )
    return plan_loss(
        replica.module,
        [normalize_inputs(inputs)],
        loop,
        memory_budget=memory_budget,
        on_mismatch=on_mismatch,
    )


class _Returned:
    """A model's ``forward`` as DDP hands on what it returns."""

    def __init__(self, own: Callable[..., Any], replica: Replica) -> None:
        self.own = own
        self.replica = replica
        self.__wrapped__ = own  # for those who look at the signature

    def __deepcopy__(self, memo: dict[int, Any]) -> _Returned:
        return _Returned(copy.deepcopy(self.own, memo), self.replica)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.replica.alone():
            return self.replica.returned(self.own(*args, **kwargs))
