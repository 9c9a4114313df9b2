"""What the command line prints: tables for people, records for machines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from autosac.advice.advising import Advice
from autosac.devices.specs import DeviceSpec
from autosac.graphs.compiled_peaks import CompiledPlan
from autosac.parallel.plans import ParallelPlan
from autosac.pipelines.plans import PipelinePlan
from autosac.planning.plans import Plan
from autosac.profiles.estimate import Estimate
from autosac.quantities import format_bytes
from autosac.results.sweeps import Sweep
from autosac.verification.verifying import Verification

_PLAN_FIELDS = (
    "policy", "budget_bytes", "peak_bytes", "baseline_peak_bytes", "recompute_ms",
    "step_ms", "bound_ms", "optimality_gap", "composition", "device", "calibrated",
    "measured_fraction", "reserved_bytes", "dry_run", "torch_version",
    "offloaded_bytes", "exposed_ms",
)  # fmt: skip
_PARALLEL_FIELDS = (
    "mesh_shape", "policy", "budget_bytes", "peak_bytes", "late_bytes", "composition",
    "step_ms", "compute_ms", "recompute_ms", "exposed_forward_ms",
    "exposed_backward_ms", "contention_ms", "bound_ms", "optimality_gap", "cluster",
    "device", "torch_version", "offloaded_bytes", "exposed_copies_ms",
)  # fmt: skip

_PIPELINE_FIELDS = (
    "mesh_shape", "mesh_dim_names", "num_gpus", "global_batch", "budget_bytes",
    "peak_bytes", "highest_peak_bytes", "far_bytes", "step_ms", "bound_ms",
    "alternatives", "device", "calibrated", "torch_version",
)  # fmt: skip
_STAGE_FIELDS = (
    "fqns", "policy", "peak_bytes", "late_bytes", "forward_ms", "backward_ms",
    "recompute_ms", "exchange_ms", "gather_ms", "reduce_ms", "waits_ms", "far_bytes",
)  # fmt: skip

_GRAPH_FIELDS = (
    "budget_bytes", "baseline_peak_bytes", "recompute_ms", "bound_ms",
    "optimality_gap", "strategy", "offloaded_bytes", "exposed_ms",
)  # fmt: skip


def plan_record(plan: Plan) -> dict[str, Any]:
    """The figures of a plan; what happens to every op is in its file."""
    return {name: getattr(plan, name) for name in _PLAN_FIELDS}


def parallel_record(plan: ParallelPlan) -> dict[str, Any]:
    """The figures of a parallel plan, its FSDP units, and why other degrees lost."""
    record = {name: getattr(plan, name) for name in _PARALLEL_FIELDS}
    units = [asdict(unit) for unit in plan.sharding.units]
    record["tensor"] = asdict(plan.tensor)
    record["context"] = asdict(plan.context)
    others = [asdict(other) for other in plan.alternatives]
    return {**record, "fsdp_units": units, "alternatives": others}


def cluster_record(plan: ParallelPlan | PipelinePlan) -> dict[str, Any]:
    """The figures of a plan of many GPUs."""
    if isinstance(plan, PipelinePlan):
        return pipeline_record(plan)
    return parallel_record(plan)


def pipeline_record(plan: PipelinePlan) -> dict[str, Any]:
    """The figures of a pipeline, of its stages, and why other meshes lost."""
    record = {name: getattr(plan, name) for name in _PIPELINE_FIELDS}
    stages = [
        {name: getattr(stage, name) for name in _STAGE_FIELDS}
        for stage in plan.stage_plans
    ]
    dimensions = ("pipeline", "tensor", "context")
    own = {name: asdict(getattr(plan, name)) for name in dimensions}
    return {**record, **own, "stages": stages}


def compiled_record(plan: CompiledPlan) -> dict[str, Any]:
    """The figures of the plan of a compiled graph."""
    graph = {name: getattr(plan.graph, name) for name in _GRAPH_FIELDS}
    return {
        **graph,
        "peak_bytes": plan.peak_bytes,
        "num_rerun": len(plan.graph.recomputed),
    }


def sweep_record(sweep: Sweep) -> dict[str, Any]:
    """A sweep without the plans themselves."""
    return {"axes": list(sweep.axes), "rows": sweep.records()}


def advice_record(advice: Advice) -> dict[str, Any]:
    """Advice with what could not be simulated."""
    return {**sweep_record(advice), "not_simulated": advice.not_simulated}


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
    rates = {name: dict(record[name]) for name in ("peak_flops", "matmul_efficiency")}
    link = None if spec.link is None else asdict(spec.link)
    return {**record, **rates, "link": link, "program": asdict(spec.program)}


def sweep_table(sweep: Sweep) -> Table:
    """A row for each budget of each cell."""
    measured = "measured" if any(row.calibrated for row in sweep) else "modelled"
    heads, *rows = sweep.text_table()
    table = _table(f"Recomputation against memory, {measured} figures", *heads)
    for row in rows:
        table.add_row(*row)
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


def fits_line(estimate: Estimate, floor_bytes: int, typed: str, does_fit: bool) -> str:
    """Whether a step fits what was typed as --fits; else whether a plan can."""
    if does_fit:
        return f"The step fits in --fits {typed} as it is."
    planned = replace(estimate, peak_bytes=floor_bytes)
    with_plan = "under a plan it does" if planned.fits(typed) else "nor under any plan"
    return f"The step does not fit in --fits {typed} as it is; {with_plan}."


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right")
    return table
