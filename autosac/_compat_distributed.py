"""Private PyTorch APIs of distributed tensors (torch 2.10 to 2.15).

An op on a `DTensor` (torch/distributed/tensor/_api.py) runs as ops on what the rank
holds of it, collectives among them. What such an op returns may be an
`AsyncCollectiveTensor` (torch/distributed/_functional_collectives.py), which waits for
the collective when an op reads it. A dispatch mode that leaves ops on both to them
(`are_distributed`) sees only what the rank does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from autosac import _compat
from autosac.pytrees import mapped

# These wait for a collective, or let who reads its result do so, and return that. Eager
# steps wait at other places than traces, and hold nothing by it.
WAITS = frozenset(
    {
        "_c10d_functional.wait_tensor.default",
        "_c10d_functional._wrap_tensor_autograd.default",
    }
)

_KINDS: dict[type, str] = {}  # of tensor types seen so far: "" if they are of one rank
_PLACES = {
    "torch.distributed.tensor": "DTensor",
    "torch.distributed._tensor": "DTensor",
    "torch.distributed._functional_collectives": "AsyncCollectiveTensor",
}


def _kind(of: type) -> str:
    kind = _KINDS.get(of)
    if kind is None:
        kind = ""
        for base in of.__mro__:
            for place, name in _PLACES.items():
                if base.__name__ == name and base.__module__.startswith(place):
                    kind = name
        _KINDS[of] = kind
    return kind


def are_distributed(types: Iterable[type]) -> bool:
    """Whether an op on tensors of these types is for them to run."""
    return any(map(_kind, types))


def is_fsdp_unit(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _sharded(model: torch.nn.Module) -> Iterator[Any]:
    """What FSDP2 knows of each parameter that it shards."""
    for module in filter(is_fsdp_unit, model.modules()):
        unit: Any = module
        state = unit._get_fsdp_state()
        one = getattr(state, "_fsdp_param_group", None)  # before torch 2.14
        for group in getattr(state, "_fsdp_param_groups", [one] if one else []):
            yield from group.fsdp_params


def sharded_types(model: torch.nn.Module) -> dict[tuple[int, str], torch.dtype]:
    """Types of the parameters that FSDP2 shards, which it may gather in another one.

    Returns:
        Module that has the parameter, by its ``id``, and name in it -> type of shards.
    """
    types: dict[tuple[int, str], torch.dtype] = {}
    for parameter in _sharded(model):
        at = parameter._module_info
        modules = [at.module, *at.shared_modules]
        names = [at.param_name, *at.shared_param_names]
        dtype = parameter.sharded_param.dtype
        for owner, name in zip(modules, names, strict=True):
            types[id(owner), name] = dtype
    return types


def kept_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters as a rank keeps them, with their gradients, each once.

    Those that FSDP2 has gathered at the moment count as shards.
    """
    sharded = list(_sharded(model))
    gathered = {id(getattr(one, "_unsharded_param", None)) for one in sharded}
    whole = (p for p in model.parameters() if id(p) not in gathered)
    shards = (one.sharded_param for one in sharded)
    return list({id(p): p for p in (*whole, *shards)}.values())


def clones_outputs(replica: DistributedDataParallel) -> bool:
    """Whether ``forward`` returns copies of what the model returns (`_DDPSink`).

    For a static graph it does so in its first step only.
    """
    looks = replica.find_unused_parameters or replica.static_graph
    return bool(looks and getattr(replica, "_ddp_sink_clone", True))


def first_bucket_bytes() -> int:
    """Bytes after which DDP closes its first bucket, a small one."""
    return int(vars(torch.distributed)["_DEFAULT_FIRST_BUCKET_BYTES"])


def has_hook(replica: DistributedDataParallel) -> bool:
    """Whether a hook of the user's communicates gradients, or steps in backward."""
    return bool(replica._comm_hooks)


class _Hooks(list[Any]):
    """The hooks of a replica; calls a function when one is added."""

    def __init__(self, hooks: Iterable[Any], added: Callable[[], object]) -> None:
        super().__init__(hooks)
        self.added = added

    def append(self, hook: Any) -> None:
        super().append(hook)
        self.added()


def watch_hooks(replica: DistributedDataParallel, added: Callable[[], object]) -> None:
    """Call a function, that can be pickled, whenever a hook is added."""
    replica._comm_hooks = _Hooks(replica._comm_hooks, added)


def shards(optimizer: Any) -> list[torch.optim.Optimizer]:
    """What each rank keeps and steps of an optimizer whose state is divided by ZeRO.

    As `ZeroRedundancyOptimizer` makes its own (`_init_local_optimizer` in
    torch/distributed/optim/zero_redundancy_optimizer.py). Ranks then broadcast what
    they have stepped, in place.

    Args:
        optimizer: Any.

    Returns:
        An optimizer for each rank, without state; empty for others, and for one that
        steps in hooks of communication.
    """
    of_torch = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if of_torch is None or not isinstance(optimizer, of_torch.ZeroRedundancyOptimizer):
        return []
    if optimizer._overlap_with_ddp:
        return []
    return [
        optimizer._optim_constructor(
            [dict(group) for group in groups], **optimizer._optim_defaults
        )
        for groups in optimizer._partition_parameters()
    ]


def is_loss_parallel() -> bool:
    """Whether PyTorch's `loss_parallel` is active, for all threads."""
    from torch.distributed.tensor import DTensor  # slow to import

    handlers = DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten.nll_loss_forward.default in handlers


def has_sharding_rule(func: Any) -> bool:
    """Whether a `DTensor` knows how an op is divided.

    The tables are those of `ShardingPropagator.propagate_op_sharding_non_cached` and
    of `OpDispatcher`. Newer PyTorch may take an op apart instead.
    """
    from torch.distributed.tensor import DTensor  # slow to import

    dispatcher: Any = DTensor._op_dispatcher
    propagator: Any = dispatcher.sharding_propagator
    names = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    tables = [getattr(propagator, name, {}) for name in names]
    tables += [
        dispatcher._custom_op_handlers,
        {torch.ops.aten._local_scalar_dense.default: None},
    ]
    by_parts = getattr(propagator, "decomp_strategy", None)
    is_in_parts = by_parts is not None and by_parts.has_decomp(func)
    return is_in_parts or any(func in table for table in tables)


def hide_propagation() -> None:
    """Keep autosac's modes from seeing the ops by which `DTensor` finds out shapes.

    It runs them once for every kind of call, on fakes of the mode that is active, else
    on its own (`ShardingPropagator` in torch/distributed/tensor/_sharding_prop.py).
    """
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        return
    propagator: Any = module.ShardingPropagator
    of_torch = propagator._propagate_tensor_meta_non_cached
    if hasattr(of_torch, "__wrapped__"):
        return

    @functools.wraps(of_torch)
    def unseen(*args: Any) -> Any:
        with (
            _compat.no_modes() if _compat.has_own_modes() else contextlib.nullcontext()
        ):
            return of_torch(*args)

    propagator._propagate_tensor_meta_non_cached = unseen


@contextlib.contextmanager
def short_lists() -> Iterator[None]:
    """Let `DTensor` find out how ops on lists are divided from their distinct items.

    PyTorch goes through the whole list for each of its items.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        yield
        return
    propagator: Any = module.DTensor._op_dispatcher.sharding_propagator
    names = ("propagate_op_sharding", "propagate_op_sharding_non_cached")
    before = {name: vars(propagator).get(name) for name in names}
    for name in names:
        of_torch = getattr(propagator, name)
        setattr(propagator, name, functools.partial(_of_distinct, of_torch))
    try:
        yield
    finally:
        for name, own in before.items():
            delattr(propagator, name) if own is None else setattr(propagator, name, own)


def _of_distinct(of_torch: Callable[[Any], Any], schema: Any) -> Any:
    """How the result of an op is divided, equal items of its lists worked out once."""
    given = list(schema.args_schema)
    lists = [i for i in _compat.item_lists(schema.op) if i < len(given)]
    if not lists or len({len(given[i]) for i in lists}) > 1:
        return of_torch(schema)
    firsts: dict[Any, int] = {}
    items = list(zip(*(given[i] for i in lists), strict=True))
    places = [firsts.setdefault(item, len(firsts)) for item in items]
    if len(firsts) == len(places):
        return of_torch(schema)

    def with_lists(own: Any, change: Callable[[int, Any], Any]) -> Any:
        changed = [change(i, v) if i in lists else v for i, v in enumerate(own)]
        return dataclasses.replace(schema, args_schema=tuple(changed))

    def repeated(own: Any) -> Any:
        return type(own)(own[place] for place in places)

    columns = dict(zip(lists, zip(*firsts, strict=True), strict=True))
    short = with_lists(given, lambda i, own: type(own)(columns[i]))
    sharding = of_torch(short)
    output, moved = sharding.output_spec, sharding.redistribute_schema
    if isinstance(output, (list, tuple)):
        output = repeated(output)
    if moved is not None:
        moved = with_lists(moved.args_schema, lambda _, own: repeated(own))
    return dataclasses.replace(sharding, output_spec=output, redistribute_schema=moved)


def is_collective(name: str) -> bool:
    """Whether an op of this name exchanges data between ranks."""
    return name.startswith("_c10d_functional.")


def finished(func: Any, result: Any) -> Any:
    """The result of an op, after waiting for it if it is a collective."""
    if not is_collective(_compat.op_name(func)):
        return result
    return mapped(torch.ops._c10d_functional.wait_tensor.default, result)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What a rank holds of a tensor."""
    is_own = _KINDS.get(type(tensor)) == ""  # the usual case, without further calls
    return tensor if is_own else unwrapped(tensor)[0]


def key_on_rank(tensor: torch.Tensor) -> int:
    """Address of the storage of what a rank holds, without waiting for a collective."""
    held: Any = tensor
    while kind := _kind(type(held)):
        held = held._local_tensor if kind == "DTensor" else held.elem
    key: int = held.untyped_storage()._cdata
    return key


def unwrapped(
    tensor: torch.Tensor,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]:
    """What a rank holds of a tensor, and what makes such a tensor of that.

    It makes one of another type as well.
    """
    kind = _kind(type(tensor))
    held: Any = tensor
    if kind == "DTensor":
        own, wrap = unwrapped(held._local_tensor)
        spec = held._spec
        of: Any = type(tensor)
        assert wrap is None

        def wrapped(again: torch.Tensor) -> torch.Tensor:
            meta, own_spec = spec.tensor_meta, spec
            if meta is not None and meta.dtype != again.dtype:
                meta = meta._replace(dtype=again.dtype)
                own_spec = dataclasses.replace(spec, tensor_meta=meta)
            distributed: torch.Tensor = of(
                again.detach(), own_spec, requires_grad=False
            )
            return distributed

        return own, wrapped
    if kind:
        return held.trigger_wait(), None
    return tensor, None


def group_of(name: str) -> dist.ProcessGroup:
    """The group that PyTorch has given a name."""
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    group: dist.ProcessGroup = resolve(name)
    return group


def sharding_mesh(mesh: DeviceMesh, outer: str, inner: str) -> DeviceMesh:
    """Replicas, and two neighbouring dimensions together, without new tensors.

    Args:
        mesh: With dimensions "replicate" or not, and these two.
        outer: Name of the first,
        inner: and of the second.
    """
    both = mesh[outer, inner]._flatten(f"{outer}_{inner}")
    if "replicate" not in (mesh.mesh_dim_names or ()):
        return both
    return DeviceMesh._concatenate([mesh["replicate"], both])


def packed_shard(dimension: int) -> Any:
    """How a tensor is placed that packs two: each rank has its part of both.

    What ranks would have of it if others shared the two (`_StridedShard`).
    """
    from torch.distributed.tensor.placement_types import _StridedShard  # slow to import

    return _StridedShard(dimension, split_factor=2)


def is_packed(placement: Any) -> bool:
    """Whether that is `packed_shard`; FSDP2 divides the first dimension alone."""
    from torch.distributed.tensor.placement_types import _StridedShard  # slow to import

    return isinstance(placement, _StridedShard) and placement.dim > 0


@contextlib.contextmanager
def fake_group(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """This process is one of many ranks; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # slow to import

    hook = sys.excepthook  # which the group replaces
    _forget_groups()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_groups()
        sys.excepthook = hook


def _forget_groups() -> None:
    """Let `DTensor` find out anew how results of ops lie on meshes.

    What it has found out names the groups of the mesh that it was for, and meshes of
    the same ranks are equal to it whatever their groups are called: those of a world
    that was destroyed are not there, or another one has such a name.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_python_sharding_prop_cache()
        debug._clear_fast_path_sharding_prop_cache()
