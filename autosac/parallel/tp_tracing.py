"""The step of one rank of a tensor-parallel group, traced without the others.

The model is copied and divided under a group whose collectives do nothing, and traced
as any other: ops, bytes and collectives are those of the first rank, which has the most
of everything. Collectives are timed by the links inside a node. They are exposed: what
reads a result waits for it, unless they are taken to be asynchronous (`async_tp`).
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from autosac._compat_distributed import fake_group
from autosac.errors import TraceError, UnsupportedError
from autosac.parallel.async_tp import exposed_ms
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.divided_loss import loss_for
from autosac.parallel.expert_costs import own_ms, own_products
from autosac.parallel.formulating import Setting
from autosac.parallel.fsdp_memory import GLOO_THREADS
from autosac.parallel.partial_gradients import check_gradients_whole
from autosac.parallel.preparing import gathered_dtype, in_gathered_type
from autosac.parallel.tp_checks import divided
from autosac.parallel.tp_styles import TensorParallel
from autosac.profiles.profile import Profile
from autosac.profiles.tracing_again import traced_again
from autosac.solvers.fsdp.collectives import Collective, Group
from autosac.step.op_signatures import Signature
from autosac.step.tape import Op
from autosac.step.training_step import OptimizerInBackward, default_loss
from autosac.tracing.copying import AnyCopies
from autosac.tracing.step import Step

_Model = TypeVar("_Model", bound=torch.nn.Module)
_MANY = 2.0**50  # bytes, of which the algorithm that is fastest takes least for each
_KINDS: dict[str, Collective] = {
    "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_reduce_.default": "all_reduce",
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce_scatter",
}


def rank_profile(
    traced: Profile, tensor: TensorParallel, cluster: ClusterSpec, setting: Setting
) -> Profile:
    """The step of the first of the ranks that share slices; the profile keeps it.

    Args:
        traced: The step of the whole model, which is not changed.
        tensor: What is divided, and over how many ranks.
        cluster: Its links time the collectives.
        setting: Says in which type parameters are gathered.

    Raises:
        ArgumentError: As `tp_styles.check`, and `check_gradients_whole`; or the step
            fails as it is divided.
        TraceError: The divided model cannot be traced.
        UnsupportedError: Values decide sizes of a step that divides experts.
    """
    styles = tuple(tensor.styles.items())
    key = (
        *("rank", tensor.degree, styles, tensor.asynchronous),
        *(cluster.fabric, setting.param_dtype),
    )
    if key not in traced.parallel:
        check_experts(traced, tensor)
        with fake_ranks(tensor.degree, divides_loss=tensor.divides_loss):
            with divided(tensor.styles, tensor.degree):
                rank = _divided(traced, tensor, setting)
            check_gradients_whole(traced.tape, rank.tape, tensor)
            rank = in_gathered_type(rank, setting)
        traced.parallel[key] = priced(rank, cluster, tensor, sharded=True)
    profile: Profile = traced.parallel[key]
    return profile


def check_experts(profile: Profile, tensor: TensorParallel) -> None:
    """Refuse to divide experts of a step whose values decide sizes.

    Raises:
        UnsupportedError: They do, and it does.
    """
    if tensor.divides_experts and profile.step.learned.real:
        raise UnsupportedError(
            "Values decide how many rows each expert gets in this step, and what ranks"
            " exchange while they are traced has none: let sizes be the same for all"
            " (`experts_implementation='grouped_mm'` in Transformers, with torch 2.14),"
            " or leave experts out of `tp_plan`."
        )


@contextlib.contextmanager
def fake_ranks(num_ranks: int, *, divides_loss: bool, place: int = 0) -> Iterator[None]:
    """This process is one of ranks that share slices; losses are as on these."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_group(num_ranks, place))
        if divides_loss:
            context = loss_parallel()
            context.__enter__()
            # Its own exit forgets to leave where a step fails.
            stack.callback(context.__exit__, None, None, None)
        yield


def divided_copy(
    model: _Model, tensor: TensorParallel, mesh: DeviceMesh | None = None
) -> _Model:
    """What a rank has of a model, in a fake group that is there.

    Args:
        model: The whole.
        tensor: What is divided.
        mesh: Of those that share slices, None for all ranks.
    """
    with AnyCopies():
        model = copy.deepcopy(model)
    if mesh is None:
        mesh = init_device_mesh("cpu", (tensor.degree,))
    tensor.apply(model, mesh, src_data_rank=None)
    return model


def _divided(traced: Profile, tensor: TensorParallel, setting: Setting) -> Profile:
    """The step of a divided copy of the model, in a group that is there."""
    model = divided_copy(traced.step.model, tensor)
    return traced_copy(traced, model, setting, own_options(traced, tensor))


def own_options(traced: Profile, tensor: TensorParallel) -> dict[str, Any]:
    """Options of the profile of a divided copy that differ from those of the whole."""
    if not tensor.divides_loss:
        return {}
    return {"loss_fn": loss_for(tensor, traced.step.loss_fn or default_loss)}


def traced_copy(
    traced: Profile,
    model: torch.nn.Module,
    setting: Setting,
    options: Mapping[str, Any],
    inputs: Any = None,
) -> Profile:
    """The step of a changed copy of its model.

    It is in the type of gathered parameters if that needs no trace in their own.

    Args:
        traced: The step.
        model: The copy.
        setting: Says in which type parameters are gathered.
        options: Those of the profile that differ.
        inputs: Another batch, None for the same.
    """
    step = traced.step
    # A plain function: what else is called is copied with all that it knows.
    make = None if step.optimizer is None else lambda own: _optimizer(step, own)
    options = {"optimizer": make, **options}
    own = partial(traced_again, traced, model=model, inputs=inputs, options=options)
    dtype = gathered_dtype(setting)
    if dtype is None or traced.calibrated:
        return own()
    try:
        return own(compute_dtype=dtype)
    except TraceError:  # of a model that first must show what its values decide
        return own()


def _optimizer(step: Step, parameters: Iterable[torch.nn.Parameter]) -> Any:
    """The optimizer of a step, of divided parameters among whole ones.

    Under FSDP2 all are distributed tensors, which some steps want of them.
    """
    own, made = list(parameters), step.optimizer
    if isinstance(made, torch.optim.Optimizer):
        places = {id(p): i for i, p in enumerate(step.model.parameters())}
        groups = made.param_groups
        made = copy.copy(made)
        made.state = defaultdict(dict)
        made.param_groups = [
            {**group, "params": [own[places[id(p)]] for p in group["params"]]}
            for group in groups
        ]
    elif not isinstance(made, OptimizerInBackward):
        made = made(own)
    if isinstance(made, torch.optim.Optimizer):
        as_replicated = contextlib.ExitStack()
        made.register_step_pre_hook(
            lambda *_: as_replicated.enter_context(implicit_replication())
        )
        made.register_step_post_hook(lambda *_: as_replicated.close())
    return made


def draws(profile: Profile) -> bool:
    """Whether a step draws random numbers before its loss: attention may, or not."""
    ops = (op for op in profile.tape.ops if op.phase in ("forward", "loss"))
    return any(op.random and _dropout_of(op.signature) != 0.0 for op in ops)


def _dropout_of(call: Hashable) -> Any:
    """The probability that an op is called with; None if it takes none."""
    if not isinstance(call, Signature):
        return None
    names = [argument.name for argument in call.func._schema.arguments]
    given = {**dict(zip(names, call.args, strict=False)), **dict(call.kwargs)}
    return given.get("dropout_p", 0.0) if "dropout_p" in names else None


def collective_of(op: Op, degree: int) -> tuple[Collective, int] | None:
    """What an op does among so many ranks, and the bytes of the whole buffer."""
    kind = _KINDS.get(op.name)
    if kind is None:
        return None
    # `moved_bytes` are those of argument and result.
    if kind == "all_reduce":
        return kind, op.moved_bytes // 2
    return kind, op.moved_bytes * degree // (degree + 1)


def late_bytes(profile: Profile, degree: int) -> int:
    """What slow threads of gloo may still hold of what the ranks have exchanged."""
    if profile.device.type != "cpu":
        return 0
    held = [
        found[1] if found[0] == "all_reduce" else op.moved_bytes
        for op in profile.tape.ops
        if (found := collective_of(op, degree))
    ]
    return GLOO_THREADS * max(held, default=0)


def priced(
    profile: Profile, cluster: ClusterSpec, tensor: TensorParallel, *, sharded: bool
) -> Profile:
    """The profile with times of collectives, and with the copies that gloo makes.

    gloo gathers into a second buffer, and reduces and scatters a copy of its input.
    Products of whole experts take the time of the rank's share of rows.

    Args:
        profile: The step of one of the ranks that share slices.
        cluster: Its links time the collectives.
        tensor: How many ranks share slices, and whether products hide what they do.
        sharded: FSDP2 shards gradients. One that is a part of a sum is then reduced
            once, before it is sharded; without, as in the trace, whenever the optimizer
            reads it.

    Raises:
        UnsupportedError: Values decide sizes of a step that divides experts.
    """
    check_experts(profile, tensor)
    degree = tensor.degree
    group = Group(ranks_per_node=degree, num_nodes=1)
    on_cpu = profile.device.type == "cpu"
    op_ms, ops = list(profile.op_ms), list(profile.tape.ops)
    for i, own in own_products(profile, tensor):
        op_ms[i] = own_ms(ops[i], own, op_ms[i], profile)
        ops[i] = own
    summed: set[int] = set()
    kinds: dict[int, Collective] = {}
    for i, op in enumerate(ops):
        found = collective_of(op, degree)
        if found is None:
            continue
        kind, nbytes = kinds[i], _ = found
        in_optimizer = sharded and op.phase == "optimizer"
        again = in_optimizer and not summed.isdisjoint(op.reads)
        summed.update(op.reads)
        cost = cluster.cost(kind, group, nbytes)
        op_ms[i] = 0.0 if again else cost.ms(nbytes)
        if on_cpu and kind != "all_reduce":
            ops[i] = replace(op, workspace_bytes=nbytes)
    if tensor.asynchronous:
        for i, exposed in exposed_ms(ops, op_ms, kinds, degree).items():
            op_ms[i] = exposed
    return replace(
        profile,
        tape=replace(profile.tape, ops=tuple(ops)),
        costs=replace(profile.costs, op_ms=tuple(op_ms)),
    )


def least_link_ms(
    profile: Profile, tensor: TensorParallel, cluster: ClusterSpec
) -> list[float]:
    """What each op waits for links at least, for each row: not for latency.

    In forward all that ranks exchange is of rows; in backward it may be of parameters.

    Args:
        profile: The step of one of the ranks that share slices, of one row.
        tensor: How they do.
        cluster: Its links.
    """
    ops = profile.tape.ops
    least = [0.0] * len(ops)
    group = Group(ranks_per_node=tensor.degree, num_nodes=1)
    for i, op in enumerate(ops):
        found = collective_of(op, tensor.degree)
        if found and op.phase == "forward" and not tensor.asynchronous:
            kind, nbytes = found
            least[i] = cluster.cost(kind, group, _MANY).ms_per_byte * nbytes
    return least


def exchange_ms(profile: Profile, degree: int, *, optimizer: bool = True) -> float:
    """Time of a step's collectives among the ranks that share slices.

    Args:
        profile: The step of one of them.
        degree: How many there are.
        optimizer: Those of the optimizer count.
    """
    return sum(
        ms
        for op, ms in zip(profile.tape.ops, profile.op_ms, strict=True)
        if collective_of(op, degree) and (optimizer or op.phase != "optimizer")
    )
