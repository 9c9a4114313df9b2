"""What people forget before they plan: refused, warned about, or hinted at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from autosac import _compat_distributed
from autosac.checkpointing import installing
from autosac.checkpointing.stand_ins import StandIn
from autosac.errors import ArgumentError
from autosac.quantities import format_bytes
from autosac.step.arguments import check_numbers, warn
from autosac.step.tape import Tape


def check_unplanned(model: torch.nn.Module) -> None:
    """Refuse a model that has a plan already.

    Raises:
        ArgumentError: Names an AC unit, if it has one.
    """
    units = installing.installed(model)
    if units or isinstance(model.__dict__.get("forward"), StandIn):
        which = f" (`{units[0]}` is an AC unit)" if units else ""
        raise ArgumentError(
            f"`model` has a plan already{which}; call `plan.unapply(model)` first."
        )


def check_unsharded(model: torch.nn.Module) -> None:
    """Refuse a model that ``fully_shard`` shards: only its own hooks can run it.

    Raises:
        ArgumentError: Names an FSDP unit.
    """
    for fqn, module in model.named_modules():
        if _compat_distributed.is_fsdp_unit(module):
            name = f"`{fqn}` of `model`" if fqn else "`model`"
            raise ArgumentError(
                f"{name} is sharded by `fully_shard` already: plan with the model as it"
                " was before (`autosac.plan_parallel` plans units of FSDP and"
                " recomputation together), apply the plan, and shard then."
            )


def warn_of_batches_ahead(optimizer: object, device_type: str) -> None:
    """Warn of what Accelerate's loaders hold, where its optimizer is planned with.

    Args:
        optimizer: As passed to `profile`; what `plan_replicas` passes is unwrapped.
        device_type: Where the model trains: to a GPU a batch is moved when its step
            begins.

    Source:
        accelerate 1.15, data_loader.py, `DataLoaderShard.__iter__`.
    """
    if device_type == "cpu" and type(optimizer).__name__ == "AcceleratedOptimizer":
        warn(
            "`optimizer` is one that Accelerate has prepared, whose loaders fetch a"
            " batch ahead, which on the CPU lies beside that of the step and is not in"
            " this plan: the peak is higher by it. Plan with"
            " `autosac.plan_replicas(..., loader=loader)`, which leaves room for it in"
            " one process, too; or pass `optimizer.optimizer` if no such loader is"
            " used."
        )


def warn_of_summed_outputs(model: torch.nn.Module, tape: Tape) -> None:
    """Warn if outputs that are no loss were summed for want of a loss.

    Args:
        model: The model that was traced without ``loss_fn``.
        tape: What it did. Numbers, such as a dict of losses, are a loss.
    """
    in_loss = [op.name for op in tape.ops if op.phase == "loss"]
    # Numbers are stacked and summed; what is no number is summed before that.
    if in_loss.count("aten.sum.default") > in_loss.count("aten.stack.default"):
        warn(
            f"`loss_fn` is missing, and the output of {type(model).__name__} has no"
            " `.loss`: the step is planned with the sum of all outputs for its loss. A"
            " real one, such as cross entropy, may take far more memory; pass"
            " `loss_fn=lambda output: criterion(output, targets)`."
        )


# Ops whose backward is another formula where a dispatch mode is active, as it is in any
# trace (`areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp).
_ON_CPU = frozenset(  # on a GPU a real step has the formula of the trace
    {
        *("aten.max.default", "aten.min.default", "aten.median.default"),
        "aten.nanmedian.default",
    }
)
_OTHER_FORMULAS = frozenset(
    {
        *("aten.prod.default", "aten.prod.dim_int"),
        *("aten.cumprod.default", "aten.linalg_householder_product.default"),
        "aten.linalg_matrix_exp.default",
    }
)


def warn_of_other_formulas(tape: Tape) -> None:
    """Warn if backward goes through ops whose formula no trace can follow.

    Args:
        tape: A step that was not held against a real one.
    """
    names = _OTHER_FORMULAS | (_ON_CPU if tape.device_type == "cpu" else frozenset())
    saved = {saved.storage for saved in tape.saved}
    for op in tape.ops:
        if op.name in names and not saved.isdisjoint(op.creates + op.reads):
            where = tape.modules[op.module].fqn or "the model itself"
            warn(
                f"PyTorch goes backward through {op.name} (in `{where}`) by another"
                " formula while a step is traced: there the predicted peak may be off"
                " by some tensors of the size of its input. Leave that much of the"
                " budget free, or use another op, such as `amax` for `max`."
            )
            return


def hints(refused: Mapping[str, str]) -> tuple[str, ...]:
    """What can be switched off so that more modules can be AC units, in sentences.

    Args:
        refused: FQN of a module -> why it cannot be an AC unit.
    """
    first: dict[str, str] = {}
    for fqn, why in refused.items():
        for setting in ("checkpointing", "use_cache", "saved_tensors_hooks"):
            if setting in why:
                first.setdefault(setting, f"`{fqn}` cannot be an AC unit: {why}.")
    return tuple(first.values())


def unknown_optimizer(tape: Tape, optimizer: str) -> Iterator[tuple[str, str]]:
    """What a step without an optimizer leaves out, as a row of a plan's summary.

    Args:
        tape: The step.
        optimizer: Name of its optimizer; '' for none, or one that is not known.
    """
    if optimizer or any(op.phase == "optimizer" for op in tape.ops):
        return
    trained = {
        p.storage: p.itemsize * math.prod(p.shape) for p in tape.parameters if p.trained
    }
    if trained:
        state = format_bytes(2 * sum(trained.values()))
        yield (
            "optimizer",
            f"none was given: what one keeps ({state} for AdamW) is not counted",
        )


def check_options(
    accumulate: int, clip_grad_norm: float | None, **switches: bool
) -> None:
    """Refuse options of a profile that mean nothing.

    Args:
        accumulate: As `profile` takes it,
        clip_grad_norm: likewise,
        switches: and what is true or false.

    Raises:
        ArgumentError: Says which, and what it must be.
    """
    check_numbers(accumulate, clip_grad_norm)
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"`{name}` must be True or False, got {value!r}.")
