"""How large a batch can be, and which size is fastest: by planning, not by running."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosac.errors import (
    ArgumentError,
    InfeasibleBudgetError,
    Interrupted,
    TraceError,
)
from autosac.kinds import check_kind
from autosac.planning.choices import lowest
from autosac.planning.make_plan import floor, make_plan
from autosac.planning.plans import Plan
from autosac.profiles.given import (
    MakeLoss,
    calibrated_if_present,
    check_make_loss_fn,
    check_names,
)
from autosac.profiles.profile import Profile, profile
from autosac.profiles.restricting import restricted
from autosac.profiles.traced_step import TracedStep
from autosac.progress import Advance, progress_bar
from autosac.quantities import parse_bytes, whole_number
from autosac.results.rows import Row, figures_of
from autosac.results.sweeps import Sweep
from autosac.step.marks import Marks, marks_of
from autosac.summaries import Summarized, Summary

MakeInputs = Callable[[int], Any]

_MOST = 2**16  # samples; a step whose memory does not grow has no largest batch
_MOST_TRIALS = 16  # of sizes whose throughput is looked at
_GROWTH = 4  # of a size that fits, to the next one
_GUESSES = 1  # that may leave more than half of the sizes before they are halved
_IN_LOSS = "in the loss"  # as `failures.explanation` names the place
_OF_ONE_SIZE = (
    " A loss that holds the targets of one batch is none for other sizes: pass"
    " `make_loss_fn`, a function of the inputs that returns it."
)
_MOST_KEPT = 4  # profiles at a time


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BatchSize(Summarized):
    """A batch size, and the plan that trains it under the budget.

    Attributes:
        batch_size: The size.
        plan: Its plan.
        samples_per_s: Predicted throughput with it.
        trials: A row for each size that was looked at, in their order, with its floor;
            the axis is ``batch_size``. Sizes that were planned for have times.
    """

    batch_size: int
    plan: Plan
    samples_per_s: float
    trials: Sweep

    def summary(self) -> Summary:
        """The size, its throughput, its plan."""
        of_plan = self.plan.summary()
        facts = (
            ("batch", f"{self.batch_size} samples, {self.samples_per_s:.3g} a second"),
            ("tried", ", ".join(str(row.cell["batch_size"]) for row in self.trials)),
        )
        return Summary(
            title="Batch size", facts=(*facts, *of_plan.facts), tables=of_plan.tables
        )


def max_batch_size(
    model: torch.nn.Module,
    make_inputs: MakeInputs,
    *,
    memory_budget: int | str,
    make_loss_fn: MakeLoss | None = None,
    most: int = _MOST,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    progress: bool | None = None,
    **options: Any,
) -> BatchSize:
    """Find the largest batch that fits a budget under any plan.

    Some sizes are traced and their least feasible budgets found, by interpolation;
    the next larger size was seen not to fit. A batch is taken to need no less memory
    than a smaller one.

    Where model and inputs are present, a real step of each of these sizes runs, as
    `calibrate` says, without a plan: far above the budget, where so much is free.

    Args:
        model: As in `profile`.
        make_inputs: Batch size -> inputs, as in `profile`.
        memory_budget: As in `plan`.
        make_loss_fn: Inputs -> loss function, if it depends on them (targets).
        most: Largest size to look at.
        ac_units: The only modules that may be AC units, as in `plan`.
        fsdp_units: FSDP units, around which no module may be one, as in `plan`.
        progress: Show a bar on the standard error stream; None for only on a terminal.
        options: As in `profile`.

    Raises:
        Interrupted: Ctrl-C was pressed; its ``done`` has the trials made by then.
        InfeasibleBudgetError: Not even one sample fits.
        ValueError: The largest size to look at fits.
    """
    check_names(options, max_batch_size)
    given = _given(ac_units, fsdp_units)
    steps = _Steps(model, make_inputs, make_loss_fn, options, memory_budget, given)
    with steps.watched(progress):
        return _found(steps, _largest(steps, most))


def best_batch_size(
    model: torch.nn.Module,
    make_inputs: MakeInputs,
    *,
    memory_budget: int | str,
    make_loss_fn: MakeLoss | None = None,
    sizes: Iterable[int] | None = None,
    most: int = _MOST,
    ac_units: Marks | None = None,
    fsdp_units: Marks | None = None,
    progress: bool | None = None,
    **options: Any,
) -> BatchSize:
    """Find the batch size of best predicted throughput under a budget.

    Larger batches use a device better, until recomputation eats the gain. Without
    `sizes`, powers of two up to the largest feasible batch are planned for, then sizes
    between the best one and its neighbours, at most 16 in all: a heuristic, the best
    of `BatchSize.trials`. Of equally fast sizes the smallest is taken.

    Args:
        model: As in `max_batch_size`, like what is not named here.
        make_inputs: Batch size -> inputs.
        memory_budget: As in `plan`.
        make_loss_fn: Inputs -> loss function.
        sizes: The only ones to compare.
        most: Largest size to look at.
        ac_units: The only modules that may be AC units, as in `plan`.
        fsdp_units: FSDP units, around which no module may be one, as in `plan`.
        progress: Show a bar on the standard error stream; None for only on a terminal.
        options: As in `profile`.

    Raises:
        Interrupted: Ctrl-C was pressed; its ``done`` has the trials made by then.
        InfeasibleBudgetError: None of the sizes fits.
        ValueError: `sizes` is empty or names a size below 1; or as `max_batch_size`.
    """
    check_names(options, best_batch_size)
    given = _given(ac_units, fsdp_units)
    steps = _Steps(model, make_inputs, make_loss_fn, options, memory_budget, given)
    wanted = None if sizes is None else _distinct(sizes)
    with steps.watched(progress):
        if wanted is not None:
            for size in wanted:
                steps.throughput(size)
        else:
            largest = _largest(steps, most)
            for size in {1 << k for k in range(largest.bit_length())} | {largest}:
                steps.throughput(size)
            _refine(steps)
        best = steps.best()
        # Planning for what does not fit says why.
        return _found(steps, (wanted or [1])[0] if best is None else best)


_Given = tuple[Marks | None, Marks | None]  # AC units, FSDP units


def _given(ac_units: Marks | None, fsdp_units: Marks | None) -> _Given:
    """Units that the user gives, to be read once for each size."""
    first = None if ac_units is None else marks_of(ac_units)
    return first, None if fsdp_units is None else marks_of(fsdp_units)


class _Steps:
    """The step of a model at every batch size that was asked for.

    Attributes:
        budget_bytes: The budget; shares are of the device's memory.
        trials: What is known of each size.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        make_inputs: MakeInputs,
        make_loss_fn: MakeLoss | None,
        options: dict[str, Any],
        memory_budget: int | str,
        given: _Given,
    ) -> None:
        check_make_loss_fn(make_loss_fn, options)
        if not callable(make_inputs):
            raise ArgumentError(
                "`make_inputs` must be a function of a batch size that makes inputs, as"
                f" in `lambda size: tokens[:size]`, got {type(make_inputs).__name__}."
            )
        self._model = model
        self._make_inputs = make_inputs
        self._make_loss_fn = make_loss_fn
        self._options = options
        self._given = given
        self._profiles: dict[int, Profile] = {}
        self._floors: dict[int, int] = {}
        self._advance: Advance = lambda: None
        self.trials: dict[int, Row] = {}
        total = None
        if isinstance(memory_budget, str) and "%" in memory_budget:
            total = self._profile(1).device.memory_bytes
        self.budget_bytes = parse_bytes(memory_budget, total_bytes=total)

    @contextmanager
    def watched(self, progress: bool | None) -> Iterator[None]:
        """Show how many sizes were looked at, and keep the trials if interrupted."""
        try:
            with progress_bar("Looking at batch sizes", None, show=progress) as advance:
                self._advance = advance
                yield
        except KeyboardInterrupt as stop:
            what = f"{len(self.trials)} batch sizes were looked at"
            raise Interrupted(self.table(), what) from stop

    def table(self) -> Sweep:
        """The trials, in the order of their sizes."""
        rows = tuple(self.trials[size] for size in sorted(self.trials))
        return Sweep(axes=("batch_size",), rows=rows)

    def _profile(self, size: int) -> Profile:
        """Modelled profile of a batch size; the last few are kept."""
        if size not in self._profiles:
            inputs = self._make_inputs(size)
            options = dict(self._options)
            if self._make_loss_fn is not None:
                options["loss_fn"] = self._make_loss_fn(inputs)
            while len(self._profiles) >= _MOST_KEPT:
                del self._profiles[next(iter(self._profiles))]
            self._profiles[size] = self._traced(inputs, options)
        return self._profiles[size]

    def _traced(self, inputs: Any, options: dict[str, Any]) -> Profile:
        try:
            return profile(self._model, inputs, **options)
        except TraceError as error:
            has_loss = self._make_loss_fn is None and options.get("loss_fn") is not None
            if not has_loss or _IN_LOSS not in str(error):
                raise
            raise TraceError(f"{error}{_OF_ONE_SIZE}") from error

    def modelled_floor(self, size: int) -> int:
        """Floor of a batch size, before anything is measured for it."""
        if size not in self._floors:
            traced = restricted(self._profile(size), *self._given)
            lowest_bytes = traced.peak_bytes(lowest(traced))
            self._floors[size] = traced.budget_for(lowest_bytes)
            self._advance()
        return self._floors[size]

    def measured(self, size: int) -> Profile:
        """Profile of a batch size, calibrated where the model lies if it is there."""
        traced = self._profile(size)
        if not traced.calibrated:
            traced = self._profiles[size] = calibrated_if_present(traced)
        traced = restricted(traced, *self._given)
        if size not in self.trials:
            floor_bytes = floor(traced)
            self.trials[size] = Row(
                cell={"batch_size": size},
                status="feasible" if floor_bytes <= self.budget_bytes else "infeasible",
                budget_bytes=self.budget_bytes,
                floor_bytes=floor_bytes,
                baseline_peak_bytes=traced.baseline_peak_bytes,
                planned_for=traced.device.name,
                calibrated=traced.calibrated,
            )
        return traced

    def fits(self, size: int) -> bool:
        """Whether any plan for a batch size fits the budget."""
        if size not in self.trials:
            self.measured(size)
        return self.trials[size].feasible

    def throughput(self, size: int) -> None:
        """Plan for a batch size, if it fits, and note its throughput."""
        traced = self.measured(size)
        if self.trials[size].status == "feasible":
            plan = make_plan(traced, self.budget_bytes, dry_run=False)
            self.trials[size] = replace(
                self.trials[size],
                **figures_of(plan),
                bound_ms=plan.bound_ms,
                samples_per_s=self.samples_per_s(size, traced, plan),
            )
            self._advance()

    def samples_per_s(self, size: int, profile: TracedStep, plan: Plan) -> float:
        """Samples per second of a step: micro-steps, then the optimizer once."""
        accumulate: int = self._options.get("accumulate", 1)
        optimizer_ms = sum(
            ms
            for op, ms in zip(profile.tape.ops, profile.op_ms, strict=True)
            if op.phase == "optimizer"
        )
        step_ms = accumulate * (plan.step_ms - optimizer_ms) + optimizer_ms
        return 1000.0 * accumulate * size / step_ms

    def best(self) -> int | None:
        """The size of best throughput, the smallest of equal ones."""
        rates = {size: row.samples_per_s or 0.0 for size, row in self.trials.items()}
        planned = [size for size in sorted(rates) if rates[size] > 0.0]
        return max(planned, key=lambda size: rates[size], default=None)


def _distinct(sizes: Any) -> list[int]:
    """The sizes to try, smallest first.

    Raises:
        ArgumentError: There are none, or some are no sizes.
    """
    wanted = "a list of positive whole numbers"
    check_kind(sizes, Iterable, name="sizes", wanted=wanted)
    distinct = {whole_number(size, name="sizes") for size in sizes}
    if not distinct:
        raise ArgumentError(f"`sizes` must be {wanted}, and is empty.")
    return sorted(distinct)


def _largest(steps: _Steps, most: int) -> int:
    """The largest size that fits; the next one does not."""
    whole_number(most, name="most")
    low, high = 0, 1
    while steps.modelled_floor(high) <= steps.budget_bytes:
        if high >= most:
            raise ArgumentError(
                f"A batch of `most`={most} fits {steps.budget_bytes} bytes;"
                " raise `most`."
            )
        low, high = high, min(_beyond(steps, low, high), _GROWTH * high, most)
    before = 0  # what `low` was, if it moved last
    width, guesses = high - low, 0
    while high - low > 1:
        if 2 * (high - low) <= width:
            width, guesses = high - low, 0
        middle = (low + high) // 2
        if low and guesses < _GUESSES:
            middle = _between(steps, low, high)
            if before:  # Floors bend upwards: the line to `high` ends too early.
                middle = max(middle, _beyond(steps, before, low))
            middle = min(max(middle, low + 1), high - 1)
        guesses += 1
        if steps.modelled_floor(middle) <= steps.budget_bytes:
            before, low = low, middle
        else:
            before, high = 0, middle
    # What is measured may need a little more or less than what was modelled.
    size = max(low, 1)
    while size > 1 and not steps.fits(size):
        size -= 1
    while size < most and steps.fits(size):
        if not steps.fits(size + 1):
            break
        size += 1
    return size


def _beyond(steps: _Steps, low: int, high: int) -> int:
    """A size that should be the first one not to fit, from two that do."""
    if low == 0:
        return 2 * high
    rise = steps.modelled_floor(high) - steps.modelled_floor(low)
    left = steps.budget_bytes - steps.modelled_floor(high)
    if rise <= 0:
        return 2 * high
    return high + max(1, left * (high - low) // rise + 1)


def _between(steps: _Steps, low: int, high: int) -> int:
    """Batch size at which the line between two floors meets the budget."""
    rise = steps.modelled_floor(high) - steps.modelled_floor(low)
    return low + (steps.budget_bytes - steps.modelled_floor(low)) * (high - low) // rise


def _refine(steps: _Steps) -> None:
    """Look between the best size and its neighbours while that may pay."""
    while (best := steps.best()) is not None:
        planned = sorted(s for s, row in steps.trials.items() if row.step_ms)
        place = planned.index(best)
        gaps = [
            (other, (best + other) // 2)
            for other in (
                *planned[max(place - 1, 0) : place],
                *planned[place + 1 : place + 2],
            )
            if abs(other - best) > 1
        ]
        if not gaps or len(planned) >= _MOST_TRIALS:
            return
        for _, middle in gaps:
            steps.throughput(middle)


def _found(steps: _Steps, size: int) -> BatchSize:
    traced = steps.measured(size)
    try:
        plan = make_plan(traced, steps.budget_bytes)
    except InfeasibleBudgetError as error:
        error.args = (f"At batch size {size}: {error}",)
        raise
    return BatchSize(
        batch_size=size,
        plan=plan,
        samples_per_s=steps.samples_per_s(size, traced, plan),
        trials=steps.table(),
    )
