"""Trace one training step into a `Tape`: under fake tensors, or for real.

One run (`single_run.py`) shows what the step does. It runs anew where draws, training
or other threads may make it do something else.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autosac import _compat_compiler
from autosac.errors import TraceError
from autosac.step.arguments import warn
from autosac.step.tape import Tape
from autosac.tracing import draws
from autosac.tracing.probing import DRAWS
from autosac.tracing.single_run import let_go_of_copies, run
from autosac.tracing.step import Step

# Of a step that other threads disturb.
_LEAST_RUNS, _MOST_RUNS = 3, 9


def trace(step: Step) -> Tape:
    """Run the step under fake tensors and write down what it does.

    Where values decide what it does, it runs on real tensors; where random draws do, or
    what is trained, a few times with other ones, and the one that takes most memory
    counts.

    Raises:
        TraceError: The step cannot run, or not without data; names the module and line.
    """
    try:
        tape = _of_largest_condition(step)
        drawn = draws.may_decide(tape)
        trained = _trains(step) and draws.training_may_decide(tape)
        if not drawn and not trained:
            return tape
        is_real = step.learned.real
        become = partial(_become, step, drawn=drawn, trained=trained)
        variant, tapes, is_extreme = draws.largest(
            tape,
            lambda variant: _tried(trace_once, become(variant)),
            lambda variant: _tried(_storages, become(variant)),
            lambda: step.learned.draws_extremes,
            drawn=drawn,
        )
        if step.learned.real != is_real:  # some draw what others would on real tensors
            become(0)
            return trace(step)
        become(variant)
        tape, *step.learned.redrawn = tapes
        step.learned.is_largest = is_extreme and not trained
    finally:
        let_go_of_copies(step, after_each=False)
    return tape


def _of_largest_condition(step: Step) -> Tape:
    """Run the step once; where its optimizer asks for values that nobody has, twice.

    Each run has one answer to all that it asks, and the one that takes more counts.
    """
    tape = trace_once(step)
    learned = step.learned
    if learned.condition is None or learned.real:
        return tape
    warn(
        "`optimizer` reads conditions from tensors, which only a real step has: what it"
        " does if all of them hold is planned, or if none does, whichever takes more."
        " Leave some of the budget free, or pass a real model and a real batch, on the"
        " device that is planned for."
    )
    as_held = learned.condition, learned.num_later_updates
    learned.condition, learned.num_later_updates = not learned.condition, None
    with contextlib.suppress(TraceError):  # no real step does that
        other = trace_once(step)
        if draws.plain_peak_bytes(other) > draws.plain_peak_bytes(tape):
            return other
    learned.condition, learned.num_later_updates = as_held
    return tape


def _tried(run_of: Callable[[Step], Tape], step: Step) -> Tape:
    """The tape of a variant; whether one that fails needs real tensors is no matter."""
    is_real = step.learned.real
    try:
        return run_of(step)
    except TraceError:
        step.learned.real = is_real
        raise


def _trains(step: Step) -> bool:
    """Whether runs of a step can show what training makes of its values."""
    return step.learned.real and step.optimizer is not None


def _become(step: Step, variant: int, *, drawn: bool, trained: bool) -> Step:
    """A step with other random numbers, after some training, or both."""
    step.learned.seed = variant if drawn else 0
    step.learned.num_updates = variant % draws.FEW if trained else 0
    return step


def _storages(step: Step) -> Tape:
    return run(step, lambda model: None, only_storages=True)


def trace_once(step: Step) -> Tape:
    """Run the step once, or as often as it takes to know what it does.

    Other threads disturb it, such as those of a Dask worker. They draw from the same
    global generators: only a module that draws random numbers in several runs really
    does. And profilers among them look at this thread's frames, which keeps tensors
    alive for a moment: then two runs must agree. So they must where functions of
    TorchScript run, which are compiled in their first call and do other ops later.
    """
    with _compat_compiler.scripts_called() as scripts:
        tape = _plain(step)
        if scripts or is_watched():
            tape = _agreed(step, tape, scripts)
    drawn, runs = _drawn(tape), 1
    while drawn and threading.active_count() > 1 and runs < _MOST_RUNS:
        again = drawn & _drawn(_plain(step))
        runs += 1
        if again == drawn and runs > _LEAST_RUNS:
            break
        drawn = again
    calls = tuple(
        replace(call, once=None) if call.once == DRAWS and i not in drawn else call
        for i, call in enumerate(tape.calls)
    )
    opaque, overlapped = step.opaque, step.overlapped
    return replace(tape, calls=calls, opaque=opaque, overlapped=overlapped)


def _plain(step: Step) -> Tape:
    tape = run(step, lambda model: None, only_storages=False)
    if _drawn(tape) and not step.learned.real:
        tape = run(step, lambda model: None, only_storages=False, finds_draws=True)
    return tape


def _agreed(step: Step, tape: Tape, scripts: Collection[str]) -> Tape:
    """A trace that is like the one before it.

    Args:
        step: The step.
        tape: Its first trace.
        scripts: Functions of TorchScript that it calls.

    Raises:
        TraceError: There is none.
    """
    for _ in range(_MOST_RUNS - 1):
        before, tape = tape, _plain(step)
        if _events(before) == _events(tape):
            return tape
    why = "as other threads look at frames: set"
    fix = "Dask's `distributed.worker.profile.enabled` to False"
    if scripts:
        why = f"as TorchScript compiles `{min(scripts)}` each time anew: plan and train"
        fix = "with the plain function"
    raise TraceError(f"No two of {_MOST_RUNS} traces agree, {why} {fix}.")


def _events(tape: Tape) -> tuple[Any, ...]:
    """What a tape says, but for what other threads may draw meanwhile."""
    return tape.storages, tape.ops, tape.saved


def is_watched() -> bool:
    """Whether a worker of Dask lives, which looks at the frames of all threads."""
    dask = sys.modules.get("distributed.worker")
    return dask is not None and any(dask.Worker._instances)


def _drawn(tape: Tape) -> set[int]:
    """Calls that seem to draw from Python's or NumPy's generators."""
    return {i for i, call in enumerate(tape.calls) if call.once == DRAWS}


def dry_run(
    step: Step, apply: Callable[[torch.nn.Module], Any], *, optimizes: bool = True
) -> Tape:
    """Run the step under fake tensors with a plan applied, as a real run would.

    Args:
        step: The step without a plan.
        apply: Called with the fake copy of the model before it runs.
        optimizes: False ends it where the optimizer would begin: what follows does not
            depend on the plan, but for what is alive there.

    Returns:
        A tape that holds nothing but storages.
    """
    try:
        return run(step, apply, only_storages=True, optimizes=optimizes)
    finally:
        let_go_of_copies(step, after_each=False)
