"""Trace a step once; everything that is asked of it afterwards is in the profile."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from autosac.costs.host import host_ms
from autosac.costs.sources import Calibration, OpCosts, calibration, modelled_costs
from autosac.devices.allocator_settings import AllocatorSettings, Cap
from autosac.devices.free_memory import available_bytes
from autosac.devices.specs import DeviceSpec
from autosac.profiles.fingerprints import Fingerprint, fingerprint
from autosac.profiles.mistakes import (
    check_options,
    check_unplanned,
    check_unsharded,
    warn_of_other_formulas,
    warn_of_summed_outputs,
)
from autosac.profiles.module_curves import Curves, ModuleCurve, curve_of, with_curves
from autosac.profiles.planned_device import planned_device
from autosac.profiles.real_memory import as_measured, can_be_measured
from autosac.quantities import format_bytes, format_ms
from autosac.simulation.simulator import Simulator
from autosac.solvers.curves import knapsack
from autosac.solving.choosing import Chooser
from autosac.solving.curve_points import formulate_candidates
from autosac.solving.formulation import Formulation
from autosac.solving.incumbents import Incumbents, most_rules
from autosac.solving.rules_of_thumb import Choice, Rules
from autosac.solving.solve_options import read_segments
from autosac.statistics.by_module import Statistics, module_statistics
from autosac.step import arguments
from autosac.step.batch_signatures import BatchSignature, positional_names, signature_of
from autosac.step.tape import Tape
from autosac.step.training_step import LossFn, normalize_inputs
from autosac.summaries import Summarized, Summary
from autosac.tracing.collecting import no_collections
from autosac.tracing.probing import marked_modules
from autosac.tracing.real_steps import corrected
from autosac.tracing.step import Step
from autosac.tracing.trace import trace
from autosac.units import curves
from autosac.units.candidates import Units, find_units
from autosac.units.chains import Chain, find_chains
from autosac.units.curves import UnitCurve
from autosac.units.far_units import FarUnit, find_far_units
from autosac.units.given_units import ALL_UNITS, GivenUnits
from autosac.units.nests import find_nests
from autosac.units.policies import Policy
from autosac.units.slices import find_slices, plain_sequences
from autosac.units.unit import Unit

_OF_UNITS = (  # what a profile knows of its AC units
    *("units", "chains", "slices", "candidates", "formulation", "fronts", "rules"),
    *("chooser", "dry_runs", "roomy", "statistics", "_curves", "with_given_units"),
    *("with_other_caps", "with_offload", "far_units"),
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TracedStep(Summarized):
    """What is known of a training step, as plain data: no model, no tensor.

    Attributes:
        tape: What it did.
        costs: What every op of the tape costs.
        device: The device that the step is planned for.
        exclude: FQNs of modules that must not be AC units.
        training: Whether the model was traced in training mode.
        model: Fingerprint of the model.
        sequences: FQNs of the modules that call their children one after the other.
        signature: Of its batch.
        redrawn: The step as it is with other random numbers, or after some training,
            if these decide sizes.
        given: Which modules may be AC units, if the user says so.
        allocator: How the program uses PyTorch's allocator on a GPU.
        cap: What a budget caps there.
        plain: The same step without offload; None if this one offloads nothing.
        host_bytes: Most bytes in far memory; None for as many as one likes.
    """

    tape: Tape
    costs: OpCosts
    device: DeviceSpec
    exclude: tuple[str, ...]
    training: bool
    model: Fingerprint
    sequences: frozenset[str]
    signature: BatchSignature
    redrawn: tuple[TracedStep, ...] = ()
    given: GivenUnits = ALL_UNITS
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    cap: Cap = "allocated"
    plain: TracedStep | None = None
    host_bytes: int | None = None

    def summary(self) -> Summary:
        """Model, batch, peak, time, and how many modules can be AC units."""
        trained = sum(
            math.prod(p.shape) * p.itemsize for p in self.tape.parameters if p.trained
        )
        basis = "measured" if self.calibrated else "modelled"
        peak = format_bytes(self.baseline_peak_bytes)
        can, cannot = len(self.units.candidates), len(self.units.refused)
        return Summary(
            title="Profile",
            facts=(
                ("model", f"{self.model[0][1]}, {len(self.model)} modules"),
                ("trained", f"{format_bytes(trained)} of parameters"),
                ("batch", str(self.signature)),
                (
                    "step",
                    f"{len(self.tape.ops)} ops, {format_ms(self.baseline_ms)} on"
                    f" {self.device.name}, {basis}",
                ),
                ("peak", f"{peak} without a plan"),
                (
                    "units",
                    f"{can} calls of modules can be AC units;"
                    f" {cannot} modules cannot, see `units.refused`",
                ),
            ),
        )

    @cached_property
    def calibration(self) -> Calibration:
        """How far times and workspaces are measured."""
        return calibration(self.tape.ops, self.costs)

    @property
    def op_ms(self) -> tuple[float, ...]:
        """Time of every op of the tape."""
        return self.costs.op_ms

    @property
    def calibrated(self) -> bool:
        """Whether times and workspaces were measured, not modelled."""
        return self.costs.calibrated

    @property
    def failures(self) -> Mapping[str, str]:
        """Name of an op that could not be measured -> why."""
        return self.costs.failures

    @cached_property
    def simulator(self) -> Simulator:
        """The simulator, which replays the tape under plans."""
        return Simulator(self.tape, self.allocator, self.cap)

    @cached_property
    def left_out(self) -> dict[str, str]:
        """FQNs of modules that are no AC units, whatever the tape says -> why."""
        return dict.fromkeys(self.exclude, "it was excluded")

    def leave_out(self, fqns: Iterable[str], why: str) -> None:
        """Make modules no AC units from now on; what was worked out is forgotten."""
        if self.plain is not None:
            self.plain.leave_out(fqns, why)
        self.left_out.update(dict.fromkeys(fqns, why))
        for name in _OF_UNITS:
            vars(self).pop(name, None)

    @cached_property
    def units(self) -> Units:
        """Module calls that can be AC units, and why other modules are none."""
        with no_collections():
            units = find_units(self.tape, self.op_ms, exclude=self.left_out)
        return self.given.of(units, self.tape.modules)

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """Chains and nests of the AC units."""
        finder_args = (self.tape, self.units.candidates, self.op_ms)
        with no_collections():
            chains = find_chains(*finder_args) + find_nests(*finder_args)
        return tuple(c for c in chains if self.given.may_be_unit(c, self.tape.modules))

    @cached_property
    def slices(self) -> tuple[Unit, ...]:
        """Consecutive layers of sequences that can be AC units."""
        finder_args = (self.tape, self.op_ms, self.sequences)
        with no_collections():
            slices = find_slices(*finder_args, exclude=self.left_out)
        return tuple(s for s in slices if self.given.may_be_unit(s, self.tape.modules))

    @cached_property
    def candidates(self) -> tuple[Unit, ...]:
        """All candidates in forward order, those around others first."""
        single = [*self.units.candidates, *self.slices]
        units = [*self.chains, *single, *self.far_units]
        return tuple(sorted(units, key=lambda u: (u.call.enter, -u.call.exit)))

    @cached_property
    def far_units(self) -> tuple[FarUnit, ...]:
        """Twins of candidates whose arguments lie in far memory, if it may be used."""
        if self.plain is None or (link := self.device.link) is None:
            return ()
        finder_args = (self.tape, self.units.candidates, self.op_ms, link)
        return find_far_units(*finder_args, self.host_bytes)

    @cached_property
    def formulation(self) -> Formulation:
        """The MILP's numbers for the candidates that free memory."""
        with no_collections():
            return formulate_candidates(
                self.simulator,
                self.candidates,
                (*self.units.candidates, *self.slices),
                self.chains,
                self.fronts,
                self.far_units,
            )

    @cached_property
    def fronts(self) -> dict[Hashable, knapsack.Front]:
        """Pareto points of single units, by key; equal problems are solved once."""
        alike = {unit.key: unit for unit in (*self.units.candidates, *self.slices)}
        problems = {key: curves.save_problem(unit) for key, unit in alike.items()}
        solved = {problem: knapsack.front(problem) for problem in problems.values()}
        return {key: solved[problem] for key, problem in problems.items()}

    @cached_property
    def rules(self) -> Rules:
        """Rules of thumb for what to recompute."""
        return Rules(self.tape, self.units.candidates, self.fronts)

    @cached_property
    def chooser(self) -> Chooser:
        """Chooser of what to recompute under a budget; keeps what it found before."""
        with no_collections():
            choices = self.rules.some(most_rules(self.simulator))
            incumbents = Incumbents(self.simulator, choices)
            plain = None if self.plain is None else self.plain.chooser
            return Chooser(self.simulator, self.formulation, incumbents, plain)

    @cached_property
    def dry_runs(self) -> set[frozenset[tuple[Unit, Policy]]]:
        """Choices of units and policies that a dry run has confirmed."""
        return set()

    @cached_property
    def roomy(self) -> list[Choice]:
        """Choices that leave room for other draws, where these decide sizes."""
        return []

    @cached_property
    def with_given_units(self) -> dict[GivenUnits, TracedStep]:
        """Cache of this step with units that the user has given."""
        return {}

    @cached_property
    def with_other_caps(self) -> dict[Cap, TracedStep]:
        """Cache of this step for budgets that cap something else."""
        return {}

    @cached_property
    def with_offload(self) -> dict[int | None, TracedStep]:
        """Cache of this step with offload, by the most bytes in far memory."""
        return {}

    @cached_property
    def parallel(self) -> dict[Hashable, Any]:
        """Cache of choosers for many GPUs, by their `Setting`."""
        return {}

    @cached_property
    def figures(self) -> Statistics:
        """Where memory and time go, module by module; without trade-off curves."""
        return module_statistics(self.tape, self.op_ms)

    @cached_property
    def statistics(self) -> Statistics:
        """Where memory and time go, module by module: `autosac.plan` takes them too."""
        return with_curves(self.figures, self._curves)

    @cached_property
    def _curves(self) -> Curves:
        """Modules that can be AC units, each with its curve if it frees memory."""
        pairs = zip(self.formulation.units, self.formulation.curves, strict=True)
        of_unit = dict(pairs)
        curves: dict[str, tuple[Unit, UnitCurve | None]] = {}
        for unit in self.units.candidates:
            curves.setdefault(unit.fqn, (unit, of_unit.get(unit)))
        return curves

    def curve(self, fqn: str, *, segments: int = 3) -> ModuleCurve:
        """What it takes to keep less of a module's activation memory.

        Args:
            fqn: The module; of one that is called several times, its first call.
            segments: Most linear segments of the fit.

        Raises:
            ArgumentError: The module has no curve, and why; or `segments` is no whole
                number above 0.
        """
        number = read_segments(segments)
        return curve_of(fqn, self._curves, self.units.refused, number)

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of the step when nothing is recomputed."""
        return self.peak_bytes({})

    def peak_bytes(self, chosen: Mapping[Unit, Policy]) -> int:
        """Peak of the step when units run under policies, as the device counts it."""
        return self.simulator.true_peak_bytes(chosen)

    def composition(self, chosen: Mapping[Unit, Policy]) -> dict[str, int]:
        """Bytes alive at the peak, per category."""
        by_category = self.simulator.composition(chosen)
        rest = self.peak_bytes(chosen) - sum(by_category.values())
        return {**by_category, "fragmentation": rest} if rest else by_category

    @cached_property
    def baseline_ms(self) -> float:
        """Time of the step when nothing is recomputed."""
        return sum(self.op_ms)

    @cached_property
    def host_ms(self) -> float:
        """Time in which the host issues the step's ops, see `costs.host`."""
        return host_ms(self.tape, self.device)

    def traced(self) -> TracedStep:
        """The step without the user's objects: this one."""
        return self


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Profile(TracedStep):
    """A traced training step, from which any number of plans can be made.

    Attributes:
        step: The step that was traced: the user's own model, inputs and optimizer.
    """

    step: Step

    def traced(self) -> TracedStep:
        """The step without the user's objects; shares all that is worked out so far."""
        traced_step = object.__new__(TracedStep)
        shared = {name: value for name, value in vars(self).items() if name != "step"}
        vars(traced_step).update(shared)
        return traced_step


def profile(
    model: torch.nn.Module,
    inputs: Any,
    *,
    optimizer: Any = None,
    loss_fn: LossFn | None = None,
    device: str | DeviceSpec | None = None,
    autocast: torch.dtype | str | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    gradients_in_forward: bool = False,
    keeps_gradients: bool = False,
    allocator: AllocatorSettings | None = None,
    exclude: tuple[str, ...] = (),
    opaque: Iterable[str | type] = (),
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
        device: ``"cpu"``, ``"cuda"``, a known GPU such as ``"h100"``, or a
            `DeviceSpec`; None for the device of the model (the CPU if that is the meta
            device). A GPU need not be present: see `autosac.lens.mode`.
        autocast: Type that forward and loss autocast to, such as ``torch.bfloat16``,
            or its name.
        accumulate: Micro-steps (forward, loss, backward) per optimizer step.
        clip_grad_norm: Largest norm of all gradients together
            (``torch.nn.utils.clip_grad_norm_`` before the optimizer steps), or None.
        gradients_in_forward: Whether ``zero_grad`` is called between forward and
            backward, so that the gradients of the step before are alive in forward.
        keeps_gradients: Whether gradients are there all the time, set to zero in place
            (``zero_grad(set_to_none=False)``) or never.
        allocator: How the program uses PyTorch's allocator on a GPU, if that is not at
            its defaults.
        exclude: FQNs of modules that must not be AC units.
        opaque: Modules that are never run again, nor cut inside, such as routers: FQNs,
            patterns of them (``"*.gate"``), or classes.

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
    arguments.check_kind(model)
    check_unplanned(model)
    check_unsharded(model)
    check_options(model, accumulate, clip_grad_norm, exclude)
    args, kwargs = normalize_inputs(inputs)
    arguments.check_tensors(model, (args, kwargs))
    arguments.check_inputs(model, args, kwargs)
    arguments.check_loss_fn(loss_fn)
    spec, lens = planned_device(model, device)
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
    tape = trace(step)
    if loss_fn is None:
        warn_of_summed_outputs(model, tape)
    new_profile = Profile(
        step=step,
        tape=tape,
        costs=modelled_costs(tape, spec),
        device=spec,
        exclude=tuple(exclude),
        training=model.training,
        model=fingerprint(model),
        sequences=plain_sequences(model),
        signature=signature_of(args, kwargs, positional_names(model)),
        allocator=allocator or AllocatorSettings(),
    )
    return replace(new_profile, redrawn=_redrawn(new_profile))


def _redrawn(profile: Profile) -> tuple[TracedStep, ...]:
    """The other variants of the step, without the user's objects."""
    template = replace(profile, redrawn=()).traced()
    return tuple(
        replace(template, tape=tape, costs=modelled_costs(tape, profile.device))
        for tape in profile.step.learned.redrawn
    )


def calibrate(
    profile: Profile,
    *,
    cache: bool = True,
    refresh: bool = False,
    progress: bool | None = None,
    real_step: bool = True,
) -> Profile:
    """Measure time and workspace of every distinct op on the present device.

    Where model and inputs are there as well, forward and loss run once for real, on
    copies of all that they may change: ops that refuse real data fail here. A step that
    does something else than its trace is traced once more on real tensors.

    Each is measured once on a device, PyTorch version and number of threads: the
    user's cache directory keeps the figures (``$AUTOSAC_CACHE_DIR``, or ``autosac``
    in ``$XDG_CACHE_HOME`` or ``~/.cache``). None is measured while a profiler is
    active: a warning says so.

    Args:
        profile: The traced step.
        cache: Read and write that table.
        refresh: Measure again what is in it.
        progress: Show a progress bar; None for only on a terminal.
        real_step: Run that step. Ops alone take no more memory than the training does.

    Returns:
        The profile with measured figures; ops that do not run on made-up data keep
        their modelled ones. Its `calibration` says which. It is not `calibrated` if
        a profiler kept ops from being measured.

    Raises:
        TraceError: The real step fails; names op and module.
        ValueError: The profile is for a device that is not present.
    """
    from autosac.costs.calibrating import calibrated  # runs kernels: only when asked

    if profile.step.lens is not None and torch.cuda.is_available():
        raise ValueError(
            f"The profile is for {profile.device.name}, but the model is not there;"
            " move it to the GPU and profile it again."
        )
    if profile.step.device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"The profile is for {profile.device.name}, and this machine has no GPU;"
            " calibrate where the device is."
        )
    device = torch.device(profile.step.device_type)
    free_bytes = available_bytes(device)
    fits = free_bytes is None or profile.baseline_peak_bytes < free_bytes
    if real_step and fits:
        step, tape = corrected(profile.step, profile.tape)
        if tape is not profile.tape:
            costs = modelled_costs(tape, profile.device)
            profile = replace(profile, step=step, tape=tape, costs=costs)
            profile = replace(profile, redrawn=_redrawn(profile))
    tape, costs = calibrated(
        profile.tape,
        profile.op_ms,
        device=device,
        cache=cache,
        refresh=refresh,
        progress=progress,
    )
    if real_step and fits and can_be_measured(profile.step, tape):
        tape = as_measured(profile.step, tape)
    else:
        warn_of_other_formulas(tape)
    return replace(profile, tape=tape, costs=costs)
