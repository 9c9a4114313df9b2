"""A loss that takes more than the planned one: told as backward comes to the model."""

from __future__ import annotations

from dataclasses import dataclass

from autosac import _compat_autograd
from autosac.checkpointing.kept_outputs import Headroom
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.step.loss_graphs import loss_memory

_LITTLE = 0.01  # of the planned peak: so little is not said


@dataclass(frozen=True)
class PlannedLoss:
    """What is planned of the loss of a step.

    Attributes:
        room: What the plan has room for.
        first: Number of the first autograd function that the model did not make.
    """

    room: Headroom
    first: int

    def look(self) -> bool:
        """Backward comes to the model: warn if its loss takes more than there is room.

        Returns:
            Whether it warned.
        """
        loss = loss_memory(_compat_autograd.backward_roots(), self.first)
        if loss is None:
            return False
        room = self.room.nbytes
        took = {"loss": loss.peak_bytes, "handed": loss.handed_bytes}
        over = {name: took[name] - room[name] for name in took}
        most = max(over, key=lambda name: over[name])
        if over[most] <= _LITTLE * self.room.peak_bytes:
            return False
        warn(
            "The loss, or what else runs on the model's output, takes about"
            f" {format_bytes(took[most])} by its autograd graph, most of it for"
            f" `{loss.most_of}`, and the plan has room for {format_bytes(room[most])}:"
            " it is not the planned loss, and the peak may be above the budget. Plan"
            " again with the `loss_fn` that the training has."
        )
        return True
