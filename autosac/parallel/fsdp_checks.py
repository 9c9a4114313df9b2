"""What a step and a sharding must be like for the memory of a rank to be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosac import _compat
from autosac._compat_distributed import has_sharding_rule, is_collective
from autosac._compat_fakes import runs_on_real_copies
from autosac.errors import ArgumentError, UnsupportedError
from autosac.parallel.fsdp_optimizer import find_shards
from autosac.parallel.fsdp_schedule import Schedule
from autosac.parallel.parameter_reads import ParameterReads
from autosac.parallel.sharding import Sharding, unit_around
from autosac.profiles.profile import Profile
from autosac.step.tape import ModuleCall, Parameter, Tape
from autosac.step.training_step import OptimizerInBackward

# Arguments of PyTorch's `fully_shard`, and what to do where it is planned.
OF_FULLY_SHARD = {
    "mp_policy": "pass the types of the policy as `param_dtype` and `reduce_dtype`.",
    "output_dtype": "outputs keep the type that the model gives them; cast in it.",
    "cast_forward_inputs": "inputs keep their type; cast them in the model.",
    "offload_policy": "FSDP2's `CPUOffloadPolicy` is not planned; leave it out.",
    "reshard_after_forward": "the plan chooses it for each FSDP unit; leave it out.",
    "ignored_params": "FSDP2 shards all parameters that it plans; leave it out.",
    "shard_placement_fn": "parameters are sharded by rows; leave it out.",
}
# Ops to which DTensor gives all of an operand on each rank.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"})
# To assign to selected elements: torch 2.14 has a rule for it that fails.
_ASSIGNS = "index_put_"


def check_step(profile: Profile) -> None:
    """Refuse a step that is not modelled on ranks.

    Raises:
        ValueError: The trace begins with gradients of earlier steps.
        UnsupportedError: The step steps its optimizer in backward, has a scalar
            parameter, or optimizer state that is not shaped like its parameter; or as
            `check_optimizer`.
    """
    if profile.step.finds_gradients:
        raise ValueError(
            "The trace begins with whole gradients of earlier steps, which FSDP2 keeps"
            " as shards; trace it with"
            " `autosac.profiles.compute_dtype.as_sharded`."
        )
    if isinstance(profile.step.optimizer, OptimizerInBackward):
        raise UnsupportedError(
            "An `OptimizerInBackward` under FSDP2 is not modelled; pass a plain"
            " optimizer."
        )
    for parameter in profile.tape.parameters:
        if not parameter.shape:
            raise UnsupportedError(
                f"`{parameter.fqns[0]}` is a scalar, which `fully_shard` does not take:"
                " make it a tensor of shape (1,)."
            )
        if parameter.other_states:
            raise UnsupportedError(
                f"The optimizer keeps a tensor of shape {parameter.other_states[0]} for"
                f" parameter `{parameter.fqns[0]}` of shape {parameter.shape}; it is"
                " not known how that is sharded. Use an optimizer whose state is shaped"
                " like its parameters."
            )
    check_optimizer(profile.tape)


def check_optimizer(tape: Tape) -> None:
    """Refuse an optimizer that does not step on distributed tensors as on whole ones.

    Raises:
        UnsupportedError: It multiplies matrices, runs what distributed tensors refuse,
            or what they run on whole copies first.
    """
    shapes = {parameter.shape for parameter in tape.parameters}
    distributed = {*find_shards(tape).storages.tolist()}
    for parameter in tape.parameters:
        distributed |= {parameter.storage, parameter.gradient}
    for op in tape.ops:
        if op.phase != "optimizer":
            continue
        words = op.name.split(".")
        assigns = _ASSIGNS in words and not shapes.isdisjoint(op.shapes)
        is_distributed = not distributed.isdisjoint((*op.reads, *op.writes))
        # What ranks with slices exchange is what a rule made of another op.
        func = None if is_collective(op.name) else _compat.op_of(op.name)
        if assigns or (is_distributed and func and not has_sharding_rule(func)):
            fix = "Use another optimizer, such as AdamW,"
            if "_fused_" in op.name:
                fix = "Pass it `foreach=True` or `fused=False`,"
            raise UnsupportedError(
                f"The optimizer runs `{op.name}`, which PyTorch refuses to do to"
                " distributed tensors, and such FSDP2 makes of parameters."
                f" {fix} or use DDP with `autosac.plan_replicas`."
            )
        if is_distributed and func and runs_on_real_copies(func):
            raise UnsupportedError(
                f"The optimizer runs `{op.name}`, and for its shapes PyTorch runs that"
                " on whole copies of all parameters, gradients and state once, in the"
                " first step on distributed tensors. Pass `lr` as a float, or"
                " `fused=False`."
            )
        if not _PRODUCTS.isdisjoint(words):
            raise UnsupportedError(
                f"The optimizer multiplies matrices (`{op.name}`), as Muon does, and"
                " under FSDP2 gathers them for that from all ranks; how much of them"
                " is there at once is not modelled. Use an optimizer that takes each"
                " element by itself, such as AdamW, or DDP with"
                " `autosac.plan_replicas`."
            )


def check_types(profile: Profile, sharding: Sharding) -> None:
    """Refuse a sharding that computes in another type than what was traced."""
    traced = profile.step.compute_dtype
    name = None if traced is None else str(traced).removeprefix("torch.")
    if name != sharding.param_dtype:
        raise ValueError(
            f"`param_dtype`={sharding.param_dtype!r}, but the step was traced with"
            f" compute_dtype={name!r}; trace it with"
            " `autosac.profiles.compute_dtype.in_compute_dtype`."
        )


def check_reads(
    reads: ParameterReads, owned: Mapping[str, Sequence[Parameter]]
) -> None:
    """Refuse units whose parameters are read while they do not run.

    Args:
        reads: Where forward reads parameters.
        owned: FQN of each unit -> the parameters that it holds.

    Raises:
        ArgumentError: Names the parameter, and what reads it.
    """
    for unit, parameters in owned.items():
        for parameter in parameters:
            homes = {unit_around(reads.homes[fqn], owned) for fqn in parameter.fqns}
            if homes != {unit}:
                why = reads.outside(unit, [parameter])
                raise ArgumentError(f"`{unit}` can be no FSDP unit: {why}.")


def check_outputs(schedule: Schedule, module: int) -> None:
    """Refuse a unit that reshards, if it must stay gathered until backward.

    Raises:
        ArgumentError: Names the op that changes its output in place.
    """
    if why := schedule.why_gathered(module):
        fqn = schedule.tape.modules[module].fqn
        raise ArgumentError(f"`{fqn}` can be no unit that reshards: {why}.")


def check_inputs(
    tape: Tape, sharding: Sharding, module: int, call: ModuleCall | None
) -> None:
    """Refuse an FSDP unit whose arguments would be cast."""
    if sharding.param_dtype is None or call is None:
        return
    for dtype in call.input_dtypes:
        if dtype != sharding.param_dtype:
            raise UnsupportedError(
                f"FSDP unit `{tape.modules[module].fqn}` gets arguments of {dtype},"
                f" which FSDP2 would cast to {sharding.param_dtype} at its entry; that"
                " is not modelled. Cast them in the model, or make a module around it"
                " the unit."
            )
