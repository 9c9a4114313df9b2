"""From a model, its batches and a budget to a plan.

Steps of different batches share no memory but what lasts, so the plan that is cheapest
over all of them is the cheapest one for each.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, overload

import torch

from autosac import _compat_dispatch
from autosac.devices.allocator_settings import Cap, check_cap
from autosac.errors import ArgumentError, InfeasibleBudgetError
from autosac.planning.batch_kinds import Bucket, are_several, buckets
from autosac.planning.make_plan import (
    Offload,
    floor,
    lowest_plan,
    make_plan,
    may_offload,
    read_offload,
)
from autosac.planning.plan_data import OnMismatch, Replan
from autosac.planning.plans import Plan
from autosac.planning.statistics_plans import StatisticsPlan, plan_statistics
from autosac.planning.unseen_batches import check_on_mismatch
from autosac.profiles.given import (
    MakeLoss,
    argument_names,
    calibrated_if_present,
    check_make_loss_fn,
    check_names,
    profile_of,
    with_loss,
)
from autosac.profiles.profile import Profile, profile
from autosac.profiles.restricting import restricted
from autosac.profiles.traced_step import TracedStep
from autosac.profiles.tracing_again import options_of
from autosac.quantities import format_bytes, parse_bytes
from autosac.solvers.milp.solution import Backend
from autosac.solving.solve_options import RELATIVE_GAP, check_solving, read_segments
from autosac.statistics.by_module import Statistics
from autosac.step.arguments import check_replans, fits_forward
from autosac.step.marks import Marks, marks_of
from autosac.tracing.real_steps import names_of_forward

_Planned = list[tuple[Bucket, Profile]]


@overload
def plan(
    model: Statistics, inputs: None = None, *, memory_budget: int | str, **options: Any
) -> StatisticsPlan: ...
@overload
def plan(
    model: torch.nn.Module | Profile,
    inputs: Any = None,
    *,
    memory_budget: int | str,
    **options: Any,
) -> Plan: ...
def plan(
    model: torch.nn.Module | Profile | Statistics,
    inputs: Any = None,
    *,
    memory_budget: int | str,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    cap: Cap = "allocated",
    offload: Offload = False,
    host_budget: int | str | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    world_size: int | None = None,
    on_mismatch: OnMismatch = "recompute",
    make_loss_fn: MakeLoss | None = None,
    segments: int | None = None,
    backend: Backend = "highs",
    relative_gap: float | None = None,
    time_limit_s: float | None = None,
    dry_run: bool | None = None,
    **options: Any,
) -> Plan | StatisticsPlan:
    """Find the cheapest way to train under a memory budget.

    Args:
        model: The model, or a `Profile` of it (then no other option is taken). Or
            `Statistics` of its modules, from `from_trackers` or ``profile.statistics``:
            the answer is then a `StatisticsPlan`, the optimum on exactly these figures,
            and nothing is simulated.
        inputs: As in `profile`; or several batches: a list of such inputs, or a
            `torch.utils.data.DataLoader`, of whose epoch up to 512 batches are looked
            at. Every signature (shapes, types, structure) gets a plan of its own, and
            so does every branch that padding or none decides; of more than 16 some are
            planned for, the others follow the plan of the next larger one.
        memory_budget: Cap on the peak: bytes, or text such as "24GiB" or "80%".
        ac_units: The only modules that may be AC units: names, also those of another
            plan's ``policy``, patterns such as ``"blocks.*"``, or classes. None for all
            that can be; ``[]`` for none.
        fsdp_units: Modules that will be FSDP units, likewise: no module around one may
            be an AC unit. Which modules are best is what `plan_parallel` decides.
        cap: What the budget caps on a GPU: "allocated" for what PyTorch's allocator
            hands out, "reserved" for all that it takes from the device, which is more:
            it keeps segments, and what is left in them may fit nothing. On the CPU both
            are the same.
        offload: Whether arguments of AC units, and results that they save, may lie in
            far memory from the end of their forward to their rerun: of a GPU in pinned
            memory of its host, of the CPU in a file. The plan decides for each unit,
            together with what is recomputed. Or nothing is, and the model's saved
            tensors lie there, and come back one by one. "auto": only where no plan fits
            without. Not tried on a GPU yet.
        host_budget: Cap on what lies there, in bytes or as text; None for none.
        offload_dir: Where the CPU's file lies; None for the system's temporary
            directory, which may be memory.
        world_size: Of statistics, how many ranks share parameters and gradients; None
            for one.
        on_mismatch: What a model under the plan does with a batch of a signature that
            was not planned for. "recompute": it follows the plan of the next larger
            one; one that is larger than all is recomputed as much as saves memory, with
            one warning. "replan": it is traced and planned before the step runs.
            "raise": a `PlanMismatchError`, before anything runs.
        make_loss_fn: Inputs, as they were passed -> ``loss_fn``, for losses that hold
            the targets of a batch.
        segments: None to choose among the exact points of every trade-off curve;
            a number to fit each curve with up to so many linear segments (pwlf), let a
            piecewise-linear MILP choose units and ratios on these, and round them to
            points. Such plans cost as much as those of exact points or more, and one of
            more segments no more than one of fewer. With statistics, so many lines for
            each curve, that never understate it.
        backend: MILP solver, "highs" or "cbc".
        relative_gap: A solve stops when the plan's recompute time is proven this
            close to the least. None for 0.5 %, and for 0 with statistics.
        time_limit_s: A solve stops after this long with the best plan so far, and
            the plan's gap says what is left. None counts work instead, so that the
            same inputs give the same plan on an idle and on a busy machine: solves
            take a second or two at most.
        dry_run: Whether to run the applied model once under fake tensors, up to the
            optimizer, which must confirm the simulated memory. None for always but in
            one case: the step has more than 10,000 ops, and a dry run of another plan
            from the same profile has confirmed the simulation. `Plan.dry_run` says
            what was done.
        options: As in `profile`.

    Raises:
        InfeasibleBudgetError: No plan fits; says the least feasible budget, and of
            several batches the one that needs it.
        ArgumentError: The budget or another argument cannot be read, or does not go
            with the others.
        SolverError: The dry run does not confirm the plan.
    """
    check_names(options, plan)
    check_on_mismatch(on_mismatch)
    check_cap(cap)
    gap = RELATIVE_GAP if relative_gap is None else relative_gap
    check_solving(backend, gap, time_limit_s)
    if dry_run not in (None, True, False):
        raise ArgumentError(
            f"`dry_run` must be True, False or None to decide, got {dry_run!r}."
        )
    directory = read_offload(offload, offload_dir)
    units: dict[str, Any] = {
        name: None if marks is None else marks_of(marks)
        for name, marks in (("ac_units", ac_units), ("fsdp_units", fsdp_units))
    }
    solving: dict[str, Any] = {
        "segments": None if segments is None else read_segments(segments),
        "backend": backend,
        "time_limit_s": time_limit_s,
    }
    if isinstance(model, Statistics):
        other = {"inputs": inputs, "make_loss_fn": make_loss_fn, "dry_run": dry_run}
        other["cap"] = None if cap == "allocated" else cap
        other["offload"] = offload or None
        _refuse_with_statistics({**other, **options})
        solving["relative_gap"] = relative_gap or 0.0
        solving["world_size"] = 1 if world_size is None else world_size
        return plan_statistics(model, memory_budget, **units, **solving)
    _refuse_without_statistics(world_size)
    check_make_loss_fn(make_loss_fn, options)
    units["cap"] = cap
    solving["relative_gap"] = gap
    solving["dry_run"] = dry_run
    far: dict[str, Any] = {"offload": offload, "host_bytes": None}
    if host_budget is not None:
        far["host_bytes"] = parse_bytes(host_budget, name="host_budget")
    units |= {**far, "offload": offload is True}
    solving |= {**far, "offload_dir": directory}
    if isinstance(model, torch.nn.Module) and are_several(inputs):
        steps = [
            (bucket, restricted(traced, **units))
            for bucket, traced in _traced(model, inputs, make_loss_fn, options)
        ]
        budget_bytes = _parsed(memory_budget, steps[0][1])
        planned = _over_batches(steps, budget_bytes, solving)
        step: TracedStep = steps[0][1]
    else:
        options = with_loss(model, inputs, options, make_loss_fn)
        step = restricted(profile_of(model, inputs, options), **units)
        budget_bytes = _parsed(memory_budget, step)
        planned = make_plan(step, budget_bytes, **solving)
    replanned = None
    if on_mismatch == "replan" and isinstance(step, Profile):
        form = inputs[0] if isinstance(inputs, list) else inputs
        how = units, solving
        replanned = _replan(step, budget_bytes, how, make_loss_fn, form)
    return replace(planned, on_mismatch=on_mismatch, replan=replanned)


def _refuse_with_statistics(given: dict[str, Any]) -> None:
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ArgumentError(
            f"`{wrong[0]}` does not go with statistics, which are all that is known of"
            " the step: leave it out, or pass the model or its profile."
        )


def _refuse_without_statistics(world_size: int | None) -> None:
    if world_size is not None:
        raise ArgumentError(
            "`world_size` is for statistics, whose parameters it divides: plan for many"
            " GPUs by `autosac.plan_parallel(..., cluster=..., num_gpus=...)`."
        )


def policy(
    model: torch.nn.Module | Profile | Statistics,
    inputs: Any = None,
    *,
    memory_budget: int | str,
    **options: Any,
) -> dict[str, float]:
    """FQN of each AC unit -> share of its activation memory to recompute."""
    check_names(options, policy, also=argument_names(plan))
    return plan(model, inputs, memory_budget=memory_budget, **options).policy


def _parsed(memory_budget: int | str, step: TracedStep) -> int:
    return parse_bytes(memory_budget, total_bytes=step.device.memory_bytes)


# --- several batches ------------------------------------------------------------


def _traced(
    model: torch.nn.Module,
    inputs: Any,
    make_loss_fn: MakeLoss | None,
    options: dict[str, Any],
) -> _Planned:
    """Profiles of the batches to plan for; those that run the same ops are one."""
    _check_meant(model, inputs)
    steps: _Planned = []
    for bucket in buckets(model, inputs):
        options = with_loss(model, bucket.batch, options, make_loss_fn)
        traced = calibrated_if_present(profile(model, bucket.batch, **options))
        twin = next((i for i, one in enumerate(steps) if _alike(one[1], traced)), None)
        if twin is None:
            steps.append((bucket, traced))
            continue
        earlier, other = steps[twin]
        both = dict.fromkeys([*earlier.signatures, *bucket.signatures])
        earlier.signatures = list(both)
        earlier.num_batches += bucket.num_batches
        if traced.baseline_peak_bytes > other.baseline_peak_bytes:
            steps[twin] = (earlier, traced)
    return steps


def _check_meant(model: torch.nn.Module, inputs: Any) -> None:
    """Refuse a list of the arguments of one call.

    Raises:
        ArgumentError: Says what to pass.
    """
    if not isinstance(inputs, list) or len(inputs) < 2:
        return
    tensors = all(isinstance(one, torch.Tensor) for one in inputs)
    if tensors and fits_forward(model, *inputs) and not fits_forward(model, inputs[0]):
        raise ArgumentError(
            f"`inputs` is a list, which stands for {len(inputs)} batches: pass a tuple"
            f" if these are the arguments of {type(model).__name__}.forward."
        )


def _alike(one: TracedStep, other: TracedStep) -> bool:
    """Whether two batches of a signature take the same branches."""
    same = one.signature == other.signature
    return same and names_of_forward(one.tape) == names_of_forward(other.tape)


def _over_batches(steps: _Planned, budget_bytes: int, solving: dict[str, Any]) -> Plan:
    """The plan for several batches."""
    plans = []
    numbers = Counter(s for bucket, _ in steps for s in bucket.signatures)
    for bucket, step in steps:
        if any(numbers[signature] > 1 for signature in bucket.signatures):
            # Which plan to follow shows when the model runs: too late for all of it.
            step.leave_out([""], "its batches take several branches")
        try:
            cheapest = make_plan(step, budget_bytes, **solving)
        except InfeasibleBudgetError as error:
            if solving["offload"] == "auto":
                steps = [(b, may_offload(s, solving["host_bytes"])) for b, s in steps]
            raise _infeasible(steps, budget_bytes, error) from None
        signatures = tuple(bucket.signatures)
        plans.append(
            replace(cheapest, signatures=signatures, num_batches=bucket.num_batches)
        )
    openings = _openings([step for _, step in steps], plans)
    plans = [replace(p, opening=o) for p, o in zip(plans, openings, strict=True)]
    return plans[0] if len(plans) == 1 else together(plans)


def together(plans: Sequence[Plan]) -> Plan:
    """One plan of several: memory of the largest, times are means over all batches."""
    plans = sorted(plans, key=lambda one: -one.peak_bytes)
    total = sum(one.num_batches for one in plans)

    def mean(name: str) -> float:
        values = [one.num_batches * float(getattr(one, name)) for one in plans]
        return sum(values) / total

    signatures = dict.fromkeys(s for one in plans for s in one.signatures)
    return replace(
        plans[0],
        baseline_peak_bytes=max(one.baseline_peak_bytes for one in plans),
        recompute_ms=mean("recompute_ms"),
        step_ms=mean("step_ms"),
        bound_ms=mean("bound_ms"),
        measured_fraction=mean("measured_fraction"),
        calibrated=all(one.calibrated for one in plans),
        dry_run=all(one.dry_run for one in plans),
        signatures=tuple(signatures),
        num_batches=total,
        opening=(),
        variants=tuple(plans),
    )


def _openings(
    steps: Sequence[TracedStep], plans: Sequence[Plan]
) -> list[tuple[str, ...]]:
    """Of each step the first ops that tell it from others of a shared signature."""
    openings = []
    for step, plan in zip(steps, plans, strict=True):
        own = set(plan.signatures)
        siblings = [i for i, p in enumerate(plans) if not own.isdisjoint(p.signatures)]
        ends = {fqn for i in siblings for fqn in _unit_modules(plans[i])}
        names = _before(step, ends)
        length = 0
        for other in (_before(steps[i], ends) for i in siblings):
            pairs = enumerate(zip_longest(names, other))
            length = max(length, next((n + 1 for n, (a, b) in pairs if a != b), 0))
        openings.append(tuple(names[:length]))
    return openings


def _unit_modules(plan: Plan) -> set[str]:
    """FQNs of the modules whose ``forward`` a plan replaces."""
    policies = plan.op_policies
    replaced = {p.fqn.rpartition(".")[0] if p.until else p.fqn for p in policies}
    ends = {fqn for p in policies for fqn in (p.around, p.far_until) if fqn}
    return replaced | ends


def _before(step: TracedStep, fqns: set[str]) -> list[str]:
    """Names of the ops of forward before one of some modules begins, and '' there."""
    nodes, calls = step.tape.modules.nodes, step.tape.calls
    begins = [call.enter for call in calls if nodes[call.module].fqn in fqns]
    if not begins:
        return names_of_forward(step.tape)
    return [*names_of_forward(step.tape, before=min(begins)), ""]


def _infeasible(
    steps: _Planned, budget_bytes: int, error: InfeasibleBudgetError
) -> InfeasibleBudgetError:
    """What to raise if a batch fits under no plan: names the one that needs most."""
    if len(steps) == 1:
        return error
    worst = max((step for _, step in steps), key=floor)
    least = lowest_plan(worst, budget_bytes)
    least_bytes = worst.budget_for(least.peak_bytes)
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)})"
        f" for all of the {len(steps)} kinds of batches: one with {worst.signature}"
        f" peaks at {least.peak_bytes} bytes ({format_bytes(least.peak_bytes)}) at"
        f" least. Raise the budget to {least_bytes} bytes, or use smaller batches.",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=least_bytes,
        composition=least.composition,
    )


# --- batches that come later ------------------------------------------------------


def _replan(
    profiled: Profile,
    budget_bytes: int,
    how: tuple[dict[str, Any], dict[str, Any]],
    make_loss_fn: MakeLoss | None,
    form: Any,
) -> Replan:
    """A function that plans a batch during training, with the options of a profile.

    The real step that a profile is held against does not run: there may be no memory
    for it besides the training.
    """
    step, (units, solving) = profiled.step, how
    options = options_of(profiled)
    loss_fn = step.loss_fn
    del profiled, step  # neither model nor inputs stay alive
    is_pair = isinstance(form, tuple) and len(form) == 2 and isinstance(form[1], dict)
    kind = type(form)

    def shaped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments of a call in the form in which `inputs` were passed."""
        if is_pair or (args and kwargs):
            return args, kwargs
        if kwargs:
            return kwargs
        return args[0] if issubclass(kind, torch.Tensor) else args

    def replanned(
        model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan:
        check_replans(options["optimizer"], model)
        loss = loss_fn if make_loss_fn is None else make_loss_fn(shaped(args, kwargs))
        with _compat_dispatch.as_a_step_begins():
            step = profile(model, (args, kwargs), loss_fn=loss, **options)
            step = calibrated_if_present(step, progress=False, real_step=False)
            step = restricted(step, **units)
            try:
                return make_plan(step, budget_bytes, **solving)
            except InfeasibleBudgetError:
                lowest = lowest_plan(step, budget_bytes)
                return replace(lowest, offload_dir=solving["offload_dir"])

    return replanned
