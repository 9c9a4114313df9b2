"""What the callbacks share: plan the step of a training loop, say so, watch inputs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from autosac.errors import InfeasibleBudgetError
from autosac.planning.planning import calibrated_if_present, make_plan
from autosac.planning.plans import Plan
from autosac.planning.profiling import profile
from autosac.pytrees import tensors_in
from autosac.quantities import format_bytes, format_ms, parse_bytes

# Losses, norms and counts that a loop keeps over a step: some scalars, and a GPU's
# allocator hands out 512 bytes for each.
_SCALARS_BYTES = 16 * 512
_Shapes = dict[str, tuple[int, ...]]


@contextlib.contextmanager
def forward_replaced(model: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Let a model run another ``forward`` for a while."""
    own = model.__dict__.get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def plan_loss(
    model: torch.nn.Module,
    inputs: Any,
    *,
    memory_budget: int | str,
    num_other_batches: int,
    **options: Any,
) -> Plan:
    """Plan the step of a model whose ``forward`` returns the loss.

    Args:
        model: The model.
        inputs: What it is called with.
        memory_budget: Of all, in bytes or as text.
        num_other_batches: Batches like this one that the loop holds meanwhile.
        options: As in `profile`.

    Raises:
        InfeasibleBudgetError: No plan fits; the figures are those of all.
    """
    made = calibrated_if_present(
        profile(model, inputs, loss_fn=_same, **options)  # `forward` gives the loss
    )
    held_bytes = num_other_batches * sum(t.nbytes for t in tensors_in(inputs))
    held_bytes += _SCALARS_BYTES
    budget_bytes = parse_bytes(memory_budget, total_bytes=made.device.memory_bytes)
    try:
        return make_plan(made, budget_bytes - held_bytes)
    except InfeasibleBudgetError as error:
        error.args = (
            f"Of `memory_budget`={memory_budget!r}, {held_bytes} bytes"
            f" ({format_bytes(held_bytes)}) are for batches and figures that the"
            f" training loop keeps besides. {error}",
        )
        error.budget_bytes += held_bytes
        error.lowest_peak_bytes += held_bytes
        raise


def _same(loss: torch.Tensor) -> torch.Tensor:
    return loss


def checkpointing_already(model: torch.nn.Module) -> str:
    """The first module with gradient checkpointing in Transformers' manner, or ''."""
    for fqn, module in model.named_modules():
        if module.__dict__.get("gradient_checkpointing") is True:
            return fqn or type(module).__name__
    return ""


def summary(plan: Plan) -> str:
    """What a plan does, in a few lines."""
    lines = [
        f"autosac: this step needs {format_bytes(plan.peak_bytes)} of"
        f" {format_bytes(plan.budget_bytes)}, and"
        f" {format_bytes(plan.baseline_peak_bytes)} without a plan."
    ]
    if plan.policy:
        lines.append(
            f"{len(plan.policy)} modules recompute activations, which takes"
            f" {format_ms(plan.recompute_ms)} of {format_ms(plan.step_ms)} a step on"
            f" {plan.device}; `.plan` of the callback says which."
        )
    else:
        lines.append("Nothing has to be recomputed.")
    return "\n".join(lines)


def shapes_of(inputs: Any) -> _Shapes:
    """Shape of every tensor of a batch by its place in it."""
    return {
        keystr(path) or "the batch": tuple(leaf.shape)
        for path, leaf in tree_flatten_with_path(_plain(inputs))[0]
        if isinstance(leaf, torch.Tensor)
    }


def _plain(value: Any) -> Any:
    """Mappings of any kind as dicts."""
    if hasattr(value, "items"):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    return value


class InputWatch:
    """Warns once when a batch is larger than the one that was planned for.

    Args:
        inputs: The batch that the plan is for.
    """

    def __init__(self, inputs: Any) -> None:
        self.planned = shapes_of(inputs)
        self.warned = False

    def look(self, inputs: Any) -> None:
        """Compare a batch with the planned one; a smaller one is fine."""
        if self.warned:
            return
        for place, shape in shapes_of(inputs).items():
            planned = self.planned.get(place)
            if planned is None or not _fits(shape, planned):
                self._warn(place, shape, planned)
                return

    def _warn(
        self, place: str, shape: tuple[int, ...], planned: tuple[int, ...] | None
    ) -> None:
        self.warned = True
        was = "was not in the batch" if planned is None else f"had shape {planned} in"
        warnings.warn(
            f"A batch has {place} of shape {shape}; it {was} the batch that was planned"
            " for, the first one. The memory budget may not be kept: pad the inputs to"
            " one size, or begin with the largest batch.",
            stacklevel=4,
        )


def _fits(shape: tuple[int, ...], planned: tuple[int, ...]) -> bool:
    return len(shape) == len(planned) and all(map(int.__le__, shape, planned))
