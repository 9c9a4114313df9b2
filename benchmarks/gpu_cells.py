"""One model of `benchmarks.gpu_validation`: predictions, then real steps."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autosac import Plan, Profile, calibrate, floor, profile
from autosac.devices.specs import device_of_product
from autosac.planning.make_plan import make_plan
from autosac.units.matching import chosen_by
from autosac.units.policies import (
    Policy,
)
from autosac.units.unit import Unit
from benchmarks.gpu_models import Subject
from benchmarks.gpu_runs import Run, clean, comparison, deterministic, train

# Of the way from the floor to the plain peak: budget of the plan that is made through
# the lens alone, and of the plan whose steps run on deterministic kernels.
ALONE_SHARE = 0.25


def validate(
    work: Subject,
    device: str,
    record: dict[str, Any],
    plans: list[Plan],
    *,
    shares: tuple[float, ...],
    ends: float,
) -> None:
    """Plan and train one model under all budgets.

    Args:
        work: The model.
        device: "cuda" or "cpu".
        record: Filled in as results come, so that a failure leaves the earlier ones.
        plans: Likewise, one for each share.
        shares: Budgets, as parts of the way from the floor to the plain peak.
        ends: Monotonic time after which no further budget is begun.
    """
    seconds = record["seconds"] = {}
    torch.manual_seed(0)
    with _timed(seconds, "predictions"):
        alone, offloading = _predict(work, device, record, plans, shares)
    with _timed(seconds, "plain runs"):
        plain, own_distance = _plain(work, device, record)
    with _timed(seconds, "planned runs"):
        for cell, plan in zip(record["cells"], plans, strict=True):
            if time.monotonic() > ends:
                cell["skipped"] = "no time left"
                continue
            cell |= _measured(work, device, plan, plain, own_distance)
        if alone is not None and time.monotonic() < ends:
            found = _measured(work, device, alone, plain, own_distance)
            record["lens"]["plan"] |= found
        if offloading is not None and time.monotonic() < ends:
            record["offload"] |= _measured(
                work, device, offloading, plain, own_distance
            )
    with _timed(seconds, "deterministic"):
        if time.monotonic() < ends:
            record["deterministic"] = _deterministic(work, device)


def told(error: BaseException) -> str:
    """The last lines of a traceback; lets go of the tensors that its frames hold."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    pending: BaseException | None = error
    while pending is not None:
        traceback.clear_frames(pending.__traceback__)
        pending = pending.__cause__ or pending.__context__
    return "\n".join(line.rstrip()[:300] for line in lines[-8:])


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - begin, 1)


# --- predictions ------------------------------------------------------------------


def _predict(
    work: Subject,
    device: str,
    record: dict[str, Any],
    plans: list[Plan],
    shares: tuple[float, ...],
) -> tuple[Plan | None, Plan | None]:
    """Make all plans.

    Profiles hold their model, so that none of them leaves this function.

    Returns:
        The plan that was made as if no GPU were present, and the one that offloads.
    """
    clean(device)
    seconds = record["seconds"]
    with _timed(seconds, "profile"):
        traced = profile_of(work, device, None)
    with _timed(seconds, "calibrate"):
        made = calibrate(traced, cache=False, progress=False)
    lowest, baseline = floor(made), made.baseline_peak_bytes
    record |= {
        "parameters": sum(p.numel() for p in made.step.model.parameters()),
        "floor_bytes": lowest,
        "baseline_bytes": baseline,
        "modelled_baseline_bytes": traced.baseline_peak_bytes,
        "baseline_ms": made.baseline_ms,
        "library_bytes": list(made.tape.library_bytes),
        "measured_share": made.calibration.measured_fraction,
        "not_measured": dict(made.failures),
        "kernels": sorted({op.name for op in made.tape.ops if _is_telling(op.name)}),
    }
    with _timed(seconds, "plans"):
        for share in shares:
            plans.append(make_plan(made, int(lowest + share * (baseline - lowest))))
    with _timed(seconds, "lens"):
        lens, record["lens"] = _through_lens(work, device, made)
    record["cells"] = [
        _predicted(share, plan, made, lens)
        for share, plan in zip(shares, plans, strict=True)
    ]
    with _timed(seconds, "offload"):
        offloading = _offloading(made, lowest, record)
    if lens is None:
        return None, offloading
    budget = int(lowest + ALONE_SHARE * (baseline - lowest))
    return _alone(lens, budget, record["lens"]), offloading


def _offloading(profile: Profile, lowest: int, record: dict[str, Any]) -> Plan | None:
    """A plan half-way between the floors with and without offload."""
    try:
        least = floor(profile, offload=True)
        plan = make_plan(profile, (least + lowest) // 2, offload=True)
        record["offload"] = {
            "floor_bytes": least,
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.peak_bytes,
            "predicted_ms": plan.step_ms,
            "offloaded_bytes": plan.offloaded_bytes,
            "num_units": len(plan.policy),
        }
        return plan
    # As below.
    except Exception as error:
        record["offload"] = {"error": told(error)}
        return None


def profile_of(work: Subject, device: str, planned_for: Any) -> Profile:
    """A profile of the model on a device; "meta" takes the batch from the CPU."""
    batch = work.make_batch("cpu" if device == "meta" else device)
    model = work.build(device)
    return profile(
        model,
        batch.inputs,
        loss_fn=batch.loss_fn,
        optimizer=work.make_optimizer(model),
        autocast=work.autocast,
        device=planned_for,
    )


def _is_telling(name: str) -> bool:
    """Whether an op's name shows which library runs attention or batch norm."""
    return "attention" in name or "batch_norm" in name


def _through_lens(
    work: Subject, device: str, profile: Profile
) -> tuple[Profile | None, dict[str, Any]]:
    """A profile as if no GPU were present, or why there is none."""
    planned_for = "cpu"
    try:
        if device == "cuda":
            planned_for = device_of_product(torch.cuda.get_device_name()).name
        lens = profile_of(work, "meta", planned_for)
        return lens, {
            "floor_bytes": floor(lens),
            "baseline_bytes": lens.baseline_peak_bytes,
            "baseline_ms": lens.baseline_ms,
            "first_difference": _first_difference(profile, lens),
        }
    except NotImplementedError as error:
        return None, {"refused": str(error)}
    # What else fails there must not cost the measurements of the calibrated plans.
    except Exception as error:
        return None, {"failed": told(error)}


def _first_difference(profile: Profile, lens: Profile) -> str | None:
    """Where the ops of the lens and of the GPU part; None if they never do."""
    expected, found = (
        [(op.name, op.phase, op.shapes) for op in p.tape.ops if not op.is_view]
        for p in (profile, lens)
    )
    for place, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return f"op {place}: {b} instead of {a}"
    if len(expected) != len(found):
        return f"{len(found)} ops instead of {len(expected)}"
    return None


def _alone(lens: Profile, budget_bytes: int, record: dict[str, Any]) -> Plan | None:
    """The plan of somebody who has no GPU."""
    try:
        budget_bytes = max(budget_bytes, floor(lens))
        plan = make_plan(lens, budget_bytes)
    # As above.
    except Exception as error:
        record["plan"] = {"error": told(error)}
        return None
    record["plan"] = _predicted(None, plan, lens, None)
    return plan


def _predicted(
    share: float | None, plan: Plan, profile: Profile, lens: Profile | None
) -> dict[str, Any]:
    """What is predicted of one plan."""
    chosen, _ = same_choice(profile, plan)
    replayed = None
    if profile.device.type == "cuda":
        replayed = profile.simulator.allocator_peak_bytes(chosen, "allocated")
    found = {
        "share": share,
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.peak_bytes,
        "predicted_reserved_bytes": plan.reserved_bytes,
        # In blocks: some are larger than what was asked for.
        "predicted_block_bytes": replayed,
        "predicted_ms": plan.step_ms,
        "recompute_ms": plan.recompute_ms,
        "num_units": len(plan.policy),
        "gap": plan.optimality_gap,
    }
    if lens is not None:
        through_lens, departures = same_choice(lens, plan)
        found["lens_departures"] = departures
        if not departures:
            found["lens_bytes"] = lens.simulator.peak_bytes(through_lens)
            found["lens_reserved_bytes"] = (
                lens.simulator.allocator_peak_bytes(through_lens, "reserved")
                if lens.device.type == "cuda"
                else None
            )
    return found


def same_choice(profile: Profile, plan: Plan) -> tuple[dict[Unit, Policy], list[str]]:
    """A plan's units and policies in a profile, or FQNs of units with other ops."""
    single = (*profile.units.candidates, *profile.slices)
    calls = {(unit.label, unit.call_index): unit for unit in single}
    departures = []
    for spelled in plan.op_policies:
        unit = calls.get((spelled.label, spelled.call_index))
        if unit is None or unit.op_names(profile.tape) != spelled.names:
            departures.append(spelled.fqn)
    if departures:
        return {}, departures
    return chosen_by(profile.tape, profile.candidates, plan.op_policies), []


# --- real steps -------------------------------------------------------------------


def _plain(
    work: Subject, device: str, record: dict[str, Any]
) -> tuple[Run, float | None]:
    """The plain run, and by how much two of them differ."""
    plain = train(work, device, None)
    again = train(work, device, None, timed_steps=0)
    own = comparison(plain, again, None)
    record["plain"] = _figures(plain) | {"again": own}
    return plain, own["distance"]


def _figures(run: Run) -> dict[str, Any]:
    return {
        "allocated_bytes": run.allocated_bytes,
        "requested_bytes": run.requested_bytes,
        "reserved_bytes": run.reserved_bytes,
        "held_bytes": run.held_bytes,
        "step_ms": run.step_ms,
        "losses": list(run.losses),
    }


def _measured(
    work: Subject, device: str, plan: Plan, plain: Run, own_distance: float | None
) -> dict[str, Any]:
    """What real steps with a plan show; a failure of theirs is a result."""
    try:
        run = train(work, device, plan)
    # A plan that breaks the step must not cost the measurements of the other plans.
    except Exception as error:
        return {"error": told(error)}
    return _figures(run) | {"state": comparison(plain, run, own_distance)}


def _deterministic(work: Subject, device: str) -> dict[str, Any]:
    """Bits of plain and planned steps on deterministic kernels, if there are such."""
    try:
        with deterministic():
            clean(device)
            plan = _deterministic_plan(work, device)
            plain = train(work, device, None, timed_steps=0)
            again = train(work, device, None, timed_steps=0)
            own = comparison(plain, again, None)
            del again
            planned = train(work, device, plan, timed_steps=0)
            found = comparison(plain, planned, None)
            return {"again": own, "state": found, "num_units": len(plan.policy)}
    # PyTorch refuses some kernels there, with a RuntimeError, but see above too.
    except Exception as error:
        return {"error": told(error)}


def _deterministic_plan(work: Subject, device: str) -> Plan:
    """A plan of the kernels that are chosen then; peaks are not compared."""
    made = profile_of(work, device, None)
    lowest, baseline = floor(made), made.baseline_peak_bytes
    return make_plan(made, int(lowest + ALONE_SHARE * (baseline - lowest)))
