"""Apply a sharding to a real model with ``fully_shard``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from inspect import signature
from math import prod
from typing import Any

import torch
from torch.distributed import get_world_size, is_initialized
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from autosac.errors import ArgumentError, UnsupportedError
from autosac.parallel.sharding import Sharding

# Switches of FSDP units (`FSDPModule`), and why they do not go with a plan.
_AHEAD = (
    "gathers parameters earlier than planned, and there is no room for them: leave it"
    " out; FSDP2's own order is planned with."
)
_SWITCHES = {
    "set_requires_gradient_sync": (
        "keeps whole gradients over micro-steps, as `no_sync` does, and the plan has no"
        " room for them: leave it out, and plan with `accumulate`; every micro-step"
        " then reduces its gradients."
    ),
    "set_reshard_after_forward": (
        "changes which units free their parameters after forward, and the peak with"
        " that: leave it out; the plan decides it."
    ),
    "set_reshard_after_backward": (
        "keeps gathered parameters after backward, for which the plan has no room:"
        " leave it out."
    ),
    "set_keep_unsharded_storage": (
        "keeps the memory of gathered parameters, for which the plan has no room:"
        " leave it out."
    ),
    "set_modules_to_forward_prefetch": _AHEAD,
    "set_modules_to_backward_prefetch": _AHEAD,
    "set_reduce_scatter_max_input_buffers": (
        "keeps the buffers of several reductions, and the plan has room for one: leave"
        " it out."
    ),
}
_PLANNED_WITH = {
    "set_requires_gradient_sync": True,
    "set_reshard_after_backward": True,
    "set_keep_unsharded_storage": False,
}


def shard(model: torch.nn.Module, sharding: Sharding, mesh: DeviceMesh) -> None:
    """Shard a model in place: units further down before those around them.

    AC units are installed before or after, as both only wrap: checkpointing
    replaces ``forward``, FSDP2 hooks the call around it, so that a rerun does not
    gather parameters anew.

    Args:
        model: On the device of the mesh, or on the meta device.
        sharding: Which modules are units.
        mesh: Of shape ``(shard_degree,)``, or with replicas ``(replicate_degree,
            shard_degree)``; dimensions go by place, as plans name them otherwise.
    """
    assert tuple(mesh.shape) == sharding.mesh_shape
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(sharding.param_dtype),
        reduce_dtype=_dtype(sharding.reduce_dtype),
    )
    order = {fqn: i for i, (fqn, _) in enumerate(model.named_modules())}
    for unit in sorted(sharding.units, key=lambda unit: -order[unit.fqn]):
        fully_shard(
            model.get_submodule(unit.fqn),
            mesh=mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=policy,
        )


def keep_as_planned(model: torch.nn.Module) -> None:
    """Refuse from now on switches by which FSDP units take more than is planned."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for name in _SWITCHES.keys() & set(dir(module)):
                setattr(module, name, partial(_switch, getattr(module, name)))


def _switch(setting: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """What a switch of an FSDP unit does under a plan.

    Raises:
        UnsupportedError: It would change what the unit keeps.
    """
    name = setting.__name__
    value = signature(setting).bind(*args, **kwargs).args[0]
    if value is not _PLANNED_WITH.get(name):
        shown = value if isinstance(value, int) else "..."
        raise UnsupportedError(f"`{name}({shown})` {_SWITCHES[name]}")
    setting(*args, **kwargs)


def check_mesh(
    shape: tuple[int, ...], names: tuple[str, ...], mesh: DeviceMesh
) -> None:
    """Refuse a mesh that a plan does not fit.

    Raises:
        ArgumentError: It is no mesh, or has another shape; or its dimensions have no
            names where there are several, those of the plan in another order, or other
            ones where not all are of replicas and shards.
    """
    check_is_mesh(mesh)
    if tuple(mesh.shape) != shape:
        raise ArgumentError(
            f"`mesh` has shape {tuple(mesh.shape)}, and the plan wants {shape};"
            " `plan.make_mesh()` makes it."
        )
    given = mesh.mesh_dim_names
    must_be_equal = not set(names) <= {"replicate", "shard"}
    is_wrong = given is None or (
        given != names and (must_be_equal or not set(names).isdisjoint(given))
    )
    if len(shape) > 1 and is_wrong:
        raise ArgumentError(
            f"`mesh` has dimensions named {given}, and the plan wants"
            f" {names}; make it with `plan.make_mesh()`, or pass"
            f" mesh_dim_names={names}."
        )


def check_is_mesh(mesh: object) -> None:
    """Refuse what is no mesh.

    Raises:
        ArgumentError: Says how to make one.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"`mesh` is a {type(mesh).__name__}, and must be a DeviceMesh, as"
            " `plan.make_mesh()` makes it."
        )


def make_mesh(
    device_type: str | torch.device,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    number: Callable[[int], str],
) -> DeviceMesh:
    """The mesh of a plan; every rank calls it.

    Args:
        device_type: Of the ranks' devices, or one of these.
        shape: The mesh's,
        names: and of its dimensions.
        number: The argument to plan with for so many ranks.

    Raises:
        ArgumentError: There is no process group, there are more or fewer ranks, or
            there is no such type of device.
    """
    kind = _device_type(device_type)
    wanted = prod(shape)
    if wanted > 1 and not is_initialized():
        raise ArgumentError(
            f"The plan is for {wanted} ranks, and this process is in no process group:"
            " start the ranks, as by `torchrun`, and call"
            " torch.distributed.init_process_group first."
        )
    num_ranks = get_world_size() if is_initialized() else 1
    if num_ranks != wanted:
        raise ArgumentError(
            f"The plan is for {wanted} ranks, and there are {num_ranks}; plan with"
            f" {number(num_ranks)}."
        )
    return init_device_mesh(kind, shape, mesh_dim_names=names)


def _device_type(given: Any) -> str:
    """Type of a device that ranks may have.

    Raises:
        ArgumentError: There is none of this name.
    """
    kind = "meta"
    if isinstance(given, (str, torch.device)):
        with contextlib.suppress(RuntimeError):  # of unknown names
            kind = torch.device(given).type
    if kind == "meta":
        raise ArgumentError(
            f"`device_type`={given!r} is no type of device that ranks have: pass one"
            " such as 'cuda' or 'cpu'."
        )
    return kind


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
