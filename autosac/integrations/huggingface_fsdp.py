"""FSDP2 under the `Trainer` of Hugging Face Transformers: planned, sharded, trained.

    trainer = Trainer(model, args, train_dataset=data, data_collator=collate)
    plan = plan_and_shard(trainer, batch, memory_budget="6GiB", cluster="hgx-h100")
    trainer.train()

A trainer with ``fsdp=True`` wraps its model in units of its own before a batch comes.
But it takes a model that is sharded already (transformers 5.24, trainer.py, where
`is_distributed_loading_by_transformers`): it prepares autocast and the optimizer and
leaves the rest as it is. So `plan_parallel` chooses FSDP units and AC units together,
and what the trainer's loop holds besides counts. Every micro-step reduces its
gradients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.modeling import get_mixed_precision_context_manager
from transformers import Trainer

from autosac.devices.specs import DeviceSpec
from autosac.errors import UnsupportedError
from autosac.integrations.budgets import (
    SCALER_BYTES,
    Loop,
    refuse,
)
from autosac.integrations.huggingface import refused_settings
from autosac.integrations.huggingface_sharded import adopt_sharded
from autosac.integrations.replicas import Replica
from autosac.integrations.sharded_loops import plan_loop
from autosac.integrations.worst_batches import on_device
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.plans import ParallelPlan
from autosac.parallel.preparing import cluster_of
from autosac.step.marks import Marks


def plan_and_shard(
    trainer: Trainer,
    batch: Mapping[str, Any],
    *,
    memory_budget: int | str,
    cluster: str | ClusterSpec,
    degrees: Sequence[int] | None = None,
    fsdp_units: Marks | None = None,
    report: Callable[[str], object] = print,
) -> ParallelPlan:
    """Plan FSDP units and recomputation for a trainer, and shard its model so.

    Every process calls it before ``trainer.train()``. The first one plans, the others
    get its plan; an error is raised in all of them.

    Args:
        trainer: With the whole model, made without ``fsdp``.
        batch: The largest one of a process, as the data collator makes it.
        memory_budget: Cap on the peak of each process: bytes, or text.
        cluster: As in `plan_parallel`, for as many GPUs as there are processes.
        degrees: As in `plan_parallel`,
        fsdp_units: likewise.
        report: Gets a text that says what was planned, in the first process.

    Returns:
        The plan. Its figures are those of the step, without batches that the trainer
        holds besides, for which its budget leaves room.

    Raises:
        InfeasibleBudgetError: No plan fits; the figures are those of all.
        UnsupportedError: A plan could not keep its word under these settings.
    """
    refuse(_refused(trainer))
    spec = cluster_of(cluster, dist.get_world_size())
    model = trainer.model
    assert isinstance(model, torch.nn.Module)
    plan = plan_loop(
        model,
        ((), _as_called(trainer, batch)),
        lambda: _loop(trainer, model, spec.device),
        memory_budget=memory_budget,
        cluster=spec,
        device_type=trainer.args.device.type,
        degrees=degrees,
        fsdp_units=fsdp_units,
    )
    adopt_sharded(trainer)
    if trainer.is_world_process_zero():
        report(plan.report())
    return plan


def _loop(trainer: Trainer, model: torch.nn.Module, device: DeviceSpec) -> Loop:
    """How the trainer runs a step on a device."""
    optimizer = trainer.create_optimizer()
    trainer.optimizer = None  # the trainer makes one for the sharded parameters
    args = trainer.args
    return Loop(
        forward=lambda module: _LossOnly(
            _Prepared(module.forward, trainer.accelerator)
        ),
        # The next one is fetched ahead, on the CPU where the model lies.
        num_other_batches=args.gradient_accumulation_steps
        - (args.device.type != "cpu"),
        scalars_bytes=Loop.scalars_bytes + (SCALER_BYTES if args.fp16 else 0),
        replica=Replica(module=model),
        options={
            "device": device,
            "optimizer": optimizer,
            "accumulate": args.gradient_accumulation_steps,
            "clip_grad_norm": args.max_grad_norm or math.inf,
        },
    )


def _as_called(trainer: Trainer, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the trainer calls its model with for a batch."""
    inputs: dict[str, Any] = on_device(dict(batch), trainer.args.device)
    if trainer.model_accepts_loss_kwargs and "labels" in inputs:
        count = torch.ones((), device=trainer.args.device)
        inputs["num_items_in_batch"] = count
    return inputs


class _LossOnly:
    """A model's ``forward`` as the trainer uses it: only the loss outlives it."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __deepcopy__(self, memo: dict[int, Any]) -> _LossOnly:
        return _LossOnly(copy.deepcopy(self.own, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.own(*args, **kwargs)
        loss = output.get("loss") if hasattr(output, "get") else output[0]
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            raise UnsupportedError(
                "The model returns no loss for the batch of the trainer: let it return"
                " one, or use `autosac.plan_parallel` with `loss_fn`."
            )
        return loss


class _Prepared:
    """A model's ``forward`` as Accelerate prepares it: under autocast.

    Args:
        own: The model's.
        accelerator: The trainer's.
    """

    def __init__(self, own: Callable[..., Any], accelerator: Any) -> None:
        self.own = own
        self.accelerator = accelerator

    def __deepcopy__(self, memo: dict[int, Any]) -> _Prepared:
        return _Prepared(copy.deepcopy(self.own, memo), self.accelerator)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.own
        if self.accelerator.native_amp:
            autocast = get_mixed_precision_context_manager(
                True, self.accelerator.autocast_handler
            )
            forward = convert_outputs_to_fp32(autocast(forward))
        return forward(*args, **kwargs)


def _refused(trainer: Trainer) -> dict[str, bool]:
    """What to say of each setting that is not planned -> whether it is set."""
    args, model = trainer.args, trainer.model
    assert isinstance(model, torch.nn.Module)
    return {
        "there is one process; use `MemoryBudget`": not dist.is_initialized(),
        "this version of transformers takes no model that is sharded already; use 5.24"
        " or later": not hasattr(trainer, "is_distributed_loading_by_transformers"),
        "`fully_shard` does not divide quantized parameters; train with DDP": any(
            not p.is_floating_point() for p in model.parameters()
        ),
        "the trainer was given an optimizer, which knows the whole parameters; pass"
        " `optimizer_cls_and_kwargs` instead": trainer.optimizer is not None,
        "load_best_model_at_end=True reads whole weights into a model that is sharded;"
        " leave it out and load the best checkpoint afterwards": (
            args.load_best_model_at_end
        ),
        "save_on_each_node=True wants whole weights in several processes, and the first"
        " one gathers them; leave it out": args.save_on_each_node,
        "ACCELERATE_USE_FSDP lets the trainer shard the model once more; launch it"
        " without FSDP": getattr(trainer, "is_fsdp_enabled", False),
        "its loss is made outside of the model (`compute_loss` of a subclass, as TRL's,"
        " `compute_loss_func` or `label_smoothing_factor`), where FSDP2 has no hooks;"
        " use `MemoryBudget`, which plans that on one GPU and under DDP, or a loop of"
        " your own with `autosac.plan_parallel(..., loss_fn=...)`": type(
            trainer
        ).compute_loss
        is not Trainer.compute_loss
        or trainer.compute_loss_func is not None
        or args.label_smoothing_factor != 0,
        **refused_settings(args, model),
    }
