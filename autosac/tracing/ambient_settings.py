"""Under which global settings of PyTorch each op of a step runs.

A ``with`` in forward may set the default type, the precision of products or the number
of threads for a few ops. A unit is rerun op by op in backward, without the ``with``.
"""

from __future__ import annotations

from typing import Any

from autosac._compat_settings import settings
from autosac.step.tape import FORWARD_PHASES


class AmbientSettings:
    """Numbers the settings that a step runs under.

    Args:
        device_type: Where it runs.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._phase = ""
        self._last: tuple[Any, ...] = ()
        self._number = 0

    def number(self, phase: str) -> int:
        """Number of those that an op of a phase runs under.

        Only forward and loss are looked at op by op.
        """
        if phase == self._phase and phase not in FORWARD_PHASES:
            return self._number
        self._phase = phase
        present = settings(self._device_type)
        if present != self._last:
            self._last = present
            self._number = self._numbers.setdefault(present, len(self._numbers))
        return self._number
