"""Accelerate's `save_state` and `load_state` for a model that a plan has sharded.

    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    save_sharded(accelerator)
    accelerator.save_state("checkpoint")

Accelerate shards on GPUs and by its plugin only; of a model that is sharded otherwise
it would save what the first process has (accelerate 1.15, accelerator.py). With this,
each process writes its shards, and all the rest (scaler, schedulers, loaders, random
states) is saved as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from autosac.errors import ArgumentError
from autosac.integrations.sharded_checkpoints import (
    load_optimizer,
    load_weights,
    save_shards,
)
from autosac.kinds import check_kind


def save_sharded(accelerator: Accelerator) -> None:
    """Let an accelerator save and load its model and optimizer in shards.

    Args:
        accelerator: Has prepared one of each.

    Raises:
        ArgumentError: It has prepared more, or not yet both; or is no accelerator.
    """
    wanted = "the `Accelerator` that prepared model and optimizer"
    check_kind(accelerator, Accelerator, name="accelerator", wanted=wanted)
    models, optimizers = accelerator._models, accelerator._optimizers
    if (len(models), len(optimizers)) != (1, 1):
        raise ArgumentError(
            f"`accelerator` has prepared {len(models)} models and {len(optimizers)}"
            " optimizers: it must have prepared one of each before; save others with"
            " `autosac.integrations.sharded_checkpoints.save_shards`."
        )
    model, optimizer = models[0], optimizers[0].optimizer

    def save(_: Any, weights: Any, output_dir: str) -> None:
        save_shards(output_dir, model, optimizer)

    def load(_: Any, input_dir: str) -> None:
        load_weights(input_dir, model)
        load_optimizer(input_dir, model, optimizer)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    own: Any = accelerator
    own.save_state = _without_either(accelerator, accelerator.save_state)
    own.load_state = _without_either(accelerator, accelerator.load_state)


def _without_either(
    accelerator: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """A function during which Accelerate has neither model nor optimizer."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        prepared = accelerator._models, accelerator._optimizers
        accelerator._models, accelerator._optimizers = [], []
        try:
            return function(*args, **kwargs)
        finally:
            accelerator._models, accelerator._optimizers = prepared

    return call
