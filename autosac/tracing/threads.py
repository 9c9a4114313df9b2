"""Modules that run in another thread than the step: no mode sees their ops there."""

from __future__ import annotations

import threading

from autosac.errors import TraceError


class OneThread:
    """Knows the thread of a step, and the first module that runs in another one."""

    def __init__(self) -> None:
        self.own = threading.get_ident()
        self.elsewhere: str | None = None

    def note(self, fqn: str) -> None:
        """A module begins to run."""
        if self.elsewhere is None and threading.get_ident() != self.own:
            self.elsewhere = fqn

    def check(self) -> None:
        """Refuse a step that ran a module in another thread.

        Raises:
            TraceError: Names the module.
        """
        if self.elsewhere is None:
            return
        module = f"`{self.elsewhere}`" if self.elsewhere else "The model itself"
        raise TraceError(
            f"{module} runs in another thread than the step, where no trace sees what"
            " it does: call it without `threading` and thread pools, in the thread of"
            " the training loop. (Backward runs wherever PyTorch lets it.)"
        )
