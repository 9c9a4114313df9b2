"""What is known of a traced step, and what is worked out of it when asked."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autosac._compat_distributed import is_collective
from autosac.costs.host import host_times
from autosac.costs.sources import Calibration, OpCosts, calibration
from autosac.devices.allocator_settings import AllocatorSettings, Cap
from autosac.devices.specs import DeviceSpec
from autosac.profiles.fingerprints import Fingerprint
from autosac.profiles.module_curves import Curves, ModuleCurve, curve_of, with_curves
from autosac.profiles.step_choosers import chooser_of
from autosac.quantities import format_bytes, format_ms
from autosac.simulation.simulator import Simulator
from autosac.simulation.varied_simulator import VariedSimulator, name_of
from autosac.solvers.curves import knapsack
from autosac.solving.choosing import Chooser
from autosac.solving.curve_points import formulate_candidates
from autosac.solving.formulation import Formulation
from autosac.solving.incumbents import most_rules
from autosac.solving.moved_blocks import MovedBlocks
from autosac.solving.rules_of_thumb import Choice, Rules
from autosac.solving.solve_options import read_segments
from autosac.solving.streaming import Streaming
from autosac.statistics.by_module import Statistics, module_statistics
from autosac.step.batch_signatures import BatchSignature
from autosac.step.op_signatures import Copies
from autosac.step.tape import Tape
from autosac.summaries import Summarized, Summary
from autosac.tracing.collecting import no_collections
from autosac.units import curves
from autosac.units.candidates import Units, find_units
from autosac.units.chains import Chain, find_chains
from autosac.units.curves import UnitCurve
from autosac.units.far_units import FarUnit, find_far_units, within
from autosac.units.given_units import ALL_UNITS, GivenUnits
from autosac.units.nests import find_nests
from autosac.units.policies import Policy
from autosac.units.slices import find_slices
from autosac.units.streamed import StreamedModel, find_streamed
from autosac.units.unit import Unit

# What budgets leave to an allocator: so many bytes, and one byte of so many.
_BLOCK_BYTES, _ONE_OF_BLOCKS = 2**21, 500
# Caches of the same step under other conditions.
VARIANTS = ("with_given_units", "with_other_caps", "with_offload", "with_host")
_OF_UNITS = (  # what a profile knows of its AC units
    *("units", "chains", "slices", "candidates", "formulation", "fronts", "rules"),
    *("units_by_name", "chooser", "roomy_chooser", "_varied", "dry_runs", "statistics"),
    *("_curves", *VARIANTS, "far_units", "far_twins"),
    *("known_eager", "moved_blocks", "streamed", "streaming"),
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
        is_largest: None of these does what it does not do.
        given: Which modules may be AC units, if the user says so.
        allocator: How the program uses PyTorch's allocator on a GPU.
        cap: What a budget caps there.
        plain: The same step without offload; None if this one offloads nothing.
        host_bytes: Most bytes in far memory; None for as many as one likes.
        optimizer: Name of the optimizer's class; '' for none.
        autocast: Type that forward and loss autocast to, '' for none; None if it is one
            that depends on the device.
        trains_inputs: Inputs of the model require gradients; None if it is not known.
        backends: Settings of backends, on a device that is present.
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
    is_largest: bool = False
    given: GivenUnits = ALL_UNITS
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    cap: Cap = "allocated"
    plain: TracedStep | None = None
    host_bytes: int | None = None
    optimizer: str = ""
    autocast: str | None = None
    trains_inputs: bool | None = None
    backends: dict[str, bool] | None = None

    @cached_property
    def _far_copies(self) -> list[tuple[Copies, float]]:
        """Copies of the optimizer's state, and the time of each."""
        pairs = zip(self.tape.ops, self.op_ms, strict=True)
        return [
            (op.signature, ms) for op, ms in pairs if isinstance(op.signature, Copies)
        ]

    @cached_property
    def has_collectives(self) -> bool:
        """Whether it exchanges data with other ranks."""
        return any(is_collective(op.name) for op in self.tape.ops)

    @property
    def may_offload(self) -> bool:
        """Whether it offloads nothing, and its units could."""
        has_link = self.device.link is not None
        return self.plain is None and has_link and not self.has_collectives

    @property
    def far_state_bytes(self) -> int:
        """Bytes of the optimizer's state that lie in far memory between updates."""
        return sum(copies.back_bytes for copies, _ in self._far_copies)

    @property
    def far_state_ms(self) -> float:
        """Time of a step that waits for copies of the optimizer's state."""
        return sum(ms for _, ms in self._far_copies)

    @property
    def forward_bytes(self) -> int | None:
        """What ops of forward make, at most where draws or training were varied.

        None if batches alone vary it, or not all of it is seen.
        """
        varies = any(op.decides for op in self.tape.ops) and not self.redrawn
        if varies or self.has_collectives:
            return None
        tapes = (self.tape, *(step.tape for step in self.redrawn))
        known = [t.forward_bytes for t in tapes if t.forward_bytes is not None]
        return max(known) if len(known) == len(tapes) else None

    @property
    def far_unit_bytes(self) -> int | None:
        """Most bytes that units may have there; None for as many as one likes."""
        if self.host_bytes is None:
            return None
        return max(0, self.host_bytes - self.far_state_bytes)

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
                ("optimizer", self._optimizer_in_words()),
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

    def _optimizer_in_words(self) -> str:
        """Which it is, and what of it lies in far memory."""
        is_there = any(op.phase == "optimizer" for op in self.tape.ops)
        name = self.optimizer or ("of a function" if is_there else "none")
        if not self.far_state_bytes:
            return name
        return (
            f"{name}, {format_bytes(self.far_state_bytes)} of its state in far memory,"
            f" {format_ms(self.far_state_ms)} of copies a step"
        )

    @cached_property
    def calibration(self) -> Calibration:
        """How far times and workspaces are measured."""
        return calibration(self.tape.ops, self.costs)

    @property
    def op_ms(self) -> tuple[float, ...]:
        """Time of every op of the tape."""
        return self.costs.op_ms

    @cached_property
    def rerun_ms(self) -> tuple[float, ...]:
        """Time to run every op of the tape again, with what the program takes."""
        own_ms = self.device.program.rerun_ms
        pairs = zip(self.tape.ops, self.op_ms, strict=True)
        return tuple(ms if op.is_view else ms + own_ms for op, ms in pairs)

    @property
    def calibrated(self) -> bool:
        """Whether times and workspaces were measured, not modelled."""
        return self.costs.calibrated

    def within(self, budget_bytes: int) -> int:
        """Highest peak of a plan under a budget: all of it, but for a GPU that is here.

        How large the blocks are that its allocator hands out depends a little on what
        it served before the step. On an H100 that was 0.2 % of a peak, and up to 2 MiB
        of small ones (docs/gpus.md): a heuristic.
        """
        if self.device.type != "cuda" or not self.calibrated:
            return budget_bytes
        return budget_bytes - _BLOCK_BYTES - budget_bytes // _ONE_OF_BLOCKS

    def budget_for(self, peak_bytes: int) -> int:
        """Least budget under which a plan may have a peak: see `within`."""
        if self.within(peak_bytes) == peak_bytes:
            return peak_bytes
        least = peak_bytes + _BLOCK_BYTES + peak_bytes // _ONE_OF_BLOCKS
        while self.within(least) < peak_bytes:
            least += peak_bytes - self.within(least)
        return least

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
        parts = {fqn: why for fqn, why in self.left_out.items() if fqn}
        with no_collections():
            units = find_units(
                self.tape, self.rerun_ms, self.device.program, exclude=parts
            )
        return self.given.of(units, self.tape.modules)

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """Chains and nests of the AC units."""
        finder_args = (self.tape, self.units.candidates, self.rerun_ms)
        with no_collections():
            chains = find_chains(*finder_args) + find_nests(*finder_args)
        return tuple(c for c in chains if self.given.may_be_unit(c, self.tape.modules))

    @cached_property
    def slices(self) -> tuple[Unit, ...]:
        """Consecutive layers of sequences that can be AC units."""
        finder_args = (self.tape, self.rerun_ms, self.sequences, self.device.program)
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
    def units_by_name(self) -> dict[Hashable, Unit]:
        """All candidates, by what they are called in other variants of the step."""
        return {name_of(unit): unit for unit in self.candidates}

    @cached_property
    def far_units(self) -> tuple[FarUnit, ...]:
        """Twins of candidates whose arguments lie in far memory, if it may be used."""
        return () if self.plain is None else self.plain.far_twins

    @cached_property
    def far_twins(self) -> tuple[FarUnit, ...]:
        """The same of this step with offload, however much far memory there is."""
        if (link := self.device.link) is None:
            return ()
        finder_args = (self.tape, self.units.candidates, self.op_ms, link)
        return find_far_units(*finder_args)

    @cached_property
    def streamed(self) -> StreamedModel | None:
        """The whole model as a unit whose saved tensors come back one by one.

        None if it moves nothing, or if sizes vary from step to step.
        """
        link = self.device.link
        if (
            self.plain is None
            or link is None
            or self.redrawn
            or self.given != ALL_UNITS
        ):
            return None
        costs = link, self.device.program
        return find_streamed(self.tape, self.op_ms, *costs, exclude=self.left_out)

    @cached_property
    def streaming(self) -> Streaming | None:
        """Finder of choices that stream the model."""
        if self.streamed is None:
            return None
        return Streaming(self.simulator, self.streamed, self.far_unit_bytes)

    @property
    def choosable(self) -> tuple[Unit, ...]:
        """All units of choices: candidates, and the whole model if it can be one."""
        streamed = () if self.streamed is None else (self.streamed,)
        return (*self.candidates, *streamed)

    @cached_property
    def moved_blocks(self) -> MovedBlocks:
        """Finder of choices with offload that are good and not the best."""
        twins = within(self.far_units, self.far_unit_bytes)
        return MovedBlocks(self.simulator, self.rules, twins)

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
                self.far_unit_bytes,
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
        return chooser_of(self, self.simulator, "chooser")

    @cached_property
    def roomy_chooser(self) -> Chooser:
        """Likewise; it leaves room for the steps that come, where sizes vary."""
        if not self.redrawn:
            return self.chooser
        return chooser_of(self, self._varied, "roomy_chooser")

    @cached_property
    def _varied(self) -> VariedSimulator:
        choices = self.rules.some(most_rules(self.simulator))
        return VariedSimulator(
            self.simulator, self.redrawn, choices, is_largest=self.is_largest
        )

    def room_bytes(self, chosen: Mapping[Unit, Policy]) -> int:
        """How far below a budget a peak must stay for the steps that come."""
        return self._varied.margin_bytes(chosen) if self.redrawn else 0

    @cached_property
    def dry_runs(self) -> set[frozenset[tuple[Unit, Policy]]]:
        """Choices of units and policies that a dry run has confirmed."""
        return set()

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
    def known_eager(self) -> list[tuple[int, tuple[float, float, Choice]]]:
        """Peaks of plans that count the host; their times with it and without."""
        return []

    @cached_property
    def with_host(self) -> dict[tuple[float, float], TracedStep]:
        """Cache of this step, whose units take some of the host's time instead."""
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
        return curve_of(fqn, self._curves, self.units.refused, self.tape, number)

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
        return host_times(self.tape, self.device).step_ms

    def traced(self) -> TracedStep:
        """The step without the user's objects: this one."""
        return self
