"""The `Trainer` with a model that was sharded before training.

What it would do to such a model only if it had sharded it (transformers 5.24,
trainer.py) is replaced: a checkpoint has whole weights, as `from_pretrained` reads
them, and what each process has of weights and optimizer, of which training is resumed;
and every micro-step reduces its gradients, so that none stay whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from autosac.integrations.sharded_checkpoints import (
    load_optimizer,
    load_weights,
    save_shards,
    whole_weights,
)


def adopt_sharded(trainer: Trainer) -> None:
    """Let a trainer train, save and load the shards of its model.

    Args:
        trainer: Its model is sharded, by `plan_and_shard` or by hand.
    """
    own: Any = trainer
    # With that, it leaves the model as it is.
    own.is_distributed_loading_by_transformers = True
    own._defer_fsdp_gradient_reduction = contextlib.nullcontext
    own._save = partial(_save, trainer, trainer._save)
    own._save_optimizer_and_scheduler = partial(_save_states, trainer)
    own._load_from_checkpoint = partial(_load_weights, trainer)
    own._load_optimizer_and_scheduler = partial(_load_states, trainer)


def _save(
    trainer: Trainer,
    own: Callable[..., None],
    output_dir: str | None = None,
    state_dict: dict[str, Any] | None = None,
) -> None:
    weights = whole_weights(_model(trainer)) if state_dict is None else state_dict
    if trainer.args.should_save:
        own(output_dir, weights)


def _save_states(trainer: Trainer, output_dir: str) -> None:
    save_shards(output_dir, _model(trainer), _optimizer(trainer))
    if trainer.args.should_save:
        scheduler: Any = trainer.lr_scheduler
        torch.save(scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))


def _load_weights(
    trainer: Trainer, checkpoint: str, model: torch.nn.Module | None = None
) -> None:
    load_weights(checkpoint, _model(trainer))


def _load_states(trainer: Trainer, checkpoint: str | None) -> None:
    if checkpoint is None:
        return
    load_optimizer(checkpoint, _model(trainer), _optimizer(trainer))
    scheduler: Any = trainer.lr_scheduler
    path = os.path.join(checkpoint, SCHEDULER_NAME)
    scheduler.load_state_dict(torch.load(path, weights_only=True))


def _model(trainer: Trainer) -> torch.nn.Module:
    assert isinstance(trainer.model, torch.nn.Module)
    return trainer.model


def _optimizer(trainer: Trainer) -> Any:
    """The optimizer without what Accelerate puts around it."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)
