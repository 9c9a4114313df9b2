"""One plan for all processes of a data-parallel training.

What `DistributedDataParallel` (DDP) takes besides the step of one process, in torch
2.10 to 2.15 (torch/nn/parallel/distributed.py and the reducer of
torch/csrc/distributed/c10d): buckets as large as the gradients of all trained
parameters, all the time; with `find_unused_parameters` or `static_graph` two tables
with 4 bytes for each of these parameters, and copies of all outputs of the model that
need gradients (for a static graph in its first step).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from autosac import _compat_alone
from autosac._compat_distributed import (
    clones_outputs,
    first_bucket_bytes,
    has_hook,
    watch_hooks,
)
from autosac.errors import AutosacError, UnsupportedError
from autosac.profiles.profile import Profile
from autosac.step.arguments import check_no_synced_norms, warn

_NOTHING = contextlib.nullcontext()
_Plan = TypeVar("_Plan")
_TABLE_ENTRY_BYTES = 4  # of which parameters were used: int32


@dataclass(frozen=True, kw_only=True, eq=False)
class Replica:
    """A model of which every process trains a copy.

    Attributes:
        module: The model, without DDP around it.
        wrapper: DDP, if there is one.
        group: The processes; None for a single one without DDP.
        blocks: Sizes in bytes of what DDP allocates for as long as it lives.
        clones_outputs: Whether DDP returns copies of the model's outputs.
    """

    module: torch.nn.Module
    wrapper: DistributedDataParallel | None = None
    group: Any = None
    blocks: tuple[int, ...] = ()
    clones_outputs: bool = False

    @property
    def held_bytes(self) -> int:
        """What DDP holds all the time."""
        return sum(self.blocks)

    def holding(self, profile: Profile) -> Profile:
        """The profile of a step beside which DDP holds its buckets."""
        if not self.blocks:
            return profile
        return replace(
            profile,
            tape=_holding(profile.tape, self.blocks),
            redrawn=tuple(
                replace(other, tape=_holding(other.tape, self.blocks))
                for other in profile.redrawn
            ),
        )

    def watch(self) -> None:
        """There is a plan: warn of what DDP gets from now on."""
        if self.wrapper is not None:
            watch_hooks(self.wrapper, _warn_of_hook)

    def alone(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, one process plans, and nothing that it runs reaches the others."""
        return _NOTHING if self.group is None else _compat_alone.alone()

    def in_forward(self) -> contextlib.AbstractContextManager[Any]:
        """Around the model's forward: what a rerun would send once more is refused.

        Raises:
            UnsupportedError: It talks to other processes.
        """
        return _NOTHING if self.group is None else _compat_alone.refused()

    def returned(self, output: Any) -> Any:
        """What DDP returns in place of a model's output."""
        return tree_map(_copied, output) if self.clones_outputs else output


def _holding(tape: Any, blocks: tuple[int, ...]) -> Any:
    return replace(tape, library_bytes=(*tape.library_bytes, *blocks))


class _Sink(torch.autograd.Function):
    """Copies a tensor on the way forward, and nothing on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _copied(leaf: Any) -> Any:
    has_history = isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    return _Sink.apply(leaf) if has_history else leaf


def replica_of(model: torch.nn.Module) -> Replica:
    """What DDP adds to a model's step; nothing for a model without DDP.

    Raises:
        UnsupportedError: A plan could not keep its word under this DDP; says why.
    """
    if not isinstance(model, DistributedDataParallel):
        return Replica(module=model)
    check_no_synced_norms(model.module)
    for sentence, applies in _refused(model).items():
        if applies:
            raise UnsupportedError(f"A plan for several processes: {sentence}.")
    trained = [
        parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    ]
    blocks = _buckets([p.nbytes for p in trained], model.bucket_bytes_cap)
    if model.find_unused_parameters or model.static_graph:
        blocks += [_TABLE_ENTRY_BYTES * len(trained)] * 2
    return Replica(
        module=model.module,
        wrapper=model,
        group=model.process_group,
        blocks=tuple(blocks),
        clones_outputs=clones_outputs(model),
    )


def _warn_of_hook() -> None:
    warn(
        "A communication hook comes to DDP after the step was planned: the copies of"
        " gradients and whatever else it makes or keeps are in no plan, and the peak"
        " may be above the budget by them. Leave the hook out."
    )


def _refused(model: DistributedDataParallel) -> dict[str, bool]:
    """What to say of each setting of DDP -> whether it is set."""
    return {
        "a communication hook of DDP makes copies of gradients that no trace shows;"
        " leave it out": has_hook(model),
        "`mixed_precision` of DDP casts parameters outside of the model's forward; use"
        " autocast": model.mixed_precision is not None,
    }


def _buckets(sizes: list[int], most_bytes: int) -> list[int]:
    """Bytes of DDP's buckets: the last parameters first, the first bucket is small."""
    buckets: list[int] = []
    limit = min(first_bucket_bytes(), most_bytes)
    open_bytes = 0
    for nbytes in reversed(sizes):
        open_bytes += nbytes
        if open_bytes >= limit:
            buckets.append(open_bytes)
            open_bytes, limit = 0, most_bytes
    return [*buckets, open_bytes] if open_bytes else buckets


def planned_once(make: Callable[[], _Plan], size: int, group: Any) -> _Plan:
    """One plan for all processes, made by the one with the largest batch.

    All of them must call this. An error of the one that plans is raised by all.

    Args:
        make: Makes a plan for this process's own batch.
        size: How large the batch is; of equal ones the first process's counts.
        group: The processes; None for one.

    Returns:
        The plan. `Plan.traced` is known to the process that made it.
    """
    if group is None or dist.get_world_size(group) == 1:
        return make()
    sizes: list[Any] = [0] * dist.get_world_size(group)
    dist.all_gather_object(sizes, size, group=group)
    planner = sizes.index(max(sizes))
    sent: list[Any] = [None]
    if dist.get_rank(group) == planner:
        try:
            sent = [make()]
        except Exception as error:  # raised below, by every process
            sent = [_sendable(error)]
    own = sent[0]
    dist.broadcast_object_list(sent, group=group, group_src=planner)
    answer = sent[0] if own is None else own
    if isinstance(answer, Exception):
        raise answer
    plan: _Plan = answer
    return plan


def _sendable(error: Exception) -> Exception:
    """An error as other processes can get it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the class of another library does there
        return AutosacError(f"{type(error).__name__}: {error}")
    return error
