"""A memory budget for the `Trainer` of Hugging Face Transformers.

    trainer = Trainer(model, args, callbacks=[MemoryBudget("6GiB")], ...)

What the loop of transformers 5.23 (trainer.py, `_inner_training_loop`) does to memory,
beyond `autosac.step.training_step`: the model's outputs are gone before backward, all
batches of an optimizer step are fetched before its first micro-step, and accelerate
(data_loader.py, `DataLoaderShard.__iter__`) fetches one more ahead. Autocast is part of
the model's ``forward``, so that the trace runs into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from autosac.errors import UnsupportedError
from autosac.integrations.budgets import (
    BudgetCallback,
    checkpointing_already,
    plan_loss,
    refuse,
    summary,
)

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
        _refuse(args, model)
        waiting = _FirstForward(self, model, args, kwargs["optimizer"])
        self._undo.append(waiting.remove)
        model.forward = waiting

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was found."""
        self._clean_up()

    def apply(
        self, args: Any, model: torch.nn.Module, optimizer: Any, inputs: Any
    ) -> None:
        """Plan for a batch and apply the plan."""
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.plan = plan_loss(
            model,
            inputs,
            forward=lambda model: _LossOnly(model.forward),
            memory_budget=self.memory_budget,
            num_other_batches=args.gradient_accumulation_steps - (not on_cpu),
            on_mismatch=self.on_mismatch,
            optimizer=getattr(optimizer, "optimizer", optimizer),
            accumulate=args.gradient_accumulation_steps,
            clip_grad_norm=args.max_grad_norm or math.inf,  # the norm is logged
            exclude=self.exclude,
            opaque=self.opaque,
        )
        plan = self.plan
        plan.apply(model)
        self._undo.append(lambda: plan.unapply(model))
        text = summary(plan)
        if getattr(getattr(model, "config", None), "use_cache", False):
            text += (
                "\n`model.config.use_cache` is True, so that modules that get the cache"
                " cannot recompute; set it to False for cheaper plans."
            )
        self.report(text)

    def _clean_up(self) -> None:
        while self._undo:
            self._undo.pop()()


class _LossOnly:
    """A model's ``forward`` as the trainer uses it: only the loss outlives it."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.own(*args, **kwargs)
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

    def __init__(
        self, budget: MemoryBudget, model: torch.nn.Module, args: Any, optimizer: Any
    ) -> None:
        self.budget = budget
        self.model = model
        self.args = args
        self.optimizer = optimizer
        self.own = model.__dict__.get("forward")
        self.__wrapped__ = model.forward  # for those who look at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:  # evaluation on start
            return self.__wrapped__(*args, **kwargs)
        self.remove()
        self.budget.apply(self.args, self.model, self.optimizer, (args, kwargs))
        return self.model.forward(*args, **kwargs)

    def remove(self) -> None:
        """Put back the ``forward`` that the model had."""
        if self.model.__dict__.get("forward") is self:
            del self.model.forward
            if self.own is not None:
                self.model.forward = self.own


def _refuse(args: Any, model: torch.nn.Module) -> None:
    """Refuse settings of the trainer that a plan could not keep its word under.

    Raises:
        UnsupportedError: With what to change.
    """
    checkpointing = bool(checkpointing_already(model))
    refused = {
        "gradient_checkpointing=True recomputes already; leave it out, the plan decides"
        " what is recomputed": args.gradient_checkpointing or checkpointing,
        "torch_compile=True makes ops of its own; leave it out, or use"
        " `autosac.compile`": args.torch_compile,
        "fp16=True scales losses and gradients; use bf16=True": args.fp16,
        f"world_size={args.world_size} shares a step among processes; train in one, or"
        " use `autosac.plan_parallel`": args.world_size > 1,
        f"n_gpu={args.n_gpu} copies the model to several GPUs at each step; make one of"
        " them visible (CUDA_VISIBLE_DEVICES)": args.n_gpu > 1,
        "deepspeed moves parameters and gradients; leave it out": args.deepspeed,
        "fsdp shards the model; leave it out, or use `autosac.plan_parallel`": bool(
            args.fsdp
        ),
        f"label_smoothing_factor={args.label_smoothing_factor} makes the loss outside"
        " of the model, where a plan does not see it; set it to 0": (
            args.label_smoothing_factor != 0
        ),
    }
    refuse(refused)
