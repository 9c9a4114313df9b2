"""The step of one stage of a pipeline, traced for one micro-batch.

A stage gets what the stage before has sent, a leaf that requires a gradient, and its
backward begins at the gradient that the next stage has sent. Its first backward of a
step makes the gradients of its parameters; the later ones add to them. Both are traced.

Source: `forward_one_chunk` and `backward_one_chunk` of
torch/distributed/pipelining/stage.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from autosac._compat_distributed import is_collective
from autosac.devices.allocator_settings import AllocatorSettings
from autosac.errors import TraceError, UnsupportedError
from autosac.fake_tensors.repeated_calls import KnownCalls
from autosac.pipelines.sharded_stages import ALONE, DataParallel, ShardedStage
from autosac.profiles.compute_dtype import in_compute_dtype
from autosac.profiles.profile import (
    Profile,
    calibrate,
    profile_of_step,
    read_step,
)
from autosac.profiles.restricting import restricted, with_own_units
from autosac.simulation.varied_simulator import name_of
from autosac.solving.rules_of_thumb import Choice
from autosac.tracing.learned import Learned

PipelineLoss = Callable[[Any, Any], torch.Tensor]  # of output and target


class _BeginBackward(torch.autograd.Function):
    """A number whose backward begins at a gradient that was received."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.received = torch.zeros_like(output)
        # The pipeline holds it as well, so that autograd never adds to it in place.
        ctx.held = ctx.received.detach()
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.received


def _begin_backward(output: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise UnsupportedError(
            f"A stage hands on {type(output).__name__}, and stages hand on one tensor;"
            " cut the model elsewhere, or let its blocks return one."
        )
    loss: torch.Tensor = _BeginBackward.apply(output)
    return loss


def loss_with(loss_fn: PipelineLoss, target: Any, output: Any) -> torch.Tensor:
    """A pipeline's loss as one of the output alone."""
    return loss_fn(output, target)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageStep:
    """What is known of the step of one stage, of one micro-batch.

    Attributes:
        first: The step whose backward makes the gradients,
        later: and the one whose backward adds to them; the same if all make some, which
            then add up in another type.
        is_last: The loss is in this stage, and it sends nothing on.
        sharded: What FSDP2 does to it, None without.
        plain: The same step without offload; None if this one offloads nothing.
        views: Cache of what `stage_choosing` makes of it.
    """

    first: Profile
    later: Profile
    is_last: bool
    sharded: ShardedStage | None = None
    plain: StageStep | None = None
    views: dict[Hashable, Any] = field(default_factory=dict, init=False)

    def each(self, change: Callable[[Profile], Profile]) -> StageStep:
        """The step with both of its profiles changed."""
        first = change(self.first)
        is_same = self.later is self.first
        return replace(
            self, first=first, later=first if is_same else change(self.later)
        )

    def sharded_by(self, parallel: DataParallel, units: Sequence[str]) -> StageStep:
        """The step with these blocks as FSDP units, and AC units inside of them."""
        step = self.each(partial(restricted, fsdp_units=units))
        return replace(step, sharded=ShardedStage(step.first, units, parallel))

    def offloading(self, host_bytes: int | None) -> StageStep:
        """The step whose units may use far memory, the same one each time.

        Args:
            host_bytes: Most bytes there of one micro-batch; None for as many as one
                likes.

        Raises:
            ArgumentError, UnsupportedError: As `restricted`.
        """
        key = "offload", host_bytes
        if key not in self.views:
            may = partial(restricted, offload=True, host_bytes=host_bytes)
            self.views[key] = replace(self.each(may), plain=self)._with_equal_units()
        step: StageStep = self.views[key]
        return step

    def twin(self, number: int) -> StageStep:
        """A step of like blocks with units of its own; itself for number 0.

        Args:
            number: Which of them; each is the same one each time.
        """
        if not number:
            return self
        key = "twin", number
        if key not in self.views:
            self.views[key] = self.each(with_own_units)
        step: StageStep = self.views[key]
        return step

    def _with_equal_units(self) -> StageStep:
        """The step, both of whose profiles have no other twins in far memory."""
        profiles = self.first, self.later
        names = set.intersection(*({*map(name_of, p.far_units)} for p in profiles))
        for own in profiles:
            both = tuple(unit for unit in own.far_units if name_of(unit) in names)
            vars(own)["far_units"] = both
        return self

    def calibrated(self, **how: Any) -> StageStep:
        """The step with measured times and workspaces, as `calibrate` has them."""
        return self.each(partial(calibrate, **how))

    @cached_property
    def phase_ms(self) -> dict[str, float]:
        """Time of forward (with the loss), backward and optimizer (of a shard)."""
        times = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        degree = self.sharded.parallel.shard_degree if self.sharded else 1
        for op, op_ms in zip(self.later.tape.ops, self.later.op_ms, strict=True):
            if op.phase == "optimizer" and not is_collective(op.name):
                times["optimizer"] += op_ms / degree
            elif op.phase != "loss":
                times[op.phase] += op_ms
            elif self.is_last:
                times["forward"] += op_ms
        return times

    def in_first(self, choice: Choice) -> Choice:
        """A choice of units of the later step, as units of the first."""
        return _moved(choice, self.first)

    def in_later(self, choice: Choice) -> Choice:
        """A choice of units of the first step, as units of the later one."""
        return _moved(choice, self.later)


def _moved(choice: Choice, profile: Profile) -> Choice:
    """The choice as units of another profile of the stage."""
    if not choice:
        return {}
    twins = profile.units_by_name
    return {twins[name_of(unit)]: policy for unit, policy in choice.items()}


def stage_step(
    module: torch.nn.Module,
    received: torch.Tensor,
    *,
    loss_fn: PipelineLoss | None,
    target: Any = None,
    parallel: DataParallel = ALONE,
    calls: KnownCalls | None = None,
    **options: Any,
) -> StageStep:
    """Trace the step of a stage.

    Args:
        module: The stage.
        received: Its argument: of the first stage the model's input, of others what
            the stage before sends, which requires a gradient. Of one micro-batch.
        loss_fn: Output and target -> scalar, of the last stage; None for others.
        target: Of the last stage, of one micro-batch.
        parallel: Says in which type the stage computes.
        calls: What other stages' traces learned of calls of ops, and these will.
        options: As in `profile`.

    Raises:
        UnsupportedError: The stage hands on something else than one tensor.
        TraceError: As `profile`.
    """
    own_loss = _begin_backward
    if loss_fn is not None:
        own_loss = partial(loss_with, loss_fn, target)
    calls = {} if calls is None else calls
    options = {**options, "loss_fn": own_loss, "calls": calls}
    dtype = parallel.compute_dtype
    first = profile_in(dtype, module, received, **options)
    check_step(first)
    later = first
    if not parallel.sums_apart:
        later = profile_in(dtype, module, received, keeps_gradients=True, **options)
    return StageStep(first=first, later=later, is_last=loss_fn is not None)


def profile_in(
    dtype: torch.dtype | None,
    module: torch.nn.Module,
    received: torch.Tensor,
    **options: Any,
) -> Profile:
    """The profile of a step whose model computes in a type; None for its own."""
    try:
        return _profile_in(dtype, module, received, **options)
    except TraceError:  # of a model that first must show what its values decide
        if dtype is None:
            raise
        own = _as_parameters(module, received)
        traced = _profile_in(None, module, own, **options)
    step = replace(traced.step, args=(received,))
    return in_compute_dtype(replace(traced, step=step), dtype)


def _profile_in(
    dtype: torch.dtype | None,
    module: torch.nn.Module,
    received: torch.Tensor,
    *,
    exclude: tuple[str, ...] = (),
    allocator: AllocatorSettings | None = None,
    calls: KnownCalls | None = None,
    **options: Any,
) -> Profile:
    step, device = read_step(module, received, **options)
    learned = Learned(calls={} if calls is None else calls)
    step = replace(step, compute_dtype=dtype, learned=learned, overlapped=True)
    return profile_of_step(step, device, exclude=exclude, allocator=allocator)


def _as_parameters(module: torch.nn.Module, received: torch.Tensor) -> torch.Tensor:
    """What is received in the type of the parameters, before FSDP2 casts these."""
    dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
    if not dtypes or not received.requires_grad:
        return received
    return received.detach().to(dtypes[0]).requires_grad_()


def check_step(of_model: Profile) -> None:
    """Refuse a step that a pipeline would not run as it was traced.

    Raises:
        UnsupportedError: Values or draws decide sizes, or the optimizer steps in
            backward or has its state in far memory.
    """
    tape = of_model.tape
    in_backward = any(
        op.phase == "optimizer" and op.start < tape.phases["finish"] for op in tape.ops
    )
    if of_model.far_state_bytes:
        raise UnsupportedError(
            "Pipelines are not planned with an `OffloadedOptimizer`: pass the class of"
            " the optimizer that it is made of."
        )
    if of_model.redrawn or in_backward:
        raise UnsupportedError(
            "Pipelines are not planned where values or random draws decide sizes, nor"
            " with optimizers that step in backward; use another model or optimizer."
        )
