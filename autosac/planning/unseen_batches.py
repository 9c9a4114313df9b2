"""What becomes of a batch that a plan was not made for."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from autosac.checkpointing.batch_variants import Variants
from autosac.errors import ArgumentError, PlanMismatchError
from autosac.planning.larger_batches import LASTING, grown_peak, most_frugal_choice
from autosac.planning.plan_data import OnMismatch, PlanData, Replan
from autosac.planning.spelling import spell_out
from autosac.profiles.traced_step import TracedStep
from autosac.quantities import format_bytes
from autosac.solving.incumbents import far_bytes
from autosac.solving.rules_of_thumb import Choice
from autosac.step.arguments import warn
from autosac.step.batch_signatures import BatchSignature
from autosac.units.matching import chosen_by

_Plan = TypeVar("_Plan", bound=PlanData)
ON_MISMATCH = ("recompute", "replan", "raise")
_MUCH = 8.0  # times what was traced: a larger batch, as long as none is known


def check_on_mismatch(on_mismatch: Any) -> None:
    """Refuse an `on_mismatch` that is no way to treat an unseen batch.

    Raises:
        ArgumentError: Names them.
    """
    if on_mismatch not in ON_MISMATCH:
        raise ArgumentError(
            f"`on_mismatch`={on_mismatch!r} must be one of"
            f" {', '.join(map(repr, ON_MISMATCH))}."
        )


@dataclass(frozen=True, eq=False)
class UnseenBatches:
    """Treats batches that a plan was not made for, as `on_mismatch` says.

    Attributes:
        on_mismatch: How: see `autosac.plan`.
        budget_bytes: The plan's budget.
        replan: Plans for a batch, and where more is trained; None if nothing is left of
            what that takes.
        may_add: The model may follow other policies than it was planned with.
    """

    on_mismatch: OnMismatch
    budget_bytes: int
    replan: Replan | None
    may_add: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> UnseenBatches:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "replan": None}  # it holds the user's own objects

    def __call__(
        self,
        model: torch.nn.Module | None,
        signature: BatchSignature,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        variants: Variants,
    ) -> int | list[PlanData]:
        """Treat an unseen batch: see `autosac.checkpointing.batch_variants.Unseen`.

        Raises:
            PlanMismatchError: It is to be raised.
        """
        plans: list[Any] = variants.plans
        if not any(plan.signatures for plan in plans):
            return 0  # of an old file
        if self.on_mismatch == "raise":
            raise PlanMismatchError(
                f"A batch with {signature} was not planned for, only"
                f" {_planned(plans)}. {self._fix(signature)}, or with"
                " `on_mismatch`='recompute' or 'replan'."
            )
        covering = [
            (planned.num_elements, number)
            for number, plan in enumerate(plans)
            for planned in plan.signatures
            if planned.covers(signature)
        ]
        anew = self.on_mismatch == "replan" or signature.thawed
        if anew and self.replan is not None and model:
            plan = self.replan(model, *arguments)
            plan = replace(plan, signatures=(signature,), traced=None)
            gc.collect()  # what is traced refers to itself, and keeps the batch alive
            if not covering or plan.peak_bytes > self.budget_bytes:
                what = "It was planned for anew"
                self._say(what, plan.peak_bytes, signature, variants, is_planned=True)
            return [plan]
        if covering:
            return min(covering)[1]
        can_add = self.may_add and model is not None
        return self._recomputed(can_add, signature, variants)

    def _recomputed(
        self, can_add: bool, signature: BatchSignature, variants: Variants
    ) -> int | list[PlanData]:
        """Plans for a batch that is larger than all others.

        The plan of the largest of these if the budget is ample: nothing of a step grows
        faster than by the square of its batch's elements. Else that of least memory.
        """
        all_plans: list[Any] = variants.plans
        plans = [plan for plan in all_plans if plan.num_batches]
        branches = largest(plans)
        growth = _growth(branches[0].signatures[0], signature)
        most = [_likely_peak(plan, signature, growth**2) for plan in branches]
        is_ample = all(m is not None and m <= self.budget_bytes for m in most)
        what = "It follows the plan of the largest"
        if not is_ample and can_add:
            branches = tuple(map(most_frugal, branches))
            if not any(plan.is_streamed for plan in branches):
                what = "All that saves memory is recomputed"
        between = _known_growth(plans, branches[0].signatures[0], growth)
        least, most = (
            [_likely_peak(plan, signature, times) for plan in branches]
            for times in ((between, between) if between else (growth, growth**2))
        )
        peak_bytes = max((peak for peak in least if peak is not None), default=None)
        most_bytes = max((peak for peak in most if peak is not None), default=None)
        self._say(what, peak_bytes, signature, variants, most_bytes=most_bytes)
        if not can_add or is_ample:
            return int(variants.plans.index(branches[0]))
        return [replace(p, signatures=(signature,), num_batches=0) for p in branches]

    def _say(
        self,
        what: str,
        peak_bytes: int | None,
        signature: BatchSignature,
        variants: Variants,
        *,
        most_bytes: int | None = None,
        is_planned: bool = False,
    ) -> None:
        """Warn once of a batch that is larger than all that were planned for.

        Again only of one whose peak is above the budget and above all that were said.
        `most_bytes` is what that may come to, if it is not known how it grows.
        """
        most_bytes = most_bytes or peak_bytes
        known_bytes = most_bytes or 0
        enough_bytes = max(self.budget_bytes, variants.said_bytes)
        if "larger" in variants.said and known_bytes <= enough_bytes:
            return
        variants.said.add("larger")
        variants.said_bytes = max(variants.said_bytes, known_bytes)
        plans: list[Any] = variants.plans
        planned_for: list[BatchSignature] = [s for p in plans for s in p.signatures]
        which = "not one of those"
        if not any(one.covers(signature) for one in planned_for):
            is_like = any(one.is_like(signature) for one in planned_for)
            which = "larger than all" if is_like else "unlike all"
        peak = "is not known"
        if peak_bytes is not None and most_bytes is not None:
            about = "" if is_planned else "about "
            keeps = "above" if peak_bytes > self.budget_bytes else "perhaps above"
            if most_bytes <= self.budget_bytes:
                keeps = "within"
            if peak_bytes < most_bytes:
                about += f"{peak_bytes} bytes ({format_bytes(peak_bytes)}) if memory"
                about += " grows as the batch does, and if as its square, as scores of"
                about += " attention do, "
            peak = (
                f"will be {about}{most_bytes} bytes ({format_bytes(most_bytes)}),"
                f" {keeps} the budget of {self.budget_bytes}"
                f" ({format_bytes(self.budget_bytes)})"
            )
        warn(
            f"A batch with {signature} is {which} that were planned for"
            f" ({_planned(plans)}). {what}; its peak {peak}. {self._fix(signature)}."
        )

    def _fix(self, signature: BatchSignature) -> str:
        if signature.thawed:
            return "Plan again while these are trained"
        return f"Plan with it {'among' if self.may_add else 'for'} `inputs`"


def largest(plans: Sequence[_Plan]) -> tuple[_Plan, ...]:
    """The plans for the largest batch, one for each branch, highest peak first."""
    by_peak = sorted(plans, key=lambda plan: -plan.peak_bytes)
    most = max(by_peak, key=lambda plan: plan.signatures[0].num_elements)
    return tuple(p for p in by_peak if p.signatures[0] == most.signatures[0])


def most_frugal(plan: PlanData) -> PlanData:
    """The plan of least memory for larger steps; itself, if nothing else is known."""
    if plan.frugal is not None:
        return plan.frugal
    if plan.traced is None:
        return plan
    if plan.is_streamed:
        return plan  # which takes less than any choice
    choice = most_frugal_choice(plan.traced, _MUCH)
    own_bytes = grown_peak(plan.traced, _choice_of(plan, plan.traced), _MUCH)
    if grown_peak(plan.traced, choice, _MUCH) >= own_bytes:
        return plan
    return replace(
        plan,
        op_policies=spell_out(plan.traced, choice),
        peak_bytes=plan.traced.peak_bytes(choice),
        composition=plan.traced.composition(choice),
        offloaded_bytes=far_bytes(choice),
    )


def _choice_of(plan: PlanData, traced: TracedStep) -> Choice:
    return chosen_by(traced.tape, traced.choosable, plan.op_policies)


def _planned(plans: Sequence[PlanData]) -> str:
    texts = list(dict.fromkeys(str(p.signatures[0]) for p in plans if p.num_batches))
    rest = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + rest


def _growth(planned: BatchSignature, signature: BatchSignature) -> float:
    """How many times as many elements a batch has as the planned one; at least 1."""
    return max(signature.num_elements / max(planned.num_elements, 1), 1.0)


def _known_growth(
    plans: Sequence[PlanData], planned: BatchSignature, growth: float
) -> float | None:
    """How many times as large what does not last is in a batch of more elements.

    The plain steps of the two largest batches tell how much of it grows in proportion,
    and how much with the square; None of one batch alone.

    Args:
        plans: Those for batches.
        planned: The largest batch of them.
        growth: How many times as many elements the new one has.
    """
    changing_bytes = {
        plan.signatures[0].num_elements: plan.baseline_peak_bytes - _lasting(plan)
        for plan in plans
        if plan.signatures[0].is_like(planned)
    }
    if len(changing_bytes) == 1:
        return None
    (less, lower), (more, upper) = sorted(changing_bytes.items())[-2:]
    if not 0 < lower < upper:
        return growth
    # upper = a + b, of which a grows in proportion, b with the square
    ratio = less / more
    squared = (upper * ratio - lower) / (upper * ratio * (1 - ratio))
    squared = min(max(squared, 0.0), 1.0)
    return (1 - squared) * growth + squared * growth**2


def _lasting(plan: PlanData) -> int:
    return sum(plan.composition.get(category, 0) for category in LASTING)


def _likely_peak(
    plan: PlanData, signature: BatchSignature, growth: float
) -> int | None:
    """Peak of a larger batch under a plan, untraced; None if more than sizes differ."""
    planned = plan.signatures[0]
    if not planned.is_like(signature) or not planned.num_elements:
        return None
    if plan.traced is None:
        changing_bytes = plan.peak_bytes - _lasting(plan)
        return _lasting(plan) + round(changing_bytes * growth)
    choice = _choice_of(plan, plan.traced)
    more_bytes = plan.peak_bytes - grown_peak(plan.traced, choice, 1.0)  # of blocks
    return grown_peak(plan.traced, choice, growth) + max(more_bytes, 0)
