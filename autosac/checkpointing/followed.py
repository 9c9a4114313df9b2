"""What the units of a model ask of its plans."""

from __future__ import annotations

from typing import Protocol


class Followed(Protocol):
    """Knows which of a model's plans is followed.

    Attributes:
        rerun: Number of the plan that a rerun follows, if one runs modules.
        is_step: The model runs forward for a step that is planned.
        is_running: The model runs forward.
    """

    rerun: int | None
    is_step: bool
    is_running: bool

    def warn_of_call(self, fqn: str) -> None:
        """A unit that forward calls once is called while the model is not."""
