"""A memory budget for the `Trainer` of Hugging Face Transformers.

    trainer = Trainer(model, args, callbacks=[MemoryBudget("6GiB")], ...)

What the loop of transformers 5.23 (trainer.py, `_inner_training_loop`) does to memory,
beyond `autosac.step.training_step`: the model's outputs are gone before backward, all
batches of an optimizer step are fetched before its first micro-step, and accelerate
(data_loader.py, `DataLoaderShard.__iter__`) fetches one more ahead. Autocast is part of
the model's ``forward``, so that the trace runs into it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from transformers import TrainerCallback

from autosac._compat_distributed import is_fsdp_unit, replica_in_forward
from autosac.errors import UnsupportedError
from autosac.integrations.budgets import (
    SCALER_BYTES,
    BudgetCallback,
    Loop,
    checkpointing_already,
    figures,
    plan_loss,
    refuse,
    summary,
)
from autosac.integrations.replicas import Replica, replica_of
from autosac.integrations.worst_batches import lengthened, on_device

_LIKELY = "`compute_loss_func`, `label_smoothing_factor` or a `compute_loss` of its own"


class MemoryBudget(BudgetCallback, TrainerCallback):
    """Plans on the first batch of training, applies the plan, takes it off at the end.

    The plan is for the shapes of that batch; `on_mismatch` says what becomes of others.
    Losses and weights are those of training without it, bit by bit.

    Its arguments are those of `BudgetCallback`.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Wait for the first batch."""
        self._clean_up()  # of a training that was cut off
        model = kwargs["model"]
        refuse(refused_settings(args, model))
        training = _Training(
            args=args,
            state=state,
            model=model,
            optimizer=kwargs["optimizer"],
            loader=kwargs.get("train_dataloader"),
        )
        waiting = _FirstForward(self, training)
        self._undo.append(waiting.remove)
        model.forward = waiting

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was found."""
        self._clean_up()

    def apply(self, training: _Training, inputs: tuple[Any, dict[str, Any]]) -> None:
        """Plan for a batch and apply the plan."""
        args, model = training.args, training.model
        replica = training.replica
        loop = Loop(
            forward=lambda model: LossOnly(model.forward, replica),
            num_other_batches=training.num_other_batches,
            scalars_bytes=Loop.scalars_bytes + (SCALER_BYTES if args.fp16 else 0),
            replica=replica,
            options={
                "optimizer": getattr(
                    training.optimizer, "optimizer", training.optimizer
                ),
                "accumulate": args.gradient_accumulation_steps,
                # The norm is logged, whatever it is.
                "clip_grad_norm": args.max_grad_norm or math.inf,
                "exclude": self.exclude,
                "opaque": self.opaque,
            },
        )
        self.plan = plan = plan_loss(
            model,
            [inputs, *self._worst(inputs, training.device)],
            loop,
            memory_budget=self.memory_budget,
            on_mismatch=self.on_mismatch,
        )
        plan.apply(model)
        self._undo.append(lambda: plan.unapply(model))
        state = training.state
        state.log_history.append({**figures(plan), "step": state.global_step})
        if not state.is_world_process_zero:
            return
        text = summary(plan, replica)
        if getattr(getattr(model, "config", None), "use_cache", False):
            text += (
                "\n`model.config.use_cache` is True, so that modules that get the cache"
                " cannot recompute; set it to False for cheaper plans."
            )
        self.report(text)

    def _worst(
        self, inputs: tuple[Any, dict[str, Any]], device: torch.device
    ) -> list[tuple[Any, dict[str, Any]]]:
        """The largest batch that will come, as the model is called; none if unknown."""
        args, kwargs = inputs
        if self.max_length is not None:
            return [lengthened(inputs, self.max_length)]
        if self.worst_batch is None:
            return []
        return [(args, {**kwargs, **on_device(dict(self.worst_batch), device)})]

    def _clean_up(self) -> None:
        while self._undo:
            self._undo.pop()()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Training:
    """What the trainer told when training began."""

    args: Any
    state: Any
    model: torch.nn.Module
    optimizer: Any
    loader: Any

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next(self.model.parameters()).device

    @property
    def num_other_batches(self) -> int:
        """Batches that are held besides that of a micro-step."""
        on_cpu = self.device.type == "cpu"
        num = int(self.args.gradient_accumulation_steps) - (not on_cpu)
        if isinstance(self.loader, DataLoaderDispatcher):
            # The first process fetches a batch for each, joins and slices them.
            num += 2 * int(self.args.world_size)
        return num

    @property
    def replica(self) -> Replica:
        """What DDP adds, whose forward runs now if there are several processes.

        Raises:
            UnsupportedError: Something else than DDP shares the step among them.
        """
        around = replica_in_forward()
        if around is not None and around.module is self.model:
            return replica_of(around)
        refuse(
            {
                f"world_size={self.args.world_size} shares a step among processes by"
                " something else than DDP; use DDP, or `autosac.plan_parallel` before"
                " training": self.args.world_size > 1
            }
        )
        return Replica(module=self.model)


class LossOnly:
    """A model's ``forward`` as the trainer uses it: only the loss outlives it."""

    def __init__(self, own: Callable[..., Any], replica: Replica) -> None:
        self.own = own
        self.replica = replica

    def __deepcopy__(self, memo: dict[int, Any]) -> LossOnly:
        return LossOnly(copy.deepcopy(self.own, memo), self.replica)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.replica.returned(lambda: self.own(*args, **kwargs))
        loss = output.get("loss") if hasattr(output, "get") else output[0]
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            raise UnsupportedError(
                "The model returns no loss for the batch of the trainer, which makes"
                f" the loss itself ({_LIKELY}); a plan would not know its memory."
                " Let the model return the loss, or use `autosac.plan` with `loss_fn`."
            )
        return loss


class _FirstForward:
    """Stands in for a model's ``forward`` until its first batch of training."""

    def __init__(self, budget: MemoryBudget, training: _Training) -> None:
        self.budget = budget
        self.training = training
        model = training.model
        self.own = model.__dict__.get("forward")
        self.__wrapped__ = model.forward  # for those who look at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.training.model
        if not model.training:  # evaluation on start
            return self.__wrapped__(*args, **kwargs)
        self.remove()
        self.budget.apply(self.training, (args, kwargs))
        return model.forward(*args, **kwargs)

    def remove(self) -> None:
        """Put back the ``forward`` that the model had."""
        model = self.training.model
        if model.__dict__.get("forward") is self:
            del model.forward
            if self.own is not None:
                model.forward = self.own


def refused_settings(args: Any, model: torch.nn.Module) -> dict[str, bool]:
    """What to say of each setting that is not planned -> whether it is set.

    Args:
        args: Of the trainer.
        model: The model.
    """
    checkpointing = bool(checkpointing_already(model))
    return {
        "gradient_checkpointing=True recomputes already; leave it out, the plan decides"
        " what is recomputed": args.gradient_checkpointing or checkpointing,
        "torch_compile=True makes ops of its own; leave it out, or use"
        " `autosac.compile`": args.torch_compile,
        f"n_gpu={args.n_gpu} copies the model to several GPUs at each step; make one of"
        " them visible (CUDA_VISIBLE_DEVICES)": args.n_gpu > 1,
        "deepspeed moves parameters and gradients; leave it out": args.deepspeed,
        "fsdp shards the model in units of its own before a batch comes; leave `fsdp`"
        " out and call `autosac.integrations.huggingface_fsdp.plan_and_shard` before"
        " training, without `MemoryBudget`": bool(args.fsdp)
        or any(map(is_fsdp_unit, model.modules())),
        f"label_smoothing_factor={args.label_smoothing_factor} makes the loss outside"
        " of the model, where a plan does not see it; set it to 0": (
            args.label_smoothing_factor != 0
        ),
    }
