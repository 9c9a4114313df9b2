"""What a plain training step takes: how much memory, where, and of what kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from autosac.costs.host import time_notes
from autosac.devices.specs import DeviceSpec
from autosac.errors import ArgumentError
from autosac.optional import needed
from autosac.profiles.given import check_names, profile_of
from autosac.profiles.memory_history import Place, peak_place
from autosac.profiles.module_tables import ModuleEstimate, table_of
from autosac.profiles.planned_device import spec_of
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes, format_ms, parse_bytes
from autosac.statistics.by_module import with_descendants
from autosac.summaries import Summarized, Summary, Table


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate(Summarized):
    """A training step without recomputation, in figures.

    Attributes:
        peak_bytes: Most bytes alive at one instant.
        fqn: Module whose op runs then; '' for the model itself.
        phase: Phase that is then: forward, loss, backward or optimizer.
        op: Overload name of that op.
        breakdown: Bytes alive then per category of `autosac.step.tape.CATEGORIES`,
            and on a GPU what its allocator adds (``fragmentation``); the sum is
            `peak_bytes`.
        step_ms: Time of the step's kernels.
        device: The device that it is for.
        calibrated: Times and workspaces were measured, not modelled.
        modules: Figures of every module, in the order of ``named_modules()``.
        host_ms: Time in which the host issues the ops of an eager step, at the same
            time; 0.0 if the host is the device.
        is_loss: In backward: that op belongs to the loss, not to the model.
    """

    peak_bytes: int
    fqn: str
    phase: str
    op: str
    breakdown: dict[str, int]
    step_ms: float
    device: DeviceSpec
    calibrated: bool
    modules: tuple[ModuleEstimate, ...]
    host_ms: float = 0.0
    is_loss: bool = False

    def fits(self, device: int | str | torch.device | DeviceSpec | None = None) -> bool:
        """Whether the step fits a device as it is, without a plan.

        Args:
            device: A device that runs the same kernels, as in `profile`, or an amount
                of memory such as "24GiB" or "80%" (of the device it is for); None for
                all of that.

        Raises:
            ValueError: The device is unknown, or runs other kernels than those that
                were counted.
        """
        return self.peak_bytes <= self._memory_bytes(device)

    def _memory_bytes(
        self, device: int | str | torch.device | DeviceSpec | None
    ) -> int:
        own_bytes = self.device.memory_bytes
        if device is None:
            return own_bytes
        if isinstance(device, int) or (
            isinstance(device, str)
            and device[:1].isdigit()
            and not device.isdigit()  # "4090" is meant for a name
        ):
            return parse_bytes(device, total_bytes=own_bytes, name="device")
        try:
            spec = spec_of(device)
        except ArgumentError as error:
            known = f"{error} An amount of memory has a unit, such as '80GiB'."
            raise ArgumentError(known) from None
        if _kernels(spec) != _kernels(self.device):
            raise ArgumentError(
                f"The estimate is for {self.device.name}, and {spec.name} runs other"
                f" kernels; profile the step for {spec.name}, and estimate that."
            )
        return spec.memory_bytes

    def to_dataframe(self) -> Any:
        """The modules as a pandas table.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = needed("pandas", "`Estimate.to_dataframe`")
        return pandas.DataFrame.from_records([asdict(row) for row in self.modules])

    def summary(self) -> Summary:
        """Peak, where, of what; time; the tree of modules."""
        place = Place(self.fqn, self.phase, self.op, self.is_loss)
        verdict = "fits" if self.fits() else "does not fit"
        basis = "measured" if self.calibrated else "modelled"
        peak = f"{format_bytes(self.peak_bytes)} in {place} ({self.op})"
        time = f"{format_ms(self.step_ms)} on {self.device.name}, {basis}"
        facts = (
            ("peak", peak),
            ("step", time),
            *time_notes(self.step_ms, self.host_ms, self.device, self.calibrated),
            ("device", f"{verdict} in {format_bytes(self.device.memory_bytes)}"),
        )
        parts = tuple(
            (category, format_bytes(nbytes))
            for category, nbytes in self.breakdown.items()
            if nbytes
        )
        of_peak = Table(heads=("at the peak", ""), rows=parts)
        tables = (of_peak, table_of(self.modules))
        return Summary(title="Step without a plan", facts=facts, tables=tables)


def estimate(
    model: torch.nn.Module | TracedStep, inputs: Any = None, **options: Any
) -> Estimate:
    """Say what a training step takes without recomputation.

    Args:
        model: The model, or a `Profile` of it (then no other option is taken).
        inputs: As in `profile`.
        options: As in `profile`.
    """
    check_names(options, estimate)
    profile = profile_of(model, inputs, options)
    place = peak_place(profile, {})
    return Estimate(
        peak_bytes=profile.baseline_peak_bytes,
        fqn=place.fqn,
        phase=place.phase,
        op=place.op,
        breakdown=profile.composition({}),
        step_ms=profile.baseline_ms,
        device=profile.device,
        calibrated=profile.calibrated,
        modules=tuple(_modules(profile)),
        host_ms=profile.host_ms,
        is_loss=place.is_loss,
    )


def _modules(profile: TracedStep) -> Iterator[ModuleEstimate]:
    tape = profile.tape
    at_peak = _made_by_module(profile)
    for node, row, peak_bytes in zip(
        tape.modules.nodes, profile.figures.modules, at_peak, strict=True
    ):
        yield ModuleEstimate(
            fqn=node.fqn,
            class_name=node.class_name,
            calls=row.calls,
            parameter_bytes=row.parameter_bytes,
            gradient_bytes=row.gradient_bytes,
            buffer_bytes=row.buffer_bytes,
            activation_bytes=row.activation_bytes or 0,
            peak_bytes=peak_bytes,
            forward_ms=row.forward_ms or 0.0,
            backward_ms=row.backward_ms or 0.0,
            refused=profile.units.refused.get(node.fqn),
        )


def _made_by_module(profile: TracedStep) -> list[int]:
    """Bytes that ops of each module, and inside it, made and that live at the peak."""
    tape = profile.tape
    peak = profile.simulator.baseline.peak_key // profile.simulator.span
    alive = (tape.born <= peak) & (tape.freed > peak)
    own = np.zeros(len(tape.modules), dtype=np.int64)
    for op in tape.ops:
        if op.start > peak:
            break
        for storage in op.creates:
            if alive[storage]:
                own[op.module] += tape.storages[storage].nbytes
    return with_descendants(tape.modules, own.tolist())


def _kernels(spec: DeviceSpec) -> tuple[object, ...]:
    """What decides which kernels a device runs, and how much they allocate."""
    return (
        spec.type,
        spec.vendor,
        spec.compute_capability,
        spec.allocation_granularity_bytes,
    )
