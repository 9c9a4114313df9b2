"""What the callbacks share: plan the step of a training loop, and say so."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from reprlib import repr as shortened
from typing import Any

import torch

from autosac.errors import ArgumentError, InfeasibleBudgetError, UnsupportedError
from autosac.integrations.divided_states import largest_parts, plan_of_parts
from autosac.integrations.replicas import Replica, planned_once
from autosac.kinds import check_function
from autosac.planning.make_plan import lowest_plan, make_plan
from autosac.planning.plan_batches import together
from autosac.planning.plan_data import OnMismatch, Replan
from autosac.planning.plans import Plan
from autosac.planning.unseen_batches import check_on_mismatch, most_frugal
from autosac.profiles.given import (
    argument_names,
    calibrated_if_present,
    unknown_name,
)
from autosac.profiles.profile import Profile, profile
from autosac.pytrees import held_tensors, tensors_in
from autosac.quantities import (
    format_bytes,
    format_ms,
    format_parts,
    parse_bytes,
    whole_number,
)
from autosac.step.arguments import warn
from autosac.step.marks import marks_of

_NEAR_BYTES = 4096  # that callbacks keep besides; less is not said
_SCALAR_BYTES = 512  # a GPU's allocator hands out as many for each
# What a `torch.amp.GradScaler` holds (torch/amp/grad_scaler.py): the scale and how long
# it has held, its inverse in two types, the scaled loss and its gradient, and whether
# gradients are finite, per device and summed up. Gradients are unscaled in place, and a
# step that is skipped takes less than one that is not.
SCALER_BYTES = 8 * _SCALAR_BYTES


class BudgetCallback:
    """What a callback is told, and the plan that it made.

    Args:
        memory_budget: Cap on the peak of a step: bytes, or text such as "24GiB" or
            "80%" (of the device's memory).
        exclude: FQNs of modules that must not be AC units.
        opaque: Modules that are never run again, nor cut inside, as in `autosac.plan`.
        on_mismatch: As in `autosac.plan`.
        worst_batch: The largest batch that will come, in the form in which batches
            come: it is planned for besides the first one, and whatever it covers
            follows its plan.
        max_length: Length of the longest sequences that will come: `worst_batch` is
            then the first batch, repeated up to it.
        report: Gets a text that says what was planned, in the first of several
            processes.

    Attributes:
        plan: The plan of the last training; None before its first batch.
        callbacks_bytes: What callbacks kept when it was made; None once that was
            compared with what they keep after a step.

    Raises:
        ArgumentError: An argument is of another kind, or is not taken.
    """

    def __init__(
        self,
        memory_budget: int | str,
        *,
        exclude: tuple[str, ...] = (),
        opaque: Iterable[str | type] = (),
        on_mismatch: OnMismatch = "recompute",
        worst_batch: Any = None,
        max_length: int | None = None,
        report: Callable[[str], object] = print,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            known = argument_names(BudgetCallback)
            raise unknown_name(name, type(self).__name__, known)
        # A share is one of the device's memory, and the device comes with the model.
        parse_bytes(memory_budget, total_bytes=sys.maxsize)
        check_on_mismatch(on_mismatch)
        _check_largest(worst_batch, max_length)
        check_function(report, name="report", wanted="a function of a text")
        self.memory_budget = memory_budget
        self.exclude = exclude
        self.opaque = marks_of(opaque)
        self.on_mismatch = on_mismatch
        self.worst_batch = worst_batch
        self.max_length = max_length
        self.report = report
        self.plan: Plan | None = None
        self.callbacks_bytes: int | None = None
        self._undo: list[Callable[[], object]] = []

    def look_at_callbacks(
        self, callbacks: Iterable[Any], model: torch.nn.Module
    ) -> None:
        """Warn, once, of what callbacks have kept since the plan was made.

        Args:
            callbacks: As for `bytes_of_callbacks`,
            model: likewise.
        """
        if self.callbacks_bytes is None:
            return
        more = bytes_of_callbacks(callbacks, model) - self.callbacks_bytes
        self.callbacks_bytes = None
        if more > _NEAR_BYTES:
            warn(
                f"Callbacks keep {format_bytes(more)} more after a step than when it"
                " was planned: the peak is higher than predicted by that much. Lower"
                " `memory_budget` by it, or let them make their tensors before the"
                " training begins."
            )


def _check_largest(worst_batch: Any, max_length: object) -> None:
    """Refuse what says nothing of the largest batch.

    Raises:
        ArgumentError: Says which argument, and what it must be.
    """
    if worst_batch is not None and max_length is not None:
        raise ArgumentError(
            "`worst_batch` and `max_length` both say what the largest batch is: pass"
            " one of them."
        )
    if max_length is not None:
        whole_number(max_length, name="max_length")
    if worst_batch is not None and not held_tensors(worst_batch):
        raise ArgumentError(
            f"`worst_batch`={shortened(worst_batch)} has no tensors: pass a batch as"
            " batches come."
        )


def several(callbacks: Iterable[Any]) -> dict[str, bool]:
    """What to say of several budgets among callbacks -> whether there are several."""
    num = sum(isinstance(callback, BudgetCallback) for callback in callbacks)
    return {f"it has {num} `MemoryBudget` callbacks; pass one per trainer": num > 1}


def bytes_of_callbacks(callbacks: Iterable[Any], model: torch.nn.Module) -> int:
    """Bytes of the tensors that callbacks keep where a model lies, besides its own.

    Args:
        callbacks: Objects, whose attributes are looked at: tensors and modules in
            containers of any depth.
        model: The model.
    """
    attributes = [getattr(callback, "__dict__", {}) for callback in callbacks]
    values = [value for one in attributes for value in one.values()]
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    own, kept = _storages(_tensors_of(model)), held_tensors(values, in_objects=False)
    kept += [tensor for module in modules for tensor in _tensors_of(module)]
    devices = {tensor.device for tensor in model.parameters()}
    others = _storages(
        tensor
        for tensor in kept
        if tensor.device in devices and tensor.layout is torch.strided
    )
    return sum(size for key, size in others.items() if key not in own)


def _tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters with their gradients, and buffers."""
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*parameters, *gradients, *module.buffers()]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address of each storage -> its bytes."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def refuse(settings: Mapping[str, object]) -> None:
    """Refuse settings of a trainer that a plan could not keep its word under.

    Args:
        settings: What to say of each -> whether it is set.

    Raises:
        UnsupportedError: With what to change.
    """
    for sentence, applies in settings.items():
        if applies:
            raise UnsupportedError(f"This training cannot be planned: {sentence}.")


@contextlib.contextmanager
def forward_replaced(model: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Let a model run another ``forward`` for a while."""
    own = model.__dict__.get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


@dataclass(frozen=True, kw_only=True, eq=False)
class Loop:
    """How a training loop runs a model's step, and what it holds besides.

    Attributes:
        forward: Model -> what the loop calls for the loss.
        num_other_batches: Batches like the step's that are held meanwhile.
        replica: What DDP adds.
        options: As in `profile`.
        scalars_bytes: Losses, norms and counts that are kept over a step.
        callbacks_bytes: What callbacks keep, such as averaged weights.
    """

    forward: Callable[[Any], Any]
    num_other_batches: int
    replica: Replica
    options: Mapping[str, Any]
    scalars_bytes: int = 16 * _SCALAR_BYTES
    callbacks_bytes: int = 0

    @contextlib.contextmanager
    def profiled(
        self, model: torch.nn.Module, inputs: Any, *, optimizer: Any, real_step: bool
    ) -> Iterator[Profile]:
        """The step of a batch, to be planned inside: the model runs as in the loop.

        Args:
            model: The model.
            inputs: The batch.
            optimizer: The loop's; where processes divide its state, one's part.
            real_step: As in `calibrated_if_present`.
        """
        own = {"loss_fn": _itself, **self.options, "optimizer": optimizer}
        with forward_replaced(model, self.forward(model)), self.replica.alone():
            step = profile(model, inputs, **own)
            step = calibrated_if_present(step, real_step=real_step)
            gc.collect()  # a copy of the model refers to itself by its `forward`
            yield self.replica.holding(step)

    def held_bytes(self, inputs: Any) -> int:
        """What the loop holds besides the step of a batch, but for what DDP holds."""
        one_bytes = sum(tensor.nbytes for tensor in tensors_in(inputs))
        batches_bytes = self.num_other_batches * one_bytes
        return batches_bytes + self.scalars_bytes + self.callbacks_bytes

    def replanned(self, memory_budget: int | str) -> Replan:
        """Plans batches that come later: those of least memory where none fits."""

        def replan(model: torch.nn.Module, args: Any, kwargs: Any) -> Plan:
            inputs = args, kwargs
            held_bytes = self.held_bytes(inputs)

            def plan_step(step: Profile) -> Plan:
                left_bytes = _budget(memory_budget, step) - held_bytes
                try:
                    return make_plan(step, left_bytes)
                except InfeasibleBudgetError:
                    return lowest_plan(step, left_bytes)

            parts = largest_parts(self.options.get("optimizer"))
            profiled = partial(self.profiled, model, inputs)
            (plan,) = plan_of_parts(profiled, parts, plan_step, real_step=False)
            return plan

        return replan


def plan_loss(
    model: torch.nn.Module,
    batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    loop: Loop,
    *,
    memory_budget: int | str,
    on_mismatch: OnMismatch,
) -> Plan:
    """Plan the step of a training loop, once for all of its processes.

    Args:
        model: The model.
        batches: What it is called with now; then other ones that must fit.
        loop: The loop.
        memory_budget: Of all, in bytes or as text.
        on_mismatch: As in `autosac.plan`.

    Raises:
        InfeasibleBudgetError: No plan fits; the figures are those of all, for the
            batch that needs most.
    """
    check_on_mismatch(on_mismatch)

    def make() -> Plan:
        plans: list[Plan] = []
        errors: list[InfeasibleBudgetError] = []
        others_bytes = max(map(loop.held_bytes, batches))
        parts = largest_parts(loop.options.get("optimizer"))
        plan_step = partial(
            _one_plan, loop=loop, others_bytes=others_bytes, memory_budget=memory_budget
        )
        for number, inputs in enumerate(batches):
            profiled = partial(loop.profiled, model, inputs)
            try:
                plans += plan_of_parts(
                    profiled, parts, plan_step, real_step=number == 0, planned=plans
                )
            except InfeasibleBudgetError as error:
                errors.append(error)
        if errors:
            raise max(errors, key=lambda error: error.lowest_peak_bytes)
        if on_mismatch == "recompute" and loop.replica.group is not None:
            plans = [replace(plan, frugal=most_frugal(plan)) for plan in plans]
        return together(plans) if plans[1:] else plans[0]

    size = sum(tensor.numel() for tensor in tensors_in(batches[0]))
    plan = planned_once(make, size, loop.replica.group)
    loop.replica.watch()
    again = loop.replanned(memory_budget)
    return replace(plan, on_mismatch=on_mismatch, replan=again)


def _one_plan(
    step: Profile, loop: Loop, others_bytes: int, memory_budget: int | str
) -> Plan:
    """The plan for one batch, with figures of all in the error if none fits."""
    budget_bytes = _budget(memory_budget, step)
    try:
        return make_plan(step, budget_bytes - others_bytes)
    except InfeasibleBudgetError as error:
        raise of_all(
            error, others_bytes, memory_budget, budget_bytes, loop.replica
        ) from None


def of_all(
    error: InfeasibleBudgetError,
    others_bytes: int,
    memory_budget: int | str,
    budget_bytes: int,
    replica: Replica,
) -> InfeasibleBudgetError:
    """An error that tells of the whole budget, not of what a loop leaves of it.

    Args:
        error: Of a plan for what is left.
        others_bytes: What the loop keeps besides.
        memory_budget: The whole budget as it was passed,
        budget_bytes: and in bytes.
        replica: What DDP adds.
    """
    lowest_bytes = error.lowest_peak_bytes + others_bytes
    composition, of_loop = error.composition, ""
    if others_bytes:
        composition = {**composition, "of the training loop": others_bytes}
        of_loop = (
            " The loop's are batches, figures and callbacks that it keeps besides the"
            " step."
        )
    advice = f" {error.advice}".rstrip()
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={memory_budget!r}"
        f" ({format_bytes(budget_bytes)}): the least feasible budget is {lowest_bytes}"
        f" bytes ({format_bytes(lowest_bytes)}), for {format_parts(composition)}."
        f"{of_loop}{_held_text(replica.held_bytes)} Raise the budget to that, or use a"
        f" smaller batch.{advice}",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=lowest_bytes,
        composition=composition,
        advice=error.advice,
    )


class StepForward:
    """Runs a trainer's step in place of a module's ``forward``.

    Args:
        module: The module; in a copy of it, its copy.
        trainer: The trainer, which is not copied.
        replica: What DDP adds.

    Attributes:
        own: What stood in for the module's ``forward`` before, or None.
    """

    def __init__(self, module: torch.nn.Module, trainer: Any, replica: Replica) -> None:
        self.module: Any = module
        self.trainer = trainer
        self.replica = replica
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> StepForward:
        copied: StepForward = object.__new__(type(self))
        memo[id(self)] = copied
        copied.module = copy.deepcopy(self.module, memo)
        copied.trainer, copied.replica = self.trainer, self.replica
        copied.own = copy.deepcopy(self.own, memo)
        return copied


def _itself(loss: torch.Tensor) -> torch.Tensor:
    return loss


def _budget(memory_budget: int | str, step: Profile) -> int:
    return parse_bytes(memory_budget, total_bytes=step.device.memory_bytes)


def _held_text(held_bytes: int) -> str:
    """What a message says of DDP."""
    return (
        f" {format_bytes(held_bytes)} of each process are DDP's buckets."
        if held_bytes
        else ""
    )


def checkpointing_already(model: torch.nn.Module) -> str:
    """The first module with gradient checkpointing in Transformers' manner, or ''."""
    for fqn, module in model.named_modules():
        if module.__dict__.get("gradient_checkpointing") is True:
            return fqn or type(module).__name__
    return ""


def figures(plan: Plan) -> dict[str, float]:
    """What a plan does, in numbers for the log of a trainer."""
    return {
        "autosac/budget_bytes": plan.budget_bytes,
        "autosac/peak_bytes": plan.peak_bytes,
        "autosac/baseline_peak_bytes": plan.baseline_peak_bytes,
        "autosac/recompute_ms": plan.recompute_ms,
        "autosac/step_ms": plan.step_ms,
    }


def summary(plan: Plan, replica: Replica) -> str:
    """What a plan does, in a few lines."""
    lines = [
        f"autosac: this step needs {format_bytes(plan.peak_bytes)} of"
        f" {format_bytes(plan.budget_bytes)}, and"
        f" {format_bytes(plan.baseline_peak_bytes)} without a plan."
        f"{_held_text(replica.held_bytes)}"
    ]
    if plan.policy:
        lines.append(
            f"{len(plan.policy)} modules recompute activations, which takes"
            f" {format_ms(plan.recompute_ms)} of {format_ms(plan.step_ms)} a step on"
            f" {plan.device}; `.plan` of the callback says which."
        )
    else:
        lines.append("Nothing has to be recomputed.")
    return "\n".join(lines)
