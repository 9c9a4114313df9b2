"""Autocast that a step runs under, where its plan is for another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from autosac.step.arguments import autocast_name, warn


class PlannedAutocast:
    """Compares the autocast of each step's forward with the planned one; warns once.

    Args:
        planned: As `autosac.Plan.autocast`.

    Attributes:
        differs: That of the latest step does.
    """

    def __init__(self, planned: str | None) -> None:
        self._planned = planned
        self._has_warned = self.differs = False

    def watching(
        self, device_type: str, *, is_wrapped: bool
    ) -> contextlib.AbstractContextManager[None] | None:
        """The model's forward runs inside of what is returned, if anything is.

        Args:
            device_type: Of the model.
            is_wrapped: Its ``forward`` was replaced before the plan was applied, as
                Accelerate does to open autocast in there.
        """
        if self._planned is None:
            return None
        present = _present(device_type)
        self.differs = present not in (None, self._planned)
        if not self.differs:
            return None
        if is_wrapped:
            return self._inside(present, device_type)
        self._say(present, device_type)
        return None

    @contextlib.contextmanager
    def _inside(self, present: str | None, device_type: str) -> Iterator[None]:
        """Compare the autocast of the first module that is called in there."""

        def meet(*_: Any) -> None:
            nonlocal present
            present = _present(device_type)
            self.differs = present != self._planned
            hook.remove()

        hook = register_module_forward_pre_hook(meet)
        try:
            yield
        finally:
            hook.remove()
        if self.differs:
            self._say(present, device_type)

    def _say(self, present: str | None, device_type: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        fix = f"Plan again with `autocast`={present!r}"
        if not present:
            fix = (
                f"Run forward and loss under `torch.autocast({device_type!r},"
                f" dtype=torch.{self._planned})`, or plan again without `autocast`"
            )
        warn(
            f"The model's forward runs {_in_words(present)}, and its plan is for a step"
            f" {_in_words(self._planned)}: the planned peak does not hold. {fix}."
        )


def _present(device_type: str) -> str | None:
    """The type that autocast is on for, '' if it is off; None if there is none."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    if not torch.is_autocast_enabled(device_type):
        return ""
    return autocast_name(torch.get_autocast_dtype(device_type))


def _in_words(name: str | None) -> str:
    return f"under autocast to {name}" if name else "without autocast"
