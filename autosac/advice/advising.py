"""What else would lower the peak of a step: each change traced and planned anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from autosac.advice.sharded_steps import SHARDED, sharded_row
from autosac.advice.step_changes import (
    STATE_OFFLOADED,
    Change,
    MakeLoss,
    changes_of,
    offloaded_states,
)
from autosac.errors import ArgumentError, AutosacError, InfeasibleBudgetError
from autosac.planning.make_plan import floor, make_plan, may_offload
from autosac.profiles.given import (
    check_make_loss_fn,
    check_names,
    is_plan,
    profile_of,
    with_loss,
)
from autosac.profiles.profile import Profile
from autosac.profiles.traced_step import TracedStep
from autosac.profiles.tracing_again import traced_again
from autosac.quantities import format_bytes, format_ms, parse_bytes
from autosac.results.rows import Row, figures_of, reason_of
from autosac.results.sweeps import Sweep
from autosac.step.batches import first_batch
from autosac.summaries import Summary, Table

AS_IT_IS = "as it is"
_OFFLOAD = "offload"
_ORDER = ("same", "rounded", "other")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Advice(Sweep):
    """A row for each change that lowers the peak, the cheapest first; a sequence.

    The first row is the step as it is. ``cell`` says what changes ("change"), what
    becomes of losses and weights ("results": the "same" bits, "rounded" otherwise, or
    "other" ones) and what to write ("how"). ``step_ms`` is for the same samples in
    every row (with FSDP2 of a rank, each of which has them), ``baseline_peak_bytes``
    the peak without recomputation, ``floor_bytes`` the least of any plan,
    ``peak_bytes`` that of the plan for the budget.

    Attributes:
        not_simulated: Change -> why no step of it could be traced; nothing is said
            of it.
    """

    not_simulated: dict[str, str]

    def summary(self) -> Summary:
        """The changes that help, then those of which nothing is known."""
        changes = Sweep.summary(self).tables[0]
        others = Table(
            heads=("not simulated", "because"),
            rows=tuple(self.not_simulated.items()),
            left=frozenset({0, 1}),
        )
        return Summary(title="Advice", tables=(changes, others))

    def text_table(self) -> list[tuple[str, ...]]:
        """Heads, then each row, as people read them."""
        heads = ("change", "results", "plain peak", "floor", "under budget", "step")
        return [heads, *(_words(row) for row in self.rows)]


def _words(row: Row) -> tuple[str, ...]:
    peak = "does not fit" if row.status == "infeasible" else ""
    if row.peak_bytes is not None:
        peak = format_bytes(row.peak_bytes)
    return (
        str(row.cell["change"]),
        str(row.cell["results"]),
        format_bytes(row.baseline_peak_bytes or 0),
        format_bytes(row.floor_bytes or 0),
        peak,
        "" if row.step_ms is None else format_ms(row.step_ms),
    )


def advise(
    model: Any,
    inputs: Any = None,
    *,
    memory_budget: int | str | None = None,
    make_loss_fn: MakeLoss | None = None,
    **options: Any,
) -> Advice:
    """Say what else would lower the peak of a step, beside recomputation.

    Each change is traced, calibrated and planned like the step itself; what cannot be
    is not claimed. Looked at are the optimizer (in backward, fused, without foreach),
    gradients set to None, cross entropy by chunks, MLPs in tiles, the batch in
    micro-steps, bf16 autocast, parameters and states in bf16, offload of activations or
    of the optimizer's state, FSDP2 on 2, 4 or 8 GPUs of a known node, and together
    those on one GPU but offload that keep results the same but for rounding.

    Args:
        model: The model, or a `Profile` of it (then `options` are its own).
        inputs: As in `profile`.
        memory_budget: Plan each change for it; None for floors and plain peaks alone.
        make_loss_fn: Inputs -> ``loss_fn``, for losses that hold the targets of a
            batch: smaller batches need it.
        options: As in `profile`.

    Raises:
        ArgumentError: The profile knows no model, as after loading or pickling; or an
            argument cannot be meant.
    """
    check_names(options, advise)
    check_make_loss_fn(make_loss_fn, options)
    if isinstance(inputs, DataLoader):
        inputs = first_batch(inputs)
    if not isinstance(model, TracedStep):  # its own loss is known
        options = with_loss(model, inputs, options, make_loss_fn)
    now = None if is_plan(model) else profile_of(model, inputs, options)
    if not isinstance(now, Profile):
        raise ArgumentError(
            "`advise` traces the model anew: pass the model, or the `Profile` that"
            " `autosac.profile` returns."
        )
    budget_bytes = None
    if memory_budget is not None:
        total = now.device.memory_bytes
        budget_bytes = parse_bytes(memory_budget, total_bytes=total)
    own = Change(
        name=AS_IT_IS, how="", results="same", options={},
        inputs=(now.step.args, now.step.kwargs),
    )  # fmt: skip
    first = _row(own, now, budget_bytes)
    rows: dict[str, Row] = {}
    why: dict[str, str] = {}
    helpful: list[Change] = []
    for change in changes_of(now, make_loss_fn):
        if _looked_at(change, now, budget_bytes, first, rows, why):
            helpful.append(change)
    if (offloaded := _offloaded(own, now, budget_bytes, first)) is not None:
        rows[_OFFLOAD] = offloaded
    try:
        far_states = offloaded_states(now)
    except AutosacError as error:
        why[STATE_OFFLOADED] = reason_of(error)
    else:
        if far_states is not None:
            _looked_at(far_states, now, budget_bytes, first, rows, why)
    try:
        sharded = sharded_row(now, budget_bytes)
    except AutosacError as error:
        why[SHARDED] = reason_of(error)
    else:
        if _is_lower(sharded, first):
            rows[SHARDED] = sharded
    for change in _together(helpful, rows):
        _looked_at(change, now, budget_bytes, first, rows, why)
    return Advice(
        axes=("change", "results", "how"),
        rows=(first, *sorted(rows.values(), key=_cost)),
        not_simulated=why,
    )


def _offloaded(
    own: Change, now: Profile, budget_bytes: int | None, first: Row
) -> Row | None:
    """The row of the step as it is, planned with offload; None if that buys nothing."""
    if not now.may_offload:
        return None
    how = "autosac.plan(..., offload=True)"
    change = replace(own, name=_OFFLOAD, how=how)
    row = _row(change, may_offload(now), budget_bytes)
    assert row.floor_bytes and first.floor_bytes
    is_faster = row.step_ms is not None and (
        first.step_ms is None or row.step_ms < first.step_ms
    )
    return row if is_faster or row.floor_bytes < first.floor_bytes else None


def _looked_at(
    change: Change,
    now: Profile,
    budget_bytes: int | None,
    first: Row,
    rows: dict[str, Row],
    why: dict[str, str],
) -> bool:
    """Add the row of a change if it lowers the peak; whether it does."""
    try:
        with change.around():
            step = traced_again(
                now,
                model=None if change.make_model is None else change.make_model(),
                inputs=change.inputs,
                options=change.options,
            )
            row = _row(change, step, budget_bytes)
    except (AutosacError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        why[change.name] = reason_of(error)
        return False
    if not _is_lower(row, first):
        return False
    rows[change.name] = row
    return True


def _is_lower(row: Row, first: Row) -> bool:
    """Whether a change lowers the floor, or the peak without recomputation."""
    assert row.floor_bytes and first.floor_bytes
    assert row.baseline_peak_bytes and first.baseline_peak_bytes
    return (
        row.floor_bytes < first.floor_bytes
        or row.baseline_peak_bytes < first.baseline_peak_bytes
    )


def _row(change: Change, step: Profile, budget_bytes: int | None) -> Row:
    """What a change takes."""
    row = Row(
        cell={"change": change.name, "results": change.results, "how": change.how},
        status="feasible",
        budget_bytes=budget_bytes,
        step_ms=_same_samples(change, step, 0.0),
        floor_bytes=floor(step),
        baseline_peak_bytes=step.baseline_peak_bytes,
        planned_for=step.device.name,
        calibrated=step.calibrated,
    )
    if budget_bytes is None:
        return row
    try:
        plan = make_plan(step, budget_bytes)
    except InfeasibleBudgetError as error:
        reason = reason_of(error)
        return replace(row, status="infeasible", step_ms=None, reason=reason)
    figures = figures_of(plan)
    recompute_ms = plan.recompute_ms * change.micro_steps
    figures.update(
        recompute_ms=recompute_ms, step_ms=_same_samples(change, step, recompute_ms)
    )
    return replace(row, **figures, bound_ms=plan.bound_ms * change.micro_steps)


def _same_samples(change: Change, step: Profile, recompute_ms: float) -> float:
    """Time for the samples of one step as it is: the optimizer steps once."""
    pairs = zip(step.tape.ops, step.op_ms, strict=True)
    optimizer_ms = sum(ms for op, ms in pairs if op.phase == "optimizer")
    rest_ms = step.baseline_ms - optimizer_ms
    return rest_ms * change.micro_steps + optimizer_ms + recompute_ms


def _cost(row: Row) -> tuple[bool, int, float]:
    """What fits first, then by results, then by time."""
    fits = row.status != "infeasible"
    ms = row.step_ms if row.step_ms is not None else float("inf")
    return not fits, _ORDER.index(str(row.cell["results"])), ms


def _together(helpful: list[Change], rows: dict[str, Row]) -> Iterator[Change]:
    """All that keep results but for rounding and take no further steps, together."""
    compatible: list[Change] = []
    for change in sorted(helpful, key=lambda one: rows[one.name].floor_bytes or 0):
        taken = {name for one in compatible for name in one.options}
        free = taken.isdisjoint(change.options) and change.micro_steps == 1
        if free and change.results != "other":
            compatible.append(change)
    if len(compatible) > 1:
        both, *others = compatible
        for other in others:
            both = both.and_also(other)
        yield both
