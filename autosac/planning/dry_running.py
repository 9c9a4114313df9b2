"""Does an applied plan take the memory that was simulated? Else units are left out."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from autosac.checkpointing import installing
from autosac.errors import SolverError, TraceError
from autosac.planning.spelling import spell_out
from autosac.profiles.profile import Profile
from autosac.profiles.traced_step import TracedStep
from autosac.simulation.simulator import Simulator
from autosac.solving.rules_of_thumb import Choice
from autosac.step.tape import Tape
from autosac.tracing.trace import dry_run, is_watched
from autosac.units.nests import Nest
from autosac.units.unit import Unit

_DISTURBED = 4  # dry runs that other threads may have disturbed, before one is believed
_MANY_OPS = 10_000  # of a step whose dry run takes seconds
_STEP = "Step "
_ONCE = "run the model once before you plan and train"
_DEPARTS = "In a dry run "


def wants_dry_run(profile: TracedStep, chosen: Choice) -> bool:
    """Whether a plan is dry-run if nobody says so; on large models that takes long."""
    is_possible = isinstance(profile, Profile)
    if not is_possible or frozenset(chosen.items()) in profile.dry_runs:
        return False
    # A plan that recomputes nothing confirms little.
    return is_quick(profile) or not any(profile.dry_runs)


def is_quick(profile: TracedStep) -> bool:
    """Whether a dry run takes no seconds."""
    return len(profile.tape.ops) <= _MANY_OPS


def difference_in_dry_run(profile: Profile, chosen: Choice) -> str:
    """What a dry run of the applied model has other than the simulation, in words.

    The model runs under fake tensors, and memory must be as simulated: else something
    happens in it that the tape does not tell of.
    """
    policies = spell_out(profile, chosen)
    late_bytes = _late_bytes(profile.tape)
    peak_bytes, left_bytes = _before_optimizer(profile.simulator, chosen)
    expected = (peak_bytes - late_bytes, left_bytes - late_bytes)
    for _ in range(_DISTURBED if is_watched() else 1):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            dry = dry_run(
                profile.step,
                lambda model: installing.install(model, policies),
                optimizes=False,
            )
        observed = _before_optimizer(Simulator(dry), {})
        if observed == expected:
            return _more_in_others(profile, chosen, policies)
    sentences = (str(warning.message).partition(". ")[0] for warning in said)
    departed = next((one for one in sentences if one.startswith("AC unit")), "")
    if departed:
        return f"{_DEPARTS}{departed}; if it has not run yet, {_ONCE}."
    return (
        f"The dry run of the plan peaks at {observed[0]} bytes and leaves {observed[1]}"
        f" to the optimizer, its simulation at {expected[0]} and {expected[1]}."
        " This is a mistake in autosac; please report the model."
    )


def _more_in_others(profile: Profile, chosen: Choice, policies: Any) -> str:
    """What steps take besides that the planned one covers, such as the first.

    Units that do something else in one run again as a whole.
    """
    learned = profile.step.learned
    if not learned.earlier or not chosen:
        return ""
    peak_bytes = profile.simulator.peak_bytes(chosen)
    for number in learned.covered:
        step = replace(profile.step, learned=replace(learned, earlier=number))
        which = f"{_STEP}{number + 1} of the plan"
        advice = "" if number else f": {_ONCE}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each unit that departs says so
            try:
                dry = dry_run(
                    step,
                    lambda model: installing.install(model, policies),
                    optimizes=False,
                )
            except TraceError as error:  # such as what changed that a unit has read
                return f"{which} fails{advice}: {error}"
        own_bytes, _ = _before_optimizer(Simulator(dry), {})
        if own_bytes > peak_bytes:
            return (
                f"{which} peaks at {own_bytes} bytes, and its simulation at"
                f" {peak_bytes}{advice}."
            )
    return ""


def _late_bytes(tape: Tape) -> int:
    """Tensors from elsewhere that only the optimizer reads, such as a learning rate.

    A run that ends before it does not meet them.
    """
    begin = tape.phases["optimizer"]
    earlier = {
        i for op in tape.ops if op.start < begin for i in (*op.reads, *op.writes)
    }
    late = {i for op in tape.ops if op.start > begin for i in (*op.reads, *op.writes)}
    storages = [tape.storages[i] for i in late - earlier]
    return sum(s.nbytes for s in storages if s.born == 0 and s.category == "input")


def confirm(profile: Profile, chosen: Choice) -> str:
    """Dry-run a choice; how it differed from its simulation, empty if it did not."""
    difference = difference_in_dry_run(profile, chosen)
    if not difference:
        profile.dry_runs.add(frozenset(chosen.items()))
    return difference


def leave_out(profile: Profile, chosen: Choice, difference: str) -> None:
    """Leave out the units whose dry run is not as simulated.

    Raises:
        SolverError: The step differs without any, or no module can be left out.
    """
    if difference_in_dry_run(profile, {}):
        raise SolverError(difference)
    kinds = {_kind(unit): unit for unit in chosen}
    inexact = {
        kind
        for kind, unit in kinds.items()
        if difference_in_dry_run(profile, {unit: chosen[unit]})
    }
    inexact = inexact or {_inexact_beside_others(profile, chosen, list(kinds))}
    alike = (u for u in profile.choosable if _kind(u) in inexact)
    fqns = [fqn for unit in alike for fqn in _modules_of(unit)]
    if not fqns:
        raise SolverError(difference)
    more = f" and {len(fqns) - 1} more" if fqns[1:] else ""
    cannot = f"`{fqns[0]}`{more} cannot be an AC unit"
    if not fqns[0]:
        cannot = "The saved tensors of the model cannot come back one by one"
    why = "rerun, it takes other memory than its trace shows"
    if difference.startswith((_STEP, _DEPARTS)):
        why = f"{difference[0].lower()}{difference[1:].rstrip('.')}"
    warnings.warn(
        f"{cannot}: {why}. It is left out, and the rest is planned.", stacklevel=4
    )
    profile.leave_out(fqns, why)


def _kind(unit: Unit) -> Hashable:
    """Equal for units that do the same."""
    return type(unit), unit.key


def _inexact_beside_others(
    profile: Profile, chosen: Choice, kinds: list[Hashable]
) -> Hashable:
    """A kind of units with which some of the kinds before it are not as simulated.

    Args:
        profile: What is planned.
        chosen: All units, which are not as simulated.
        kinds: Theirs, each of which is by itself.
    """
    exact, inexact = 0, len(kinds)  # how many of the first kinds are
    while inexact - exact > 1:
        half = (exact + inexact) // 2
        first = {u: p for u, p in chosen.items() if _kind(u) in kinds[:half]}
        if difference_in_dry_run(profile, first):
            inexact = half
        else:
            exact = half
    return kinds[inexact - 1]


def _modules_of(unit: Unit) -> list[str]:
    """FQNs of the modules that a unit consists of."""
    if isinstance(unit, Nest):
        return [unit.around]
    return [call.fqn for call in unit.calls]


def _before_optimizer(simulator: Simulator, chosen: Choice) -> tuple[int, int]:
    """Most bytes alive before the optimizer begins, and those alive when it does.

    No unit runs in it: what it adds, the trace has shown.
    """
    timeline = simulator.timeline(chosen, workspaces=False)
    mark = simulator.tape.phases["optimizer"] * simulator.span
    live = timeline.live_bytes[timeline.keys <= mark]
    return int(live.max()), int(live[-1])
