"""Where times and workspaces of ops come from: measured here, or modelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from autosac.costs import roofline
from autosac.devices.specs import DeviceSpec
from autosac.quantities import format_bytes, format_ms
from autosac.step.op_signatures import FAR_COPIES
from autosac.step.tape import Op, Tape

Source = Literal["measured", "cached", "modelled", "view"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a step that comes from one source.

    Attributes:
        num_ops: Distinct ops.
        ms: Time of all their calls in one step.
        workspace_bytes: Sum of their workspaces, each distinct op once.
    """

    num_ops: int
    ms: float
    workspace_bytes: int


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How far the figures of a profile are measured.

    Attributes:
        measured: Ops that were run for this profile.
        cached: Ops that were run before on this device, from the table on disk.
        modelled: Ops whose time is a formula, and so is their workspace (`devices`:
            cuda_workspaces.py for a GPU that is not present, cpu_workspaces.py).
        modelled_ops: Names of these, dearest first, and why each was not run.
        unsteady_ms: Time of ops that were run, but whose runs disagreed, as on a busy
            machine; `calibrate` runs these again when it meets them again.
    """

    measured: Share
    cached: Share
    modelled: Share
    modelled_ops: tuple[tuple[str, str], ...]
    unsteady_ms: float = 0.0

    @property
    def measured_fraction(self) -> float:
        """Share of the step's time that was measured, now or before."""
        measured_ms = self.measured.ms + self.cached.ms
        total = measured_ms + self.modelled.ms
        return measured_ms / total if total else 1.0

    @property
    def unsteady_fraction(self) -> float:
        """Share of the measured time that is of ops whose runs disagreed."""
        measured_ms = self.measured.ms + self.cached.ms
        return self.unsteady_ms / measured_ms if measured_ms else 0.0

    def __str__(self) -> str:
        parts = [("measured", self.measured), ("from the cache", self.cached)]
        lines = [
            f"{name:15}{share.num_ops:5} distinct ops, {format_ms(share.ms)} a step,"
            f" {format_bytes(share.workspace_bytes)} of workspaces"
            for name, share in (*parts, ("modelled", self.modelled))
        ]
        if self.unsteady_ms:
            lines.append(f"unsteady       {format_ms(self.unsteady_ms)} a step")
        lines += [f"    {name}: {reason}" for name, reason in self.modelled_ops]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCosts:
    """What the ops of a tape cost, and where that comes from.

    Attributes:
        op_ms: The time of each.
        sources: Where time and workspace of each come from.
        calibrated: They were measured as far as they can be.
        failures: Name of an op that could not be measured -> why.
        unsteady_ms: Time of measured ops whose runs disagreed.
    """

    op_ms: tuple[float, ...]
    sources: tuple[Source, ...]
    calibrated: bool = False
    failures: Mapping[str, str] = field(default_factory=dict)
    unsteady_ms: float = 0.0


def modelled(op: Op) -> Source:
    """The source of an op's figures that nobody measured."""
    return "view" if op.is_view else "modelled"


def modelled_costs(tape: Tape, device: DeviceSpec) -> OpCosts:
    """What the ops of a tape cost on a device by the roofline."""
    return OpCosts(
        op_ms=roofline.tape_ms(tape, device), sources=tuple(map(modelled, tape.ops))
    )


def calibration(ops: Iterable[Op], costs: OpCosts) -> Calibration:
    """Sum up the sources of the figures of a step's ops."""
    times: dict[str, float] = {"measured": 0.0, "cached": 0.0, "modelled": 0.0}
    distinct: dict[str, dict[object, int]] = {source: {} for source in times}
    formula_ms: dict[str, float] = {}
    for op, ms, source in zip(ops, costs.op_ms, costs.sources, strict=True):
        if source == "view":
            continue
        times[source] += ms
        distinct[source][op.signature] = op.workspace_bytes
        if source == "modelled":
            formula_ms[op.name] = formula_ms.get(op.name, 0.0) + ms
    shares = {
        source: Share(
            num_ops=len(workspaces),
            ms=times[source],
            workspace_bytes=sum(workspaces.values()),
        )
        for source, workspaces in distinct.items()
    }
    names = sorted(formula_ms, key=lambda name: -formula_ms[name])
    why = {FAR_COPIES: "by the rates of the link", **costs.failures}
    reasons = tuple((name, why.get(name, "not calibrated")) for name in names)
    return Calibration(
        measured=shares["measured"],
        cached=shares["cached"],
        modelled=shares["modelled"],
        modelled_ops=reasons,
        unsteady_ms=costs.unsteady_ms,
    )
