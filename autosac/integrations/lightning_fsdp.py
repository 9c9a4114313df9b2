"""FSDP2 under Lightning's `Trainer`: planned, sharded, trained.

    class Module(LightningModule):
        def configure_model(self):
            plan_and_shard(self, batch, memory_budget="6GiB", cluster="hgx-h100")

    strategy = ModelParallelStrategy(data_parallel_size=8, tensor_parallel_size=1)
    Trainer(strategy=strategy, ...).fit(Module(), ...)

`ModelParallelStrategy` of lightning 2.6 (pytorch/strategies/model_parallel.py) leaves
it to ``configure_model`` to shard. The trainer calls ``training_step``, not the module,
so that this is what FSDP2 takes for its forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import register_fsdp_forward_method

from autosac.checkpointing.batch_variants import steps_by_hand
from autosac.integrations.budgets import Loop, refuse
from autosac.integrations.lightning import (
    TrainingStep,
    arguments_of_step,
    loop_of,
    refused_settings,
)
from autosac.integrations.replicas import Replica
from autosac.integrations.sharded_loops import plan_loop
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.plans import ParallelPlan
from autosac.parallel.preparing import cluster_of
from autosac.step.marks import Marks

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_PLANS: WeakKeyDictionary[LightningModule, ParallelPlan] = WeakKeyDictionary()


def plan_and_shard(
    module: LightningModule,
    batch: Any,
    *,
    memory_budget: int | str,
    cluster: str | ClusterSpec,
    degrees: Sequence[int] | None = None,
    fsdp_units: Marks | None = None,
    report: Callable[[str], object] = print,
) -> ParallelPlan:
    """Plan FSDP units and recomputation for a module, and shard it so.

    To be called at the end of ``configure_model``, in every process. The first one
    plans, the others get its plan; an error is raised in all of them. A module that it
    has sharded before is left alone.

    Args:
        module: Whole, attached to a trainer with `ModelParallelStrategy`.
        batch: The largest one of a process, as `training_step` gets it.
        memory_budget: Cap on the peak of each process: bytes, or text.
        cluster: As in `plan_parallel`, for as many GPUs as there are processes.
        degrees: As in `plan_parallel`,
        fsdp_units: likewise.
        report: Gets a text that says what was planned, in the first process.

    Returns:
        The plan. Its figures are those of the step, without a batch that the trainer
        holds besides, for which its budget leaves room.

    Raises:
        InfeasibleBudgetError: No plan fits; the figures are those of all.
        UnsupportedError: A plan could not keep its word under these settings.
    """
    if module in _PLANS:
        return _PLANS[module]
    trainer = module.trainer
    refuse(_refused(trainer, module))
    spec = cluster_of(cluster, dist.get_world_size())
    inputs: Any = arguments_of_step(module, batch, 0), {}

    def make_loop() -> Loop:
        optimizers, _ = _init_optimizers_and_lr_schedulers(module)
        replica = Replica(module=module)
        return replace(
            loop_of(
                trainer,
                replica,
                vars(trainer)["callbacks"],
                device=spec.device,
                optimizer=optimizers[0],
            ),
            forward=lambda module: _ShardedStep(module, trainer, replica),
        )

    plan = plan_loop(
        module,
        inputs,
        make_loop,
        memory_budget=memory_budget,
        cluster=spec,
        device_type=trainer.strategy.root_device.type,
        degrees=degrees,
        fsdp_units=fsdp_units,
    )
    begin, own_step = steps_by_hand(module), module.training_step
    for name in _STEPS:
        register_fsdp_forward_method(module, name)
    sharded_step = module.training_step

    @functools.wraps(own_step)  # by which the trainer knows what to pass
    def training_step(*args: Any, **kwargs: Any) -> Any:
        begin(*args, **kwargs)
        return sharded_step(*args, **kwargs)

    own: Any = module
    own.training_step = training_step
    _PLANS[module] = plan
    if trainer.is_global_zero:
        report(plan.report())
    return plan


def _refused(trainer: Trainer, module: LightningModule) -> dict[str, bool]:
    """What to say of each setting that is not planned -> whether it is set."""
    strategy = trainer.strategy
    num_slices = 0
    if isinstance(strategy, ModelParallelStrategy):
        num_slices = strategy.device_mesh["tensor_parallel"].size()
    return {
        f"{type(strategy).__name__} does not leave sharding to `configure_model`; use"
        " `ModelParallelStrategy`": num_slices == 0,
        f"tensor_parallel_size={num_slices} divides tensors as well; pass"
        " `data_parallel_size` as the number of processes and `tensor_parallel_size=1`"
        " to `ModelParallelStrategy`": num_slices > 1,
        **refused_settings(module),
    }


class _ShardedStep(TrainingStep):
    """Refuses calls of the module inside, which run the hooks of FSDP2 once more."""

    def __call__(self, *args: Any) -> torch.Tensor:
        watch = self.module.register_forward_pre_hook(_refuse_call)
        try:
            return super().__call__(*args)
        finally:
            watch.remove()


def _refuse_call(*_: Any) -> None:
    refuse(
        {
            "`training_step` calls the module itself, as `self(x)`, which FSDP2 takes"
            " for another forward; call `self.forward(x)` or a submodule": True
        }
    )
