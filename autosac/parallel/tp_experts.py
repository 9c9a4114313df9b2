"""Mixtures of experts whose weights ranks of a tensor-parallel group share.

Each rank has a part of every expert (``moe_tp_experts``) or some whole experts
(``ep_dispatch_experts``). All ranks see all tokens and route them alike, each works out
what its weights make of them, and one all-reduce sums that. Backward likewise sums the
gradients of tokens and of their routing weights. A rank with whole experts hands rows
that are routed to others on with the weight 0 and an index behind its own: experts of
Transformers skip these in their products (`use_experts_implementation` in
transformers/integrations/moe.py; `AllReduceEP` in transformers/distributed/
expert_parallel.py). So no tensor's size depends on where tokens go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from autosac._compat_distributed import packed_shard
from autosac.parallel.packed_states import watch_optimizers
from autosac.parallel.tp_checks import PARAMETER_DIMENSIONS, WHOLE_EXPERTS


class Experts(ParallelStyle):
    """Divides the parameters of a module of experts, and sums what it puts out.

    Args:
        style: Of the module.
        styles: Of its parameters, by name.
        kinds: Type of module -> what it becomes, shared by all modules of a model.
    """

    def __init__(
        self, style: str, styles: Mapping[str, str], kinds: dict[type, type]
    ) -> None:
        super().__init__()
        self.is_whole = style == WHOLE_EXPERTS
        self.styles, self.kinds = styles, kinds

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, style in self.styles.items():
            parameter = module.get_parameter(name)
            part = _part(parameter.data, style, device_mesh, self.src_data_rank)
            own = nn.Parameter(part, requires_grad=parameter.requires_grad)
            module.register_parameter(name, own)
        if self.is_whole:
            experts: Any = module
            experts.num_experts //= device_mesh.size()
            experts._is_expert_parallel = True
        _save_unpacked(module, self.styles)
        kind = type(module)
        if kind not in self.kinds:
            self.kinds[kind] = _divided(kind, device_mesh, is_whole=self.is_whole)
        module.__class__ = self.kinds[kind]
        return module


def _part(
    whole: torch.Tensor, style: str, mesh: DeviceMesh, src_data_rank: int | None
) -> DTensor:
    """What each rank has of a parameter, as a distributed tensor."""
    dimension, is_packed = PARAMETER_DIMENSIONS[style]
    dimension %= whole.dim()
    if not is_packed:
        return distribute_tensor(
            whole, mesh, [Shard(dimension)], src_data_rank=src_data_rank
        )
    whole = distribute_tensor(
        whole, mesh, [Replicate()], src_data_rank=src_data_rank
    ).to_local()
    rank, size = mesh.get_local_rank(), mesh.size()
    halves = whole.chunk(2, dimension)
    own = torch.cat([half.chunk(size, dimension)[rank] for half in halves], dimension)
    return DTensor.from_local(
        own,
        mesh,
        [packed_shard(dimension)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _save_unpacked(module: nn.Module, styles: Mapping[str, str]) -> None:
    """Let state dicts have what packs two as if it were one, cut into ranks' slices.

    Distributed checkpoints know a rank's part as one slice, and would mix up others
    (see `_redistribute_state_dict` in transformers/distributed/checkpoint.py).
    """
    dimensions = {
        name: module.get_parameter(name).dim() + PARAMETER_DIMENSIONS[style][0]
        for name, style in styles.items()
        if PARAMETER_DIMENSIONS[style][1]
    }

    def unpack(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, dimension in dimensions.items():
            value = state.get(prefix + name)
            if isinstance(value, DTensor):
                packed, slices = packed_shard(dimension), Shard(dimension)
                plain = [slices if own == packed else own for own in value.placements]
                state[prefix + name] = value.redistribute(placements=plain)

    def pack(own: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in dimensions:
            value, parameter = state.get(prefix + name), own.get_parameter(name)
            if isinstance(value, DTensor) and isinstance(parameter, DTensor):
                state[prefix + name] = value.redistribute(
                    placements=parameter.placements
                )

    if dimensions:
        watch_optimizers()
        module.register_state_dict_post_hook(unpack)
        module.register_load_state_dict_pre_hook(pack)


def _divided(kind: type, mesh: DeviceMesh, *, is_whole: bool) -> type:
    """The same type of module, whose forward works on the parameters of a rank."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(with_summed_gradient(value, mesh) for value in args)
        kwargs = {k: with_summed_gradient(v, mesh) for k, v in kwargs.items()}
        if is_whole:
            rank = mesh.get_local_rank()
            args = _own_routes(*args, num_experts=self.num_experts, rank=rank)
        with _local_parameters(self):
            own = kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        parts = DTensor.from_local(own, mesh, [Partial()], run_check=False)
        output: torch.Tensor = parts.redistribute(placements=[Replicate()]).to_local()
        return output

    body = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), body)


def with_summed_gradient(value: Any, mesh: DeviceMesh) -> Any:
    """An argument that is the same on all ranks, which each use a part of it."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return value.to_local(grad_placements=[Partial()])


def _own_routes(
    tokens: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What experts are called with, of those that a rank has.

    Args:
        tokens: Shape (tokens, width).
        indices: Of the experts of each token, shape (tokens, choices).
        weights: Of what these put out, likewise.
        num_experts: How many each rank has.
        rank: In the group.

    Returns:
        The tokens; indices among the rank's experts, `num_experts` for other ranks';
        and weights, 0 for these.
    """
    is_other = indices // num_experts != rank
    own = torch.where(is_other, num_experts, indices % num_experts)
    return tokens, own, weights.masked_fill(is_other, 0.0)


@contextlib.contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """A module's own distributed parameters are plain tensors meanwhile."""
    own = dict(module._parameters)
    for name, parameter in own.items():
        if isinstance(parameter, DTensor):
            module._parameters[name] = parameter.to_local()
    try:
        yield
    finally:
        module._parameters.update(own)
