"""How large a batch can be, and which size is fastest: by planning, not by running."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autosac.errors import InfeasibleBudgetError
from autosac.planning.make_plan import floor, make_plan
from autosac.planning.plans import Plan
from autosac.profiles.given import calibrated_if_present
from autosac.profiles.profile import Profile, TracedStep, profile
from autosac.quantities import parse_bytes
from autosac.step.training_step import LossFn

MakeInputs = Callable[[int], Any]
MakeLoss = Callable[[Any], LossFn]
_MOST = 2**16  # samples; a step whose memory does not grow has no largest batch
_MOST_TRIALS = 16  # of sizes whose throughput is looked at
_MOST_KEPT = 4  # profiles at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """What one batch size takes.

    Attributes:
        batch_size: The size.
        floor_bytes: Least feasible budget.
        step_ms: Time of a micro-step under the budget, recomputation included, and of
            the optimizer step; None if it was not planned for.
        samples_per_s: Predicted throughput, likewise.
    """

    batch_size: int
    floor_bytes: int
    step_ms: float | None = None
    samples_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """A batch size, and the plan that trains it under the budget.

    Attributes:
        batch_size: The size.
        plan: Its plan.
        samples_per_s: Predicted throughput with it.
        trials: All sizes that were traced, in their order.
    """

    batch_size: int
    plan: Plan
    samples_per_s: float
    trials: tuple[BatchTrial, ...]


def max_batch_size(
    model: torch.nn.Module,
    make_inputs: MakeInputs,
    *,
    memory_budget: int | str,
    make_loss_fn: MakeLoss | None = None,
    most: int = _MOST,
    **options: Any,
) -> BatchSize:
    """Find the largest batch that fits a budget under any plan.

    Some sizes are traced and their least feasible budgets found, by interpolation;
    the next larger size was seen not to fit. A batch is taken to need no less memory
    than a smaller one.

    Args:
        model: As in `profile`.
        make_inputs: Batch size -> inputs, as in `profile`.
        memory_budget: As in `plan`.
        make_loss_fn: Inputs -> loss function, if it depends on them (targets).
        most: Largest size to look at.
        options: As in `profile`.

    Raises:
        InfeasibleBudgetError: Not even one sample fits.
        ValueError: The largest size to look at fits.
    """
    steps = _Steps(model, make_inputs, make_loss_fn, options)
    budget_bytes = steps.budget_bytes(memory_budget)
    size = _largest(steps, budget_bytes, most)
    return _found(steps, budget_bytes, size)


def best_batch_size(
    model: torch.nn.Module,
    make_inputs: MakeInputs,
    *,
    memory_budget: int | str,
    make_loss_fn: MakeLoss | None = None,
    sizes: Iterable[int] | None = None,
    most: int = _MOST,
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
        options: As in `profile`.

    Raises:
        InfeasibleBudgetError: None of the sizes fits.
        ValueError: `sizes` is empty or names a size below 1; or as `max_batch_size`.
    """
    steps = _Steps(model, make_inputs, make_loss_fn, options)
    budget_bytes = steps.budget_bytes(memory_budget)
    if sizes is not None:
        wanted = sorted(set(sizes))
        if not wanted or wanted[0] < 1:
            raise ValueError(f"`sizes` must be positive numbers, got {wanted}.")
        for size in wanted:
            steps.throughput(size, budget_bytes)
    else:
        largest = _largest(steps, budget_bytes, most)
        for size in {1 << k for k in range(largest.bit_length())} | {largest}:
            steps.throughput(size, budget_bytes)
        _refine(steps, budget_bytes)
        wanted = [1]
    best = steps.best()
    # Planning for what does not fit says why.
    return _found(steps, budget_bytes, wanted[0] if best is None else best)


class _Steps:
    """The step of a model at every batch size that was asked for.

    Attributes:
        trials: What is known of each size.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        make_inputs: MakeInputs,
        make_loss_fn: MakeLoss | None,
        options: dict[str, Any],
    ) -> None:
        if make_loss_fn is not None and "loss_fn" in options:
            raise TypeError("Pass either `loss_fn` or `make_loss_fn`.")
        self._model = model
        self._make_inputs = make_inputs
        self._make_loss_fn = make_loss_fn
        self._options = options
        self._profiles: dict[int, Profile] = {}
        self._floors: dict[int, int] = {}
        self.trials: dict[int, BatchTrial] = {}

    def _profile(self, size: int) -> Profile:
        """Modelled profile of a batch size; the last few are kept."""
        if size not in self._profiles:
            inputs = self._make_inputs(size)
            options = dict(self._options)
            if self._make_loss_fn is not None:
                options["loss_fn"] = self._make_loss_fn(inputs)
            while len(self._profiles) >= _MOST_KEPT:
                del self._profiles[next(iter(self._profiles))]
            self._profiles[size] = profile(self._model, inputs, **options)
        return self._profiles[size]

    def modelled_floor(self, size: int) -> int:
        """Floor of a batch size, before anything is measured for it."""
        if size not in self._floors:
            self._floors[size] = floor(self._profile(size))
        return self._floors[size]

    def measured(self, size: int) -> Profile:
        """Profile of a batch size, calibrated where the model lies if it is there."""
        traced = self._profile(size)
        if not traced.calibrated:
            traced = self._profiles[size] = calibrated_if_present(traced)
        if size not in self.trials:
            self.trials[size] = BatchTrial(batch_size=size, floor_bytes=floor(traced))
        return traced

    def fits(self, size: int, budget_bytes: int) -> bool:
        """Whether any plan for a batch size fits a budget."""
        if size not in self.trials:
            self.measured(size)
        return self.trials[size].floor_bytes <= budget_bytes

    def budget_bytes(self, memory_budget: int | str) -> int:
        """A budget in bytes; shares are of the device's memory."""
        if isinstance(memory_budget, str) and "%" in memory_budget:
            total = self.measured(1).device.memory_bytes
            return parse_bytes(memory_budget, total_bytes=total)
        return parse_bytes(memory_budget)

    def throughput(self, size: int, budget_bytes: int) -> None:
        """Plan for a batch size, if it fits, and note its throughput."""
        traced = self.measured(size)
        trial = self.trials[size]
        if trial.floor_bytes <= budget_bytes and trial.step_ms is None:
            plan = make_plan(traced, budget_bytes, dry_run=False)
            self.trials[size] = BatchTrial(
                batch_size=size,
                floor_bytes=trial.floor_bytes,
                step_ms=plan.step_ms,
                samples_per_s=self.samples_per_s(size, traced, plan),
            )

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
        rates = {t.batch_size: t.samples_per_s or 0.0 for t in self.trials.values()}
        planned = [size for size in sorted(rates) if rates[size] > 0.0]
        return max(planned, key=lambda size: rates[size], default=None)


def _largest(steps: _Steps, budget_bytes: int, most: int) -> int:
    """The largest size that fits; the next one does not."""
    low, high = 0, 1
    while steps.modelled_floor(high) <= budget_bytes:
        if high >= most:
            raise ValueError(
                f"A batch of `most`={most} fits {budget_bytes} bytes; raise `most`."
            )
        low, high = high, min(_beyond(steps, low, high, budget_bytes), most)
    halve = False
    while high - low > 1:
        middle = (low + high) // 2
        if not halve and low:
            middle = min(
                max(_between(steps, low, high, budget_bytes), low + 1), high - 1
            )
        width = high - low
        if steps.modelled_floor(middle) <= budget_bytes:
            low = middle
        else:
            high = middle
        halve = 2 * (high - low) > width
    # What is measured may need a little more or less than what was modelled.
    size = max(low, 1)
    while size > 1 and not steps.fits(size, budget_bytes):
        size -= 1
    while size < most and steps.fits(size, budget_bytes):
        if not steps.fits(size + 1, budget_bytes):
            break
        size += 1
    return size


def _beyond(steps: _Steps, low: int, high: int, budget_bytes: int) -> int:
    """A size that should be the first one not to fit, from two that do."""
    if low == 0:
        return 2 * high
    rise = steps.modelled_floor(high) - steps.modelled_floor(low)
    left = budget_bytes - steps.modelled_floor(high)
    if rise <= 0:
        return 2 * high
    return high + max(1, left * (high - low) // rise + 1)


def _between(steps: _Steps, low: int, high: int, budget_bytes: int) -> int:
    """Batch size at which the line between two floors meets the budget."""
    rise = steps.modelled_floor(high) - steps.modelled_floor(low)
    return low + (budget_bytes - steps.modelled_floor(low)) * (high - low) // rise


def _refine(steps: _Steps, budget_bytes: int) -> None:
    """Look between the best size and its neighbours while that may pay."""
    while (best := steps.best()) is not None:
        planned = sorted(s for s, trial in steps.trials.items() if trial.step_ms)
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
            steps.throughput(middle, budget_bytes)


def _found(steps: _Steps, budget_bytes: int, size: int) -> BatchSize:
    traced = steps.measured(size)
    try:
        plan = make_plan(traced, budget_bytes)
    except InfeasibleBudgetError as error:
        error.args = (f"At batch size {size}: {error}",)
        raise
    return BatchSize(
        batch_size=size,
        plan=plan,
        samples_per_s=steps.samples_per_s(size, traced, plan),
        trials=tuple(steps.trials[size] for size in sorted(steps.trials)),
    )
