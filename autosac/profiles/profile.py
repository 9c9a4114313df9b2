"""Trace a step once; everything that is asked of it afterwards is in the profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autosac.checkpointing.backend_flags import backend_flags
from autosac.costs.sources import modelled_costs
from autosac.devices.allocator_settings import (
    AllocatorSettings,
    check_allocator,
    program_settings,
)
from autosac.devices.free_memory import available_bytes
from autosac.devices.specs import DeviceSpec
from autosac.errors import ArgumentError, UnsupportedError
from autosac.kinds import check_profile
from autosac.profiles.fingerprints import fingerprint
from autosac.profiles.mistakes import (
    check_options,
    check_unplanned,
    check_unsharded,
    warn_of_batches_ahead,
    warn_of_other_formulas,
    warn_of_summed_outputs,
)
from autosac.profiles.planned_device import planned_device
from autosac.profiles.real_memory import as_measured, can_be_measured
from autosac.profiles.traced_step import VARIANTS, TracedStep
from autosac.pytrees import tensors_in
from autosac.step import arguments
from autosac.step.batch_signatures import positional_names, signature_of
from autosac.step.marks import Marks
from autosac.step.op_signatures import Signature
from autosac.step.random_streams import random_streams_kept
from autosac.step.reaching import op_generators_kept
from autosac.step.training_step import LossFn, normalize_inputs
from autosac.tracing.first_steps import covering, warn_of_first_step
from autosac.tracing.probing import marked_modules
from autosac.tracing.real_steps import corrected
from autosac.tracing.step import Step
from autosac.tracing.trace import trace
from autosac.units.slices import plain_sequences


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Profile(TracedStep):
    """A traced training step, from which any number of plans can be made.

    Attributes:
        step: The step that was traced: the user's own model, inputs and optimizer.
    """

    step: Step

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "A `Profile` cannot be pickled, as it knows the user's own model, optimizer"
            " and loss. Pickle a plan, a sweep or `profile.statistics`, or trace the"
            " step again in the other process."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Profile:
        return self  # nothing changes it

    def traced(self) -> TracedStep:
        """The step without the user's objects; shares all that is worked out so far.

        But for variants of it, which know the user's objects as well.
        """
        traced_step = object.__new__(TracedStep)
        kept = {k: v for k, v in vars(self).items() if k not in ("step", *VARIANTS)}
        if isinstance(self.plain, Profile):
            kept["plain"] = self.plain.traced()
        vars(traced_step).update(kept)
        return traced_step


def profile(
    model: torch.nn.Module,
    inputs: Any,
    *,
    optimizer: Any = None,
    loss_fn: LossFn | None = None,
    device: str | torch.device | DeviceSpec | None = None,
    autocast: torch.dtype | str | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    gradients_in_forward: bool = False,
    keeps_gradients: bool = False,
    allocator: AllocatorSettings | None = None,
    exclude: Marks = (),
    opaque: Marks = (),
) -> Profile:
    """Trace one training step of a model; nothing is run, nothing is changed.

    Args:
        model: On the CPU, a GPU or the meta device, in the mode it trains in.
        inputs: A tensor, a tuple (args), a dict (kwargs) or ``(args, kwargs)``; or a
            `torch.utils.data.DataLoader` of these: its first batch stands for all, and
            neither its order nor any random stream is disturbed.
        optimizer: A ``torch.optim`` instance, an `OptimizerInBackward`, a callable on
            the parameters that returns one of these, such as a class; its name, such as
            ``"adamw"``; or None.
        loss_fn: Output -> scalar tensor. Without it ``output.loss`` is used, or else
            the sum of all outputs that require gradients, with a warning unless these
            are single numbers.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:0"`` (the GPU that is here), also as a
            `torch.device`; a known GPU such as ``"h100"``, or a `DeviceSpec`; None for
            the device of the model (the CPU if that is the meta device). A GPU need not
            be present: see `autosac.lens.mode`.
        autocast: Type that forward and loss autocast to, such as ``torch.bfloat16``,
            or its name.
        accumulate: Micro-steps (forward, loss, backward) per optimizer step.
        clip_grad_norm: Largest norm of all gradients together
            (``torch.nn.utils.clip_grad_norm_`` before the optimizer steps), or None.
        gradients_in_forward: Whether ``zero_grad`` is called between forward and
            backward, so that the gradients of the step before are alive in forward.
        keeps_gradients: Whether gradients are there all the time, set to zero in place
            (``zero_grad(set_to_none=False)``, before forward or between forward and
            backward) or never.
        allocator: How the program uses PyTorch's allocator on a GPU. None for what
            ``PYTORCH_ALLOC_CONF`` says if the model is on a GPU, else its defaults.
        exclude: Modules that must not be AC units, by FQNs, patterns of them
            (``"*.gate"``), or classes.
        opaque: Modules that are never run again, nor cut inside, such as routers,
            likewise.

    Raises:
        TraceError: The step cannot be traced; names the module and the line. Or it has
            no loss that backward can begin at.
        ArgumentError: The model is planned, compiled, scripted or wrapped already; the
            model cannot be called with `inputs`, or `loss_fn` with its output; the
            optimizer trains other parameters; a name means nothing; or `accumulate` is
            less than 1.
        UnsupportedError: The model is on a GPU and the device is the CPU; or the
            device is a GPU that is not present, and its kernels cannot be known.
    """
    step, spec = read_step(
        model,
        inputs,
        optimizer=optimizer,
        loss_fn=loss_fn,
        device=device,
        autocast=autocast,
        accumulate=accumulate,
        clip_grad_norm=clip_grad_norm,
        gradients_in_forward=gradients_in_forward,
        keeps_gradients=keeps_gradients,
        opaque=opaque,
    )
    return profile_of_step(step, spec, exclude=exclude, allocator=allocator)


def read_step(
    model: torch.nn.Module,
    inputs: Any,
    *,
    optimizer: Any = None,
    loss_fn: LossFn | None = None,
    device: str | torch.device | DeviceSpec | None = None,
    autocast: torch.dtype | str | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    gradients_in_forward: bool = False,
    keeps_gradients: bool = False,
    opaque: Marks = (),
) -> tuple[Step, DeviceSpec]:
    """Check and read what the user passes to `profile`; also the device."""
    arguments.check_kind(model)
    check_unplanned(model)
    check_unsharded(model)
    check_options(
        accumulate,
        clip_grad_norm,
        gradients_in_forward=gradients_in_forward,
        keeps_gradients=keeps_gradients,
    )
    args, kwargs = normalize_inputs(inputs)
    arguments.check_tensors(model, (args, kwargs))
    arguments.check_inputs(model, args, kwargs)
    arguments.check_loss_fn(loss_fn)
    spec, lens = planned_device(model, device)
    warn_of_batches_ahead(optimizer, spec.type)
    step = Step(
        model=model,
        args=args,
        kwargs=kwargs,
        loss_fn=loss_fn,
        optimizer=arguments.read_optimizer(optimizer, model),
        device_type=spec.type,
        granularity_bytes=spec.allocation_granularity_bytes,
        autocast=arguments.read_dtype(autocast),
        accumulate=accumulate,
        clip_grad_norm=clip_grad_norm,
        gradients_in_forward=gradients_in_forward,
        keeps_gradients=keeps_gradients,
        lens=lens,
        opaque=marked_modules(opaque, model, name="opaque"),
    )
    return step, spec


def profile_of_step(
    step: Step,
    device: DeviceSpec,
    *,
    exclude: Marks = (),
    allocator: AllocatorSettings | None = None,
) -> Profile:
    """Trace a step that `profile` has read; arguments are those of `profile`."""
    excluded = marked_modules(exclude, step.model, name="exclude", inside=False)
    check_allocator(allocator)
    allocator = allocator_of(step, allocator)
    tape = trace(step)
    warn_of_first_step(tape)
    if step.loss_fn is None:
        warn_of_summed_outputs(step.model, tape)
    new_profile = Profile(
        step=step,
        tape=tape,
        costs=modelled_costs(tape, device),
        device=device,
        exclude=tuple(sorted(excluded)),
        training=step.model.training,
        model=fingerprint(step.model),
        sequences=plain_sequences(step.model),
        signature=signature_of(step.args, step.kwargs, positional_names(step.model)),
        allocator=allocator,
        optimizer=arguments.optimizer_name(step.optimizer),
        autocast=arguments.autocast_name(step.autocast),
        backends=None if step.lens else backend_flags(step.device_type),
        trains_inputs=any(
            t.requires_grad for t in tensors_in((step.args, step.kwargs))
        ),
    )
    return _with_redrawn(new_profile)


def allocator_of(step: Step, given: AllocatorSettings | None) -> AllocatorSettings:
    """What is given, or what this program has where the step's GPU is here."""
    if given is None and step.device_type == "cuda" and step.lens is None:
        return program_settings()
    return given or AllocatorSettings()


def _with_redrawn(profile: Profile) -> Profile:
    """A profile with the other variants of its step, without the user's objects."""
    learned = profile.step.learned
    template = replace(profile, redrawn=()).traced()
    redrawn = tuple(
        replace(template, tape=tape, costs=modelled_costs(tape, profile.device))
        for tape in learned.redrawn
    )
    return replace(profile, redrawn=redrawn, is_largest=learned.is_largest)


def calibrate(
    profile: Profile,
    *,
    cache: bool = True,
    refresh: bool = False,
    progress: bool | None = None,
    real_step: bool = True,
) -> Profile:
    """Measure time and workspace of every distinct op on the present device.

    Where model and inputs are there as well, forward and loss run once for real, and on
    the CPU backward, on copies of all that they may change: ops that refuse real data
    fail here. A step that does something else than its trace is traced once more on
    real tensors.

    Each is measured once on a device, PyTorch version and number of threads: the
    user's cache directory keeps the figures (``$AUTOSAC_CACHE_DIR``, or ``autosac``
    in ``$XDG_CACHE_HOME`` or ``~/.cache``). None is measured while a profiler is
    active: a warning says so.

    Args:
        profile: The traced step.
        cache: Read and write that table.
        refresh: Measure again what is in it.
        progress: Show a progress bar; None for only on a terminal.
        real_step: Run that step, in the memory of one without a plan, where so much is
            free. Ops alone take no more memory than the training does.

    Returns:
        The profile with measured figures; ops that do not run on made-up data keep
        their modelled ones. Its `calibration` says which. It is not `calibrated` if
        a profiler kept ops from being measured.

    Raises:
        TraceError: The real step fails; names op and module.
        ArgumentError: The profile is for a device that is not present.
    """
    check_profile(profile, Profile)
    if profile.step.lens is not None and torch.cuda.is_available():
        raise ArgumentError(
            f"The profile is for {profile.device.name}, but the model is not there;"
            " move it to the GPU and profile it again."
        )
    if profile.step.device_type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            f"The profile is for {profile.device.name}, and this machine has no GPU;"
            " calibrate where the device is."
        )
    signatures = (op.signature for op in profile.tape.ops)
    funcs = [s.func for s in signatures if isinstance(s, Signature)]
    with random_streams_kept(), op_generators_kept(funcs):
        return _calibrated(
            profile, cache=cache, refresh=refresh, progress=progress, real=real_step
        )


def _calibrated(
    profile: Profile, *, cache: bool, refresh: bool, progress: bool | None, real: bool
) -> Profile:
    """The profile with measured figures; arguments as of `calibrate`."""
    from autosac.costs.calibrating import calibrated  # runs kernels: only when asked

    device = torch.device(profile.step.device_type)
    free_bytes = available_bytes(device)
    fits = free_bytes is None or profile.baseline_peak_bytes < free_bytes
    if real and fits:
        step, tape = corrected(profile.step, profile.tape)
        if tape is not profile.tape:
            warn_of_first_step(tape)
            costs = modelled_costs(tape, profile.device)
            profile = replace(profile, step=step, tape=tape, costs=costs)
            profile = _with_redrawn(profile)
    spec = _with_host(profile, device)  # first: its workspaces are given back by others
    how = partial(
        calibrated, device=device, cache=cache, refresh=refresh, progress=progress
    )
    tape, costs = how(profile.tape, profile.op_ms)
    earlier = [
        how(first, modelled_costs(first, profile.device).op_ms)[0]
        for first in tape.earlier_tapes
    ]
    tape = covering(tape, *earlier)
    if real and fits and can_be_measured(profile.step, tape):
        tape = as_measured(profile.step, tape)
    else:
        warn_of_other_formulas(tape)
    return replace(profile, tape=tape, costs=costs, device=spec)


def _with_host(profile: Profile, device: torch.device) -> DeviceSpec:
    """The device with the speed of its host, unless that is to count nothing."""
    from autosac.costs.host import measured_host_op_ms

    if device.type != "cuda" or not profile.device.host_op_ms:
        return profile.device
    return replace(profile.device, host_op_ms=measured_host_op_ms(device))
