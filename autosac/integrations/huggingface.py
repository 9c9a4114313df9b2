"""A memory budget for the `Trainer` of Hugging Face Transformers.

    trainer = Trainer(model, args, callbacks=[MemoryBudget("6GiB")], ...)

What is planned is the trainer's ``compute_loss``, whoever wrote it: callbacks are not
told their trainer, so that it is looked for among those who called. What its loop does
to memory (transformers 5.23, trainer.py, `_inner_training_loop`), beyond
`autosac.step.training_step`: all batches of an optimizer step are fetched before its
first micro-step, and accelerate (data_loader.py, `DataLoaderShard.__iter__`) fetches
one more ahead. Autocast is part of the model's ``forward``, so that the trace runs into
it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from autosac._compat_compiler import is_compiled
from autosac._compat_distributed import is_fsdp_unit
from autosac.checkpointing.batch_variants import steps_by_hand
from autosac.errors import ArgumentError, UnsupportedError
from autosac.integrations.batches_ahead import num_batches_ahead
from autosac.integrations.budgets import (
    SCALER_BYTES,
    BudgetCallback,
    Loop,
    StepForward,
    bytes_of_callbacks,
    checkpointing_already,
    figures,
    plan_loss,
    refuse,
    several,
    summary,
)
from autosac.integrations.replicas import Replica, replica_of
from autosac.integrations.worst_batches import lengthened, on_device
from autosac.kinds import check_kind

_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")  # since 5.24
_OTHER_ARGUMENTS = ("return_outputs", "num_items_in_batch")  # of `compute_loss`


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
        self.plan = None
        model = kwargs["model"]
        refuse(refused_settings(args, model))
        trainer = _calling_trainer()
        refuse(several(trainer.callback_handler.callbacks))
        training = _Training(
            trainer=trainer,
            model=model,
            optimizer=kwargs["optimizer"],
            loader=kwargs.get("train_dataloader"),
        )
        own = trainer.__dict__.get("compute_loss")
        trainer.__dict__["compute_loss"] = _PlannedLoss(self, training, own)
        self._undo.append(lambda: _put_back(trainer, own))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See whether callbacks keep more than they did when the plan was made."""
        if self.plan is not None and state.global_step:
            callbacks = _calling_trainer().callback_handler.callbacks
            self.look_at_callbacks(callbacks, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a training that does not call what is planned."""
        refuse(
            {
                "the trainer's `training_step` does not call its `compute_loss`; let it"
                " do so, or use `autosac.plan`": self.plan is None
            }
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was found."""
        self._clean_up()

    def apply(
        self, training: _Training, replica: Replica, inputs: dict[str, Any]
    ) -> Callable[..., None]:
        """Plan for a batch and apply the plan; returns what begins a step."""
        trainer, model = training.trainer, training.model
        args, state = trainer.args, trainer.state
        loop = Loop(
            forward=lambda model: ComputedLoss(model, trainer, replica),
            num_other_batches=training.num_other_batches,
            scalars_bytes=Loop.scalars_bytes + (SCALER_BYTES if args.fp16 else 0),
            callbacks_bytes=bytes_of_callbacks(
                trainer.callback_handler.callbacks, model
            ),
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
        batches = [inputs, *self._worst(inputs, training.device)]
        plan = plan_loss(
            model,
            [((), batch) for batch in batches],
            loop,
            memory_budget=self.memory_budget,
            on_mismatch=self.on_mismatch,
        )
        plan.apply(model)
        self.callbacks_bytes = loop.callbacks_bytes
        self.plan = replace(plan, replan=None)  # which keeps the trainer alive
        self._undo.append(lambda: plan.unapply(model))
        state.log_history.append({**figures(plan), "step": state.global_step})
        if state.is_world_process_zero:
            text = summary(plan, replica)
            if getattr(getattr(model, "config", None), "use_cache", False):
                text += (
                    "\n`model.config.use_cache` is True, so that modules that get the"
                    " cache cannot recompute; set it to False for cheaper plans."
                )
            self.report(text)
        return steps_by_hand(model)

    def _worst(
        self, inputs: dict[str, Any], device: torch.device
    ) -> list[dict[str, Any]]:
        """The largest batch that will come; none if unknown."""
        if self.max_length is not None:
            return [lengthened(inputs, self.max_length)]
        if self.worst_batch is None:
            return []
        _check_names(self.worst_batch, inputs)
        return [{**inputs, **on_device(dict(self.worst_batch), device)}]

    def _clean_up(self) -> None:
        while self._undo:
            self._undo.pop()()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Training:
    """What the trainer told when training began."""

    trainer: Trainer
    model: torch.nn.Module
    optimizer: Any
    loader: Any

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next(self.model.parameters()).device

    @property
    def num_other_batches(self) -> int:
        """Batches that are held besides that of a micro-step.

        One that is moved to `cpu:0`, the device of one of several processes on a CPU,
        is copied (`Trainer._prepare_input`).
        """
        args, on_cpu = self.trainer.args, self.device.type == "cpu"
        ahead = num_batches_ahead(
            self.loader, on_cpu=on_cpu, num_processes=args.world_size
        )
        is_copied = on_cpu and args.device.index is not None
        return int(args.gradient_accumulation_steps) - 1 + ahead + int(is_copied)

    def replica(self, called: torch.nn.Module) -> Replica:
        """What DDP adds, if there are several processes.

        Args:
            called: What the trainer calls, which has the model in it.

        Raises:
            UnsupportedError: Something else than DDP shares the step among them.
        """
        replica = replica_of(called)
        size = self.trainer.args.world_size
        refuse(
            {
                f"world_size={size} shares a step among processes by something else"
                " than DDP; use DDP, or `autosac.plan_parallel` before training": (
                    replica.group is None and size > 1
                )
            }
        )
        return replica


def _calling_trainer() -> Trainer:
    """The trainer that calls this callback.

    Raises:
        UnsupportedError: None does.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise UnsupportedError(
        "`MemoryBudget` was called by no `transformers.Trainer`, whose `compute_loss`"
        " it plans: pass it among the `callbacks` of one."
    )


def _put_back(trainer: Trainer, own: Callable[..., Any] | None) -> None:
    del trainer.__dict__["compute_loss"]
    if own is not None:
        trainer.__dict__["compute_loss"] = own


class _PlannedLoss:
    """Stands in for a trainer's ``compute_loss``: it plans, and begins every step.

    Args:
        budget: Plans.
        training: The training.
        own: What stood in before, or None.
    """

    def __init__(
        self, budget: MemoryBudget, training: _Training, own: Callable[..., Any] | None
    ) -> None:
        self.budget = budget
        self.training = training
        self.own = own
        self.begin_step: Callable[..., None] | None = None

    def __call__(
        self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        training = self.training
        if training.model.training and torch.is_grad_enabled():
            given = dict(zip(_OTHER_ARGUMENTS, args, strict=False)) | kwargs
            batch = _batch(inputs, given.get("num_items_in_batch"))
            if self.begin_step is None:
                replica = training.replica(model)
                self.begin_step = self.budget.apply(training, replica, batch)
            self.begin_step(**batch)
        own = self.own or type(training.trainer).compute_loss.__get__(training.trainer)
        return own(model, inputs, *args, **kwargs)


def _batch(inputs: Any, num_items_in_batch: Any) -> dict[str, Any]:
    """What a plan takes for the arguments of ``compute_loss``.

    Raises:
        UnsupportedError: They have no names.
    """
    if not isinstance(inputs, Mapping):
        raise UnsupportedError(
            "`MemoryBudget` cannot plan this: the data collator makes a"
            f" {type(inputs).__name__}; let it make a dict."
        )
    return {**inputs, "num_items_in_batch": num_items_in_batch}


def _check_names(worst_batch: Any, inputs: dict[str, Any]) -> None:
    """Refuse a largest batch that is none of those that come.

    Raises:
        ArgumentError: It has no names, or others than the first batch.
    """
    known = [name for name in inputs if name not in _OTHER_ARGUMENTS]
    wanted = f"a dict of {', '.join(map(repr, known))}"
    check_kind(worst_batch, Mapping, name="worst_batch", wanted=wanted)
    for name in worst_batch:
        if name not in inputs:
            raise ArgumentError(
                f"`worst_batch` has {name!r}, and the first batch has not: it must be"
                f" {wanted}."
            )


class ComputedLoss(StepForward):
    """Runs a trainer's ``compute_loss``; the trainer is left as it is."""

    def __call__(
        self, *, num_items_in_batch: Any = None, **inputs: Any
    ) -> torch.Tensor:
        module, trainer = self.module, _quiet(self.trainer, self.module)
        stand_in = module.__dict__.pop("forward")  # which the trainer will call
        own = self.own or type(module).forward.__get__(module)
        module.__dict__["forward"] = self._returned(own)
        try:
            with self.replica.in_forward(), trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(
                    module, inputs, num_items_in_batch=num_items_in_batch
                )
        finally:
            module.__dict__["forward"] = stand_in
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            raise UnsupportedError(
                "`MemoryBudget` cannot plan this: `compute_loss` returns no single"
                f" number for the first batch, but {type(loss).__name__}."
            )
        return loss

    def _returned(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's ``forward`` under DDP."""

        def returned(*args: Any, **kwargs: Any) -> Any:
            return self.replica.returned(forward(*args, **kwargs))

        returned.__wrapped__ = forward  # type: ignore[attr-defined]
        return returned


def _quiet(trainer: Trainer, model: torch.nn.Module) -> Trainer:
    """A trainer that computes losses of a model, and logs and counts for nobody."""
    quiet: Trainer = object.__new__(type(trainer))
    attributes = {name: _unshared(value) for name, value in vars(trainer).items()}
    planned = attributes.pop("compute_loss", None)
    if isinstance(planned, _PlannedLoss) and planned.own is not None:
        attributes["compute_loss"] = planned.own
    vars(quiet).update(attributes)
    quiet.model = quiet.model_wrapped = model
    quiet.state = copy.deepcopy(trainer.state)
    quiet.accelerator = _QuietAccelerator(trainer.accelerator)
    vars(quiet)["log"] = _nothing
    return quiet


def _unshared(value: Any) -> Any:
    """A container with its own containers; what else there is stays the same."""
    if isinstance(value, dict):
        own = copy.copy(value)
        own.update({key: _unshared(one) for key, one in value.items()})
        return own
    return copy.copy(value) if isinstance(value, (list, set)) else value


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing, as a step that is only traced does."""


class _QuietAccelerator:
    """Gathers no metrics: other processes do not, and their values do not matter."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather_for_metrics(self, data: Any, *_: Any, **__: Any) -> Any:
        """Numbers that can be read, in place of those of all processes."""
        if isinstance(data, torch.Tensor) and data.numel() == 1:
            return torch.tensor(1, dtype=data.dtype).reshape(data.shape)
        return data


def refused_settings(args: Any, model: torch.nn.Module) -> dict[str, bool]:
    """What to say of each setting that is not planned -> whether it is set.

    Args:
        args: Of the trainer.
        model: The model.
    """
    checkpointing = checkpointing_already(model)
    # Either sets both.
    settings = [f"{name}=True" for name in _CHECKPOINTING if getattr(args, name, False)]
    return {
        f"{' or '.join(settings)} recomputes already; set it to False, the plan decides"
        " what is recomputed": bool(settings),
        f"`{checkpointing}` has gradient checkpointing already; switch it off, the plan"
        " decides what is recomputed": bool(checkpointing),
        "torch_compile=True makes ops of its own; leave it out, or use"
        " `autosac.compile`": args.torch_compile,
        "the model is compiled, which makes ops of its own; leave that out": (
            is_compiled(model)
        ),
        f"n_gpu={args.n_gpu} copies the model to several GPUs at each step; make one of"
        " them visible (CUDA_VISIBLE_DEVICES)": args.n_gpu > 1,
        "deepspeed moves parameters and gradients; leave it out": args.deepspeed,
        "fsdp shards the model in units of its own before a batch comes; leave `fsdp`"
        " out and call `autosac.integrations.huggingface_fsdp.plan_and_shard` before"
        " training, without `MemoryBudget`": bool(args.fsdp)
        or any(map(is_fsdp_unit, model.modules())),
    }
