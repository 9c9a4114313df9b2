"""The step of one rank of a context-parallel group, traced without the others.

The model is copied, given the part of the batch that a rank has, and traced in a group
whose collectives do nothing: ops, bytes and collectives are those of the rank. Under
Ulysses all ranks do the same; of a ring, the first and the last rank are traced, as
ranks between them do some of what either does, and the one that holds more counts.

Collectives run beside compute, one after the other, and who reads a result waits for
it: an all-to-all of Ulysses is read at once, what a ring sends after attention to the
part before. They run by the links of the group: inside a node, or between nodes too.

Where ranks share slices of tensors besides, the copy is divided first: attention then
exchanges some of the rank's own heads, and the collectives that tensors need are
waited for, as without parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch.distributed.device_mesh import init_device_mesh

from autosac.devices.specs import DeviceSpec
from autosac.errors import ArgumentError, TraceError, UnsupportedError
from autosac.parallel import tp_tracing
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.context_parallel import (
    HEADS,
    WHOLE_SEQUENCE,
    ContextParallel,
    Method,
    check_divides,
)
from autosac.parallel.formulating import Setting
from autosac.parallel.fsdp_memory import GLOO_THREADS
from autosac.parallel.partial_gradients import check_gradients_whole
from autosac.parallel.preparing import in_gathered_type
from autosac.parallel.ring_attention import RingMode
from autosac.parallel.sequence_mixing import check_tokens_apart
from autosac.parallel.sequence_parts import (
    by_name,
    held_beside,
    names_by_place,
    part_of,
    positions_of,
    shifts_labels,
)
from autosac.parallel.tp_checks import divided
from autosac.parallel.tp_styles import WHOLE, TensorParallel
from autosac.profiles.profile import Profile
from autosac.quantities import rounded_up
from autosac.solvers.fsdp.collectives import exchange, shift
from autosac.step.tape import Op, Storage, Tape

_Model = TypeVar("_Model", bound=torch.nn.Module)
_ATTENTION = "_scaled_dot_product"
_WITHOUT_KERNEL = "_safe_softmax"  # of attention that runs op by op, and only there
_EXCHANGE = "_c10d_functional.all_to_all_single.default"  # of attention, and only there


def context_of(traced: Profile, degree: int, method: Method) -> ContextParallel:
    """How the ranks of a group share the sequence of a step.

    Raises:
        UnsupportedError: They cannot.
    """
    step = traced.step
    if degree == 1:
        return WHOLE_SEQUENCE
    names = names_by_place(step.model)
    given = {**step.kwargs, **by_name(step.args, names)}
    return ContextParallel(
        degree=degree,
        method=method,
        attentions=attentions_of(traced),
        positions=positions_of(step.model),
        shifts_labels=shifts_labels(step.model, given),
        arguments=names,
    )


def attentions_of(traced: Profile) -> tuple[str, ...]:
    """FQNs of modules whose forward runs a kernel of attention.

    Raises:
        UnsupportedError: There are none, or it is the model itself.
    """
    tape = traced.tape
    fqns = {
        tape.modules[op.module].fqn: None
        for op in tape.ops
        if _ATTENTION in op.name and op.phase == "forward"
    }
    if not fqns:
        raise _no_kernel(traced)
    if "" in fqns:
        raise UnsupportedError(
            "The model's own forward calls attention: make that a module of its own,"
            " or plan without 'cp'."
        )
    return tuple(fqns)


def _no_kernel(traced: Profile) -> UnsupportedError:
    """Why a step that attends, or none, runs no fused kernel of attention."""
    tape = traced.tape
    ops = [op for op in tape.ops if op.phase == "forward"]
    op_by_op = next((op for op in ops if _WITHOUT_KERNEL in op.name), None)
    if op_by_op is None:
        return UnsupportedError(
            "The step runs no fused kernel of attention, and context parallelism is for"
            " `torch.nn.functional.scaled_dot_product_attention`: call it (models of"
            " Transformers do with attn_implementation='sdpa'), or plan without 'cp'."
        )
    name, device = tape.modules[op_by_op.module].fqn, traced.device.type
    if device == "cpu" and any(o.random and o.module == op_by_op.module for o in ops):
        return UnsupportedError(
            f"`{name}` calls `scaled_dot_product_attention` with dropout, for which"
            " the CPU has no fused kernel, and context parallelism needs one: let it"
            " have `dropout_p`=0, plan for GPUs, or plan without 'cp'."
        )
    return UnsupportedError(
        f"`{name}` calls `scaled_dot_product_attention` with arguments, or inside an"
        f" `sdpa_kernel`, for which no fused kernel runs on {device!r}, and context"
        " parallelism needs one: change that, or plan without 'cp'."
    )


def check_heads(tape: Tape, degree: int) -> None:
    """Refuse attention whose heads ranks cannot share evenly.

    Args:
        tape: The step of the whole sequence.
        degree: How many ranks there are, under Ulysses.

    Raises:
        ArgumentError: Says how many heads there are.
    """
    for op in tape.ops:
        if _ATTENTION in op.name and op.phase == "forward":
            check_divides(op.shapes[0][HEADS], degree)


def rank_profile(
    traced: Profile,
    context: ContextParallel,
    cluster: ClusterSpec,
    setting: Setting,
    tensor: TensorParallel = WHOLE,
) -> Profile:
    """The step of a rank that has a part of the sequence; the profile keeps it.

    Args:
        traced: The step of the whole sequence, which is not changed.
        context: How ranks share it.
        cluster: Its links time the collectives; one of each group that shares slices.
        setting: Says in which type parameters are gathered.
        tensor: Slices that ranks share besides.

    Raises:
        ArgumentError: The sequence or the heads cannot be divided so.
        UnsupportedError: Tokens meet elsewhere than in attention.
        TraceError: The step of a rank cannot be traced.
    """
    key: Hashable = (
        "part",
        context,
        (tensor.degree, tuple(tensor.styles.items()), tensor.asynchronous),
        cluster.fabric,
        cluster.gpus_per_node,
        setting.param_dtype,
    )
    if key not in traced.parallel:
        last = context.degree - 1
        places = (0, last) if context.method == "ring" else (0,)
        if tensor.degree > 1:  # which adds ops of its own: the checks are without
            tp_tracing.check_experts(traced, tensor)
            own = rank_profile(traced, context, cluster, setting)
        ranks = [traced_at(traced, context, place, setting, tensor) for place in places]
        if tensor.degree == 1:
            check_parts(traced.tape, ranks[0].tape, context)
        else:
            check_gradients_whole(own.tape, ranks[0].tape, tensor)
        most = max(ranks, key=lambda rank: rank.baseline_peak_bytes)
        if tensor.degree > 1:
            most = tp_tracing.priced(most, cluster, tensor, sharded=True)
        traced.parallel[key] = priced(most, context, cluster)
    profile: Profile = traced.parallel[key]
    return profile


def rank_copy(
    model: _Model,
    tensor: TensorParallel,
    context: ContextParallel,
    device: DeviceSpec,
    place: int = 0,
) -> _Model:
    """What a rank has of a model, in a fake group that is there.

    Args:
        model: The whole.
        tensor: Slices that ranks share,
        context: and how groups of these share the sequence.
        device: Whose kernels a ring runs.
        place: Of the rank in the second; it is the first that shares slices.
    """
    # Distributed tensors know of ops on equal meshes before: those of other places
    # and of real ranks, whose groups are others, have other names.
    slices = f"tp_at_{place}"
    shape = (context.degree, tensor.degree)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cp", slices))
    model = tp_tracing.divided_copy(model, tensor, mesh[slices])
    if context.method == "ring":
        name = mesh["cp"].get_group().group_name
        gpu = None if device.type == "cpu" else device
        context.install(model, RingMode(name, gpu))
    else:
        context.apply(model, mesh["cp"])
    return model


def traced_at(
    traced: Profile,
    context: ContextParallel,
    place: int,
    setting: Setting,
    tensor: TensorParallel = WHOLE,
) -> Profile:
    """The step of the rank at a place of its group, the first that shares slices.

    The loop holds the whole batch as well, from which it cuts the rank's part.
    """
    step = traced.step
    inputs = part_of((step.args, step.kwargs), context, place)
    with tp_tracing.fake_ranks(
        context.degree * tensor.degree,
        divides_loss=tensor.divides_loss,
        place=place * tensor.degree,
    ):
        model = rank_copy(step.model, tensor, context, traced.device, place)
        options = tp_tracing.own_options(traced, tensor)
        try:
            with divided(tensor.styles, tensor.degree):
                rank = tp_tracing.traced_copy(traced, model, setting, options, inputs)
        except TraceError as error:
            raise TraceError(
                f"{error} This is the step of a rank of context parallelism: the model"
                " and `loss_fn` get a part of the sequence (targets that `loss_fn`"
                " knows of must be cut as the output is)."
            ) from error
        except ArgumentError as error:
            if tensor.degree == 1:
                raise
            raise ArgumentError(
                f"{error} This is the step of one of tp={tensor.degree} ranks, which"
                " have a share each of the heads and a part of the sequence."
            ) from error
        rank = in_gathered_type(rank, setting)
    grain = step.granularity_bytes
    held = held_beside((step.args, step.kwargs))
    return _holding([rounded_up(own.nbytes(), grain) for own in held], rank)


def _holding(sizes: Sequence[int], rank: Profile) -> Profile:
    """A step with what its loop holds all the time besides, of these sizes."""

    def extended(tape: Tape) -> Tape:
        held = (
            Storage(nbytes=nbytes, category="input", born=0, died=tape.num_ticks)
            for nbytes in sizes
        )
        return replace(tape, storages=(*tape.storages, *held))

    variants = (replace(own, tape=extended(own.tape)) for own in rank.redrawn)
    return replace(rank, tape=extended(rank.tape), redrawn=tuple(variants))


def check_parts(whole: Tape, part: Tape, context: ContextParallel) -> None:
    """Refuse a model that a rank cannot run on its part.

    Args:
        whole: The step of the whole sequence, of all that the rank's step has or more.
        part: That of a rank.
        context: How ranks share the sequence.

    Raises:
        UnsupportedError: Tokens meet elsewhere than in attention, or where no mode sees
            it.
    """
    check_tokens_apart(whole, part, context.degree)
    _check_exchanged(whole, part, context)


def _check_exchanged(whole: Tape, part: Tape, context: ContextParallel) -> None:
    """Refuse calls of attention that no mode sees, as other functions make them.

    Raises:
        UnsupportedError: There are some.
    """
    traced = part.modules.index
    calls = sum(
        _ATTENTION in op.name and whole.modules[op.module].fqn in traced
        for op in whole.ops
        if op.phase == "forward"
    )
    exchanges = sum(part.ops[i].phase == "forward" for i in _collectives(part))
    # Ulysses exchanges queries, keys, values and outputs; a ring sends keys and values.
    of_a_call = 4 if context.method == "ulysses" else context.degree - 1
    if exchanges != calls * of_a_call:
        raise UnsupportedError(
            "Some of the attention is called inside another function of PyTorch, such"
            " as by torch.nn.MultiheadAttention, where ranks cannot exchange what they"
            " have: call `scaled_dot_product_attention` itself, or plan without 'cp'."
        )


# --- time ---------------------------------------------------------------------


def priced(profile: Profile, context: ContextParallel, cluster: ClusterSpec) -> Profile:
    """The profile with what each collective adds to its compute as its time.

    That is what is waited for, and by how much the rest slows the compute beside it.

    Args:
        profile: The step of a rank.
        context: How ranks share the sequence.
        cluster: Its links time the collectives.
    """
    kind = shift if context.method == "ring" else exchange
    cost = kind(cluster.fabric, cluster.neighbours(context.degree))
    ops, op_ms = profile.tape.ops, list(profile.op_ms)
    for i in _collectives(profile.tape):
        op_ms[i] = cost.ms(_sent_bytes(ops[i]))
    for i, exposed_ms in waits_ms(ops, op_ms).items():
        op_ms[i] = exposed_ms + cluster.contention * (op_ms[i] - exposed_ms)
    return replace(profile, costs=replace(profile.costs, op_ms=tuple(op_ms)))


def least_link_ms(
    profile: Profile, context: ContextParallel, cluster: ClusterSpec
) -> list[float]:
    """What each op waits for links at least, for each row: not for latency.

    Args:
        profile: The step of a rank, of one row.
        context: How ranks share the sequence; who sends around waits for no more.
        cluster: Its links.
    """
    least = [0.0] * len(profile.tape.ops)
    if context.degree > 1 and context.method != "ring":
        cost = exchange(cluster.fabric, cluster.neighbours(context.degree))
        for i in _collectives(profile.tape):
            least[i] = cost.ms_per_byte * _sent_bytes(profile.tape.ops[i])
    return least


def waits_ms(ops: Sequence[Op], op_ms: Sequence[float]) -> dict[int, float]:
    """What is waited for of each collective of a step, by its place.

    Args:
        ops: Of a rank, in order.
        op_ms: Their times alone.
    """
    now_ms = link_ms = 0.0
    waits: dict[int, float] = {}
    running: dict[int, int] = {}  # storage that arrives -> place of the collective
    arrival_ms: dict[int, float] = {}
    for i, op in enumerate(ops):
        for storage in op.reads:
            place = running.pop(storage, None)
            if place is not None:
                waits[place] = max(0.0, arrival_ms[place] - now_ms)
                now_ms += waits[place]
        if op.name == _EXCHANGE:
            link_ms = arrival_ms[i] = max(now_ms, link_ms) + op_ms[i]
            running.update(dict.fromkeys(op.creates, i))
            waits[i] = 0.0
        else:
            now_ms += op_ms[i]
    return waits


def _collectives(tape: Tape) -> list[int]:
    """Places of what the ranks of a group exchange for attention."""
    return [i for i, op in enumerate(tape.ops) if op.name == _EXCHANGE]


def _sent_bytes(op: Op) -> int:
    """What a rank sends or keeps: `moved_bytes` are those of argument and result."""
    return op.moved_bytes // 2


def exchange_ms(profile: Profile) -> float:
    """What a step of a rank waits for the others of its group."""
    return sum(profile.op_ms[i] for i in _collectives(profile.tape))


def late_bytes(profile: Profile) -> int:
    """What slow threads of gloo may still hold of what the ranks have exchanged."""
    if profile.device.type != "cpu":
        return 0
    ops = [profile.tape.ops[i] for i in _collectives(profile.tape)]
    return GLOO_THREADS * max((op.moved_bytes for op in ops), default=0)
