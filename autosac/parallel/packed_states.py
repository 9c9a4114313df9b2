"""The state of optimizers of parameters that pack two in one (`packed_shard`).

An optimizer keeps, of such a parameter, tensors that are laid out as it is. PyTorch's
distributed checkpoints take what a rank has for one slice: they refuse to save two, and
would mix up what they load. So state dicts of the optimizer have slices, as those of
the model do, and loading packs them again. Optimizers are met when they step for the
first time, which checkpoints of PyTorch make them do before they save or load
(`_init_optim_state` of torch/distributed/checkpoint/state_dict.py, torch 2.14).
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autosac._compat_autograd import can_hook
from autosac._compat_distributed import is_packed

_met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@cache
def watch_optimizers() -> None:
    """Let all optimizers of packed parameters have slices in their state dicts."""
    register_optimizer_step_pre_hook(_meet)


def _meet(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _met or not can_hook(optimizer):
        return
    _met.add(optimizer)
    if not any(map(_packs, _parameters(optimizer))):
        return
    optimizer.register_state_dict_post_hook(_unpack)
    optimizer.register_load_state_dict_pre_hook(_pack)
    for parameter, own in optimizer.state.items():  # loaded before the first step
        optimizer.state[parameter] = _like(parameter, own)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _packs(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and any(map(is_packed, tensor.placements))


def _unpack(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    state = {
        key: {name: _sliced(value) for name, value in own.items()}
        for key, own in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _sliced(value: Any) -> Any:
    if not _packs(value):
        return value
    placements = [Shard(p.dim) if is_packed(p) else p for p in value.placements]
    return value.redistribute(placements=placements)


def _pack(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = dict(zip(keys, _parameters(optimizer), strict=False))
    state = {
        key: _like(parameters.get(key), own) for key, own in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _like(parameter: Any, own: dict[str, Any]) -> dict[str, Any]:
    """State of a parameter, laid out as that if it is packed."""
    if not _packs(parameter):
        return own
    return {
        name: value.redistribute(placements=parameter.placements)
        if isinstance(value, DTensor) and value.shape == parameter.shape
        else value
        for name, value in own.items()
    }
