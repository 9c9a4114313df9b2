"""One plan for a model under `DistributedDataParallel`, in a loop of one's own.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
plan = autosac.plan_replicas(
    model, batch, memory_budget="6GiB", optimizer=optimizer, loader=loader
)
plan.apply(accelerator.unwrap_model(model))  # or model.module
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from autosac.errors import ArgumentError
from autosac.integrations.batches_ahead import num_batches_ahead
from autosac.integrations.budgets import SCALER_BYTES, Loop, plan_loss
from autosac.integrations.replicas import Replica, replica_of
from autosac.kinds import check_kind
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
    loader: DataLoader[Any] | None = None,
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
        loader: What ``accelerator.prepare`` made of the loader whose batches are
            trained on: those that it fetches ahead count where the model lies, which is
            one on the CPU. None for a loop that holds no other batch.
        options: As in `profile`.

    Raises:
        InfeasibleBudgetError: No plan fits.
        ArgumentError: There are several processes, and no DDP around the model; or an
            argument is not taken, or of another kind.
        UnsupportedError: A plan could not keep its word under this DDP; says why.
    """
    check_names(options, plan_replicas)
    wanted = "a module, as `accelerator.prepare` returns it"
    check_kind(model, torch.nn.Module, name="model", wanted=wanted)
    _check_one_batch(inputs)
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
        num_other_batches=_num_ahead(loader, replica),
        scalars_bytes=Loop.scalars_bytes + (0 if scaler is None else SCALER_BYTES),
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


def _check_one_batch(inputs: Any) -> None:
    """Refuse a list of batches, of which each is a tuple or a mapping by itself.

    Raises:
        ArgumentError: It is one.
    """
    kinds = {type(one) for one in inputs} if isinstance(inputs, list) else set()
    if len(kinds) == 1 and issubclass(kinds.pop(), (tuple, Mapping)):
        raise ArgumentError(
            f"`inputs` is a list of {len(inputs)} batches, and one batch is planned for"
            " here: pass the largest."
        )


def _num_ahead(loader: Any, replica: Replica) -> int:
    """Batches that a loop over a loader holds besides that of the step."""
    if loader is None:
        return 0
    wanted = "the loader that `accelerator.prepare` returned"
    check_kind(loader, DataLoader, name="loader", wanted=wanted)
    on_cpu = all(p.device.type == "cpu" for p in replica.module.parameters())
    size = 1 if replica.group is None else dist.get_world_size(replica.group)
    return num_batches_ahead(loader, on_cpu=on_cpu, num_processes=size)


class _Returned:
    """A model's ``forward`` as DDP hands on what it returns."""

    def __init__(self, own: Callable[..., Any], replica: Replica) -> None:
        self.own = own
        self.replica = replica
        self.__wrapped__ = own  # for those who look at the signature

    def __deepcopy__(self, memo: dict[int, Any]) -> _Returned:
        return _Returned(copy.deepcopy(self.own, memo), self.replica)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.replica.in_forward():
            return self.replica.returned(self.own(*args, **kwargs))
