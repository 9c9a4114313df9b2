"""What the command line prints: tables for people, records for machines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from autosac.devices.specs import DeviceSpec
from autosac.planning.budget_sweep import Sweep, SweepRow
from autosac.planning.plans import Plan
from autosac.profiles.estimate import Estimate
from autosac.quantities import format_bytes, format_ms
from autosac.verification.verifying import Verification

_PLAN_FIELDS = (
    "policy", "budget_bytes", "peak_bytes", "baseline_peak_bytes", "recompute_ms",
    "step_ms", "bound_ms", "optimality_gap", "composition", "device", "calibrated",
    "measured_fraction", "reserved_bytes", "dry_run", "torch_version",
)  # fmt: skip


def plan_record(plan: Plan) -> dict[str, Any]:
    """The figures of a plan; what happens to every op is in its file."""
    return {name: getattr(plan, name) for name in _PLAN_FIELDS}


def sweep_record(sweep: Sweep) -> dict[str, Any]:
    """A sweep without the plans themselves."""
    rows = [
        {name: getattr(row, name) for name in SweepRow.__slots__ if name != "plan"}
        for row in sweep.rows
    ]
    return {
        "floor_bytes": sweep.floor_bytes,
        "baseline_peak_bytes": sweep.baseline_peak_bytes,
        "rows": rows,
    }


def estimate_record(estimate: Estimate) -> dict[str, Any]:
    """The figures of an estimate, with the name of its device."""
    record = {name: getattr(estimate, name) for name in Estimate.__slots__}
    modules = [asdict(row) for row in estimate.modules]
    return {**record, "device": estimate.device.name, "modules": modules}


def verification_record(verification: Verification) -> dict[str, Any]:
    """What real steps showed, with the verdicts."""
    return {
        **asdict(verification),
        "identical": verification.identical,
        "within_budget": verification.within_budget,
        "prediction_error": verification.prediction_error,
    }


def device_record(spec: DeviceSpec) -> dict[str, Any]:
    """All that is known of a device."""
    record = {name: getattr(spec, name) for name in DeviceSpec.__slots__}
    return {**record, "peak_flops": dict(spec.peak_flops)}


def sweep_table(sweep: Sweep) -> Table:
    """A row for each budget."""
    table = _table(
        "Recomputation against memory", "budget", "peak", "recompute", "at least",
        "step", "why not",
    )  # fmt: skip
    for row in sweep.rows:
        if row.plan is None:
            reason = (row.reason or "").partition(":")[0]
            table.add_row(format_bytes(row.budget_bytes), "", "", "", "", reason)
            continue
        table.add_row(
            format_bytes(row.budget_bytes),
            format_bytes(row.plan.peak_bytes),
            format_ms(row.plan.recompute_ms),
            format_ms(row.plan.bound_ms),
            format_ms(row.plan.step_ms),
            "",
        )
    return table


def device_table(specs: Iterable[DeviceSpec]) -> Table:
    """Size and speed of devices."""
    table = _table(
        "Devices (dense rates of the makers' data sheets)", "name", "memory",
        "bandwidth", "float32", "bfloat16", "capability",
    )  # fmt: skip
    for spec in specs:
        table.add_row(
            spec.name,
            format_bytes(spec.memory_bytes),
            f"{spec.bandwidth_bytes_per_s / 1e9:.0f} GB/s",
            f"{spec.flops_per_s('float32') / 1e12:.4g} Tflop/s",
            f"{spec.flops_per_s('bfloat16') / 1e12:.4g} Tflop/s",
            ".".join(map(str, spec.compute_capability or ())),
        )
    return table


def floor_line(estimate: Estimate, floor_bytes: int) -> str:
    """What recomputation could make of a step."""
    share = floor_bytes / estimate.peak_bytes
    return (
        f"With recomputation the step fits into {format_bytes(floor_bytes)}"
        f" ({share:.0%} of that): see `autosac plan`."
    )


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right")
    return table
