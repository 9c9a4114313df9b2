"""Real training steps with and without a plan: peak, time, and every bit."""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from autosac.errors import ArgumentError, AutosacError, TraceError, UnsupportedError
from autosac.progress import progress_bar
from autosac.pytrees import held_tensors, module_tensors
from autosac.quantities import format_bytes, format_ms
from autosac.step import copies_on_write
from autosac.step.arguments import (
    check_loss_fn,
    check_maker,
    check_numbers,
    optimizer_for,
    read_dtype,
    short,
)
from autosac.step.optimizer_state import hook_tensors, optimizer_tensors
from autosac.step.random_streams import random_streams_kept, seed_streams
from autosac.step.reaching import reached
from autosac.step.training_step import (
    LossFn,
    normalize_inputs,
    training_step,
)
from autosac.storages import storage_bytes
from autosac.summaries import Summarized, Summary, Table
from autosac.tracing.failures import quoted
from autosac.tracing.learned import Learned
from autosac.tracing.own_state import own_generators_kept, own_state_kept
from autosac.verification.measuring import (
    State,
    capture_state,
    differences,
    measure_peak,
)
from autosac.verification.planned_steps import (
    warn_of_another_batch,
    warn_of_another_loss,
    warn_of_another_optimizer,
)
from autosac.verification.recipes import MakeOptimizer, Recipe

_R = TypeVar("_R")
_ONLY_HERE = 2  # references: of a local name, and of an argument
_MOST_COPIED = 2**24  # bytes of the user's own that each run copies, unseen
_SETTLED = 4  # steps in which plans learn, and look at what the loop holds


class AppliesToModel(Protocol):
    """What `verify` needs of a plan."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    def apply(self, model: torch.nn.Module) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(Summarized):
    """What real steps showed about a plan.

    Attributes:
        baseline_peak_bytes: Measured peak of the steps without the plan.
        measured_peak_bytes: Measured peak of the steps with it.
        predicted_peak_bytes: What the plan said.
        budget_bytes: The plan's budget.
        baseline_step_ms: Median time of a step without the plan; NaN without any.
        step_ms: Median time of a step with it, likewise.
        differences: The first entries of the training state after the last step
            that are not bit-identical; empty when all are.
    """

    baseline_peak_bytes: int
    measured_peak_bytes: int
    predicted_peak_bytes: int
    budget_bytes: int
    baseline_step_ms: float
    step_ms: float
    differences: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether loss, gradients, parameters, buffers, ... agree in every bit."""
        return not self.differences

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak keeps the budget."""
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def prediction_error(self) -> float:
        """Predicted over measured peak, less one: negative if understated."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1

    def summary(self) -> Summary:
        """The measured peak against budget and prediction; time; the state's bits."""
        verdict = "kept" if self.within_budget else "EXCEEDED"
        facts = [
            ("budget", f"{format_bytes(self.budget_bytes)} {verdict}"),
            (
                "peak",
                f"{format_bytes(self.measured_peak_bytes)} measured,"
                f" {format_bytes(self.predicted_peak_bytes)} predicted"
                f" ({100 * self.prediction_error:+.2f} %),"
                f" {format_bytes(self.baseline_peak_bytes)} without the plan",
            ),
        ]
        slowdown = self.step_ms / self.baseline_step_ms - 1
        if not math.isnan(slowdown):
            facts.append(
                (
                    "step",
                    f"{format_ms(self.step_ms)} measured,"
                    f" {format_ms(self.baseline_step_ms)} without the plan"
                    f" ({100 * slowdown:+.1f} %)",
                )
            )
        same = "bit-identical after the last step"
        facts.append(("state", same if self.identical else "DIFFERS"))
        differing = Table(
            heads=("differs",), rows=tuple((d,) for d in self.differences)
        )
        return Summary(title="Verification", facts=tuple(facts), tables=(differing,))


def verify(
    plan: AppliesToModel,
    make_model: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], Any],
    *,
    make_optimizer: MakeOptimizer | str | None = None,
    loss_fn: LossFn | None = None,
    steps: int = 2,
    seed: int = 0,
    timing_rounds: int = 3,
    extra_bytes: int | None = None,
    autocast: torch.dtype | str | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    gradients_in_forward: bool = False,
    keeps_gradients: bool = False,
    progress: bool | None = None,
) -> Verification:
    """Train a model without and with the plan, and compare.

    The model is built anew for each run, from the same seed, and only one is alive
    at a time. Random number generators of PyTorch, Python and NumPy, and what the loss
    and modules write to besides the model, such as the centre that a loss keeps, are
    left as they were found: each run begins with what is there now.

    Args:
        plan: The plan to check.
        make_model: Builds the model on its device, in the mode it trains in.
        make_inputs: Makes the batch, in any form that `autosac.plan` takes.
        make_optimizer: Builds the optimizer of a model; None means no optimizer. A
            class of ``torch.optim``, or its name, builds it of the parameters.
        loss_fn: Maps the output to a scalar; None means `default_loss`.
        steps: Steps before the states are compared; the highest peak counts.
            Optimizer state exists from the second on.
        seed: Seeds model, inputs and steps.
        timing_rounds: Timed steps of each kind, taken in turn; 0 for no times (NaN).
        extra_bytes: Device memory held by ``loss_fn`` alone, such as targets; None
            for that of all tensors that it reaches by its closure, defaults, globals
            and attributes. Not used on a GPU, where the measured peak holds everything.
        autocast: As in `profile`.
        accumulate: As in `profile`.
        clip_grad_norm: As in `profile`.
        gradients_in_forward: As in `profile`.
        keeps_gradients: As in `profile`.
        progress: Show a bar on the standard error stream; None for only on a terminal.

    Raises:
        ArgumentError: An argument cannot be meant, such as a ``make_model`` that hands
            out one and the same model each time, or ``steps`` of less than one.
        UnsupportedError: The plan's budget caps what is reserved.
    """
    check_loss_fn(loss_fn)
    if not hasattr(plan, "apply"):
        raise ArgumentError(
            f"`plan` must be what `autosac.plan` returns, got {type(plan).__name__}."
        )
    check_maker(make_model, name="make_model")
    check_maker(make_inputs, name="make_inputs")
    check_numbers(accumulate, clip_grad_norm)
    if getattr(plan, "cap", "allocated") == "reserved":
        raise UnsupportedError(
            "The plan's budget caps what PyTorch reserves, and `verify` measures what"
            " it hands out: plan with `cap`='allocated' to verify what is saved."
        )
    recipe = Recipe(
        make_model=make_model,
        make_inputs=make_inputs,
        make_optimizer=make_optimizer,
        loss_fn=loss_fn,
        steps=steps,
        seed=seed,
        timing_rounds=timing_rounds,
        extra_bytes=extra_bytes,
        autocast=read_dtype(autocast),
        accumulate=accumulate,
        clip_grad_norm=clip_grad_norm,
        gradients_in_forward=gradients_in_forward,
        keeps_gradients=keeps_gradients,
    )
    warn_of_another_loss(plan, loss_fn)
    return verify_each((plan,), recipe, progress=progress)[0]


def verify_each(
    plans: Sequence[AppliesToModel], recipe: Recipe, *, progress: bool | None = False
) -> tuple[Verification, ...]:
    """Train a model without any plan and with each of several, and compare."""
    again = max(recipe.timing_rounds - 1, 0)
    num_runs = (1 + len(plans)) * (1 + again)
    bar = progress_bar("Training to compare", num_runs, show=progress, at_once=True)
    with random_streams_kept(), bar as advance:
        recipe = replace(recipe, largest_write=_largest_write(recipe))
        baseline, state = _measure(recipe, None)
        advance()
        measurements, differing = [], []
        for plan in plans:  # one state beside the baseline's at a time
            planned, state_of_plan = _measure(recipe, plan)
            measurements.append(planned)
            differing.append(differences(state, state_of_plan))
            del state_of_plan
            advance()
        for _ in range(again):
            baseline.times_ms.append(_time(recipe, None))
            advance()
            for plan, planned in zip(plans, measurements, strict=True):
                planned.times_ms.append(_time(recipe, plan))
                advance()
    return tuple(
        Verification(
            baseline_peak_bytes=baseline.peak_bytes,
            measured_peak_bytes=planned.peak_bytes,
            predicted_peak_bytes=plan.peak_bytes,
            budget_bytes=plan.budget_bytes,
            baseline_step_ms=_median_ms(baseline),
            step_ms=_median_ms(planned),
            differences=differing_entries,
        )
        for plan, planned, differing_entries in zip(
            plans, measurements, differing, strict=True
        )
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    peak_bytes: int
    times_ms: list[float]


def _built(recipe: Recipe) -> torch.nn.Module:
    """The model of a run."""
    gc.collect()  # the model before this one may hang in a cycle
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # a training begins with nothing reserved
    seed_streams(recipe.seed)
    model = recipe.make_model()
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "`make_model` must return a torch.nn.Module, and it returns"
            f" {short(model)}."
        )
    return model


def _built_anew(recipe: Recipe) -> torch.nn.Module:
    """The model of a run, untouched so far, of which each call builds another one.

    Raises:
        ArgumentError: The next call hands out the same one.
    """
    model = _built(recipe)
    if sys.getrefcount(model) <= _ONLY_HERE:
        return model
    earlier = weakref.ref(model)  # held by others, or by its own parts
    del model
    again = _built(recipe)
    if earlier() is again:
        raise ArgumentError(
            "`make_model` returns one and the same model each time: let it build the"
            " model anew on each call, as `lambda: Model(config)` does."
        )
    return again


class _Run:
    """One model in training, with or without a plan."""

    def __init__(self, recipe: Recipe, plan: AppliesToModel | None) -> None:
        self.model = _built_anew(recipe) if plan is None else _built(recipe)
        if plan is not None:
            plan.apply(self.model)
        self.optimizer = optimizer_for(recipe.make_optimizer, self.model)
        seed_streams(recipe.seed)
        self.args, self.kwargs = normalize_inputs(recipe.make_inputs())
        self.recipe = recipe
        self.is_planned = plan is not None
        self.device = self._find_device()
        seed_streams(recipe.seed)

    def clear_gradients(self) -> None:
        if not self.recipe.gradients_in_forward:  # then the step itself does
            # Of the model: gradients of parameters the optimizer lacks count as well.
            self.model.zero_grad(set_to_none=not self.recipe.keeps_gradients)
        for leaf in held_tensors((self.args, self.kwargs)):
            if leaf.is_leaf:
                leaf.grad = None  # training has another batch in each step

    def step(self) -> torch.Tensor:
        try:
            return training_step(
                self.model,
                self.args,
                self.kwargs,
                loss_fn=self.recipe.loss_fn,
                optimizer=self.optimizer,
                autocast=self.recipe.autocast,
                accumulate=self.recipe.accumulate,
                clip_grad_norm=self.recipe.clip_grad_norm,
                gradients_in_forward=self.recipe.gradients_in_forward,
                keeps_gradients=self.recipe.keeps_gradients,
            )
        except (AutosacError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the user's code raises
            if self.is_planned:
                raise
            raise TraceError(
                f"The step fails without a plan, too: {type(error).__name__} says"
                f" {quoted(error)} Pass the loss, the optimizer and a batch of the step"
                " that was planned, as `loss_fn` and so on."
            ) from error

    def timed_step_ms(self) -> float:
        self.clear_gradients()
        self._synchronize()
        start = time.perf_counter()
        self.step()
        self._synchronize()
        return (time.perf_counter() - start) * 1000

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors that live from step to step, and the inputs."""
        for parameter in self.model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.model.buffers()
        yield from module_tensors(self.model)  # such as tables that a step has made
        yield from optimizer_tensors(self.optimizer)
        yield from hook_tensors(self.optimizer)
        yield from held_tensors((self.args, self.kwargs))
        if self.recipe.loss_fn is not None and self.recipe.extra_bytes is None:
            reach = reached(self.recipe.loss_fn)
            yield from (*reach.tensors, *held_tensors(reach.modules, in_objects=False))

    def state_bytes(self) -> int:
        """What the optimizer keeps, without gradients that it holds, and hooks."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors = [*optimizer_tensors(self.optimizer), *gradients]
        all_bytes = storage_bytes(tensors, device=self.device)
        return all_bytes - storage_bytes(gradients, device=self.device)

    def _find_device(self) -> torch.device:
        tensor = next(self.tensors(), None)
        if tensor is None or tensor.device.type == "meta":
            contents = "no tensor at all" if tensor is None else "a meta tensor"
            raise ArgumentError(
                "`make_model` must build a model on a real device, to run real"
                f" steps; it has {contents}."
            )
        return tensor.device

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _alone(use: Callable[[_Run, AppliesToModel | None], _R]) -> Callable[..., _R]:
    """A run that leaves all of the user's that it may change as found, for the next."""

    def kept(recipe: Recipe, plan: AppliesToModel | None) -> _R:
        makers = (recipe.make_model, recipe.make_inputs, recipe.make_optimizer)
        with own_generators_kept(*makers, recipe.loss_fn):
            run = _Run(recipe, plan)
            with _own_state_kept(run, Learned()):
                copies_on_write.copy_all(recipe.largest_write)  # no mode looks at ops
                return use(run, plan)

    return kept


def _own_state_kept(run: _Run, learned: Learned) -> ExitStack:
    kinds = set(map(type, run.model.modules()))  # they name globals
    return own_state_kept(run.recipe.loss_fn, *kinds, memo={}, learned=learned)


def _largest_write(recipe: Recipe) -> int | None:
    """Bytes of the largest tensor of the user's that steps write to, if some are large.

    Weights of another model, or data, are but read, and may be too large for a copy.
    """
    with own_state_kept(recipe.loss_fn, memo={}, learned=Learned()):
        if not copies_on_write.are_larger(_MOST_COPIED):
            return None
    learned, makers = Learned(), (recipe.make_model, recipe.make_inputs)
    with own_generators_kept(*makers, recipe.make_optimizer, recipe.loss_fn):
        run = _Run(recipe, None)
        with _own_state_kept(run, learned), copies_on_write.Watching():
            for _ in range(recipe.steps):
                run.step()
                run.clear_gradients()
    return learned.largest_write or 0


@_alone
def _measure(run: _Run, plan: AppliesToModel | None) -> tuple[_Measured, State]:
    recipe = run.recipe
    warn_of_another_batch(plan, run.model, run.args, run.kwargs)

    def earlier_steps() -> None:
        for _ in range(recipe.steps - 1):
            run.step()
            run.clear_gradients()

    loss, peak_bytes = measure_peak(
        run.step,
        device=run.device,
        persistent_bytes=recipe.extra_bytes or 0,
        held=run.tensors,
        warm_up=earlier_steps,
        counts_warm_up=True,
    )
    warn_of_another_optimizer(plan, run.state_bytes())
    state = capture_state(run.model, run.optimizer, loss)
    times_ms = [_settled_ms(run, recipe.steps)] if recipe.timing_rounds else []
    return _Measured(peak_bytes, times_ms), state


def _median_ms(measured: _Measured) -> float:
    return statistics.median(measured.times_ms) if measured.times_ms else math.nan


@_alone
def _time(run: _Run, plan: AppliesToModel | None) -> float:
    return _settled_ms(run, 0)


def _settled_ms(run: _Run, num_steps: int) -> float:
    """Time of a step after so many, and more until it is like all later ones."""
    for _ in range(num_steps, _SETTLED):
        run.clear_gradients()
        run.step()
    return run.timed_step_ms()
