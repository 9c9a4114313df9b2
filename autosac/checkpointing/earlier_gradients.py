"""Gradients that are there as a step begins, where its plan has none."""

from __future__ import annotations

import torch

from autosac._compat_distributed import kept_parameters, local
from autosac.quantities import format_bytes
from autosac.step.arguments import warn

_MOST_LOOKS = 16  # at the first steps, of which one is a second micro-step
_LITTLE = 0.01  # of the parameters: so little is not said


class EarlierGradients:
    """Looks whether gradients of earlier steps are there as a step begins; warns once.

    Args:
        planned: They are there in the planned step, too.
        num_calls: How often a step calls the model.
    """

    def __init__(self, *, planned: bool, num_calls: int) -> None:
        self._looks_left = 0 if planned else _MOST_LOOKS
        self._num_calls = num_calls
        self._calls = 0

    def look(self, model: torch.nn.Module) -> None:
        """The model is called."""
        is_first = self._calls % self._num_calls == 0
        self._calls += 1
        if not self._looks_left or not is_first:
            return
        self._looks_left -= 1
        # None that somebody has swapped for another tensor.
        parameters = {
            id(p): p
            for p in kept_parameters(model)
            if p.is_leaf and (p.requires_grad or p.grad is not None)
        }
        left = {i for i, p in parameters.items() if p.grad is not None}
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        num_bytes = sum(local(one).nbytes for one in gradients)
        if num_bytes <= _LITTLE * sum(local(p).nbytes for p in parameters.values()):
            return
        self._looks_left = 0
        said = (
            f"Gradients of an earlier step ({format_bytes(num_bytes)}) are there as"
            " forward begins, and the plan has none then: the peak may be higher by as"
            " much."
        )
        if len(left) < len(parameters):
            of = next((n for n, p in model.named_parameters() if id(p) in left), "")
            warn(
                f"{said} They are of {len(left)} of {len(parameters)} parameters, such"
                f" as `{of}`: `optimizer.zero_grad()` leaves those that the optimizer"
                " does not train. Call `model.zero_grad()` after each step, or freeze"
                " them by `requires_grad_(False)`."
            )
        else:
            warn(
                f"{said} Call `optimizer.zero_grad()` before forward. Or plan with"
                " `gradients_in_forward=True`, if it comes between forward and"
                " backward; with `accumulate`, if the gradients of several batches add"
                " up; or with `keeps_gradients=True`, if they are set to zero in place."
            )
