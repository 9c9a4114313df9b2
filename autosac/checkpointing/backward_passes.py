"""Backward passes of a training loop, held against the planned one.

That goes once through each graph, which ends with it, before the model is called again;
and it runs outside of autocast. The graph of the loss is held against the planned one
as backward comes to the model (`planned_loss.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from autosac import _compat_autograd, _compat_dispatch
from autosac.checkpointing.kept_outputs import Headroom, is_looked_at
from autosac.checkpointing.planned_loss import PlannedLoss
from autosac.pytrees import tensors_in
from autosac.step.arguments import warn

_MOST_FUNCTIONS = 16  # of outputs


class BackwardPasses:
    """Looks at the graphs of some of a model's calls; warns once.

    Args:
        may_keep: Some backward pass of the planned step keeps its graph, or that is not
            known,
        may_call_again: or the step calls the model several times.
        has_units: The plan has AC units.
    """

    def __init__(
        self, *, may_keep: bool, may_call_again: bool, has_units: bool
    ) -> None:
        self._lets_go = not may_keep
        self._calls_once = not may_call_again
        self._has_units = has_units
        self._num_calls = 0
        self._is_done = self._knows_loss = False
        self._calls_again = False  # the latest step that was looked at
        self._last: weakref.ref[_Graph] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": None}

    def begin(self) -> None:
        """Forward begins."""
        self._num_calls += 1
        if self._last is None or not self._calls_once:
            return
        last = self._last()
        self._calls_again = last is not None and not last.has_begun
        if not self._calls_again:
            return
        self._say(
            "The model is called again before backward has gone through its earlier"
            " call, and the planned step calls it once: what both save is there"
            " together, and the planned peak does not hold. Plan a module whose"
            " `forward` makes all the calls between two backward passes, or go backward"
            " after each."
        )

    def end(self, output: Any, planned: Callable[[], Headroom | None]) -> None:
        """Forward has returned its output.

        Args:
            output: The output.
            planned: Says what the plan has room for; None if that cannot be said.
        """
        self._last = None
        is_said = self._is_done and self._knows_loss
        if is_said or not is_looked_at(self._num_calls):
            return
        is_open = not (self._knows_loss or self._calls_again)  # or of several calls
        room = planned() if is_open else None
        first = _compat_autograd.next_sequence_nr()
        loss = None
        if room is not None and "loss" in room.nbytes:
            loss = PlannedLoss(room, first)
        graph = _Graph(self, self._num_calls, loss)
        made = {tensor.grad_fn for tensor in tensors_in((output,))}
        functions = [function for function in made if function is not None]
        for function in functions[:_MOST_FUNCTIONS]:
            function.register_prehook(graph.begin)
        self._last = weakref.ref(graph)

    def meet(self, number: int, loss: PlannedLoss | None) -> None:
        """Backward begins at an output of the model.

        Args:
            number: Of the call that made it.
            loss: What is planned of its loss; None if it is not to be looked at.
        """
        if loss is not None and number == self._num_calls and not self._knows_loss:
            self._knows_loss = loss.look()
        if self._lets_go and _compat_dispatch.keeps_graph():
            self._say(
                "Backward keeps its graph, by `retain_graph` or `create_graph`, and the"
                " planned step does not: what is saved or recomputed stays, and the"
                " planned peak does not hold. Add up the losses and go backward once,"
                " without `retain_graph`; or plan a module whose `forward` does it as"
                " the training does."
            )
        if self._has_units and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            self._say(
                "Backward runs inside of `torch.autocast`, which keeps copies of"
                " weights, and the planned step leaves that before: the peak may be"
                " higher by them. Call `backward` after the `with` block."
            )

    def _say(self, message: str) -> None:
        if not self._is_done:
            self._is_done = True
            warn(message)


class _Graph:
    """The graph of one call, which keeps this as long as it lives.

    Attributes:
        has_begun: Backward has come to an output of the call.
    """

    def __init__(
        self, passes: BackwardPasses, number: int, loss: PlannedLoss | None
    ) -> None:
        self._passes, self._number, self._loss = passes, number, loss
        self.has_begun = False

    def begin(self, _: Any) -> None:
        """Backward begins at an output."""
        loss = None if self.has_begun else self._loss
        self.has_begun = True
        self._passes.meet(self._number, loss)
