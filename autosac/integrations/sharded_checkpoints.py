"""Checkpoints of models that a plan has sharded: every process writes its shards.

A trainer that did not shard a model itself writes what the first process has of it,
and gives that to all of them when it resumes (accelerate 1.15, checkpointing.py;
transformers 5.24, trainer.py, `_save_optimizer_and_scheduler`). Shards are read again
by models that are sharded in another way.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autosac.errors import ArgumentError

_FOLDER = "shards"  # of a checkpoint, beside what a trainer writes
_Path = str | os.PathLike[str]


def save_shards(folder: _Path, model: torch.nn.Module, optimizer: Any) -> None:
    """Write weights and optimizer state; every process calls it.

    Args:
        folder: Of the checkpoint.
        model: Sharded.
        optimizer: Of its parameters.
    """
    weights, state = states.get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=Path(folder) / _FOLDER)


def load_weights(folder: _Path, model: torch.nn.Module) -> None:
    """Read the weights; every process calls it.

    Raises:
        ArgumentError: The folder has no shards.
    """
    weights = {"model": states.get_model_state_dict(model)}
    load(weights, checkpoint_id=_shards(folder))
    states.set_model_state_dict(model, weights["model"])


def load_optimizer(folder: _Path, model: torch.nn.Module, optimizer: Any) -> None:
    """Read the optimizer's state, likewise."""
    state = {"optimizer": states.get_optimizer_state_dict(model, optimizer)}
    load(state, checkpoint_id=_shards(folder))
    states.set_optimizer_state_dict(model, optimizer, state["optimizer"])


def whole_weights(model: torch.nn.Module) -> dict[str, Any]:
    """Whole weights on the first process's CPU, gathered one by one; every one calls.

    Returns:
        Name -> weight; empty in other processes.
    """
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = states.get_model_state_dict(model, options=options)
    return weights


def _shards(folder: _Path) -> Path:
    path = Path(folder) / _FOLDER
    if not path.is_dir():
        raise ArgumentError(
            f"`{folder}` is no checkpoint of a model that a plan had sharded, as it has"
            f" no folder `{_FOLDER}`; load whole weights before `plan_and_shard`."
        )
    return path
