"""A memory budget for Lightning's `Trainer`.

    trainer = Trainer(callbacks=[MemoryBudget("6GiB")], ...)

What the loop of lightning 2.6 (pytorch/loops/optimization/automatic.py, `Closure`) does
to memory, beyond `autosac.step.training_step`: it zeroes gradients between forward and
backward, so that those of the step before are alive in forward; loss and forward are
`training_step`, under the precision plugin's context.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parallel import DistributedDataParallel

from autosac.checkpointing.batch_variants import steps_by_hand
from autosac.errors import InfeasibleBudgetError, UnsupportedError
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

_OWN_LOOP = (
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)


class MemoryBudget(BudgetCallback, Callback):
    """Plans on the first batch of training, applies the plan, takes it off at the end.

    The plan is for the shapes of that batch; `on_mismatch` says what becomes of others.
    Losses and weights are those of training without it, bit by bit.

    Its arguments are those of `BudgetCallback`.
    """

    _begin_step: Callable[..., None] | None = None
    _has_run = False
    _callbacks: Sequence[Any] = ()

    def setup(
        self, trainer: Trainer, pl_module: LightningModule, stage: str | None = None
    ) -> None:
        """Plan each training of this fit on its first batch.

        A training begins, steps and ends where the strategy is told so: behind the
        module's own hooks, which may thaw parameters, and in the trials of a finder
        too, which takes all callbacks from the trainer for these.
        """
        if stage != "fit":
            return
        self._clean_up(pl_module)
        self._callbacks, self._has_run = vars(trainer)["callbacks"], False
        hooks: dict[str, Callable[..., None]] = {
            "on_train_start": lambda: self._begin_training(trainer, pl_module),
            "on_train_batch_start": lambda batch, batch_idx, *_: self._begin(
                trainer, pl_module, batch, batch_idx
            ),
            "on_train_end": lambda: self._end_training(pl_module),
        }
        for name, hook in hooks.items():
            self._undo.append(_call_behind(trainer.strategy, name, hook))

    def _begin_training(self, trainer: Trainer, module: LightningModule) -> None:
        self._end_training(module)  # a trial that ran out of memory has not ended
        _refuse(trainer, module, self._callbacks)

    def _begin(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Plan on the first batch; every step follows the plan for its own."""
        inputs = arguments_of_step(module, batch, batch_idx)
        if self._begin_step is None:
            searches_sizes = self._has_run and not vars(trainer)["callbacks"]
            with _told_to_finder(searches_sizes=searches_sizes):
                self._begin_step = self._apply(trainer, module, inputs)
            self._has_run = True
        elif trainer.global_step:
            self.look_at_callbacks(self._callbacks, module)
        self._begin_step(*inputs)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was found, before its own hook."""
        self._end_training(pl_module)

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Leave the strategy as it was found."""
        self._clean_up(pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the module as it was found, after an error too."""
        self._clean_up(pl_module)

    def _apply(
        self, trainer: Trainer, module: LightningModule, inputs: tuple[Any, ...]
    ) -> Callable[..., None]:
        replica = replica_of(_wrapped(trainer))
        loop = loop_of(
            trainer,
            replica,
            self._callbacks,
            optimizer=trainer.optimizers[0],
            exclude=self.exclude,
            opaque=self.opaque,
        )
        if self not in vars(trainer)["callbacks"]:
            # A finder of learning rates holds what generators were before its trial.
            others_bytes = loop.scalars_bytes + torch.get_rng_state().nbytes
            loop = replace(loop, scalars_bytes=others_bytes)
        batches = [inputs, *self._worst(trainer, inputs)]
        plan = plan_loss(
            module,
            [(batch, {}) for batch in batches],
            loop,
            memory_budget=self.memory_budget,
            on_mismatch=self.on_mismatch,
        )
        plan.apply(module)
        self.callbacks_bytes = loop.callbacks_bytes
        self.plan = replace(plan, replan=None)  # which keeps the trainer alive
        for logger in trainer.loggers:  # none that keeps anything in a trial
            logger.log_metrics(figures(self.plan), step=trainer.global_step)
        if trainer.is_global_zero and self in vars(trainer)["callbacks"]:
            self.report(summary(self.plan, replica))
        return steps_by_hand(module)

    def _worst(
        self, trainer: Trainer, inputs: tuple[Any, ...]
    ) -> list[tuple[Any, ...]]:
        """Arguments of `training_step` for the largest batch; none if unknown."""
        if self.max_length is not None:
            return [(lengthened(inputs[0], self.max_length), *inputs[1:])]
        if self.worst_batch is None:
            return []
        batch = trainer.precision_plugin.convert_input(self.worst_batch)
        batch = trainer.strategy.batch_to_device(batch)
        return [(on_device(batch, trainer.strategy.root_device), *inputs[1:])]

    def _end_training(self, module: LightningModule) -> None:
        if self._begin_step is not None and self.plan is not None:
            self.plan.unapply(module)
        self._begin_step = None

    def _clean_up(self, module: LightningModule) -> None:
        self._end_training(module)
        self._callbacks = ()
        while self._undo:
            self._undo.pop()()


def _call_behind(
    strategy: Strategy, name: str, hook: Callable[..., None]
) -> Callable[[], object]:
    """Call something behind a hook of a strategy; what is returned undoes it."""
    own = getattr(strategy, name)

    def both(*args: Any) -> None:
        own(*args)
        hook(*args)

    strategy.__dict__[name] = both
    return lambda: strategy.__dict__.pop(name, None)


@contextmanager
def _told_to_finder(*, searches_sizes: bool) -> Iterator[None]:
    """Let a finder go back to a smaller batch where no plan fits a larger one.

    Source:
        lightning 2.6, pytorch/utilities/memory.py, `is_cuda_out_of_memory`.
    """
    try:
        yield
    except InfeasibleBudgetError as error:
        if not searches_sizes:
            raise
        raise RuntimeError(f"As with CUDA out of memory: {error}") from error


def arguments_of_step(
    module: LightningModule, batch: Any, batch_idx: int
) -> tuple[Any, ...]:
    """What the trainer passes to ``training_step``.

    Source:
        lightning 2.6, pytorch/loops/training_epoch_loop.py, `_build_kwargs`.
    """
    takes_idx = is_param_in_hook_signature(
        module.training_step, "batch_idx", min_args=2
    )
    return (batch, batch_idx) if takes_idx else (batch,)


def loop_of(
    trainer: Trainer, replica: Replica, callbacks: Sequence[Any], **options: Any
) -> Loop:
    """How a trainer runs a step.

    Args:
        trainer: The trainer.
        replica: What DDP adds.
        callbacks: Of the trainer; in a trial of a finder, those that it has put aside.
        options: As in `profile`, besides what the trainer says.
    """
    clips_norm = str(trainer.gradient_clip_algorithm or "norm") == "norm"
    scales = getattr(trainer.precision_plugin, "scaler", None) is not None
    return Loop(
        forward=lambda module: TrainingStep(module, trainer, replica),
        # Of a dataset without a length it fetches a batch ahead, to the CPU.
        num_other_batches=int(trainer.strategy.root_device.type == "cpu"),
        scalars_bytes=Loop.scalars_bytes + (SCALER_BYTES if scales else 0),
        callbacks_bytes=bytes_of_callbacks(callbacks, trainer.lightning_module),
        replica=replica,
        options={
            "accumulate": _most_accumulated(trainer, callbacks),
            # Clipping by value takes no memory.
            "clip_grad_norm": (clips_norm and trainer.gradient_clip_val) or None,
            "gradients_in_forward": True,
            # Without an optimizer nothing ever zeroes gradients.
            "keeps_gradients": isinstance(options["optimizer"], _MockOptimizer),
            **options,
        },
    )


def _most_accumulated(trainer: Trainer, callbacks: Sequence[Any]) -> int:
    """The most micro-steps of an optimizer step, now or later."""
    schedules = [c for c in callbacks if isinstance(c, GradientAccumulationScheduler)]
    later = [num for schedule in schedules for num in schedule.scheduling.values()]
    return max(trainer.accumulate_grad_batches, *later, 1)


def _wrapped(trainer: Trainer) -> torch.nn.Module:
    """The module, with DDP around it if there is one."""
    model = trainer.strategy.model
    assert model is not None
    return model


class TrainingStep(StepForward):
    """Runs a module's ``training_step`` as the trainer does."""

    def __init__(
        self, module: LightningModule, trainer: Trainer, replica: Replica
    ) -> None:
        super().__init__(module, trainer, replica)
        self.__wrapped__ = module.training_step  # for those who look at the signature

    def __call__(self, *args: Any) -> torch.Tensor:
        module = self.module
        module.__dict__.update(
            _trainer=self.trainer, log=_nothing, log_dict=_nothing, print=_nothing
        )
        stand_in = module.__dict__.pop("forward")  # which `training_step` may call
        if self.own is not None:
            module.__dict__["forward"] = self.own
        try:
            context = self.trainer.precision_plugin.train_step_context()
            with context, self.replica.in_forward():
                return _loss(self.replica.returned(module.training_step(*args)))
        finally:
            module.__dict__["forward"] = stand_in


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing, as a step that is only traced does."""


def _loss(output: Any) -> torch.Tensor:
    """The loss of what ``training_step`` returns."""
    if isinstance(output, torch.Tensor):
        return output
    if not isinstance(output, dict) or not isinstance(output.get("loss"), torch.Tensor):
        raise UnsupportedError(
            "`MemoryBudget` cannot plan this: `training_step` returns no loss for the"
            f" first batch, but {type(output).__name__}."
        )
    for name, value in output.items():
        if name != "loss" and isinstance(value, torch.Tensor) and value.numel() > 1:
            raise UnsupportedError(
                f"`MemoryBudget` cannot plan this: `training_step` returns `{name}`"
                f" {tuple(value.shape)} beside the loss, which Lightning keeps over the"
                " whole step; return the loss, or single numbers beside it."
            )
    loss: torch.Tensor = output["loss"]
    return loss


def _refuse(
    trainer: Trainer, module: LightningModule, callbacks: Sequence[Any]
) -> None:
    """Refuse settings of the trainer that a plan could not keep its word under.

    Raises:
        UnsupportedError: With what to change.
    """
    strategy = trainer.strategy
    moves = (
        f"{type(strategy).__name__} moves or shards the model; use 'ddp' or one device,"
        " or `ModelParallelStrategy` with"
        " `autosac.integrations.lightning_fsdp.plan_and_shard` instead of this callback"
    )
    is_whole = isinstance(strategy, SingleDeviceStrategy) or isinstance(
        strategy.model, DistributedDataParallel
    )
    # Its hooks are in every module, and what they keep has no copy.
    records = getattr(vars(trainer)["profiler"], "_register", None) is not None
    names = (
        "the PyTorch profiler hooks into all modules; let it not, by"
        " `PyTorchProfiler(record_module_names=False)`"
    )
    refuse(
        {
            **several(callbacks),
            moves: not is_whole,
            names: records,
            **refused_settings(module),
        }
    )


def refused_settings(module: LightningModule) -> dict[str, bool]:
    """What to say of each way of a module that is not planned -> whether it is so."""
    overridden = [name for name in _OWN_LOOP if is_overridden(name, module)]
    step = inspect.signature(module.training_step).parameters
    checkpointing = checkpointing_already(module)
    return {
        "manual optimization is a loop of its own; use `autosac.plan` there": (
            not module.automatic_optimization
        ),
        f"the module has its own {', '.join(overridden)}; use `autosac.plan`": (
            bool(overridden)
        ),
        "`training_step` takes `dataloader_iter`; let it take a batch": (
            "dataloader_iter" in step
        ),
        "the module is compiled, which makes ops of its own; leave that out": (
            getattr(module, "_compiler_ctx", None) is not None
        ),
        f"`{checkpointing}` has gradient checkpointing already; switch"
        " it off, the plan decides what is recomputed": bool(checkpointing),
    }
