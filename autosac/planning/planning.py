"""From a profile and a budget to a plan."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from autosac.applying import applying
from autosac.candidates import curves
from autosac.candidates.policies import OpPolicy, block_policies
from autosac.errors import ArgumentError, InfeasibleBudgetError, SolverError
from autosac.planning import redrawn
from autosac.planning.choosing import SolveOptions
from autosac.planning.incumbents import recompute_ms
from autosac.planning.plans import Plan
from autosac.planning.profiling import Profile, TracedStep, calibrate, profile
from autosac.planning.rules import Choice
from autosac.planning.spelling import spell_out
from autosac.quantities import format_bytes
from autosac.simulation.simulating import Simulator
from autosac.tracing.collecting import no_collections
from autosac.tracing.tracing import dry_run, is_watched
from solvers import sac

_DISTURBED = 4  # dry runs that other threads may have disturbed, before one is believed
_MOST_LOWERED = 4  # solves with less and less memory, where sizes vary
_MANY_OPS = 10_000  # of a step whose dry run takes seconds


def price_ms_per_byte(made: TracedStep, budget_bytes: int) -> float | None:
    """What one more byte of budget saves at the margin, in milliseconds per step.

    The dual price of memory in the LP relaxation of the MILP; None below its floor.
    """
    return made.chooser.price_ms_per_byte(budget_bytes)


@no_collections()
def floor(made: TracedStep) -> int:
    """Least feasible budget of a profile in bytes."""
    return made.peak_bytes(lowest(made))


def profile_of(model: Any, inputs: Any, options: dict[str, Any]) -> TracedStep:
    """The profile that was passed, or a new one, calibrated where the model lies."""
    if isinstance(model, TracedStep):
        if inputs is not None or options:
            raise ArgumentError(
                "A profile knows its inputs and options already; pass only"
                " `memory_budget`."
            )
        return model
    if inputs is None:
        raise ArgumentError("`inputs` is missing: pass what the model is called with.")
    return calibrated_if_present(profile(model, inputs, **options))


def calibrated_if_present(
    made: Profile, *, progress: bool | None = None, real_step: bool = True
) -> Profile:
    """The profile with measured figures if its model lies here, or as it is.

    What is not here cannot be measured; what is, must keep its promise.

    Args:
        made: The profile.
        progress: As in `calibrate`,
        real_step: likewise.
    """
    is_meta = any(parameter.is_meta for parameter in made.step.model.parameters())
    if made.step.lens is not None or is_meta:
        return made
    return calibrate(made, progress=progress, real_step=real_step)


@no_collections()
def make_plan(
    made: TracedStep,
    budget_bytes: int,
    *,
    dry_run: bool | None = None,
    start: sac.Start | None = None,
    **solving: Any,
) -> Plan:
    """Choose what to recompute, and confirm it by a dry run.

    Args:
        made: The profile.
        budget_bytes: Cap on the peak.
        dry_run: As in `plan`.
        start: What smaller budgets of a sweep found.
        solving: Fields of `SolveOptions`.

    Raises:
        InfeasibleBudgetError: No plan fits.
        SolverError: The applied model's dry run does not confirm the plan.
    """
    chosen, bound_ms = choose(made, budget_bytes, start=start, **solving)
    if made.redrawn:
        found = chosen, bound_ms
        chosen, bound_ms = _for_other_draws(made, budget_bytes, found, solving)
    policies = spell_out(made, chosen)
    if _wants_dry_run(made, chosen) if dry_run is None else dry_run:
        if not isinstance(made, Profile):
            raise ValueError(
                "`dry_run`=True needs the model: pass the `Profile`, not the step that"
                " a plan keeps of it."
            )
        _confirm(made, chosen, policies)
    return _as_plan(made, budget_bytes, chosen, policies, bound_ms)


def _for_other_draws(
    made: TracedStep,
    budget_bytes: int,
    found: tuple[Choice, float],
    solving: dict[str, Any],
) -> tuple[Choice, float]:
    """A choice that leaves room for what draws and training make of the step.

    Where that much room does not fit, the choice of least peak has most of it.
    """
    for _ in range(_MOST_LOWERED):
        left_bytes = budget_bytes - redrawn.margin_bytes(made, found[0])
        if made.peak_bytes(found[0]) <= left_bytes:
            break
        try:
            found = choose(made, left_bytes, **solving)
        except InfeasibleBudgetError:
            return lowest(made), found[1]
    return found


def lowest_plan(made: TracedStep, budget_bytes: int) -> Plan:
    """The plan of least peak, whether it fits a budget or not."""
    chosen = lowest(made)
    return _as_plan(made, budget_bytes, chosen, spell_out(made, chosen), 0.0)


def choose(
    made: TracedStep,
    budget_bytes: int,
    *,
    start: sac.Start | None = None,
    **solving: Any,
) -> tuple[Choice, float]:
    """The units of a plan with their policies, and the bound on recompute time.

    Raises:
        InfeasibleBudgetError: No plan fits.
    """
    chosen, bound_ms = made.chooser.choose(budget_bytes, SolveOptions(**solving), start)
    if chosen is None:
        raise _infeasible(made, lowest(made), budget_bytes)
    return chosen, bound_ms


def lowest(made: TracedStep) -> Choice:
    """The choice of least peak."""
    return made.chooser.lowest()


def _infeasible(made: TracedStep, chosen: Choice, budget_bytes: int) -> Exception:
    peak_bytes = made.peak_bytes(chosen)
    composition = made.composition(chosen)
    parts = ", ".join(
        f"{format_bytes(nbytes)} {category}"
        for category, nbytes in composition.items()
        if nbytes
    )
    hint = _hint(made)
    return InfeasibleBudgetError(
        f"No plan fits `memory_budget`={budget_bytes} ({format_bytes(budget_bytes)}):"
        f" the lowest peak is {peak_bytes} bytes ({format_bytes(peak_bytes)}), made of"
        f" {parts}. Raise the budget to that, or use a smaller batch.{hint}",
        budget_bytes=budget_bytes,
        lowest_peak_bytes=peak_bytes,
        composition=composition,
    )


def _hint(made: TracedStep) -> str:
    """The module that would matter most among those that cannot be AC units."""
    refused = made.units.refused
    kept = {m.fqn: m.activation_bytes or 0 for m in made.statistics.modules}
    fqn = max(refused, key=lambda fqn: kept.get(fqn, 0), default=None)
    return "" if fqn is None else f" `{fqn}` cannot be an AC unit: {refused[fqn]}."


# --- the plan -----------------------------------------------------------------


def _wants_dry_run(made: TracedStep, chosen: Choice) -> bool:
    """Whether a plan is dry-run if nobody says so; on large models that takes long."""
    is_possible = isinstance(made, Profile)
    if not is_possible or frozenset(chosen.items()) in made.dry_runs:
        return False
    # A plan that recomputes nothing confirms little.
    return len(made.tape.ops) <= _MANY_OPS or not any(made.dry_runs)


def _confirm(made: Profile, chosen: Choice, policies: tuple[OpPolicy, ...]) -> None:
    """Run the applied model under fake tensors: memory must be as simulated."""
    expected = _before_optimizer(made.simulator, chosen)
    for _ in range(_DISTURBED if is_watched() else 1):
        dry = dry_run(
            made.step,
            lambda model: applying.install(model, policies),
            optimizes=False,
        )
        found = _before_optimizer(Simulator(dry), {})
        if found == expected:
            break
    else:
        raise SolverError(
            f"The dry run of the plan peaks at {found[0]} bytes and leaves {found[1]}"
            f" to the optimizer, its simulation at {expected[0]} and {expected[1]}."
            " This is a mistake in autosac; please report the model."
        )
    made.dry_runs.add(frozenset(chosen.items()))


def _before_optimizer(simulator: Simulator, chosen: Choice) -> tuple[int, int]:
    """Most bytes alive before the optimizer begins, and those alive when it does.

    No unit runs in it: what it adds, the trace has shown.
    """
    timeline = simulator.timeline(chosen, workspaces=False)
    mark = simulator.tape.phases["optimizer"] * simulator.span
    live = timeline.live_bytes[timeline.keys <= mark]
    return int(live.max()), int(live[-1])


def _as_plan(
    made: TracedStep,
    budget_bytes: int,
    chosen: Choice,
    policies: tuple[OpPolicy, ...],
    bound_ms: float,
) -> Plan:
    added_ms = recompute_ms(chosen)
    return Plan(
        policy=policy_ratios(made, chosen),
        op_policies=policies,
        budget_bytes=budget_bytes,
        peak_bytes=made.peak_bytes(chosen),
        baseline_peak_bytes=made.baseline_peak_bytes,
        recompute_ms=added_ms,
        step_ms=made.baseline_ms + added_ms,
        bound_ms=min(bound_ms, added_ms),
        composition=made.composition(chosen),
        device=made.device.name,
        calibrated=made.calibrated,
        model=made.model,
        torch_version=torch.__version__,
        measured_fraction=made.calibration.measured_fraction,
        reserved_bytes=_reserved_bytes(made, chosen),
        dry_run=frozenset(chosen.items()) in made.dry_runs,
        signatures=(made.signature,),
        traced=made.traced(),
    )


def _reserved_bytes(made: TracedStep, chosen: Choice) -> int | None:
    if made.device.type != "cuda":
        return None
    return made.simulator.allocator_peaks(chosen)[1]


def policy_ratios(made: TracedStep, chosen: Choice) -> dict[str, float]:
    """Share of each module's activation memory that is recomputed, over all calls."""
    most: dict[str, int] = defaultdict(int)
    freed: dict[str, int] = defaultdict(int)
    for unit in (*made.units.candidates, *made.slices):
        most[unit.label] += unit.activation_bytes
    for unit, policy in chosen.items():
        parts = [(block.unit, p) for block, p in block_policies(unit, policy)]
        for call, part in parts or [(unit, policy)]:
            left = call.activation_bytes - curves.kept(call, part)
            freed[call.label] += max(left, 0)
    return {fqn: nbytes / max(most[fqn], 1) for fqn, nbytes in freed.items()}
