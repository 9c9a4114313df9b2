"""Under which global settings of PyTorch each op and each module of forward runs.

A ``with`` in forward may set the default type, the precision of products or the number
of threads for a few ops. A unit is rerun op by op in backward, without what it sets
itself, but under what was set as it began (`autosac.checkpointing.op_records`).
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

    def number(self, phase: str) -> int:
        """Number of those that a phase runs under now; 0 behind forward."""
        if phase not in FORWARD_PHASES:
            return 0
        present = settings(self._device_type)
        return self._numbers.setdefault(present, len(self._numbers))
